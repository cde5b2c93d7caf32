"""The links between workers as heat maps: tables with shaded cells, so that each can be read as well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.location import rank_of
from assigner.report.links import message_bytes
from assigner.report.links import rate as link_rate
from assigner.schedule.timing import route_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from assigner.formats.profile import Link
    from assigner.report.page.shown import Shown

STEPS = 8
"""Shades of a heat map."""
MOST_WORKERS = 24
"""Workers up to which all of the profile's are shown; above it only the plan's."""

Ends = tuple[str, str]


@dataclass(frozen=True)
class MatrixCell:
    """One link: its figure, its shade (0: least, `STEPS` - 1: most; None: no link), and whether the plan uses it."""

    text: str
    shade: int | None
    used: bool


@dataclass(frozen=True)
class Matrix:
    """A table of all links, one row for each sender.

    Args:
        title: What the cells are, with their unit.
        workers: Names, in the order of rows and columns.
        rows: Cells by sender and receiver.
    """

    title: str
    workers: tuple[str, ...]
    rows: tuple[tuple[MatrixCell, ...], ...]


def matrices(page: Shown) -> tuple[Matrix, ...]:
    """Bandwidth, latency, and what a step of the plan sends; none where there is no link."""
    links = {(link.source, link.target): link for link in page.profile.links}
    names = tuple(sorted(page.profile.worker, key=rank_of))
    if len(names) > MOST_WORKERS:
        names = tuple(name for name in names if name in page.plan.workers)
    shown = {ends: link for ends, link in links.items() if ends[0] in names and ends[1] in names}
    if not shown:
        return ()
    size, about = _size(page)
    rates = {ends: link_rate(link, size) for ends, link in shown.items()}
    waits = {ends: link.points[0].seconds for ends, link in shown.items()}
    rate, wait = fmt.rate_unit(*rates.values()), fmt.time_unit(*waits.values())
    smallest = fmt.size(min(link.points[0].bytes for link in shown.values()))
    sent = {(each.source, each.target): each for each in page.predicted.transfers}
    heavy = fmt.byte_unit(*(each.bytes for each in sent.values()))
    shares = {ends: each.seconds / page.predicted.step_s for ends, each in sent.items() if page.predicted.step_s}
    used = frozenset(sent)
    found = [
        _matrix(f"Bandwidth, {rate.name}, {about} {fmt.size(size)}", names, used, rates, rate.show, log=True),
        _matrix(f"Latency, {wait.name}, of a message of {smallest}", names, used, waits, wait.show, log=True),
    ]
    if sent:
        title = f"What a step sends, {heavy.name}, shaded by the share of the step that it is on the wire"
        loads = {ends: heavy.show(each.bytes) for ends, each in sent.items()}
        found.append(_matrix(title, names, used, shares, loads, log=False, links=shown))
    return tuple(found)


def _size(page: Shown) -> tuple[float, str]:
    """The message at which links are compared: the plan's largest, or what the profile's report takes."""
    sizes = [route_bytes(page.cost, route, page.plan.micro_batch_size) for route in page.timeline.program.routes]
    return (
        (max(sizes), "in messages as large as the plan's largest,")
        if sizes
        else (message_bytes(page.profile), "in messages of")
    )


def _matrix(
    title: str,
    names: tuple[str, ...],
    used: frozenset[Ends],
    values: Mapping[Ends, float],
    show: Callable[[float], str] | Mapping[Ends, str],
    *,
    log: bool,
    links: Mapping[Ends, Link] | None = None,
) -> Matrix:
    scale = _scale([value for value in values.values() if value > 0 and math.isfinite(value)], log=log)

    def cell(ends: Ends) -> MatrixCell:
        if ends not in values:
            return MatrixCell("·" if links and ends in links else "", None, used=False)
        text = show(values[ends]) if callable(show) else show[ends]
        return MatrixCell(text, scale(values[ends]), ends in used)

    return Matrix(title, names, tuple(tuple(cell((one, two)) for two in names) for one in names))


def _scale(values: list[float], *, log: bool) -> Callable[[float], int]:
    """Which shade a value has: in equal steps from the least to the most, or of their logarithms."""
    if log and values:
        low, high = math.log(min(values)), math.log(max(values))
        span = max(high - low, math.log(2))  # links that are nearly alike look alike
    else:
        low, span = 0.0, max(values, default=1.0)

    def shade(value: float) -> int:
        at = (math.log(value) if log and value > 0 else value) - low
        return min(STEPS - 1, max(0, int(STEPS * at / span))) if math.isfinite(at) else 0

    return shade
