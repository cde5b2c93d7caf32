"""Objective `cost`: the cheapest plan that meets a step time, and the frontier of money against step time.

Money per sample is the hourly rate of the workers used times the step time. For one choice of workers the rate is
fixed, so the cheapest plan is the fastest: choices (how many of each group of like workers) are taken in the order of
what they cost at least, and each is an ordinary search for the step time, cut off where it cannot matter.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assigner.cost import CostModel
from assigner.objective import HOUR_S
from assigner.plan import Plan
from assigner.solver.answer import Progress
from assigner.solver.contest import PROVEN
from assigner.solver.instance import Instance
from assigner.solver.ladder import Ladder
from assigner.solver.problem import Problem
from assigner.solver.rungs import Rungs
from assigner.solver.search import Search
from assigner.solver.tally import StepTally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.profile import Profile
    from assigner.solver.options import SolveOptions

MOST_CHOICES = 4_096
"""So many choices of workers are looked at; of more, those with the fewest workers."""


@dataclass(frozen=True)
class Offer:
    """A plan on the frontier: none is both cheaper and faster.

    Args:
        plan: The plan, without a prediction.
        step_s: Its step time.
        money: Its cost per sample.
    """

    plan: Plan
    step_s: float
    money: float


@dataclass(slots=True)
class _Choice:
    """Some of the workers.

    Args:
        workers: Their names.
        rate: Money per sample and second of step time.
        bound: No step is faster, in seconds.
        best: The best plan found.
    """

    workers: tuple[str, ...]
    rate: float
    bound: float
    best: Offer | None = None

    @property
    def least(self) -> float:
        """No plan with all of these workers costs less per sample."""
        return self.rate * self.bound


class Budget:
    """The search over choices of workers.

    Args:
        profile: Resolved; every worker has a price.
        options: Resolved.
        progress: Called now and then.
    """

    def __init__(
        self,
        profile: Profile,
        options: SolveOptions,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.problem = Problem(profile, options, CostModel(profile))
        self._inner = replace(options, objective="step", max_step_s=None)
        self._progress = progress
        self.search = Search(profile, self._inner)  # its clock, and all workers at once
        self._within = options.max_step_s or math.inf
        self._choices = list(self._all_choices())

    def run(self) -> tuple[Offer, ...]:
        """The frontier, the cheapest plan first, as far as the time allowed; empty: no plan was found."""
        contest = self.search.contest
        found: list[Offer] = []
        try:
            for choice in sorted(self._choices, key=lambda each: (each.least, each.bound, each.workers)):
                if contest.left_s <= 0:
                    break
                cutoff = min(
                    (offer.step_s for offer in found if offer.money <= choice.least * (1 + PROVEN)), default=math.inf
                )
                if choice.bound < cutoff * (1 - PROVEN):
                    self._solve(choice, cutoff)
                    if choice.best is not None:
                        found.append(choice.best)
                self._tell(found)
        except KeyboardInterrupt:
            if not found:
                raise
        return _frontier(found)

    def cheapest(self, frontier: Sequence[Offer]) -> Offer | None:
        """The cheapest plan that meets the step time asked for."""
        return next((offer for offer in frontier if offer.step_s <= self._within * (1 + PROVEN)), None)

    @property
    def bound(self) -> float:
        """No plan within the step time asked for costs less per sample; inf: there is none."""
        return min(
            (each.least for each in self._choices if each.bound <= self._within * (1 + PROVEN)), default=math.inf
        )

    @property
    def fastest_bound_s(self) -> float:
        """No plan with any choice of workers is faster, in seconds."""
        return min((each.bound for each in self._choices), default=math.inf)

    def _solve(self, choice: _Choice, cutoff: float) -> None:
        contest = self.search.contest
        options = replace(self._inner, time_limit=max(0.1, contest.left_s), only=choice.workers)
        search = Search(self.problem.profile, options)
        search.contest.cutoff = cutoff
        search.run()
        contest.proofs |= search.contest.proofs
        choice.bound = max(choice.bound, search.bound)
        if search.contest.best is not None:
            plan, step = search.contest.best.plan, search.contest.best.value
            choice.best = Offer(plan, step, self._rate(plan.workers) * step)

    def _tell(self, found: Sequence[Offer]) -> None:
        if self._progress:
            best = min((o.money for o in found if o.step_s <= self._within * (1 + PROVEN)), default=None)
            done = sum(each.best is not None for each in self._choices)
            elapsed = self.search.contest.elapsed_s
            self._progress(Progress(elapsed, "workers", 1, best, self.bound, done, len(self._choices)))

    def _rate(self, workers: Sequence[str]) -> float:
        hourly = sum(self.problem.profile.worker[name].cost_per_hour or 0.0 for name in workers)
        return hourly / HOUR_S / self.problem.workload.batch_size

    def _all_choices(self) -> Iterator[_Choice]:
        groups = self._groups()
        counts = itertools.product(*(range(len(group) + 1) for group in groups))
        fitting = [count for count in counts if 0 < sum(count) <= self.problem.most_workers]
        for count in sorted(fitting, key=lambda each: (sum(each), each))[:MOST_CHOICES]:
            names = tuple(name for group, number in zip(groups, count, strict=True) for name in group[:number])
            yield _Choice(names, self._rate(names), self._least_s(names))

    def _groups(self) -> list[list[str]]:
        """Like workers at one price; like in the eyes of every micro-batch size that is measured alike."""
        setting = self.search.settings[-1]
        found: dict[tuple[int, float | None], list[str]] = {}
        for number, group in enumerate(Instance(self.problem, setting.micro_batches).groups):
            for name in group:
                found.setdefault((number, self.problem.profile.worker[name].cost_per_hour), []).append(name)
        return list(found.values())

    def _least_s(self, workers: tuple[str, ...]) -> float:
        """The perfect split of all work among these workers, at the best micro-batch count."""
        problem = Problem(self.problem.profile, replace(self._inner, only=workers), self.problem.cost)
        least = math.inf
        for count in self._inner.counts(self.problem.cost):
            instance = Instance(problem, count)
            least = min(least, Ladder(instance, Rungs(instance, deep=True), StepTally(count)).least())
        return least


def _frontier(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Those that no other beats in both, the cheapest first."""
    kept: list[Offer] = []
    for offer in sorted(offers, key=lambda each: (each.money, each.step_s)):
        if not kept or offer.step_s < kept[-1].step_s * (1 - PROVEN):
            kept.append(offer)
    return tuple(kept)
