"""The search: candidates in order of promise, each bounded by the best plan of all.

A candidate is a schedule with a number of micro-batches, along each order of the graph that is looked at. Who finds its
plans, and what proves how good they are (who "closes" has the last word, where that takes seconds):

    plans                       class              found by                bounded by               closed by
    one stage a worker
      GPipe along an order      GPipeCandidate     dynamic program, or      the same                 the ILP
                                                   kinds (fleet/hierarchy)
      1F1B along an order;      PipelineCandidate  dynamic program, or      the same, and depths by  the ILP
        throughput, latency                        kinds                    branch and bound
                                                   (fleet/kind_sweeps)      (pipelines/depth_search)
      branched graph, GPipe     FreeCandidate      annealing of convex      relaxation               all placements
        1F1B, latency           BranchedCandidate  stages; along orders     (ilp/placements)         if few
        throughput              FreeCandidate      annealing                the same                 the same
    several workers a stage     SharedCandidate    dynamic program of sets  pipelines/share_search   the same
    several stages a worker
      breadth first             FreeCandidate      annealing                relaxation               all placements
                                                                            (ilp/placements)         if few
      in any order              none: orders/search.py looks for them behind all others

Local search makes the best of each better. Kinds of workers go first where workers are many and unlike
(`GPipeCandidate._by_kinds`, `PipelineCandidate.kinds`), and what is small is closed (`closable`): by counts of
options and visits, never by time; they stand in limits/tuning.py. What has proven a bound is `CandidateSearch.proof`.
"""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from assigner.errors import UsageError
from assigner.schedule.cost import CostModel
from assigner.solver.free.branched import BranchedCandidate
from assigner.solver.free.candidate import FreeCandidate
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import OutOfTime, SolveClock
from assigner.solver.methods.candidate import BASELINE, LOCAL, PROVEN, Proposal, SearchState
from assigner.solver.methods.local_search import local_search
from assigner.solver.pipelines.gpipe import GPipeCandidate
from assigner.solver.pipelines.ranking import PipelineCandidate
from assigner.solver.pipelines.shared import SharedCandidate
from assigner.solver.problem.answer import Progress
from assigner.solver.problem.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.formats.terms import Schedule
    from assigner.solver.baselines import FoundBaseline
    from assigner.solver.methods.candidate import CandidateSearch
    from assigner.solver.problem.options import SolveOptions


T = TypeVar("T")


def candidates_of(state: SearchState, counts: Sequence[int]) -> list[CandidateSearch]:
    """Every candidate that the options leave to choose from."""
    options = state.options
    if options.objective == "step":
        return _step_candidates(state, counts)
    # what is in flight does not count for latency, and of throughput 1F1B's full pipeline takes as long as GPipe's
    schedule: Schedule = "gpipe" if options.schedule == "gpipe" else "1f1b"
    if options.objective == "throughput":  # of plans as good, one with many micro-batches has the shorter step
        counts = counts[::-1]
    found = [each for count in counts for each in _pipelines(state, schedule, count)]
    return [*found, *_shared(state, counts)]


def _step_candidates(state: SearchState, counts: Sequence[int]) -> list[CandidateSearch]:
    """GPipe and 1F1B, by intervals of the order unless the graph's branches allow for more; or several stages a worker.

    Schedule "auto" has none of the last: on processes of one machine such plans were measured at twice what they are
    predicted to take, for they send many more messages. orders/search.py looks for those that gain enough.
    """
    wanted = state.options.schedule
    if wanted == "interleaved":
        return [FreeCandidate(state, wanted, count) for count in counts]
    gpipe = [each for count in counts for each in _gpipe(state, count)] if wanted != "1f1b" else []
    pipelines = [each for count in counts for each in _pipelines(state, "1f1b", count)] if wanted != "gpipe" else []
    shared = _shared(state, counts)
    return [*gpipe, *pipelines, *shared] if state.problem.exact else [*pipelines, *gpipe, *shared]


def _gpipe(state: SearchState, count: int) -> Sequence[CandidateSearch]:
    """One along each order, of a chain the only one; else one for all convex stages.

    Those are looked at where the graph is branched, so that the bound of intervals would hold for the orders looked at
    alone, and where it is so small that exhaustive search ends at once.
    """
    if not state.problem.exact:
        convex = FreeCandidate(state, "gpipe", count)
        if convex.certain or state.problem.branched:
            return [convex]
    return [GPipeCandidate(state, count, problem) for problem in state.problem.ordered]


