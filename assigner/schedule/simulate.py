"""Price a program: when each action starts and ends, who waits, and what a step takes.

A worker does one action at a time in its program's order; an action starts when the worker is free and its inputs
are there (timing.py). `predict` prices a plan in full; `step_s` gives its step time alone, for searching.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.formats.prediction import Prediction, TransferPrediction, WorkerPrediction
from assigner.schedule.cost import CostModel
from assigner.schedule.orders import TOGETHER, ActionKind, halves, in_flight, order_of
from assigner.schedule.program import Action, Program, build_program, grouped
from assigner.schedule.queues import run_queues
from assigner.schedule.replication import held_state, leaving
from assigner.schedule.timing import Prices, bucket_bytes, route_bytes, step_s, stopped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Memory
    from assigner.formats.profile import Profile
    from assigner.schedule.orders import Halves
    from assigner.schedule.program import ActionGroup
    from assigner.schedule.queues import Queue, Timed

__all__ = [
    "Event", "Timeline", "check_fit", "check_step", "overfull", "predict", "prediction_of", "priced", "run_program",
    "simulated", "stages_memory", "step_s", "summary", "worker_memory",
]  # fmt: skip


class Event(NamedTuple):
    """One action as it was timed, in seconds from the step's start.

    Args:
        start_s: Its start; of a send, on the wire; of a reduction or a gathering, when the worker began it.
        end_s: Its end; of a send, on the wire; of a reduction or a gathering, the same for all of its workers.
        busy_s: How long its messages keep the worker from its next action: after its end, and of a reduction, which
            goes on beside what the worker does, after its start.
    """

    worker: str
    action: Action
    start_s: float
    end_s: float
    busy_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A step as the simulator sees it.

    Args:
        events: Compute actions, reductions and messages (as their sender's action), each worker's in its order.
        step_s: The end of the last action.
        wires: Of links of the program that share one, by source and target: its number, and the share of a message's
            time for which it takes no other.
    """

    program: Program
    events: tuple[Event, ...]
    step_s: float
    wires: Mapping[tuple[str, str], tuple[int, float]] = field(default_factory=dict)


def run_program(program: Program, cost: CostModel) -> Timeline:
    """Time every action and message of a program.

    Raises:
        FormatError: the profile cannot price an action, a link is missing, or the program waits for itself.
    """
    prices = Prices(program.plan, cost, program.routes)
    groups = [grouped(actions) for actions in program.actions.values()]
    job = cache(prices.job)  # micro-batches of one stage share theirs, unless their messages differ
    queues: list[Queue] = []
    for worker, mine in zip(program.actions, groups, strict=True):
        queues.append([])
        for action, receives, sends in mine:
            what, sent = (action.kind, action.stage, worker), tuple(send.route for send in sends)
            queues[-1].append((job(what, tuple(receives), sent), action.micro_batch))
    log: list[Timed] = []
    done, last = run_queues([*queues, *prices.collectives()], log, shared=prices.shared)
    for worker, mine, count in zip(program.actions, groups, done, strict=False):
        if count < len(mine):
            raise stopped(worker, mine[count].action.kind, mine[count].action.stage)
    workers = list(program.actions)
    ended_s = {
        prices.together[timed.worker - len(workers)]: timed.end_s for timed in log if timed.worker >= len(workers)
    }
    return Timeline(program, tuple(_events(log, groups, queues, workers, ended_s)), last, prices.wires)


def _events(
    log: Iterable[Timed],
    groups: Sequence[Sequence[ActionGroup]],
    queues: Sequence[Queue],
    workers: Sequence[str],
    ended_s: Mapping[tuple[ActionKind, int], float],
) -> Iterator[Event]:
    """What was timed; `ended_s` is the end of what workers do together, by its kind and stage."""
    for timed in log:
        if timed.worker >= len(workers):
            continue
        worker, (action, _, sends) = workers[timed.worker], groups[timed.worker][timed.job]
        job = queues[timed.worker][timed.job][0]
        end = ended_s[action.kind, action.stage] if action.kind in TOGETHER else timed.end_s
        yield Event(worker, action, timed.start_s, end, job.busy_s)
        # of what workers do together, the last send tells that the worker has begun it: no message of the program
        for send, begin, (_, _, seconds, _) in zip(sends, timed.begins_s, job.sends, strict=False):
            yield Event(worker, send, begin, begin + seconds)


