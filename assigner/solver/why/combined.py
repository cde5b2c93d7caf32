"""Ways out by two or more kinds of constraints at once, where no single one is enough."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from assigner.solver import tuning
from assigner.solver.why.case import together
from assigner.solver.why.family import least_set, opened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.why.case import Case, Change, Remedy
    from assigner.solver.why.enquiry import Enquiry
    from assigner.solver.why.family import Family


def combined(case: Case, families: Sequence[Family], enquiry: Enquiry) -> list[Remedy]:
    """Ways out by pairs of families, cheapest first; by a least set of them where no pair is enough.

    Args:
        case: What has no plan, nor has it with any single family.
        families: The cheapest first.
        enquiry: What is asked.
    """
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
    way = enquiry.way_out(case, together(changes))
    return [] if way is None else [way]
