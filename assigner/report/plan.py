"""A plan on one screen: who runs what, how a step is spent, and how good the plan is known to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.document import encode
from assigner.report.sheet import Column, Line, Report, Sheet
from assigner.schedule import warm_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.plan import Objective, Plan, Prediction, SolverReport, WorkerPrediction

_PROVEN = 5e-4
"""A gap below this prints as 0.0 %: called optimal."""


def plan_report(plan: Plan) -> Report:
    """What `assigner show PLAN` prints."""
    return (*headline(plan), stages(plan), *quality(plan))


def headline(plan: Plan) -> Report:
    """The plan in one line, and what it is predicted to do in another."""
    lines = [Line(f"plan for {plan.workload.name} · {describe_split(plan)} · {plan.schedule}", "strong")]
    if plan.profile is not None:
        lines.append(Line(" · ".join(text for text in (f"solved from {plan.profile.path}", plan.created_at) if text)))
    if plan.predicted is None:
        lines.append(Line("not priced; `assigner simulate PLAN --profile PROFILE` predicts it", "warning"))
    else:
        lines.append(Line(f"predicted: {describe_prediction(plan.predicted)}"))
    if plan.solver is not None and plan.objective != "step":
        lines.append(Line(f"{plan.objective}: {objective_text(plan.objective, plan.solver.objective_s)}"))
    return tuple(lines)


def objective_text(objective: Objective, value: float) -> str:
    """A value of an objective with its unit and what it is."""
    if objective == "cost":
        return f"{1000 * value:.4g} per 1000 samples, in the unit of cost_per_hour"
    what = {"step": "a step", "throughput": "a micro-batch in the steady state", "latency": "one forward"}[objective]
    return f"{fmt.seconds(value)} {what}"


def describe_split(plan: Plan) -> str:
    """How the batch is cut: `batch of 32 as 8 micro-batches of 4`."""
    pieces = fmt.plural(plan.micro_batches, "micro-batch")
    return f"batch of {plan.workload.batch_size} as {pieces} of {plan.micro_batch_size}"


def describe_prediction(predicted: Prediction) -> str:
    """Step time, throughput and bubble."""
    return " · ".join(
        (
            f"step {fmt.seconds(predicted.step_s)}",
            fmt.rate(predicted.samples_per_s),
            f"bubble {fmt.percent(predicted.bubble_fraction)}",
        )
    )


def stages(plan: Plan) -> Sheet:
    """One row per stage; a worker's times and memory stand at its first stage."""
    found = {each.worker: each for each in plan.predicted.workers} if plan.predicted else {}
    time = fmt.time_unit(*(each.compute_s for each in found.values()))
    memory = fmt.byte_unit(*(each.capacity_bytes for each in found.values()))
    seen: set[str] = set()
    rows = []
    for n, stage in enumerate(plan.stages):
        worker = found.get(stage.worker) if stage.worker not in seen else None
        seen.add(stage.worker)
        rows.append(
            (
                str(n),
                stage.worker,
                fmt.ranges(stage.partitions),
                remat_text(stage.partitions, stage.rematerialise),
                fmt.count(warm_up(plan, n)),
                *_spent(worker, time),
                *_memory(worker, memory),
            )
        )
    columns = (
        Column("#"),
        Column("worker", "name"),
        Column("partitions", "text"),
        Column("remat", "text"),
        Column("in flight", rank=4),
        Column(f"compute {time.name}"),
        Column(f"transfer {time.name}", rank=1),
        Column(f"idle {time.name}"),
        Column(f"peak {memory.name}", rank=2),
        Column(f"of {memory.name}", rank=3),
        Column("memory", "name"),
    )
    return Sheet(fmt.plural(len(plan.stages), "stage"), columns, tuple(rows))


def _spent(worker: WorkerPrediction | None, time: fmt.Unit) -> tuple[str, str, str]:
    if worker is None:
        return ("", "", "")
    return time.show(worker.compute_s), time.show(worker.transfer_s), time.show(worker.idle_s)


def _memory(worker: WorkerPrediction | None, memory: fmt.Unit) -> tuple[str, str, str]:
    if worker is None:
        return ("", "", "")
    share = fullness(worker)
    return (
        memory.show(worker.peak_bytes),
        memory.show(worker.capacity_bytes),
        f"{fmt.bar(share, width=8)} {100 * share:3.0f} %",
    )


