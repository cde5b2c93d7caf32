"""A plan on one screen: who runs what, what limits it, how a step is spent, and how good the plan is known to be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import DERIVED, encode
from assigner.formats.fineness import cut_text, split_text
from assigner.formats.solverreport import UNDIVIDED
from assigner.report.clock import clock_data, clock_table, is_long
from assigner.report.doubts import doubt_lines, doubts
from assigner.report.memory import fullness, fullness_text, memory_bars, memory_data
from assigner.report.sharing import sharing
from assigner.report.sheet import LEAST_TEXT, Column, Line, Report, Sheet, foremost, with_hosts
from assigner.report.whatif import SOLVERS, TO_THIS, WHAT, what_if, what_if_data, what_if_hint
from assigner.schedule.bottleneck import limiting
from assigner.schedule.cost import CostModel
from assigner.schedule.criticalpath import path_shares
from assigner.schedule.orders import in_flight, warm_up
from assigner.schedule.replication import taken
from assigner.schedule.simulate import simulated
from assigner.solver.problem.options import USUAL_GAP

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Prediction, WorkerPrediction
    from assigner.formats.profile import Profile
    from assigner.formats.solverreport import Candidate, SolverReport
    from assigner.formats.stage import Stage
    from assigner.formats.terms import Objective

CHOSEN = "chosen"
"""The status of the candidate that became the plan."""
SHARED = ("data parallel", "data parallel by speed")
"""The baselines in which workers share a stage."""
_IN_ANY_ORDER = "with any number of stages a worker, in any order"
_FEW = 4
"""Candidates and baselines on a screen that does not list everything."""
_SHORT = 24
"""Characters up to which the partitions of a stage are all named there."""
ROW_LIMIT = 64
"""Rows of stages and workers above which those in the middle are left out."""


def plan_report(
    plan: Plan,
    *,
    profile: Profile | None = None,
    source: Path | None = None,
    notes: Sequence[str] = (),
    everything: bool = False,
) -> Report:
    """What `assigner show PLAN` prints.

    The profile is what it was solved from, where that is at hand, and `source` its file; `notes` say why the figures
    are not those of the plan's file, as `checked_plan` tells it.
    """
    most = None if everything else _FEW
    proven = (Line(describe_solver(plan.solver)),) if plan.solver else ()
    parts = (
        *headline(plan, notes), stages(plan, everything=everything), *doubt_lines(plan, profile),
        *bottleneck(plan, profile), *sharing(plan, profile),
        *clock_table(plan, profile, everything=everything), *memory_bars(plan, profile, everything=everything),
        *what_if(plan), *candidates(plan, most=most), *baselines(plan, most=most), *proven,
        *what_if_hint(plan, source=source),
    )  # fmt: skip
    return with_hosts(parts, profile)


def headline(plan: Plan, notes: Sequence[str] = ()) -> Report:
    """The plan in one line, what it is predicted to do in another, and why its file says something else."""
    lines = [title(plan)]
    if plan.profile is not None:
        lines.append(Line(" · ".join(text for text in (f"solved from {plan.profile.path}", plan.created_at) if text)))
    if plan.predicted is None and not notes:
        lines.append(Line("not priced; `assigner simulate PLAN --profile PROFILE` predicts it", "warning"))
    elif plan.predicted is not None:
        lines.append(Line(f"predicted: {describe_prediction(plan.predicted)}"))
    lines += [Line(text, "warning") for text in notes]
    if plan.micro_batches > 1 and plan.workload.per_micro_batch:
        said = f"{plan.micro_batches} micro-batches do not train as one: {'; '.join(plan.workload.per_micro_batch)}"
        lines.append(Line(f"warning: {said}; --micro-batches 1 does", "warning"))
    if plan.solver is not None and plan.objective != "step":
        lines.append(Line(f"{plan.objective}: {objective_text(plan.objective, plan.solver.objective_s)}"))
    return tuple(lines)


def objective_text(objective: Objective, value: float) -> str:
    """A value of an objective with its unit and what it is."""
    if objective == "cost":
        return f"{1000 * value:.4g} per 1000 samples, in the unit of cost_per_hour"
    what = {"step": "a step", "throughput": "a batch in the steady state", "latency": "one forward"}
    return f"{fmt.seconds(value)} {what[objective]}"


def title(plan: Plan) -> Line:
    """What is planned, and how the batch is cut: `batch of 32 as 8 micro-batches of 4`."""
    batch = plan.workload.batch_size
    split = f"batch of {batch} as {split_text(batch, plan.micro_batches)}"
    return Line(f"plan for {plan.workload.name} · {split} · {plan.schedule}", "strong")


def describe_prediction(predicted: Prediction) -> str:
    """Step time, throughput and bubble; of a step without time that it has none."""
    if not predicted.step_s:
        return "a step of no time: the profile has 0 s for all that is done in it"
    bubble = f"bubble {fmt.percent(predicted.bubble_fraction)}"
    return " · ".join((f"step {fmt.seconds(predicted.step_s)}", fmt.rate(predicted.samples_per_s), bubble))


def bottleneck(plan: Plan, profile: Profile | None) -> Report:
    """What limits the plan, in a sentence; nothing without a prediction.

    By the critical path if there is a profile, and the step is none of the longest (`is_long`).
    """
    if plan.predicted is None or not plan.predicted.workers:
        return ()
    path = None if profile is None or is_long(plan) else path_shares(simulated(plan, CostModel(profile)))
    return (Line(limiting(plan, plan.predicted, path), "strong"),)


def stages(plan: Plan, *, everything: bool = False) -> Sheet:
    """One row per stage and worker; a worker's times and memory stand at its first stage.

    Unless everything is asked for: of many rows the first and the last, and of a stage with many ranges its first and
    last partition.
    """
    found = plan.predicted_workers
    time = fmt.time_unit(*(each.compute_s for each in found.values()))
    memory = fmt.byte_unit(*(each.peak_bytes for each in found.values()))
    spent = (
        Column(f"compute {time.name}"), Column(f"transfer {time.name}", rank=4), Column(f"idle {time.name}", rank=3),
        Column("memory %", rank=2), Column(f"peak {memory.name}", rank=5), Column(f"of {memory.name}", rank=6),
    )  # fmt: skip
    places = [(n, name) for n, stage in enumerate(plan.stages) for name in stage.workers]
    shown = places
    if len(places) > ROW_LIMIT and not everything:
        shown = [*places[: ROW_LIMIT // 2], *places[-ROW_LIMIT // 2 :]]
    rows, before = [], -1
    for n, name in shown:
        stage = plan.stages[n]
        worker = found.get(name) if plan.held[name][0] == n else None
        figures = ("",) * len(spent) if worker is None else _figures(worker, time, memory)
        updates = fmt.points(len(stage.updated_by(name)) / len(stage.partitions))
        held = _whole(stage) if everything else _shortly(stage)
        number, partitions, again = (str(n), *held) if n != before else ("", "", "")
        before = n
        rows.append(
            (
                (Column("#"), number),
                (Column("worker", "name"), name),
                *(((Column("takes"), fmt.count(len(taken(plan, n, name)))),) if plan.is_replicated else ()),
                *(((Column("updates %"), updates),) if plan.is_divided else ()),
                (Column("partitions", "text", least=LEAST_TEXT if everything else 2 * LEAST_TEXT), partitions),
                (Column("remat", "text"), again),
                (Column("in flight", rank=1), fmt.count(in_flight(plan, n, name))),
                *(zip(spent, figures, strict=True) if found else ()),
            )
        )
    shortened = not everything and any(_whole(stage) != _shortly(stage) for stage in plan.stages)
    notes = [f"takes: of {plan.micro_batches} micro-batches"] if plan.is_replicated else []
    notes += ["updates: of the stage's partitions, for all of its workers"] if plan.is_divided else []
    notes += ["-v names every partition"] if shortened else []
    if len(shown) < len(places):
        notes.append(f"the first and the last {ROW_LIMIT // 2} rows; -v lists {len(places) - len(shown):,} more")
    head = fmt.plural(len(plan.stages), "stage") + (f" ({'; '.join(notes)})" if notes else "")
    return Sheet.of(head, rows)


def _whole(stage: Stage) -> tuple[str, str]:
    """The partitions of a stage and which of them are rematerialised, by their ranges."""
    return fmt.ranges(stage.partitions), remat_text(stage.partitions, stage.rematerialise)


def _shortly(stage: Stage) -> tuple[str, str]:
    """The same; where it would be long, the first and the last partition, and how many are rematerialised."""
    held, again = _whole(stage)
    names = stage.partitions
    if len(held) > _SHORT and len(names) > 1:
        first, last = names[0].split("."), names[-1].split(".")
        while len(last) > 1 and first[:1] == last[:1]:  # what both names begin with stands once
            first, last = first[1:], last[1:]
        held = f"{names[0]} ... {'.'.join(last)} ({len(names)})"
    return held, again if len(again) <= _SHORT // 2 else f"{len(stage.rematerialise)} of {len(names)}"


def _figures(worker: WorkerPrediction, time: fmt.Unit, memory: fmt.Unit) -> tuple[str, ...]:
    """How a worker spends a step, and its memory: the share of the capacity, the peak, the capacity."""
    spent = (time.show(each) for each in (worker.compute_s, worker.transfer_s, worker.idle_s))
    return *spent, fullness_text(worker), memory.show(worker.peak_bytes), memory.show(worker.capacity_bytes)


def remat_text(partitions: Sequence[str], rematerialise: Iterable[str]) -> str:
    """Which partitions of a stage are rematerialised: `all`, `-`, or their ranges."""
    again = set(rematerialise)
    if not again:
        return fmt.NOTHING
    return "all" if again == set(partitions) else fmt.ranges([name for name in partitions if name in again])


def status(solver: SolverReport) -> str:
    """How good a plan is proven to be, with the file's own word for it, and among which plans."""
    return " ".join(filter(None, (proof(solver), scope(solver))))


