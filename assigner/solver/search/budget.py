"""Objective `cost`: the cheapest plan that meets a step time, and the frontier of money against step time.

Money per sample is the hourly rate of the workers used times the step time. For one choice of workers the rate is
fixed, so the cheapest plan is the fastest: choices (how many of each group of like workers) are taken in the order of
what they cost at least, and each is an ordinary search for the step time, cut off where it cannot matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assigner.schedule.objective import HOUR_S
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import BASELINE, PROVEN, Proposal
from assigner.solver.methods.dynamic_program import DynamicProgram
from assigner.solver.pipelines.ranking import PipelineCandidate
from assigner.solver.problem.answer import Progress
from assigner.solver.problem.objectives import OneFOneBStep
from assigner.solver.problem.replica_options import counts_of
from assigner.solver.search.search import Search

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.solver.problem.options import SolveOptions


@dataclass(slots=True)
class _Choice:
    """Some of the workers.

    Args:
        rate: Money per sample and second of step time.
        bound: No step is faster, in seconds.
    """

    workers: tuple[str, ...]
    rate: float
    bound: float
    best: Proposal | None = None

    @property
    def least(self) -> float:
        """No plan with all of these workers costs less per sample; inf: there is none, though they cost nothing."""
        return self.rate * self.bound if self.bound < math.inf else math.inf


class Budget:
    """The search over choices of workers; its proposals' values are step times."""

    def __init__(
        self,
        profile: Profile,
        options: SolveOptions,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._inner = replace(options, objective="step", max_step_s=None, gap=options.stop_gap)
        self._progress = progress
        self.search = Search(profile, self._inner)  # its clock, and all workers at once
        self.problem = replace(self.search.problem, options=options)
        self._within = options.max_step_s or math.inf
        self._choices: list[_Choice] = []
        self._rest = _Choice((), 0.0, 0.0)  # all choices that are not in the list, as one
        candidates = [candidate for candidate in self.search.candidates if isinstance(candidate, PipelineCandidate)]
        self._programs = [
            DynamicProgram(table.one_f_one_b, OneFOneBStep(table.micro_batches))
            for table in dict.fromkeys(candidate.table for candidate in candidates)
        ]

    def run(self, simple: Sequence[tuple[Plan, float]] = ()) -> tuple[Proposal, ...]:
        """The frontier of plans that no other beats in both money and step time, as far as the time allowed.

        The cheapest plan comes first; empty: no plan was found. It starts with `simple`: plans and their step times.
        """
        found = [Proposal(plan, step, BASELINE) for plan, step in simple]
        try:
            self._list()
            for choice in self._choices:
                if self.search.state.clock.left_s <= 0:
                    break
                cutoff = min(
                    (each.value for each in found if self.money(each) <= choice.least * (1 + PROVEN)), default=math.inf
                )
                if choice.bound < cutoff * (1 - PROVEN):
                    self._solve(choice, cutoff)
                    found += [choice.best] if choice.best is not None else []
                self._tell(found)
        except KeyboardInterrupt:
            self.search.interrupt()
        kept: list[Proposal] = []
        for each in sorted(found, key=lambda each: (self.money(each), each.value)):
            if not kept or each.value < kept[-1].value * (1 - PROVEN):
                kept.append(each)
        return tuple(kept)

    def cheapest(self, frontier: Sequence[Proposal]) -> Proposal | None:
        """The cheapest plan that meets the step time asked for."""
        return next((each for each in frontier if each.value <= self._within * (1 + PROVEN)), None)

    def money(self, found: Proposal) -> float:
        """What a plan costs per sample."""
        return self._rate(found.plan.workers) * found.value

    @property
    def bound(self) -> float:
        """No plan within the step time asked for costs less per sample; inf: there is none."""
        return min(
            (each.least for each in (*self._choices, self._rest) if each.bound <= self._within * (1 + PROVEN)),
            default=math.inf,
        )

    @property
    def fastest_bound_s(self) -> float:
        """No plan with any choice of workers is faster, in seconds."""
        return min((each.bound for each in (*self._choices, self._rest)), default=math.inf)

    def _solve(self, choice: _Choice, cutoff: float) -> None:
        """Find the choice's fastest plan; close to the step time asked for, without a gap."""
        found = self._search(choice, cutoff, gap=self._inner.stop_gap)
        missed = found is not None and found.value > self._within * (1 + PROVEN) >= choice.bound
        if missed and self.search.state.clock.left_s > 0:
            found = self._search(choice, self._within * (1 + 2 * PROVEN), gap=0.0) or found
        choice.best = found

    def _search(self, choice: _Choice, cutoff: float, *, gap: float) -> Proposal | None:
        state = self.search.state
        options = replace(self._inner, gap=gap, time_limit=max(0.1, state.clock.left_s), only=choice.workers)
        search = Search(self.problem.profile, options, self._heard)
        search.state.cutoff = cutoff
        search.run()
        state.proofs |= search.proofs
        choice.bound = max(choice.bound, min(search.bound, cutoff))
        if search.state.interrupted:
            self.search.interrupt()
        return search.state.best

    def _heard(self, _: Progress) -> None:
        """Pass on that a search inside is under way: whoever listens may want to stop it."""
        self._tell([each.best for each in self._choices if each.best is not None])

    def _tell(self, found: Sequence[Proposal]) -> None:
        if self._progress:
            best = min((self.money(each) for each in found if each.value <= self._within * (1 + PROVEN)), default=None)
            done = sum(each.best is not None for each in (*self._choices, self._rest))
            elapsed = self.search.state.clock.elapsed_s
            self._progress(Progress(elapsed, "workers", 1, best, self.bound, done, len(self._choices)))

    def _rate(self, workers: Sequence[str]) -> float:
        hourly = sum(self.problem.profile.worker[name].cost_per_hour or 0.0 for name in workers)
        return hourly / HOUR_S / self.problem.workload.batch_size

    def _list(self) -> None:
        """Fill the list of choices, those with few workers first, as far as there is room; the rest stays as one."""
        groups, state = self._groups(), self.search.state
        half = state.clock.left_s / 2
        rates = sorted(self._rate(group[:1]) for group in groups for _ in group)
        choices = (
            (number, count)
            for number in range(1, self.problem.most_workers + 1)
            for count in counts_of([len(group) for group in groups], number)
        )
        for number, count in choices:
            if len(self._choices) >= tuning.MOST_CHOICES or state.clock.left_s < half:
                self._rest = _Choice((), sum(rates[:number]), self._least_s(None))
                break
            names = tuple(name for group, taken in zip(groups, count, strict=True) for name in group[:taken])
            self._choices.append(_Choice(names, self._rate(names), self._least_s(names)))
        else:
            self._rest.bound = math.inf
        self._choices.sort(key=lambda each: (each.least, each.bound, each.workers))

    def _groups(self) -> list[list[str]]:
        """Workers that are alike at every micro-batch count, and cost the same; each by itself where none is priced."""
        found: dict[tuple[object, ...], list[str]] = {}
        for number, worker in enumerate(self.problem.workers):
            alike = [program.table.group_of[worker.name] for program in self._programs] or [number]
            found.setdefault((*alike, worker.cost_per_hour), []).append(worker.name)
        return list(found.values())

    def _least_s(self, workers: Sequence[str] | None) -> float:
        """The perfect split of all work among these workers, at the best micro-batch count; None: among all.

        0 where every candidate searches placements of any shape: what they take is known when they have been solved.
        """
        return min((program.least(workers) for program in self._programs), default=0.0)
