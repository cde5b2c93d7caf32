"""What intervals of the order cost on groups of like workers, at one micro-batch count: what pipelines are made of.

rows[group][i]            what partition i costs on a worker of a group
gpipe, one_f_one_b        the stages that can be placed: intervals on workers of a group (stage_options.py)
hop(i, left, right)       the messages between i - 1 on a worker of `left` and i on one of `right`

Which workers count as one, from the fewest to the most: those of a group may be swapped in any plan, those of groups
that are `like` differ in their links alone, those of `kinds` were told to be of one kind, whatever they may hold.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from assigner.schedule.cost import MessageTime
from assigner.solver.limits.tuning import ROUNDING
from assigner.solver.problem.stage_options import StageOption, StageOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.schedule.cost import PartitionCost, PartitionOutput
    from assigner.solver.problem.arrays import Floats
    from assigner.solver.problem.prices import PriceTable
    from assigner.solver.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class Hop:
    """The certain messages over one boundary: seconds of one micro-batch.

    Args:
        forward_s: Activations on the wire.
        backward_s: Gradients on the wire.
        forward_busy: Seconds in which (the left worker, the right worker) cannot compute for the activations.
        backward_busy: The same for the gradients.
        share: Of the micro-batches, how many one link carries at least.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_busy: tuple[float, float] = (0.0, 0.0)
    backward_busy: tuple[float, float] = (0.0, 0.0)
    share: float = 1.0


WorkerKind = tuple[int, ...]
"""Groups of workers that a bound takes for one, by their numbers in the price table."""


_NOTHING = MessageTime(0.0, 0.0, 0.0)


def _plus(one: MessageTime, other: MessageTime) -> MessageTime:
    seconds, sender_s, receiver_s = one
    return MessageTime(seconds + other.seconds, sender_s + other.sender_s, receiver_s + other.receiver_s)


class IntervalBytes:
    """Bytes of intervals of the order that do not depend on their worker: state, values read, messages."""

    def __init__(self, problem: Problem, size: int) -> None:
        self._problem, self._size, cost = problem, size, problem.cost
        self._tied = {name for tie in problem.profile.ties for name in tie.partitions}
        self._leaving: list[list[tuple[float, int, int]]] = [[] for _ in problem.order]
        for output in cost.outputs:
            edges = cost.readers[output]
            last = max(problem.position[edge.target] for edge in edges)
            graded = max((problem.position[edge.target] for edge in edges if edge.gradient), default=-1)
            bytes_ = cost.output_bytes(output, self._size)
            self._leaving[problem.position[output.partition]].append((bytes_, last, graded))
        self.grown = cache(lambda first: tuple(self.grown_from(first)))
        # of partitions that nothing connects, another order has some between a value and its reader
        chain = problem.profile.is_chain and problem.order == problem.profile.order
        self.ones = [next(self.grown_from(i)) for i in range(len(problem.order))] if chain else None
        """Of a chain, those of each partition by itself: an interval's state and values read are their sums."""

    def of(self, first: int, last: int) -> tuple[float, float, float]:
        """(state, values read, messages) of one interval."""
        if self.ones is None:
            found: tuple[float, float, float] = self.grown(first)[last - first]
            return found
        held = self.ones[first : last + 1]
        return sum(state for state, _, _ in held), sum(read for _, read, _ in held), held[-1][2]

    def grown_from(self, first: int) -> Iterator[tuple[float, float, float]]:
        """(state, values read, messages) in bytes of the intervals first .. first, first .. first + 1, and so on."""
        problem, cost = self._problem, self._problem.cost
        state, read = 0.0, 0.0
        seen: set[PartitionOutput] = set()
        held: list[str] = []
        open_values: list[tuple[float, int, int]] = []
        for last in range(first, len(problem.order)):
            name = problem.order[last]
            held.append(name)
            if name in self._tied:
                state = cost.state(held).total
            else:
                state += cost.state((name,)).total
            for output in cost.reads[name]:
                if output not in seen:
                    seen.add(output)
                    read += cost.output_bytes(output, self._size)
            open_values = [value for value in (*open_values, *self._leaving[last]) if value[1] > last]
            yield state, read, sum(bytes_ * (1 + (graded > last)) for bytes_, _, graded in open_values)


