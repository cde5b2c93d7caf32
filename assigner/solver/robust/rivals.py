"""Plans that a chosen plan is held against where the measurements are drawn anew: good ones, quickly, without proof."""

from __future__ import annotations

import math
from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

from assigner.schedule.cost import CostModel
from assigner.solver import tuning
from assigner.solver.clock import OutOfTime
from assigner.solver.problem import Problem
from assigner.solver.robust.race import value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.solver.options import SolveOptions

    Rival = Callable[[Profile], Plan | None]
    """From a drawn profile to a plan that may be better there than the chosen one; None: none was found."""


def baselines(profile: Profile, options: SolveOptions) -> Iterator[Plan]:
    """The baselines that fit, each at the number of micro-batches that is best for it at the medians.

    Args:
        profile: The medians, resolved (hints.py).
        options: As resolved with it.
    """
    from assigner.solver.baselines import find_baselines

    found = find_baselines(Problem(profile, options, CostModel(profile)))
    return (each.plan for each in found if each.plan is not None)


def resolver(plan: Plan, options: SolveOptions, *, seconds: float = tuning.RESOLVE_S) -> Rival:
    """Solve again for a draw, as far as the solver's first plans: what its dynamic programs and local search find.

    The chosen plan is the first one to beat, which leaves out what is proven not to beat it. Looked at are all
    schedules that the options allow, at the plan's number of micro-batches and the next smaller and larger one.

    Args:
        plan: The chosen plan.
        options: What it was solved with, resolved (hints.py).
        seconds: For a draw; after that the best plan so far is the answer.
    """
    from assigner.solver.contest import GIVEN, Proposal
    from assigner.solver.search import Search

    hasty = replace(options, gap=0.0, time_limit=min(seconds, options.time_limit))

    def rival(drawn: Profile) -> Plan | None:
        search = Search(drawn, hasty)
        value = value_of(plan, options, search.problem.cost)
        given = Proposal(plan, value, GIVEN) if math.isfinite(value) else None
        search.contest.best = given
        near = neighbours(plan.micro_batches, sorted({each.micro_batches for each in search.settings}))
        settings = [each for each in search.settings if each.micro_batches in near]
        for setting in settings:
            setting.price()
        with suppress(OutOfTime):
            for setting in sorted(settings, key=attrgetter("bound")):
                if not setting.decided:
                    search.contest.clock.check()
                    setting.start()
            for setting in sorted(settings, key=attrgetter("best_value")):
                if not setting.decided:
                    search.contest.clock.check()
                    setting.improve()
        search.price_wires(given)
        return None if search.contest.best is None else search.contest.best.plan

    return rival


def neighbours(number: int, offered: Sequence[int]) -> Sequence[int]:
    """Of growing numbers, the one asked for with the next smaller and larger one, as far as they are offered."""
    at = bisect_left(offered, number)
    return offered[max(0, at - 1) : at + 2]
