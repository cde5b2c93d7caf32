"""What everything costs at one micro-batch count: the table that every search starts from.

rows[group][i]            what partition i costs on a worker of a group of like workers
gpipe, one_f_one_b        the stages that can be placed: intervals of the order on workers of a group (stage_options.py)
hop(i, left, right)       the messages between i - 1 on a worker of `left` and i on one of `right`
prices[worker][i]         what partition i costs on a worker, by its number in `Problem.workers`
travelling(where)         the messages of any placement

Sets of positions are bit masks: searches price many thousands of placements.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.schedule.cost import MessageTime
from assigner.solver.problem.memory import IntervalBytes
from assigner.solver.problem.options import samples_in_each
from assigner.solver.problem.stage_options import StageOption, StageOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.schedule.cost import PartitionCost
    from assigner.solver.problem.arrays import Floats
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


class TravellingValue(NamedTuple):
    """The way of one value to one other worker.

    Args:
        maker: The position that makes it.
        source: The maker's worker.
        target: The worker that reads it.
        readers: Positions on that worker that read it.
        graded: Those of them that add to its gradient.
        there: The message of its activation.
        back: The message of its gradient; None: it has none.
    """

    maker: int
    source: int
    target: int
    readers: tuple[int, ...]
    graded: tuple[int, ...]
    there: MessageTime
    back: MessageTime | None


def bits(mask: int) -> Iterator[int]:
    """The positions in a mask, smallest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _by_worker(figure: str) -> cached_property[tuple[tuple[float, ...], ...]]:
    """A figure of `PartitionCost` per worker and position; inf: not there."""

    def found(table: PriceTable) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(getattr(price, figure) if price else math.inf for price in row) for row in table.prices)

    return cached_property(found)


_NOTHING = MessageTime(0.0, 0.0, 0.0)


def _plus(one: MessageTime, other: MessageTime) -> MessageTime:
    seconds, sender_s, receiver_s = one
    return MessageTime(seconds + other.seconds, sender_s + other.sender_s, receiver_s + other.receiver_s)


