"""What every baseline is priced by: one table of prices, and the simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan
from assigner.formats.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from assigner.solver.limits.clock import SolveClock
    from assigner.solver.problem.problem import Problem


class BaselinePrices:
    """Prices of one problem for all baselines.

    Args:
        problem: What is to be placed; its options hold for the baselines too.
        clock: When they have to end; None: with the problem's search.
        most_replicas: No stage has more workers; None: any number, also where the search has fewer, to compare with.
    """

    def __init__(self, problem: Problem, clock: SolveClock | None = None, *, most_replicas: int | None = None) -> None:
        self.problem, self._clock, self.most_replicas = problem, clock or problem.clock, most_replicas
        self.counts = problem.options.counts(problem.cost)
        self.seconds_on = cache(self._seconds_on)

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The workers that may hold a stage, in the order asked for or that of their ranks."""
        usable = {worker.name: worker for worker in self.problem.workers}
        asked = tuple(name for name in self.problem.options.order if name in usable)
        return asked or tuple(sorted(usable, key=lambda name: usable[name].rank))

    def _seconds_on(self, worker: str, count: int) -> tuple[float, ...] | None:
        """Forward and backward of each position, in seconds per micro-batch; None: one of them has no price there."""
        prices = [price for price in self.problem.prices(count).measured(worker) if price is not None]
        whole = len(prices) == len(self.problem.order)
        return tuple(price.forward_s + price.backward_s for price in prices) if whole else None

    def quickest(self, count: int) -> list[str]:
        """As many workers as a plan may have, those that run the whole model fastest, in the order of `workers`."""
        seconds = {worker: sum(self.seconds_on(worker, count) or (math.inf,)) for worker in self.workers}
        chosen = set(sorted(self.workers, key=lambda worker: seconds[worker])[: self.problem.most_workers])
        return [worker for worker in self.workers if worker in chosen]

    def contiguous(self, count: int, workers: Sequence[str], sizes: Sequence[int]) -> Plan:
        """A split of the order: `sizes[k]` partitions on `workers[k]`; none is no stage."""
        stages, at = [], 0
        for worker, size in zip(workers, sizes, strict=False):
            if size:
                stages.append((worker, self.problem.order[at : at + size]))
            at += size
        return self.placed(count, stages)

    def placed(
        self, count: int, stages: Iterable[tuple[str, Sequence[str]]], replicas: Sequence[tuple[str, int]] = ()
    ) -> Plan:
        """A placement as a plan, whether it fits or not, with nothing rematerialised but what must be.

        `stages` has (worker, partitions) in pipeline order; `replicas` (worker, micro-batches) of those that share the
        only stage, and nothing where every stage has one worker.
        """
        problem, rules = self.problem, self.problem.options.rematerialise
        workers, shares = [name for name, _ in replicas], [share for _, share in replicas]
        placed = [*stages]
        # one stage keeps one micro-batch at a time, unless another schedule is asked for
        accumulates = len(placed) == 1 and problem.options.schedule not in ("gpipe", "interleaved")
        return Plan(
            workload=problem.workload,
            micro_batches=count,
            micro_batch_size=problem.prices(count).size,
            schedule="1f1b" if replicas or accumulates else "gpipe",
            stages=tuple(
                problem.held_by(
                    Stage(None, tuple(names), tuple(name for name in names if rules.get(name) == "always")),
                    workers or [worker], shares,
                )
                for worker, names in placed
            ),
        )  # fmt: skip

    def best(self, candidates: Iterable[Plan]) -> tuple[Plan | None, float]:
        """Of candidates, each rematerialising nothing or else everything, the plan with the least step, in seconds.

        Without one that fits and keeps the hints it is (None, inf). Once the time is over, none is looked at behind one
        that fits.
        """
        best: Plan | None = None
        best_s = math.inf
        for candidate in filter(self.problem.keeps_hints, candidates):
            for plan in self._variants(candidate):
                seconds = self.problem.step_s(plan)
                if seconds < best_s:
                    best, best_s = plan, seconds
                if seconds < math.inf:  # else there is no room for so little rematerialisation
                    break
            if best is not None and self._clock.over:
                break
        return best, best_s

    def _variants(self, plan: Plan) -> Iterator[Plan]:
        """The plan as it is, and with everything rematerialised that may be: what the option leaves of the two."""
        remat, rules = self.problem.options.remat, self.problem.options.rematerialise
        if remat != "always":
            yield plan
        if remat != "never":
            stages = (
                replace(each, rematerialise=tuple(name for name in each.partitions if rules.get(name) != "never"))
                for each in plan.stages
            )
            yield replace(plan, stages=tuple(stages))
