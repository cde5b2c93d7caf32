"""What a trace says in the cost model's own terms: how long things took, and when a worker only waited.

A worker's step, read from its trace. Between two things that it does there is overhead, which is no wait:

    lead   F0 ──── behind │ wait for a message ──── │ before  F1 ──── behind  F2 ...  U ────   tail

A message's flight is known only where its receiver waited for it: only then is it known when it was there.

What was predicted is read by the same code: from the trace that a run would write if it went exactly as the simulator
says (`rehearsed`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from assigner.formats.trace import Trace, TracedAction, TracedMessage, WorkerTrace
from assigner.samples import Samples
from assigner.schedule.orders import TOGETHER, ActionKind
from assigner.schedule.program import Payload, Route
from assigner.schedule.simulate import worker_memory
from assigner.schedule.timing import Compute, route_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from assigner.schedule.cost import CostModel
    from assigner.schedule.program import Action
    from assigner.schedule.simulate import Event, Timeline

CALL_S = 5e-5
"""Taking a message that is there already lasts some microseconds: a shorter wait than this is overhead, and no wait."""

WAITED = 0.25
"""A message that was waited for during less than this share of its way had come before: waking up took that long."""

_Message = tuple[Route, int, int]  # a route's message: micro-batch and step
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Observed:
    """What a trace says, each over all steps and micro-batches."""

    step: Samples  # whole steps
    # forwards, backwards, updates; and of reductions the time in which all of their workers have begun one
    compute: Mapping[Compute, Samples]
    before: Mapping[Compute, Samples]  # from the end of a wait, or the step's start, to the action
    behind: Mapping[Compute, Samples]  # from the end of an action to the next one, or to the wait before that
    lead: Mapping[str, Samples]  # from the step's start, anywhere, to a worker's first action or wait
    tail: Samples  # from the end of the last action, anywhere, to the step's end
    flights: Mapping[Route, Samples]  # of the messages that were waited for, once the link was free for them
    waits: Mapping[str, Samples]  # of each worker, in a step
    overheads: Mapping[str, Samples]  # of each worker, in a step: all of its before, behind and lead


@dataclass
class _Notes:
    """Figures as they are read, one list for each thing."""

    compute: dict[Compute, list[float]] = field(default_factory=lambda: defaultdict(list))
    before: dict[Compute, list[float]] = field(default_factory=lambda: defaultdict(list))
    behind: dict[Compute, list[float]] = field(default_factory=lambda: defaultdict(list))
    lead: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    overheads: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def read(self, worker: str, actions: Iterable[TracedAction], start_s: float) -> float:
        """One worker's step that began at `start_s`; returns when its last action ended.

        A device may still compute when its host begins to wait: the wait counts from the device's end. A reduction goes
        on beside what the worker does; what its update waits for it is a wait.
        """
        now, waited, overhead, pending, reduced = start_s, 0.0, 0.0, 0.0, start_s
        last: Compute | None = None
        began = False
        for action in sorted(actions, key=lambda each: each.start_s):
            if action.kind == "reduce":
                reduced = max(reduced, action.end_s)
                continue
            if action.kind == "gather":  # behind the update, and the next step waits for it
                waited, now = waited + max(0.0, action.end_s - now), max(now, action.end_s)
                continue
            if action.kind == "update" and min(reduced, action.start_s) > now:
                wait, now = min(reduced, action.start_s) - now, min(reduced, action.start_s)
                waited, last = waited + wait, None
            gap = max(0.0, action.start_s - now)
            overhead += gap
            if not began:
                self.lead[worker].append(gap)
                began = True
            elif last is not None:
                self.behind[last].append(gap)
            else:
                pending += gap
            if action.kind == "receive":
                wait, last = max(0.0, action.end_s - max(now, action.start_s)), None
                if wait >= CALL_S:
                    waited += wait
                else:
                    overhead += wait
                    pending += wait
            else:
                last = ActionKind(action.kind), action.stage, worker
                self.compute[last].append(action.seconds)
                self.before[last].append(pending)
                pending = 0.0
            now = max(now, action.end_s)
        self.waits[worker].append(waited)
        self.overheads[worker].append(overhead)
        return now


def observe(trace: Trace) -> Observed:
    """Read a trace."""
    notes, tails = _Notes(), []
    parts: dict[tuple[str, int], list[TracedAction]] = defaultdict(list)
    for worker in trace.workers:
        for action in worker.actions:
            if action.kind not in ("step", "send"):
                parts[worker.worker, action.step].append(action)
    for step, (start, end) in enumerate(trace.spans):
        last = max(notes.read(each.worker, parts[each.worker, step], start) for each in trace.workers)
        tails.append(max(0.0, end - last))
        for key, seconds in _together({each.worker: parts[each.worker, step] for each in trace.workers}):
            notes.compute[key].append(seconds)
    return Observed(
        step=Samples(trace.step_s), tail=Samples(tuple(tails)), flights=_samples(_flights(trace)),
        compute=_samples(notes.compute), before=_samples(notes.before), behind=_samples(notes.behind),
        lead=_samples(notes.lead), waits=_samples(notes.waits), overheads=_samples(notes.overheads),
    )  # fmt: skip


def _together(step: Mapping[str, Sequence[TracedAction]]) -> Iterator[tuple[Compute, float]]:
    """The reductions and gatherings of a step, for each of their workers: the time in which all have begun one.

    A reduction has a span for each of its buckets, in one order on all workers; between them it waits for a backward.
    """
    found: dict[tuple[ActionKind, int], dict[str, list[TracedAction]]] = defaultdict(lambda: defaultdict(list))
    for worker, actions in step.items():
        for action in sorted(actions, key=lambda each: each.start_s):
            if action.kind in TOGETHER:
                found[ActionKind(action.kind), action.stage][worker].append(action)
    for (kind, stage), mine in found.items():
        begun_s = [max(each.start_s for each in bucket) for bucket in zip(*mine.values(), strict=False)]
        for worker, buckets in mine.items():
            total, reached = 0.0, float("-inf")
            for begin, action in zip(begun_s, buckets, strict=False):
                total += max(0.0, action.end_s - max(begin, reached))
                reached = max(reached, action.end_s)
            yield (kind, stage, worker), total


def _samples(lists: Mapping[_Key, Sequence[float]]) -> dict[_Key, Samples]:
    return {key: Samples(tuple(values)) for key, values in lists.items()}


def traced_route(message: TracedMessage, worker: str, *, sent: bool) -> Route:
    """The route of a traced message, for the worker that sent or received it."""
    ends = (worker, message.peer) if sent else (message.peer, worker)
    return Route(Payload(message.payload), message.partition, message.output, *ends)


def _flights(trace: Trace) -> dict[Route, list[float]]:
    """Seconds on the wire of the messages whose start and end are known.

    A message starts when it was handed over and the one before it on its link was there. Of one that was not waited
    for it is only known that it was there when it was asked for: where that is later than the next one's handing
    over, the next one's start is not known either.
    """
    handed: dict[_Message, float] = {}
    received: dict[_Message, TracedAction] = {}
    links: dict[tuple[str, str], list[tuple[float, _Message]]] = defaultdict(list)
    for worker in trace.workers:
        for action in worker.actions:
            if action.message is None:
                continue
            route = traced_route(action.message, worker.worker, sent=action.kind == "send")
            message = route, action.micro_batch, action.step
            if action.kind == "send":
                handed[message] = action.start_s
                links[route.source, route.target].append((action.start_s, message))
            else:
                received[message] = action
    flights: dict[Route, list[float]] = defaultdict(list)
    for link in links.values():
        free: float | None = float("-inf")  # None: somewhere up to `latest`
        latest = float("-inf")
        for handed_s, message in sorted(link, key=lambda each: each[0]):
            taken = received.get(message)
            if taken is None:
                free, latest = None, float("inf")
                continue
            known = free if free is not None else handed_s if latest <= handed_s else None
            seen = taken.seconds >= max(CALL_S, WAITED * (taken.end_s - max(handed_s, free or handed_s)))
            if seen and known is not None and taken.end_s > max(handed_s, known):
                flights[message[0]].append(taken.end_s - max(handed_s, known))
            free, latest = (taken.end_s if seen else None), taken.end_s
    return flights


def rehearsed(timeline: Timeline, cost: CostModel, *, steps: int = 1) -> Trace:
    """A timed program, with the prices that it was timed with, as a trace of so many steps right behind each other."""
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