def proof(solver: SolverReport) -> str:
    """How good a plan is proven to be: `optimal` up to the gap asked for, `feasible` where that was not reached.

    Of a plan whose stages have one worker each it is among such plans, where more is proven of these.
    """
    among = _single_gap(solver)
    gap = solver.gap if among is None else among
    if gap >= 1:
        return "feasible: nothing proven"
    if gap < fmt.SHOWN:
        return "optimal"
    asked = solver.options.get("gap")
    within = solver.status == "optimal" or gap <= (asked if isinstance(asked, float) else USUAL_GAP) + fmt.SHOWN
    return f"optimal to {fmt.percent(gap)}" if within else f"feasible: within {fmt.percent(gap)} of the best plan"


def scope(solver: SolverReport) -> str:
    """Among which plans it is proven; empty: nothing is."""
    asked, schedule = solver.options, str(solver.options.get("schedule", "auto"))
    is_of_all = solver.gap < 1 and solver.any_order_s == solver.bound_s
    if _single_gap(solver) is not None:
        wider = f"within {fmt.percent(solver.gap)} of any" if solver.gap < 1 else "nothing is proven of plans"
        others = f"plan {_IN_ANY_ORDER}" if is_of_all else f"in which workers share a stage, {UNDIVIDED}"
        return f"{searched(schedule, 1)}; {wider} {others}"
    if is_of_all:
        return _IN_ANY_ORDER
    if solver.gap >= 1:
        return ""
    undivided = f", {UNDIVIDED}" if UNDIVIDED in solver.scope else ""
    return searched(schedule, asked.get("max_replicas", "all")) + undivided


