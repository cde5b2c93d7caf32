"""A traced run as figures: some of its steps in full, the most ordinary first, and the time of every step.

    actions   [job, micro-batch, start, length]          jobs as in the predicted step (timeline.py)
    messages  [route, micro-batch, handed over, length]  routes as there
    memory    [worker, when, bytes]                      read at the end of a forward, a backward or an update

Times count from the step's start in `unit_s`, a microsecond: the clocks of workers agree less well than that.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from assigner.agreement.observed import CALL_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.report.page.shown import Run, Shown
    from assigner.schedule import Route
    from assigner.trace import Trace, TracedAction

_UNIT_S = 1e-6
_COMPUTES = ("forward", "backward", "update")
MOST = 6000
"""Actions of all drawn steps together, beyond the first: pages stay small."""


class _Places(NamedTuple):
    """Positions in the tables of the predicted step."""

    worker: dict[str, int]
    job: dict[tuple[Any, ...], int]
    route: dict[Route, int]


def measured_data(page: Shown, run: Run, jobs: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A run of a plan: `steps` has its median step, and its slowest and its fastest where they are not too large.

    Args:
        page: The plan.
        run: Of it.
        jobs: Of the predicted step, each beginning with its worker's position, its kind and its stage.
    """
    trace = run.trace
    places = _Places(
        worker={worker: n for n, worker in enumerate(page.plan.workers)},
        job={tuple(job[:3]): n for n, job in enumerate(jobs)},
        route={route: n for n, route in enumerate(page.timeline.program.routes)},
    )
    rows = sum(len(worker.actions) for worker in trace.workers) // trace.steps
    return {
        "name": run.name,
        "remat": trace.remat,
        "clock_error_s": run.agreement.clock_error_s,
        "peak_bytes": {each.worker: each.peak_bytes for each in trace.workers},
        "step_s": list(trace.step_s),
        "steps": [_step(trace, step, label, places) for step, label in _chosen(trace)[: max(1, MOST // rows)]],
    }


def _chosen(trace: Trace) -> list[tuple[int, str]]:
    """The steps that are drawn, each once, with what they are."""
    took = trace.step_s
    middle = median(took)
    order = sorted(range(len(took)), key=lambda step: took[step])
    nearest = min(order, key=lambda step: abs(took[step] - middle))
    found: dict[int, str] = {}
    for step, label in ((nearest, "median"), (order[-1], "slowest"), (order[0], "fastest")):
        found.setdefault(step, label)
    return list(found.items())


def _step(trace: Trace, step: int, label: str, places: _Places) -> dict[str, Any]:
    begin, end = trace.spans[step]
    actions, memory = [], []
    sent: dict[tuple[int, int], TracedAction] = {}
    received: dict[tuple[int, int], TracedAction] = {}
    for worker in trace.workers:
        for each in worker.actions:
            if each.step != step:
                continue
            if each.kind in _COMPUTES:
                place = places.worker[worker.worker]
                job = places.job[place, each.kind, each.stage]
                actions.append([job, each.micro_batch, _units(each.start_s - begin), _units(each.seconds)])
                if each.memory_bytes is not None:
                    memory.append([place, _units(each.end_s - begin), round(each.memory_bytes)])
            elif each.message is not None and each.route(worker.worker) in places.route:
                side = sent if each.kind == "send" else received
                side[places.route[each.route(worker.worker)], each.micro_batch] = each
    messages = [
        [*message, _units(action.start_s - begin), _units(_there(action, received.get(message)) - action.start_s)]
        for message, action in sent.items()
    ]
    return {
        "number": step, "label": label, "step_s": end - begin, "unit_s": _UNIT_S, "actions": actions,
        "messages": messages, "memory": memory,
    }  # fmt: skip


def _there(sent: TracedAction, received: TracedAction | None) -> float:
    """When a message was there; of one that was not waited for it is known when it had left."""
    if received is not None and received.seconds >= CALL_S:
        return max(sent.start_s, received.end_s)
    return sent.end_s if received is None else max(sent.start_s, min(sent.end_s, received.end_s))


def _units(seconds: float) -> int:
    return round(seconds / _UNIT_S)
