"""The integer program of a plan's schedule and micro-batch count, as a file that other solvers read.

The model is over every stage option along one order of the partitions, with the cuts that close its proof: pipelines
for which the objective says too little, with what the simulator says they take. Then its optimum is the least step
time, also where the objective alone is a lower bound (1F1B, graphs with branches).
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import FormatError, UsageError
from assigner.files import put
from assigner.formats.graph import topological_order
from assigner.schedule.cost import CostModel
from assigner.schedule.timing import step_s
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import OutOfTime
from assigner.solver.methods.candidate import Proposal, SearchState
from assigner.solver.pipelines.ranking import PipelineCandidate
from assigner.solver.problem.answer import Progress
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.solver.ilp.pipelines import PipelineModel
    from assigner.solver.problem.options import SolveOptions

ENDINGS = (".lp", ".mps")

LEAST_S = 0.1
"""Seconds that closing the proof may take where the search has used up its time."""


@dataclass(frozen=True)
class ModelFile:
    """A model that was written.

    Args:
        schedule: Of the plans that it is about, which have one stage a worker.
        order: The partitions in the order that stages cut into intervals.
        branched: Other orders have other intervals, which the model does not know.
        cuts: How many of its rows say what a single pipeline takes.
        unit_s: Seconds of one unit of its objective.
        apart: It has a wire for each link, though links share some: with these, plans take as long or longer.
        optimum_s: Its least value, in seconds; None: that was not proven, and it is a lower bound of the step time.
    """

    path: Path
    schedule: str
    micro_batches: int
    order: tuple[str, ...]
    branched: bool
    variables: int
    rows: int
    cuts: int
    unit_s: float
    optimum_s: float | None
    apart: bool = False

    @property
    def scope(self) -> str:
        """Which plans it states."""
        told = f"{self.schedule} with {fmt.plural(self.micro_batches, 'micro-batch')} and one stage a worker"
        told += " along one order of the graph" if self.branched else ""
        return told + (", as if no links shared a wire" if self.apart else "")


def check_exportable(profile: Profile, options: SolveOptions, path: Path) -> None:
    """Raise UsageError where no integer program states what is asked, or it is too large: before the search."""
    if path.suffix not in ENDINGS:
        raise UsageError(f"{path}: a model is written as {' or '.join(ENDINGS)}", hint="model.lp, or model.mps")
    if options.objective != "step":
        raise UsageError(
            f"no integer program states objective {options.objective}: dynamic programs and searches for the step"
            " time solve it",
            hint="--objective step",
        )
    if options.schedule in ("interleaved", "listed"):
        raise UsageError(
            "no integer program states plans with several stages a worker, or in any order: it only bounds them",
            hint="--schedule one-stage, gpipe or 1f1b",
        )
    if options.shares:
        raise UsageError(
            "no integer program states stages that several workers share: a dynamic program and local search do",
            hint="--max-replicas 1",
        )
    resolved, plain = resolve(profile, options)
    problem = Problem(resolved, plain, CostModel(resolved))
    cuts = sum(problem.may_cut)
    intervals = cuts * (cuts - 1) // 2
    counts = plain.counts(problem.cost) if intervals <= tuning.MOST_COLUMNS else ()
    groups = max((len(problem.prices(count).intervals.groups) for count in counts), default=len(problem.workers))
    _check_size(intervals * groups)


def _check_size(columns: int) -> None:
    if columns > tuning.MOST_COLUMNS:
        raise UsageError(
            f"the integer program would have {columns:,} stage options, and {tuning.MOST_COLUMNS:,} are the most"
            " that is written",
            hint="fewer workers (--only), or partitions kept together (--together)",
        )


def export_model(
    plan: Plan,
    profile: Profile,
    options: SolveOptions,
    path: Path,
    *,
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> ModelFile:
    """Write the integer program of the plan's schedule and micro-batch count, with the cuts that close its proof.

    It is over all plans with one stage a worker along an order of which the plan's stages are intervals: of a chain,
    all that there are.

    Closing the proof may take what the search left of the options' time limit. `path` ends in `.lp` (CPLEX's format) or
    `.mps` (free MPS). `progress` is called now and then while the proof is closed; KeyboardInterrupt ends that, and the
    model is written with the cuts found until then.

    Raises:
        UsageError: no integer program states the problem, it is too large, or the file cannot be written.
    """
    check_exportable(profile, options, path)
    candidate = _candidate(plan, profile, options, progress)
    _check_size(len(candidate.options.all))
    spent = plan.solver.seconds if plan.solver is not None else 0.0
    candidate.state.clock.stop_within(max(LEAST_S, options.time_limit - spent))
    try:
        candidate.close_by_ilp()
        closed = candidate.decided
    except (KeyboardInterrupt, OutOfTime):
        closed = False
    best_s = candidate.state.best_value
    unit = 10.0 ** (math.floor(math.log10(best_s)) - 3)
    model = candidate.statement(candidate.options.all, unit=unit)
    for cut in candidate.cuts:
        model.cut(*cut)
    problem = candidate.problem
    written = ModelFile(
        path, plan.schedule, plan.micro_batches, problem.order, not problem.exact,
        len(model.problem.variables()), len(model.problem.constraints()), len(candidate.cuts), unit,
        best_s if closed else None, bool(problem.cost.wires),
    )  # fmt: skip
    put(path, _text(written, model, candidate).encode(), force=force)
    return written


def _candidate(
    plan: Plan, profile: Profile, options: SolveOptions, progress: Callable[[Progress], None] | None
) -> PipelineCandidate:
    """The candidate of the plan, along an order of which its stages are intervals, with the plan at hand."""
    if plan.schedule not in ("gpipe", "1f1b") or plan.is_looped:
        raise UsageError(
            f"no integer program states this plan: it is {plan.schedule}, with {len(plan.stages)} stages on"
            f" {len(plan.workers)} workers",
            hint="--schedule one-stage, gpipe or 1f1b",
        )
    resolved, plain = resolve(profile, replace(options, gap=0.0))
    problem = Problem(resolved, plain, CostModel(resolved), _sequence(plan, resolved))

    def watch() -> None:
        if progress is not None:
            progress(
                Progress(
                    state.clock.elapsed_s, plan.schedule, plan.micro_batches, state.best_value, candidate.bound,
                    0, 1, "the integer program",
                )
            )  # fmt: skip

    state = SearchState(problem, watch)
    candidate = PipelineCandidate(state, plan.schedule, plan.micro_batches)
    state.candidates = [candidate]
    state.best = candidate.best = Proposal(replace(plan, solver=None), step_s(plan, problem.cost.apart), "")
    return candidate


def _sequence(plan: Plan, profile: Profile) -> tuple[str, ...]:
    """An order of the partitions of which the plan's stages are intervals; empty: the profile's own is one."""
    first = {name: stage.partitions[0] for stage in plan.stages for name in stage.partitions}
    edges = ((first[edge.source], first[edge.target]) for edge in profile.edges)
    try:
        stages = topological_order(
            [stage.partitions[0] for stage in plan.stages], [pair for pair in edges if pair[0] != pair[1]]
        )
    except FormatError as error:
        raise UsageError("the plan's stages wait for each other: no order has them as intervals") from error
    order = tuple(name for stage in stages for name in profile.order if first[name] == stage)
    return () if order == profile.order else order


def _text(written: ModelFile, model: PipelineModel, candidate: PipelineCandidate) -> str:
    """The file: what the model is about and what its variables mean, as comments, then the model."""
    mark = "\\ " if written.path.suffix == ".lp" else "* "
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "model"
        if written.path.suffix == ".lp":
            model.problem.writeLP(plain)
        else:
            model.problem.writeMPS(plain)
        body = plain.read_text()
    return "".join(f"{mark}{line}\n" for line in _legend(written, model, candidate)) + body


def _legend(written: ModelFile, model: PipelineModel, candidate: PipelineCandidate) -> Iterator[str]:
    yield f"{written.scope}; to be minimised, one unit of the objective is {written.unit_s:g} s"
    yield (
        f"optimum: {written.optimum_s / written.unit_s:.9g} units, the least step time"
        if written.optimum_s is not None
        else "the optimum is a lower bound of the step time"
    )
    yield "x: a stage, as first partition, last partition, group of workers; y: a boundary, as the position behind it,"
    yield "the group in front, the group behind; of a group, any worker that no other stage has"
    for number, members in enumerate(candidate.table.groups):
        yield f"group {number}: {_names(members)}"
    for position, name in enumerate(written.order):
        yield f"position {position}: {_names([name])}"
    for column, x in zip(model.columns, model.x, strict=True):
        again = _names(written.order[i] for i in column.rematerialise)
        told = [f"rematerialises {again}"] if again else []
        if column.least_depth < written.micro_batches:
            told.append(f"{column.least_depth} to {column.most_depth} in flight")
        if told:
            yield f"{x.name}: {'; '.join(told)}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(json.dumps(name, ensure_ascii=False) for name in names)
