"""What is asked, and asked again: a profile with options in the user's own words, and the plan that an answer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from assigner.formats.plan import Plan
from assigner.formats.profile import Profile
from assigner.schedule.cost import CostModel
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.options import SolveOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from assigner.formats.profile import Worker


@dataclass(frozen=True)
class Case:
    """A problem as the user states it.

    Args:
        profile: The measurements.
        options: What is asked for.
    """

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
        """The case with other memory.

        Args:
            memory: Worker's name to bytes; the others keep theirs.
        """
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
    """A change, and a plan that was found with it.

    Args:
        change: What to change.
        plan: A plan of the changed case.
        step_s: Its step time, in seconds.
    """

    change: Change
    plan: Plan
    step_s: float


def together(changes: Iterable[Change]) -> Change:
    """Several changes as one."""
    given = tuple(changes)

    def apply(case: Case) -> Case:
        for change in given:
            case = change.apply(case)
        return case

    return Change("; ".join(each.what for each in given), " and ".join(each.how for each in given), apply)


def short(worker: str) -> str:
    """`worker:1` of `worker:1/cpu`: what the hints take."""
    return worker.partition("/")[0]
