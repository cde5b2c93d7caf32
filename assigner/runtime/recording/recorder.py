"""What one rank does, noted as it does it: a span for every action, of which the last steps are kept.

A note costs a few microseconds: two looks at the clock. A look at the memory costs more, so actions that follow each
other faster than every 10 ms share one. On CUDA an action only marks the stream at its start and end, and nothing waits
for it; the marks are read when the trace ends.

    mark           F0 ──── F0'  F1 ──── F1'       on the compute stream, reached when the work is
    anchor  a                                     on an idle stream at the step's start, reached at once: its time on
                                                  the host is known, and every mark's is a's plus what lies between
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from assigner.schedule.orders import LETTERS, ActionKind
from assigner.schedule.program import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.runtime.recording.memory import MemoryGauge

LOOK_EVERY_S = 1e-2
"""The least time between two looks at the memory: one takes up to 25 us where computing has emptied the caches."""

_ON_DEVICE = frozenset((*LETTERS, ActionKind.UPDATE))


@dataclass(slots=True)
class RecordedSpan:
    """When an action began and ended, on this process's clock.

    Args:
        action: What was done; None: the whole step.
        start_s: Its start; of a send, when it was handed over, and what is sent was there.
        end_s: Its end; of a send, when it had left. Sends are seen off in order: an earlier one that is still on its
            way holds back the note of a later one.
        moved_bytes: What a send or a receive moved.
        held_bytes: What the process held at the end of a forward, a backward or an update; None: nobody looked.
        marks: On CUDA, the events at its start and end; also of a receive from another GPU, for which the stream waits.
        ready: Of a send from CUDA, whose host is ahead of it, the event at which what is sent has been computed.
    """

    action: Action | None
    start_s: float
    end_s: float = 0.0
    moved_bytes: int = 0
    held_bytes: int | None = None
    marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    ready: torch.cuda.Event | None = None

    def handed_over(self, sent: torch.Tensor) -> None:
        """A send starts now, or as soon as the device has computed what is sent."""
        self.start_s, self.moved_bytes = time.perf_counter(), sent.nbytes
        if sent.is_cuda:
            self.ready = _event()
            self.ready.record()

    @contextmanager
    def on_device(self, moved: torch.Tensor) -> Iterator[None]:
        """The device, where it has what was moved, is to wait in the block."""
        marks = (_event(), _event()) if moved.is_cuda else None
        if marks is not None:
            marks[0].record()
        yield
        if marks is not None:
            marks[1].record()
            self.marks = marks

    def done(self, size: int | None = None) -> None:
        """It ends now."""
        self.end_s = time.perf_counter()
        if size is not None:
            self.moved_bytes = size


@dataclass
class RecordedStep:
    """The spans of a step, the whole of it first, and an event with its time on the host's clock."""

    spans: list[RecordedSpan] = field(default_factory=list)
    anchor: tuple[torch.cuda.Event, float] | None = None

    def reached_s(self, mark: torch.cuda.Event) -> float:
        """When the device reached an event of the step, on the host's clock."""
        assert self.anchor is not None
        event, at_s = self.anchor
        return at_s + float(event.elapsed_time(mark)) / 1e3


class Recorder:
    """Notes the actions of one rank.

    Attributes:
        steps: The last steps that ran the plan's whole program.
        highest_bytes: The most that was held at the end of an action.
    """

    def __init__(self, gauge: MemoryGauge, *, last: int) -> None:
        self.gauge = gauge
        self.steps: deque[RecordedStep] = deque(maxlen=last)
        self.highest_bytes = 0
        self._step = RecordedStep()
        self._looked_s = 0.0
        self._idle = _stream(gauge.device) if gauge.device.type == "cuda" else None

    def begin_step(self) -> None:
        """A step starts now; what an unfinished one left is dropped."""
        anchor = None
        if self._idle is not None:
            event = _event()
            event.record(self._idle)
            event.synchronize()
            anchor = event, time.perf_counter()
        self._step = RecordedStep([RecordedSpan(None, time.perf_counter())], anchor)

    def end_step(self, *, whole: bool) -> None:
        """The step ends now; only one that ran the plan's whole program is kept, and nothing that comes after it."""
        self._step.spans[0].done()
        if whole:
            self.steps.append(self._step)
        self._step = RecordedStep()

    def begin(self, action: Action) -> RecordedSpan:
        """An action starts now."""
        span = RecordedSpan(action, time.perf_counter())
        if self._idle is not None and action.kind in _ON_DEVICE:
            span.marks = _event(), _event()
            span.marks[0].record()
        self._step.spans.append(span)
        return span

    def end(self, span: RecordedSpan) -> None:
        """A forward, a backward or an update ends now."""
        span.done()
        if span.marks is not None:
            span.marks[1].record()
        if span.end_s - self._looked_s >= LOOK_EVERY_S and (held := self.gauge.held()) is not None:
            span.held_bytes, self._looked_s = held, span.end_s
            self.highest_bytes = max(self.highest_bytes, held)

    def settle(self) -> None:
        """Give the spans whose marks the device has reached since their times on the host's clock."""
        if self._idle is not None:
            torch.cuda.synchronize(self.gauge.device)
        for step in self.steps:
            for span in step.spans:
                if span.marks is not None:
                    span.start_s, span.end_s = (step.reached_s(mark) for mark in span.marks)
                elif span.ready is not None:
                    span.start_s = min(span.end_s, max(span.start_s, step.reached_s(span.ready)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
