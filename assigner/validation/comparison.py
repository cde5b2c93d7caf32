"""What was predicted of a plan beside what a run of it took: step, stages, messages, workers and their memory.

Where the difference between the two step times comes from the simulator tells: it is asked again with measured figures
in the place of predicted ones, one group after the other:

    predicted ─ compute ─▶ ─ transfers ─▶ ─ overheads ─▶ ─ messages' processor time ─▶ ─ variation ─▶
              ─ not explained ─▶ measured

Each group moves the step time by what the plan makes of it: a slow worker that nobody waits for moves nothing. The
first three are medians. Variation is what means say beyond: where an action now and then takes long, workers that wait
for each other at every stage pay for each such time. (Two ranks on two cores with other work on them, plans of 6 and
14 stages: medians left 19 to 73 ms of 300 to 372 ms unexplained, means -1 to 20 ms.) A part of it may be the processor
time of messages: priced behind an action, and taken by other threads from whichever action runs. So what was priced and
not seen between actions is said by itself, as far as means are beyond medians. What is left over are actions that get
in each other's way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Literal

from assigner.errors import FormatError
from assigner.formats.plan import Plan
from assigner.formats.trace import Trace, check_same_plan
from assigner.samples import Samples
from assigner.schedule.cost import CostModel
from assigner.schedule.orders import LETTERS, computes_of, counted
from assigner.schedule.program import ActionKind, Program, Route, wire
from assigner.schedule.simulate import simulated, worker_memory
from assigner.schedule.timing import Instead, compute_s, route_bytes, step_s
from assigner.validation.machine import MachineAgreement, disturbances, machines, paced_step_s
from assigner.validation.observed import Observed, observe, rehearsed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from assigner.formats.profile import Profile
    from assigner.schedule.timing import Compute

_CANDIDATES = 8
"""Of each group, so many are tried alone: those that differ most, added up over a step."""
_Middle = Callable[[Samples], float]
_MEDIAN: _Middle = attrgetter("median_s")
_MEAN: _Middle = attrgetter("mean_s")


@dataclass(frozen=True)
class Compared:
    """A time as predicted and as measured, the median of so many samples, in seconds; nothing measured: None.

    `iqr_s` is how far the middle half of what was measured spreads.
    """

    predicted_s: float
    measured_s: float | None
    iqr_s: float
    samples: int

    @property
    def error(self) -> float | None:
        """How far the prediction is above (+) or below (-) what was measured, as a share of that."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None


@dataclass(frozen=True)
class ComputeAgreement:
    """A forward, a backward, an update, or what workers do together (once all have begun it); `count` make a step."""

    kind: str
    stage: int | None
    worker: str
    count: int
    once: Compared

    @property
    def difference_s(self) -> float:
        """How much longer all of them in a step took than predicted."""
        return 0.0 if self.once.measured_s is None else self.count * (self.once.measured_s - self.once.predicted_s)


@dataclass(frozen=True)
class RouteAgreement:
    """Messages of one route: `samples` of `once` says how many were waited for, `count` how many a step has."""

    route: Route
    bytes: float
    count: int
    once: Compared


@dataclass(frozen=True)
class WorkerAgreement:
    """What a worker does with a step beside computing, and what it holds at its peak.

    Overhead is neither computing nor waiting: predicted are the busy shares of its messages. The capacity is its memory
    less its reserve.
    """

    worker: str
    wait: Compared
    overhead: Compared
    predicted_bytes: float
    measured_bytes: float
    capacity_bytes: float

    @property
    def memory_error(self) -> float | None:
        """How far the predicted peak is above (+) or below (-) the measured one, as a share of that."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None


@dataclass(frozen=True)
class Deviation:
    """One thing that took another time than predicted, and how far it alone moves the step time."""

    group: Literal["compute", "transfers", "overheads"]  # what kind of thing it is
    what: str
    worker: str  # whose; of messages their sender
    stage: int | None  # of a forward or a backward
    target: str | None  # of messages, their receiver
    predicted_s: float  # seconds of one of them; of overheads, of all in a step
    measured_s: float  # the same as measured
    step_s: float = 0.0  # how much longer the predicted step gets with this figure as it was measured, and no other


_Tried = tuple[float, Deviation, Instead]  # how large it is over a step, the cause, what is replaced


@dataclass(frozen=True)
class Explanation:
    """What adds up to the difference between the predicted and the measured step time, in seconds."""

    compute_s: float  # forwards, backwards and updates
    transfers_s: float  # messages on the wire
    overheads_s: float  # what workers lose between two actions, and before the first and after the last of a step
    # processor time that messages were predicted to take and did not take between actions: as far as the actions' means
    # have it beyond their medians
    handling_s: float
    variation_s: float  # of all these, what their means are beyond their medians, without that
    unexplained_s: float  # the rest
    causes: tuple[Deviation, ...]  # single ones, that which moves the step time most first


@dataclass(frozen=True)
class Agreement:
    """A plan's prediction and a trace of its run, side by side."""

    plan: Plan  # as it was run: with the rematerialisation of the run
    remat: str  # what the run did with the plan's rematerialisation
    steps: int  # how many were traced
    step: Compared
    computes: tuple[ComputeAgreement, ...]  # by stage, then the updates
    routes: tuple[RouteAgreement, ...]  # in the order of their values
    workers: tuple[WorkerAgreement, ...]  # in pipeline order
    explanation: Explanation  # where the difference comes from
    clock_error_s: float  # how far the workers' clocks may be apart from the first one's
    observed: Observed  # all that was read from the trace
    machines: tuple[MachineAgreement, ...] = ()  # the workers' machines then and now; empty: nobody looked
    # the predicted step on the machines as they were in the run, in seconds; None: nobody looked
    paced_s: float | None = None
    # what other programs and settings did to the profile and to the run, a sentence each
    disturbances: tuple[str, ...] = ()


