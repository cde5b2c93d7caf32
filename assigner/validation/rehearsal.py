"""The trace that a run would write if it went exactly as the simulator says.

So what was predicted and what was measured are read by the same code (observed.py).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from assigner.formats.trace import Trace, TracedAction, TracedMessage, WorkerTrace
from assigner.schedule.orders import TOGETHER, ActionKind
from assigner.schedule.simulate import worker_memory
from assigner.schedule.timing import route_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from assigner.schedule.cost import CostModel
    from assigner.schedule.program import Action, Route
    from assigner.schedule.simulate import Event, Timeline


def rehearsed(timeline: Timeline, cost: CostModel, *, steps: int = 1) -> Trace:
    """A timed program as a trace.

    Args:
        timeline: What `run_program` gave.
        cost: The prices that it was timed with.
        steps: How many steps the trace has, one right behind the other.
    """
    program = timeline.program
    plan = program.plan
    sizes = {route: route_bytes(cost, route, plan.micro_batch_size) for route in program.routes}
    events: dict[str, list[Event]] = defaultdict(list)
    arrivals: dict[tuple[Route, int], float] = {}
    for event in timeline.events:
        events[event.worker].append(event)
        if event.action.route is not None:
            arrivals[event.action.route, event.action.micro_batch] = event.end_s
    workers = []
    for worker in plan.workers:
        once = list(_actions(program.actions[worker], events[worker], arrivals, sizes))
        whole = TracedAction(0, "step", -1, -1, 0.0, timeline.step_s)
        peak = worker_memory(cost, plan, worker).total
        shifted = [
            replace(each, step=n, start_s=each.start_s + n * timeline.step_s, end_s=each.end_s + n * timeline.step_s)
            for n in range(steps)
            for each in (whole, *once)
        ]
        workers.append(WorkerTrace(worker, tuple(shifted), peak, 0.0))
    return Trace.of_plan(plan, workers, steps=steps)


def _actions(
    program: Sequence[Action],
    events: Sequence[Event],
    arrivals: Mapping[tuple[Route, int], float],
    sizes: Mapping[Route, float],
) -> Iterator[TracedAction]:
    """One worker's actions: what it waits for it begins to wait for when it is free."""
    computed = iter([event for event in events if event.action.route is None])
    left = {(e.action.route, e.action.micro_batch): e.end_s for e in events if e.action.route is not None}
    free = ended = 0.0
    for action in program:
        stage, m, route = action.stage, action.micro_batch, action.route
        if route is None:
            event = next(computed)
            together = action.kind in TOGETHER  # which goes on beside what the worker does next
            ended = event.start_s if together else event.end_s
            free = ended + event.busy_s
            yield TracedAction(0, action.kind.value, stage, m, event.start_s, event.end_s)
            continue
        there = action.kind is ActionKind.RECEIVE
        payload: Any = route.payload.value
        peer = route.source if there else route.target
        message = TracedMessage(payload, route.partition, route.output, peer, sizes[route])
        if there:
            start, free = free, max(free, arrivals[route, m])
            yield TracedAction(0, "receive", stage, m, start, free, message)
        else:
            yield TracedAction(0, "send", stage, m, ended, left[route, m], message)
