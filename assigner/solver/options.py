"""What the user asks of a search: objective, choices, hints and limits, as one frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from assigner.document import MOST_ROWS, shown
from assigner.errors import UsageError
from assigner.location import MOST_RANKS
from assigner.plan import MOST_MICRO_BATCHES, Objective

if TYPE_CHECKING:
    from assigner.cost import CostModel
    from assigner.plan import Plan
    from assigner.profile import Profile

Remat = Literal["auto", "never", "always"]
RematRule = Literal["never", "always"]
SolverName = Literal["highs", "cbc"]
ScheduleChoice = Literal["auto", "gpipe", "1f1b", "interleaved"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """What the user asks of `solve`.

    Args:
        objective: What is made small: "step" (seconds of one step), "throughput" (seconds of a batch in the steady
            state: M times the slowest worker or link), "latency" (seconds of one forward of one micro-batch), "cost"
            (money per sample, with `max_step_s`).
        schedule: "auto" takes what is best of those that the runtime executes.
        micro_batches: How many micro-batches a step has; None: the best divisor of the batch size.
        remat: "auto" rematerialises where that helps, "never" nothing, "always" every partition.
        max_step_s: With objective "cost": no plan whose step takes longer, in seconds.
        max_workers: No plan with more workers.
        pins: Partition to the worker, `worker:N`, kind or host that it must be on, beyond the profile's own pins.
        forbid: (partition, worker): it is not on that worker, `worker:N`, kind or host.
        together: Groups of partitions; those of one share a worker.
        apart: Groups of partitions; no two of one share a worker.
        only: The workers, kinds or hosts that may be used; empty: all.
        order: The workers that may be used, in the order in which the stages must follow; empty: any.
        rematerialise: Partitions that must never, or always, run their forward twice.
        memory: Worker, kind or host to bytes; a plan holds no more than that on one, whatever memory it has.
        reserve: Worker, kind or host to bytes of its memory that are left free, instead of the profile's reserve.
        prices: Worker, kind or host to money per hour, instead of the profile's; of several that match, the last.
        solver: The ILP solver.
        gap: Stop when the plan is proven to be within this share of the best one of those that are searched, which
            have one stage a worker unless the schedule is interleaved: 0 or more, below 1.
        time_limit: Seconds after which the best plan so far is the answer.
        seed: Of the ILP solver; the same input and seed give the same plan unless time runs short.
        batch_size: Samples in a step; None: the profile's.

    Names of partitions may be patterns: `block.*` is every partition whose name matches.

    Raises:
        UsageError: a value that cannot be used; the message names it.
    """

    objective: Objective = "step"
    schedule: ScheduleChoice = "auto"
    micro_batches: int | None = None
    remat: Remat = "auto"
    max_step_s: float | None = None
    max_workers: int | None = None
    pins: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    forbid: tuple[tuple[str, str], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    apart: tuple[tuple[str, ...], ...] = ()
    only: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    rematerialise: Mapping[str, RematRule] = field(default_factory=lambda: _NOTHING)
    memory: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    reserve: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    prices: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    solver: SolverName = "highs"
    gap: float = 0.01
    time_limit: float = 60.0
    seed: int = 0
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("objective", get_args(Objective)), ("schedule", get_args(ScheduleChoice)), ("remat", get_args(Remat)),
            ("solver", get_args(SolverName)),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name}: {value!r} is not allowed; expected {' or '.join(allowed)}")
        for name, most in (
            ("micro_batches", MOST_MICRO_BATCHES),
            ("batch_size", MOST_ROWS),
            ("max_workers", MOST_RANKS),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value <= most):
                raise UsageError(f"{name}: {shown(value)} is not allowed; expected a whole number, 1 to {most}")
        if self.max_step_s is not None and not 0 < self.max_step_s < math.inf:
            raise UsageError(f"max_step_s: {self.max_step_s!r} is not allowed; expected seconds, more than 0")
        if self.max_step_s is not None and self.objective != "cost":
            raise UsageError("max_step_s goes with objective cost", hint="--objective cost --max-step 0.5")
        for rule in self.rematerialise.values():
            if rule not in get_args(RematRule):
                raise UsageError(f"rematerialise: {rule!r} is not allowed; expected never or always")
        for name, unit in (("memory", "bytes"), ("reserve", "bytes"), ("prices", "money per hour")):
            if not all(0 <= value < math.inf for value in getattr(self, name).values()):
                raise UsageError(f"{name}: expected {unit}, 0 or more")
        self._check_search()

    def _check_search(self) -> None:
        if not 0 <= self.gap < 1:
            raise UsageError(f"gap: {self.gap!r} is not allowed; expected a share, 0 or more and below 1")
        if not 0 < self.time_limit < math.inf:
            raise UsageError(f"time limit: {self.time_limit!r} is not allowed; expected seconds, more than 0")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise UsageError(f"seed: {self.seed!r} is not allowed; expected a whole number, 0 to 2147483647")

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
        offered = tuple(count for count in divisors(batch) if count <= MOST_MICRO_BATCHES)
        return tuple(count for count in offered if cost.is_plausible(batch // count)) or offered

    def searches(self, plan: Plan) -> bool:
        """True if a plan is of those that are searched, which a bound is about: one stage a worker, or interleaved."""
        kind = plan.schedule if len(plan.stages) == len(plan.workers) else "interleaved"
        return kind == self.schedule or (self.schedule == "auto" and kind != "interleaved")

    def record(self) -> dict[str, Any]:
        """The settings as they are stored in a plan."""
        return {
            "objective": self.objective, "schedule": self.schedule, "micro_batches": self.micro_batches or "auto",
            "remat": self.remat, "max_step_s": self.max_step_s, "max_workers": self.max_workers,
            "pins": dict(self.pins), "forbid": [list(pair) for pair in self.forbid], "memory": dict(self.memory),
            "together": [list(names) for names in self.together],
            "apart": [list(names) for names in self.apart], "only": list(self.only),
            "order": list(self.order),
            "rematerialise": dict(self.rematerialise), "reserve": dict(self.reserve),
            "prices": dict(self.prices), "solver": self.solver,
            "gap": self.gap, "time_limit": self.time_limit, "seed": self.seed, "batch_size": self.batch_size,
        }  # fmt: skip


def divisors(number: int) -> tuple[int, ...]:
    """All whole numbers that divide `number`, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
