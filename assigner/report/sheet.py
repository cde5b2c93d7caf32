"""What a report is made of: sheets (tables), strips (rows of small cells) and lines, as plain data; how they are drawn.

A report is a sequence of them. `draw` makes it something that rich prints, `markdown` a text; the reports themselves
know neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from assigner.formatting import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from assigner.formats.profile import Profile

T = TypeVar("T")

GAP = 2
"""Spaces between two columns."""
LEAST_TEXT = 24
"""Columns of the terminal that a wrapping column gets before others are left out."""
_NARROWEST = 6
"""Columns of the terminal below which a wrapping column is not folded: the table is wider than the terminal instead."""
_HOST_RANK = 2
"""It leaves a table that is too wide before the figures that a plan is judged by."""


@dataclass(frozen=True)
class Column:
    """One column of a sheet."""

    header: str  # its heading, with the unit where all its values have one
    # `number`: to the right, never wrapped; `name`: to the left, never wrapped; `text`: may wrap
    kind: Literal["number", "name", "text"] = "number"
    # 0: always shown; else the larger it is, the sooner the column is left out where the sheet is too wide
    rank: int = 0
    least: int = LEAST_TEXT  # of a text: how wide it is before other columns are left out for it


Cell = tuple[Column, str]
"""A cell of a sheet as text, behind its column."""


@dataclass(frozen=True)
class Sheet:
    """A table."""

    title: str
    columns: tuple[Column, ...]  # as many as each row has cells
    rows: tuple[tuple[str, ...], ...]  # cells as text
    marked: frozenset[int] = frozenset()  # positions of the rows that stand out; what marks them is also said in a cell
    # what is drawn where the sheet does not fit with the columns that it cannot do without
    instead: Sheet | None = None
    left_out: tuple[str, ...] = ()  # headers of columns for which there was no room

    @classmethod
    def of(cls, title: str, rows: Sequence[Sequence[Cell]], marked: frozenset[int] = frozenset()) -> Sheet:
        """A table of one row or more, in which each cell stands behind its column; every row has the same columns."""
        columns = tuple(column for column, _ in rows[0])
        return cls(title, columns, tuple(tuple(text for _, text in row) for row in rows), marked)

    def fitted(self, width: int) -> Sheet:
        """The sheet on `width` terminal columns: less important columns are left out until the others fit."""
        keep = list(range(len(self.columns)))
        needed = {n: self._needed(n) for n in keep}
        while sum(needed[n] for n in keep) + GAP * (len(keep) - 1) > width:
            least = max(keep, key=lambda n: self.columns[n].rank)
            if self.columns[least].rank == 0 and self.instead:
                return self.instead.fitted(width)
            if self.columns[least].rank == 0:
                break
            keep.remove(least)
        rows = tuple(tuple(row[n] for n in keep) for row in self.rows)
        left_out = tuple(column.header for n, column in enumerate(self.columns) if n not in keep)
        return replace(self, columns=tuple(self.columns[n] for n in keep), rows=rows, left_out=left_out)

    def widths(self, width: int) -> list[int]:
        """Terminal columns of each column where there are `width` for all of them.

        Texts are folded as far as they have to be: cut to one level, all of them have room. No word of theirs is folded
        where all can do without; else none gets less than the longest word of its header, nor than `_NARROWEST`, and
        where there is no room for that all take more than `width`.
        """
        found = list(map(self._widest, range(len(self.columns))))
        whole = {n: found[n] for n, column in enumerate(self.columns) if column.kind == "text"}
        headers = {n: max(_NARROWEST, _longest_word([self.columns[n].header])) for n in whole}
        words = {n: max(headers[n], _longest_word(row[n] for row in self.rows)) for n in whole}
        room = width - GAP * (len(found) - 1) - sum(wide for n, wide in enumerate(found) if n not in whole)
        least = words if sum(min(whole[n], words[n]) for n in whole) <= room else headers
        level = max(whole.values(), default=0)
        while level > _NARROWEST and sum(min(whole[n], max(least[n], level)) for n in whole) > room:
            level -= 1
        found = [min(whole[n], max(least[n], level)) if n in whole else wide for n, wide in enumerate(found)]
        spare = room - sum(found[n] for n in whole)
        for n, most in whole.items():
            if spare > 0 and found[n] < most:
                found[n], spare = found[n] + 1, spare - 1
        return found

    def _needed(self, column: int) -> int:
        """Terminal columns that one column wants at least."""
        widest = self._widest(column)
        return min(widest, self.columns[column].least) if self.columns[column].kind == "text" else widest

    def _widest(self, column: int) -> int:
        """Terminal columns that one column takes on one line."""
        from rich.cells import cell_len

        texts = (self.columns[column].header, *(row[column] for row in self.rows))
        return max(cell_len(printable(text)) for text in texts)


def _longest_word(texts: Iterable[str]) -> int:
    """Terminal columns of the longest word of all."""
    from rich.cells import cell_len

    return max((cell_len(word) for text in texts for word in printable(text).split()), default=0)


@dataclass(frozen=True)
class Line:
    """A sentence between sheets; `tone` is a colour where there are colours, and never the only sign."""

    text: str
    tone: Literal["plain", "strong", "warning"] = "plain"


@dataclass(frozen=True)
class Strip:
    """Rows of small cells that are alike in width, column by column; those in the middle give way where it is narrow.

    The header is what a column is, which stands above the names, then a cell for each column; each of the `signs`,
    first letters of cells, has a colour of its own where there are colours.
    """

    title: str
    header: tuple[str, tuple[str, ...]]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    signs: str = ""

    def lines(self, width: int) -> list[str]:
        """The strip as text on `width` columns of the terminal."""
        table = (self.header, *self.rows)
        label, size = max(len(name) for name, _ in table), max(len(cell) for _, cells in table for cell in cells)
        count, room = len(self.header[1]), max(2, (width - label - GAP + 1) // (size + 1))
        left_out = 0 if count <= room else count - room + 1  # the sign for what is missing takes a cell
        ahead = (count - left_out + 1) // 2 if left_out else count
        drawn = []
        for name, cells in table:
            shown = [*cells[:ahead], *(["…"] if left_out else []), *cells[ahead + left_out :]]
            drawn.append(f"{name:{label}}{' ' * GAP}{' '.join(cell.ljust(size) for cell in shown)}".rstrip())
        if left_out:
            drawn.append(f"… {left_out} of {count} {self.header[0]}s do not fit and are left out")
        return drawn


def foremost(items: Sequence[T], most: int | None, key: Callable[[T], Any]) -> list[T]:
    """Of more than `most` items so many, those with the least keys, in their order; None: all of them."""
    kept = sorted(range(len(items)), key=lambda n: key(items[n]))[:most]
    return [items[n] for n in sorted(kept)]


_STYLES = {"plain": "", "strong": "bold", "warning": "yellow"}

_SIGN_STYLES = ("cyan", "magenta")

Part = Sheet | Strip | Line
Report = tuple[Part, ...]


def draw(report: Iterable[Part], *, width: int) -> Group:
    """A report for a console that is `width` columns wide: lines together, a blank line around each table.

    A table whose figures do not fit is wider: it is to be printed with `crop=False`.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[Text | Table] = []
    previous: Part | None = None
    for part in report:
        if previous is not None and not (isinstance(part, Line) and isinstance(previous, Line)):
            parts.append(Text(""))
        if isinstance(part, Line):
            parts.append(Text(printable(part.text), style=_STYLES[part.tone]))
        elif isinstance(part, Strip):
            parts += [Text(printable(part.title), style="bold"), *_strip(part, width)]
        else:
            fitted = part.fitted(width)
            parts += [Text(printable(fitted.title), style="bold")] if fitted.title else []
            parts.append(_table(fitted, width))
            if fitted.left_out:
                names = ", ".join(dict.fromkeys(fitted.left_out))
                text = f"no room at {width} columns for: {names}; a wider screen or a pipe shows them"
                parts.append(Text(text, style="dim"))
        previous = part
    return Group(*parts)


