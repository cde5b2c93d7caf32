"""The simulated step as figures: its timeline, and memory over it.

The timeline has each action once, what its like ones share in a table of jobs:

    jobs      [worker, kind, stage, seconds, of which recompute, routes waited for, routes sent on, busy afterwards]
    events    [job, micro-batch, start]          one row for each forward, backward and update
    routes    [payload, partition, output, from, to, bytes, seconds on the wire]
    messages  [route, micro-batch, start]
    critical  the critical path as positions in `events` and in `messages`

Workers and routes are positions in their lists; times are seconds from the step's start, starts to a nanosecond.
`hosts` has the workers' hosts, empty names where all are on one. After a job, sending and receiving keep its worker
busy for a while: it does not compute then, and is not idle.

Memory has an entry for each worker; bytes are whole, but for those of `always`:

    always    what is there all the time: parameters, gradients, optimizer state, buffers
    levels    [activations, workspace, messages]: every state of the rest that occurs
    moments   [when, level]: the level holds from then on
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner.report.sheet import host_names
from assigner.schedule.criticalpath import critical_path
from assigner.schedule.orders import CALLED, TOGETHER, ActionKind
from assigner.schedule.program import grouped
from assigner.schedule.timing import compute_s, route_bytes, together_bytes

if TYPE_CHECKING:
    from assigner.formats.prediction import WorkerPrediction
    from assigner.report.page.shown import Shown
    from assigner.schedule.cost import CostModel
    from assigner.schedule.occupancy import Occupancy
    from assigner.schedule.program import Action, Route

_RoutesAround = tuple[tuple[int, ...], tuple[int, ...]]
"""Routes that an action waits for, and those that it sends on, as positions."""


def timeline_figures(page: Shown) -> dict[str, Any]:
    """The step of a plan as it was simulated."""
    program, plan, cost = page.timeline.program, page.plan, page.cost
    place = {worker: n for n, worker in enumerate(plan.workers)}
    hosts = host_names(page.profile)
    number = {route: n for n, route in enumerate(program.routes)}
    hung: dict[tuple[str, Action], _RoutesAround] = {
        (worker, action): (
            tuple(number[route] for route in receives),
            tuple(number[each.route] for each in sends if each.route),
        )
        for worker, actions in program.actions.items()
        for action, receives, sends in grouped(actions)
    }
    jobs: dict[tuple[Any, ...], int] = {}
    busy: list[float] = []
    events, messages, reductions = [], [], []
    for event in page.timeline.events:
        action, start = event.action, round(event.start_s, 9)
        if action.route is not None:
            messages.append([number[action.route], action.micro_batch, start])
            continue
        if action.kind in TOGETHER:
            size = together_bytes(cost, plan, action.kind, action.stage)
            seconds = round(event.end_s - event.start_s, 9)
            reductions.append([place[event.worker], action.stage, start, seconds, size, CALLED[action.kind]])
            continue
        around = hung[event.worker, action]
        key = (place[event.worker], action.kind.value, action.stage, *around)
        job = jobs.setdefault(key, len(jobs))
        if job == len(busy):
            busy.append(event.busy_s)
        events.append([job, action.micro_batch, start])
    return {
        "step_s": page.timeline.step_s,
        "workers": list(plan.workers),
        "hosts": [hosts.get(worker, "") for worker in plan.workers],
        "jobs": [
            [*key[:3], *_seconds(page, *key[:3]), *map(list, key[3:]), seconds]
            for key, seconds in zip(jobs, busy, strict=True)
        ],
        "events": events,
        "routes": [_route(cost, route, place, plan.micro_batch_size) for route in program.routes],
        "messages": messages,
        "reductions": reductions,
        "critical": _critical(page),
    }


def _critical(page: Shown) -> list[list[int]]:
    """The critical path as positions: of its rows in `events`, in `messages`, in `reductions`."""
    place = [0, 0, 0]
    position = []
    for event in page.timeline.events:
        table = 2 if event.action.kind in TOGETHER else int(event.action.route is not None)
        position.append((table, place[table]))
        place[table] += 1
    path = [position[n] for n in critical_path(page.timeline)]
    return [[n for which, n in path if which == table] for table in range(3)]


def _seconds(page: Shown, worker: int, kind: str, stage: int) -> tuple[float, float]:
    """How long an action takes, and how much of it is running forward again."""
    plan, cost, name = page.plan, page.cost, page.plan.workers[worker]
    again = plan.stages[stage].rematerialise if kind == ActionKind.BACKWARD else ()
    recompute = sum(cost.partition(each, name, plan.micro_batch_size).recompute_s for each in again)
    return compute_s(cost, plan, (ActionKind(kind), stage, name)), recompute


def _route(cost: CostModel, route: Route, place: dict[str, int], micro_batch: int) -> list[Any]:
    size = route_bytes(cost, route, micro_batch)
    seconds = cost.transfer_s(route.source, route.target, size)
    return [
        route.payload.value, route.partition, route.output, place[route.source], place[route.target], size, seconds,
    ]  # fmt: skip


def memory_figures(page: Shown) -> list[dict[str, Any]]:
    """What every worker of a plan holds over the step, beside what it may hold."""
    return [_worker_memory(held, said) for held, said in zip(page.memory, page.predicted.workers, strict=True)]


def _worker_memory(held: Occupancy, said: WorkerPrediction) -> dict[str, Any]:
    levels: dict[tuple[int, int, int], int] = {}
    moments = []
    for each in held.held:
        level = (round(each.activations), round(each.workspace), round(each.messages))
        moments.append([round(each.at_s, 9), levels.setdefault(level, len(levels))])
    return {
        "worker": held.worker,
        "capacity_bytes": said.capacity_bytes,
        "allowed_bytes": said.peak_bytes,
        "peak_bytes": held.peak.total,
        "peak_at_s": held.highest.at_s,
        "always": {
            "parameters": held.state.parameters, "gradients": held.state.gradients,
            "optimizer": held.state.optimizer, "buffers": held.state.buffers,
        },
        "levels": [list(level) for level in levels],
        "moments": moments,
    }  # fmt: skip