def worker_memory(cost: CostModel, plan: Plan, worker: str) -> Memory:
    """What a worker holds at its peak under a plan, in bytes."""
    stages = [
        (plan.stages[n].partitions, plan.stages[n].rematerialise, in_flight(plan, n, worker)) for n in plan.held[worker]
    ]
    split = {}
    if plan.orders:
        steps = order_of(plan, worker)
        split = {k: found for k, n in enumerate(plan.held[worker]) if (found := halves(steps, n))}
    return stages_memory(cost, plan, worker, stages, split)


def stages_memory(
    cost: CostModel, plan: Plan, worker: str, stages: Sequence[tuple[Sequence[str], Sequence[str], int]],
    split: Mapping[int, frozenset[Halves]] = MappingProxyType({}),
) -> Memory:  # fmt: skip
    """What a worker holds of its stages, in bytes: of each (partitions, the rematerialised, micro-batches in flight).

    `split` has by number of the stage among the worker's what it holds where backwards run in two parts.
    """
    if not plan.is_replicated:
        return cost.memory(worker, stages, plan.micro_batch_size, halves=split)
    sent = leaving(plan, cost.profile.edges, worker)
    bucket = bucket_bytes(cost, plan, worker)
    return cost.memory(
        worker, stages, plan.micro_batch_size, leaving=sent, bucket_bytes=bucket, halves=split,
        state=held_state(cost, plan, worker),
    )  # fmt: skip


def _covered_s(spans: list[tuple[float, float]]) -> float:
    """Length of the union of time spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def predict(plan: Plan, profile: Profile) -> Prediction:
    """Price a plan: simulate its program and add up times, transfers and memory.

    Args:
        plan: What to price; its own `predicted` plays no part.
        profile: The measurements.

    Raises:
        FormatError: plan and profile do not fit together.
    """
    return prediction_of(plan, CostModel(profile))


def prediction_of(plan: Plan, cost: CostModel) -> Prediction:
    """The same by the prices of a profile."""
    return summary(simulated(plan, cost), cost)


def simulated(plan: Plan, cost: CostModel) -> Timeline:
    """The timeline of a plan's program; errors as `predict`."""
    check_fit(plan, cost.profile)
    return run_program(build_program(plan, cost.profile.edges, cost.profile.ties), cost)


def summary(timeline: Timeline, cost: CostModel) -> Prediction:
    """Times, transfers and memory of a program that was timed with these prices, added up."""
    plan, step = timeline.program.plan, timeline.step_s
    workers = tuple(_workers(timeline, cost))
    idle = 1 - sum(each.compute_s for each in workers) / (len(workers) * step) if step else 0.0
    return Prediction(
        step_s=step,
        samples_per_s=plan.workload.batch_size / step if step else 0.0,
        bubble_fraction=max(0.0, idle),
        workers=workers,
        transfers=tuple(_transfers(timeline, cost)),
    )


