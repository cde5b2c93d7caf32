"""A run's trace: every rank records, and at the end rank 0 puts all of it on its own clock and into one file.

The ranks' clocks are compared with rank 0's at the start and at the end of the trace.
"""

from __future__ import annotations

import contextlib
import json
import platform
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from assigner.errors import UsageError
from assigner.files import refuse_existing
from assigner.formats.document import decode, encode, now
from assigner.formats.trace import Trace, TracedAction, TracedMessage, WorkerTrace, save_trace
from assigner.machine.starvation import StarvationWatch
from assigner.runtime.ranks.process import float32_precision
from assigner.runtime.ranks.run import one_call
from assigner.runtime.recording.clock import ClockComparison, PeersClock
from assigner.runtime.recording.memory import MemoryGauge
from assigner.runtime.recording.recorder import RecordedSpan, Recorder
from assigner.runtime.recording.reference import measure_reference
from assigner.schedule.program import ActionKind
from assigner.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from assigner.formats.plan import Plan
    from assigner.formats.terms import RunRemat
    from assigner.runtime.installation import Installation
    from assigner.runtime.ranks.membership import Membership


@contextlib.contextmanager
def traced(
    path: Path,
    installed: Installation,
    *,
    remat: RunRemat,
    base_bytes: int,
    last: int,
    force: bool,
) -> Iterator[None]:
    """Record the steps of the block and write them; see `Pipeline.trace`. All ranks enter and leave it together.

    `base_bytes` is what this process held before it built its partitions.
    """
    plan, member, executor = installed.plan, installed.member, installed.executor

    def check() -> None:
        if member.rank == 0:
            refuse_existing(path, force=force, remedy="trace(path, force=True) replaces it")

    with one_call():
        at = "the start of a trace"
        with member.guarded(at):
            installed.comparison.check("trace()", f"trace({str(path)!r})")
        if last < 1:
            raise UsageError(f"last={last}: a trace has one step or more")
        if executor.recorder is not None:
            raise UsageError("a trace is being made already", hint="leave its block first")
        member.agree(at, check)
        with member.guarded(at):
            reference = measure_reference(member.device)
            first = _compare_clocks(member)
            starvation = StarvationWatch(torch.get_num_threads())
            gauge = MemoryGauge(member.device)
            gauge.reset_peak()
            recorder = Recorder(gauge, last=last)
    executor.recorder = recorder
    try:
        yield
    finally:
        executor.recorder = None
        peak_bytes = max(recorder.highest_bytes, gauge.peak() or 0)
        gauge.close()
        starved = starvation.share()
    with one_call():
        at = "the end of a trace"
        with member.guarded(at):
            installed.comparison.check("the end of trace()")
        if not recorder.steps:
            raise UsageError(
                f"{path}: no step to write: none had {plan.workload.batch_size} rows and an update",
                hint="make steps of the plan's batch size in the block",
            )
        with member.guarded(at):
            recorder.settle()
            clock = PeersClock(first, _compare_clocks(member))
            reference = reference.together(measure_reference(member.device))
            actions = tuple(
                _traced(number, span, clock, base_bytes)
                for number, step in enumerate(recorder.steps)
                for span in step.spans
            )
            peak = max(0, peak_bytes - base_bytes)
            mine = WorkerTrace(member.worker or "", actions, peak, base_bytes, clock.error_s, starved, reference)
            workers = _gathered(mine, member)

        def write() -> None:
            if workers:
                save_trace(_trace(plan, workers, remat=remat, steps=len(recorder.steps)), path, force=force)

        member.agree(at, write)  # training can go on without it


def _compare_clocks(member: Membership) -> ClockComparison:
    return ClockComparison(0.0) if member.transport is None else member.transport.compare_clocks()


def _gathered(mine: WorkerTrace, member: Membership) -> list[WorkerTrace]:
    if member.transport is None:
        return [mine]
    data = json.dumps(encode(mine)).encode()
    if member.rank:
        member.transport.put(data, 0)
        member.transport.flush()
        return []
    texts = [data, *(member.transport.get(rank) for rank in member.others)]
    return [decode(WorkerTrace, json.loads(text)) for text in texts]


def _trace(plan: Plan, workers: Sequence[WorkerTrace], *, remat: RunRemat, steps: int) -> Trace:
    found = {each.worker: each for each in workers}
    return Trace.of_plan(
        plan,
        _from_zero([found[worker] for worker in plan.workers]),
        steps=steps,
        remat=remat,
        created_at=now(),
        tool_version=__version__,
        environment={
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
            "float32": float32_precision(),
            "ranks": len(workers),
        },
    )


def _traced(step: int, span: RecordedSpan, clock: PeersClock, base: int) -> TracedAction:
    start, end = clock.time(span.start_s), clock.time(span.end_s)
    if span.action is None:
        return TracedAction(step, "step", -1, -1, start, end)
    action, message = span.action, None
    if action.route is not None:
        peer = action.route.target if action.kind is ActionKind.SEND else action.route.source
        message = TracedMessage(
            cast("Any", action.route.payload.value), action.route.partition, action.route.output, peer, span.moved_bytes
        )
    held = None if span.held_bytes is None else max(0, span.held_bytes - base)
    return TracedAction(step, action.kind.value, action.stage, action.micro_batch, start, end, message, held)


def _from_zero(workers: Sequence[WorkerTrace]) -> tuple[WorkerTrace, ...]:
    """The workers with the first action of all at 0 s."""
    zero = min(action.start_s for worker in workers for action in worker.actions)
    return tuple(
        replace(
            worker,
            actions=tuple(
                replace(action, start_s=action.start_s - zero, end_s=action.end_s - zero) for action in worker.actions
            ),
        )
        for worker in workers
    )
