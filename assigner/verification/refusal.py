"""What is said of a model whose partitions compute something else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assigner.errors import MarkingError

if TYPE_CHECKING:
    from assigner.verification.comparing import Difference


def refusal(first: Difference, *, only_recomputed: bool, begins: str | None) -> MarkingError:
    """The error for a model that would train something else.

    Args:
        first: The first value that differs.
        only_recomputed: Without rematerialisation it does not.
        begins: Where it begins; None: that was not found.
    """
    how = (
        "cannot be compared (another shape or type, or only one of them has numbers in some places)"
        if math.isinf(first.largest)
        else f"differs by {first.largest:.3g}, and its largest number is {first.scale:.3g}"
    )
    where = f" of partition {first.item.partition!r}" if first.item.quantity not in ("loss", "output") else ""
    remat = ", where partitions are rematerialised (without, it is right)" if only_recomputed else ""
    beginning = f"; {begins}" if begins else ""
    return MarkingError(
        f"cut into partitions the model computes something else than as it is{remat}: {first.moment},"
        f" {first.item}{where} {how}{beginning}",
        hint=_hint(first, only_recomputed=only_recomputed),
    )


def _hint(first: Difference, *, only_recomputed: bool) -> str:
    if first.item.quantity == "initial value":
        return "the builder must make the same model each time: seed every generator that it draws from"
    if first.item.quantity == "parameter":
        return (
            "the gradients were equal, so it is the optimizer: each worker's sees its own partitions alone; one that"
            " looks at all parameters (a norm over them, a global step size) cannot run so; clip with"
            " pipeline.step(batch, max_norm=...)"
        )
    if only_recomputed:
        return (
            "a recomputed forward must do what the first one did: no history, no counters outside of buffers, no draws"
            ' of its own; or mark it with partition(module, rematerialise="never")'
        )
    return (
        "move what differs into one marked module, or mark a larger one that contains it; partitions share nothing but"
        " the tensors that they hand on"
    )
