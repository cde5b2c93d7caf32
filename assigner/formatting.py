"""Numbers and names as people read them: the one place that rounds.

A column of numbers has one unit, which stands in its header: `time_unit` and `byte_unit` choose it from all values of
the column, and its `show` writes each value without it.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NOTHING = "-"
LONGEST = 2000
"""Characters of a message; what is longer is cut in its middle."""

_DIGITS = re.compile(r"(\d+)")
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a text of a file could steer a terminal with; line breaks and tabs are left."""


def printable(text: str, *, most: int | None = None) -> str:
    """A text as it may be printed, whoever wrote it: control characters and the like are written out.

    One with more characters than `most` loses its middle, and says how much.
    """
    if most is not None and len(text) > most:
        behind = most // 4
        cut = len(text) - most
        text = f"{text[: most - behind]} [... {cut:,} more characters ...] {text[-behind:]}"
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@dataclass(frozen=True)
class Unit:
    """A unit for a column: its name for the header, and how many base units (s, bytes) it holds."""

    name: str
    size: float

    def show(self, value: float | None, *, digits: int | None = None) -> str:
        """The value in this unit, without the unit's name; digits as in `number`, never an exponent."""
        return NOTHING if value is None else number(value / self.size, digits=digits)

    def text(self, value: float | None) -> str:
        """The value with the unit's name, for a sentence."""
        return NOTHING if value is None else f"{self.show(value)} {self.name}"


_TIME = (Unit("s", 1), Unit("ms", 1e-3), Unit("µs", 1e-6))
_BYTES = (Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10), Unit("B", 1))
_RATE = (Unit("GB/s", 1e9), Unit("MB/s", 1e6), Unit("kB/s", 1e3))


def _choose(units: Sequence[Unit], values: Iterable[float | None]) -> Unit:
    """The largest unit in which the largest value is at least 1."""
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    return next((unit for unit in units if largest >= unit.size), units[-1 if largest else 0])


def time_unit(*values: float | None) -> Unit:
    """Seconds, milliseconds or microseconds, whichever suits the largest of the values (in seconds)."""
    return _choose(_TIME, values)


def byte_unit(*values: float | None) -> Unit:
    """GiB to bytes, whichever suits the largest of the values (in bytes)."""
    return _choose(_BYTES, values)


def rate_unit(*values: float | None) -> Unit:
    """GB/s to kB/s, whichever suits the largest of the values (in bytes per second)."""
    return _choose(_RATE, values)


