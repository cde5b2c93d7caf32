"""A family of constraints that can be relaxed, and two ways to find how little of it has to go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from assigner.formats.plan import Plan
    from assigner.solver.why.case import Case, Remedy
    from assigner.solver.why.enquiry import Enquiry

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
    """The least whole number that is enough, by bisection.

    Args:
        low: Not enough.
        high: Enough.
        enough: A plan with the number; None: there is none.

    Returns:
        The number with its plan; None where `high` itself is the least.
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


def least_set(items: Sequence[Item], enough: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """A set of items none of which can be left out.

    Halves are tried first, then quarters, down to single items.

    Args:
        items: All together they are enough.
        enough: Are these?
    """
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
