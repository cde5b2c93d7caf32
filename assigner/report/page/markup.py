"""Sheets, lines and placements as HTML. Every text goes through `escape`, so no name can become markup."""

from __future__ import annotations

import json
import re
from html import escape
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.location import rank_of
from assigner.report.sheet import Line, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.report.page.sections import Card
    from assigner.report.page.shown import Shown
    from assigner.report.sheet import Column, Part

SHADES = 8
"""Colours of workers, by rank; further ranks begin again."""
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
        f"<div><dt>{escape(card.label)}</dt><dd><b>{_unbroken(card.value)}</b><span>{escape(card.note)}</span></dd></div>"
        for card in cards
    )
    return f'<dl class="cards">{found}</dl>'


def _unbroken(text: str) -> str:
    """A text whose figures stay on one line with their sign."""
    return escape(text).replace(" %", "&nbsp;%")


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