def _strip(strip: Strip, width: int) -> Iterator[Text]:
    from rich.text import Text

    for line in strip.lines(width):
        text = Text(printable(line))
        for sign, style in zip(strip.signs, _SIGN_STYLES, strict=False):
            text.highlight_regex(rf"\b{sign}\d+", style)
        yield text


def _table(sheet: Sheet, width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    widths = sheet.widths(width)
    whole = sum(widths) + GAP * (len(widths) - 1)
    table = Table(  # of what has no room rich leaves columns out
        width=whole if whole > width else None, box=box.SIMPLE_HEAD,
        show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold",
        border_style="dim",
    )  # fmt: skip
    for column, wide in zip(sheet.columns, widths, strict=True):
        table.add_column(
            Text(column.header),
            justify="right" if column.kind == "number" else "left",
            no_wrap=column.kind != "text",
            overflow="fold",
            width=wide,
        )
    for n, row in enumerate(sheet.rows):
        table.add_row(*(Text(printable(cell)) for cell in row), style="bold green" if n in sheet.marked else None)
    return table


def markdown(report: Iterable[Part]) -> str:
    """A report as Markdown, every column in it; none that has strips is asked for."""
    blocks: list[str] = []
    for part in report:
        if isinstance(part, Line):
            blocks.append(_escape(part.text))
        else:
            assert isinstance(part, Sheet)
            blocks += [f"**{_escape(part.title)}**"] if part.title else []
            blocks.append(_markdown_table(part))
    return "\n\n".join(blocks) + "\n"


def _markdown_table(sheet: Sheet) -> str:
    rules = ("---:" if column.kind == "number" else "---" for column in sheet.columns)
    rows: list[Sequence[str]] = [[column.header for column in sheet.columns], *sheet.rows]
    lines = ["| " + " | ".join(map(_escape, row)) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join(rules) + " |", *lines[1:]])


def _escape(text: str) -> str:
    text = printable(text)
    for sign in "\\|*_<`[":
        text = text.replace(sign, f"\\{sign}")
    return text


def host_names(profile: Profile | None) -> dict[str, str]:
    """The host of each worker; nothing where all are on one, or nobody knows."""
    found = {} if profile is None else {worker.name: worker.host for worker in profile.workers}
    return found if len(set(found.values())) > 1 else {}


def host_width(profile: Profile | None) -> int:
    """Columns of the terminal that the names take beside others."""
    return max((max(len("host"), len(host)) + GAP for host in host_names(profile).values()), default=0)


def with_hosts(report: Iterable[Part], profile: Profile | None) -> Report:
    """A report in which tables with a column `worker` name the hosts behind it, if the profile knows several."""
    hosts = host_names(profile)
    return tuple(_named(part, hosts) if hosts and isinstance(part, Sheet) else part for part in report)


def _named(sheet: Sheet, hosts: Mapping[str, str]) -> Sheet:
    place = next((n + 1 for n, column in enumerate(sheet.columns) if column.header == "worker"), 0)
    if not place or not any(row[place - 1] in hosts for row in sheet.rows):
        return sheet
    columns = (*sheet.columns[:place], Column("host", "name", rank=_HOST_RANK), *sheet.columns[place:])
    rows = tuple((*row[:place], hosts.get(row[place - 1], ""), *row[place:]) for row in sheet.rows)
    return replace(sheet, columns=columns, rows=rows)
