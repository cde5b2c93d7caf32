"""The links between workers as heat maps: tables with shaded cells, so that each can be read as well."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.location import rank_of
from assigner.report.links import message_bytes
from assigner.report.links import rate as link_rate
from assigner.report.page.markup import short, table_html
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


def heat_maps(page: Shown) -> tuple[str, ...]:
    """Bandwidth, latency, and what a step of the plan sends, one row for each sender; none where there is no link.

    Links that the plan uses have a frame, and a word.
    """
    names = tuple(sorted(page.profile.worker, key=rank_of))
    if len(names) > MOST_WORKERS:
        names = tuple(name for name in names if name in page.plan.workers)
    shown = {ends: link for ends, link in page.profile.link.items() if ends[0] in names and ends[1] in names}
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
        _heat_map(f"Bandwidth, {rate.name}, {about} {fmt.size(size)}", names, used, rates, rate.show, log=True),
        _heat_map(f"Latency, {wait.name}, of a message of {smallest}", names, used, waits, wait.show, log=True),
    ]
    if sent:
        title = f"What a step sends, {heavy.name}, shaded by the share of the step that it is on the wire"
        loads = {ends: heavy.show(each.bytes) for ends, each in sent.items()}
        found.append(_heat_map(title, names, used, shares, loads, log=False, links=shown))
    return tuple(found)


def _size(page: Shown) -> tuple[float, str]:
    """The message at which links are compared: the plan's largest, or what the profile's report takes."""
    sizes = [route_bytes(page.cost, route, page.plan.micro_batch_size) for route in page.timeline.program.routes]
    return (
        (max(sizes), "in messages as large as the plan's largest,")
        if sizes
        else (message_bytes(page.profile), "in messages of")
    )


def _heat_map(
    title: str,
    names: tuple[str, ...],
    used: frozenset[Ends],
    values: Mapping[Ends, float],
    show: Callable[[float], str] | Mapping[Ends, str],
    *,
    log: bool,
    links: Mapping[Ends, Link] | None = None,
) -> str:
    scale = _scale([value for value in values.values() if value > 0 and math.isfinite(value)], log=log)

    def cell(ends: Ends) -> str:
        if ends not in values:
            return f'<td class="">{"·" if links and ends in links else ""}</td>'
        text = escape(show(values[ends]) if callable(show) else show[ends])
        kind, word = (" used", "<i>used</i>") if ends in used else ("", "")
        return f'<td class="heat{scale(values[ends])}{kind}">{text}{word}</td>'

    def named(name: str, scope: str) -> str:
        return f'<th scope="{scope}" title="{escape(name)}">{escape(short(name))}</th>'

    head = "".join(named(name, "col") for name in names)
    rows = (f"<tr>{named(one, 'row')}{''.join(cell((one, two)) for two in names)}</tr>" for one in names)
    return table_html(title, f'<tr><th scope="col">from \\ to</th>{head}</tr>', "".join(rows), "heat")


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