def _single_gap(solver: SolverReport) -> float | None:
    """How far the plan may be above the best whose stages have one worker each; None: as of all plans."""
    bound, value = solver.single_bound_s, solver.objective_s
    return None if bound is None or not value else (value - bound) / value


def searched(schedule: str, max_replicas: int | str = "all") -> str:
    """Which plans a search with these options is about, as in `the best plan with one stage a worker`."""
    if schedule == "interleaved":
        return "under interleaved"
    shared = "" if max_replicas == "all" else f", up to {max_replicas} workers a stage"
    shared = " and one worker a stage" if max_replicas == 1 else shared
    return f"with one stage a worker{shared}" + ("" if schedule in ("auto", "one-stage") else f" under {schedule}")


def describe_solver(solver: SolverReport) -> str:
    """The status with what has found the plan, and what has proven it."""
    limit = solver.options.get("time_limit", 0.0)
    late = solver.status != "optimal" and isinstance(limit, int | float) and 0 < limit <= solver.seconds
    stopped = ", interrupted" if solver.interrupted else ", stopped by the time limit" if late else ""
    return f"status: {status(solver)} ({method(solver)}, solved in {fmt.seconds(solver.seconds)}{stopped})"


def method(solver: SolverReport) -> str:
    """What has found a plan, what has proven it, and the solver's name where one ran."""
    who = f"{solver.name} {solver.version}".strip()
    if not solver.found_by:  # a baseline, or a plan of before this was told
        return who
    proven = f", proven by {fmt.series(solver.proven_by)}" if solver.proven_by and solver.gap < 1 else ""
    return f"found by {solver.found_by}{proven}" + (f", with {who}" if solver.name in SOLVERS else "")


