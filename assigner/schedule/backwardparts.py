"""Whether backwards may be planned in two parts: where they were measured, and hardly take longer so.

In two parts a backward runs the same products, but finds less in the caches, and its gradients have memory of their
own. Where that costs more than it can bring, no order is offered it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assigner.schedule.cost import CostModel

MOST_LONGER = 0.05
"""Share of a whole backward that its two parts together may take longer than it."""


def may_split(cost: CostModel, partitions: Iterable[str], worker: str, micro_batch: int) -> bool:
    """Whether the backward of a stage may run in two parts.

    Args:
        cost: The prices.
        partitions: The stage's.
        worker: Where they are.
        micro_batch: In samples.

    Raises:
        FormatError: the profile cannot price a partition there.
    """
    whole = apart = 0.0
    for name in partitions:
        price = cost.partition(name, worker, micro_batch)
        if price.parts is None:
            return False
        whole += price.backward_s
        apart += price.parts[0] + price.parts[1]
    return apart <= (1 + MOST_LONGER) * whole
