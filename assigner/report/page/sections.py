"""The tables and sentences of a page, as sheets and lines: what the charts show, and what needs no chart."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from assigner import formatting as fmt
from assigner.formats.fineness import rows_each, split_text
from assigner.report.agreement import agreement_report, missed_by, other_remat
from assigner.report.memory import PARTS, fullness, misfit
from assigner.report.page.markup import barred
from assigner.report.page.shown import MOST, beaten, bound_s, changed, unlike_batches
from assigner.report.plan import (
    best_baseline,
    method,
    objective_text,
    proof,
    proven_gap,
    remat_text,
    scope,
    speed_up,
)
from assigner.report.sheet import Column, Line, Part, Report, Sheet
from assigner.report.whatif import TO_THIS
from assigner.schedule.bottleneck import limiting
from assigner.schedule.criticalpath import path_shares, time_on_path
from assigner.schedule.orders import ActionKind, in_flight
from assigner.schedule.replication import taken
from assigner.schedule.timing import stage_s
from assigner.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.solverreport import SolverReport
    from assigner.report.page.shown import Run, Shown
    from assigner.schedule.simulate import Timeline

MOST_STARTS = 4096
"""Actions above which a table of all of them helps nobody, and makes the page large."""
MOST_ON_PATH = 10
"""Rows of the critical path's table; what takes least is added up in the last one."""
_WORDS = {
    "forward": "forward", "backward": "backward", "backward_input": "input part", "backward_weight": "weight part"
}  # fmt: skip


class Card(NamedTuple):
    """One figure of a plan that stands out: what it is, the figure, what to make of it."""

    label: str
    value: str
    note: str


def cards(pages: Sequence[Shown], page: Shown) -> tuple[Card, ...]:
    """A plan in a few figures, `pages` being all plans."""
    plan, said = page.plan, page.predicted
    best = best_baseline(plan) if plan.objective == "step" else None
    fullest = max(said.workers, key=fullness)
    split = split_text(plan.workload.batch_size, plan.micro_batches)
    found = [Card("step", fmt.seconds(said.step_s), f"{plan.schedule}, {split}")]
    found += [Card("measured step", fmt.seconds(run.agreement.step.measured_s), _missed(run)) for run in page.runs[:1]]
    found.append(Card("throughput", fmt.rate(said.samples_per_s), f"batch of {plan.workload.batch_size}"))
    if best is not None:
        name, step_s = best
        found.append(Card("against the best baseline", fmt.ratio(speed_up(plan)), f"{name}: {fmt.seconds(step_s)}"))
    found.append(Card("bubble", fmt.percent(said.bubble_fraction), "of its workers' time, nothing is computed"))
    held = f"{fmt.size(fullest.peak_bytes)} of {fmt.size(fullest.capacity_bytes)}"
    found.append(Card("fullest memory", fmt.percent(fullness(fullest)), f"{held} on {fullest.worker}"))
    if plan.solver is not None and (plan.objective != "step" or plan.solver.gap >= 1 or proven_gap(plan) is not None):
        notes = [scope(plan.solver), *_searched(pages, page, plan.solver)]
        found.append(Card("solver", proof(plan.solver), "; ".join(filter(None, notes))))
    return tuple(found)


def _searched(pages: Sequence[Shown], page: Shown, solver: SolverReport) -> Iterator[str]:
    """What the search proved, of which plans, and what did it."""
    if beaten(pages, page):
        yield "of the plans that its options allow: another plan here is faster"
    elif page.plan.objective != "step":
        yield f"{page.plan.objective}: {objective_text(page.plan.objective, solver.objective_s)}"
        if solver.gap < 1:
            yield f"bound {objective_text(page.plan.objective, solver.bound_s)}"
    elif solver.gap < 1:
        yield f"bound {fmt.seconds(solver.bound_s)}"
    yield f"{method(solver)}, {fmt.seconds(solver.seconds)}"


