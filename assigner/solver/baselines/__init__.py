"""Simpler ways to place the same profile, priced by the same simulator: what a plan has to beat.

    splits.py       best single worker, equal split, split in proportion to speed, balance by time (torchgpipe),
                    PipeDream's planner
    data_parallel.py  the whole model on every worker, in equal shares or by speed
    greedy.py       list scheduling by earliest finish
    weighted.py     softmax descent on a weighted sum of memory, compute and bandwidth (machin)
    blocks.py       a line of times cut so that the largest block is least
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

from assigner.formats.plan import Baseline, Plan
from assigner.schedule.simulate import priced
from assigner.solver.baselines.data_parallel import equal_shares, shares_by_speed
from assigner.solver.baselines.greedy import earliest_finish
from assigner.solver.baselines.prices import BaselinePrices
from assigner.solver.baselines.splits import balanced, equal, least_bottleneck, proportional, single
from assigner.solver.baselines.weighted import descent
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from assigner.solver.problem.problem import Problem

_BASELINES: Mapping[str, tuple[str, Callable[[BaselinePrices], Iterable[Plan]]]] = {
    "single": ("best single worker", single),
    "equal": ("equal split", equal),
    "proportional": ("split in proportion to speed", proportional),
    "balance": ("balance by time", balanced),
    "pipedream": ("PipeDream's planner", least_bottleneck),
    "greedy": ("greedy, earliest finish", earliest_finish),
    "weighted": ("weighted heuristic", descent),
    "data-parallel": ("data parallel", equal_shares),
    "data-parallel-by-speed": ("data parallel by speed", shares_by_speed),
}
"""By name: the name in full, and the plans to choose from."""

TITLES: Mapping[str, str] = {name: title for name, (title, _) in _BASELINES.items()}
"""Names of the baselines, short and in full."""


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
    for title, candidates in _BASELINES.values():
        if clock.over and any(each.plan is not None for each in found):
            break
        found.append(FoundBaseline(title, *pricing.best(candidates(pricing))))
    return tuple(found)


def baseline_plan(problem: Problem, name: str, *, most_replicas: int | None = None) -> Plan | None:
    """One baseline as a plan, priced, at its best micro-batch count; None: it fits at none.

    Args:
        problem: What is to be placed; its options hold for the baseline too.
        name: A key of `TITLES`.
        most_replicas: No stage has more workers; None: any number.
    """
    pricing = BaselinePrices(problem, most_replicas=most_replicas)
    _, candidates = _BASELINES[name]
    plan, _ = pricing.best(candidates(pricing))
    return plan and priced(plan, problem.profile, problem.cost)
