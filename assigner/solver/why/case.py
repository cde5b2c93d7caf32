"""What is asked, and asked again: a profile with options in the user's own words; is there a plan for it?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError
from assigner.formats.profile import Profile
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import objective_value
from assigner.schedule.timing import step_s
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.options import SolveOptions
from assigner.solver.search.search import Search

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Worker
    from assigner.formats.terms import Objective


@dataclass(frozen=True)
class Case:
    """A problem as the user states it: the measurements, and what is asked for."""

    profile: Profile
    options: SolveOptions

    @cached_property
    def resolved(self) -> tuple[Profile, SolveOptions]:
        """Profile and options with the hints in plain names."""
        return resolve(self.profile, self.options)

    @cached_property
    def cost(self) -> CostModel:
        """Prices, with reserves as the options say."""
        return CostModel(self.resolved[0])

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers, with reserves as the options say."""
        return self.resolved[0].workers

    def with_options(self, **changes: Any) -> Case:
        """The case with other options."""
        return Case(self.profile, replace(self.options, **changes))

    def with_profile(self, **changes: Any) -> Case:
        """The case with another profile."""
        return Case(replace(self.profile, **changes), self.options)

    def with_memory(self, memory: Mapping[str, float]) -> Case:
        """The case with so many bytes of memory on these workers; the others keep theirs."""
        return self.with_profile(
            workers=tuple(
                replace(worker, memory_bytes=memory.get(worker.name, worker.memory_bytes))
                for worker in self.profile.workers
            )
        )


@dataclass(frozen=True)
class Change:
    """Something to do differently.

    Args:
        what: What changes, in a few words.
        how: The flag to give or to drop, or what to do where no flag does it.
        apply: The case with it.
    """

    what: str
    how: str
    apply: Callable[[Case], Case]


@dataclass(frozen=True)
class Remedy:
    """A change, and what a plan that was found with it is worth.

    Args:
        change: What is done differently.
        value: Of the objective asked for (`schedule/objective.py` has the unit).
        step_s: Its step, in seconds.
    """

    change: Change
    value: float
    step_s: float


def together(changes: Iterable[Change]) -> Change:
    """Several changes as one."""
    given = tuple(changes)

    def apply(case: Case) -> Case:
        for change in given:
            case = change.apply(case)
        return case

    return Change("; ".join(each.what for each in given), " and ".join(each.how for each in given), apply)


class Enquiry:
    """Asks for plans for so many seconds in all; then the answer is that none was found.

    Attributes:
        undecided: Some question since this was last set to False had no answer in its time.
    """

    def __init__(self, seconds: float) -> None:
        self._clock = self._share = SolveClock(seconds)
        self.undecided = False

    @property
    def over(self) -> bool:
        """True once all time is spent."""
        return self._clock.over

    def share(self, parts: int) -> None:
        """Give what follows one of the `parts` shares still to be given: twice an equal one, for most need less."""
        self._share = SolveClock(self._clock.left_s * min(1.0, 2 / parts), within=self._clock)
        self.undecided = False

    def plan(self, case: Case, *, fastest: bool = False) -> Plan | None:
        """The first plan that is found, or the fastest; None: there is none, or none was found in the time."""
        try:
            return self._search(case, fastest=fastest)
        except UsageError:  # with one hint less, or a smaller batch, others may no longer make sense
            return None
        except KeyboardInterrupt:  # that there is no plan is known, and so are the ways out so far
            self._clock.stop_within(0.0)
            self.undecided = True
            return None

    def _search(self, case: Case, *, fastest: bool) -> Plan | None:
        """A plan by its step time, where the objective has no say in whether there is one: a steady state's has."""
        profile, options = case.resolved
        objective: Objective = "throughput" if options.objective == "throughput" else "step"
        limit = options.max_step_s or math.inf
        for last in (fastest, True):
            left_s = min(tuning.QUESTION_S, self._share.left_s)
            if left_s <= 0:
                break
            search = Search(profile, replace(options, objective=objective, max_step_s=None, time_limit=left_s))
            search.state.cutoff = limit
            search.run(first_plan=not last)
            if search.state.interrupted:
                raise KeyboardInterrupt
            best = search.state.best
            if best is not None and best.value <= limit:
                return best.plan
            if search.decided and (best is None or search.bound >= limit):
                return None
            if last or best is None:
                break
        self.undecided = True
        return None

    def way_out(self, case: Case, change: Change, plan: Plan | None = None) -> tuple[Remedy, ...]:
        """The change, if there is a plan of the case with it, which may be known already; else none."""
        changed = change.apply(case)
        plan = plan or self.plan(changed)
        if plan is None:
            return ()
        step = step_s(plan, changed.cost)
        value = objective_value(plan, changed.options.objective, changed.cost, step_s=step)
        return (Remedy(change, value, step),)
