"""All figures of a page as plain data: what its charts draw, and what `assigner report --json` prints.

Of the simulated step, the timeline has each action once, what its like ones share in a table of jobs:

    jobs      [worker, kind, stage, seconds, of which recompute, routes waited for, routes sent on, busy afterwards]
    events    [job, micro-batch, start]          one row for each forward, backward and update
    routes    [payload, partition, output, from, to, bytes, seconds on the wire]
    messages  [route, micro-batch, start]
    critical  the critical path as positions in `events`, in `messages` and in `reductions`

Workers and routes are positions in their lists; times are seconds from the step's start, starts to a nanosecond.
`hosts` has the workers' hosts, empty names where all are on one. After a job, sending and receiving keep its worker
busy for a while: it does not compute then, and is not idle.

Memory over it has an entry for each worker; bytes are whole, but for those of `always`:

    always    what is there all the time: parameters, gradients, optimizer state, buffers
    levels    [activations, workspace, messages]: every state of the rest that occurs
    moments   [when, level]: the level holds from then on

A traced run as figures: some of its steps in full, the median first, and the time of every step.

    actions   [job, micro-batch, start, length]             jobs as in the predicted step
    messages  [route, micro-batch, start, length, queued]   on the link, and how long before it waited for that
    waits     [worker, route, micro-batch, start, length]   a worker waits for a message
    memory    [worker, when, bytes]                         read at the end of a forward, a backward or an update

Times count from the step's start in `unit_s`, a microsecond: the clocks of workers agree less well than that. What a
span is, spans.py says. A run with other rematerialisation than the plan's stands beside the step of the plan as it was
run, which `as_run` holds; its jobs and routes are those of that one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.report.agreement import other_remat
from assigner.report.comparison import figures_data
from assigner.report.page.shown import bound_s, splits_figures
from assigner.report.sheet import host_names
from assigner.schedule.criticalpath import critical_path
from assigner.schedule.orders import CALLED, TOGETHER, ActionKind
from assigner.schedule.program import grouped
from assigner.schedule.timing import compute_s, route_bytes, together_bytes
from assigner.validation.observed import CALL_S
from assigner.validation.spans import measured_spans, median_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.prediction import WorkerPrediction
    from assigner.formats.trace import Trace
    from assigner.report.page.shown import Run, Shown
    from assigner.schedule.cost import CostModel
    from assigner.schedule.occupancy import Occupancy
    from assigner.schedule.program import Action, Route
    from assigner.validation.spans import Spans


_RoutesAround = tuple[tuple[int, ...], tuple[int, ...]]
"""Routes that an action waits for, and those that it sends on, as positions."""
_UNIT_S = 1e-6
MOST = 6000
"""Actions of all drawn steps together, beyond the first: pages stay small."""


def page_data(pages: Sequence[Shown], *, title: str) -> dict[str, Any]:
    """The figures of all plans; the first one is the baseline."""
    workload = pages[0].plan.workload
    return {
        "kind": "report",
        "title": title,
        "workload": workload.name,
        "plans": [_plan(pages, each) for each in pages],
    }


def _plan(pages: Sequence[Shown], page: Shown) -> dict[str, Any]:
    plan = page.plan
    return {
        "name": page.name,
        **figures_data(plan, pages[0].plan),
        "stages": [
            {
                "worker": " + ".join(stage.workers),
                "partitions": fmt.ranges(stage.partitions),
                "remat": len(stage.rematerialise),
            }
            for stage in plan.stages
        ],
        "timeline": timeline_figures(page),
        "measured": [_run(page, run) for run in page.runs],
        "memory": memory_figures(page),
        "splits": splits_figures(page, bound_s(pages, page)),
    }


def _run(page: Shown, run: Run) -> dict[str, Any]:
    """A run of a plan: `steps` has its median step, and its slowest and its fastest where they are not too large."""
    trace, beside = run.trace, run.as_run or page
    line = timeline_figures(beside)
    rows = sum(len(worker.actions) for worker in trace.workers) // trace.steps
    chosen = _chosen(trace)[: max(1, MOST // rows)]
    return {
        "name": run.name,
        "remat": trace.remat,
        "said": " ".join(_said(run)),
        "as_run": {"timeline": line, "memory": memory_figures(beside)} if run.as_run else None,
        "clock_error_s": run.agreement.clock_error_s,
        "peak_bytes": {each.worker: each.peak_bytes for each in trace.workers},
        "step_s": list(trace.step_s),
        "steps": [
            {"label": label, **_step(measured_spans(trace, page.plan, step=n), beside, line)} for n, label in chosen
        ],
    }


def _said(run: Run) -> Iterator[str]:
    """What to know of a run beside its figures, a sentence each."""
    if run.as_run:
        yield f"{run.name}: {other_remat(run.trace.remat)}. Both sides are drawn so."
    yield from (f"{run.name}: {text}; not all is the model's error." for text in run.agreement.disturbances)


def _chosen(trace: Trace) -> list[tuple[int, str]]:
    """The steps that are drawn, each once, with what they are."""
    order = sorted(range(trace.steps), key=lambda step: trace.step_s[step])
    found: dict[int, str] = {}
    for step, label in ((median_step(trace), "median"), (order[-1], "slowest"), (order[0], "fastest")):
        found.setdefault(step, label)
    return list(found.items())


def _step(side: Spans, beside: Shown, line: dict[str, Any]) -> dict[str, Any]:
    """A measured step, in positions of the tables of the predicted one beside it, whose figures `line` has."""
    (step,) = side.steps
    workers = {worker: n for n, worker in enumerate(beside.plan.workers)}
    jobs = {tuple(job[:3]): n for n, job in enumerate(line["jobs"])}
    routes = {route: n for n, route in enumerate(beside.timeline.program.routes)}
    actions, messages, waits, memory, reductions = [], [], [], [], []
    for span in side.spans:
        place, times = workers[span.worker], (_units(span.start_s), _units(span.seconds))
        if span.kind in TOGETHER:
            reductions.append([place, span.stage, *times, CALLED[ActionKind(span.kind)]])
        elif span.route is None:
            actions.append([jobs[place, span.kind, span.stage], span.micro_batch, *times])
            if span.memory_bytes is not None:
                memory.append([place, _units(span.end_s), round(span.memory_bytes)])
        elif span.route not in routes:
            continue
        elif span.kind == "send":
            messages.append([routes[span.route], span.micro_batch, *times, _units(span.queued_s)])
        elif span.seconds >= CALL_S:
            waits.append([place, routes[span.route], span.micro_batch, *times])
    return {
        "number": step.number, "step_s": step.end_s - step.start_s, "unit_s": _UNIT_S, "actions": actions,
        "messages": messages, "waits": waits, "memory": memory, "reductions": reductions,
    }  # fmt: skip


def _units(seconds: float) -> int:
    return round(seconds / _UNIT_S)


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
    events, messages, reductions = list[list[Any]](), list[list[Any]](), list[list[Any]]()
    position: list[tuple[int, int]] = []  # of each in its table
    for event in page.timeline.events:
        action, start = event.action, round(event.start_s, 9)
        if action.route is not None:
            position.append((1, len(messages)))
            messages.append([number[action.route], action.micro_batch, start])
            continue
        if action.kind in TOGETHER:
            size = together_bytes(cost, plan, action.kind, action.stage)
            seconds = round(event.end_s - event.start_s, 9)
            position.append((2, len(reductions)))
            reductions.append([place[event.worker], action.stage, start, seconds, size, CALLED[action.kind]])
            continue
        around = hung[event.worker, action]
        key = (place[event.worker], action.kind.value, action.stage, *around)
        job = jobs.setdefault(key, len(jobs))
        if job == len(busy):
            busy.append(event.busy_s)
        position.append((0, len(events)))
        events.append([job, action.micro_batch, start])
    path = [position[n] for n in critical_path(page.timeline)]
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
        "critical": [[n for which, n in path if which == table] for table in range(3)],
    }


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
