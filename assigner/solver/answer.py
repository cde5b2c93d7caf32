"""What goes into a search and what comes out of it, as small frozen values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from assigner.errors import UsageError
from assigner.plan import Plan

if TYPE_CHECKING:
    from assigner.cost import CostModel
    from assigner.profile import Profile

Remat = Literal["auto", "never", "always"]
SolverName = Literal["highs", "cbc"]


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """What the user asks of `solve`.

    Args:
        micro_batches: How many micro-batches a step has; None: the best divisor of the batch size.
        remat: "auto" rematerialises where that helps, "never" nothing, "always" every partition.
        solver: The ILP solver under PuLP.
        gap: Stop when the plan is proven to be within this share of the best possible: 0 or more, below 1.
        time_limit: Seconds after which the best plan so far is the answer.
        seed: Of the ILP solver; the same input and seed give the same plan unless time runs short.
        pins: Partition name to the worker, `worker:N`, kind or host that it must be on, beyond the profile's own pins.
        batch_size: Samples in a step; None: the profile's.

    Raises:
        UsageError: a value that cannot be used; the message names it.
    """

    micro_batches: int | None = None
    remat: Remat = "auto"
    solver: SolverName = "highs"
    gap: float = 0.01
    time_limit: float = 60.0
    seed: int = 0
    pins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("remat", get_args(Remat)), ("solver", get_args(SolverName))):
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name}: {value!r} is not allowed; expected {' or '.join(allowed)}")
        for name in ("micro_batches", "batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}: {value!r} is not allowed; expected a whole number, 1 or more")
        if not 0 <= self.gap < 1:
            raise UsageError(f"gap: {self.gap!r} is not allowed; expected a share, 0 or more and below 1")
        if not 0 < self.time_limit < math.inf:
            raise UsageError(f"time limit: {self.time_limit!r} is not allowed; expected seconds, more than 0")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise UsageError(f"seed: {self.seed!r} is not allowed; expected a whole number, 0 to 2147483647")

    def check(self, profile: Profile) -> None:
        """Raise UsageError unless the options can be met by this profile's names and batch size."""
        for name, pin in self.pins.items():
            if name not in profile.partition:
                raise UsageError(
                    f"pin: {name!r} is not a partition of this profile",
                    hint=f"partitions: {', '.join(profile.order[:6])}" + (", ..." if len(profile.order) > 6 else ""),
                )
            if not any(profile.matches(pin, worker) for worker in profile.workers):
                raise UsageError(
                    f"pin: {name}={pin}: {pin!r} names no worker, kind or host of this profile",
                    hint=f"workers: {', '.join(worker.name for worker in profile.workers[:6])}",
                )
        batch = self.batch(profile)
        if self.micro_batches is not None and batch % self.micro_batches:
            raise UsageError(
                f"micro-batches: {self.micro_batches} does not divide the batch size {batch}",
                hint=f"one of {', '.join(map(str, divisors(batch)))}",
            )

    def batch(self, profile: Profile) -> int:
        """Samples in a step."""
        return self.batch_size or profile.workload.batch_size

    def counts(self, cost: CostModel) -> tuple[int, ...]:
        """The micro-batch counts to choose from: the one asked for, or every divisor of the batch size.

        Left out are sizes below the smallest measured one for which the line through noisy measurements promises what
        no machine does; if that leaves none, all are offered.
        """
        if self.micro_batches is not None:
            return (self.micro_batches,)
        batch = self.batch(cost.profile)
        return tuple(count for count in divisors(batch) if cost.is_plausible(batch // count)) or divisors(batch)

    def record(self) -> dict[str, Any]:
        """The settings as they are stored in a plan."""
        return {
            "micro_batches": self.micro_batches or "auto", "remat": self.remat, "solver": self.solver,
            "gap": self.gap, "time_limit": self.time_limit, "seed": self.seed, "pins": dict(self.pins),
            "batch_size": self.batch_size,
        }  # fmt: skip


def divisors(number: int) -> tuple[int, ...]:
    """All whole numbers that divide `number`, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


@dataclass(frozen=True)
class Progress:
    """Where a search stands.

    Args:
        elapsed_s: Seconds since its start.
        schedule: The schedule at work.
        micro_batches: The micro-batch count at work.
        incumbent_s: Value of the best plan so far; None: there is none.
        bound_s: No plan can be better than this, as far as is proven.
        done: Settings (schedule, micro-batch count) that are decided.
        total: Settings in all.
    """

    elapsed_s: float
    schedule: str
    micro_batches: int
    incumbent_s: float | None
    bound_s: float
    done: int
    total: int


@dataclass(frozen=True)
class Candidate:
    """One setting that was looked at.

    Args:
        schedule: Its schedule.
        micro_batches: Its number of micro-batches.
        micro_batch_size: Samples in each.
        step_s: The best step time found with it; None: no plan was found.
        bound_s: No plan with this count is faster; inf: there is none.
        status: "chosen", "proven worse", "infeasible: why", "not decided".
    """

    schedule: str
    micro_batches: int
    micro_batch_size: int
    step_s: float | None
    bound_s: float
    status: str


@dataclass(frozen=True)
class Solution:
    """A plan, with what else was looked at.

    Args:
        plan: The best plan, priced, with its solver report and its baselines.
        candidates: The micro-batch counts, smallest first.
        limiting: One sentence: which worker, link or memory limits the plan.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    limiting: str
