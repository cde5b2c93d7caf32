"""The search: micro-batch counts in order of promise, each bounded by the best plan of all.

For each count a beam finds good plans at once; the relaxation of the segment ILP bounds what is possible; columns
that cannot be in a better plan go, by their bounds and by the relaxation's reduced costs; the ILP over the rest finds
a better plan or proves that there is none.

`target` is what a plan must beat: the best step time less the gap asked for. A count whose bound reaches the target
is decided.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from assigner.cost import CostModel
from assigner.errors import AssignerError
from assigner.solver.answer import Progress
from assigner.solver.backend import Backend
from assigner.solver.beam import Beam
from assigner.solver.formula import turn_steps_s
from assigner.solver.improve import improve
from assigner.solver.instance import Instance
from assigner.solver.merged import MergedInstance
from assigner.solver.model import SegmentModel
from assigner.solver.placement import Placement, hops_of
from assigner.solver.problem import Problem
from assigner.solver.pruning import chain_bounds
from assigner.solver.segments import Column

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.profile import Profile
    from assigner.solver.answer import SolveOptions
    from assigner.solver.backend import Outcome

PROVEN = 1e-6
"""A gap up to this is none: what is left are the solver's tolerances."""

GRAPH_CUTS = 12
"""Of a graph, whose ILP is a lower bound, so many pipelines are cut off and priced before the gap is left open."""

MERGE_GAP = 1e-3
"""With a smaller gap than this, merging workers of one kind rarely proves anything: it is left out."""


@dataclass(slots=True)
class Count:
    """Where one micro-batch count stands; times in seconds.

    Args:
        instance: The problem at this count.
        best: Its best plan so far.
        bound: No plan with this count is faster; inf: there is none.
        decided: There is nothing left to find.
        columns: Those that may be in a better plan; None: not looked at yet.
        floor: Least bound of the columns that were left out.
    """

    instance: Instance
    best: Placement | None = None
    bound: float = 0.0
    decided: bool = False
    columns: list[Column] | None = None
    floor: float = field(default=math.inf)

    @property
    def best_s(self) -> float:
        """Step time of its best plan; inf without one."""
        return math.inf if self.best is None else self.best.step_s

    def raise_bound(self, bound: float) -> None:
        """Take a bound on the columns kept; those left out have `floor`."""
        self.bound = max(self.bound, min(bound, self.floor))


