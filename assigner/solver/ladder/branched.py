"""Graphs with branches: convex stages beyond the intervals of one order, by the max-load solver.

It finds and proves the best throughput. Of step time and latency it only tells whether anything fits at all: the
ladder's intervals cannot prove that.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.cost import CostModel
from assigner.errors import FormatError
from assigner.objective import steady_s
from assigner.plan import Plan
from assigner.simulate import overfull, predict
from assigner.solver.contest import Contest
from assigner.solver.free import settings
from assigner.solver.free.relaxation import LoadModel
from assigner.solver.free.room import Room
from assigner.solver.free.setting import VARIABLES
from assigner.solver.free.table import Table
from assigner.solver.ladder.climbing import LadderSetting
from assigner.solver.load import InFlight, LoadOptions, solve_load
from assigner.solver.load.from_profile import load_problem, plan_stages
from assigner.solver.problem import Problem

if TYPE_CHECKING:
    from assigner.solver.load import LoadAnswer


FITS_S = 10.0
"""Seconds for the question whether anything fits at all."""


def _quiet() -> None:
    """Nobody watches."""


class BranchedSetting(LadderSetting):
    """One schedule with M micro-batches, one stage a worker, on a graph with branches."""

    def prepare(self) -> None:
        """Offer the ladder's plans; for throughput the max-load solver's, too, and take its bound."""
        super().prepare()
        if not self.decided and self._plain and self._objective == "throughput":
            answer = self._balance()
            if answer.stages:
                self._offer(answer)
            self._take_bound(self.contest.target if answer.infeasible else answer.bound * self.micro_batches)
        if not self.decided and self.best is None and self._nothing_fits():
            super().raise_bound(math.inf, "exhaustive search")

    def prove(self) -> None:
        """Simulate the ladder's pipelines; then bound a step by the work and the paths of every placement."""
        super().prove()
        self.cut_short = False  # more of the intervals of one order prove nothing about other stages
        if self.decided or self._objective != "step" or self.contest.left_s <= 0:
            return
        contest, table = self.contest, Table(self.problem, self.micro_batches)
        if len(self.problem.order) * len(set(table.group)) > VARIABLES:
            return
        model = LoadModel(Room(table), one_stage=True, unit=contest.unit, turns=False)
        outcome = contest.backend.search(
            model.problem, gap=contest.options.gap, cutoff=contest.target / model.unit, time_limit=contest.share_s
        )
        self.raise_bound(outcome.bound * model.unit, "ILP")

    def _nothing_fits(self) -> bool:
        """True if it is proven that no convex stages fit, with as few micro-batches in flight as there can be.

        GPipe with one micro-batch holds what 1F1B with one in flight holds, so its exhaustive search tells.
        """
        options = self.problem.options
        least = 1 if self.schedule == "1f1b" else self.micro_batches
        asked = replace(
            options, objective="step", schedule="gpipe", batch_size=least * self.size, micro_batches=least,
            max_step_s=None, time_limit=max(0.1, min(FITS_S, self.contest.left_s)),
        )  # fmt: skip
        contest = Contest(Problem(self.problem.profile, asked, self.problem.cost), self.contest.backend.watch or _quiet)
        contest.settings = settings(contest, (least,))
        for setting in contest.settings:
            for phase in (setting.price, setting.prepare, setting.relax, setting.prove):
                if not setting.decided and contest.best is None and contest.left_s > 0:
                    phase()
        if contest.best is not None:
            self._adapt(contest.best.plan, least)
        return contest.best is None and all(setting.decided for setting in contest.settings)

    def _adapt(self, plan: Plan, in_flight: int) -> None:
        """Offer stages that fit with so few micro-batches in flight."""
        problem = self.problem
        adapted = replace(
            plan, objective=self._objective, schedule=self.schedule, workload=problem.workload,
            micro_batches=self.micro_batches, micro_batch_size=self.size,
            stages=tuple(
                replace(stage, in_flight=in_flight if self.schedule == "1f1b" else None) for stage in plan.stages
            ),
        )  # fmt: skip
        try:
            prediction = predict(adapted, problem.profile, problem.cost)
        except FormatError:  # a gradient or a tie needs a link that is missing
            return
        if not overfull(prediction) and self._objective != "throughput":  # which needs the usual warm-up
            self.offer(self._value(adapted, prediction.step_s), lambda: adapted)

    @property
    def _plain(self) -> bool:
        """True if no hint is set that the max-load solver does not know."""
        options = self.problem.options
        return not (options.apart or options.order or self.problem.most_workers < len(self.problem.workers))

    def _balance(self) -> LoadAnswer:
        options, rules = self.problem.options, dict(zip(self.problem.order, self.problem.remat_rules, strict=True))
        profile = replace(
            self.problem.profile,
            partitions=tuple(replace(each, rematerialise=rules[each.name]) for each in self.problem.profile.partitions),
        )
        workers = self.problem.profile.worker
        self._load = load_problem(
            CostModel(profile), micro_batch=self.size, groups=self.instance.groups,
            in_flight=InFlight(self.micro_batches, from_end=self.schedule == "1f1b"),
            allowed=lambda name, worker: self.problem.allowed(name, workers[worker]),
        )  # fmt: skip
        return solve_load(
            self._load,
            LoadOptions(
                solver=options.solver, seed=options.seed, time_limit=max(0.1, self.contest.share_s), gap=options.gap
            ),
        )

    def _offer(self, answer: LoadAnswer) -> None:
        problem = self.problem
        plan = Plan(
            workload=problem.workload, objective="throughput", schedule=self.schedule,
            micro_batches=self.micro_batches, micro_batch_size=self.size,
            stages=plan_stages(problem.profile, self._load, answer, self.instance.groups),
        )  # fmt: skip
        try:
            fits = not overfull(predict(plan, problem.profile, problem.cost))
        except FormatError:  # a tie needs a link that is missing: the steady state does not know of ties
            return
        if fits:
            self.offer(self.micro_batches * steady_s(plan, problem.cost), lambda: plan)

    def _take_bound(self, bound: float) -> None:
        """A bound of the max-load solver's problem, which is ours only where memory is alike on all workers."""
        if self._alike():
            self.raise_bound(bound, "dynamic program over downsets")

    def _alike(self) -> bool:
        return all(
            len({(price.activation_bytes, price.workspace_bytes) for price in prices if price is not None}) < 2
            for prices in zip(*self.instance.prices, strict=True)
        )