def proven_gap(plan: Plan) -> float | None:
    """How far the plan's step may be above the shortest possible, as a share of it.

    None: nothing is proven, the proof is of another objective than the step, or of another step than is predicted now.
    """
    solver, predicted = plan.solver, plan.predicted
    if solver is None or predicted is None or plan.objective != "step" or solver.gap >= 1:
        return None
    of_this = solver.options.get("robust") or fmt.alike(solver.objective_s, predicted.step_s)
    return solver.gap if of_this else None


def best_baseline(plan: Plan) -> tuple[str, float] | None:
    """The fastest of the baselines that fit: its name and step time."""
    fitting = [(each.name, each.step_s) for each in plan.baselines if each.step_s is not None]
    return min(fitting, key=lambda each: each[1], default=None)


def speed_up(plan: Plan) -> float | None:
    """How many times as fast the plan is as the best of its baselines."""
    best = best_baseline(plan)
    return fmt.against(best[1], plan.predicted_step_s) if best else None


def baselines(plan: Plan, *, most: int | None = None) -> Report:
    """Each baseline with what the plan gains over it, the best of them said in a cell and below.

    Baselines are placed and priced for a short step: a plan of another objective is not held against them. `most`: so
    many are shown, the fastest.
    """
    if not plan.baselines:
        return ()
    best = best_baseline(plan)
    step, rival = plan.predicted_step_s, plan.objective == "step"
    whole = plan.baselines
    shown = foremost(whole, most, lambda each: math.inf if each.step_s is None else each.step_s)
    time = fmt.time_unit(*(each.step_s for each in shown))
    rows = [
        (
            (Column("", "name"), each.name + (" (best of these)" if rival and best and each.name == best[0] else "")),
            (Column(f"step {time.name}"), "not possible" if each.step_s is None else time.show(each.step_s)),
            *(((Column(TO_THIS), fmt.ratio(fmt.against(each.step_s, step))),) if rival else ()),
        )
        for each in shown
    ]
    title = "baselines" if rival else f"baselines, placed for a short step and not for {plan.objective}"
    if len(shown) < len(whole):
        title += f", the {len(shown)} fastest of {len(whole)} (-v lists all)"
    return (Sheet.of(title, rows), *((gain_line(plan),) if rival else ()))


