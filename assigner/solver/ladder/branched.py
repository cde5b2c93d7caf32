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
from assigner.solver.ladder.climbing import LadderSetting
from assigner.solver.load import InFlight, LoadOptions, solve_load
from assigner.solver.load.from_profile import load_problem, plan_stages

if TYPE_CHECKING:
    from assigner.solver.load import LoadAnswer


class BranchedSetting(LadderSetting):
    """One schedule with M micro-batches, one stage a worker, on a graph with branches."""

    def prepare(self) -> None:
        """Offer the ladder's plans; for throughput the max-load solver's, too, and take its bound."""
        super().prepare()
        if self.decided or not self._plain:
            return
        if self._objective == "throughput":
            answer = self._balance(InFlight(self.micro_batches, from_end=self.schedule == "1f1b"))
            if answer.stages:
                self._offer(answer)
            self._take_bound(self.contest.target if answer.infeasible else answer.bound * self.micro_batches)
        elif (
            self.best is None
            and self._balance(InFlight(1 if self.schedule == "1f1b" else self.micro_batches)).infeasible
        ):
            self._take_bound(math.inf)

    @property
    def _plain(self) -> bool:
        """True if no hint is set that the max-load solver does not know."""
        options = self.problem.options
        return not (options.apart or options.order or self.problem.most_workers < len(self.problem.workers))

    def _balance(self, in_flight: InFlight) -> LoadAnswer:
        """The max-load solver's answer with so many micro-batches in flight."""
        options, rules = self.problem.options, dict(zip(self.problem.order, self.problem.remat_rules, strict=True))
        profile = replace(
            self.problem.profile,
            partitions=tuple(replace(each, rematerialise=rules[each.name]) for each in self.problem.profile.partitions),
        )
        workers = self.problem.profile.worker
        self._load = load_problem(
            CostModel(profile), micro_batch=self.size, groups=self.instance.groups,
            in_flight=in_flight,
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
