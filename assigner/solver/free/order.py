"""In which order the workers' stages can run, one stage each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.solver.free.set_prices import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def stages_in_order(
    before: Sequence[int], masks: Sequence[int], choose: Callable[[Sequence[int], int], int] = lambda ready, _: ready[0]
) -> tuple[tuple[int, int], ...] | None:
    """One stage for each worker's positions, in a topological order; None: two of them wait for each other.

    Args:
        before: Per position: the positions whose values it reads.
        masks: Positions of each worker; those of all workers need not be all there are.
        choose: Which comes next of the workers whose stages wait for no other, with so many stages left; the first.
    """
    placed = sum(masks)
    needs = {}
    for worker, mask in enumerate(masks):
        if mask:
            read = 0
            for i in bits(mask):
                read |= before[i]
            needs[worker] = read & placed & ~mask
    done, stages = 0, []
    while needs:
        ready = [worker for worker, need in needs.items() if need & ~done == 0]
        if not ready:
            return None
        chosen = choose(ready, len(needs))
        stages.append((chosen, masks[chosen]))
        done |= masks[chosen]
        del needs[chosen]
    return tuple(stages)
