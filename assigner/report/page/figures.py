"""All figures of a page as plain data: what its charts draw, and what `assigner report --json` prints.

A traced run as figures: some of its steps in full, the median first, and the time of every step.

    actions   [job, micro-batch, start, length]             jobs as in the predicted step (simulated.py)
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
from assigner.report.page.shown import bound_s
from assigner.report.page.simulated import memory_figures, timeline_figures
from assigner.report.page.splits import splits_figures
from assigner.schedule.orders import CALLED, TOGETHER, ActionKind
from assigner.validation.observed import CALL_S
from assigner.validation.spans import measured_spans, median_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.trace import Trace
    from assigner.report.page.shown import Run, Shown
    from assigner.validation.spans import Spans

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