def fullness(worker: WorkerPrediction) -> float:
    """Peak against capacity; above 1 it does not fit."""
    if worker.capacity_bytes > 0:
        return worker.peak_bytes / worker.capacity_bytes
    return 0.0 if worker.peak_bytes == 0 else float("inf")


def remat_text(partitions: Sequence[str], rematerialise: Iterable[str]) -> str:
    """Which partitions of a stage are rematerialised: `all`, `-`, or their ranges."""
    again = set(rematerialise)
    if not again:
        return fmt.NOTHING
    return "all" if again == set(partitions) else fmt.ranges([name for name in partitions if name in again])


def quality(plan: Plan) -> Report:
    """What is proven about a plan, and what simpler placements would take."""
    lines = [Line(describe_solver(plan.solver))] if plan.solver else []
    return (*lines, *baselines(plan))


def status(solver: SolverReport) -> str:
    """How good a plan is proven to be, in a few words."""
    if solver.gap >= 1:
        return "nothing proven about the best possible"
    if solver.gap < _PROVEN:
        return "optimal"
    return f"within {fmt.percent(solver.gap)} of the best possible"


def describe_solver(solver: SolverReport) -> str:
    """The status with the solver that found it."""
    who = f"{solver.name} {solver.version}".strip()
    limit = solver.options.get("time_limit", 0.0)
    late = solver.status != "optimal" and isinstance(limit, int | float) and 0 < limit <= solver.seconds
    interrupted = "interrupted" in solver.options.get("proven_by", ())
    stopped = ", interrupted" if interrupted else ", stopped by the time limit" if late else ""
    return f"status: {status(solver)} ({who}, {fmt.seconds(solver.seconds)}{stopped})"


def best_baseline(plan: Plan) -> tuple[str, float] | None:
    """The fastest of the baselines that fit: its name and step time."""
    fitting = [(each.name, each.step_s) for each in plan.baselines if each.step_s is not None]
    return min(fitting, key=lambda each: each[1], default=None)


def speed_up(plan: Plan) -> float | None:
    """How many times as fast the plan is as the best of its baselines."""
    best = best_baseline(plan)
    return fmt.against(best[1], plan.predicted.step_s) if best and plan.predicted else None


def baselines(plan: Plan) -> Report:
    """Each baseline with what the plan gains over it, the best of them said in a cell and below."""
    if not plan.baselines:
        return ()
    best = best_baseline(plan)
    step = plan.predicted.step_s if plan.predicted else None
    time = fmt.time_unit(*(each.step_s for each in plan.baselines))
    rows = tuple(
        (
            each.name + (" (best of these)" if best and each.name == best[0] else ""),
            "not possible" if each.step_s is None else time.show(each.step_s),
            fmt.ratio(fmt.against(each.step_s, step)),
        )
        for each in plan.baselines
    )
    sheet = Sheet("baselines", (Column("", "name"), Column(f"step {time.name}"), Column("speed-up")), rows)
    return (sheet, gain(plan)) if plan.objective == "step" else (sheet,)


def gain(plan: Plan) -> Line:
    """What the plan gains over the best of its baselines."""
    best, factor = best_baseline(plan), speed_up(plan)
    if best is None:
        return Line("none of the baselines fits the workers' memory", "strong")
    if factor is None:
        return Line(f"best baseline: {best[0]}, {fmt.seconds(best[1])} a step")
    if abs(factor - 1) < 5e-3:
        return Line(f"as fast as the best baseline ({best[0]})", "strong")
    if factor < 1:
        gap = fmt.percent(1 - factor)
        text = f"{best[0]} is faster by {gap}: it gives a worker several stages, and this plan does not"
        return Line(f"{text}; --schedule interleaved looks for such plans", "warning")
    return Line(f"{fmt.ratio(factor)} as fast as the best baseline ({best[0]})", "strong")


def plan_data(plan: Plan) -> dict[str, Any]:
    """The same for `--json`: the plan document, and what is derived from it."""
    best = best_baseline(plan)
    derived = {
        "speed_up": speed_up(plan),
        "best_baseline": None if best is None else {"name": best[0], "step_s": best[1]},
        "status": None if plan.solver is None else status(plan.solver),
        "memory_share": {each.worker: fullness(each) for each in plan.predicted.workers} if plan.predicted else {},
    }
    return {**encode(plan), "derived": derived}
