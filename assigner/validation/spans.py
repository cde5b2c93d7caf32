"""Spans: what was predicted of a step and what was measured, action by action in one form, for whoever draws it.

A span is an action of one worker with its start and end on its side's clock, which is 0 where the first step that is
drawn begins:

    predicted    the simulator's timeline, read as the trace of a run that goes just so (`rehearsed`)
    measured     a step of a run's trace, or all of them

so that both lie beside each other and every kind of span means the same on both sides:

    forward, backward, update    the worker computes
    send                         the message is on its link: from when it was handed over and the link was free
    receive                      the worker waits for the message, or takes it, if it was there before
    reduce                       gradients are added up over the workers of a stage, beside what the worker does;
                                 measured, one bucket of them, from when that before it was there

A worker that is early begins a measured step before the step itself does (`Trace.spans`): its first spans are below 0.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from assigner.errors import UsageError
from assigner.formats.plan import Plan
from assigner.formats.trace import WhatHappened, check_same_plan
from assigner.validation.comparison import as_run
from assigner.validation.observed import rehearsed, traced_route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.trace import Trace, TracedAction, TracedMessage
    from assigner.schedule.cost import CostModel
    from assigner.schedule.program import Route
    from assigner.schedule.simulate import Timeline


class Span(NamedTuple):
    """One action of one worker."""

    worker: str
    kind: WhatHappened
    step: int  # the step's number on its side, from 0
    stage: int  # the stage's position in the plan; -1 for an update and the messages of ties
    micro_batch: int  # -1 where there is none
    start_s: float  # its start; of a send, on the link
    end_s: float
    recomputes: bool = False  # of a backward: it runs forwards again before
    message: TracedMessage | None = None  # of a send or a receive
    queued_s: float = 0.0  # of a send: how long it waited for its link after it was handed over
    memory_bytes: float | None = None  # measured at its end; None: not read, or predicted

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s

    @property
    def route(self) -> Route | None:
        """Of a send or a receive: the route of its message."""
        if self.message is None:
            return None
        return traced_route(self.message, self.worker, sent=self.kind == "send")


class Step(NamedTuple):
    """A whole step: its number in the run, its start and its end."""

    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Spans:
    """One side of a picture; the plan is as `as_run` gives it for a trace.

    The spans are by worker in pipeline order, of each in the order of starts.
    """

    side: Literal["predicted", "measured"]
    plan: Plan
    steps: tuple[Step, ...]
    spans: tuple[Span, ...]


def predicted_spans(timeline: Timeline, cost: CostModel, *, steps: int = 1) -> Spans:
    """What the simulator says of a step, so many of them one right behind the other."""
    made = rehearsed(timeline, cost, steps=steps)
    plan, long = timeline.program.plan, timeline.step_s
    whole = tuple(Step(n, n * long, (n + 1) * long) for n in range(steps))
    return Spans("predicted", plan, whole, tuple(_spans(made, plan, range(steps), 0.0)))


def measured_spans(trace: Trace, plan: Plan, *, step: int | None = None) -> Spans:
    """What a run's trace says of one of its steps, by its number from 0, or of all.

    Raises:
        UsageError: the trace has no such step.
        FormatError: the trace is of another plan.
    """
    check_same_plan(trace, plan)
    if step is not None and not 0 <= step < trace.steps:
        raise UsageError(f"step {step} is not in the trace", hint=f"it has steps 0 to {trace.steps - 1}")
    steps = range(trace.steps) if step is None else range(step, step + 1)
    origin = trace.spans[steps[0]][0]
    whole = tuple(Step(n, start - origin, end - origin) for n, (start, end) in enumerate(trace.spans) if n in steps)
    return Spans("measured", as_run(plan, trace), whole, tuple(_spans(trace, as_run(plan, trace), steps, origin)))


def median_step(trace: Trace) -> int:
    """The number of the step that took the middle time; of two in the middle the faster one."""
    order = sorted(range(trace.steps), key=lambda n: trace.step_s[n])
    return order[(trace.steps - 1) // 2]


def _spans(trace: Trace, plan: Plan, steps: range, origin_s: float) -> Iterator[Span]:
    for worker in trace.workers:
        free_s: dict[str, float] = defaultdict(lambda: float("-inf"))  # by receiver: when the link to it is free
        reduced_s: dict[int, float] = defaultdict(lambda: float("-inf"))  # by stage
        for action in sorted(worker.actions, key=lambda each: each.start_s):
            if action.kind == "step" or action.step not in steps:
                continue
            start = action.start_s
            if action.kind == "send" and action.message is not None:
                start = min(max(start, free_s[action.message.peer]), action.end_s)
                free_s[action.message.peer] = action.end_s
            if action.kind == "reduce":
                start = min(max(start, reduced_s[action.stage]), action.end_s)
                reduced_s[action.stage] = max(reduced_s[action.stage], action.end_s)
            yield Span(
                worker.worker, action.kind, action.step - steps[0], action.stage, action.micro_batch,
                start - origin_s, action.end_s - origin_s, _recomputes(trace, plan, action), action.message,
                start - action.start_s, action.memory_bytes,
            )  # fmt: skip


def _recomputes(trace: Trace, plan: Plan, action: TracedAction) -> bool:
    if action.kind not in ("backward", "backward_input") or not plan.stages[action.stage].rematerialise:
        return False
    return trace.remat != "except_last" or action.micro_batch < trace.micro_batches - 1
