"""What fits on a worker that holds several stages, and which partitions it must rematerialise for that.

All stages of a worker share its memory (memory.py). Rematerialising lengthens the stage that holds the partition. With
one stage a worker the least added time is best. With several, time added to one stage may hurt less than time added to
another: every choice is kept that no other one beats in all stages at once.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.limits import tuning
from assigner.solver.problem.memory import HeldPartitions, RematSets
from assigner.solver.problem.prices import bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.problem.memory import LeastRemat
    from assigner.solver.problem.problem import Problem

Masks = tuple[int, ...]
"""A set of positions for each stage of one worker."""


class SetMemory:
    """Memory of a problem's workers, which keep `in_flight` micro-batches at once unless told; None: all of a step."""

    def __init__(self, problem: Problem, micro_batches: int, *, in_flight: int | None = None) -> None:
        self._problem, self._in_flight = problem, in_flight or micro_batches
        self.table = table = problem.prices(micro_batches)
        self._capacity = [worker.tensor_bytes * (1 + tuning.ROUNDING) for worker in problem.workers]
        self._values: dict[int, tuple[int, int, int]] = {}
        for maker, value, reader, gradient in table.edges:
            _, readers, graded = self._values.get(value, (maker, 0, 0))
            self._values[value] = (maker, readers | 1 << reader, graded | (1 << reader if gradient else 0))
        self.state = cache(self._state)
        self.read = cache(self._read)
        self.messages = cache(self._messages)
        self.least_s = cache(self._least_s)
        self.choices = cache(self._choices)
        self.cheapest = cache(self._cheapest)
        self.exactness = cache(self._exactness)
        self._again = cache(self._least_remat)

    def _state(self, mask: int) -> float:
        """Bytes of parameters, gradients, optimizer state and buffers."""
        return self._problem.cost.state(self._problem.order[i] for i in bits(mask)).total

    def _read(self, mask: int) -> float:
        """Bytes of the values that a stage reads for one micro-batch."""
        return sum(self.table.bytes[value] for value, (_, readers, _) in self._values.items() if readers & mask)

    def _messages(self, mask: int) -> float:
        """Bytes of one message of each value that leaves the worker, and of its gradient."""
        total = 0.0
        for value, (maker, readers, graded) in self._values.items():
            if mask >> maker & 1 and readers & ~mask:
                total += self.table.bytes[value] * (1 + bool(graded & ~mask))
        return total

    def _held(self, worker: int, stages: Masks, messages: float) -> HeldPartitions:
        """What a worker holds, before it is decided what it rematerialises."""
        whole, row = sum(stages), self.table.prices[worker]
        positions = list(bits(whole))
        return HeldPartitions.on(
            self._capacity[worker], [cost for i in positions if (cost := row[i])],
            [self._problem.remat_rules[i] for i in positions], state=self.state(whole),
            read=sum(self.read(stage) for stage in stages), messages=messages,
        )  # fmt: skip

    def _least_remat(self, worker: int, stages: Masks, in_flight: int, messages: float) -> LeastRemat | None:
        """What was found once: a search that is cut off may find another choice the next time."""
        return self._problem.remat.least(self._held(worker, stages, messages), in_flight, self._problem.clock)

    def _least_s(self, worker: int, mask: int, in_flight: int | None = None) -> float:
        """Seconds of recomputing that a worker cannot avoid once it holds these positions, whatever follows; or inf."""
        again = self._again(worker, (mask,), in_flight or self._in_flight, 0.0)
        return math.inf if again is None else again.floor_s

    def again_s(self, worker: int, positions: Sequence[int]) -> float:
        """Seconds that a backward takes longer with these positions rematerialised."""
        row = self.table.recompute_s[worker]
        return sum([row[i] for i in positions])

    def _cheapest(self, worker: int, stages: Masks, in_flight: int | None) -> Masks | None:
        """What to rematerialise in each stage of a worker for the least added time; None: the stages do not fit.

        Of one stage proofs go by that as far as it is exact (`exactness`). Of several it is where a search begins, and
        not what they go by (`is_listed`).
        """
        whole = sum(stages)
        again = self._again(worker, stages, in_flight or self._in_flight, self.messages(whole))
        if again is None:
            return None
        positions = list(bits(whole))
        chosen = sum(1 << positions[k] for k in again.positions)
        return tuple(chosen & stage for stage in stages)

    def _exactness(self, worker: int, stages: Masks, in_flight: int | None = None) -> float:
        """`LeastRemat.exactness` of one stage with `cheapest`; of several 1, as `choices` has all of theirs."""
        again = self._again(worker, stages, in_flight or self._in_flight, self.messages(sum(stages)))
        if again is None or len(stages) > 1:
            return 1.0
        return again.exactness(sum(self.table.backward_s[worker][i] for i in bits(stages[0])))

    def is_listed(self, worker: int, stages: Masks) -> bool:
        """True if `choices` leaves nothing out."""
        cheapest = self.cheapest(worker, stages, None)
        whole, rules = sum(stages), self._problem.remat_rules
        free = [i for i in bits(whole) if rules[i] is None]
        return (
            len(stages) == 1 or cheapest is None or len(free) <= tuning.LISTED
            or all(rules[i] == "always" for i in bits(sum(cheapest)))
        )  # fmt: skip

    def _choices(self, worker: int, stages: Masks) -> tuple[Masks, ...]:
        """What to rematerialise in each stage of a worker: all choices worth a look; empty: the stages do not fit."""
        cheapest = self.cheapest(worker, stages, None)
        if cheapest is None:
            return ()
        whole, rules = sum(stages), self._problem.remat_rules
        forced = sum(1 << i for i in bits(whole) if rules[i] == "always")
        if len(stages) == 1 or sum(cheapest) == forced or not self.is_listed(worker, stages):
            return (cheapest,)
        held, positions = self._held(worker, stages, self.messages(whole)), list(bits(whole))
        again_s = np.array([cost.recompute_s for cost in held.costs])
        seconds = np.where([[stage >> i & 1 for i in positions] for stage in stages], again_s, 0.0)
        sets = RematSets([held], [self._in_flight], seconds)
        fitting = sets.every()
        kept = sets.undominated(fitting[np.lexsort(fitting.T)])  # of equals that with the first partitions
        masks = (sum(1 << i for i, chosen in zip(positions, each, strict=True) if chosen) for each in kept)
        return tuple(tuple(again & stage for stage in stages) for again in masks)
