"""The tables and sentences of a page, as sheets and lines: what the charts show, and what needs no chart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from assigner import __version__
from assigner import formatting as fmt
from assigner.bottleneck import limiting
from assigner.report.agreement import agreement_report
from assigner.report.memory import PARTS
from assigner.report.page.splits import MOST, Split
from assigner.report.plan import best_baseline, fullness, remat_text, speed_up, status
from assigner.report.sheet import Column, Line, Report, Sheet
from assigner.schedule import Kind, Payload, warm_up
from assigner.timing import stage_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.report.page.shown import Shown


class Card(NamedTuple):
    """One figure of a plan that stands out: what it is, the figure, what to make of it."""

    label: str
    value: str
    note: str


def cards(page: Shown) -> tuple[Card, ...]:
    """A plan in six figures."""
    plan, said = page.plan, page.predicted
    best, factor = best_baseline(plan), speed_up(plan)
    fullest = max(said.workers, key=fullness)
    found = [Card("step", fmt.seconds(said.step_s), f"{plan.schedule}, {_split(page)}")]
    found += [Card("measured step", fmt.seconds(run.agreement.step.measured_s), _missed(page, n))
              for n, run in enumerate(page.runs[:1])]  # fmt: skip
    found.append(Card("throughput", fmt.rate(said.samples_per_s), f"batch of {plan.workload.batch_size}"))
    if best is not None:
        found.append(Card("against the best baseline", fmt.ratio(factor), f"{best[0]}: {fmt.seconds(best[1])}"))
    found.append(Card("bubble", fmt.percent(said.bubble_fraction), "of its workers' time, nothing is computed"))
    held = f"{fmt.size(fullest.peak_bytes)} of {fmt.size(fullest.capacity_bytes)}"
    found.append(Card("fullest memory", fmt.percent(fullness(fullest)), f"{held} on {fullest.worker}"))
    if plan.solver is not None:
        who = f"{plan.solver.name} {plan.solver.version}".strip()
        proven = plan.objective == "step" and plan.solver.gap < 1
        bound = f"bound {fmt.seconds(plan.solver.bound_s)}, " if proven else ""
        gap = status(plan.solver)
        value = gap if gap == "optimal" else f"gap {fmt.percent(plan.solver.gap)}" if proven else "no bound"
        found.append(Card("solver", value, f"{bound}{who}, {fmt.seconds(plan.solver.seconds)}"))
    return tuple(found)


def _split(page: Shown) -> str:
    return f"{fmt.plural(page.plan.micro_batches, 'micro-batch')} of {page.plan.micro_batch_size}"


def _missed(page: Shown, run: int) -> str:
    step = page.runs[run].agreement.step
    spread = f"IQR {fmt.seconds(step.iqr_s)} over {fmt.plural(step.samples, 'step')}"
    if not step.error:
        return spread
    return f"predicted {fmt.percent(abs(step.error))} too {'low' if step.error < 0 else 'high'}; {spread}"


def summary(page: Shown) -> Report:
    """What limits a plan, and what does not hold of its file any more."""
    lines = [Line(f"{limiting(page.plan, page.predicted)}.", "strong")]
    change = fmt.against(page.predicted.step_s, page.stored.step_s) if page.stored else None
    if page.stored is not None and change is not None and abs(change - 1) >= 5e-4:
        was, now = fmt.seconds(page.stored.step_s), fmt.percent(change - 1, sign=True)
        lines.append(Line(f"The plan's file says {was} a step; this profile says {now}.", "warning"))
    over = [each for each in page.predicted.workers if fullness(each) > 1]
    lines += [
        Line(f"{each.worker} needs {fmt.size(each.peak_bytes)} and has {fmt.size(each.capacity_bytes)}.", "warning")
        for each in over
    ]
    if page.profile.warnings:
        count = fmt.plural(len(page.profile.warnings), "warning")
        lines.append(Line(f"The profile has {count}, listed at the end of this page."))
    return tuple(lines)


def steps(pages: Sequence[Shown], page: Shown) -> Report:
    """Step times of all plans and of this one's baselines, the fastest first, with the bound; nothing without any."""
    if len(pages) == 1 and not page.plan.baselines:
        return ()
    found = [(each.predicted.step_s, each.name + (" (this plan)" if each is page else "")) for each in pages]
    found += [(each.step_s, each.name) for each in page.plan.baselines if each.step_s is not None]
    found.sort(key=lambda each: each[0])
    solver = page.plan.solver
    if solver is not None and page.plan.objective == "step" and solver.gap < 1:
        found.insert(0, (solver.bound_s, "no plan is faster than"))
    slowest = max(seconds for seconds, _ in found)
    time = fmt.time_unit(slowest)
    mine = page.predicted.step_s
    rows = [
        (name, time.show(t), fmt.ratio(fmt.against(t, mine)), _bar(t / slowest if slowest else 0)) for t, name in found
    ]
    rows += [(each.name, "not possible", "", "") for each in page.plan.baselines if each.step_s is None]
    marked = frozenset(n for n, row in enumerate(rows) if row[0].endswith("(this plan)"))
    columns = (
        Column("", "text"), Column(f"step {time.name}"), Column("to this plan"), Column("of the slowest", "name"),
    )  # fmt: skip
    title = "Step time, beside the baselines" if len(pages) == 1 else "Step time, beside other plans and the baselines"
    return (Sheet(title, columns, tuple(rows), marked),)


