"""Simpler ways to place the same profile, priced by the same simulator: what a plan has to beat.

    splits.py       best single worker, equal split, split in proportion to speed, balance by time (torchgpipe),
                    PipeDream's planner
    data_parallel.py  the whole model on every worker, in equal shares or by speed
    greedy.py       list scheduling by earliest finish
    weighted.py     softmax descent on a weighted sum of memory, compute and bandwidth (machin)
    prices.py       what all of them are priced by

Each takes the micro-batch count that suits it best by its step time under GPipe (of one stage under 1F1B, which keeps
one micro-batch at a time, as a loop does that accumulates gradients), rematerialises nothing, or everything where it
does not fit otherwise, and keeps the hints. One that does not fit in any way has no step time. Greedy and weighted may
give a worker several stages, data parallelism a stage several workers: they can be faster than every contiguous plan
with one worker a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan
from assigner.formats.solverreport import Baseline
from assigner.solver.baselines.prices import BaselinePrices
from assigner.solver.baselines.splits import balanced, equal, least_bottleneck, proportional, single
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from assigner.solver.problem.problem import Problem

TITLES: Mapping[str, str] = {
    "single": "best single worker",
    "equal": "equal split",
    "proportional": "split in proportion to speed",
    "balance": "balance by time",
    "pipedream": "PipeDream's planner",
    "greedy": "greedy, earliest finish",
    "weighted": "weighted heuristic",
    "data-parallel": "data parallel",
    "data-parallel-by-speed": "data parallel by speed",
}
"""Names of the baselines, short and in full."""


def makers() -> Mapping[str, Callable[[BaselinePrices], Iterable[Plan]]]:
    """By name what makes the plans to choose from; some need numpy, which whoever asks for names does not load."""
    from assigner.solver.baselines.data_parallel import equal_shares, shares_by_speed
    from assigner.solver.baselines.greedy import earliest_finish
    from assigner.solver.baselines.weighted import descent

    makers = (
        single, equal, proportional, balanced, least_bottleneck, earliest_finish, descent, equal_shares,
        shares_by_speed,
    )  # fmt: skip
    return dict(zip(TITLES, makers, strict=True))


@dataclass(frozen=True)
class FoundBaseline:
    """A baseline as it was found.

    Args:
        title: Its name in full.
        plan: Its plan at its best micro-batch count, without a prediction; None: it fits at none.
        step_s: The plan's step time; inf without one.
    """

    title: str
    plan: Plan | None
    step_s: float

    @property
    def row(self) -> Baseline:
        """As a plan's file has it."""
        return Baseline(self.title, None if self.plan is None else self.step_s)


def find_baselines(problem: Problem) -> tuple[FoundBaseline, ...]:
    """All baselines in a fixed order, each at its own best micro-batch count.

    Once their share of the time of the problem's search is over, no more than until one fits.
    """
    clock = SolveClock(problem.clock.left_s * tuning.BASELINES_SHARE, within=problem.clock)
    pricing, found = BaselinePrices(problem, clock), list[FoundBaseline]()
    for name, candidates in makers().items():
        if clock.over and any(each.plan is not None for each in found):
            break
        found.append(FoundBaseline(TITLES[name], *pricing.best(candidates(pricing))))
    return tuple(found)
