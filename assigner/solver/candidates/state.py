"""What the candidates of one search share: the clock, the solver, and the best plan of them all.

`target` is what a plan must beat: the best value less the gap asked for. A candidate whose bound reaches the target is
decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan
from assigner.solver.ilp.backend import Backend
from assigner.solver.limits import tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.solver.candidates.candidate import CandidateSearch
    from assigner.solver.problem.problem import Problem

PROVEN = 1e-6
"""A gap up to this is none: what is left are the solver's tolerances."""

_SHORTEST_S = 1e-12
"""The least unit of a model: prices divided by less have no place in a float's range."""

RELAXATION, INTEGER_PROGRAM = "linear relaxation", "integer program"
"""What the solver (HiGHS, CBC) does: where neither is named, it had no part in the answer."""

TOTAL_WORK, DYNAMIC_PROGRAM, ENUMERATION, EXHAUSTIVE, LOCAL = (
    "total work", "dynamic program", "enumeration", "exhaustive search", "local search",
)  # fmt: skip
GIVEN, BASELINE = "the plan at hand", "a baseline"
"""How else plans are found and bounds are proven: all work split perfectly; every pipeline below a bound simulated."""


@dataclass(frozen=True)
class Proposal:
    """A plan, without a prediction, and its value of the objective (`objective.py` has the unit).

    Args:
        plan: The plan.
        value: Its value.
        found_by: How it was found, in the words above.
    """

    plan: Plan
    value: float
    found_by: str


class SearchState:
    """What the candidates of one search share.

    Args:
        problem: What is to be placed.
        watch: Tells the user where the search stands.

    Attributes:
        problem: What is to be placed, with one worker a stage.
        sharing: The same where workers may share a stage; None: they may not.
        best: The best plan so far; None: there is none.
        given: Plans of simpler ways, with one stage a worker: where the search of a branched graph begins.
        proofs: How bounds were proven, for the report.
        interrupted: The user ended the search.
        backend: The ILP solver.
        clock: When the search has to end: the problem's.
        candidates: All candidates of the search.
        gap: A plan within this share of the best one is good enough.
        nodes: The most that one ILP may look at; None: any number.
        shared_work: What the dynamic programs of all candidates with shared stages may still spend, in their own unit.
        shared_effort: So many times what it counts by itself a candidate with shared stages spends on a proof.
        cutoff: A plan of this value or more is of no use.
        allowed: A plan of this value is to be proven within the gap, though it is not the best.
    """

    def __init__(self, problem: Problem, watch: Callable[[], None]) -> None:
        self.problem, self.options = problem.unshared, problem.options
        self.sharing = problem if problem.most_replicas > 1 else None
        self._watch, self._told_s = watch, problem.clock.elapsed_s
        self.backend = Backend(self.options.solver, self.options.seed, self.watch)
        self.best: Proposal | None = None
        self.given: Sequence[Proposal] = ()
        self.proofs: set[str] = set()
        self.interrupted = False
        self.candidates: list[CandidateSearch] = []
        self.gap = self.options.stop_gap
        self.nodes: int | None = None
        self.shared_effort = 1.0
        self.shared_work: float = tuning.SHARED_WORK
        self.cutoff = math.inf
        self.allowed = 0.0
        self.clock = problem.clock

    def watch(self, first: Callable[[], None] = lambda: None) -> None:
        """Tell where the search stands, if it was not told just now: called as often as is convenient.

        Args:
            first: Called before it is told.
        """
        now = self.clock.elapsed_s
        if now - self._told_s > tuning.TELL_S:
            self._told_s = now
            first()
            self._watch()

    @property
    def share_s(self) -> float:
        """Seconds that one candidate's ILP may take: all that is left for the last one that is open."""
        return self.clock.left_s * (1.0 if sum(not each.decided for each in self.candidates) == 1 else 0.6)

    @property
    def best_value(self) -> float:
        """The best plan's value; inf without one."""
        return math.inf if self.best is None else self.best.value

    @property
    def target(self) -> float:
        """A plan is only worth finding below this value."""
        return min(self.cutoff, max(self.best_value, self.allowed) * (1 - max(self.gap, PROVEN / 10)))

    @property
    def unit(self) -> float:
        """Seconds of one unit of the models: the best value is about 1,000 of them, unless it is next to nothing."""
        return max(self.best_value / 1000, _SHORTEST_S) if 0 < self.best_value < math.inf else 1e-3
