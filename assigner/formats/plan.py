"""The plan: which worker runs which partitions, in what order, at what predicted cost, and from which profile."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from assigner.errors import FormatError, UsageError
from assigner.files import is_regular, read_bytes
from assigner.formats.document import Count, Name, decode, encode, left_out, read, write
from assigner.formats.fineness import cut_into, cut_obstacle
from assigner.formats.orders import ListedStep, check_orders, cut_orders, forwards_taken, parse_order
from assigner.formats.prediction import Prediction, WorkerPrediction, check_prediction
from assigner.formats.profile import WorkloadReference
from assigner.formats.screen import OnScreen
from assigner.formats.solverreport import Baseline, Candidate, SolverReport, WhatIf, check_bound
from assigner.formats.stage import MicroBatches, Replica, Stage, check_stages, scaled_shares
from assigner.formats.terms import Objective, Schedule
from assigner.location import rank_of

_DIVIDED = "2.1"  # workers that divide an optimizer's state: a reader of 2.0 needs more memory, and trains the same
VERSIONS = "1.0", _DIVIDED
"""A plan that a reader of format 1 would run wrongly is of format 2: several workers a stage, or listed orders."""


@dataclass(frozen=True)
class ProfileReference:
    """The profile that a plan was solved from.

    Args:
        path: As it was given, from the folder of the command.
        sha256: Of the file's bytes.
    """

    path: Name
    sha256: Name


@dataclass(frozen=True, kw_only=True)
class Plan(OnScreen):
    """A whole plan; construction checks that it is consistent in itself.

    Args:
        kind: What the file is.
        format_version: MAJOR.MINOR; a reader takes every minor version of a major that it knows.
        created_at: When, in UTC.
        tool_version: The release that wrote it.
        profile: The profile that it was solved from; None: it is written by hand.
        workload: What it is a plan for.
        objective: What was made small.
        schedule: The order of the actions.
        micro_batches: How many a step has.
        micro_batch_size: The most samples in one; some have one less where the batch does not come out even.
        stages: In pipeline order; a worker may hold several, and several may hold one. A rank that holds none idles.
        orders: Under `listed`, the steps of each worker that holds a stage, `0F0 0F1 0B0 0B1`: a stage, F (forward), B
            (backward) or I and W (its input and its weight part), and a micro-batch. Else left out. Format 2.
        predicted: What the simulator says of it.
        solver: How it was found and how good it is.
        baselines: Simpler placements of the same profile.
        candidates: Schedules and micro-batch counts that were looked at.
        what_if: What one change would bring.

    Raises:
        FormatError: a partition stands twice, a stage rematerialises what it does not hold, or an order is not sound.
    """

    kind: Literal["plan"] = "plan"
    format_version: str = VERSIONS[0]
    created_at: str = ""
    tool_version: str = ""
    profile: ProfileReference | None = None
    workload: WorkloadReference
    objective: Objective = "step"
    schedule: Schedule = "gpipe"
    micro_batches: MicroBatches
    micro_batch_size: Count
    stages: tuple[Stage, ...]
    orders: dict[Name, str] = field(default_factory=dict, metadata=left_out({}), hash=False)
    predicted: Prediction | None = None
    solver: SolverReport | None = None
    baselines: tuple[Baseline, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    what_if: tuple[WhatIf, ...] = ()

    def __post_init__(self) -> None:
        _check(self)
        major = "2." if self.is_replicated or self.orders else "1."
        if not self.format_version.startswith(major):
            object.__setattr__(self, "format_version", major + "0")
        if self.is_divided and self.format_version == "2.0":
            object.__setattr__(self, "format_version", _DIVIDED)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether a stage has several workers."""
        return any(stage.replicas for stage in self.stages)

    @cached_property
    def listed(self) -> dict[str, tuple[ListedStep, ...]]:
        """The steps of each worker's order; empty unless they are listed."""
        most = 3 * len(self.stages) * self.micro_batches  # F, I and W of each
        return {worker: parse_order(text, f"orders[{worker}]", most=most) for worker, text in self.orders.items()}

    @cached_property
    def is_divided(self) -> bool:
        """Whether workers of a stage divide the optimizer's state."""
        return any(stage.is_divided for stage in self.stages)

    @cached_property
    def holders(self) -> dict[str, tuple[str, ...]]:
        """The workers of each partition, by name."""
        return {name: stage.workers for stage in self.stages for name in stage.partitions}

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The position of each partition's stage, by the partition's name."""
        return {name: n for n, stage in enumerate(self.stages) for name in stage.partitions}

    @cached_property
    def placement(self) -> dict[str, str]:
        """The worker of each partition, by name; raises UsageError where one has several."""
        return {name: stage.worker for stage in self.stages for name in stage.partitions}

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The workers that hold a stage, in pipeline order, each once."""
        return tuple(self.held)

    @cached_property
    def held(self) -> dict[str, tuple[int, ...]]:
        """The stages that each worker holds, itself or with others: their positions, in pipeline order."""
        found: dict[str, list[int]] = {}
        for n, stage in enumerate(self.stages):
            for worker in stage.workers:
                found.setdefault(worker, []).append(n)
        return {worker: tuple(held) for worker, held in found.items()}

    @property
    def predicted_step_s(self) -> float | None:
        """The predicted step time, in seconds; None: there is no prediction."""
        return None if self.predicted is None else self.predicted.step_s

    @cached_property
    def predicted_workers(self) -> dict[str, WorkerPrediction]:
        """What is predicted of each worker, by name; empty: there is no prediction."""
        return {} if self.predicted is None else {each.worker: each for each in self.predicted.workers}

    @property
    def is_looped(self) -> bool:
        """Whether there are more stages than workers, so that a worker holds several."""
        return len(self.stages) > len(self.workers)

    @property
    def partitions(self) -> tuple[str, ...]:
        """All partitions in pipeline order."""
        return tuple(name for stage in self.stages for name in stage.partitions)

    @property
    def world_size(self) -> int:
        """The smallest number of ranks that the plan can run on."""
        return 1 + max(rank_of(worker) for worker in self.workers)

    def cut(self, micro_batches: int, micro_batch_size: int, *, batch_size: int) -> Plan:
        """The plan with other micro-batches, sizes in samples; no stage keeps more of them than there are.

        Replicas share them as before, to whole ones: where they are few, one of them may have none. Listed orders keep
        the steps of the first micro-batches, on the workers that had them.

        Raises:
            UsageError: the orders are listed for fewer micro-batches.
        """
        if self.orders and micro_batches > self.micro_batches:
            raise UsageError(
                f"the plan lists its orders for {self.micro_batches} micro-batches, not for {micro_batches}",
                hint="solve for that number",
            )
        return replace(
            self,
            workload=replace(self.workload, batch_size=batch_size),
            micro_batches=micro_batches,
            micro_batch_size=micro_batch_size,
            stages=tuple(
                replace(
                    stage,
                    in_flight=None if stage.in_flight is None else min(stage.in_flight, micro_batches),
                    replicas=self._listed_shares(n, micro_batches)
                    if self.orders
                    else scaled_shares(stage.replicas, micro_batches),
                )
                for n, stage in enumerate(self.stages)
            ),
            orders=cut_orders(self.listed, micro_batches),
        )

    def _listed_shares(self, stage: int, micro_batches: int) -> tuple[Replica, ...]:
        """A stage's replicas with as many of the first micro-batches as each has in its order."""
        taken = forwards_taken(self.listed, stage)
        return tuple(
            replace(each, micro_batches=sum(taken[m] == each.worker for m in range(micro_batches)))
            for each in self.stages[stage].replicas
        )


