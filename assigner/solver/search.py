"""The search: settings in order of promise, each bounded by the best plan of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.cost import CostModel
from assigner.errors import UsageError
from assigner.solver.answer import Progress
from assigner.solver.chain.gpipe import GPipeSetting
from assigner.solver.contest import PROVEN, Contest
from assigner.solver.free import settings as free_settings
from assigner.solver.ladder.branched import BranchedSetting
from assigner.solver.ladder.climbing import LadderSetting
from assigner.solver.problem import Problem
from assigner.solver.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.plan import Schedule
    from assigner.profile import Profile
    from assigner.solver.options import SolveOptions

PHASES = (
    (Setting.price, lambda _: 0.0),
    (Setting.prepare, lambda setting: (not setting.leads, setting.bound)),
    (Setting.improve, lambda setting: setting.best_value),
    (Setting.relax, lambda setting: setting.best_value),
    (Setting.prove, lambda setting: (setting.best_value, setting.bound)),
    (Setting.adopt, lambda setting: setting.best_value),
)
"""What is done, and in which order of the settings: least first."""

MORE, MOST_EFFORT = 4, 4**6
"""A setting that used up its counts goes on with so many times as many, up to so many times the first ones."""


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
    return [each for schedule in schedules for count in counts for each in _ladders(contest, schedule, count)]


def _step_settings(contest: Contest, counts: Sequence[int]) -> list[Setting]:
    """GPipe by intervals of the order unless the graph's branches allow for more, 1F1B, and several stages a worker."""
    wanted = contest.options.schedule
    free = free_settings(contest, counts)
    found: list[Setting] = []
    if wanted in ("auto", "gpipe") and not any(setting.schedule == "gpipe" for setting in free):
        found += [GPipeSetting(contest, count) for count in counts]
    if wanted in ("auto", "1f1b"):
        found += [each for count in counts for each in _ladders(contest, "1f1b", count)]
    return [*found, *free]


def _ladders(contest: Contest, schedule: Schedule, count: int) -> Sequence[Setting]:
    """One ladder for each order of the graph, whose intervals together are all stages there are; else one for all."""
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
        contest = self.contest
        try:
            for phase, key in PHASES:
                for setting in sorted(self.settings, key=key):
                    if first_plan and contest.best is not None:
                        return
                    if not setting.decided and contest.left_s > 0:
                        self._tell(setting)
                        getattr(setting, phase.__name__)()
            self._deepen()
        except KeyboardInterrupt:
            if contest.best is None:
                raise
            contest.proofs.add("interrupted")

    def allows(self, value: float) -> bool:
        """Whether a plan of this value, which is not the best, is proven to be within the gap.

        The bound is raised for it, in at most as much time again as the search has taken, or a second.
        """
        contest = self.contest
        contest.allowed = value
        contest.stop_within(max(1.0, contest.elapsed_s))
        try:
            for phase, key in PHASES[3:5]:
                for setting in sorted(self.settings, key=key):
                    setting.decided = setting.bound >= contest.target * (1 - PROVEN)
                    if not setting.decided and contest.left_s > 0:
                        getattr(setting, phase.__name__)()
            return all(setting.bound >= contest.target * (1 - PROVEN) for setting in self.settings)
        except KeyboardInterrupt:
            contest.proofs.add("interrupted")
            return False
        finally:
            contest.allowed = 0.0

    def _deepen(self) -> None:
        """Where counts were used up before the gap was proven and time is left: on, each time with more of them."""
        while self.contest.left_s > 0:
            short = [
                each for each in self.settings if not each.decided and each.cut_short and each.effort < MOST_EFFORT
            ]
            if not short:
                return
            for setting in sorted(short, key=lambda each: (each.bound, each.best_value)):
                if self.contest.left_s > 0:
                    self._tell(setting)
                    setting.effort *= MORE
                    setting.cut_short = False
                    setting.prove()

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
