"""The search: settings in order of promise, each bounded by the best plan of all."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError
from assigner.schedule.cost import CostModel
from assigner.solver.contest.contest import LOCAL, PROVEN, Contest, Proposal
from assigner.solver.free.branched import BranchedSetting, SteadySetting
from assigner.solver.free.setting import ConvexSetting, FreeSetting
from assigner.solver.ladder.climbing import LadderSetting
from assigner.solver.ladder.gpipe import GPipeSetting
from assigner.solver.ladder.shared import SharedSetting
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import OutOfTime, SolveClock
from assigner.solver.methods.local_search import local_search
from assigner.solver.problem.answer import Progress
from assigner.solver.problem.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.formats.terms import Schedule
    from assigner.solver.contest.setting import Setting
    from assigner.solver.problem.options import SolveOptions


def settings_of(contest: Contest, counts: Sequence[int]) -> list[Setting]:
    """Every setting that the options leave to choose from."""
    options = contest.options
    if options.objective == "step":
        return _step_settings(contest, counts)
    # what is in flight does not count for latency, and of throughput 1F1B's full pipeline takes as long as GPipe's
    schedule: Schedule = "gpipe" if options.schedule == "gpipe" else "1f1b"
    if options.objective == "throughput":  # of plans as good, one with many micro-batches has the shorter step
        counts = counts[::-1]
    found = [each for count in counts for each in _ladders(contest, schedule, count)]
    return [*found, *_shared(contest, counts)]


def _step_settings(contest: Contest, counts: Sequence[int]) -> list[Setting]:
    """GPipe and 1F1B, by intervals of the order unless the graph's branches allow for more; or several stages a worker.

    Schedule "auto" has none of the last: on processes of one machine such plans were measured at twice what they are
    predicted to take, for they send many more messages. orders/search.py looks for those that gain enough.
    """
    wanted = contest.options.schedule
    if wanted == "interleaved":
        return [FreeSetting(contest, count) for count in counts]
    gpipe = [each for count in counts for each in _gpipe(contest, count)] if wanted != "1f1b" else []
    ladders = [each for count in counts for each in _ladders(contest, "1f1b", count)] if wanted != "gpipe" else []
    shared = _shared(contest, counts)
    return [*gpipe, *ladders, *shared] if contest.problem.exact else [*ladders, *gpipe, *shared]


def _gpipe(contest: Contest, count: int) -> Sequence[Setting]:
    """One along each order, that of a chain; else one for all convex stages.

    Those are looked at where the graph is branched, so that the bound of intervals would hold for the orders looked at
    alone, and where it is so small that exhaustive search ends at once.
    """
    if contest.problem.exact:
        return [GPipeSetting(contest, count)]
    convex = ConvexSetting(contest, count)
    if convex.certain or contest.problem.branched:
        return [convex]
    return [GPipeSetting(contest, count, problem) for problem in contest.problem.ordered]


def _shared(contest: Contest, counts: Sequence[int]) -> list[Setting]:
    """Where workers may share a stage, the plans in which some do: along each order of the graph.

    Where the schedule is open, 1F1B's and then GPipe's. GPipe's are none of 1F1B's, however deep those warm up: its
    backwards come in reverse order, so that other messages and reductions meet. Only the step tells the two apart.
    """
    if contest.sharing is None:
        return []
    wanted, among = contest.options.schedule, [(count, each) for count in counts for each in contest.sharing.ordered]
    first = [SharedSetting(contest, "gpipe" if wanted == "gpipe" else "1f1b", *each) for each in among]
    if wanted != "auto" or contest.options.objective != "step":
        return [*first]
    then = [SharedSetting(contest, "gpipe", *each) for each in among]
    for leader, follower in zip(first, then, strict=True):
        leader.follower = follower
    return [*first, *then]


def _ladders(contest: Contest, schedule: Schedule, count: int) -> Sequence[Setting]:
    """One ladder for each order of the graph, whose intervals together are all stages there are; else one for all."""
    if contest.problem.branched and contest.options.objective == "throughput":
        return [SteadySetting(contest, schedule, count)]
    if contest.problem.branched:
        return [BranchedSetting(contest, schedule, count)]
    return [LadderSetting(contest, schedule, count, problem) for problem in contest.problem.ordered]


class Search:
    """One run of `solve`.

    Args:
        profile: The measurements, resolved.
        options: Resolved against the profile (hints.py).
        progress: Called now and then.

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
        self.contest = Contest(self.problem, lambda: self._tell(self._at))
        self.settings = settings_of(self.contest, options.counts(self.problem.cost))
        self.contest.settings = self.settings
        self._turn = self.settings  # those whose turn it is
        self._at, self._done = self.settings[0], 0
        self._first_plan = False
        self._brief = False

    @property
    def bound(self) -> float:
        """No plan has a lower value."""
        return min([self.contest.best_value, *(setting.bound for setting in self.settings)])

    def bound_of(self, *, shares: bool) -> float:
        """No plan with stages that workers share, or none without, has a lower value; inf: there are no such plans."""
        return min((each.bound for each in self.settings if each.shares == shares), default=math.inf)

    @property
    def decided(self) -> bool:
        """True once there is nothing left to find."""
        return all(setting.decided for setting in self.settings)

    def price(self) -> None:
        """Price one micro-batch of every setting: all have a bound, however soon the time is over."""
        for setting in self.settings:
            setting.price()

    def run(self, *, first_plan: bool = False, brief: bool = False) -> None:
        """Search until the gap is proven, the time is over, or the user interrupts with a plan at hand.

        Plans in which workers share stages come last: what is found and proven of the others does not depend on them.
        So do GPipe's of those behind 1F1B's, which rules out most of them.

        Args:
            first_plan: Stop as soon as there is any plan.
            brief: Of stages that workers share, know what a part of the first counts tells, and no more.
        """
        self._first_plan = first_plan
        self._brief = brief
        if brief:
            self.contest.shared_effort = tuning.WHAT_IF_EFFORT
        given = self.contest.best
        try:
            self.price()
            alone = [each for each in self.settings if not each.shares]
            shared = [each for each in self.settings if each.shares]
            leads: list[Setting] = [
                each for each in shared if isinstance(each, SharedSetting) and each.follower is not None
            ]
            for turn in (alone, leads, [each for each in shared if each not in leads]):
                self._turn = turn
                self._seek()
            self._turn = self.settings
            self._go_on()
            self._close()
        except OutOfTime:  # what the step at work was about to tell is of no use
            return
        except KeyboardInterrupt:
            if self.contest.best is None:
                raise
            self.contest.interrupted = True
        finally:
            self.price_wires(given)

    def run_hastily(self, counts: Sequence[int]) -> None:
        """Look for plans with these micro-batch counts, as far as they are found at once; nothing is proven of them."""
        given = self.contest.best
        self._turn = [each for each in self.settings if each.micro_batches in counts]
        for setting in self._turn:
            setting.price()
        with suppress(OutOfTime):
            for setting in self._open(lambda each: each.bound):
                setting.start()
            for setting in self._open(lambda each: each.best_value):
                setting.improve()
        self.price_wires(given)

    def price_wires(self, given: Proposal | None) -> None:
        """Where links share wires: take each setting's best plan at prices with them; bounds hold as they are.

        Workers that were alike without wires are exchanged in the best one, as long as that makes it better.

        Args:
            given: The plan that the search began with, at such prices.
        """
        if self.problem.cost.wires:
            for setting in self.settings:
                setting.price_wires()
            found = [each.best for each in self.settings if each.best] + ([given] if given else [])
            best = min(found, key=lambda each: each.value, default=None)
            self.contest.best = best and _exchanged(self.problem, best)
            for setting in self.settings:
                if setting.best is best:
                    setting.best = self.contest.best

    def _seek(self) -> None:
        """Take the settings whose turn it is through all steps."""
        for setting in self._open(lambda _: 0.0):
            setting.price()
        for setting in self._open(lambda each: (not each.leads, each.bound)):
            setting.start()
        for setting in self._open(lambda each: each.best_value):
            setting.improve()
        for setting in self._open(lambda each: each.best_value):
            setting.tighten()
        for setting in self._open(lambda each: (each.best_value, each.bound)):
            setting.prove()

    @property
    def _enough(self) -> bool:
        """True once there is a plan, where any will do."""
        return self._first_plan and self.contest.best is not None

    def _open(self, key: Callable[[Setting], Any]) -> Iterator[Setting]:
        """The settings that are not decided, the least by this key first, while there is time."""
        for setting in sorted(self._turn, key=key):
            if not setting.decided and not self._enough and self.contest.clock.left_s > 0:
                self._tell(setting)
                yield setting

    def allows(self, value: float) -> bool:
        """Whether a plan of this value, which is not the best, is proven to be within the gap.

        The bound is raised for it, in at most as much time again as the search has taken, or a second. Where links
        share wires it stays: what a search would find now is priced without them.
        """
        contest = self.contest
        if self.problem.cost.wires:
            return self.bound >= value * (1 - contest.gap) * (1 - PROVEN)
        contest.allowed = value
        contest.clock.stop_within(max(1.0, contest.clock.elapsed_s))
        try:
            self._reopen()
            for setting in self._open(lambda each: each.best_value):
                setting.tighten()
            self._reopen()
            for setting in self._open(lambda each: (each.best_value, each.bound)):
                setting.prove()
            return all(setting.bound >= contest.target * (1 - PROVEN) for setting in self.settings)
        except OutOfTime:
            return False
        except KeyboardInterrupt:
            contest.interrupted = True
            return False
        finally:
            contest.allowed = 0.0

    def _reopen(self) -> None:
        """Settings whose bound does not reach the target that holds now have something left to prove."""
        for setting in self.settings:
            setting.decided = setting.bound >= self.contest.target * (1 - PROVEN)

    def _go_on(self) -> None:
        """Where counts were used up before the gap was proven and time is left: on, each time with more of them."""
        while self.contest.clock.left_s > 0 and not self._enough:
            short = [
                each
                for each in self.settings
                if not each.decided
                and each.cut_short
                and each.effort < each.most_effort
                and not (self._brief and each.shares)
            ]
            if not short:
                return
            for setting in sorted(short, key=lambda each: (each.bound, each.best_value)):
                if self.contest.clock.left_s > 0:
                    self._tell(setting)
                    setting.effort *= tuning.MORE_EFFORT
                    setting.cut_short = False
                    setting.prove()

    def _close(self) -> None:
        """Go on from the usual gap to 0, where no gap was asked for and every open setting is small.

        First those with one worker a stage: what is found there does not depend on the others.
        """
        contest, stated = self.contest, [setting for setting in self.settings if not setting.shares]
        decided = all(setting.decided for setting in stated)
        if contest.options.gap is not None or contest.best is None or self._first_plan or not decided:
            return
        open_ = [setting for setting in self.settings if not setting.decided]
        contest.gap, contest.nodes = 0.0, tuning.CLOSE_NODES
        for setting in self.settings:
            setting.decided = setting.bound >= contest.target
        try:
            self._close_each(stated)
            self._close_each([setting for setting in self.settings if setting.shares])
        finally:  # also when the time is over
            if min(setting.bound for setting in stated) < contest.target or contest.best.plan.is_replicated:
                contest.gap = contest.options.stop_gap if self.bound < contest.target else 0.0
            for setting in self.settings:
                setting.decided = setting not in open_  # to within the gap
            contest.nodes = None

    def _close_each(self, turn: Sequence[Setting]) -> None:
        """Close settings that are all small, while there is time."""
        contest = self.contest
        if all(setting.decided or setting.closable for setting in turn):
            for setting in sorted(turn, key=lambda each: (each.bound, each.best_value)):
                if setting.bound < contest.target and contest.clock.left_s > 0:
                    self._tell(setting)
                    setting.close()

    def _tell(self, setting: Setting) -> None:
        self._at = setting
        if self._progress:
            contest = self.contest
            self._done = max(self._done, sum(each.decided for each in self.settings))
            self._progress(
                Progress(
                    contest.clock.elapsed_s, setting.schedule, setting.micro_batches,
                    None if contest.best is None else contest.best_value, self.bound,
                    self._done, len(self.settings),
                )
            )  # fmt: skip


def _exchanged(problem: Problem, best: Proposal) -> Proposal:
    """The plan with two workers of a kind exchanged as long as that makes it better, at prices with shared wires.

    Args:
        problem: What it is a plan of.
        best: The plan at such prices; one with a stage on several workers, or in an order asked for, stays as it is.
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
        moved = replace(plan, stages=stages)
        if problem.keeps_hints(moved):
            yield moved