class PriceTable:
    """The problem at one micro-batch count, M; everything is priced when it is first asked for.

    Attributes:
        size: Samples in a micro-batch.
        links_alike: Whether the workers of a group have the same links, too.
        forward_s, backward_s, recompute_s, update_s: Seconds per worker and position, backwards without recomputing;
            inf: not there.
    """

    links_alike = True

    def __init__(self, problem: Problem, micro_batches: int) -> None:
        self.problem, self.micro_batches = problem, micro_batches
        self.size = samples_in_each(problem.workload.batch_size, micro_batches)
        self._costs: dict[str, tuple[PartitionCost | None, ...]] = {}
        self._measured: dict[str, tuple[PartitionCost | None, ...]] = {}
        self.hop = cache(self._hop)
        self.figures = cache(self._figures)

    @property
    def most_workers(self) -> int:
        """No plan has more workers than this: of a steady state no more than micro-batches, so that all are at work."""
        most = self.problem.most_workers
        return min(most, self.micro_batches) if self.problem.options.objective == "throughput" else most

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
            signature = (worker.tensor_bytes, turn, problem.collectives_of(worker.name), self.costs(worker.name))
            for n, group in enumerate(groups):
                if signatures[n] == signature and _swap(problem, group[0], worker.name):
                    group.append(worker.name)
                    break
            else:
                groups.append([worker.name])
                signatures.append(signature)
        return tuple(tuple(group) for group in groups)

    def measured(self, worker: str) -> tuple[PartitionCost | None, ...]:
        """What each partition costs on a worker, whatever the hints say; None: it was not measured, or does not run."""
        like, cost = self.problem.cost.first_alike[worker], self.problem.cost
        if like not in self._measured:
            self._measured[like] = tuple(
                None if cost.obstacle(name, like, self.size) else cost.partition(name, like, self.size)
                for name in self.problem.order
            )
        return self._measured[like]

    def costs(self, worker: str) -> tuple[PartitionCost | None, ...]:
        """What each partition costs on a worker; None: it may not, or cannot, be placed there.

        Of workers that are alike (`Problem.twins`) it is one and the same tuple.
        """
        twin = self.problem.twins[worker]
        if twin not in self._costs:
            problem, device = self.problem, self.problem.profile.worker[twin]
            self._costs[twin] = tuple(
                price if price is not None and problem.allowed(name, device) else None
                for name, price in zip(problem.order, self.measured(twin), strict=True)
            )
        return self._costs[twin]

    @cached_property
    def rows(self) -> tuple[tuple[PartitionCost | None, ...], ...]:
        """`costs` by group."""
        return tuple(self.costs(group[0]) for group in self.groups)

    def _figures(self, name: str) -> Floats:
        """A figure of `PartitionCost` by its name, [group, position]; inf: the partition may not be there."""
        rows = {id(row): row for row in self.rows}  # like groups have one
        found = {
            key: np.array([math.inf if price is None else getattr(price, name) for price in row])
            for key, row in rows.items()
        }
        return np.stack([found[id(row)] for row in self.rows])

    def capacity(self, group: int) -> float:
        """Bytes for tensors on a worker of the group, its reserve left out."""
        return self.problem.profile.worker[self.groups[group][0]].tensor_bytes

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

    @cached_property
    def hops(self) -> dict[tuple[int, int, int], Hop]:
        """Every boundary that two workers can talk over, by (position, left group, right group)."""
        groups = range(len(self.groups))
        return {
            (i, left, right): hop
            for i in range(1, len(self.problem.order))
            for left in groups
            for right in groups
            if (hop := self.hop(i, left, right)) is not None
        }

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
    def names(self) -> tuple[str, ...]:
        """Names of the workers, by number."""
        return tuple(worker.name for worker in self.problem.workers)

    @cached_property
    def group_of(self) -> dict[str, int]:
        """Of each worker the number of its group of like ones."""
        return {name: k for k, members in enumerate(self.groups) for name in members}

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The same by the worker's number."""
        return tuple(self.group_of[name] for name in self.names)

    @cached_property
    def prices(self) -> tuple[tuple[PartitionCost | None, ...], ...]:
        """Per worker and position: what the partition costs there; None: it may not, or cannot, be placed there."""
        return tuple(self.costs(name) for name in self.names)

    forward_s = _by_worker("forward_s")
    recompute_s = _by_worker("recompute_s")
    backward_s = _by_worker("backward_s")
    update_s = _by_worker("update_s")

    @cached_property
    def least_s(self) -> tuple[float, ...]:
        """Per position: seconds of one forward and one backward where they take least; 0: it may be nowhere."""
        both = np.add(self.forward_s, self.backward_s).min(axis=0)
        return tuple(np.where(np.isfinite(both), both, 0.0).tolist())

    @cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Per position: the workers on which it may be."""
        workers = range(len(self.names))
        return tuple(tuple(w for w in workers if self.prices[w][i] is not None) for i in range(len(self.problem.order)))

    @cached_property
    def together(self) -> tuple[int, ...]:
        """Per position: the positions that must be on the same worker, itself too."""
        at, held = self.problem.position, self.problem.together
        return tuple(sum(1 << at[other] for other in held[name]) for name in self.problem.order)

    @cached_property
    def apart(self) -> tuple[int, ...]:
        """Per position: the positions that must not be on the same worker."""
        found = [0] * len(self.problem.order)
        for group in self.problem.options.apart:
            mask = sum(1 << self.problem.position[name] for name in group)
            for i in bits(mask):
                found[i] |= mask & ~(1 << i)
        return tuple(found)

    @cached_property
    def edges(self) -> tuple[tuple[int, int, int, bool], ...]:
        """(maker, number of the value, reader, whether with gradient), in the order of the profile's edges."""
        outputs = {(edge.source, edge.output): 0 for edge in self.problem.profile.edges}
        number = {key: n for n, key in enumerate(outputs)}
        at = self.problem.position
        return tuple(
            (at[edge.source], number[edge.source, edge.output], at[edge.target], edge.gradient)
            for edge in self.problem.profile.edges
        )

    @cached_property
    def bytes(self) -> tuple[float, ...]:
        """Of each value, for one micro-batch."""
        sizes: dict[tuple[str, int], float] = {}
        for edge in self.problem.profile.edges:
            sizes[edge.source, edge.output] = edge.bytes_per_sample * self.size + edge.fixed_bytes
        return tuple(sizes.values())

    @cached_property
    def wires(self) -> tuple[tuple[tuple[MessageTime, ...], ...], ...]:
        """Per value, sender and receiver: the message; seconds are inf without a link."""
        found = {size: self._wires(size) for size in set(self.bytes)}
        return tuple(found[size] for size in self.bytes)

    @cached_property
    def ties(self) -> tuple[tuple[tuple[int, ...], tuple[tuple[MessageTime, ...], ...]], ...]:
        """Of each shared parameter: the positions that hold it, and its message by sender and receiver."""
        at = self.problem.position
        return tuple(
            (tuple(at[name] for name in tie.partitions), self._wires(tie.bytes)) for tie in self.problem.profile.ties
        )

    def _wires(self, size: float) -> tuple[tuple[MessageTime, ...], ...]:
        cost = self.problem.cost
        return tuple(tuple(cost.message(u, v, size) for v in self.names) for u in self.names)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Per position: the positions whose values it reads."""
        found = [0] * len(self.problem.order)
        for maker, _, reader, _ in self.edges:
            found[reader] |= 1 << maker
        return tuple(found)

    @cached_property
    def behind(self) -> tuple[int, ...]:
        """Per position: the positions that read its values."""
        found = [0] * len(self.problem.order)
        for maker, _, reader, _ in self.edges:
            found[maker] |= 1 << reader
        return tuple(found)

    def may(self, stages: Sequence[tuple[int, int]]) -> bool:
        """False if a hint, or a missing price, forbids stages given as (worker, mask of positions)."""
        masks: dict[int, int] = {}
        for worker, mask in stages:
            masks[worker] = masks.get(worker, 0) | mask
        if len(masks) > self.most_workers:
            return False
        for worker, mask in masks.items():
            for i in bits(mask):
                if self.prices[worker][i] is None or self.apart[i] & mask or self.together[i] & ~mask:
                    return False
        if not self.problem.options.order:
            return True
        where = {i: worker for worker, mask in masks.items() for i in bits(mask)}
        return all(
            where[maker] == where[reader] or self.problem.follows(self.names[where[maker]], self.names[where[reader]])
            for maker, _, reader, _ in self.edges
        )

    def in_order(
        self, masks: Sequence[int], choose: Callable[[Sequence[int], int], int] = lambda ready, _: ready[0]
    ) -> tuple[tuple[int, int], ...] | None:
        """One stage for each worker's positions, in a topological order; None: two of them wait for each other.

        Args:
            masks: Positions of each worker; those of all workers need not be all there are.
            choose: Which comes next of the workers whose stages wait for no other, with so many stages left; the first.
        """
        placed = sum(masks)
        needs = {}
        for worker, mask in enumerate(masks):
            if mask:
                read = 0
                for i in bits(mask):
                    read |= self.before[i]
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

    def travelling(self, where: Sequence[int]) -> tuple[TravellingValue, ...] | None:
        """All values that travel when position i is on worker `where[i]`; None: a link that they need is missing.

        In the order in which a stage sends them (schedule/program.py).
        """
        found: dict[tuple[int, int], tuple[int, list[int], list[int]]] = {}
        for maker, value, reader, gradient in self.edges:
            target = where[reader]
            if where[maker] != target:
                key = (value, target)
                old = found.get(key)
                if old is None:
                    found[key] = (maker, [reader], [reader] if gradient else [])
                else:
                    old[1].append(reader)
                    if gradient:
                        old[2].append(reader)
        values = []
        for (value, target), (maker, readers, graded) in found.items():
            source, wires = where[maker], self.wires[value]
            there, back = wires[source][target], wires[target][source] if graded else None
            if math.isinf(there.seconds) or (back is not None and math.isinf(back.seconds)):
                return None
            values.append(TravellingValue(maker, source, target, tuple(readers), tuple(graded), there, back))
        for members, wires in self.ties:
            holders = {where[i] for i in members}
            if any(math.isinf(wires[u][v].seconds) for u in holders for v in holders if u != v):
                return None
        return tuple(values)


class KindTable(PriceTable):
    """Workers with the same prices and capacity in one group, though their links differ: a relaxation with few sets.

    Where every worker has links of its own, eight of them have 247 sets that may share a stage; of three kinds they
    have some forty. Each boundary and each tie is at its least between any two of the kinds, so no pipeline costs more.
    """

    links_alike = False

    def __init__(self, table: PriceTable) -> None:
        super().__init__(table.problem, table.micro_batches)
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


def by_kinds(table: PriceTable) -> KindTable | None:
    """The relaxation; None: it takes no worker for another, or a hint gives the workers' order."""
    several = len(set(table.like)) < len(table.groups)
    return KindTable(table) if several and not table.problem.options.order else None


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
