"""The links of a profile: what they carry, and how long they take to begin; what a step sends; and all-reduces.

Workers are rows and columns of a matrix while they fit; else workers of one host and kind are put together, with the
median of their links; and where that is too wide still, kinds of workers are listed in pairs, on one host and between
hosts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.formats.profile import Link
from assigner.report.sheet import Column, Line, Report, Sheet
from assigner.schedule.cost import CostModel, PartitionOutput, message_s
from assigner.schedule.program import Payload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.formats.prediction import Prediction, TransferPrediction
    from assigner.formats.profile import Collective, Profile, Worker
    from assigner.schedule.program import Program

MATRIX_LIMIT = 16
"""Rows up to which there is a matrix."""
PAIR_LIMIT = 24
"""Pairs of kinds that are listed."""
ROW_LIMIT = 16
"""Sets of workers that are listed."""
_NAMED = 8
"""Workers up to which the rows of a matrix have names, not ranks alone."""


@dataclass(frozen=True)
class Figure:
    """One thing that is told of links, with its unit in the title; `slow`: a larger value is the slower link."""

    title: str
    unit: fmt.Unit
    value: Callable[[Link], float]
    slow: bool


def message_bytes(profile: Profile) -> float:
    """The message at which links are compared: the median output at the largest measured micro-batch, in bytes."""
    cost = CostModel(profile)
    batch = max(point.micro_batch for point in profile.measurements)
    sizes = sorted(cost.output_bytes(PartitionOutput(edge.source, edge.output), batch) for edge in profile.edges)
    return sizes[len(sizes) // 2] if sizes else 2.0**20


def rate(link: Link, size: float) -> float:
    """Bytes per second of one message of `size` bytes."""
    return size / max(message_s(link.points, size), 1e-12)


def links(profile: Profile, *, everything: bool = False) -> Report:
    """Bandwidth and latency of every link, or of groups of them where there are many and not everything is asked."""
    if len(profile.workers) == 1:
        return ()
    if not profile.links:
        return (Line("no links: no two workers can talk, so a plan has one worker", "warning"),)
    size = message_bytes(profile)
    carried = fmt.rate_unit(*(rate(link, size) for link in profile.links))
    wait = fmt.time_unit(*(link.points[0].seconds for link in profile.links))
    smallest = fmt.size(min(link.points[0].bytes for link in profile.links))
    figures = (
        Figure(f"{carried.name} in messages of {fmt.size(size)}", carried, lambda link: rate(link, size), slow=False),
        Figure(f"latency in {wait.name}, messages of {smallest}", wait, lambda link: link.points[0].seconds, slow=True),
    )
    single = everything or len(profile.workers) <= MATRIX_LIMIT
    sheets = tuple(_by_worker(profile, each) if single else _by_group(profile, each) for each in figures)
    return sheets if single else (*sheets, Line(_extremes(profile, figures[0])))


def _by_worker(profile: Profile, figure: Figure) -> Sheet:
    """One row per sender, one column per receiver; `-` where the two cannot talk."""
    number = {worker.name: n for n, worker in enumerate(profile.workers)}
    values = {(number[link.source], number[link.target]): figure.value(link) for link in profile.links}
    named, ranks = len(number) <= _NAMED, [str(worker.rank) for worker in profile.workers]
    names, heads = (list(number), [f"to {rank}" for rank in ranks]) if named else (ranks, ranks)
    title = f"links: {figure.title}" + ("" if named else "; from a rank (row) to a rank")
    return _matrix(title, names, heads, figure, values, instead=_by_group(profile, figure))


def _matrix(
    title: str, names: Sequence[str], heads: Sequence[str], figure: Figure, values: Mapping[tuple[int, int], float],
    *, instead: Sheet,
) -> Sheet:  # fmt: skip
    """A row for each sender and a column for each receiver; `values` by their positions."""
    rows = tuple(
        (name, *(figure.unit.show(values.get((a, b))) for b in range(len(heads)))) for a, name in enumerate(names)
    )
    return Sheet(title, (Column("from", "name"), *map(Column, heads)), rows, instead=instead)


def _by_group(profile: Profile, figure: Figure) -> Sheet:
    """Workers of one host and kind together; the median of the links between two groups, or inside one."""
    groups: dict[tuple[str, str], list[Worker]] = defaultdict(list)
    for worker in profile.workers:
        groups[worker.host, worker.kind].append(worker)
    pairs = _by_kind(profile, figure)
    if len(groups) > MATRIX_LIMIT:
        return pairs
    number = {worker.name: n for n, group in enumerate(groups.values()) for worker in group}
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for link in profile.links:
        found[number[link.source], number[link.target]].append(figure.value(link))
    names = [f"{n} {host}, {kind} (x{len(each)})" for n, ((host, kind), each) in enumerate(groups.items())]
    medians = {ends: median(values) for ends, values in found.items()}
    title = f"links between groups of workers, the median: {figure.title}"
    return _matrix(title, names, [f"to {n}" for n in range(len(names))], figure, medians, instead=pairs)


def _by_kind(profile: Profile, figure: Figure) -> Sheet:
    """Pairs of kinds, on one host and between hosts: how many links, and their range; the slowest pairs first.

    Both directions of a pair are one row.
    """
    pairs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for link in profile.links:
        source, target = profile.worker[link.source], profile.worker[link.target]
        where = "on one host" if source.host == target.host else "between hosts"
        one, other = sorted((source.kind, target.kind))
        pairs[one, other, where].append(figure.value(link))
    slowest = sorted(pairs.items(), key=lambda pair: -max(pair[1]) if figure.slow else min(pair[1]))
    show = figure.unit.show
    rows = tuple(
        (*pair, fmt.count(len(each)), show(min(each)), show(median(each)), show(max(each)))
        for pair, each in slowest[:PAIR_LIMIT]
    )
    title = f"links by kind of worker, slowest first: {figure.title}"
    if len(pairs) > PAIR_LIMIT:
        title += f"; {PAIR_LIMIT} of {len(pairs)} pairs, --json has all links"
    columns = (
        Column("between", "text"), Column("and", "text"), Column("", "name"), Column("links", rank=2),
        Column("least", rank=int(figure.slow)), Column("median"), Column("most", rank=int(not figure.slow)),
    )  # fmt: skip
    return Sheet(title, columns, rows)


def _extremes(profile: Profile, figure: Figure) -> str:
    """The slowest and the fastest link by name."""
    ordered = sorted(profile.links, key=figure.value)
    said = (
        f"{word} {link.source} -> {link.target}, {figure.unit.text(figure.value(link))}"
        for word, link in (("slowest", ordered[0]), ("fastest", ordered[-1]))
    )
    return f"of {fmt.plural(len(ordered), 'link')}: {'; '.join(said)} (-v has a row for each worker)"


def transfers(now: Prediction, program: Program | None = None, *, most: int | None = None) -> Report:
    """What a step sends over each link, the busiest first: a row for each that is used; nothing where nothing is sent.

    With the plan's program also what the messages are, and how many. `most` links are shown; None: all.
    """
    if not now.transfers:
        return ()
    time = fmt.time_unit(*(each.seconds for each in now.transfers))
    size = fmt.byte_unit(*(each.bytes for each in now.transfers))
    rows = tuple(
        (
            each.source, each.target, *(_messages(each, program) if program else ()), size.show(each.bytes),
            time.show(each.seconds), fmt.points(fmt.against(each.seconds, now.step_s)),
        )
        for each in sorted(now.transfers, key=lambda each: -each.seconds)[:most]
    )  # fmt: skip
    columns = (
        Column("from", "name"), Column("to", "name"),
        *((Column("what", "text"), Column("messages")) if program else ()),
        Column(size.name), Column(f"on the link {time.name}"), Column("of the step %", rank=1),
    )  # fmt: skip
    left_out = len(now.transfers) - len(rows)
    more = (Line(f"and {fmt.plural(left_out, 'link')} that are less busy"),) if left_out else ()
    return (Sheet("messages of a step, by link", columns, rows), *more)


def _messages(link: TransferPrediction, program: Program) -> tuple[str, str]:
    """Payloads and partitions of a link's messages, and how many a step has."""
    mine = [route for route in program.routes if (route.source, route.target) == (link.source, link.target)]
    what = ", ".join(dict.fromkeys(f"{route.payload} of {route.partition}" for route in mine))
    count = sum(1 if route.payload is Payload.TIE else program.plan.micro_batches for route in mine)
    return what, fmt.count(count)


