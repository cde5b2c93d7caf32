"""What the user asks of a search: objective, choices, hints and limits, as one frozen value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from assigner.errors import UsageError
from assigner.formats.fineness import cut_into
from assigner.formats.terms import MOST_MICRO_BATCHES, MOST_ROWS, Objective
from assigner.location import MOST_RANKS
from assigner.settings import (
    BYTES,
    EACH,
    GROUPS,
    MONEY,
    NAMES,
    SECONDS,
    SHARE,
    Flag,
    capacity,
    check,
    count_or,
    declared,
    money,
    one_of,
    pair_list,
    pairs,
    recorded,
    rule,
    whole,
)

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.schedule.cost import CostModel

Remat = Literal["auto", "never", "always"]
RematRule = Literal["never", "always"]
SolverName = Literal["highs", "cbc"]
ScheduleChoice = Literal["auto", "gpipe", "1f1b", "one-stage", "interleaved", "listed"]

GOAL, PLAN, HINTS, SEARCH = "What is made small", "What the plan may be", "Hints", "The search"
"""The headings of the flags."""

USUAL_GAP = 0.01
_FAR_APART = 3
"""Smaller than most measurements are exact; dynamic programs prove it in a second."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """What the user asks of `solve`.

    Args:
        objective: What is made small: "step" (seconds of one step), "throughput" (seconds of a batch in the steady
            state: M times the slowest worker or link), "latency" (seconds of one forward of one micro-batch), "cost"
            (money per sample, with `max_step_s`).
        max_step_s: With objective "cost": no plan whose step takes longer, in seconds.
        prices: Worker, kind or host to money per hour, instead of the profile's; of several that match, the last.
        schedule: "auto" takes what is best of all that the runtime executes; "one-stage" of gpipe and 1f1b, which have
            one stage a worker and are proven; "listed" solves for the order of each worker's actions, whatever a named
            schedule would gain.
        micro_batches: How many micro-batches a step has; None: the best of `counts`.
        batch_size: Samples in a step; None: the profile's.
        remat: "auto" rematerialises where that helps, "never" nothing, "always" every partition.
        max_workers: No plan with more workers.
        max_replicas: How many workers may share a stage, each with whole micro-batches of its own; 1: every stage has
            one worker; None: any number, where the objective and the schedule have a use for it.
        pins: Partition to the worker, `worker:N`, kind or host that it must be on, beyond the profile's own pins; where
            several workers share it, each of them must be.
        forbid: (partition, worker): it is not on that worker, `worker:N`, kind or host.
        together: Groups of partitions; those of one share a worker.
        apart: Groups of partitions; no two of one share a worker.
        rematerialise: Partitions that must never, or always, run their forward twice.
        only: The workers, kinds or hosts that may be used; empty: all.
        order: The workers that may be used, in the order in which the stages must follow; empty: any.
        memory: Worker, kind or host to bytes; a plan holds no more than that on one, whatever memory it has.
        reserve: Worker, kind or host to bytes of its memory that are left free, instead of the profile's reserve.
        solver: The ILP solver.
        gap: Stop when the plan is proven to be within this share of the best one of those that are searched, which
            have one stage a worker unless the schedule is interleaved: 0 or more, below 1. None: at `USUAL_GAP`, and
            then on to 0 by the integer program where that is small enough to take seconds.
        time_limit: Seconds after which the best plan so far is the answer.
        seed: Of the ILP solver; the same input and seed give the same plan unless time runs short.

    Names of partitions may be patterns: `block.*` is every partition whose name matches.

    Raises:
        UsageError: a value that cannot be used; the message names it.
    """

    # fmt: off
    objective: Annotated[Objective, Flag(help="What to make small.", panel=GOAL)] = "step"
    max_step_s: Annotated[
        float | None,
        Flag(
            help="With cost: no step that takes longer.",
            panel=GOAL, flag="--max-step", metavar="SECONDS", allowed=SECONDS,
        ),
    ] = None
    prices: Annotated[
        Mapping[str, float],
        Flag(
            help="Per hour, of a worker, kind or host.", panel=GOAL, flag="--price", metavar="WORKER=MONEY",
            form=pairs("worker:0=2.5", money), completes="amounts", allowed=MONEY,
        ),
    ] = field(default_factory=lambda: _NOTHING)
    schedule: Annotated[ScheduleChoice, Flag(help="Order of the actions.", panel=PLAN)] = "auto"
    micro_batches: Annotated[
        int | None,
        Flag(
            help="Micro-batches in a step.", panel=PLAN, metavar="auto|N", form=count_or("auto", MOST_MICRO_BATCHES),
            unset="auto", allowed=whole(1, MOST_MICRO_BATCHES),
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        Flag(
            help="Samples in a step; else the profile's.", panel=PLAN, metavar="N", allowed=whole(1, MOST_ROWS)
        ),
    ] = None
    remat: Annotated[Remat, Flag(help="Rematerialise partitions.", panel=PLAN)] = "auto"
    max_workers: Annotated[
        int | None,
        Flag(help="Use no more workers than this.", panel=PLAN, metavar="N", allowed=whole(1, MOST_RANKS)),
    ] = None
    max_replicas: Annotated[
        int | None,
        Flag(
            help="Let no more workers share a stage.", panel=PLAN, metavar="all|N", form=count_or("all", MOST_RANKS),
            unset="all", allowed=whole(1, MOST_RANKS),
        ),
    ] = None
    pins: Annotated[
        Mapping[str, str],
        Flag(
            help="Keep a partition on a worker, kind or host.", panel=HINTS, flag="--pin", metavar="PART=WORKER",
            form=pairs("embed=worker:0"), completes="pins",
        ),
    ] = field(default_factory=lambda: _NOTHING)
    forbid: Annotated[
        tuple[tuple[str, str], ...],
        Flag(
            help="Keep a partition off a worker, kind or host.", panel=HINTS, metavar="PART=WORKER",
            form=pair_list("embed=worker:0"), completes="pins",
        ),
    ] = ()
    together: Annotated[
        tuple[tuple[str, ...], ...],
        Flag(
            help="Keep partitions on one worker.", panel=HINTS, metavar="PART,PART", form=GROUPS,
            completes="partitions",
        ),
    ] = ()
    apart: Annotated[
        tuple[tuple[str, ...], ...],
        Flag(
            help="Keep partitions on different workers.", panel=HINTS, metavar="PART,PART", form=GROUPS,
            completes="partitions",
        ),
    ] = ()
    rematerialise: Annotated[
        Mapping[str, RematRule],
        Flag(
            help="Never run its forward twice.", panel=HINTS, flag="--never-remat", metavar="PART",
            form=rule("never"), completes="partitions", allowed=one_of(*get_args(RematRule)),
        ),
        Flag(
            help="Always rematerialise it.", panel=HINTS, flag="--always-remat", metavar="PART",
            form=rule("always"), completes="partitions",
        ),
    ] = field(default_factory=lambda: _NOTHING)
    only: Annotated[
        tuple[str, ...],
        Flag(
            help="Use only these workers, kinds or hosts.", panel=HINTS, metavar="WORKER", form=EACH,
            completes="workers",
        ),
    ] = ()
    order: Annotated[
        tuple[str, ...],
        Flag(
            help="Stages follow these workers, or `ranks`.", panel=HINTS, metavar="WORKER,...", form=NAMES,
            completes="workers",
        ),
    ] = ()
    memory: Annotated[
        Mapping[str, float],
        Flag(
            help="Hold no more than this there, as 2GiB.", panel=HINTS, metavar="WORKER=SIZE",
            form=pairs("worker:0=2GiB", capacity), completes="amounts", allowed=BYTES,
        ),
    ] = field(default_factory=lambda: _NOTHING)
    reserve: Annotated[
        Mapping[str, float],
        Flag(
            help="Leave this free, not the profile's reserve.", panel=HINTS, metavar="WORKER=SIZE",
            form=pairs("worker:0=2GiB", capacity), completes="amounts", allowed=BYTES,
        ),
    ] = field(default_factory=lambda: _NOTHING)
    solver: Annotated[SolverName, Flag(help="The ILP solver.", panel=SEARCH)] = "highs"
    gap: Annotated[
        float | None,
        Flag(
            help="Stop when optimal to within this share. Without it: 0.01, then on to 0 where that takes seconds.",
            panel=SEARCH, allowed=SHARE, unset="auto",
        ),
    ] = None
    time_limit: Annotated[
        float, Flag(help="Stop with the best plan found.", panel=SEARCH, metavar="SECONDS", allowed=SECONDS),
    ] = 60.0
    seed: Annotated[int, Flag(help="Of the solver.", panel=SEARCH, allowed=whole(0, 2**31 - 1))] = 0
    # fmt: on

    def __post_init__(self) -> None:
        check(self)
        if self.max_step_s is not None and self.objective != "cost":
            raise UsageError("max_step_s goes with objective cost", hint="--objective cost --max-step 0.5")

    @property
    def stop_gap(self) -> float:
        """The share at which the search may stop."""
        return USUAL_GAP if self.gap is None else self.gap

    @property
    def hinted(self) -> bool:
        """Whether plans are left out by a hint, by the most workers, or by what must or must not be rematerialised."""
        return any(
            getattr(self, each.field) != each.default
            for each in declared(SolveOptions)
            if each.about.panel == HINTS or each.field in ("max_workers", "remat")
        )

    @property
    def shares(self) -> bool:
        """Whether workers may share a stage.

        A latency gains nothing by it, and interleaved has no such plans. In a throughput the sum of gradients, once a
        step, has no price, however slow the wire: there it has to be asked for.
        """
        if self.objective == "throughput" and self.max_replicas is None:
            return False
        return self.max_replicas != 1 and self.objective != "latency" and self.schedule != "interleaved"

    def batch(self, profile: Profile) -> int:
        """Samples in a step."""
        return self.batch_size or profile.workload.batch_size

    def counts(self, cost: CostModel) -> tuple[int, ...]:
        """The micro-batch counts to choose from: the one asked for, or every divisor of the batch size that is allowed.

        Where divisors lie far apart, as those of a prime number, some in between: micro-batches differ by a row then,
        and are priced as the largest of them. Those of `left_out` are not among them.
        """
        left_out = self.left_out(cost)
        return tuple(count for count in self._offered(cost) if count not in left_out)

    def left_out(self, cost: CostModel) -> tuple[int, ...]:
        """The counts that no plan is looked for with, for their sizes lie below the smallest measured one.

        There the line through noisy measurements promises what no machine does (`CostModel.is_plausible`). None where
        one count is asked for, or where all would be left out.
        """
        offered, batch = self._offered(cost), self.batch(cost.profile)
        found = tuple(count for count in offered if not cost.is_plausible(samples_in_each(batch, count)))
        return () if len(found) == len(offered) else found

    def _offered(self, cost: CostModel) -> tuple[int, ...]:
        if self.micro_batches is not None:
            return (self.micro_batches,)
        batch = self.batch(cost.profile)
        most = min(MOST_MICRO_BATCHES, cost.profile.workload.fineness.most(batch))
        return tuple(count for count in _near_divisors(batch) if count <= most)

    def searches(self, plan: Plan) -> bool:
        """True if a plan is of those that are searched, which a bound is about: one stage a worker, or interleaved."""
        kind = "interleaved" if plan.is_looped else plan.schedule
        if self.max_replicas is not None and max(len(stage.workers) for stage in plan.stages) > self.max_replicas:
            return False
        return kind == self.schedule or (self.schedule in ("auto", "one-stage") and kind in ("gpipe", "1f1b"))

    def record(self) -> dict[str, Any]:
        """The settings as they are stored in a plan."""
        return recorded(self)


def samples_in_each(batch: int, count: int) -> int:
    """The most samples in one of so many micro-batches; they differ by one at most."""
    return -(-batch // count)


def _near_divisors(batch: int) -> tuple[int, ...]:
    """The divisors, and between two of which one is more than three times the other, doublings of the lower one."""
    found = divisors(batch)
    between = set[int]()
    for low, high in itertools.pairwise(found):
        count = 2 * low if high > _FAR_APART * low else high
        while count < high:
            between.add(cut_into(batch, count))
            count *= 2
    return tuple(sorted({*found, *between}))


def divisors(number: int) -> tuple[int, ...]:
    """All whole numbers that divide `number`, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