def _workers(timeline: Timeline, cost: CostModel) -> Iterator[WorkerPrediction]:
    plan, step = timeline.program.plan, timeline.step_s
    compute: dict[str, list[tuple[float, float]]] = defaultdict(list)
    moving: dict[str, list[tuple[float, float]]] = defaultdict(list)
    doing: dict[tuple[str, ActionKind], float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    for event in timeline.events:
        span, route = (event.start_s, event.end_s), event.action.route
        if route is not None:
            moving[route.source].append(span)
            moving[route.target].append(span)
        elif event.action.kind in TOGETHER:
            moving[event.worker].append(span)
            busy[event.worker] += min(event.busy_s, step - event.start_s)
        else:
            compute[event.worker].append(span)
            doing[event.worker, event.action.kind] += event.end_s - event.start_s
            busy[event.worker] += min(event.busy_s, step - event.end_s)
    for worker in plan.workers:
        computing = _covered_s(compute[worker])
        transfer = _covered_s(compute[worker] + moving[worker]) - computing
        memory = worker_memory(cost, plan, worker)
        yield WorkerPrediction(
            worker, computing, transfer, max(0.0, step - computing - transfer), memory, memory.total,
            cost.profile.worker[worker].capacity_bytes,
            doing[worker, ActionKind.FORWARD], doing[worker, ActionKind.UPDATE], busy[worker],
        )  # fmt: skip


def _transfers(timeline: Timeline, cost: CostModel) -> Iterator[TransferPrediction]:
    carried: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in timeline.events:
        route = event.action.route
        if route is not None:
            total = carried[route.source, route.target]
            total[0] += route_bytes(cost, route, timeline.program.plan.micro_batch_size)
            total[1] += event.end_s - event.start_s
    for (source, target), (size, seconds) in carried.items():
        yield TransferPrediction(source, target, size, seconds)


def priced(plan: Plan, profile: Profile) -> Plan:
    """The plan with its prediction filled in; errors as `predict`."""
    return replace(plan, predicted=predict(plan, profile))


def overfull(prediction: Prediction) -> tuple[WorkerPrediction, ...]:
    """The workers whose predicted peak is above their capacity; empty: the plan fits."""
    return tuple(worker for worker in prediction.workers if not worker.fits)


def check_fit(plan: Plan, profile: Profile, *, whole: bool = True) -> None:
    """Raise FormatError unless the plan's workers and partitions are the profile's.

    A part of a plan (not `whole`) may have some of the partitions, and no fingerprint.
    """
    fingerprint = plan.workload.fingerprint
    if fingerprint != profile.workload.fingerprint and (whole or fingerprint):
        raise FormatError(
            f"the plan is for workload {plan.workload.label}, the profile of {profile.workload.label}",
            hint="solve again from this profile" if whole else "leave its fingerprint out if it is meant all the same",
        )
    for n, stage in enumerate(plan.stages):
        for what, names, known in (
            ("workers", stage.workers, profile.worker), ("partitions", stage.partitions, profile.partition),
        ):  # fmt: skip
            strange = next((name for name in names if name not in known), None)
            if strange is not None:
                raise FormatError(
                    f"stages[{n}]: the plan names {strange!r}, which the profile has not",
                    hint=fmt.meant(strange, [*known], what),
                )
    missing = set(profile.partition) - set(plan.partitions)
    if missing and whole:
        among = " among them" if len(missing) > 1 else ""
        raise FormatError(
            f"the plan places {fmt.plural(len(missing), 'partition')} nowhere: {min(missing)!r}{among}",
            hint="assigner solve PROFILE --complete PLAN -o NEW places what is missing, and leaves the others",
        )


def check_step(plan: Plan, profile: Profile) -> None:
    """Raise FormatError where a predicted step takes no time and measured times, continued, have fallen to 0 for it."""
    if plan.predicted is None or plan.predicted.step_s > 0:
        return
    cost, size = CostModel(profile), plan.micro_batch_size
    for name, worker in ((name, worker) for each in plan.stages for name in each.partitions for worker in each.workers):
        took = {
            point.micro_batch: point.forward_s + point.backward_s
            for point in cost.measurements(name, worker) if point.infeasible is None
        }  # fmt: skip
        if size not in took and any(took.values()):
            raise FormatError(
                f"a step of this plan would take no time: what {name!r} takes on {worker} falls to 0 or below, on the"
                f" line through its measured times, at a micro-batch of {size}",
                hint=f"assigner profile --micro-batches with {size} among them; or solve --micro-batches N for a number"
                " that cuts the batch into sizes that were measured",
            )