def gain_line(plan: Plan) -> Line:
    """What the plan gains over the best of its baselines."""
    best, factor = best_baseline(plan), speed_up(plan)
    if best is None:
        return Line("none of the baselines fits the workers' memory", "strong")
    if factor is None:
        return Line(f"best baseline: {best[0]}, {fmt.seconds(best[1])} a step")
    if abs(factor - 1) < 5e-3:
        return Line(f"as fast as the best baseline ({best[0]})", "strong")
    if factor < 1:
        return Line(f"{best[0]} is faster by {fmt.percent(1 - factor)}{_beyond(plan, best[0])}", "warning")
    return Line(f"{fmt.ratio(factor)} as fast as the best baseline ({best[0]})", "strong")


def _beyond(plan: Plan, baseline: str) -> str:
    """How to ask for plans of the shape of a baseline that beats this one; empty: they were searched."""
    options = plan.solver.options if plan.solver else {}
    asked = options.get("schedule", "auto") if plan.solver else ""
    if baseline in SHARED:
        if options.get("max_replicas", 1) == 1:
            return "; without --max-replicas 1 workers may share a stage, as they do there"
        outside = asked in ("gpipe", "interleaved")
        return f"; it is one stage under 1f1b, and --schedule {asked} searches no such plans" if outside else ""
    if plan.schedule == "interleaved" or asked in ("auto", "listed"):
        return ""
    return "; where it gives a worker several stages, --schedule interleaved may find such a plan"


def plan_data(plan: Plan, *, profile: Profile | None = None, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The same for `--json`: the plan document, and what is derived from it; arguments as `plan_report`."""
    best = best_baseline(plan)
    derived = {
        "notes": list(notes),
        "speed_up": speed_up(plan) if plan.objective == "step" else None,
        "best_baseline": None if best is None else {"name": best[0], "step_s": best[1]},
        "status": None if plan.solver is None else status(plan.solver),
        "bottleneck": next((line.text for line in bottleneck(plan, profile) if isinstance(line, Line)), None),
        "sharing": [line.text for line in sharing(plan, profile) if isinstance(line, Line)],
        "warnings": list(doubts(plan, profile)),
        "in_flight": [warm_up(plan, n) for n in range(len(plan.stages))],
        "clock": clock_data(plan, profile),
        "memory_share": {name: fullness(each) for name, each in plan.predicted_workers.items()},
        "memory_bytes": memory_data(plan, profile),
        "what_if": what_if_data(plan),
    }
    return {**encode(plan), DERIVED: derived}


def candidates(plan: Plan, *, most: int | None = None) -> Report:
    """The candidates of a plan as a table, all or the chosen one and those nearest to it; nothing where it has none."""
    if not plan.candidates:
        return ()
    shown = foremost(plan.candidates, most, _distance)
    time = fmt.time_unit(*(each.objective_s for each in shown))
    bounds = (each.bound_s if each.bound_s and math.isfinite(each.bound_s) else None for each in shown)
    rows = [
        (
            (Column("schedule", "name"), each.schedule),
            (Column("micro-batches"), cut_text(plan.workload.batch_size, each.micro_batches)),
            (Column(f"{WHAT[plan.objective]} {time.name}"), time.show(each.objective_s)),
            (Column(f"bound {time.name}"), time.show(bound)),
            (Column("status", "text"), each.status),
        )
        for each, bound in zip(shown, bounds, strict=True)
    ]
    marked = frozenset(n for n, each in enumerate(shown) if each.status == CHOSEN)
    few = len(shown) < len(plan.candidates)
    title = f"candidates, the {len(shown)} nearest of {len(plan.candidates)} (-v lists all)" if few else "candidates"
    return (Sheet.of(title, rows, marked),)


def _distance(each: Candidate) -> tuple[bool, float]:
    """How near a candidate came, by what was found or else by its bound; the chosen one is the nearest."""
    reached = each.objective_s if each.objective_s is not None else each.bound_s
    return each.status != CHOSEN, math.inf if reached is None else reached
