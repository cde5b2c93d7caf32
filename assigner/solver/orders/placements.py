"""Placements whose order is free: any number of stages a worker, each with what it rematerialises.

What a placement is worth is the step of a quick list schedule, which keeps what the worker has room for: so the choice
of what to rematerialise is between holding few micro-batches with little recomputing, and many with more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.solver.free.arrangement import Arrangement, cheapest_again, held_stages
from assigner.solver.limits import tuning
from assigner.solver.orders.listing import QUICK, list_schedule
from assigner.solver.orders.tasks import PlacedTasks
from assigner.solver.problem.prices import bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.solver.free.arrangement import Stages
    from assigner.solver.problem.set_memory import Masks, SetMemory


class ListedPricing:
    """The step time with the order that list scheduling gives.

    Args:
        memory: Prices and memory.
        limit: Placements that cannot take less than about this many seconds are not priced.
    """

    one_stage = False

    def __init__(self, memory: SetMemory, limit: float = math.inf) -> None:
        self.memory, self.limit = memory, limit
        self._least_s = math.inf  # of what was priced
        self._known: dict[Stages, Arrangement | None] = {}

    def _load(self, masks: Sequence[int]) -> float:
        """Seconds of the slowest worker's work."""
        table, longest = self.memory.table, 0.0
        for worker, mask in enumerate(masks):
            forward, backward, update = table.forward_s[worker], table.backward_s[worker], table.update_s[worker]
            seconds = sum([table.micro_batches * (forward[i] + backward[i]) + update[i] for i in bits(mask)])
            longest = max(longest, seconds)
        return longest

    def price(self, stages: Stages) -> Arrangement | None:
        """See `Pricing`; stages of one worker that follow each other are one."""
        merged = _merged(stages)
        if merged not in self._known:
            self._known[merged] = self._priced(merged)
        return self._known[merged]

    def _priced(self, stages: Stages) -> Arrangement | None:
        masks = [0] * len(self.memory.table.names)
        for worker, mask in stages:
            masks[worker] |= mask
        if self._load(masks) >= self.limit:
            return None
        best: Arrangement | None = None
        for again in self._rematerialised(stages):
            found = Arrangement(self.memory.table, stages, again, math.inf)
            value = self._step_s(found)
            if value < (math.inf if best is None else best.value_s):
                best = replace(found, value_s=value)
        return best

    def _rematerialised(self, stages: Stages) -> Iterator[Masks]:
        """Choices of what to rematerialise: for all micro-batches in flight, for one a worker, or for one."""
        seen: set[Masks] = set()
        count = self.memory.table.micro_batches
        for depth in dict.fromkeys((count, min(count, len(held_stages(stages))), 1)):
            found = cheapest_again(self.memory, stages, depth)
            if found is not None and found not in seen:
                seen.add(found)
                yield found
                if not any(found):
                    return

    def _step_s(self, found: Arrangement) -> float:
        try:
            tasks = PlacedTasks(found.plan("interleaved"), self.memory.table.problem.cost)
            best = math.inf
            for rule in QUICK:
                orders = list_schedule(tasks, rule)
                best = min(best, tasks.step_s(orders) if orders else math.inf)
                if best > self._least_s * (1 + 4 * tuning.HOT):  # hardly to be taken, whatever the other rules make
                    break
            self._least_s = min(self._least_s, best)
            return best
        except FormatError:  # a link is missing
            return math.inf

    def actions(self, stages: Stages) -> int:
        """See `Pricing`."""
        merged = _merged(stages)
        return 1 if merged in self._known else 2 * self.memory.table.micro_batches * len(merged) + 100


def _merged(stages: Stages) -> Stages:
    """The stages with those joined that follow each other on one worker."""
    found: list[tuple[int, int]] = []
    for worker, mask in stages:
        if found and found[-1][0] == worker:
            found[-1] = worker, found[-1][1] | mask
        else:
            found.append((worker, mask))
    return tuple(found)
