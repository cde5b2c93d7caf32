"""Price a program: when each action starts and ends, who waits, and what a step takes.

A worker does one action at a time in its program's order; an action starts when the worker is free and its inputs
are there. A directed link has one sender, so the order in which its messages are ready is the order of that
worker's sends: every time follows from earlier ones, and one pass over the programs prices them all.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assigner.cost import CostModel, Output
from assigner.errors import FormatError
from assigner.plan import Prediction, TransferPrediction, WorkerPrediction
from assigner.schedule import Action, Kind, Payload, Program, Route, build_program, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from assigner.plan import Memory, Plan
    from assigner.profile import Profile


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it was timed, in seconds from the step's start; of a send, the time on the wire."""

    worker: str
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step as the simulator sees it.

    Args:
        program: What ran.
        events: Compute actions and messages (as their sender's action), each worker's in its order.
        step_s: The end of the last action.
    """

    program: Program
    events: tuple[Event, ...]
    step_s: float


@dataclass(frozen=True, slots=True)
class _Wire:
    """One message of a route: seconds on the wire, and in which its two ends are busy with it."""

    seconds: float
    sender_s: float
    receiver_s: float


@dataclass(slots=True)
class _Job:
    """A compute action with the messages that it waits for and those that it makes."""

    action: Action
    receives: list[Action]
    sends: list[Action]


def _jobs(actions: Iterable[Action]) -> list[_Job]:
    jobs: list[_Job] = []
    receives: list[Action] = []
    for action in actions:
        if action.kind is Kind.RECEIVE:
            receives.append(action)
        elif action.kind is Kind.SEND:
            jobs[-1].sends.append(action)
        else:
            jobs.append(_Job(action, receives, []))
            receives = []
    return jobs


def route_bytes(cost: CostModel, route: Route, micro_batch: int) -> float:
    """Bytes of one message of a route."""
    if route.payload is Payload.TIE:
        return cost.profile.ties[route.output].bytes
    return cost.output_bytes(Output(route.partition, route.output), micro_batch)


def _wire(cost: CostModel, route: Route, micro_batch: int) -> _Wire:
    size = route_bytes(cost, route, micro_batch)
    seconds = cost.transfer_s(route.source, route.target, size)
    if math.isinf(seconds):
        raise FormatError(
            f"the plan needs a link from {route.source} to {route.target}, and the profile has none",
            hint="measure that pair, or place the partitions so that the two need not talk",
        )
    return _Wire(seconds, *cost.busy_s(route.source, route.target, size))


def stage_s(cost: CostModel, plan: Plan, stage: int, kind: Kind) -> float:
    """Seconds of one forward or backward of a stage; a backward includes its recomputing."""
    held = plan.stages[stage]
    prices = {name: cost.partition(name, held.worker, plan.micro_batch_size) for name in held.partitions}
    if kind is Kind.FORWARD:
        return sum(price.forward_s for price in prices.values())
    return sum(price.backward_s for price in prices.values()) + sum(
        prices[name].forward_s for name in held.rematerialise
    )


def update_s(cost: CostModel, plan: Plan, worker: str) -> float:
    """Seconds of one worker's optimizer update."""
    held = [name for stage in plan.stages if stage.worker == worker for name in stage.partitions]
    return sum(cost.partition(name, worker, plan.micro_batch_size).update_s for name in held)


def run_program(program: Program, cost: CostModel) -> Timeline:
    """Time every action and message of a program.

    Raises:
        FormatError: the profile cannot price an action, a link is missing, or the program waits for itself.
    """
    plan = program.plan
    compute_s = {
        (kind, n): stage_s(cost, plan, n, kind)
        for n in range(len(plan.stages))
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    update = {worker: update_s(cost, plan, worker) for worker in plan.workers}
    wires = {route: _wire(cost, route, plan.micro_batch_size) for route in program.routes}
    waiting = {worker: deque(_jobs(actions)) for worker, actions in program.actions.items()}
    free_s = dict.fromkeys(waiting, 0.0)
    link_free_s: dict[tuple[str, str], float] = defaultdict(float)
    arrival_s: dict[tuple[Route | None, int], float] = {}
    events: list[Event] = []

    def runnable(worker: str) -> Iterator[_Job]:
        jobs = waiting[worker]
        while jobs and all((each.route, each.micro_batch) in arrival_s for each in jobs[0].receives):
            yield jobs.popleft()

    ready = deque(waiting)
    while ready:
        worker = ready.popleft()
        for job in runnable(worker):
            action = job.action
            start = max([free_s[worker], *(arrival_s[each.route, each.micro_batch] for each in job.receives)])
            end = start + (update[worker] if action.kind is Kind.UPDATE else compute_s[action.kind, action.stage])
            events.append(Event(worker, action, start, end))
            busy = sum(wires[each.route].receiver_s for each in job.receives if each.route)
            for send in job.sends:
                route = send.route
                assert route is not None
                wire, link = wires[route], (route.source, route.target)
                begin = max(end, link_free_s[link])
                link_free_s[link] = arrival_s[route, send.micro_batch] = begin + wire.seconds
                events.append(Event(worker, send, begin, begin + wire.seconds))
                busy += wire.sender_s
                ready.append(route.target)
            free_s[worker] = end + busy
    stuck = next((worker for worker, jobs in waiting.items() if jobs), None)
    if stuck is not None:
        action = waiting[stuck][0].action
        raise FormatError(
            f"the program stops: {stuck} waits for ever before {action.kind} of stage {action.stage}",
            hint="order the stages as the model's forward does",
        )
    return Timeline(program, tuple(events), max(event.end_s for event in events))


def worker_memory(cost: CostModel, plan: Plan, worker: str) -> Memory:
    """What a worker holds at its peak under a plan, in bytes."""
    stages = [
        (stage.partitions, stage.rematerialise, warm_up(plan, n))
        for n, stage in enumerate(plan.stages)
        if stage.worker == worker
    ]
    return cost.memory(worker, stages, plan.micro_batch_size)


def _covered_s(spans: list[tuple[float, float]]) -> float:
    """Length of the union of time spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def predict(plan: Plan, profile: Profile, cost: CostModel | None = None) -> Prediction:
    """Price a plan: simulate its program and add up times, transfers and memory.

    Args:
        plan: What to price; its own `predicted` plays no part.
        profile: The measurements.
        cost: The profile's cost model, where the caller has one already.

    Raises:
        FormatError: plan and profile do not fit together.
    """
    cost = cost or CostModel(profile)
    check_fit(plan, profile)
    program = build_program(plan, profile.edges, profile.ties)
    timeline = run_program(program, cost)
    step = timeline.step_s
    compute: dict[str, list[tuple[float, float]]] = defaultdict(list)
    moving: dict[str, list[tuple[float, float]]] = defaultdict(list)
    carried: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in timeline.events:
        span, route = (event.start_s, event.end_s), event.action.route
        if route is None:
            compute[event.worker].append(span)
            continue
        moving[route.source].append(span)
        moving[route.target].append(span)
        total = carried[route.source, route.target]
        total[0] += route_bytes(cost, route, plan.micro_batch_size)
        total[1] += event.end_s - event.start_s
    workers = []
    for worker in plan.workers:
        computing = _covered_s(compute[worker])
        transfer = _covered_s(compute[worker] + moving[worker]) - computing
        memory = worker_memory(cost, plan, worker)
        workers.append(
            WorkerPrediction(
                worker, computing, transfer, step - computing - transfer, memory, memory.total,
                profile.worker[worker].capacity_bytes,
            )
        )  # fmt: skip
    idle = 1 - sum(each.compute_s for each in workers) / (len(workers) * step) if step else 0.0
    return Prediction(
        step_s=step,
        samples_per_s=plan.workload.batch_size / step if step else 0.0,
        bubble_fraction=max(0.0, idle),
        workers=tuple(workers),
        transfers=tuple(TransferPrediction(*link, *total) for link, total in carried.items()),
    )


def priced(plan: Plan, profile: Profile, cost: CostModel | None = None) -> Plan:
    """The plan with its prediction filled in; errors as `predict`."""
    return replace(plan, predicted=predict(plan, profile, cost))


def overfull(prediction: Prediction) -> tuple[WorkerPrediction, ...]:
    """The workers whose predicted peak is above their capacity; empty: the plan fits."""
    return tuple(worker for worker in prediction.workers if worker.peak_bytes > worker.capacity_bytes)


def check_fit(plan: Plan, profile: Profile) -> None:
    """Raise FormatError unless the plan's workers and partitions are the profile's."""
    if plan.workload.fingerprint != profile.workload.fingerprint:
        raise FormatError(
            f"the plan is for workload {plan.workload.name!r} ({plan.workload.fingerprint[:15] or 'no fingerprint'}),"
            f" the profile of {profile.workload.name!r} ({profile.workload.fingerprint[:15] or 'no fingerprint'})",
            hint="solve again from this profile",
        )
    strange = [name for name in plan.workers if name not in profile.worker]
    strange += [name for name in plan.partitions if name not in profile.partition]
    if strange:
        raise FormatError(
            f"the plan names {strange[0]!r}, which the profile has not", hint="solve again from this profile"
        )
    missing = set(profile.partition) - set(plan.partitions)
    if missing:
        raise FormatError(f"the plan places {len(missing)} partitions nowhere, {min(missing)!r} among them")
