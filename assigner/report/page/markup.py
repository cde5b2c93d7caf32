"""Sheets, lines, placements and links as HTML. Every text goes through `escape`, so no name can become markup."""

from __future__ import annotations

import json
import math
import re
from html import escape
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.location import rank_of
from assigner.report.links import message_bytes
from assigner.report.links import rate as link_rate
from assigner.report.sheet import Line, Sheet
from assigner.schedule.timing import route_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from assigner.formats.profile import Link
    from assigner.report.page.sections import Card
    from assigner.report.page.shown import Shown
    from assigner.report.sheet import Column, Part

SHADES = 8
"""Colours of workers, by rank; further ranks begin again."""
STEPS = 8
"""Shades of a heat map."""
MOST_WORKERS = 24
"""Workers up to which all of the profile's are shown; above it only the plan's."""
Ends = tuple[str, str]
_MARKED = '<tr class="marked">'
_BAR = re.compile(r"^(.*?)[█▌░!]+ *([\d.]+) %$")


def parts_html(parts: Iterable[Part]) -> str:
    """A report as HTML: sentences as paragraphs, tables with their title as caption."""
    return "\n".join(_part(part) for part in parts)


def _part(part: Part) -> str:
    if isinstance(part, Line):
        return f'<p class="{part.tone}">{escape(part.text)}</p>'
    if isinstance(part, Sheet):
        return sheet_html(part)
    word, cells = part.header
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in (word, *cells))
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(text)}</td>" for text in row)}</tr>'
        for name, row in part.rows
    )
    return table_html(part.title, f"<tr>{head}</tr>", body, "strip")


def sheet_html(sheet: Sheet) -> str:
    """A table; in a box of its own that scrolls where the page is narrow."""
    titled = any(column.header for column in sheet.columns)
    head = "".join(f'<th scope="col" class="{column.kind}">{escape(column.header)}</th>' for column in sheet.columns)
    body = "".join(
        f"{_MARKED if n in sheet.marked else '<tr>'}{_cells(sheet.columns, row)}</tr>"
        for n, row in enumerate(sheet.rows)
    )
    return table_html(sheet.title, f"<tr>{head}</tr>" if titled else "", body)


def table_html(title: str, head: str, body: str, kind: str = "") -> str:
    """A table whose title is outside the box that scrolls: it wraps where the table is wider than the page."""
    caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    head = f"<thead>{head}</thead>" if head else ""
    attributes = f'class="scroll" role="region" aria-label="{escape(title or "table")}" tabindex="0"'
    table = f'<div {attributes}><table class="{kind}">{head}<tbody>{body}</tbody></table></div>'
    return f'<figure class="table {kind}">{caption}{table}</figure>'


def _cells(columns: Sequence[Column], row: Sequence[str]) -> str:
    named = next((n for n, column in enumerate(columns) if column.kind != "number"), -1)
    cells = []
    for n, (column, text) in enumerate(zip(columns, row, strict=True)):
        tag, scope = ("th", ' scope="row"') if n == named else ("td", "")
        cells.append(f'<{tag}{scope} class="{column.kind}">{_cell(text)}</{tag}>')
    return "".join(cells)


def barred(share: float) -> str:
    """A share as a cell of a sheet, which the page draws as a bar."""
    return f"{fmt.bar(share, width=8)} {fmt.percent(share)}"


def _cell(text: str) -> str:
    """A bar of block characters becomes one that is drawn; its figure stays."""
    found = _BAR.match(text)
    if not found:
        return escape(text)
    before, share = found.groups()
    over, width = (" over" if float(share) > 100 else ""), min(100.0, float(share))
    drawn = f'<rect class="whole" width="100" height="10"/><rect class="part" width="{width:g}" height="10"/>'
    box = f'class="bar{over}" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"'
    return f'{escape(before)}<span class="barred"><svg {box}>{drawn}</svg> {share}&nbsp;%</span>'


def cards_html(cards: Iterable[Card]) -> str:
    """Figures that stand out, as a list of terms."""
    found = "".join(
        f"<div><dt>{escape(card.label)}</dt><dd><b>{escape(card.value).replace(' %', '&nbsp;%')}</b>"
        f"<span>{escape(card.note)}</span></dd></div>"
        for card in cards
    )
    return f'<dl class="cards">{found}</dl>'


def short(name: str) -> str:
    """A worker's rank and device: `0/cpu`."""
    return name.removeprefix("worker:")


def json_html(data: Any) -> str:
    """Data for a script element that is not run: no sign in it can end the element, begin a comment or a line."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped, too
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def placement_html(pages: Sequence[Shown]) -> str:
    """Where the partitions are: a strip for each plan, one above the other, so that a partition stands at one place.

    Partitions go from left to right, one colour for each worker. A stage of several workers names all of them, and has
    the colour of the first.
    """
    rows = "".join(_strip(page, named=len(pages) > 1) for page in pages)
    return f'<div class="placement">{rows}</div>'


def _strip(page: Shown, *, named: bool) -> str:
    name = f"<p>{escape(page.name)}</p>" if named else ""
    stages = []
    for stage in page.plan.stages:
        again = len(stage.rematerialise)
        text = f"{' + '.join(stage.workers)}: {fmt.ranges(stage.partitions)}"
        text += f"; {again} rematerialised" if again else ""
        shade = rank_of(stage.workers[0]) % SHADES
        held = " + ".join(short(worker) for worker in stage.workers)
        kind = f"grow{len(stage.partitions)} shade{shade}{' again' if again else ''}"
        stages.append(
            f'<li class="{kind}" title="{escape(text)}"><b>{escape(held)}</b> '
            f"<span>{escape(fmt.ranges(stage.partitions))}{', remat' if again else ''}</span></li>"
        )
    return f"{name}<ol>{''.join(stages)}</ol>"


def placement_css(pages: Sequence[Shown]) -> str:
    """How wide stages are: by their partitions. Rules, since the page allows no styles in its elements."""
    sizes = sorted({len(stage.partitions) for page in pages for stage in page.plan.stages})
    return "".join(f".grow{size}{{flex:{size} 1 0}}\n" for size in sizes)


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
    if sizes:
        return max(sizes), "in messages as large as the plan's largest,"
    return message_bytes(page.profile), "in messages of"


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