def _missed(run: Run) -> str:
    """How far off the prediction was: of the plan as it was run."""
    step = run.agreement.step
    said = [f"IQR {fmt.seconds(step.iqr_s)} over {fmt.plural(step.samples, 'step')}"]
    if step.error:
        said.insert(0, f"predicted {missed_by(step.error)}")
    if run.as_run is not None:
        said.insert(0, f"{fmt.seconds(step.predicted_s)} predicted as it was run")
        said.append(other_remat(run.trace.remat))
    return "; ".join(said)


def summary(page: Shown) -> Report:
    """What limits a plan, and what does not hold of its file any more."""
    over = misfit(page.predicted)
    limit = limiting(page.plan, page.predicted, path_shares(page.timeline))
    lines = [Line(f"{limit}.", "strong"), *changed(page), *([over] if over else [])]
    if page.profile.warnings:
        count = fmt.plural(len(page.profile.warnings), "warning")
        lines.append(Line(f"The profile has {count}, listed at the end of this page."))
    return tuple(lines)


def steps(pages: Sequence[Shown], page: Shown) -> Report:
    """Step times of all plans and of this one's baselines, the fastest first, with the bound; nothing without any.

    Where batches differ, times of a sample take their place.
    """
    if len(pages) == 1 and not page.plan.baselines:
        return ()
    found = sorted(_times(pages, page))
    slowest, time = found[-1][0], fmt.time_unit(found[-1][0])
    mine = next(seconds for seconds, name in found if name.endswith(_THIS))
    rows = [
        (name, time.show(t), fmt.ratio(fmt.against(t, mine)), barred(t / slowest if slowest else 0))
        for t, name in found
    ]  # fmt: skip
    rows += [(each.name, "not possible", "", "") for each in page.plan.baselines if each.step_s is None]
    marked = frozenset(n for n, row in enumerate(rows) if row[0].endswith(_THIS))
    what = "sample" if unlike_batches(pages) else "step"
    columns = (
        Column("", "text"), Column(f"{what} {time.name}"), Column(TO_THIS), Column("of the slowest", "name"),
    )  # fmt: skip
    beside = [*(["other plans"] if len(pages) > 1 else []), *(["the baselines"] if page.plan.baselines else [])]
    title = f"{what.capitalize()} time, beside {' and '.join(beside)}"
    return (Sheet(title, columns, tuple(rows), marked),)


_THIS = " (this plan)"


def _times(pages: Sequence[Shown], page: Shown) -> Iterator[tuple[float, str]]:
    """Seconds and names of all that has a bar: of a step, or of a sample where batches differ."""
    unlike = unlike_batches(pages)
    for each in pages:
        whole = each.plan.workload.batch_size if unlike else 1
        yield each.predicted.step_s / whole, each.name + (_THIS if each is page else "")
    whole = page.plan.workload.batch_size if unlike else 1
    yield from ((each.step_s / whole, each.name) for each in page.plan.baselines if each.step_s is not None)
    bound = bound_s(pages, page)
    if bound is not None and not unlike:
        yield bound, "bound of this plan's search"


