"""What was predicted of a plan beside what a run of it took: step, stages, messages, workers and their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.plan import Plan
from assigner.formats.trace import Trace, check_same_plan
from assigner.schedule.cost import CostModel
from assigner.schedule.orders import computes_of
from assigner.schedule.program import ActionKind, Program, Route
from assigner.schedule.simulate import simulated, worker_memory
from assigner.schedule.timing import compute_s, route_bytes
from assigner.validation.explanation import Explanation, actions_of, explain
from assigner.validation.machine import MachineAgreement, disturbances, machines, paced_step_s
from assigner.validation.observed import Observed, observe
from assigner.validation.rehearsal import rehearsed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.profile import Profile
    from assigner.samples import Samples


@dataclass(frozen=True)
class Compared:
    """A time as predicted and as measured, in seconds; nothing measured: None.

    Args:
        predicted_s: By the simulator.
        measured_s: The median.
        iqr_s: How far the middle half of what was measured spreads.
        samples: How often it was measured.
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

    Args:
        worker: Its name.
        wait: For messages.
        overhead: Neither computing nor waiting: predicted are the busy shares of its messages.
        predicted_bytes: The peak.
        measured_bytes: The peak.
        capacity_bytes: The worker's memory less its reserve.
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
class Agreement:
    """A plan's prediction and a trace of its run, side by side.

    Args:
        plan: As it was run: with the rematerialisation of the run.
        remat: What the run did with the plan's rematerialisation.
        steps: How many were traced.
        step: The step time.
        computes: By stage, then the updates.
        routes: In the order of their values.
        workers: In pipeline order.
        explanation: Where the difference comes from.
        clock_error_s: How far the workers' clocks may be apart from the first one's.
        observed: All that was read from the trace.
        machines: The workers' machines then and now; empty: nobody looked.
        paced_s: The predicted step on the machines as they were in the run, in seconds; None: nobody looked.
        disturbances: What other programs and settings did to the profile and to the run, a sentence each.
    """

    plan: Plan
    remat: str
    steps: int
    step: Compared
    computes: tuple[ComputeAgreement, ...]
    routes: tuple[RouteAgreement, ...]
    workers: tuple[WorkerAgreement, ...]
    explanation: Explanation
    clock_error_s: float
    observed: Observed
    machines: tuple[MachineAgreement, ...] = ()
    paced_s: float | None = None
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
    """Put a plan's prediction and a trace of its run side by side.

    Args:
        plan: What was run.
        profile: What prices it.
        trace: Of the run.

    Raises:
        FormatError: the trace is of another plan or lacks a worker, or plan and profile do not fit together.
    """
    check_same_plan(trace, plan)
    seen = observe(trace)
    missing = set(plan.workers) - set(seen.lead)
    if missing:
        raise FormatError(f"the trace says nothing of {min(missing)}", hint="trace the run on all its workers")
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
        disturbances=tuple(disturbances(profile, trace)),
    )


def _compared(predicted_s: float, found: Samples | None) -> Compared:
    if found is None:
        return Compared(predicted_s, None, 0.0, 0)
    return Compared(predicted_s, found.median_s, found.iqr_s, len(found.seconds))


def _computes(plan: Plan, cost: CostModel, seen: Observed) -> Iterator[ComputeAgreement]:
    for key in computes_of(plan):
        kind, stage, worker = key
        count, position = actions_of(plan, key), None if kind is ActionKind.UPDATE else stage
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