def collectives(profile: Profile, *, everything: bool = False) -> Report:
    """One row for each set of workers; of many, unless all are asked for, those furthest from the formula, and all."""
    if not profile.collectives:
        return ()
    said = {each.workers: formula_s(profile, each) for each in profile.collectives}
    shown: Sequence[Collective] = sorted(profile.collectives, key=lambda each: len(each.workers))
    title = "all-reduces, by the bytes that each worker adds"
    if len(shown) > ROW_LIMIT and not everything:
        telling = sorted(shown, key=lambda each: (len(each.workers) > 2, _factor(each, said[each.workers]) or 0.0))
        shown = [each for each in shown if each in telling[-ROW_LIMIT:]]
        title += f"; {ROW_LIMIT} of {len(profile.collectives)} sets, -v lists all"
    sizes = sorted({point.bytes for each in shown for point in each.points})
    unit = fmt.time_unit(*(point.seconds for each in shown for point in each.points))
    times = [Column(f"{fmt.size(size)} {unit.name}", rank=0 if size == sizes[-1] else 2) for size in sizes]
    rows = []
    for each in shown:
        took = {point.bytes: point.seconds for point in each.points}
        rows.append(
            (
                (Column("among", "text"), fmt.ranges(each.workers)),
                (Column("by", "name", rank=3), each.backend),
                *((column, unit.show(took.get(size))) for column, size in zip(times, sizes, strict=True)),
                (Column("± %", rank=1), fmt.spread_points(max(point.spread for point in each.points))),
                (Column("ring", rank=1), fmt.ratio(_factor(each, said[each.workers]))),
                (Column("busy %"), fmt.points(each.busy)),
            )
        )
    return (Sheet.of(f"{title}; ring: times as long as links say", rows),)


def _factor(each: Collective, said_s: Sequence[float | None]) -> float | None:
    """At the largest size."""
    return fmt.against(each.points[-1].seconds, said_s[-1])


def formula_s(profile: Profile, each: Collective) -> list[float | None]:
    """What the ring formula says at each of its sizes, in seconds; None: a link is missing."""
    rings, workers = CostModel(profile).rings, frozenset(each.workers)
    said = (rings.formula_s(workers, point.bytes) for point in each.points)
    return [seconds if math.isfinite(seconds) else None for seconds in said]


def collectives_data(profile: Profile) -> list[dict[str, Any]]:
    """The same for `--json`; `formula_s` has what the links alone say at each size."""
    return [{**encode(each), "formula_s": formula_s(profile, each)} for each in profile.collectives]
