"""Families of constraints that can be relaxed: how little of one has to go, in figures of a flag; and of several."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from assigner import formatting as fmt
from assigner.solver.limits import tuning
from assigner.solver.why.case import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from assigner.formats.plan import Plan
    from assigner.solver.why.case import Case, Change, Enquiry, Remedy

    Item = TypeVar("Item")


class Family(ABC):
    """One kind of constraints.

    Attributes:
        title: What it is called where it was not tried.
    """

    title: str

    @abstractmethod
    def opened(self, case: Case) -> Case | None:
        """The case with these constraints out of the way altogether; None: it has none."""

    @abstractmethod
    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterable[Remedy]:
        """The least changes with which the case has a plan, the best first; nothing: it has none even when opened."""


def opened(case: Case, families: Iterable[Family]) -> Case:
    """The case with several families' constraints out of the way; the case itself where it has none of them."""
    for family in families:
        case = family.opened(case) or case
    return case


def least(low: int, high: int, enough: Callable[[int], Plan | None]) -> tuple[int, Plan | None]:
    """The least whole number above `low` that is enough, as `high` is, and its plan: by bisection.

    None for a plan: it is `high`.
    """
    best: Plan | None = None
    while high - low > 1:
        middle = (low + high) // 2
        plan = enough(middle)
        if plan is None:
            low = middle
        else:
            high, best = middle, plan
    return high, best


def least_change(
    case: Case, enquiry: Enquiry, change: Callable[[int], Change], *, low: int = 0, high: int, plan: Plan | None = None
) -> tuple[Remedy, ...]:
    """The change by the least number above `low` that has a plan, as `high` has: one that may be given."""
    number, found = least(low, high, lambda middle: enquiry.plan(change(middle).apply(case)))
    return enquiry.way_out(case, change(number), found or plan)


def least_set(items: Sequence[Item], enough: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """A set of items, all of which are enough, that can spare none: halves are tried first, down to single items."""
    kept = list(items)
    size = len(kept) // 2
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fewer and enough(fewer):
                kept = fewer
            else:
                start += size
        size //= 2
    return kept


def combined(case: Case, families: Sequence[Family], enquiry: Enquiry) -> list[Remedy]:
    """Ways out by pairs of families, cheapest first; by a least set of them where no pair is enough."""
    there = [family for family in families if family.opened(case) is not None]
    found: list[Remedy] = []
    for pair in sorted(itertools.combinations(range(len(there)), 2), key=lambda pair: (pair[1], pair[0])):
        if len(found) < tuning.COMBINED:
            found += _refined(case, [there[n] for n in pair], enquiry)
    if found or enquiry.plan(opened(case, there)) is None:
        return found
    dearest_first = there[::-1]
    needed = least_set(dearest_first, lambda few: enquiry.plan(opened(case, few)) is not None)
    return _refined(case, [family for family in there if family in needed], enquiry)


def _refined(case: Case, families: Sequence[Family], enquiry: Enquiry) -> list[Remedy]:
    """The least change of each family in turn, those after it opened; empty: together they are not enough."""
    if enquiry.plan(opened(case, families)) is None:
        return []
    changes: list[Change] = []
    for n, family in enumerate(families):
        changed = together(changes).apply(case)
        rest = opened(changed, families[n + 1 :])
        if enquiry.plan(rest) is not None:  # what came before was enough already
            continue
        ways = list(family.ways_out(rest, enquiry))
        if not ways:
            return []
        changes.append(ways[0].change)
    return [*enquiry.way_out(case, together(changes))]


def _unit(size: float) -> fmt.Unit:
    return fmt.byte_unit(size or 1.0)  # nothing is told in bytes


def grain(size: float) -> float:
    """The bytes of one in the third digit of `size`, in its unit."""
    unit = _unit(size).size
    return unit * 10.0 ** (math.floor(math.log10(max(size / unit, 1.0)) + 1e-12) - 2)


def figure(size: float) -> str:
    """Bytes as a flag takes them, `1.25GiB`; what needs more than six digits in its unit is in bytes."""
    unit = _unit(size)
    text = f"{size / unit.size:.6g}"
    return f"{text}{unit.name}" if abs(float(text) * unit.size - size) < 0.5 else f"{size:.0f}B"


def floored(size: float) -> float:
    """The largest figure of three digits up to `size`, as it is read again from its text."""
    return _read(math.floor(size / grain(size) * (1 + 1e-12)) * grain(size))


def ceiled(size: float) -> float:
    """The smallest figure of three digits from `size` on, as it is read again from its text."""
    return _read(math.ceil(size / grain(size) * (1 - 1e-12)) * grain(size))


def _read(size: float) -> float:
    unit = _unit(size).size
    return float(f"{size / unit:.6g}") * unit


def least_figure(low: float, high: float, enough: Callable[[float], Plan | None]) -> tuple[float, Plan | None]:
    """The least figure of three digits above `low` bytes that is enough, as `high` are, and its plan.

    None for a plan: only `high`, rounded up, was found to be enough.
    """
    plan: Plan | None = None
    step = grain(high)

    def many(number: int) -> Plan | None:
        return enough(_read(number * step))

    while True:
        number, found = least(math.floor(low / step), math.ceil(high / step), many)
        low, high, plan = (number - 1) * step, _read(number * step), found or plan
        if grain(high) >= step:
            return high, plan
        step = grain(high)
