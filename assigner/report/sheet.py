"""What a report is made of: sheets (tables) and lines, as plain data, and how they are drawn.

A report is a sequence of `Sheet` and `Line`. `draw` makes it something that rich prints, `markdown` a text; the
reports themselves know neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Group
    from rich.table import Table

GAP = 2
"""Spaces between two columns."""
LEAST_TEXT = 24
"""Columns of the terminal that a wrapping column gets before others are left out."""


@dataclass(frozen=True)
class Column:
    """One column of a sheet.

    Args:
        header: Its heading, with the unit where all its values have one.
        kind: `number`: to the right, never wrapped; `name`: to the left, never wrapped; `text`: may wrap.
        rank: 0: always shown; else the larger it is, the sooner the column is left out where the sheet is too wide.
    """

    header: str
    kind: Literal["number", "name", "text"] = "number"
    rank: int = 0


@dataclass(frozen=True)
class Sheet:
    """A table.

    Args:
        title: One line above it; empty: none.
        columns: As many as each row has cells.
        rows: Cells as text.
        marked: Positions of the rows that stand out; what marks them is also said in a cell.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()

    def fitted(self, width: int) -> Sheet:
        """The sheet on `width` terminal columns: less important columns are left out until the others fit."""
        keep = list(range(len(self.columns)))
        needed = {n: self._needed(n) for n in keep}
        while sum(needed[n] for n in keep) + GAP * (len(keep) - 1) > width:
            least = max(keep, key=lambda n: self.columns[n].rank)
            if self.columns[least].rank == 0:
                break
            keep.remove(least)
        rows = tuple(tuple(row[n] for n in keep) for row in self.rows)
        return Sheet(self.title, tuple(self.columns[n] for n in keep), rows, self.marked)

    def _needed(self, column: int) -> int:
        """Terminal columns that one column wants at least."""
        widest = max(len(text) for text in (self.columns[column].header, *(row[column] for row in self.rows)))
        return min(widest, LEAST_TEXT) if self.columns[column].kind == "text" else widest


@dataclass(frozen=True)
class Line:
    """A sentence between sheets; `tone` is a colour where there are colours, and never the only sign."""

    text: str
    tone: Literal["plain", "strong", "warning"] = "plain"


_STYLES = {"plain": "", "strong": "bold", "warning": "yellow"}

Report = tuple[Sheet | Line, ...]


def draw(report: Iterable[Sheet | Line], *, width: int) -> Group:
    """A report for a console that is `width` columns wide: lines together, a blank line around each table."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Text | Table] = []
    previous: Sheet | Line | None = None
    for part in report:
        if previous is not None and (isinstance(part, Sheet) or isinstance(previous, Sheet)):
            parts.append(Text(""))
        if isinstance(part, Line):
            parts.append(Text(part.text, style=_STYLES[part.tone]))
        else:
            if part.title:
                parts.append(Text(part.title, style="bold"))
            parts.append(_table(part.fitted(width)))
        previous = part
    return Group(*parts)


def _table(sheet: Sheet) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold",
        border_style="dim",
    )  # fmt: skip
    for n, column in enumerate(sheet.columns):
        words = [len(word) for row in sheet.rows for word in row[n].split()]
        table.add_column(
            Text(column.header),
            justify="right" if column.kind == "number" else "left",
            no_wrap=column.kind != "text",
            overflow="fold",
            min_width=min(max(words, default=1), LEAST_TEXT) if column.kind == "text" else None,
        )
    for n, row in enumerate(sheet.rows):
        table.add_row(*map(Text, row), style="bold green" if n in sheet.marked else None)
    return table


def markdown(report: Iterable[Sheet | Line]) -> str:
    """A report as Markdown, every column in it."""
    blocks: list[str] = []
    for part in report:
        if isinstance(part, Line):
            blocks.append(_escape(part.text))
        else:
            blocks += [f"**{_escape(part.title)}**"] if part.title else []
            blocks.append(_markdown_table(part))
    return "\n\n".join(blocks) + "\n"


def _markdown_table(sheet: Sheet) -> str:
    rules = ("---:" if column.kind == "number" else "---" for column in sheet.columns)
    rows: list[Sequence[str]] = [[column.header for column in sheet.columns], *sheet.rows]
    lines = ["| " + " | ".join(map(_escape, row)) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join(rules) + " |", *lines[1:]])


def _escape(text: str) -> str:
    for sign in "\\|*_<":
        text = text.replace(sign, f"\\{sign}")
    return text
