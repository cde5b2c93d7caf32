"""Pipelines in which several workers share a stage: plain data parallelism is the one of one stage.

The dynamic program's price of such a pipeline is a lower bound: what the busiest worker of a stage computes at the
best shares, and what its messages and its reduce take at least. The simulator prices the shares that reach it, at the
warm-up depths of a few policies; local search moves cuts, workers, depths and single micro-batches from one worker to
another.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.schedule.simulate import worker_memory
from assigner.solver import tuning
from assigner.solver.contest import LOCAL
from assigner.solver.ladder.climbing import LadderSetting, pipeline_key
from assigner.solver.ladder.depths import nearby
from assigner.solver.local_search import local_search
from assigner.solver.objectives import SharedStep
from assigner.solver.replica_options import ReplicaOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.solver.ladder.depths import Depths
    from assigner.solver.objectives import PipelineObjective
    from assigner.solver.prices import StageOption, StageOptions

    Pipeline = tuple[StageOption, ...]
    Point = tuple[Pipeline, Depths]


class SharedSetting(LadderSetting):
    """Under one schedule with M micro-batches: a worker has one stage, and at least one stage has several workers."""

    most_depths = tuning.SHARED_DEPTHS
    has_ilp = False  # none states shares

    def _stage_options(self, *, deep: bool) -> StageOptions:
        return ReplicaOptions(self.instance, deep=deep)

    def _additive(self) -> PipelineObjective:
        if self._objective == "step":
            return SharedStep(self.micro_batches, forwards_first=self.schedule == "gpipe")
        return super()._additive()

    @property
    def closable(self) -> bool:
        """No."""
        return False

    def start(self) -> None:
        """Simulate one stage on every set of workers, and the dynamic program's best."""
        for number, members in enumerate(self._options.sets):
            pipeline = self._stages([(0, number)]) if len(members) > 1 else None
            if pipeline is not None:
                self._start = min(self._start, (self._simulate(pipeline), pipeline), key=lambda each: each[0])
        super().start()

    def _tried_all(self, pipeline: Sequence[StageOption]) -> bool:
        """As of `LadderSetting`: shares are not all tried."""
        return not any(option.shares for option in pipeline) and super()._tried_all(pipeline)

    def _worth(self, plan: Plan) -> tuple[float, float]:
        """As of `LadderSetting`; what a shared stage's option promises of memory need not hold for these shares."""
        profile = self.problem.profile
        for worker in plan.workers:
            if worker_memory(self.problem.cost, plan, worker).total > profile.worker[worker].capacity_bytes:
                return math.inf, math.inf
        return super()._worth(plan)

    def _deepen(self, pipeline: Sequence[StageOption]) -> float:
        """The best value of a simulated pipeline after local search over its warm-up depths and shares."""
        key = pipeline_key(pipeline)
        value, depths = self._seen.get(key, (math.inf, ()))
        if key in self._deepened or not depths or self._tried_all(pipeline):
            return value
        self._deepened.add(key)
        ranges = self._ranges(pipeline)

        def neighbours(at: Point) -> Iterator[Point]:
            yield from ((shared, at[1]) for shared in _other_shares(at[0]))
            yield from ((at[0], deeper) for deeper in nearby(at[1], ranges))

        def price(tried: Point) -> float:
            self._actions -= 2 * self.micro_batches * sum(max(1, len(option.shares)) for option in tried[0])
            return self._worth(self._plan(*tried))[0]

        best, value = local_search(
            (tuple(pipeline), depths), value, neighbours=neighbours, price=price, may_go_on=self._may_go_on
        )
        self._seen[key] = value, best[1]
        self.offer(value, lambda: self._plan(*best), LOCAL)
        return value


def _other_shares(pipeline: Pipeline) -> Iterator[Pipeline]:
    """Pipelines in which one worker of a shared stage hands one micro-batch to another."""
    for n, option in enumerate(pipeline):
        for giver, share in enumerate(option.shares):
            for taker in range(len(option.shares)):
                if taker != giver and share > 1:
                    shares = list(option.shares)
                    shares[giver] -= 1
                    shares[taker] += 1
                    yield (*pipeline[:n], replace(option, shares=tuple(shares)), *pipeline[n + 1 :])
