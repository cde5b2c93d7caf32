"""Predicted and measured figures of the runs, as tables."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.formats.plan import load_plan
from assigner.formats.profile import load_profile
from assigner.formats.trace import load_trace
from assigner.validation.comparison import agree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from cases import Case

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.formats.trace import Trace

MOST_STAGES = 6  # more are counted alone


@dataclass(frozen=True)
class Row:
    """One plan of one case; seconds and bytes.

    Args:
        case: The case's name.
        plan: The plan's name.
        shape: Schedule, micro-batches and partitions of each stage.
        predicted_s: The step.
        paced_s: The step as predicted for the machines as fast as they were in the runs; None: nobody looked.
        steps_s: The steps as they were measured, over all rounds.
        peaks: By worker, the predicted and the measured peak.
    """

    case: str
    plan: str
    shape: str
    predicted_s: float
    paced_s: float | None
    steps_s: tuple[float, ...]
    peaks: dict[str, tuple[float, float]]

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps_s)

    @property
    def spread(self) -> float:
        """IQR / median of the steps."""
        low, _, high = statistics.quantiles(self.steps_s, n=4, method="inclusive")
        return (high - low) / self.measured_s

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def least_memory_error(self) -> float:
        """(predicted - measured) / measured of the worker whose peak was predicted worst on the low side."""
        return min(predicted / measured - 1 for predicted, measured in self.peaks.values())


def compared(case: Case, folder: Path) -> list[Row]:
    """The rows of a case, from the plans and traces in its folder."""
    rows, profile = [], load_profile(folder / "profile.json")
    for line in (folder / "plans.txt").read_text().splitlines():
        name, file = line.split("\t")
        plan = load_plan(folder / file)
        traces = [load_trace(path) for path in sorted(folder.glob(f"{file.removesuffix('.json')}-*.trace.json"))]
        rows.append(_row(case.name, name, plan, traces, profile))
    return rows


def _row(case: str, name: str, plan: Plan, traces: Sequence[Trace], profile: Profile) -> Row:
    assert plan.predicted is not None
    rank = {worker: str(n) for n, worker in enumerate(profile.worker)}
    stages = " ".join(
        f"{'+'.join(rank[worker] for worker in stage.workers)}:{len(stage.partitions)}" for stage in plan.stages
    )
    if len(plan.stages) > MOST_STAGES:
        stages = f"{len(plan.stages)} stages on {', '.join(rank[worker] for worker in plan.workers)}"
    again = sum(len(stage.rematerialise) for stage in plan.stages)
    shape = f"{plan.schedule} M={plan.micro_batches} {stages}" + (f" remat {again}" if again else "")
    measured = {
        worker.worker: max(
            each.peak_bytes for trace in traces for each in trace.workers if each.worker == worker.worker
        )
        for worker in plan.predicted.workers
    }
    paced = [found for trace in traces if (found := agree(plan, profile, trace).paced_s) is not None]
    return Row(
        case, name, shape, plan.predicted.step_s, statistics.median(paced) if paced else None,
        tuple(second for trace in traces for second in trace.step_s),
        {worker.worker: (worker.peak_bytes, measured[worker.worker]) for worker in plan.predicted.workers},
    )  # fmt: skip


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of pairs, tau-b: plans that are the same one under two names are no disagreement.

    Concordant pairs less discordant ones (M. Kendall, Biometrika 30, 1938), ties left out of either
    side's count (the same, Biometrika 33, 1945). 1 where there is nothing to put in order.
    """
    both = list(itertools.combinations(pairs, 2))
    signs = [math.copysign(1, x) if (x := (a[0] - b[0]) * (a[1] - b[1])) else 0 for a, b in both]
    counted = math.prod(sum(a[side] != b[side] for a, b in both) for side in (0, 1))
    return sum(signs) / math.sqrt(counted) if counted else 1.0


def told_apart(rows: Sequence[Row]) -> tuple[int, int]:
    """Pairs whose measured medians lie further apart than half of both IQRs, and how many of them are as predicted."""
    pairs = [
        (a, b)
        for a, b in itertools.combinations(rows, 2)
        if 2 * abs(a.measured_s - b.measured_s) > a.spread * a.measured_s + b.spread * b.measured_s
    ]
    right = sum((a.predicted_s - b.predicted_s) * (a.measured_s - b.measured_s) > 0 for a, b in pairs)
    return len(pairs), right


def markdown(rows: Sequence[Row]) -> str:
    """A table, a row for each plan."""
    heads = ["case", "plan", "schedule, M, stages (worker:partitions)", "predicted ms", "measured ms", "IQR", "error"]
    heads += ["at the machine's pace", "peak MiB by worker, predicted / measured", "lowest"]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- | --- |{' ---: |' * 5} --- | ---: |"]
    for row in rows:
        paced = "" if row.paced_s is None else f"{row.paced_s / row.measured_s - 1:+.1%}"
        peaks = ", ".join(f"{a / 2**20:.0f} / {b / 2**20:.0f}" for a, b in row.peaks.values())
        lines.append(
            f"| {row.case} | {row.plan} | {row.shape} | {1e3 * row.predicted_s:.0f} | {1e3 * row.measured_s:.0f}"
            f" | {row.spread:.0%} | {row.error:+.1%} | {paced} | {peaks} | {row.least_memory_error:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """Errors over all rows, and the rank correlation of the plans of each case."""
    errors = sorted(abs(row.error) for row in rows)
    within = ", ".join(f"within {share:.0%}: {sum(error <= share for error in errors)}" for share in (0.05, 0.15))
    lowest, workers = min(row.least_memory_error for row in rows), sum(len(row.peaks) for row in rows)
    median = statistics.median(errors)
    lines = [
        f"Step time: {len(rows)} plans, median error {median:.1%}, worst {errors[-1]:.1%}; {within}.",
        f"Peak memory: predicted at most {max(0.0, -lowest):.1%} below the measured one (over {workers} workers).",
        "",
        "| case | Kendall's tau | pairs told apart | of them as predicted | plans | median error | worst error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case, mine in _by_case(rows):
        tau = kendall_tau([(row.predicted_s, row.measured_s) for row in mine])
        off = [abs(row.error) for row in mine]
        pairs, right = told_apart(mine)
        lines.append(
            f"| {case} | {tau:.2f} | {pairs} | {right} | {len(mine)} | {statistics.median(off):.1%} | {max(off):.1%} |"
        )
    return "\n".join(lines) + "\n"


def _by_case(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    return [(case, list(mine)) for case, mine in itertools.groupby(rows, key=lambda row: row.case)]