class IntervalPrices:
    """The problem at one micro-batch count, M; everything is priced when it is first asked for.

    Args:
        workers: Prices of single workers.

    Attributes:
        size: Samples in a micro-batch.
        links_alike: Whether the workers of a group have the same links, too.
    """

    links_alike = True

    def __init__(self, workers: PriceTable) -> None:
        self.workers, self.problem = workers, workers.problem
        self.micro_batches, self.size, self.most_workers = workers.micro_batches, workers.size, workers.most_workers
        self.hop = cache(self._hop)
        self.figures = cache(self._figures)

    @property
    def visits(self) -> int:
        """What the dynamic program's time goes with: positions times workers times groups of these."""
        return len(self.problem.order) * self.most_workers * len(self.groups)

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The workers that may be used in groups of like ones, in the order of their first members.

        Two are alike if they have the same capacity and prices at this micro-batch size, the same pins allow them, and
        swapping them leaves all `Problem.link_class` as they were: a model needs them once, with a count. Swaps
        compose, so it is enough to compare with one of each group. Beside others in a shared stage it may matter which
        one is there (`Problem.rings_differ`).
        """
        problem = self.problem
        groups: list[list[str]] = []
        signatures: list[object] = []
        for worker in problem.workers:
            order = problem.options.order
            turn = order.index(worker.name) if worker.name in order else None
            signature = (
                worker.tensor_bytes,
                turn,
                problem.collectives_of(worker.name),
                self.workers.costs(worker.name),
            )
            for n, group in enumerate(groups):
                if signatures[n] == signature and _swap(problem, group[0], worker.name):
                    group.append(worker.name)
                    break
            else:
                groups.append([worker.name])
                signatures.append(signature)
        return tuple(tuple(group) for group in groups)

    @cached_property
    def rows(self) -> tuple[tuple[PartitionCost | None, ...], ...]:
        """`costs` by group."""
        return tuple(self.workers.costs(group[0]) for group in self.groups)

    def _figures(self, name: str) -> Floats:
        """A figure of `PartitionCost` by its name, [group, position]; inf: the partition may not be there."""
        rows = {id(row): row for row in self.rows}  # like groups have one
        found = {
            key: np.array([math.inf if price is None else getattr(price, name) for price in row])
            for key, row in rows.items()
        }
        return np.stack([found[id(row)] for row in self.rows])

    def capacity(self, group: int) -> float:
        """Bytes for tensors on a worker of the group, its reserve left out, and what sums may be off by."""
        return self.problem.profile.worker[self.groups[group][0]].tensor_bytes * (1 + ROUNDING)

    @cached_property
    def like(self) -> tuple[int, ...]:
        """For each group the first one with the same prices and capacity: they differ in their links alone."""
        first: dict[object, int] = {}
        number_of: dict[int, int] = {}
        numbers: dict[object, int] = {}
        likes = []
        for group, row in enumerate(self.rows):
            if id(row) not in number_of:  # a tuple of thousands of costs is hashed once
                number_of[id(row)] = numbers.setdefault(row, len(numbers))
            likes.append(first.setdefault((number_of[id(row)], self.capacity(group)), group))
        return tuple(likes)

    @cached_property
    def kinds(self) -> tuple[WorkerKind, ...]:
        """Groups whose workers have the same kind, thread count and capacity."""
        worker = self.problem.profile.worker
        found: dict[tuple[tuple[str, int], float], list[int]] = {}
        for number, group in enumerate(self.groups):
            first = worker[group[0]]
            found.setdefault((first.alike, first.tensor_bytes), []).append(number)
        return tuple(map(tuple, found.values()))

    @cached_property
    def interval_bytes(self) -> IntervalBytes:
        """What intervals of the order hold wherever they are."""
        return IntervalBytes(self.problem, self.size)

    @cached_property
    def gpipe(self) -> StageOptions:
        """The stages that can be placed with all micro-batches in flight."""
        return StageOptions(self, deep=False)

    @cached_property
    def one_f_one_b(self) -> StageOptions:
        """Those with any number of micro-batches in flight."""
        return StageOptions(self, deep=True)

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
            if (price := self.rows[number][other]) is not None and (number != group or len(members) > 1)
        )
        return min(ways, default=math.inf)

    def _hop(self, i: int, left_group: int, right_group: int) -> Hop | None:
        """One boundary between workers of two groups; None: they cannot be neighbours."""
        left, right = self.groups[left_group][0], self.groups[right_group][-1]
        if left == right or not self.problem.follows(left, right):
            return None
        cost, spine, there, back = self.problem.cost, self.problem.spine, _NOTHING, _NOTHING
        for output, gradient in self.problem.hops[i]:
            size = cost.output_bytes(output, self.size)
            there = _plus(there, cost.message(left, right, size))
            if gradient:
                back = _plus(back, cost.message(right, left, size))
        if math.isinf(there.seconds + back.seconds):
            return None
        there = there if spine.forward_hop[i] else _NOTHING
        back = back if spine.backward_hop[i] else _NOTHING
        return Hop(there.seconds, back.seconds, (there.sender_s, there.receiver_s), (back.receiver_s, back.sender_s))

    def spine_s(self, option: StageOption) -> tuple[float, float]:
        """Forward and backward seconds of a stage as far as they lie on the spine."""
        spine, held = self.problem.spine, slice(option.first, option.last + 1)
        return (
            option.forward_s if any(spine.forward[held]) else 0.0,
            option.backward_s if any(spine.backward[held]) else 0.0,
        )

    @cached_property
    def group_of(self) -> dict[str, int]:
        """Of each worker the number of its group of like ones."""
        return {name: k for k, members in enumerate(self.groups) for name in members}


class KindPrices(IntervalPrices):
    """Workers with the same prices and capacity in one group, though their links differ: a relaxation with few sets.

    Where every worker has links of its own, eight of them have 247 sets that may share a stage; of three kinds they
    have some forty. Each boundary and each tie is at its least between any two of the kinds, so no pipeline costs more.
    """

    links_alike = False

    def __init__(self, table: IntervalPrices) -> None:
        super().__init__(table.workers)
        self._table = table
        self._kinds = [[n for n, like in enumerate(table.like) if like == first] for first in sorted(set(table.like))]

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The workers of each kind."""
        return tuple(tuple(name for n in kind for name in self._table.groups[n]) for kind in self._kinds)

    def _tied_s(self, size: float, group: int, other: int) -> float:
        return min(self._table._tied_s(size, n, other) for n in self._kinds[group])

    def _hop(self, i: int, left_group: int, right_group: int) -> Hop | None:
        pairs = itertools.product(self._kinds[left_group], self._kinds[right_group])
        found = [hop for left, right in pairs if (hop := self._table.hop(i, left, right)) is not None]
        if not found:
            return None
        there, back = zip(*((hop.forward_busy, hop.backward_busy) for hop in found), strict=True)
        return Hop(
            min(hop.forward_s for hop in found), min(hop.backward_s for hop in found),
            (min(busy for busy, _ in there), min(busy for _, busy in there)),
            (min(busy for busy, _ in back), min(busy for _, busy in back)),
        )  # fmt: skip


def by_kinds(table: IntervalPrices) -> KindPrices | None:
    """The relaxation; None: it takes no worker for another, or a hint gives the workers' order."""
    several = len(set(table.like)) < len(table.groups)
    return KindPrices(table) if several and not table.problem.options.order else None


def _swap(problem: Problem, first: str, second: str) -> bool:
    """True if swapping two workers leaves all links, and what all-reduces take on each, as they are."""
    way = problem.link_class
    one, other = way[first], way[second]
    others: Sequence[str] = [name for name in way if name not in (first, second)]
    return (
        one[second] == other[first]
        and all(one[name] == other[name] for name in others)
        and all(way[name][first] == way[name][second] for name in others)
    )