def _shared(state: SearchState, counts: Sequence[int]) -> list[CandidateSearch]:
    """Where workers may share a stage, the plans in which some do: along each order of the graph.

    Where the schedule is open, 1F1B's and then GPipe's. GPipe's are none of 1F1B's, however deep those warm up: its
    backwards come in reverse order, so that other messages and reductions meet. Only the step tells the two apart.
    """
    if state.sharing is None:
        return []
    wanted, among = state.options.schedule, [(count, each) for count in counts for each in state.sharing.ordered]
    first = [SharedCandidate(state, "gpipe" if wanted == "gpipe" else "1f1b", *each) for each in among]
    if wanted != "auto" or state.options.objective != "step":
        return [*first]
    then = [SharedCandidate(state, "gpipe", *each) for each in among]
    for leader, follower in zip(first, then, strict=True):
        leader.follower, follower.turn = follower, 2
    return [*first, *then]


def _pipelines(state: SearchState, schedule: Schedule, count: int) -> Sequence[CandidateSearch]:
    """One for each order of the graph, whose intervals together are all stages there are; else one for all."""
    if state.problem.branched and state.options.objective == "throughput":
        return [FreeCandidate(state, schedule, count)]
    if state.problem.branched:
        return [BranchedCandidate(state, schedule, count)]
    return [PipelineCandidate(state, schedule, count, problem) for problem in state.problem.ordered]


