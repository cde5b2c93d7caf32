"""One way to run a step, a schedule with a number of micro-batches, and how far its search has come.

The search (search.py) takes every candidate through the same steps:

    price    everything that one micro-batch costs; a first bound
    start    good plans at once, without proof
    improve  local search from the best of them
    tighten  the bound, by a relaxation; fewer choices left
    prove    the best plan, or that none is better
    close    on to a gap of 0, where that takes seconds and no gap was asked for

All of that is with a wire for each link (`CostModel.apart`): a wire that links share only delays, so that bounds hold,
and what is proven is proven of those prices. Where links do share wires, each plan that may be the best with them is
priced so too when it is offered, and `Search.price_wires` takes the best of these.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan
from assigner.schedule.objective import compared_value
from assigner.schedule.timing import step_s
from assigner.solver.ilp.linear import Backend
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import OutOfTime
from assigner.solver.limits.tuning import TIE
from assigner.solver.problem.options import samples_in_each

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.terms import Schedule
    from assigner.solver.ilp.linear import LinearModel, Outcome
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
    """A plan, without a prediction, and its value of the objective (`objective.py` has the unit)."""

    plan: Plan
    value: float
    found_by: str


class SearchState:
    """What the candidates of one search share: the clock, the solver, and the best plan of them all.

    `target` is what a plan must beat: the best value less the gap asked for. A candidate whose bound reaches the target
    is decided.

    Attributes:
        problem: What is to be placed, with one worker a stage.
        sharing: The same where workers may share a stage; None: they may not.
        given: Plans of simpler ways, with one stage a worker: where the search of a branched graph begins.
        proofs: How bounds were proven, for the report.
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
        """Tell where the search stands, behind `first`, unless it was told just now: called whenever convenient."""
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
        """What a bound must reach: a plan is only worth finding below this value."""
        beaten = max(self.best_value, self.allowed)
        return min(self.cutoff, beaten * (1 - max(self.gap, PROVEN / 10)))

    @property
    def unit(self) -> float:
        """Seconds of one unit of the models: the best value is about 1,000 of them, unless it is next to nothing."""
        return max(self.best_value / 1000, _SHORTEST_S) if 0 < self.best_value < math.inf else 1e-3


class CandidateSearch(ABC):
    """A schedule with a number of micro-batches.

    Args:
        problem: What is to be placed, along one order of the graph; None: the search's.

    Attributes:
        shares: Its plans have stages that several workers share.
        turn: Those of a lower one are searched before.
        with_wires: The best of those offered at prices with wires; None: no links share one, or there is none.
        bound: No plan of this candidate has a lower value; inf: it has none.
        proof: How that was proven.
        decided: There is nothing left to find at the gap that holds now: its bound has reached the target, which is
            inf where nothing fits. `Search` opens it again where the target moves, as for a gap of 0.
        effort: How many times what it counts by itself it may spend: nodes, labels, cuts.
        cut_short: It stopped where that count was used up, so that with more of it it would know more.
    """

    schedule: Schedule
    shares = False
    turn = 0

    def __init__(self, state: SearchState, micro_batches: int, problem: Problem | None = None) -> None:
        self.state, self.problem = state, problem or state.problem
        self.micro_batches = micro_batches
        self.best: Proposal | None = None
        self.with_wires: Proposal | None = None
        self.bound, self.proof = 0.0, TOTAL_WORK
        self.decided = self.cut_short = False
        self.effort = 1

    @property
    def size(self) -> int:
        """Samples in a micro-batch."""
        return samples_in_each(self.problem.workload.batch_size, self.micro_batches)

    @property
    def best_value(self) -> float:
        """Value of its best plan; inf without one."""
        return math.inf if self.best is None else self.best.value

    @property
    def leads(self) -> bool:
        """True if the best plan of all runs this way, also where it came from outside of the search."""
        best = self.state.best
        return best is not None and (best.plan.schedule, best.plan.micro_batches) == (self.schedule, self.micro_batches)

    def offer(self, value: float, plan: Callable[[], Plan], found_by: str) -> None:
        """Take a plan if its value, with a wire for each link, is less than the best one's; inf: it cannot run."""
        if self.problem.cost.wires and value < (self.with_wires.value if self.with_wires else math.inf):
            self._offer_with_wires(Proposal(plan(), value, found_by))
        if value < self.best_value:
            self.best = Proposal(plan(), value, found_by)
            if value < self.state.best_value * (1 - TIE):
                self.state.best = self.best

    def _offer_with_wires(self, found: Proposal) -> None:
        cost, plan = self.problem.cost, found.plan
        value = compared_value(plan, plan.objective, cost, step_s=step_s(plan, cost))
        if self.with_wires is None or value < self.with_wires.value * (1 - TIE):
            self.with_wires = replace(found, value=value)

    def raise_bound(self, bound: float, proof: str) -> None:
        """Take a bound; the candidate is decided once it reaches the target. inf: no plan is left below the target."""
        target = self.state.target
        if bound == math.inf and not math.isinf(target):
            bound = target
        if bound > self.bound:
            self.bound, self.proof = bound, proof
        if self.bound >= target * (1 - TIE):  # units of a model take its last bit
            self.bound = max(self.bound, target)
            self.decided = True
            self.state.proofs.add(proof)

    def bound_by(self, model: LinearModel, *, relaxed: bool = False, most: float = math.inf) -> Outcome:
        """Raise the bound to what a model proves of all plans, in seconds, and return that.

        By its linear relaxation, if that ends; else by the ILP, in this candidate's share of the time. The model may
        leave out plans of a value of `most` or more.

        Raises:
            OutOfTime: less is left than it takes to hand the model over.
        """
        state = self.state
        model.check()
        if relaxed:
            outcome = state.backend.relax(model.problem, time_limit=state.clock.left_s)
        else:
            outcome = state.backend.search(
                model.problem, gap=state.gap, cutoff=state.target / model.unit, time_limit=state.share_s
            )
        outcome = outcome.scaled(model.unit)
        if outcome.finished or not relaxed:
            self.raise_bound(min(outcome.bound, most), RELAXATION if relaxed else INTEGER_PROGRAM)
        return outcome

    def over(self) -> Callable[[], bool]:
        """What tells, asked now and then, whether this candidate's share of the time is over; it tells of progress."""
        state = self.state
        until = state.clock.elapsed_s + state.share_s

        def is_over() -> bool:
            state.watch()
            return state.clock.elapsed_s > until

        return is_over

    def begin(self) -> None:
        """Its first good plans, by itself, as far as there is time."""
        with suppress(OutOfTime):
            self.price()
            if not self.decided:
                self.start()

    @abstractmethod
    def price(self) -> None:
        """Price one micro-batch and set a first bound."""

    @abstractmethod
    def start(self) -> None:
        """Offer good plans."""

    def improve(self) -> None:  # noqa: B027 - where `start` leaves nothing to do
        """Make its best plan better by local search; the most promising candidate of all goes first."""

    @abstractmethod
    def tighten(self) -> None:
        """Raise the bound by a relaxation."""

    @abstractmethod
    def prove(self) -> None:
        """Find the best plan or prove that none is better, until the time or the effort is over."""

    @property
    def most_effort(self) -> int:
        """The most effort that it gets, while time is left."""
        return tuning.MOST_EFFORT

    @property
    def closable(self) -> bool:
        """Whether `close` takes seconds, judged by sizes alone, so that the answer is the same on every machine."""
        return False

    def close(self) -> None:
        """Find the best plan of all below the target, or prove that this candidate has none."""
        self.prove()
