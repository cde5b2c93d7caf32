"""In which order the workers' stages can run, one stage each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.solver.free.table import bits

if TYPE_CHECKING:
    from collections.abc import Sequence


def stages_in_order(before: Sequence[int], masks: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """One stage for each worker's positions, in a topological order; None: two of them wait for each other.

    Args:
        before: Per position: the positions whose values it reads.
        masks: Positions of each worker; those of all workers need not be all there are.
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
        ready = next((worker for worker, need in needs.items() if need & ~done == 0), None)
        if ready is None:
            return None
        stages.append((ready, masks[ready]))
        done |= masks[ready]
        del needs[ready]
    return tuple(stages)