class Search:
    """One run of `solve`, profile and options resolved (hints.py).

    A candidate is decided while its bound reaches the target (`SearchState.target`). That moves, and with it what is
    open: down with every better plan, and up where more is to be proven than before:

        run       `SearchState.gap` is what was asked for, or the usual one
        _close    it is 0 for what is small, and then again as far as that was not reached
        allows    a slower plan is to be within it, one that is preferred (`SearchState.allowed`)

    Attributes:
        listed: Only plans with listed orders are asked for.
        any_order: Those are plans to choose from (orders/search.py).
        any_order_found_s: The shortest step of one, where it is too little less than the plan's; None: there is none.
        any_order_excluded: It is proven that there is no such plan.
    """

    def __init__(
        self, profile: Profile, options: SolveOptions, progress: Callable[[Progress], None] | None = None
    ) -> None:
        if options.schedule in ("listed", "interleaved") and options.objective != "step":
            raise UsageError(
                f"schedule {options.schedule} is solved for objective step only, not for {options.objective}",
                hint="--schedule auto, gpipe or 1f1b",
            )
        self.listed = options.schedule == "listed"
        self.any_order_found_s: float | None = None
        self.any_order_excluded = False
        self.any_order = self.listed or (options.schedule == "auto" and options.objective == "step")
        if options.schedule in ("listed", "one-stage"):  # listed orders start from what the named schedules find
            options = replace(options, schedule="auto")
        clock = SolveClock(options.time_limit)
        self.problem = Problem(profile, options, CostModel(profile), clock=clock)
        self._progress = progress
        self.state = SearchState(self.problem, lambda: self._tell(self._at))
        self.candidates = candidates_of(self.state, options.counts(self.problem.cost))
        self.state.candidates = self.candidates
        self._turn = self.candidates  # those whose turn it is
        self._at, self._done = self.candidates[0], 0
        self._first_plan = False

    @property
    def bound(self) -> float:
        """No plan has a lower value."""
        return min([self.state.best_value, *(candidate.bound for candidate in self.candidates)])

    @property
    def proofs(self) -> set[str]:
        """How the bounds of what is decided were proven; some are so by one that was known before the plan was."""
        decided = {each.proof for each in self.candidates if each.decided and each.bound < math.inf}
        return self.state.proofs | decided

    def bound_of(self, *, shares: bool) -> float:
        """No plan with stages that workers share, or none without, has a lower value; inf: there are no such plans."""
        return min((each.bound for each in self.candidates if each.shares == shares), default=math.inf)

    @property
    def decided(self) -> bool:
        """True once there is nothing left to find."""
        return all(candidate.decided for candidate in self.candidates)

    def price(self) -> None:
        """Price one micro-batch of every candidate: all have a bound, however soon the time is over."""
        for candidate in self.candidates:
            candidate.price()

    def interrupt(self) -> None:
        """Ctrl-C: from here on it is as if the time were over."""
        self.state.interrupted = True
        self.state.clock.stop_within(0.0)

    def ended_by_interrupt(self, step: Callable[[], T]) -> T:
        """What a step of the search gives; Ctrl-C has it anew with no time left, which it takes to one that holds.

        Raises:
            KeyboardInterrupt: the second time.
        """
        try:
            return step()
        except KeyboardInterrupt:
            if self.state.interrupted:
                raise
            self.interrupt()
            return step()

    def begin_with(self, simple: Sequence[FoundBaseline]) -> None:
        """Baselines with one worker a stage and one stage a worker are where the search of a branched graph begins."""
        self.state.given = tuple(
            Proposal(each.plan, each.step_s, f"{BASELINE}: {each.title}")
            for each in simple
            if each.plan is not None and not (each.plan.is_looped or each.plan.is_replicated)
        )

    def keeping_time_for_orders(self) -> AbstractContextManager[None]:
        """Until it is left the time ends earlier, where plans with listed orders are looked for behind all others.

        On a graph with branches by more, unless it is so large that placements are not looked for: of others more time
        raises the bound, and these plans are rarely faster.
        """
        size = len(self.problem.order) * len(self.problem.workers) ** 2
        share = tuning.ORDERS_SHARE[self.problem.branched and size <= tuning.LISTED_VALUES]
        return self.problem.clock.keeping(share if self.any_order else 0.0)

    def run(self, *, first_plan: bool = False, brief: bool = False) -> None:
        """Search until the gap is proven, the time is over, or the user interrupts.

        Plans in which workers share stages come last: what is found and proven of the others does not depend on them.
        So do GPipe's of those behind 1F1B's, which rules out most of them.

        Args:
            first_plan: Stop as soon as there is any plan.
            brief: Of stages that workers share, know what a part of the first counts tells, and no more.
        """
        self._first_plan = first_plan
        if brief:
            self.state.shared_effort = tuning.WHAT_IF_EFFORT
        given = self.state.best
        try:
            self.price()
            for turn in sorted({each.turn for each in self.candidates}):
                self._turn = [each for each in self.candidates if each.turn == turn]
                self._seek()
            self._turn = self.candidates
            self._go_on()
            self._close()
        except OutOfTime:  # what the step at work was about to tell is of no use
            return
        except KeyboardInterrupt:
            self.interrupt()
        finally:
            self.price_wires(given)

    def run_hastily(self, counts: Sequence[int]) -> None:
        """Look for plans with these micro-batch counts, as far as they are found at once; nothing is proven of them."""
        given = self.state.best
        self._turn = [each for each in self.candidates if each.micro_batches in counts]
        for candidate in self._turn:
            candidate.price()
        with suppress(OutOfTime):
            for candidate in self._open(lambda each: each.bound):
                candidate.start()
            for candidate in self._open(lambda each: each.best_value):
                candidate.improve()
        self.price_wires(given)

    def price_wires(self, given: Proposal | None) -> None:
        """Where links share wires: take each candidate's best plan at prices with them; bounds hold as they are.

        `given` is the plan that the search began with, at such prices. Workers that were alike without wires are
        exchanged in the best one, as long as that makes it better.
        """
        if self.problem.cost.wires:
            for candidate in self.candidates:
                candidate.best = candidate.with_wires
            found = [each.best for each in self.candidates if each.best] + ([given] if given else [])
            best = min(found, key=lambda each: each.value, default=None)
            self.state.best = best and _exchanged(self.problem, best)
            for candidate in self.candidates:
                if candidate.best is best:
                    candidate.best = self.state.best

    def _seek(self) -> None:
        """Take the candidates whose turn it is through all steps."""
        for candidate in self._open(lambda _: 0.0):
            candidate.price()
        for candidate in self._open(lambda each: (not each.leads, each.bound)):
            candidate.start()
        for candidate in self._open(lambda each: each.best_value):
            candidate.improve()
        for candidate in self._open(lambda each: each.best_value):
            candidate.tighten()
        for candidate in self._open(lambda each: (each.best_value, each.bound)):
            candidate.prove()

    @property
    def _enough(self) -> bool:
        """True once there is a plan, where any will do."""
        return self._first_plan and self.state.best is not None

    def _open(self, key: Callable[[CandidateSearch], Any]) -> Iterator[CandidateSearch]:
        """The candidates that are not decided, the least by this key first, while there is time."""
        for candidate in sorted(self._turn, key=key):
            if not candidate.decided and not self._enough and self.state.clock.left_s > 0:
                self._tell(candidate)
                yield candidate

    def allows(self, value: float) -> bool:
        """Whether a plan of this value, which is not the best, is proven to be within the gap.

        The bound is raised for it, in at most as much time again as the search has taken, or a second. Where links
        share wires it stays: what a search would find now is priced without them.
        """
        state = self.state
        if self.problem.cost.wires:
            return self.bound >= value * (1 - state.gap) * (1 - PROVEN)
        state.allowed = value
        state.clock.stop_within(max(1.0, state.clock.elapsed_s))
        try:
            self._reopen(within=PROVEN)
            for candidate in self._open(lambda each: each.best_value):
                candidate.tighten()
            self._reopen(within=PROVEN)
            for candidate in self._open(lambda each: (each.best_value, each.bound)):
                candidate.prove()
            return all(candidate.bound >= state.target * (1 - PROVEN) for candidate in self.candidates)
        except OutOfTime:
            return False
        except KeyboardInterrupt:
            self.interrupt()
            return False
        finally:
            state.allowed = 0.0

    def _reopen(self, *, within: float) -> None:
        """Candidates whose bound misses the target that holds now, by more than this share, have something to prove."""
        for candidate in self.candidates:
            candidate.decided = candidate.bound >= self.state.target * (1 - within)

    def _go_on(self) -> None:
        """Where counts were used up before the gap was proven and time is left: on, each time with more of them."""
        while self.state.clock.left_s > 0 and not self._enough:
            brief = self.state.shared_effort < 1  # of shared stages, what the first counts tell is enough
            open_ = [each for each in self.candidates if not each.decided and not (brief and each.shares)]
            short = [each for each in open_ if each.cut_short and each.effort < each.most_effort]
            if not short:
                return
            for candidate in sorted(short, key=lambda each: (each.bound, each.best_value)):
                if self.state.clock.left_s > 0:
                    self._tell(candidate)
                    candidate.effort *= tuning.MORE_EFFORT
                    candidate.cut_short = False
                    candidate.prove()

    def _close(self) -> None:
        """Go on from the usual gap to 0, where no gap was asked for and every open candidate is small.

        First those with one worker a stage: what is found there does not depend on the others.
        """
        state, stated = self.state, [candidate for candidate in self.candidates if not candidate.shares]
        decided = all(candidate.decided for candidate in stated)
        if state.options.gap is not None or state.best is None or self._first_plan or not decided:
            return
        open_ = [candidate for candidate in self.candidates if not candidate.decided]
        state.gap, state.nodes = 0.0, tuning.CLOSE_NODES
        self._reopen(within=0.0)
        try:
            self._close_each(stated)
            self._close_each([candidate for candidate in self.candidates if candidate.shares])
        finally:  # also when the time is over
            if min(candidate.bound for candidate in stated) < state.target or state.best.plan.is_replicated:
                state.gap = state.options.stop_gap if self.bound < state.target else 0.0
            for candidate in self.candidates:
                candidate.decided = candidate not in open_  # to within the gap
            state.nodes = None

    def _close_each(self, turn: Sequence[CandidateSearch]) -> None:
        """Close candidates that are all small, while there is time."""
        state = self.state
        if all(candidate.decided or candidate.closable for candidate in turn):
            for candidate in sorted(turn, key=lambda each: (each.bound, each.best_value)):
                if candidate.bound < state.target and state.clock.left_s > 0:
                    self._tell(candidate)
                    candidate.close()

    def _tell(self, candidate: CandidateSearch) -> None:
        self._at, state = candidate, self.state
        if self._progress and not state.interrupted:
            self._done = max(self._done, sum(each.decided for each in self.candidates))
            self._progress(
                Progress(
                    state.clock.elapsed_s, candidate.schedule, candidate.micro_batches,
                    None if state.best is None else state.best_value, self.bound,
                    self._done, len(self.candidates),
                )
            )  # fmt: skip