def stage_sheet(page: Shown) -> Sheet:
    """One row for each stage: what one micro-batch takes there, and how its worker spends a step."""
    plan, cost = page.plan, page.cost
    once = {
        (n, worker): [stage_s(cost, plan, n, worker, kind) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
        for n, stage in enumerate(plan.stages)
        for worker in stage.workers
    }
    said = plan.predicted_workers
    unit = fmt.time_unit(*(seconds for pair in once.values() for seconds in pair))
    whole = fmt.time_unit(*(each.compute_s for each in said.values()))
    rows = []
    for (n, worker), both in once.items():
        stage, spent, first = plan.stages[n], said[worker], plan.held[worker][0] == n
        times = (spent.compute_s, spent.transfer_s, spent.idle_s)
        rows.append(
            (
                str(n), worker, page.profile.worker[worker].kind,
                *((fmt.count(len(taken(plan, n, worker))),) if plan.is_replicated else ()),
                fmt.ranges(stage.partitions), remat_text(stage.partitions, stage.rematerialise),
                fmt.count(in_flight(plan, n, worker)), *map(unit.show, both),
                *(whole.show(seconds) if first else "" for seconds in times),
            )
        )  # fmt: skip
    columns = (
        Column("#"), Column("worker", "name"), Column("kind", "text"),
        *((Column("takes"),) if plan.is_replicated else ()), Column("partitions", "text"),
        Column("remat", "text"), Column("in flight"), Column(f"forward {unit.name}"),
        Column(f"backward {unit.name}"), Column(f"compute {whole.name}"), Column(f"transfer {whole.name}"),
        Column(f"idle {whole.name}"),
    )  # fmt: skip
    title = "Forward and backward are of one micro-batch, recomputing included; the last three columns are of a step"
    return Sheet(title, columns, tuple(rows))


def memory_sheet(page: Shown) -> Sheet:
    """What each worker holds at its peak, by what holds it."""
    workers = page.predicted.workers
    parts = [part for part in PARTS if any(getattr(each.memory, part, 0) for each in workers)]
    unit = fmt.byte_unit(*(each.peak_bytes for each in workers))
    measured = {each.worker: each.measured_bytes for run in page.runs[:1] if run.as_run is None
                for each in run.agreement.workers}  # fmt: skip
    rows = []
    for each, held in zip(workers, page.memory, strict=True):
        figures = [each.peak_bytes, held.peak.total, *([measured.get(each.worker)] if measured else [])]
        figures += [getattr(each.memory, part) for part in parts]
        full = (fmt.size(each.capacity_bytes), barred(fullness(each)))
        rows.append((each.worker, *full, *(unit.show(figure) for figure in figures)))
    said = ["allowed for", "peak", *(["measured"] if measured else []), *parts]
    columns = (
        Column("worker", "name"), Column("capacity"), Column("full", "name"),
        *(Column(f"{word} {unit.name}") for word in said),
    )  # fmt: skip
    title = "The plan allows for every part at its largest at the same time, so the peak can be lower; by what holds it"
    return Sheet(title, columns, tuple(rows))


def split_sheet(page: Shown) -> Sheet:
    """The placement at each number of micro-batches."""
    found = page.splits
    time = fmt.time_unit(*(each.step_s for each in found))
    rows = []
    for each in found:
        counts = fmt.count(each.micro_batches), rows_each(page.plan.workload.batch_size, each.micro_batches, joint="-")
        notes = ["this plan"] if each.micro_batches == page.plan.micro_batches else []
        if each.fullest is None:
            rows.append((*counts, fmt.NOTHING, "", "; ".join([*notes, each.why])))
            continue
        name, peak, capacity = each.fullest
        share = peak / capacity if capacity else float("inf")
        said = f"{name}: {barred(share)}" if each.fits else f"{name} lacks {fmt.size(peak - capacity)}"
        notes += [] if each.fits else ["does not fit"]
        notes += [] if each.measured else ["this size was not measured"]
        rows.append((*counts, time.show(each.step_s), said, "; ".join(notes)))
    marked = frozenset(n for n, each in enumerate(found) if each.micro_batches == page.plan.micro_batches)
    columns = (
        Column("micro-batches"), Column("of samples"), Column(f"step {time.name}"), Column("fullest worker", "name"),
        Column("", "text"),
    )  # fmt: skip
    title = "This placement, with its rematerialisation and its schedule, at each number of micro-batches"
    title += f" up to {MOST}" if found[-1].micro_batches >= MOST else ""
    return Sheet(title, columns, tuple(rows), marked)


def measured_section(page: Shown) -> Report:
    """Each traced run beside the prediction."""
    parts: list[Part] = []
    for run in page.runs:
        parts += [Line(f"{run.name}, a run of {page.name}", "strong"), *agreement_report(run.agreement)[1:]]
    return tuple(parts)


def about(page: Shown) -> Report:
    """Where a plan comes from: files, dates, versions, and the solver's settings."""
    plan, profile, was = page.plan, page.profile, page.stored.profile
    other = was if was and (plan.profile is None or was.sha256 != plan.profile.sha256) else None
    solver = page.stored.solver
    rows = [
        ("workload", f"{plan.workload.name} · {plan.workload.entry}".strip(" ·")),
        ("fingerprint", plan.workload.fingerprint),
        ("numbers, optimizer", f"{plan.workload.dtype}, {plan.workload.optimizer}".strip(", ")),
        ("plan", _made(plan.created_at, plan.tool_version)),
        ("profile", f"{plan.profile.path} · {_made(profile.created_at, profile.tool_version)}" if plan.profile
         else _made(profile.created_at, profile.tool_version)),
        ("profile's hash", f"sha256:{plan.profile.sha256}" if plan.profile else ""),
        ("solved from", f"{other.path} · sha256:{other.sha256}" if other else ""),
        *((f"profile's {name}", _plain(value)) for name, value in profile.environment.items()),
        *((f"traced run {run.name}", _made(run.trace.created_at, run.trace.tool_version)) for run in page.runs),
        ("this page", f"by assigner {__version__}"),
    ]  # fmt: skip
    parts: list[Part] = [_pairs("Files and versions", [row for row in rows if row[1]])]
    if solver is not None:
        said = {"objective": plan.objective, **solver.options}
        settings = [(name, _plain(value)) for name, value in said.items() if value not in (None, "", [], {})]
        parts.append(_pairs("Solver's settings", settings))
    return tuple(parts)


def _made(when: str, version: str) -> str:
    return " by assigner ".join(text for text in (when, version) if text)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> Sheet:
    return Sheet(title, (Column("", "name"), Column("", "text")), tuple(rows))


def starts_sheet(page: Shown) -> Report:
    """A row for each micro-batch, a forward's and a backward's start for each stage; the stages' table has lengths."""
    plan, count = page.plan, len(page.plan.stages)
    if 2 * count * plan.micro_batches > MOST_STARTS:
        text = f"More than {MOST_STARTS:,} actions: their starts are in the figures of `assigner report --json`."
        return (Line(text),)
    time = fmt.time_unit(page.timeline.step_s)
    starts = {
        (event.action.kind.value, event.action.stage, event.action.micro_batch): time.show(event.start_s)
        for event in page.timeline.events
        if event.action.route is None
    }
    done = {key[:2] for key in starts}
    kinds = [(stage, kind) for stage in range(count) for kind in _WORDS if (kind, stage) in done]
    rows = tuple(
        (str(m), *(starts.get((kind, stage, m), fmt.NOTHING) for stage, kind in kinds))
        for m in range(plan.micro_batches)
    )  # fmt: skip
    columns = Column("micro-batch"), *(Column(f"{_WORDS[kind]} {stage}") for stage, kind in kinds)
    title = f"When each micro-batch starts, in {time.name}: forward and backward of each stage, as simulated"
    return (Sheet(title, columns, rows),)


def critical_sheet(timeline: Timeline) -> Sheet:
    """The path's actions and messages, added up by what and where they are; where it spends most stands first."""
    spent = time_on_path(timeline)
    on: dict[str, float] = defaultdict(float)
    for (_, where), times in spent.items():
        on[" -> ".join(where)] += sum(times)
    time = fmt.time_unit(timeline.step_s)
    found = sorted(((sum(times), len(times), what, " -> ".join(where)) for (what, where), times in spent.items()),
                   reverse=True)  # fmt: skip
    rest = found[MOST_ON_PATH - 1 :] if len(found) > MOST_ON_PATH else []
    found = sorted(found[: len(found) - len(rest)], key=lambda each: (-on[each[3]], each[3], -each[0]))
    if rest:
        whole = sum(each[0] for each in rest), sum(each[1] for each in rest)
        found.append((*whole, f"{len(rest)} others", ""))
    rows = tuple(
        (what, where, fmt.count(count), time.show(seconds), barred(fmt.against(seconds, timeline.step_s) or 0.0))
        for seconds, count, what, where in found
    )
    columns = (Column("what", "name"), Column("where", "name"), Column("times"), Column(time.name), Column("", "name"))
    return Sheet("The critical path: what the step is made of, from its start to its end without a gap", columns, rows)
