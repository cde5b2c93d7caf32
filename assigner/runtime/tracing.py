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
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.step.executor import Executor


class Tracing:
    """One trace, from this rank. All ranks make one at the same time.

    Args:
        plan: The run's plan.
        member: This process in the run.
        remat: What is rematerialised.
        base_bytes: What this process held before it built its partitions.
        last: How many steps are kept.

    Attributes:
        recorder: For the executor.
        peak_bytes: The most that this process held until `stop`.
        starved: The share of its processor time that other programs had until then.
        reference: How fast this worker does fixed pieces of work, at the start, and in the end the mean with that.

    Raises:
        LostConnectionError: another rank is gone.
    """

    def __init__(self, plan: Plan, member: Membership, *, remat: RunRemat, base_bytes: int, last: int) -> None:
        self.plan, self.member, self.remat, self.base_bytes = plan, member, remat, base_bytes
        self.reference = measure_reference(member.device)
        self.first = self._compare_clocks()
        self.starvation, self.starved = StarvationWatch(torch.get_num_threads()), 0.0
        self.gauge = MemoryGauge(member.device)
        self.gauge.reset_peak()
        self.recorder = Recorder(self.gauge, last=last)
        self.peak_bytes = 0

    def _compare_clocks(self) -> ClockComparison:
        transport = self.member.transport
        return ClockComparison(0.0) if transport is None else transport.compare_clocks()

    def stop(self) -> None:
        """Nothing more is recorded."""
        self.peak_bytes = max(self.recorder.highest_bytes, self.gauge.peak() or 0)
        self.gauge.close()
        self.starved = self.starvation.share()

    def collect(self) -> Trace | None:
        """The whole trace on rank 0, None on the others; every rank comes here after it has stopped.

        Raises:
            LostConnectionError: another rank is gone.
        """
        self.recorder.settle()
        comparison = self._compare_clocks()
        self.reference = self.reference.together(measure_reference(self.member.device))
        mine = json.dumps(encode(self._worker_trace(comparison))).encode()
        transport, texts = self.member.transport, [mine]
        if transport is not None:
            if self.member.rank:
                transport.put(mine, 0)
                transport.flush()
                return None
            texts += [transport.get(rank) for rank in self.member.ranks[1:]]
        found = {each.worker: each for each in (decode(WorkerTrace, json.loads(text)) for text in texts)}
        plan = self.plan
        return Trace(
            created_at=now(),
            tool_version=__version__,
            environment={
                "torch": torch.__version__,
                "python": platform.python_version(),
                "system": platform.platform(),
                "float32": float32_precision(),
                "ranks": len(texts),
            },
            workload=plan.workload,
            stages=plan.stages,
            schedule=plan.schedule,
            micro_batches=plan.micro_batches,
            micro_batch_size=plan.micro_batch_size,
            remat=self.remat,
            steps=len(self.recorder.steps),
            workers=_from_zero([found[worker] for worker in plan.workers]),
        )

    def _worker_trace(self, last: ClockComparison) -> WorkerTrace:
        clock = PeersClock(self.first, last)
        base = self.base_bytes
        actions = tuple(
            _traced(number, span, clock, base) for number, step in enumerate(self.recorder.steps) for span in step.spans
        )
        peak = max(0, self.peak_bytes - base)
        return WorkerTrace(self.member.worker or "", actions, peak, base, clock.error_s, self.starved, self.reference)


@contextlib.contextmanager
def traced(
    path: Path,
    plan: Plan,
    member: Membership,
    executor: Executor,
    *,
    remat: RunRemat,
    base_bytes: int,
    last: int,
    force: bool,
) -> Iterator[None]:
    """Record the steps of the block and write them; see `Pipeline.trace`, and `Tracing` for the arguments."""
    if last < 1:
        raise UsageError(f"last={last}: a trace has one step or more")
    if executor.recorder is not None:
        raise UsageError("a trace is being made already", hint="leave its block first")
    member.agree(
        "the start of a trace",
        lambda: (
            refuse_existing(path, force=force, remedy="trace(path, force=True) replaces it")
            if member.rank == 0
            else None
        ),
    )
    with member.guarded("the start of a trace"):
        tracing = Tracing(plan, member, remat=remat, base_bytes=base_bytes, last=last)
    executor.recorder = tracing.recorder
    try:
        yield
    finally:
        executor.recorder = None
        tracing.stop()
    if not tracing.recorder.steps:
        raise UsageError(
            f"{path}: no step to write: none had {plan.workload.batch_size} rows and an update",
            hint="make steps of the plan's batch size in the block",
        )
    with member.guarded("the end of a trace"):
        trace = tracing.collect()
        if trace is not None:
            save_trace(trace, path, force=force)


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