def _exchanged(problem: Problem, best: Proposal) -> Proposal:
    """The plan with two workers of a kind exchanged as long as that makes it better, at prices with shared wires.

    One with a stage on several workers, or in an order asked for, stays as it is.
    """
    if best.plan.is_replicated or problem.options.order:
        return best
    left = tuning.EXCHANGED

    def price(plan: Plan) -> float:
        nonlocal left
        left -= 1
        return problem.value_of(plan)

    plan, value = local_search(
        best.plan, best.value, neighbours=lambda plan: _with_exchange(problem, plan), price=price,
        may_go_on=lambda: left > 0 and problem.clock.left_s > 0,
    )  # fmt: skip
    return best if plan is best.plan else Proposal(plan, value, LOCAL)


def _with_exchange(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with a worker of its own and another of the same kind in each other's place, as far as pins allow."""
    kind = {worker.name: (worker.alike, worker.capacity_bytes) for worker in problem.workers}
    used = [name for name in plan.workers if name in kind]
    for one, other in itertools.product(used, kind):
        if one == other or kind[one] != kind[other] or (other in used and other < one):
            continue
        to = {one: other, other: one}
        stages = tuple(replace(each, sole_worker=to.get(each.worker, each.worker)) for each in plan.stages)
        moved = replace(plan, stages=stages, orders={to.get(name, name): text for name, text in plan.orders.items()})
        if problem.keeps_hints(moved):
            yield moved