def _check(plan: Plan) -> None:
    check_stages(plan.stages, plan.micro_batches)
    _check_listed(plan)
    batch, count, size = plan.workload.batch_size, plan.micro_batches, plan.micro_batch_size
    if size != -(-batch // count):
        raise FormatError(
            f"micro_batches: {count} of {size} samples do not make a batch of {batch}",
            hint=f"for {count} micro-batches, micro_batch_size is {-(-batch // count)}",
        )
    check_prediction(plan.predicted)
    for n, each in enumerate(plan.candidates):
        check_bound(each.objective_s, each.bound_s, f"candidates[{n}].bound_s")
    for n, answer in enumerate(plan.what_if):
        check_bound(answer.step_s, answer.bound_s, f"what_if[{n}].bound_s")
    if plan.solver is not None:
        for name in ("bound_s", "single_bound_s", "any_order_s"):
            check_bound(plan.solver.objective_s, getattr(plan.solver, name), f"solver.{name}")


def _check_listed(plan: Plan) -> None:
    """1F1B has one stage a worker; orders belong to schedule `listed`, whose stages say nothing else of them."""
    several = next((worker for worker, stages in plan.held.items() if len(stages) > 1), None)
    if plan.schedule == "1f1b" and several is not None:
        raise FormatError(
            f"schedule 1f1b: {several} holds {len(plan.held[several])} stages; this schedule has one a worker",
            hint="merge them, or use a schedule of several stages a worker: interleaved",
        )
    if plan.schedule != "listed":
        if plan.orders:
            raise FormatError(
                f"orders: schedule {plan.schedule} has its own", hint='write "listed" there, or leave the orders out'
            )
        return
    for n, stage in enumerate(plan.stages):
        if stage.in_flight is not None:
            raise FormatError(f"stages[{n}].in_flight: {stage.in_flight} is not allowed; the plan lists its orders")
    check_orders(plan.listed, plan.stages, plan.micro_batches)


def refuse_replicas(plan: Plan, what: str) -> None:
    """Raise UsageError if a stage has several workers, which `what` (`the export for torchgpipe`) does not carry."""
    for n, stage in enumerate(plan.stages):
        if stage.replicas:
            raise UsageError(
                f"stages[{n}]: several workers, {', '.join(stage.workers)}: not yet carried by {what}",
                hint="use a plan with one worker a stage: assigner solve --schedule one-stage --max-replicas 1",
            )


def load_plan(path: Path | str | None = None) -> Plan:
    """Read and check a plan file.

    Args:
        path: The file; None: the one that `ASSIGNER_PLAN` names, as `assigner run` sets it for every rank.

    Raises:
        UsageError: the file cannot be read, or nothing names one.
        FormatError: it is not a sound plan; the message names file, place, value and what is allowed.
    """
    if path is None:
        path = os.environ.get("ASSIGNER_PLAN", "")
        if not path:
            raise UsageError(
                "no plan is named: ASSIGNER_PLAN is not set",
                hint="start the script with assigner run PLAN -- SCRIPT, which sets it; or with ASSIGNER_PLAN=PLAN in"
                " front of another launcher's command; or give load_plan a path",
            )
    plan = read(Path(path), Plan, name="plan", versions=VERSIONS)
    batch, fineness = plan.workload.batch_size, plan.workload.fineness
    obstacle, hint = (
        fineness.obstacle(plan.micro_batches, batch),
        f"{fineness.most(batch)} or fewer; or another limit under workload",
    )
    if obstacle is None:
        cut = cut_into(batch, plan.micro_batches)
        obstacle, hint = cut_obstacle(batch, plan.micro_batches), f"for {cut}, micro_batch_size is {-(-batch // cut)}"
    if obstacle is not None:  # of a file alone: a simulation of more micro-batches than are allowed is of use
        raise FormatError(f"{path}: micro_batches: {plan.micro_batches} is not allowed: {obstacle}", hint=hint)
    return plan


def save_plan(plan: Plan, path: Path | str, *, force: bool = False) -> None:
    """Write a plan; an existing file is replaced only with `force`.

    Raises:
        UsageError: the file exists, or its folder does not.
        FormatError: it has figures that no plan's file may have: the profile has times that nobody has measured.
    """
    try:
        decode(Plan, encode(plan))
    except FormatError as error:
        raise FormatError(
            "the profile's times, of forwards, backwards, updates or links, make a plan that nobody could read:"
            f" {error.message}",
            hint="give these times in seconds, or profile again",
        ) from error
    write(Path(path), plan, force=force)


def profile_path(plan: Plan, path: Path, given: Path | None = None) -> Path:
    """The file of the profile that a plan is to be priced with.

    Args:
        plan: The plan.
        path: Its file.
        given: A profile that the user named; it is taken as it is. None: the one that the plan was solved from,
            where the plan says, seen from here or from the plan's folder, or beside the plan.

    Raises:
        UsageError: the plan names no profile, or the file is not there.
        FormatError: the file has changed since the plan was solved.
    """
    if given is not None:
        return given
    if plan.profile is None:
        raise UsageError(f"{path} does not say which profile it was solved from", hint="name it: --profile PROFILE")
    named = Path(plan.profile.path)
    places = dict.fromkeys((named, path.parent / named, path.parent / named.name))
    found = [place for place in places if is_regular(place)]
    if not found:
        raise UsageError(
            f"{path} was solved from {named}, which is not there", hint="name the profile: --profile PROFILE"
        )
    for place in found:
        if is_origin(plan, place):
            return place
    raise FormatError(
        f"{found[0]} has changed since {path} was solved from it",
        hint=f"--profile {found[0]} takes it as it is now; assigner solve makes a new plan",
    )


def is_origin(plan: Plan, path: Path) -> bool | None:
    """True if the file is the profile that the plan was solved from, as it was then; None: the plan names none."""
    return None if plan.profile is None else file_hash(path) == plan.profile.sha256


def reference(path: Path) -> ProfileReference:
    """What a plan says of the profile that it is solved from.

    Raises:
        UsageError: the file cannot be read, or no plan may name it: its path has what moves a terminal's cursor, say.
    """
    found = ProfileReference(str(path), file_hash(path))
    try:
        decode(ProfileReference, encode(found))
    except FormatError as error:
        raise UsageError(
            f"{str(path)!r} is a path that no plan may name: {error.message}", hint="rename the profile, or copy it"
        ) from error
    return found


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(read_bytes(path, hint="name the profile: --profile PROFILE")).hexdigest()
