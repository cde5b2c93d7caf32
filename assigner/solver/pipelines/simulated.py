"""A candidate's pipelines as plans: what each takes, as the simulator says it, and better ones near it.

Under 1F1B a stage's memory depends on how many stages lie behind it, and its warm-up may be deeper than that where
memory allows: deeper hides a slow wire (Yan et al., HAPT, arXiv 2509.24859). A pipeline is worth what it takes at the
best warm-up depths that were tried.

In a chain depths never grow from stage to stage: a stage that warms up deeper than the one in front of it would wait
for ever.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from assigner.errors import AssignerError, FormatError
from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.schedule.objective import compared_value
from assigner.schedule.timing import step_s
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import OutOfTime
from assigner.solver.limits.tuning import TIE
from assigner.solver.methods.candidate import DYNAMIC_PROGRAM, LOCAL, PROVEN
from assigner.solver.methods.local_search import is_better, local_search, pipeline_moves
from assigner.solver.pipelines.depth_search import step_times
from assigner.solver.problem.stage_options import exactness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from assigner.solver.methods.local_search import Intervals
    from assigner.solver.pipelines.ranking import PipelineCandidate
    from assigner.solver.problem.stage_options import StageOption

    Depths = tuple[int, ...]
    """Of a pipeline, first stage first: how many micro-batches each stage starts before its first backward."""

    Pipeline = tuple[StageOption, ...]
    Point = tuple[Pipeline, Depths]
    Priced = tuple[float, Sequence[StageOption]]
    """What a pipeline takes, or takes at least, and the pipeline; inf and none where none is known yet."""

_Key = tuple[tuple[int, int, tuple[int, ...]], ...]
"""A pipeline: where each stage starts, the group of its worker, what it runs twice."""

_UNKNOWN: Depths = ()

T = TypeVar("T")


class PipelinePlans:
    """The plans of one candidate's pipelines, whose stages are intervals of one order.

    Args:
        candidate: Has the schedule, the problem and the stage options, and takes plans.

    Attributes:
        actions: Simulated actions that local search may still spend.
    """

    most_depths = tuning.MOST_DEPTHS

    def __init__(self, candidate: PipelineCandidate) -> None:
        self._candidate, self._state, self.problem = candidate, candidate.state, candidate.problem
        self.schedule, self.micro_batches, self.objective = (
            candidate.schedule, candidate.micro_batches, candidate.objective,
        )  # fmt: skip
        self._table, self._options = candidate.table, candidate.options
        self._seen: dict[_Key, tuple[float, Depths]] = {}  # the best that was simulated
        self._deepened: set[_Key] = set()
        self._deep: dict[int, Depths] = {}  # by the number of stages: what the search for depths made of the best plan
        self.actions = tuning.SIMULATED_ACTIONS
        self._priced = 0  # plans, by the simulator

    def forget(self) -> None:
        """Forget what was simulated: more warm-up depths may be tried now."""
        self._seen.clear()

    def simulate(
        self, pipeline: Sequence[StageOption], price: float | None = None, *, found_by: str = DYNAMIC_PROGRAM,
        like: Depths = _UNKNOWN,
    ) -> float:  # fmt: skip
        """Offer a pipeline at the warm-up depths that it has room for; its best value, inf: it cannot run.

        It is compared with the dynamic program's price where that was asked. Of too many depths to try them all, those
        nearest to `like` stand for all, if given.

        Raises:
            OutOfTime: the time is over; the best of the depths until then has been offered.
        """
        key, clock = pipeline_key(pipeline), self._state.clock
        known = self._seen.get(key, (math.inf, _UNKNOWN))
        if key in self._seen and (not like or self._all_depths(pipeline)):
            return known[0]
        best, chosen = (math.inf, math.inf), _UNKNOWN
        for depths in self._depths(pipeline, like):
            value, step = self.worth(self.plan_of(pipeline, depths))
            as_good = value < best[0] * (1 + TIE) or math.isinf(best[0])
            if value < best[0] * (1 - TIE) or (as_good and step < best[1] * (1 - TIE)):
                best, chosen = (value, step), depths
            if chosen and clock.over:
                self._candidate.offer(best[0], partial(self.plan_of, pipeline, chosen), found_by)
                raise OutOfTime
        self._seen[key] = min((best[0], chosen), known, key=lambda each: each[0])
        if not chosen:
            return math.inf
        if price is not None:
            self.check_price(price, best[0], pipeline)
        self._candidate.offer(best[0], lambda: self.plan_of(pipeline, chosen), found_by)
        return best[0]

    def worth(self, plan: Plan) -> tuple[float, float]:
        """A plan's value and its step time, each link by itself; inf: it cannot run."""
        cost = self.problem.cost.apart
        self._priced += 1
        try:
            step = step_s(plan, cost)
            return compared_value(plan, self.objective, cost, step_s=step), step
        except FormatError:  # two workers that must talk have no link, or a stage would wait for ever
            return math.inf, math.inf

    def offer_priced(self, plan: Plan, found_by: str) -> float:
        """Simulate and offer a plan; its value."""
        value, _ = self.worth(plan)
        self._candidate.offer(value, lambda: plan, found_by)
        return value

    def check_price(self, price: float, value: float, pipeline: Sequence[StageOption]) -> None:
        """Raise AssignerError if the dynamic program's price is no bound, or not the value where it should be."""
        exact = self.problem.exact and self.objective in ("throughput", "latency")
        if value < price * (1 - PROVEN) or (exact and value * exactness(pipeline) > price * (1 + PROVEN)):
            raise AssignerError(
                f"the search says {price:.9g} s for a plan that takes {value:.9g} s",
                hint="this is a bug in the solver: please report it with the profile",
            )

    def tried_all(self, pipeline: Sequence[StageOption]) -> bool:
        """True if the simulator has priced every plan that a pipeline stands for; of shared stages it never has."""
        return not any(option.shares for option in pipeline) and self._all_depths(pipeline)

    def _all_depths(self, pipeline: Sequence[StageOption]) -> bool:
        """True if every choice of warm-up depths is simulated; of a chain, of those that do not grow."""
        ranges = [range(option.least_depth, option.most_depth + 1) for option in pipeline]
        choices = falling_count(ranges, self.micro_batches) if self.problem.exact else math.prod(map(len, ranges))
        return choices <= self.most_depths * self._candidate.effort

    def _depths(self, pipeline: Sequence[StageOption], like: Depths) -> Iterator[tuple[int, ...]]:
        """Warm-up depths to try: the usual ones first, then all, or, of too many, those of a few policies."""
        ranges = self.ranges(pipeline)
        if not all(ranges):
            return
        every = self._all_depths(pipeline)
        found = fitting([like] if like and not every else self._policies(pipeline), ranges)
        if every:
            choices = falling(ranges, self.micro_batches) if self.problem.exact else itertools.product(*ranges)
            found = itertools.chain(itertools.islice(found, 1), choices)
        yield from dict.fromkeys(found)

    def ranges(self, pipeline: Sequence[StageOption]) -> list[range]:
        """The warm-up depths that each stage may have."""
        full = self._candidate.additive.flows
        return [
            range(max(option.least_depth, self._usual(pipeline, n) if full else 0), option.most_depth + 1)
            for n, option in enumerate(pipeline)
        ]

    def _usual(self, pipeline: Sequence[StageOption], n: int) -> int:
        """The schedule's own warm-up depth of stage n: the workers from it on."""
        return self._options.usual(sum(len(self._options.sets[option.group]) for option in pipeline[n:]))

    def _policies(self, pipeline: Sequence[StageOption]) -> Iterator[Sequence[int]]:
        """Depths worth a try: the usual ones, what covers the round trip at the pace of the slowest stage, and more.

        The last stage's warm-up is left alone: deeper, it only puts the first backward off.
        """
        usual = [self._usual(pipeline, n) for n in range(len(pipeline))]
        pace = max(option.pace_s(self.micro_batches) for option in pipeline) or 1.0
        trips, trip = [0] * len(pipeline), 0.0
        behind: StageOption | None = None
        for n, option in reversed([*enumerate(pipeline)]):
            hop = None if behind is None else self._options.hop(behind.first, option.group, behind.group)
            trip += option.forward_s + option.backward_s + (hop.forward_s + hop.backward_s if hop else 0.0)
            trips[n], behind = math.ceil(trip / pace - PROVEN), option
        for policy in (
            lambda d, _: d,
            max,
            lambda d, t: max(d, t + 1),
            lambda d, _: d + (d > 1),
            lambda d, _: math.ceil(1.5 * d - 0.5),
            lambda d, _: max(1, 2 * d - 2),
            lambda d, _: math.ceil(2.5 * d - 1.5),
            lambda d, _: self.micro_batches if d > 1 else 1,
        ):
            yield [policy(d, t) for d, t in zip(usual, trips, strict=True)]
        if len(pipeline) in self._deep:  # what was best elsewhere
            yield self._deep[len(pipeline)]

    def deepen(self, pipeline: Sequence[StageOption]) -> float:
        """The best value of a simulated pipeline after local search over what is untried of its plans."""
        key = pipeline_key(pipeline)
        value, depths = self._seen.get(key, (math.inf, _UNKNOWN))
        counts = self._candidate.shares or self.objective == "step"  # what is searched can change the value
        if key in self._deepened or not counts or not depths or self.tried_all(pipeline):
            return value
        self._deepened.add(key)
        ranges, least = self._reach(pipeline), value

        def price(tried: Point) -> float:
            nonlocal least
            self._charge(tried[0])
            found = self.worth(self.plan_of(*tried))[0]
            least = min(least, found)
            return found

        start: Point = tuple(pipeline), depths
        for deep in fitting(self._policies(pipeline), ranges):
            if not self._may_go_on():
                break
            tried = self._at(pipeline, deep), deep
            if tried != start and is_better(found := price(tried), value):
                start, value = tried, found
        best, value = local_search(
            start, value, price=price, may_go_on=self._may_go_on,
            neighbours=lambda at: self._sifted(self._near(at, ranges), lambda point: point, lambda: least),
        )  # fmt: skip
        self._seen[key] = value, best[1]
        self._candidate.offer(value, lambda: self.plan_of(*best), LOCAL)
        if value <= self._candidate.best_value and not self._candidate.shares:
            self._deep[len(pipeline)] = best[1]
        return value

    def _sifted(
        self, found: Iterable[T], point: Callable[[T], Point | None], below: Callable[[], float]
    ) -> Iterator[T]:
        """What local search is to look at of all that is found, and in which order; `point` makes a plan of it."""
        if not self._candidate.sifts:
            yield from found
            return
        found = iter(found)
        while some := list(itertools.islice(found, tuning.SIFTED_AT_ONCE)):
            if not self._may_go_on():
                return
            points = [(each, at) for each in some if (at := point(each)) is not None]
            if not points:
                continue
            steps = step_times(self._options, [at for _, at in points])
            self._charge(points[0][1][0], -(-len(points) // tuning.SIFTED))
            for n in np.argsort(steps, kind="stable").tolist():
                if not is_better(float(steps[n]), below()):
                    break
                yield points[n][0]

    def _like(self, count: int) -> Depths:
        """The best depths known of pipelines of so many stages; where local search sifts, else of one more or less."""
        for other in (count, count + 1, count - 1) if self._candidate.sifts else (count,):
            if other in self._deep:
                return tuple(self._deep[other][n * other // count] for n in range(count))
        return _UNKNOWN

    def _near(self, at: Point, ranges: Sequence[range]) -> Iterator[Point]:
        """Plans of a pipeline to try next: a stage's warm-up made deeper or shallower, and what it recomputes then."""
        return ((self._at(at[0], depths), depths) for depths in nearby(at[1], ranges))

    def _reach(self, pipeline: Sequence[StageOption]) -> list[range]:
        """The warm-up depths that each stage may have with whatever it recomputes."""
        deepest = [self._options.levels_of(option)[-1] for option in pipeline]
        return [
            range(own.start, max(own.stop, deep.most_depth + 1))
            for own, deep in zip(self.ranges(pipeline), deepest, strict=True)
        ]

    def _at(self, pipeline: Sequence[StageOption], depths: Depths) -> Pipeline:
        """The pipeline with what its stages must recompute at these depths."""
        levels = map(self._options.levels_of, pipeline)
        return tuple(
            next((each for each in same if each.least_depth <= depth <= each.most_depth), option)
            for option, same, depth in zip(pipeline, levels, depths, strict=True)
        )

    def plan_of(
        self, pipeline: Sequence[StageOption], depths: Sequence[int], groups: Sequence[Sequence[str]] | None = None
    ) -> Plan:
        """A pipeline as a plan with these warm-up depths.

        `groups` are the workers of each group in the order in which stages take them; None: that of the prices.
        """
        problem = self.problem
        free = [list(reversed(group)) for group in groups or self._table.groups]
        stages = []
        for n, (option, depth) in enumerate(zip(pipeline, depths, strict=True)):
            default = self._usual(pipeline, n)
            stage = Stage(
                None,
                problem.names(range(option.first, option.last + 1)),
                problem.names(option.rematerialise),
                in_flight=None if depth == default else depth,
            )
            names = [free[group].pop() for group in option.named or self._options.sets[option.group]]
            stages.append(problem.held_by(stage, names, option.shares))
        return Plan(
            workload=problem.workload, objective=self.objective, schedule=self.schedule,
            micro_batches=self.micro_batches, micro_batch_size=self._table.size, stages=tuple(stages),
        )  # fmt: skip

    def pipeline_of(self, stages: Sequence[tuple[int, int]]) -> tuple[StageOption, ...] | None:
        """The stage options, recomputing least, of stages as (start, who has it); None: one of them does not fit."""
        if sum(many := [len(self._options.sets[number]) for _, number in stages]) > self._table.most_workers:
            return None
        ends = [start for start, _ in stages[1:]] + [len(self.problem.order)]
        found = [
            self._options.find(start, end - 1, number, sum(many[n:]))
            for n, ((start, number), end) in enumerate(zip(stages, ends, strict=True))
        ]
        whole = tuple(option for option in found if option is not None)
        meets = all(
            self._options.hop(right.first, left.group, right.group) is not None
            for left, right in itertools.pairwise(whole)
        )
        return whole if len(whole) == len(found) and meets else None

    def improve(self, value: float, pipeline: Sequence[StageOption]) -> Priced:
        """Single moves from a pipeline as long as they make it faster; where they lead, with its value."""
        n, sizes = len(self.problem.order), tuple(map(len, self._table.groups))
        least = min(value, self.deepen(pipeline))

        def made(stages: Intervals) -> Pipeline | None:
            tried = self.pipeline_of(stages)
            return None if tried is None else self.as_deep(tried, self._like(len(tried)))

        def point(stages: Intervals) -> Point | None:
            tried = made(stages)
            if tried is None:
                return None
            depths = self._like(len(tried)) or [self._usual(tried, stage) for stage in range(len(tried))]
            return next(((tried, deep) for deep in fitting([depths], self.ranges(tried))), None)

        def price(stages: Intervals) -> float:
            nonlocal least
            tried = made(stages)
            if tried is None or not is_better(self._candidate.least_of(tried), least):
                return math.inf
            before = self._priced
            like = self._like(len(tried)) if self._candidate.sifts else _UNKNOWN
            found = self.simulate(tried, found_by=LOCAL, like=like)
            self._charge(tried, self._priced - before)
            if is_better(found, least):
                least = found = min(found, self.deepen(tried))
            return found

        def moves(at: Intervals) -> Iterator[Intervals]:
            return self._sifted(pipeline_moves(at, n, sizes, self._options.sets), point, lambda: least)

        best, value = local_search(
            tuple((option.first, option.group) for option in pipeline), least, price=price,
            may_go_on=self._may_go_on, neighbours=moves,
        )  # fmt: skip
        return value, made(best) or pipeline

    def as_deep(self, pipeline: Pipeline, depths: Depths) -> Pipeline:
        """What its stages must recompute at about these depths; itself, where it has another number of stages."""
        same = len(depths) == len(pipeline)
        fits = fitting([depths] if same else (), self._reach(pipeline))
        return next((self._at(pipeline, deep) for deep in fits), pipeline)

    def _charge(self, pipeline: Sequence[StageOption], plans: int = 1) -> None:
        """Take off what local search may spend what it took to make and simulate so many plans of a pipeline."""
        workers = sum(max(1, len(option.shares)) for option in pipeline)
        self.actions -= (tuning.PLAN_ACTIONS + 2 * self.micro_batches) * workers * plans

    def _may_go_on(self) -> bool:
        """Whether local search has actions and time left."""
        return self.actions > 0 and self._state.clock.left_s > 0


def pipeline_key(pipeline: Sequence[StageOption]) -> _Key:
    """What tells pipelines apart that are simulated by themselves."""
    return tuple((option.first, option.group, option.rematerialise) for option in pipeline)


def falling(ranges: Sequence[range], most: int) -> Iterator[Depths]:
    """Every choice, one of each range, that never grows, and starts at `most` or less."""
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        if first <= most:
            yield from ((first, *rest) for rest in falling(ranges[1:], first))


def falling_count(ranges: Sequence[range], most: int) -> int:
    """How many choices `falling` gives."""
    ways = [1] * (most + 1)  # by the greatest depth that the next stage may have
    for allowed in reversed(ranges):
        ways = list(itertools.accumulate(ways[depth] if depth in allowed else 0 for depth in range(len(ways))))
    return ways[-1]


def fitting(policies: Iterable[Sequence[int]], ranges: Sequence[range]) -> Iterator[Depths]:
    """Each policy's depths, held to the ranges and never growing; those that cannot be are left out."""
    found: dict[Depths, None] = {}
    for depths in policies:
        held = (max(allowed.start, min(depth, allowed.stop - 1)) for depth, allowed in zip(depths, ranges, strict=True))
        found[tuple(itertools.accumulate(held, min))] = None
    for depths in found:
        if all(depth in allowed for depth, allowed in zip(depths, ranges, strict=True)):
            yield depths


def nearby(depths: Depths, ranges: Sequence[range]) -> Iterator[Depths]:
    """Depths that differ from the given ones by one stage made deeper or shallower, the nearest first.

    By 1, 2, 4, ...: one micro-batch more may change nothing where several do. Stages in front of it follow a deeper
    one, those behind it a shallower one.
    """
    widest = max((len(allowed) for allowed in ranges), default=0)
    changes = itertools.takewhile(lambda change: change < widest, (2**power for power in itertools.count()))
    moved = (
        (*(max(each, depths[n] + change) for each in depths[:n]), depths[n] + change,
         *(min(each, depths[n] + change) for each in depths[n + 1 :]))
        for size in changes for change in (size, -size) for n in range(len(depths))
    )  # fmt: skip
    return (each for each in fitting(moved, ranges) if each != depths)
