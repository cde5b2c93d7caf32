"""What is to be placed: the profile's partitions in one order, where they may be cut, and which messages are certain.

Stages are intervals of an order. Positions i = 0 .. n - 1 are partitions, boundary i lies between i - 1 and i.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.graph import topological_orders
from assigner.formats.prediction import has_room
from assigner.formats.profile import Profile
from assigner.formats.stage import Replica
from assigner.schedule.cost import CostModel, PartitionOutput
from assigner.schedule.objective import compared_value
from assigner.schedule.simulate import worker_memory
from assigner.schedule.timing import step_s
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock
from assigner.solver.problem.memory import RematSearch
from assigner.solver.problem.options import SolveOptions
from assigner.solver.problem.prices import PriceTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Worker, WorkloadReference
    from assigner.formats.stage import Stage
    from assigner.solver.problem.options import RematRule


@dataclass(frozen=True)
class Spine:
    """A way through the graph along which every value must travel: what a lower bound may add up.

    Stages without a path between them run at the same time, so their times must not be added. The spine is one path
    of partitions forward to `end` and one backward from it; of a chain it is everything.

    Args:
        forward: Per position, whether the forward path visits it.
        backward: Per position, whether the backward path visits it.
        forward_hop: Per boundary, whether the forward path steps over it from i - 1 to i.
        backward_hop: The same for gradients from i to i - 1.
        end: The position at which forward turns into backward.
    """

    forward: tuple[bool, ...]
    backward: tuple[bool, ...]
    forward_hop: tuple[bool, ...]
    backward_hop: tuple[bool, ...]
    end: int

    @property
    def start(self) -> int:
        """The position whose backward is the last of all."""
        return self.backward.index(True)


@dataclass(frozen=True)
class Problem:
    """A profile with the options of one search.

    Args:
        profile: The measurements, with labels and reserves as the hints say (hints.py).
        options: What the user asked, in plain names.
        cost: Prices of the profile.
        sequence: Another topological order than the profile's; empty: the profile's.
        clock: When its search has to end.
        remat: Searches for what stages rematerialise; problems made of this one have it, too.
    """

    profile: Profile
    options: SolveOptions
    cost: CostModel
    sequence: tuple[str, ...] = ()
    clock: SolveClock = field(default_factory=SolveClock, compare=False)
    remat: RematSearch = field(default_factory=RematSearch, compare=False)

    @property
    def order(self) -> tuple[str, ...]:
        """Partition names by position."""
        return self.sequence or self.profile.order

    @cached_property
    def _orders(self) -> tuple[tuple[str, ...], ...]:
        edges = [(edge.source, edge.target) for edge in self.profile.edges]
        return topological_orders(self.profile.order, edges, most=tuning.MOST_ORDERS)

    @property
    def branched(self) -> bool:
        """True if there are convex stages that are intervals of none of the orders looked at."""
        return not self._orders

    @cached_property
    def ordered(self) -> tuple[Problem, ...]:
        """This problem along each order that is looked at.

        Convex stages that do not wait for each other in a circle are intervals of a topological order. So of a chain,
        also one past which values are handed on, and of a chain that a few partitions feed from beside, intervals of
        these orders are all placements with one stage a worker.
        """
        return tuple(map(self.along, self._orders)) or (self,)

    def along(self, order: tuple[str, ...]) -> Problem:
        """This problem along a topological order; itself, with all its prices, where that is its own."""
        return self if order == self.order else replace(self, sequence=order)

    def names(self, positions: Iterable[int]) -> tuple[str, ...]:
        """Names of the partitions at these positions, in the profile's order, whatever this problem's is."""
        held = [self.order[i] for i in positions]
        return tuple(sorted(held, key=self._rank.__getitem__) if self.sequence else held)

    @cached_property
    def _rank(self) -> dict[str, int]:
        return {name: n for n, name in enumerate(self.profile.order)}

    @cached_property
    def position(self) -> dict[str, int]:
        """Positions by partition name."""
        return {name: i for i, name in enumerate(self.order)}

    @cached_property
    def prices(self) -> Callable[[int], PriceTable]:
        """From a micro-batch count to what everything costs at it: one table for all who ask."""
        return cache(partial(PriceTable, self))

    @cached_property
    def workload(self) -> WorkloadReference:
        """The profile's workload with the batch size asked for."""
        return replace(self.profile.workload, batch_size=self.options.batch(self.profile))

    def pins(self, name: str) -> tuple[str, ...]:
        """What a partition's worker must match: the profile's pin and the option's."""
        found = (self.profile.partition[name].pin, self.options.pins.get(name))
        return tuple(dict.fromkeys(pin for pin in found if pin is not None))

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """The workers that may be used."""
        only, order = self.options.only, self.options.order
        return tuple(
            worker
            for worker in self.profile.workers
            if (not only or worker.name in only) and (not order or worker.name in order)
        )

    @cached_property
    def barred(self) -> dict[str, frozenset[str]]:
        """For each worker the partitions that a hint keeps off it."""
        hinted = {name: (self.pins(name), self.forbidden(name)) for name in self.order}
        hinted = {name: given for name, given in hinted.items() if any(given)}
        matches = self.profile.matches
        return {
            worker.name: frozenset(
                name
                for name, (pins, forbidden) in hinted.items()
                if not all(matches(pin, worker) for pin in pins) or any(matches(spec, worker) for spec in forbidden)
            )
            for worker in self.profile.workers
        }

    def forbidden(self, name: str) -> tuple[str, ...]:
        """The workers, kinds or hosts that a partition must not be on."""
        return tuple(spec for partition, spec in self.options.forbid if partition == name)

    @cached_property
    def link_class(self) -> dict[str, dict[str, int]]:
        """For each ordered pair of workers a number; pairs whose links are alike have the same one.

        Where stages may be shared their all-reduces are alike, too.
        """
        numbers: dict[object, int] = {}
        shares, rings = self.most_replicas > 1, self.cost.rings

        def number(source: str, target: str) -> int:
            link = self.cost.link(source, target)
            if link is None:
                return -1
            sweep = tuple((point.bytes, point.seconds) for point in link.points)
            busy = link.sender_busy, link.receiver_busy, link.sender_s, link.receiver_s
            reduces = rings.pair_class(source, target) if shares else None
            return numbers.setdefault((sweep, busy, reduces), len(numbers))

        names = [worker.name for worker in self.workers]
        return {source: {target: number(source, target) for target in names} for source in names}

    @cached_property
    def rings_differ(self) -> bool:
        """Whether it matters which of like workers shares a stage with others: gloo's rings go round by rank.

        So it is with which ones the others are neighbours, if links are not all alike.
        """
        names = [worker.name for worker in self.workers]
        all_alike = len({self.link_class[one][other] for one in names for other in names if one != other}) <= 1
        return self.most_replicas > 1 and not all_alike and self.cost.rings.go_by_rank(names)

    @cached_property
    def together(self) -> dict[str, tuple[str, ...]]:
        """For each partition those that must be on the same worker, by their `colocate` label: itself too."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name in self.order:
            label = self.profile.partition[name].colocate
            groups[f"partition {name}" if label is None else f"label {label}"].append(name)
        return {name: group for group in map(tuple, groups.values()) for name in group}

    @cached_property
    def may_cut(self) -> tuple[bool, ...]:
        """Per boundary 0 .. n: may a stage start there? Not between partitions of one `colocate` label."""
        open_at = [True] * (len(self.order) + 1)
        for group in set(self.together.values()):
            for i in range(self.position[group[0]] + 1, self.position[group[-1]] + 1):
                open_at[i] = False
        return tuple(open_at)

    @cached_property
    def may_share(self) -> tuple[bool, ...]:
        """Per position: may a stage that holds it have several workers?"""
        return tuple(self.profile.partition[name].one_worker is None for name in self.order)

    def keeps_hints(self, plan: Plan) -> bool:
        """True if every partition has a price where it is, may be shared if it is, and no hint is broken."""
        held = [(worker, stage.partitions) for stage in plan.stages for worker in stage.workers]
        if not {worker.name for worker in self.workers}.issuperset(plan.workers):
            return False
        table = self.prices(plan.micro_batches)
        for worker, names in held:
            costs = table.costs(worker)
            if any(costs[self.position[name]] is None for name in names):
                return False
        shared = [name for stage in plan.stages if len(stage.workers) > 1 for name in stage.partitions]
        if not all(self.may_share[self.position[name]] for name in shared):
            return False
        workers = [worker for worker, _ in held]
        place = {name: stage.workers[0] for stage in plan.stages for name in stage.partitions}
        if any(place[name] != place[group[0]] for name, group in self.together.items()):
            return False
        if any(len({place[name] for name in group}) < len(group) for group in self.options.apart):
            return False
        order = self.options.order
        turns = [order.index(worker) for worker in workers if worker in order]
        return turns == sorted(turns) and len(set(workers)) <= (self.options.max_workers or len(workers))

    @cached_property
    def apart(self) -> tuple[int, ...]:
        """Per position: a stage that holds it must start behind this position; -1: anywhere.

        Of two partitions to be kept apart, the later one cannot be in a stage that reaches back to the earlier one.
        """
        behind = [-1] * len(self.order)
        for group in self.options.apart:
            positions = sorted(self.position[name] for name in group)
            for earlier, later in itertools.pairwise(positions):
                behind[later] = max(behind[later], earlier)
        return tuple(behind)

    @cached_property
    def remat_rules(self) -> tuple[RematRule | None, ...]:
        """Per position: never or always rematerialised, or None where the solver chooses."""
        mode = self.options.remat
        default: RematRule | None = None if mode == "auto" else mode
        return tuple(self.options.rematerialise.get(name, default) for name in self.order)

    @property
    def most_workers(self) -> int:
        """No plan has more workers than this: no more than partitions, unless some may share one."""
        most = len(self.order) if self.options.max_replicas == 1 else len(self.workers)
        return min(self.options.max_workers or most, most, len(self.workers))

    @cached_property
    def unshared(self) -> Problem:
        """This problem with one worker a stage."""
        return replace(self, options=replace(self.options, max_replicas=1)) if self.most_replicas > 1 else self

    @property
    def most_replicas(self) -> int:
        """No stage has more workers than this."""
        return min(self.options.max_replicas or self.most_workers, self.most_workers)

    def reduce_s(self, first: int, last: int, workers: tuple[str, ...]) -> float:
        """Seconds in which workers that share a stage add up its gradients; inf: a link for that is missing."""
        names = self.order[first : last + 1]
        apart = [tie for tie in self.profile.ties if not set(tie.partitions) <= set(names)]  # exchanged, not reduced
        try:
            return self.cost.reduce_s(workers, self.cost.gradient_bytes(names, apart))
        except FormatError:
            return math.inf

    def held_by(self, stage: Stage, workers: Sequence[str], shares: Sequence[int]) -> Stage:
        """A stage on workers with so many micro-batches each; who has none is left out. No shares: one has them all."""
        held = [(name, share) for name, share in zip(workers, shares, strict=True) if share] if shares else []
        threads = {name: self.profile.worker[name].threads for name in workers}
        if len(held) > 1:
            return replace(stage, replicas=tuple(Replica(name, share, threads[name]) for name, share in held))
        sole = held[0][0] if held else workers[0]
        return replace(stage, sole_worker=sole, threads=threads[sole])

    def fits(self, plan: Plan) -> bool:
        """Whether every worker of a plan has the memory that it needs, as the simulator counts it."""
        return all(
            has_room(worker_memory(self.cost, plan, name).total, self.profile.worker[name].capacity_bytes)
            for name in plan.workers
        )

    def step_s(self, plan: Plan) -> float:
        """The simulated step of any plan, in seconds; inf: it does not fit, or cannot run.

        It cannot where a link is missing, a size cannot be priced, or stages would wait for each other for ever.
        """
        try:
            return step_s(plan, self.cost) if self.fits(plan) else math.inf
        except FormatError:
            return math.inf

    def value_of(self, plan: Plan) -> float:
        """What searches compare of any plan (`schedule/objective.py`), the less the better; inf as of `step_s`."""
        step = self.step_s(plan)
        return step if math.isinf(step) else compared_value(plan, plan.objective, self.cost, step_s=step)

    def collectives_of(self, worker: str) -> tuple[int, ...]:
        """Numbers of the measured all-reduces that a worker takes part in, where stages may be shared."""
        if self.most_replicas == 1:
            return ()
        return tuple(n for n, each in enumerate(self.profile.collectives) if worker in each.workers)

    def follows(self, left: str, right: str) -> bool:
        """True if a stage on worker `right` may come behind one on `left`."""
        order = self.options.order
        return not order or order.index(left) < order.index(right)

    @cached_property
    def hops(self) -> tuple[tuple[tuple[PartitionOutput, bool], ...], ...]:
        """Per boundary i: the values that go from i - 1 to i, each with whether it has a gradient."""
        found: list[dict[PartitionOutput, bool]] = [{} for _ in self.order]
        for edge in self.profile.edges:
            i = self.position[edge.target]
            if self.position[edge.source] == i - 1:
                output = PartitionOutput(edge.source, edge.output)
                found[i][output] = found[i].get(output, False) or edge.gradient
        return tuple(tuple(hop.items()) for hop in found)

    @cached_property
    def exact(self) -> bool:
        """True for a chain in which every partition waits for the one before, both ways.

        Its closed formula is the simulated step time without ties; with them, and of other graphs, a lower bound.
        """
        whole = all(hop and any(gradient for _, gradient in hop) for hop in self.hops[1:])
        return self.profile.is_chain and whole

    @cached_property
    def spine(self) -> Spine:
        """The heaviest paths forward to, and backward from, one partition."""
        least, positions = _weights(self.profile), range(len(self.order))
        weight = [least.get(name, 0.0) for name in self.order]
        steps = [(self.position[edge.source], self.position[edge.target], edge.gradient) for edge in self.profile.edges]
        there = heaviest_paths(weight, positions, [(i, j) for i, j, _ in steps])
        back = heaviest_paths(weight, positions, [(i, j) for i, j, gradient in steps if gradient])
        end = max(positions, key=lambda i: (there[i][0] + 2 * back[i][0], i))
        forward, backward = ([bool(path[end][1] >> i & 1) for i in positions] for path in (there, back))
        return Spine(
            forward=tuple(forward),
            backward=tuple(backward),
            forward_hop=tuple(i > 0 and forward[i] and forward[i - 1] for i in positions),
            backward_hop=tuple(i > 0 and backward[i] and backward[i - 1] for i in positions),
            end=end,
        )


def _weights(profile: Profile) -> dict[str, float]:
    """Least measured seconds of one sample of each partition: good enough to choose a path by."""
    weight: dict[str, float] = {}
    for point in profile.measurements:
        if point.infeasible is None:
            seconds = (point.forward_s + point.backward_s) / point.micro_batch
            weight[point.partition] = min(seconds, weight.get(point.partition, seconds))
    return weight


def heaviest_paths(
    weight: Sequence[float], positions: Iterable[int], steps: Iterable[tuple[int, int]]
) -> dict[int, tuple[float, int]]:
    """Of each position the weight of the heaviest path that ends there, and the positions on it as a mask.

    Positions come in a topological order; steps from or to others are left out.
    """
    sources: dict[int, list[int]] = {i: [] for i in positions}
    for source, target in steps:
        if source in sources and target in sources:
            sources[target].append(source)
    best: dict[int, tuple[float, int]] = {}
    for i, before in sources.items():
        seconds, path = max((best[j] for j in before), default=(0.0, 0))
        best[i] = seconds + weight[i], path | 1 << i
    return best