def number(value: float | None, *, digits: int | None = None) -> str:
    """All digits before the point and `digits` behind it; None: three significant ones. Never an exponent."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "inf" if value > 0 else "-inf" if value < 0 else "nan"
    if digits is not None:
        return f"{value:,.{digits}f}"
    size = abs(value)
    for limit, places in ((99.95, 0), (9.995, 1), (0.9995, 2)):
        if size >= limit:
            return f"{value:,.{places}f}"
    return "0" if size < 5e-4 else f"{value:.3f}"


def count(value: float) -> str:
    """A whole number with separators."""
    return f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """A duration with its unit: `1.85 s`, `12.3 ms`."""
    return time_unit(value).text(value)


def size(value: float | None) -> str:
    """Bytes with a unit: `15.1 GiB`."""
    return byte_unit(value).text(value)


def rate(value: float | None) -> str:
    """Samples per second, or of few per hour."""
    if value is not None and 0 < value < 0.01:
        return f"{number(3600 * value)} samples/h"
    return NOTHING if value is None else f"{number(value)} samples/s"


SHOWN = 5e-4
"""A share below this is shown as 0.0 %: figures that differ by less are called the same."""


def percent(share: float | None) -> str:
    """A share of one as `12.3 %`."""
    return NOTHING if share is None else f"{points(share)} %"


def spread(share: float) -> str:
    """How far figures vary around their median: `35 %`, and above it `2.5 times the median`: no share of anything."""
    return f"{100 * share:.0f} %" if share <= 1 else f"{share:.1f} times the median"


def spread_points(share: float) -> str:
    """The same in a column that says percent: `35.0`, and above the median `2.5x`."""
    return points(share) if share <= 1 else ratio(share, digits=1)


def points(share: float | None, *, sign: bool = False, digits: int | None = None) -> str:
    """A share of one in percent, without the sign for percent: for a column that says so; one decimal unless said."""
    if share is None:
        return NOTHING
    places = 1 if digits is None else digits
    rounded = round(100 * share, places) + 0.0  # -0.0 becomes 0.0
    return f"{rounded:+.{places}f}" if sign and rounded else f"{rounded:.{places}f}"


def ratio(value: float | None, *, digits: int | None = None) -> str:
    """How many times as much: `1.85x`; two decimals unless said."""
    return NOTHING if value is None else f"{value:.{2 if digits is None else digits}f}x"


def against(value: float | None, base: float | None) -> float | None:
    """`value / base` where both are known and the base is not zero."""
    return None if value is None or not base else value / base


def alike(value: float, before: float) -> bool:
    """Whether a figure is as before, as far as its change is shown."""
    return abs(value - before) <= SHOWN * abs(before)


def change(value: float | None, base: float | None) -> str:
    """The relative change in percent, with its sign: from nothing to something has none."""
    factor = against(value, base)
    return NOTHING if factor is None else points(factor - 1, sign=True)


def plural(amount: float, noun: str) -> str:
    """`1 stage`, `3 stages`, `2 micro-batches`."""
    if amount == 1:
        return f"1 {noun}"
    return f"{amount:,} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


def ranges(names: Sequence[str]) -> str:
    """Partitions in a row, compactly: `embed, blocks.0-6 (7)`.

    Names that differ in one number, which grows by one, become a range; the order stays.
    """
    return ", ".join(_range_text(run) for run in _runs(names))


def _runs(names: Sequence[str]) -> list[list[str]]:
    """The names that count on from each other, in the same place as the run itself counts."""
    runs: list[list[str]] = []
    last: list[str] = []
    counting: int | None = None
    for name in names:
        pieces = _DIGITS.split(name)
        place = _counted(last, pieces)
        if place is not None and (len(runs[-1]) == 1 or place == counting):
            runs[-1].append(name)
        else:
            runs.append([name])
        last, counting = pieces, place
    return runs


def _counted(old: Sequence[str], new: Sequence[str]) -> int | None:
    """The place of the one number that is larger by one in the second name; None: the names differ otherwise.

    Both are in pieces, text and numbers in turn; `old` is empty where there is none.
    """
    if len(old) != len(new):
        return None
    places = [n for n, (left, right) in enumerate(zip(old, new, strict=True)) if left != right]
    if len(places) != 1 or places[0] % 2 == 0:  # the even pieces are the text between the numbers
        return None
    return places[0] if int(new[places[0]]) == int(old[places[0]]) + 1 else None


def _range_text(run: Sequence[str]) -> str:
    if len(run) < 3:
        return ", ".join(run)
    before, after = _DIGITS.split(run[0]), _DIGITS.split(run[-1])
    counted = next(n for n, (first, last) in enumerate(zip(before, after, strict=True)) if first != last)
    return f"{''.join(before[: counted + 1])}-{''.join(after[counted:])} ({len(run)})"


def bar(share: float, *, width: int = 10, rest: str = "░") -> str:
    """A bar of `width` characters, `share` of it filled to the nearest half; a full one ends in `!` above 1."""
    if share > 1:
        return "█" * (width - 1) + "!"
    halves = round(2 * width * max(0.0, share))
    filled = "█" * (halves // 2) + "▌" * (halves % 2)
    return filled + rest * (width - len(filled))


def meant(word: str, names: Sequence[str], what: str, *, most: int = 6) -> str:
    """The hint of an unknown word: the known name that it is most like, or the first few that there are of `what`."""
    known = list(dict.fromkeys(names))
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"{what}: {', '.join(known[:most])}" + (", ..." if len(known) > most else "")


class Unquoted:
    """A text that stands without quotes in the `repr` of what holds it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def first_of(names: Sequence[str]) -> str:
    """The first of some names, quoted, and how many there are besides."""
    return f"{names[0]!r} and {len(names) - 1} more" if len(names) > 1 else repr(names[0])


def series(words: Sequence[object], last: str = "and") -> str:
    """Words in a row as a sentence has them: `a`, `a and b`, `a, b and c`."""
    *most, end = map(str, words)
    return f"{', '.join(most)} {last} {end}" if most else end
