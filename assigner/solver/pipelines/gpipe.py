"""GPipe's step time, one stage a worker: the dynamic program where it is sharp, kinds of workers where it is not.

Where least sums can be made beforehand for every choice of workers used, the dynamic program finds the best plan and
proves it in less time than the integer program. A fleet of unlike workers has too many such choices: there the
hierarchy (fleet/) finds plans and bounds them, and the integer program closes what is small enough for it. Who goes
about which step of the search, with some gap allowed, and with hardly any:

             some gap, or the program is not sharp               hardly any gap, and it is sharp
    start    the hierarchy; of a graph, the program, too         the program
    improve  of a graph, local search                            local search
    tighten  the hierarchy                                       the integer program of few columns, else the program
    prove    the integer program of few columns; the program where it is sharp, else the hierarchy; the integer program
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

from assigner.solver.fleet.hierarchy import Hierarchy
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import DYNAMIC_PROGRAM, TOTAL_WORK
from assigner.solver.pipelines.ranking import PipelineCandidate

if TYPE_CHECKING:
    from assigner.solver.methods.candidate import SearchState
    from assigner.solver.problem.problem import Problem


class GPipeCandidate(PipelineCandidate):
    """GPipe, one stage a worker, with M micro-batches; arguments as of `CandidateSearch`."""

    def __init__(self, state: SearchState, micro_batches: int, problem: Problem | None = None) -> None:
        super().__init__(state, "gpipe", micro_batches, problem)
        self.hierarchy = Hierarchy(
            self.table, price=self.plans.simulate, target=lambda: state.target,
            watch=lambda: state.watch(self._take_bound),
        )  # fmt: skip

    @cached_property
    def _columns(self) -> int:
        """How many intervals there are on all groups of workers."""
        n = len(self.problem.order)
        return n * (n + 1) // 2 * len(self.table.groups)

    @property
    def _few_columns(self) -> bool:
        """Whether the integer program goes first: its proof is the one that a user can repeat."""
        return self._columns <= tuning.CLOSE_COLUMNS

    @cached_property
    def _sharp(self) -> bool:
        """Whether the dynamic program's bounds are."""
        return self._columns <= tuning.MOST_COLUMNS and self.program.sharp

    @property
    def closable(self) -> bool:
        """As `CandidateSearch` has it: by what the dynamic program can carry."""
        return self._sharp and len(self.options.all) <= tuning.CLOSE_SEARCHED

    @cached_property
    def _by_kinds(self) -> bool:
        """Whether the hierarchy goes first: with hardly any gap allowed it rarely proves anything."""
        return self.state.gap >= tuning.COARSE_GAP or not self._sharp

    def price(self) -> None:
        """The sums alone give a first bound, inf where a partition fits nowhere."""
        self.bound = self.hierarchy.bound
        self.decided = math.isinf(self.bound)

    def start(self) -> None:
        """Take the hierarchy's first plan if there is none yet; of a graph, or for a small gap, rank some more."""
        self.raise_bound(self.bound, TOTAL_WORK)
        if self.decided:
            return
        if self._by_kinds and math.isinf(self.state.best_value) and not self.hierarchy.start():
            self.raise_bound(math.inf, DYNAMIC_PROGRAM)
        if self._climbs and not self.decided:
            super().start()

    @cached_property
    def _climbs(self) -> bool:
        """Whether the hierarchy does not find good plans by itself."""
        return not self._by_kinds or (self._sharp and not self.problem.exact)

    def improve(self) -> None:
        """Local search from the best of the dynamic program's plans."""
        if self._climbs:
            super().improve()

    def tighten(self) -> None:
        """Bound the candidate: by the hierarchy, the integer program or the dynamic program."""
        if self._by_kinds:
            self._descend(self.state.share_s)
        elif self._few_columns:
            self.close_by_ilp()
        else:
            super().tighten()

    def prove(self) -> None:
        """Find a better plan, or prove that there is none."""
        if self._columns > tuning.MOST_COLUMNS:
            self._descend(self.state.clock.left_s)
            return
        if self._few_columns and self.effort == 1:
            self.close_by_ilp()
        if self._sharp and not self.decided:
            if self.effort == 1:
                super().tighten()
            super().prove()
        elif not self.decided:
            self._descend(self.state.share_s)
        if self.decided or self.cut_short or self._few_columns or self.state.clock.left_s <= 0:
            return
        if self._sharp or self.state.gap < tuning.COARSE_GAP:  # else its model alone takes longer than the rest
            self.close_by_ilp()

    def close(self) -> None:
        """As `CandidateSearch` has it."""
        self.prove()

    def _take_bound(self) -> None:
        self.raise_bound(self.hierarchy.bound, DYNAMIC_PROGRAM)

    def _descend(self, seconds: float) -> None:
        """Search the hierarchy for a while."""
        try:
            self.hierarchy.search(seconds)
        finally:  # also when interrupted
            self._take_bound()