def stage_sheet(page: Shown) -> Sheet:
    """One row for each stage: what one micro-batch takes there, and how its worker spends a step."""
    plan, cost = page.plan, page.cost
    once = [[stage_s(cost, plan, n, kind) for kind in (Kind.FORWARD, Kind.BACKWARD)] for n in range(len(plan.stages))]
    said = {each.worker: each for each in page.predicted.workers}
    unit = fmt.time_unit(*(seconds for pair in once for seconds in pair))
    whole = fmt.time_unit(*(each.compute_s for each in said.values()))
    rows, seen = [], set()
    for n, stage in enumerate(plan.stages):
        spent = said[stage.worker]
        first = stage.worker not in seen
        seen.add(stage.worker)
        times = (spent.compute_s, spent.transfer_s, spent.idle_s)
        rows.append(
            (
                str(n), stage.worker, page.profile.worker[stage.worker].kind, fmt.ranges(stage.partitions),
                remat_text(stage.partitions, stage.rematerialise), fmt.count(warm_up(plan, n)),
                *(unit.show(seconds) for seconds in once[n]),
                *(whole.show(seconds) if first else "" for seconds in times),
            )
        )  # fmt: skip
    columns = (
        Column("#"), Column("worker", "name"), Column("kind", "text"), Column("partitions", "text"),
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
    measured = {each.worker: each.measured_bytes for run in page.runs[:1] for each in run.agreement.workers}
    rows = []
    for each, held in zip(workers, page.memory, strict=True):
        figures = [each.peak_bytes, held.peak.total, *([measured.get(each.worker)] if measured else [])]
        figures += [getattr(each.memory, part) for part in parts]
        full = (fmt.size(each.capacity_bytes), _bar(fullness(each)))
        rows.append((each.worker, *full, *(unit.show(figure) for figure in figures)))
    said = ["allowed for", "peak", *(["measured"] if measured else []), *parts]
    columns = (
        Column("worker", "name"), Column("capacity"), Column("full", "name"),
        *(Column(f"{word} {unit.name}") for word in said),
    )  # fmt: skip
    title = "The plan allows for every part at its largest at the same time, so the peak can be lower; by what holds it"
    return Sheet(title, columns, tuple(rows))


def _bar(share: float) -> str:
    return f"{fmt.bar(share, width=8)} {fmt.percent(share)}"


def transfers_sheet(page: Shown) -> Report:
    """What a step sends over each link, the busiest first."""
    found = sorted(page.predicted.transfers, key=lambda each: -each.seconds)
    if not found:
        return (Line("One worker runs everything: nothing is sent."),)
    routes = page.timeline.program.routes
    time, size = fmt.time_unit(*(each.seconds for each in found)), fmt.byte_unit(*(each.bytes for each in found))
    rows = []
    for each in found:
        mine = [route for route in routes if (route.source, route.target) == (each.source, each.target)]
        what = ", ".join(dict.fromkeys(f"{route.payload} of {route.partition}" for route in mine))
        count = sum(1 if route.payload is Payload.TIE else page.plan.micro_batches for route in mine)
        share = each.seconds / page.predicted.step_s if page.predicted.step_s else 0.0
        rows.append(
            (each.source, each.target, what, fmt.count(count), size.show(each.bytes), time.show(each.seconds),
             fmt.points(share))
        )  # fmt: skip
    columns = (
        Column("from", "name"), Column("to", "name"), Column("what", "text"), Column("messages"), Column(size.name),
        Column(f"on the wire {time.name}"), Column("of the step %"),
    )  # fmt: skip
    return (Sheet("What a step sends, the busiest link first", columns, tuple(rows)),)


def split_sheet(page: Shown, found: Sequence[Split]) -> Sheet:
    """The placement at each number of micro-batches."""
    time = fmt.time_unit(*(each.step_s for each in found))
    rows = []
    for each in found:
        if each.fullest is None:
            rows.append((fmt.count(each.micro_batches), fmt.count(each.micro_batch_size), fmt.NOTHING, "", each.why))
            continue
        name, peak, capacity = each.fullest
        share = peak / capacity if capacity else float("inf")
        said = f"{name}: {_bar(share)}" if each.fits else f"{name} lacks {fmt.size(peak - capacity)}"
        notes = ["this plan"] if each.micro_batches == page.plan.micro_batches else []
        notes += [] if each.fits else ["does not fit"]
        notes += [] if each.measured else ["this size was not measured"]
        rows.append(
            (fmt.count(each.micro_batches), fmt.count(each.micro_batch_size), time.show(each.step_s), said,
             "; ".join(notes))
        )  # fmt: skip
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
    parts: list[Sheet | Line] = []
    for run in page.runs:
        parts += [Line(f"{run.name}, a run of {page.name}", "strong"), *agreement_report(run.agreement)[1:]]
    return tuple(parts)


def about(page: Shown) -> Report:
    """Where a plan comes from: files, dates, versions, and the solver's settings."""
    plan, profile = page.plan, page.profile
    rows = [
        ("workload", f"{plan.workload.name} · {plan.workload.entry}".strip(" ·")),
        ("fingerprint", plan.workload.fingerprint),
        ("numbers, optimizer", f"{plan.workload.dtype}, {plan.workload.optimizer}".strip(", ")),
        ("plan", _made(plan.created_at, plan.tool_version)),
        ("profile", f"{plan.profile.path} · {_made(profile.created_at, profile.tool_version)}" if plan.profile
         else _made(profile.created_at, profile.tool_version)),
        ("profile's hash", f"sha256:{plan.profile.sha256}" if plan.profile else ""),
        *((f"profile's {name}", _plain(value)) for name, value in profile.environment.items()),
        *((f"traced run {run.name}", _made(run.trace.created_at, run.trace.tool_version)) for run in page.runs),
        ("this page", f"by assigner {__version__}"),
    ]  # fmt: skip
    parts: list[Sheet | Line] = [_pairs("Files and versions", [row for row in rows if row[1]])]
    if plan.solver is not None:
        said = {"objective": plan.objective, **plan.solver.options}
        settings = [(name, _plain(value)) for name, value in said.items() if value not in (None, "", [], {})]
        parts.append(_pairs("Solver's settings", settings))
    return tuple(parts)


def warnings(page: Shown) -> Report:
    """What the profile warns of."""
    return tuple(Line(text) for text in page.profile.warnings)


def _made(when: str, version: str) -> str:
    return " by assigner ".join(text for text in (when, version) if text)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> Sheet:
    return Sheet(title, (Column("", "name"), Column("", "text")), tuple(rows))