def as_run(plan: Plan, trace: Trace) -> Plan:
    """The plan with the rematerialisation that the traced run had.

    One that kept the graphs of each step's last micro-batch ("except_last") is priced as if it had not: the cost model
    has one price for all micro-batches of a stage. Its step is shorter by a recompute, and it holds more. With one
    micro-batch there is none but the last.
    """
    if trace.remat == "plan":
        return plan
    everything = trace.remat == "always" or (trace.remat == "except_last" and plan.micro_batches > 1)
    stages = (replace(stage, rematerialise=stage.partitions if everything else ()) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def agree(plan: Plan, profile: Profile, trace: Trace) -> Agreement:
    """Put a plan's prediction by a profile and a trace of its run side by side.

    Raises:
        FormatError: the trace is of another plan, or lacks a worker or the forwards of a stage, or plan and profile do
            not fit together.
    """
    check_same_plan(trace, plan)
    seen = observe(trace)
    missing = set(plan.workers) - set(seen.lead)
    if missing:
        raise FormatError(f"the trace says nothing of {min(missing)}", hint="trace the run on all its workers")
    run = {stage for kind, stage, _ in seen.compute if kind is ActionKind.FORWARD}
    if bare := set(range(len(plan.stages))) - run:
        raise FormatError(
            f"the trace has no forward of stages[{min(bare)}]", hint="trace the run again: pipeline.trace(PATH)"
        )
    plan, cost = as_run(plan, trace), CostModel(profile)
    timeline = simulated(plan, cost)
    said, changed = observe(rehearsed(timeline, cost)), machines(profile, trace)
    return Agreement(
        plan=plan,
        remat=trace.remat,
        steps=trace.steps,
        step=_compared(timeline.step_s, seen.step),
        computes=tuple(_computes(plan, cost, seen)),
        routes=tuple(_routes(timeline.program, cost, seen)),
        workers=tuple(_workers(plan, cost, said, seen, trace)),
        explanation=explain(plan, cost, said, seen),
        clock_error_s=max(each.clock_error_s for each in trace.workers),
        observed=seen,
        machines=changed,
        paced_s=paced_step_s(plan, cost, timeline.program.routes, changed),
        disturbances=disturbances(profile, trace),
    )


def _compared(predicted_s: float, found: Samples | None) -> Compared:
    if found is None:
        return Compared(predicted_s, None, 0.0, 0)
    return Compared(predicted_s, found.median_s, found.iqr_s, len(found.seconds))


def _computes(plan: Plan, cost: CostModel, seen: Observed) -> Iterator[ComputeAgreement]:
    for key in computes_of(plan):
        kind, stage, worker = key
        count, position = _actions_of(plan, key), None if kind is ActionKind.UPDATE else stage
        once = _compared(compute_s(cost, plan, key), seen.compute.get(key))
        yield ComputeAgreement(kind.value, position, worker, count, once)


def _routes(program: Program, cost: CostModel, seen: Observed) -> Iterator[RouteAgreement]:
    for route in program.routes:
        size = route_bytes(cost, route, program.plan.micro_batch_size)
        once = _compared(cost.transfer_s(route.source, route.target, size), seen.flights.get(route))
        yield RouteAgreement(route, size, program.sent[route], once)


def _workers(plan: Plan, cost: CostModel, said: Observed, seen: Observed, trace: Trace) -> Iterator[WorkerAgreement]:
    peaks = {each.worker: each.peak_bytes for each in trace.workers}
    for worker in plan.workers:
        yield WorkerAgreement(
            worker,
            _compared(said.waits[worker].median_s, seen.waits.get(worker)),
            _compared(said.overheads[worker].median_s, seen.overheads.get(worker)),
            worker_memory(cost, plan, worker).total,
            peaks[worker],
            cost.profile.worker[worker].capacity_bytes,
        )


def explain(plan: Plan, cost: CostModel, predicted: Observed, measured: Observed) -> Explanation:
    """Replace what was predicted, read from the rehearsed trace, by what was measured; the plan is as it was run."""
    wiring = wire(plan, cost.profile.edges, cost.profile.ties)
    compute = {key: samples.median_s for key, samples in measured.compute.items()}
    flights = _flights(plan, cost, wiring.routes, measured, _MEDIAN)
    with_compute = Instead(seconds=compute)
    with_transfers = replace(with_compute, flights=flights)
    with_overheads = replace(_all(measured, _MEDIAN), flights=flights)
    with_means = replace(_all(measured, _MEAN), flights=_flights(plan, cost, wiring.routes, measured, _MEAN))
    with_handling = replace(with_overheads, busy=_at_least(predicted, with_overheads.busy))
    said = step_s(plan, cost)
    steps = [
        step_s(plan, cost, instead=figures)
        for figures in (with_compute, with_transfers, with_overheads, with_handling, with_means)
    ]
    steps[2] += measured.tail.median_s
    steps[3] += measured.tail.median_s
    steps[4] += measured.tail.mean_s
    steps[3] = max(steps[2], min(steps[3], steps[4]))
    moved = [after - before for before, after in pairwise([said, *steps, measured.step.median_s])]
    tried = [
        *_first(_slow_computes(plan, cost, compute)), *_first(_transfers(plan, cost, flights)),
        *_first(_losses(plan, cost, predicted, measured)),
    ]  # fmt: skip
    alone = [replace(cause, step_s=step_s(plan, cost, instead=figures) - said) for _, cause, figures in tried]
    causes = tuple(sorted(alone, key=lambda cause: -abs(cause.step_s)))
    computing_s, transfers_s, overheads_s, handling_s, variation_s, unexplained_s = moved
    return Explanation(computing_s, transfers_s, overheads_s, handling_s, variation_s, unexplained_s, causes)


def _at_least(predicted: Observed, busy: Mapping[Compute, float]) -> dict[Compute, float]:
    """What workers lose behind their actions, where that is less than was predicted as much as was."""
    said = {key: samples.median_s for key, samples in predicted.behind.items()}
    return {key: max(seconds, said.get(key, 0.0)) for key, seconds in busy.items()}


def _flights(
    plan: Plan, cost: CostModel, routes: tuple[Route, ...], measured: Observed, middle: _Middle
) -> dict[Route, float]:
    """Seconds of one message of each route: as measured, or as its link's other messages say; else not in it."""
    said = {
        route: cost.transfer_s(route.source, route.target, route_bytes(cost, route, plan.micro_batch_size))
        for route in routes
    }
    factors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for route, samples in measured.flights.items():
        if said.get(route):
            factors[route.source, route.target].append(middle(samples) / said[route])
    found = {}
    for route in routes:
        if route in measured.flights:
            found[route] = middle(measured.flights[route])
        elif factors[route.source, route.target]:
            found[route] = said[route] * median(factors[route.source, route.target])
    return found


def _all(measured: Observed, middle: _Middle) -> Instead:
    """What is measured of compute and of what workers lose between."""
    return Instead(
        seconds={
            key: middle(samples) + (middle(measured.before[key]) if key in measured.before else 0.0)
            for key, samples in measured.compute.items()
        },
        busy={key: middle(samples) for key, samples in measured.behind.items()},
        leads={worker: middle(samples) for worker, samples in measured.lead.items()},
    )


def _first(found: Iterator[_Tried]) -> list[_Tried]:
    return sorted(found, key=lambda each: -abs(each[0]))[:_CANDIDATES]


def _slow_computes(plan: Plan, cost: CostModel, compute: Mapping[Compute, float]) -> Iterator[_Tried]:
    for key, seconds in compute.items():
        kind, stage, worker = key
        said, count = compute_s(cost, plan, key), _actions_of(plan, key)
        cause = Deviation("compute", kind.value, worker, stage if stage >= 0 else None, None, said, seconds)
        yield count * (seconds - said), cause, Instead(seconds={key: seconds})


def _actions_of(plan: Plan, compute: Compute) -> int:
    """How many of a step's actions these are."""
    kind, stage, worker = compute
    return counted(plan, stage, worker).get(kind, 0) if kind in LETTERS else 1


def _transfers(plan: Plan, cost: CostModel, flights: Mapping[Route, float]) -> Iterator[_Tried]:
    links: dict[tuple[str, str], dict[Route, float]] = defaultdict(dict)
    for route, seconds in flights.items():
        links[route.source, route.target][route] = seconds
    for (source, target), mine in links.items():
        said = sum(cost.transfer_s(source, target, route_bytes(cost, r, plan.micro_batch_size)) for r in mine)
        took = sum(mine.values())
        cause = Deviation("transfers", "messages", source, None, target, said / len(mine), took / len(mine))
        yield plan.micro_batches * (took - said), cause, Instead(flights=mine)


def _losses(plan: Plan, cost: CostModel, predicted: Observed, measured: Observed) -> Iterator[_Tried]:
    for worker in plan.workers:
        said, took = predicted.overheads[worker].median_s, measured.overheads[worker].median_s
        mine = [key for key in measured.before if key[2] == worker]
        figures = Instead(
            seconds={key: compute_s(cost, plan, key) + measured.before[key].median_s for key in mine},
            busy={key: measured.behind[key].median_s for key in mine if key in measured.behind},
            leads={worker: measured.lead[worker].median_s},
        )
        yield took - said, Deviation("overheads", "overhead", worker, None, None, said, took), figures
