"""The search: settings in order of promise, each bounded by the best plan of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError
from assigner.schedule.cost import CostModel
from assigner.solver import tuning
from assigner.solver.answer import Progress
from assigner.solver.chain.gpipe import GPipeSetting
from assigner.solver.contest import PROVEN, Contest
from assigner.solver.free import settings as free_settings
from assigner.solver.ladder.branched import BranchedSetting, SteadySetting
from assigner.solver.ladder.climbing import LadderSetting
from assigner.solver.ladder.shared import SharedSetting
from assigner.solver.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.formats.profile import Profile
    from assigner.formats.terms import Schedule
    from assigner.solver.options import SolveOptions
    from assigner.solver.setting import Setting


def _settings(contest: Contest, counts: Sequence[int]) -> list[Setting]:
    """Every setting that the options leave to choose from."""
    options = contest.options
    if options.objective == "step":
        return _step_settings(contest, counts)
    if options.schedule == "interleaved":
        raise UsageError(
            f"schedule interleaved is solved for objective step only, not for {options.objective}",
            hint="--schedule auto, gpipe or 1f1b",
        )
    schedules: tuple[Schedule, ...] = ("gpipe", "1f1b") if options.schedule == "auto" else (options.schedule,)
    if options.objective == "throughput":  # of plans as good, one with many micro-batches has the shorter step
        schedules, counts = schedules[::-1], counts[::-1]
    found = [each for schedule in schedules for count in counts for each in _ladders(contest, schedule, count)]
    return [*found, *_shared(contest, counts)]


def _step_settings(contest: Contest, counts: Sequence[int]) -> list[Setting]:
    """GPipe by intervals of the order unless the graph's branches allow for more, 1F1B, and several stages a worker."""
    wanted = contest.options.schedule
    free = free_settings(contest, counts)
    found: list[Setting] = []
    if wanted in ("auto", "gpipe") and not any(setting.schedule == "gpipe" for setting in free):
        found += [GPipeSetting(contest, count) for count in counts]
    if wanted in ("auto", "1f1b"):
        found += [each for count in counts for each in _ladders(contest, "1f1b", count)]
    return [*found, *free, *_shared(contest, counts)]


def _shared(contest: Contest, counts: Sequence[int]) -> list[Setting]:
    """Where workers may share a stage, the plans in which some do: along each order of the graph.

    Where the schedule is open they are 1F1B's, whose warm-up may be as deep as GPipe's; what is proven of them holds
    for both.
    """
    if contest.problem.most_replicas == 1:
        return []
    schedule: Schedule = "gpipe" if contest.options.schedule == "gpipe" else "1f1b"
    return [SharedSetting(contest, schedule, count, problem) for count in counts for problem in contest.problem.ordered]


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
    """

    def __init__(
        self, profile: Profile, options: SolveOptions, progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.problem = Problem(profile, options, CostModel(profile))
        self._progress = progress
        self.contest = Contest(self.problem, lambda: self._tell(self._at))
        self.settings = _settings(self.contest, options.counts(self.problem.cost))
        self.contest.settings = self.settings
        self._at, self._done = self.settings[0], 0
        self._first_plan = False

    @property
    def bound(self) -> float:
        """No plan has a lower value."""
        return min([self.contest.best_value, *(setting.bound for setting in self.settings)])

    @property
    def decided(self) -> bool:
        """True once there is nothing left to find."""
        return all(setting.decided for setting in self.settings)

    def run(self, *, first_plan: bool = False) -> None:
        """Search until the gap is proven, the time is over, or the user interrupts with a plan at hand.

        Args:
            first_plan: Stop as soon as there is any plan.
        """
        self._first_plan = first_plan
        try:
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
            for setting in self._open(lambda each: each.best_value):
                setting.adopt()
            self._go_on()
            self._close()
        except KeyboardInterrupt:
            if self.contest.best is None:
                raise
            self.contest.interrupted = True

    @property
    def _enough(self) -> bool:
        """True once there is a plan, where any will do."""
        return self._first_plan and self.contest.best is not None

    def _open(self, key: Callable[[Setting], Any]) -> Iterator[Setting]:
        """The settings that are not decided, the least by this key first, while there is time."""
        for setting in sorted(self.settings, key=key):
            if not setting.decided and not self._enough and self.contest.left_s > 0:
                self._tell(setting)
                yield setting

    def allows(self, value: float) -> bool:
        """Whether a plan of this value, which is not the best, is proven to be within the gap.

        The bound is raised for it, in at most as much time again as the search has taken, or a second.
        """
        contest = self.contest
        contest.allowed = value
        contest.stop_within(max(1.0, contest.elapsed_s))
        try:
            self._reopen()
            for setting in self._open(lambda each: each.best_value):
                setting.tighten()
            self._reopen()
            for setting in self._open(lambda each: (each.best_value, each.bound)):
                setting.prove()
            return all(setting.bound >= contest.target * (1 - PROVEN) for setting in self.settings)
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
        while self.contest.left_s > 0 and not self._enough:
            short = [
                each
                for each in self.settings
                if not each.decided and each.cut_short and each.effort < tuning.MOST_EFFORT
            ]
            if not short:
                return
            for setting in sorted(short, key=lambda each: (each.bound, each.best_value)):
                if self.contest.left_s > 0:
                    self._tell(setting)
                    setting.effort *= tuning.MORE_EFFORT
                    setting.cut_short = False
                    setting.prove()

    def _close(self) -> None:
        """Go on from the usual gap to 0, where no gap was asked for and the ILP of every open setting is small.

        Settings without an ILP stay as they are: what is found in the others does not depend on them.
        """
        contest, stated = self.contest, [setting for setting in self.settings if setting.has_ilp]
        decided = all(setting.decided for setting in stated)
        if contest.options.gap is not None or contest.best is None or self._first_plan or not decided:
            return
        open_ = [setting for setting in self.settings if not setting.decided]
        contest.gap, contest.nodes = 0.0, tuning.CLOSE_NODES
        for setting in self.settings:
            setting.decided = setting.bound >= contest.target
        if all(setting.decided or setting.closable for setting in stated):
            for setting in sorted(stated, key=lambda each: (each.bound, each.best_value)):
                if setting.bound < contest.target and contest.left_s > 0:
                    self._tell(setting)
                    setting.close()
        if self.bound < contest.target:
            contest.gap = contest.options.stop_gap
        for setting in self.settings:
            setting.decided = setting not in open_  # to within the gap
        contest.nodes = None

    def _tell(self, setting: Setting) -> None:
        self._at = setting
        if self._progress:
            contest = self.contest
            self._done = max(self._done, sum(each.decided for each in self.settings))
            self._progress(
                Progress(
                    contest.elapsed_s, setting.schedule, setting.micro_batches,
                    None if contest.best is None else contest.best_value, self.bound,
                    self._done, len(self.settings),
                )
            )  # fmt: skip
