"""One micro-batch count, priced: every stage that fits on some worker (a column), and every boundary between two.

column (first, last, group)   partitions first .. last on a worker of the group (segments.py)
hop (i, left, right)                the messages between i - 1 on a worker of `left` and i on one of `right`
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from assigner.solver.groups import group_workers, worker_prices
from assigner.solver.problem import Problem
from assigner.solver.segments import SegmentSizes, group_columns

if TYPE_CHECKING:
    from assigner.cost import PartitionCost
    from assigner.solver.segments import Column


@dataclass(frozen=True, slots=True)
class Hop:
    """The certain messages over one boundary: seconds of one micro-batch.

    Args:
        forward_s: Activations on the wire.
        backward_s: Gradients on the wire.
        forward_busy: Seconds in which (the left worker, the right worker) cannot compute for the activations.
        backward_busy: The same for the gradients.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_busy: tuple[float, float] = (0.0, 0.0)
    backward_busy: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Instance:
    """The problem at one micro-batch count.

    Args:
        problem: What is to be placed.
        micro_batches: M.
    """

    problem: Problem
    micro_batches: int

    @property
    def size(self) -> int:
        """Samples in a micro-batch."""
        return self.problem.workload.batch_size // self.micro_batches

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Worker names, like ones together."""
        return group_workers(self.problem, self.size)

    @cached_property
    def prices(self) -> tuple[tuple[PartitionCost | None, ...], ...]:
        """Per group and position: what the partition costs there; None: it may not, or cannot, be placed there."""
        twins = [self.problem.twins[group[0]] for group in self.groups]
        rows = {twin: worker_prices(self.problem, twin, self.size) for twin in dict.fromkeys(twins)}
        return tuple(rows[twin] for twin in twins)

    @cached_property
    def columns(self) -> dict[tuple[int, int, int], Column]:
        """Every stage that can be placed, by (first, last, group)."""
        sizes = SegmentSizes(self.problem, self.size)
        return {
            (column.first, column.last, column.group): column
            for group, members in enumerate(self.groups)
            for column in group_columns(
                self.problem, group, self.prices[group], sizes, micro_batches=self.micro_batches,
                capacity=self.problem.profile.worker[members[0]].tensor_bytes, tied_s=self.tied_s,
            )
        }  # fmt: skip

    def tied_s(self, first: int, last: int, group: int) -> float:
        """Least seconds from a stage's last backward to the end of an update that waits for a gradient it shares.

        0 where no parameter of the stage is held outside of it.
        """
        return max(
            (
                seconds[group]
                for held, others in self._ties
                if first <= held <= last
                for other, seconds in others
                if not first <= other <= last
            ),
            default=0.0,
        )

    @cached_property
    def _ties(self) -> tuple[tuple[int, tuple[tuple[int, tuple[float, ...]], ...]], ...]:
        """Positions that share a parameter: one, and each other with the least seconds from the one's group on."""
        found = []
        for tie in self.problem.profile.ties:
            positions = [self.problem.position[name] for name in tie.partitions]
            for one in positions:
                others = tuple(
                    (other, tuple(self._tied_s(tie.bytes, group, other) for group in range(len(self.groups))))
                    for other in positions
                    if other != one
                )
                found.append((one, others))
        return tuple(found)

    def _tied_s(self, size: float, group: int, other: int) -> float:
        """The least that a gradient takes from a group to a position elsewhere, its update included; inf: no link."""
        ways = (
            self.problem.cost.transfer_s(self.groups[group][0], members[-1], size) + price.update_s
            for number, members in enumerate(self.groups)
            if (price := self.prices[number][other]) is not None and (number != group or len(members) > 1)
        )
        return min(ways, default=math.inf)

    @cached_property
    def hops(self) -> dict[tuple[int, int, int], Hop]:
        """Every boundary that two workers can talk over, by (position, left group, right group)."""
        found = {}
        for i in range(1, len(self.problem.order)):
            for left, lefts in enumerate(self.groups):
                for right, rights in enumerate(self.groups):
                    if (left != right or len(lefts) > 1) and self.problem.follows(lefts[0], rights[-1]):
                        hop = self._hop(i, lefts[0], rights[-1])
                        if hop is not None:
                            found[i, left, right] = hop
        return found

    def hop(self, i: int, left: int, right: int) -> Hop | None:
        """One boundary between workers of two groups; None: they cannot be neighbours. Priced when it is asked for."""
        if "hops" in self.__dict__:
            return self.hops.get((i, left, right))
        lefts, rights = self.groups[left], self.groups[right]
        if (left == right and len(lefts) == 1) or not self.problem.follows(lefts[0], rights[-1]):
            return None
        return self._hop(i, lefts[0], rights[-1])

    def _hop(self, i: int, left: str, right: str) -> Hop | None:
        cost, there, back = self.problem.cost, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        for output, gradient in self.problem.hops[i]:
            size = cost.output_bytes(output, self.size)
            there[0] += cost.transfer_s(left, right, size)
            sender, receiver = cost.busy_s(left, right, size)
            there[1] += sender
            there[2] += receiver
            if gradient:
                back[0] += cost.transfer_s(right, left, size)
                sender, receiver = cost.busy_s(right, left, size)
                back[1] += receiver
                back[2] += sender
        if math.isinf(there[0] + back[0]):
            return None
        spine = self.problem.spine
        if not spine.forward_hop[i]:
            there = [0.0, 0.0, 0.0]
        if not spine.backward_hop[i]:
            back = [0.0, 0.0, 0.0]
        return Hop(there[0], back[0], (there[1], there[2]), (back[1], back[2]))

    def spine_s(self, column: Column) -> tuple[float, float]:
        """Forward and backward seconds of a stage as far as they lie on the spine."""
        spine, held = self.problem.spine, slice(column.first, column.last + 1)
        return (
            column.forward_s if any(spine.forward[held]) else 0.0,
            column.backward_s if any(spine.backward[held]) else 0.0,
        )
