"""What the searches of this package ask of an objective: a bound of part of a placement, and the price of a whole one.

StepPricing here has the step time; the steady state is in steady.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from assigner.solver.free.arrangement import Arrangement, again_s, cheapest_again
from assigner.solver.free.bounds import Bounds
from assigner.solver.free.row_timing import row_step_s
from assigner.solver.problem.prices import bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.free.arrangement import Stages
    from assigner.solver.free.bounds import Turn
    from assigner.solver.problem.set_memory import SetMemory


class Pricing(Protocol):
    """The value of placements under one objective.

    Attributes:
        memory: Prices and memory.
        one_stage: True: at most one stage a worker; else any number.
    """

    memory: SetMemory
    one_stage: bool

    def price(self, stages: Stages) -> Arrangement | None:
        """The stages with what they rematerialise and their value; None: they do not fit, or a link is missing."""

    def actions(self, stages: Stages) -> int:
        """How much work it is to price the stages, in timed actions."""


class BoundedPricing(Pricing, Protocol):
    """One that also bounds the value of what is not placed yet."""

    def least(self, where: Sequence[int], masks: Sequence[int], limit: float) -> tuple[float, list[Turn]]:
        """A bound of all placements that have these positions there, in seconds, and its turns.

        Args:
            where: Worker of each position, -1: not placed. Whatever a placed position reads is placed.
            masks: Positions of each worker.
            limit: A bound of this value or more need not be made sharper.

        Returns:
            The bound; inf: there is no such placement. The turns where rows of several stages are to be looked at.
        """


class StepPricing:
    """The step time, as the simulator has it.

    Args:
        memory: Prices and memory.
        one_stage: True: at most one stage a worker; else any number.
    """

    def __init__(self, memory: SetMemory, *, one_stage: bool) -> None:
        self.memory, self.one_stage = memory, one_stage
        self._bounds = Bounds(memory)

    def least(self, where: Sequence[int], masks: Sequence[int], limit: float) -> tuple[float, list[Turn]]:
        """See `BoundedPricing`."""
        bound, turns = self._bounds.least(where, masks)
        if self.one_stage and bound < limit:
            stages = self.memory.table.in_order(masks)
            bound = math.inf if stages is None else max(bound, self._bounds.convex(where, stages))
        return bound, turns

    def price(self, stages: Stages) -> Arrangement | None:
        """See `Pricing`: with the rematerialisation of least added time.

        With one stage a worker no other choice is faster; with several another one may be (set_memory.py).
        """
        memory, again = self.memory, cheapest_again(self.memory, stages)
        if again is None:
            return None
        rows = [(worker, tuple(bits(mask))) for worker, mask in stages]
        step = row_step_s(memory.table, rows, again_s(memory, stages, again))
        return None if step is None else Arrangement(memory.table, stages, again, step)

    def actions(self, stages: Stages) -> int:
        """See `Pricing`: a forward and a backward of each stage and micro-batch, and what it takes to begin."""
        return 2 * self.memory.table.micro_batches * len(stages) + 100