class Search:
    """One run of `solve`.

    Args:
        profile: The measurements.
        options: Checked against the profile already.
        progress: Called now and then.
    """

    def __init__(
        self, profile: Profile, options: SolveOptions, progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.problem = Problem(profile, options, CostModel(profile))
        self.options, self._progress = options, progress
        self._start = time.monotonic()
        self.counts = [Count(Instance(self.problem, count)) for count in options.counts(self.problem.cost)]
        self.best: Placement | None = None
        self.backend = Backend(options.solver, options.seed, lambda: self._tell(self._at))
        self._at = self.counts[0]
        self.proofs: set[str] = set()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return self.options.time_limit - self.elapsed_s

    @property
    def best_s(self) -> float:
        """The best plan's step time; inf without one."""
        return math.inf if self.best is None else self.best.step_s

    @property
    def bound_s(self) -> float:
        """No plan is faster than this."""
        return min([self.best_s, *(count.bound for count in self.counts)])

    def run(self, *, first_plan: bool = False) -> None:
        """Search until the gap is proven, the time is over, or the user interrupts with a plan at hand.

        Args:
            first_plan: Stop as soon as there is any plan.
        """
        try:
            for step, key in (
                (self._price, lambda _: 0.0),
                (self._prepare, lambda count: count.bound),
                (self._relax, lambda count: count.best_s),
                (self._prove, lambda count: (count.best_s, count.bound)),
            ):
                for count in sorted(self.counts, key=key):
                    if first_plan and self.best is not None:
                        return
                    if not count.decided and self.left_s > 0:
                        self._tell(count)
                        step(count)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.proofs.add("interrupted")

    def _tell(self, count: Count) -> None:
        self._at = count
        if self._progress:
            self._progress(
                Progress(
                    self.elapsed_s, count.instance.micro_batches, None if self.best is None else self.best_s,
                    self.bound_s, sum(each.decided for each in self.counts), len(self.counts),
                )
            )  # fmt: skip

    def _target(self) -> float:
        return self.best_s * (1 - max(self.options.gap, PROVEN / 10))

    def _unit(self) -> float:
        """Seconds of one unit of the models: the best step time is about 1,000 of them."""
        return self.best_s / 1000 if 0 < self.best_s < math.inf else 1e-3

    def _take(self, count: Count, placement: Placement) -> None:
        if placement.step_s < count.best_s:
            count.best = placement
        if placement.step_s < self.best_s * (1 - 1e-12):
            self.best = placement
            self._tell(count)

    def _price(self, count: Count) -> None:
        """Price the columns; the sums alone give a first bound, inf where no chain of stages fits."""
        bounds = chain_bounds(count.instance)
        count.bound = min((bound for column, bound in bounds.items() if column.first == 0), default=math.inf)
        count.decided = math.isinf(count.bound)

    def _prepare(self, count: Count) -> None:
        """Take the beam's plans and what local search makes of the best."""
        if count.bound >= self._target():
            count.decided = True
            return
        instance = count.instance
        for columns in Beam(instance).run():
            self._take(count, Placement.of(instance, columns))
        if count.best is not None:
            self._take(count, improve(count.best, until=time.monotonic() + self.left_s))

    def _relax(self, count: Count) -> None:
        """Bound a count by the relaxation, and drop columns by their reduced costs."""
        if self.options.gap >= MERGE_GAP:
            merged = MergedInstance(self.problem, count.instance.micro_batches, count.instance)
            if merged.merges:
                self._bound_merged(count, merged)
                if count.decided or self.left_s <= 0:
                    return
        target = self._target()
        kept, floor, outcome = self._relaxed(count.instance, target)
        count.columns, count.floor = kept, floor
        if outcome.finished:
            count.raise_bound(outcome.bound)
        if count.bound >= target:
            count.decided = True
            self.proofs.add("relaxation")

    def _relaxed(self, instance: Instance, target: float) -> tuple[list[Column], float, Outcome]:
        """Solve the relaxation, in seconds.

        Returns:
            The columns that may be in a plan below `target`, the least bound of the others, and the outcome.
        """
        bounds = chain_bounds(instance)
        columns = [column for column, bound in bounds.items() if bound < target]
        floor = min((bound for bound in bounds.values() if bound >= target), default=math.inf)
        model = SegmentModel(instance, columns, unit=self._unit())
        outcome = self.backend.relax(model.problem, time_limit=self.left_s).scaled(model.unit)
        if not outcome.found:
            return columns, floor, outcome
        kept = []
        for column, x in zip(model.columns, model.x, strict=True):
            bound = outcome.value + max(0.0, x.dj or 0.0) * model.unit
            if bound < target * (1 + PROVEN):
                kept.append(column)
            else:
                floor = min(floor, bound)
        return kept, floor, outcome

    def _bound_merged(self, count: Count, merged: MergedInstance) -> None:
        """Bound a count by the problem in which workers of one kind are alike: its relaxation, then its ILP."""
        target = self._target()
        kept, floor, outcome = self._relaxed(merged, target)
        if not outcome.finished:
            return
        proof = "relaxation"
        bound = min(outcome.bound, floor)
        if bound < target:
            model = SegmentModel(merged, kept, unit=self._unit())
            found = self.backend.search(
                model.problem, gap=self.options.gap, cutoff=target / model.unit, time_limit=self._share(0.3)
            )
            bound = max(bound, min(found.bound * model.unit, floor))
            proof = "ILP"
        count.bound = max(count.bound, bound)
        if count.bound >= target:
            count.decided = True
            self.proofs.add(proof)

    def _share(self, share: float) -> float:
        """Seconds for one count: all that is left for the last one."""
        return self.left_s if sum(not each.decided for each in self.counts) == 1 else share * self.left_s

    def _prove(self, count: Count) -> None:
        """Find a better plan with the ILP, or prove that there is none.

        Of a chain the ILP's value is the step time, but for turns before the last stage; then, and for graphs, the
        pipeline found is priced, cut off and the ILP solved again.
        """
        assert count.columns is not None
        model = SegmentModel(count.instance, count.columns, unit=self._unit())
        cuts = 0
        while self.left_s > 0:
            target = self._target()
            if count.bound >= target:
                count.decided = True
                return
            outcome = self.backend.search(
                model.problem, gap=self.options.gap, cutoff=target / model.unit, time_limit=self._share(0.6)
            ).scaled(model.unit)
            self.proofs.add("ILP")
            count.raise_bound(outcome.bound)
            if not outcome.found:
                count.decided = outcome.finished
                return
            placement = Placement.of(count.instance, model.chosen())
            _check(placement, outcome)
            self._take(count, placement)
            if placement.step_s <= outcome.value * (1 + 1e-9):
                count.decided = outcome.finished
                return
            cuts += 1
            if not self.problem.exact and cuts > GRAPH_CUTS:
                return
            self._cut(model, placement)

    def _cut(self, model: SegmentModel, placement: Placement) -> None:
        """Tell the model what a pipeline really takes."""
        columns = placement.columns
        if self.problem.exact:
            hops = hops_of(placement.instance, columns)
            assert hops is not None
            steps = turn_steps_s(columns, hops, placement.instance.micro_batches)
            turn = max(range(len(steps)), key=steps.__getitem__)
            columns = columns[: turn + 2]  # the turn at t knows the stages up to t and the boundary behind it
        model.cut(columns, placement.step_s)


def _check(placement: Placement, outcome: Outcome) -> None:
    """Raise AssignerError if the ILP's objective and the closed formula disagree about a pipeline of a chain."""
    if not placement.instance.problem.exact:
        return
    hops = hops_of(placement.instance, placement.columns)
    assert hops is not None
    told = turn_steps_s(placement.columns, hops, placement.instance.micro_batches)[-1]
    low, high = outcome.bound, outcome.value
    if told > high * (1 + PROVEN) or placement.step_s < low * (1 - PROVEN):
        raise AssignerError(
            f"the ILP says {high:.9g} s (at least {low:.9g} s) for a pipeline that takes {told:.9g} s",
            hint="this is a bug in the solver: please report it with the profile",
        )
