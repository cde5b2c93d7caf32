"""The trace: what every worker of a run did, action by action, on one clock.

It has the shape of a program (schedule/program.py), so that what was predicted and what happened compare action by
action.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from assigner.errors import FormatError
from assigner.formats.document import Count, Range, Share, check_unique, read, write
from assigner.formats.orders import STEP_LETTERS, ListedStep
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import MicroBatches, Stage, check_stages
from assigner.formats.terms import RunRemat, Schedule
from assigner.machine.reference import ReferenceTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan

VERSIONS = ("1.0",)

WhatHappened = Literal[
    "step", "forward", "backward", "backward_input", "backward_weight", "send", "receive", "reduce", "update", "gather"
]
Number = Annotated[int, Range(-1)]


@dataclass(frozen=True, slots=True)
class TracedMessage:
    """What a send or a receive moved.

    Args:
        payload: An activation, its gradient, or the summed gradient of a tied parameter.
        partition: The one that makes the value; of a tie, the first that holds the parameter.
        output: Which of its outputs; of a tie, the tie's number.
        peer: The worker at the other end.
        bytes: Of the message.
    """

    payload: Literal["activation", "gradient", "tie"]
    partition: str
    output: int
    peer: str
    bytes: float


@dataclass(frozen=True, slots=True)
class TracedAction:
    """One thing that a worker did, in seconds from the trace's start.

    Args:
        step: The step's number in the trace, from 0.
        kind: A program's action (of a reduction, each of its buckets), or "step": the whole of one, from its start to
            its loss.
        stage: The stage's position in the plan; -1 for a step, an update and the messages of ties.
        micro_batch: -1 where there is none.
        start_s: Of a compute action its start; of a send, when it was handed over; of a receive, when the worker
            began to wait for it.
        end_s: Of a compute action its end, a backward's recomputing included; of a send, when it had left, but not
            before the worker's earlier sends; of a receive, when it was there, or some microseconds after `start_s`
            where it had come before. On CUDA compute ends when the device is done, which can be after its step.
        message: Of a send or a receive.
        memory_bytes: What the worker held at its end above what it held before it built its partitions; None: not read,
            as after actions that end within 10 ms of the last reading.
    """

    step: Number
    kind: WhatHappened
    stage: Number
    micro_batch: Number
    start_s: float
    end_s: float
    message: TracedMessage | None = None
    memory_bytes: float | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class WorkerTrace:
    """What one worker did.

    Args:
        worker: Its name.
        actions: In the order in which they began.
        peak_bytes: The most that it held above what it held before it built its partitions.
        base_bytes: What it held before that.
        clock_error_s: How far its times may be off the clock of rank 0: half of the fastest round trip to it, and
            more where two comparisons differ.
        starved: Share of its processor time that other programs had during the trace.
        reference: How fast it did fixed pieces of work, the mean of before and after; None: nobody looked.
    """

    worker: str
    actions: tuple[TracedAction, ...]
    peak_bytes: float
    base_bytes: float
    clock_error_s: float = 0.0
    starved: Share = 0.0
    reference: ReferenceTimes | None = None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A whole trace; construction checks that it is consistent in itself.

    Args:
        workload: What was trained.
        stages: The plan's.
        schedule: The plan's.
        micro_batches: The plan's.
        micro_batch_size: The plan's.
        remat: What the run did with the plan's rematerialisation: "plan": what it says; "always": every partition;
            "except_last": every partition, but in the step's last micro-batch; "never": none.
        steps: How many steps were traced.
        workers: Those that hold a stage, in pipeline order.
        environment: Of the run.

    Raises:
        FormatError: the stages are none of a plan, a worker stands twice or holds no stage, one that holds a stage is
            missing, an action ends before it starts or names a step, stage, micro-batch, partition or peer that is
            none of the trace's, or a worker has not just one whole time for every step.
    """

    kind: Literal["trace"] = "trace"
    format_version: str = VERSIONS[0]
    created_at: str = ""
    tool_version: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    workload: WorkloadReference
    stages: tuple[Stage, ...]
    schedule: Schedule
    micro_batches: MicroBatches
    micro_batch_size: Count
    remat: RunRemat = "plan"
    steps: Count
    workers: tuple[WorkerTrace, ...]

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def of_plan(cls, plan: Plan, workers: Sequence[WorkerTrace], *, steps: int, **run: Any) -> Trace:
        """A trace of a plan's steps: what its workers did, in pipeline order; `run` has the fields that a run adds."""
        return cls(
            workload=plan.workload, stages=plan.stages, schedule=plan.schedule, micro_batches=plan.micro_batches,
            micro_batch_size=plan.micro_batch_size, steps=steps, workers=tuple(workers), **run,
        )  # fmt: skip

    @cached_property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """When each step began and ended, in seconds.

        Steps overlap: a worker that is done with its update begins the next one and waits there, while another is at
        its update still. So a step ends with its last worker, and begins when the one before it has ended, or when its
        first worker begins, whichever is later. The first one begins with its last worker.
        """
        starts: list[list[float]] = [[] for _ in range(self.steps)]
        ends: list[list[float]] = [[] for _ in range(self.steps)]
        for worker in self.workers:
            for action in worker.actions:
                if action.kind == "step":
                    starts[action.step].append(action.start_s)
                    ends[action.step].append(action.end_s)
        found = [(max(starts[0]), max(ends[0]))]
        for start, end in zip(starts[1:], ends[1:], strict=True):
            found.append((max(min(start), found[-1][1]), max(end)))
        return tuple(found)

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of each step, as the next one has to wait for it."""
        return tuple(end - start for start, end in self.spans)


def _check(trace: Trace) -> None:
    check_stages(trace.stages, trace.micro_batches)
    partitions = {name for stage in trace.stages for name in stage.partitions}
    names = [worker.worker for worker in trace.workers]
    check_unique(names, "workers[{}].worker")
    holders = {worker for stage in trace.stages for worker in stage.workers}
    if missing := holders.difference(names):
        raise FormatError(f"workers: {min(missing)!r} holds a stage and is not there")
    for n, worker in enumerate(trace.workers):
        if worker.worker not in holders:
            raise FormatError(f"workers[{n}].worker: {worker.worker!r} holds none of the stages")
        for k, action in enumerate(worker.actions):
            where = f"workers[{n}].actions[{k}]"
            _check_action(trace, action, holders - {worker.worker}, where)
            _check_place(trace, action, worker.worker, where)
            if action.message is not None and action.message.partition not in partitions:
                raise FormatError(f"{where}.message.partition: {action.message.partition!r} is in none of the stages")
        whole = [action.step for action in worker.actions if action.kind == "step"]
        if len(whole) != trace.steps or sorted(whole) != list(range(trace.steps)):
            raise FormatError(
                f'workers[{n}].actions: {len(whole)} actions of kind "step", of {len(set(whole))} steps;'
                f" expected one for each of the {trace.steps} traced steps"
            )


def _check_action(trace: Trace, action: TracedAction, peers: set[str], where: str) -> None:
    if action.end_s < action.start_s:
        raise FormatError(f"{where}: it ends at {action.end_s:g} s, before its start at {action.start_s:g} s")
    for name, number, count in (
        ("step", action.step, trace.steps),
        ("stage", action.stage, len(trace.stages)),
        ("micro_batch", action.micro_batch, trace.micro_batches),
    ):
        if number >= count or (name == "step" and number < 0):
            raise FormatError(f"{where}.{name}: {number} is not allowed; the trace has {count}, counted from 0")
    if (action.message is not None) != (action.kind in ("send", "receive")):
        raise FormatError(f"{where}.message: a send or a receive has one, nothing else does")
    if action.message is not None and action.message.peer not in peers:
        raise FormatError(f"{where}.message.peer: {action.message.peer!r} is no other worker of the trace")


def _check_place(trace: Trace, action: TracedAction, worker: str, where: str) -> None:
    """Steps, updates and messages of ties are of no stage; reductions and gatherings are of one that several hold.

    All else is of a micro-batch on a stage that the worker holds.
    """
    if action.kind in ("step", "update") or (action.message is not None and action.message.payload == "tie"):
        return
    for name, number in (("stage", action.stage), ("micro_batch", action.micro_batch)):
        if number < 0 and not (action.kind in ("reduce", "gather") and name == "micro_batch"):
            raise FormatError(f"{where}.{name}: {number} is not allowed; {action.kind} is of a {name}, counted from 0")
    held = trace.stages[action.stage].workers
    if worker not in held:
        holders = " and ".join(map(repr, held))
        raise FormatError(f"{where}.stage: {action.stage} is not allowed; {holders} holds it, not {worker!r}")


def unlike(trace: Trace | Plan, plan: Plan) -> list[str]:
    """In which of its fields a trace, or the plan that ran, is of another plan than this; empty: it is of this one."""
    names = ("workload", "stages", "schedule", "micro_batches", "micro_batch_size")
    found = [name for name in names if getattr(plan, name) != getattr(trace, name)]
    if not found and plan.listed != (_listed(trace, plan) if isinstance(trace, Trace) else trace.listed):
        found.append("orders")
    return found


def check_same_plan(trace: Trace | Plan, plan: Plan) -> None:
    """Raise FormatError unless a trace, or the plan that ran, is of this plan."""
    if others := unlike(trace, plan):
        raise FormatError(
            f"the trace is of another plan: it differs from this one in its {others[0]}",
            hint="give the plan that the traced run was started with",
        )


def _listed(trace: Trace, plan: Plan) -> dict[str, tuple[ListedStep, ...]]:
    """Of each worker whose order a plan lists, what it did in the first whole step: one of a short batch has less."""
    found: dict[str, tuple[ListedStep, ...]] = {}
    for worker in trace.workers:
        listed = plan.listed.get(worker.worker)
        if listed is None:
            continue
        done: list[list[tuple[float, ListedStep]]] = [[] for _ in range(trace.steps)]
        for action in worker.actions:
            if action.kind in STEP_LETTERS:
                step = ListedStep(action.stage, STEP_LETTERS[action.kind], action.micro_batch)
                done[action.step].append((action.start_s, step))
        whole = next((each for each in done if len(each) >= len(listed)), done[0])
        found[worker.worker] = tuple(step for _, step in sorted(whole, key=itemgetter(0)))
    return found


def load_trace(path: Path | str) -> Trace:
    """Read and check a trace file.

    Raises:
        UsageError: the file cannot be read.
        FormatError: it is not a sound trace; the message names file, place, value and what is allowed.
    """
    found = read(Path(path), Trace, name="trace", versions=VERSIONS)
    for n, (start, end) in enumerate(found.spans):  # of a file alone: a prediction may take no time
        if end <= start:
            behind = ", behind the step before it" if n else ""
            raise FormatError(
                f"{path}: workers: step {n} takes no time: it ends at {end:g} s, and begins at {start:g} s{behind}",
                hint="trace the run again: pipeline.trace(PATH)",
            )
    return found


def save_trace(trace: Trace, path: Path | str, *, force: bool = False) -> None:
    """Write a trace; an existing file is replaced only with `force`.

    Raises:
        UsageError: the file exists, or its folder does not.
    """
    write(Path(path), trace, force=force)
