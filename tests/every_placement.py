"""Every placement of a small instance, written plainly: each partition on each worker, each way to form stages, each
choice of what to rematerialise, priced by the simulator. What the solver must equal.

Left out is only what cannot matter: a worker whose work alone takes too long, rows of stages that give every worker the
same stages in the same order as an earlier row, and rematerialising more than is enough for the memory.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import step_s, worker_memory
from assigner.solver.problem.options import divisors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from assigner.formats.profile import Profile

    Row = tuple[tuple[str, tuple[str, ...]], ...]


def best_of_all(
    profile: Profile,
    *,
    schedule: str = "interleaved",
    micro_batches: int | None = None,
    below: float = math.inf,
    pins: Mapping[str, str] | None = None,
    most_workers: int = 99,
) -> tuple[float, Plan] | None:
    """The least step time below `below` and a plan that takes it; None: there is none.

    Args:
        profile: The instance.
        schedule: "interleaved": any number of stages a worker; "gpipe": one.
        micro_batches: None: every divisor of the batch size.
        below: Only plans faster than this, in seconds.
        pins: Beyond the profile's own.
        most_workers: No plan with more.
    """
    cost, best = CostModel(profile), None
    choices = Remats(cost)
    batch = profile.workload.batch_size
    asked = divisors(batch) if micro_batches is None else (micro_batches,)
    for where in assignments(profile, pins or {}):
        counts = [count for count in asked if _load_s(cost, where, count, batch // count) < below]
        if not counts or len(set(where.values())) > most_workers:
            continue
        for row in rows(profile, where, one_stage=schedule == "gpipe"):
            for count in counts:
                for stages in choices.of(row, count, batch // count):
                    plan = Plan(
                        workload=profile.workload, schedule=schedule, micro_batches=count,
                        micro_batch_size=batch // count, stages=stages,
                    )  # fmt: skip
                    try:
                        step = step_s(plan, cost)
                    except FormatError:
                        continue  # no link
                    if step < below:
                        best, below = (step, plan), step
    return best


def assignments(profile: Profile, pins: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Every way to put the partitions on workers that pins and labels allow."""
    homes = [
        [
            worker.name
            for worker in profile.workers
            if all(profile.matches(pin, worker) for pin in (profile.partition[name].pin, pins.get(name)) if pin)
        ]
        for name in profile.order
    ]
    for chosen in itertools.product(*homes):
        where = dict(zip(profile.order, chosen, strict=True))
        if all(_may_pair(profile, where, a, b) for a, b in itertools.combinations(profile.order, 2)):
            yield where


def _may_pair(profile: Profile, where: Mapping[str, str], a: str, b: str) -> bool:
    one, other = profile.partition[a], profile.partition[b]
    if one.colocate is not None and one.colocate == other.colocate and where[a] != where[b]:
        return False
    return not (one.apart is not None and one.apart == other.apart and where[a] == where[b])


def _load_s(cost: CostModel, where: Mapping[str, str], count: int, size: int) -> float:
    """Seconds that the busiest worker computes; inf: a partition has no price there."""
    load = dict.fromkeys(where.values(), 0.0)
    for name, worker in where.items():
        if cost.obstacle(name, worker, size) is not None:
            return math.inf
        price = cost.partition(name, worker, size)
        load[worker] += count * (price.forward_s + price.backward_s) + price.update_s
    return max(load.values())


def rows(profile: Profile, where: Mapping[str, str], *, one_stage: bool) -> Iterator[Row]:
    """Every row of stages in topological order, each a set of partitions on one worker."""
    reads: dict[str, set[str]] = {name: set() for name in profile.order}
    for edge in profile.edges:
        reads[edge.target].add(edge.source)
    seen = set()

    def extend(row: Row, done: frozenset[str]) -> Iterator[Row]:
        if len(done) == len(where):
            yield row
        for worker in dict.fromkeys(where.values()):
            left = [name for name in profile.order if where[name] == worker and name not in done]
            if one_stage and any(worker == other for other, _ in row):
                continue
            for size in range(len(left) if one_stage else 1, len(left) + 1):
                for stage in itertools.combinations(left, size):
                    if stage and all(reads[name] <= done | set(stage) for name in stage):
                        yield from extend((*row, (worker, stage)), done | set(stage))

    for row in extend((), frozenset()):
        key = frozenset((worker, tuple(stage for other, stage in row if other == worker)) for worker, _ in row)
        if key not in seen:
            seen.add(key)
            yield row


class Remats:
    """What may be rematerialised on a worker that holds some stages: worked out once for each."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._fitting = cache(self._find)

    def of(self, row: Row, count: int, size: int) -> Iterator[tuple[Stage, ...]]:
        """The row with every choice that fits the memory of each worker and is not more than enough."""
        choices = [
            self._fitting(worker, tuple(stage for other, stage in row if other == worker), count, size)
            for worker in dict.fromkeys(worker for worker, _ in row)
        ]
        for chosen in itertools.product(*choices):
            again = frozenset().union(*chosen)
            yield tuple(Stage(worker, stage, tuple(name for name in stage if name in again)) for worker, stage in row)

    def _find(self, worker: str, stages: tuple[tuple[str, ...], ...], count: int, size: int) -> list[frozenset[str]]:
        held = [name for stage in stages for name in stage]
        fitting: list[frozenset[str]] = []
        for number in range(len(held) + 1):
            for again in map(frozenset, itertools.combinations(held, number)):
                if any(less <= again for less in fitting) or not self._obeys(held, again):
                    continue
                plan = Plan(
                    workload=self._cost.profile.workload, schedule="interleaved", micro_batches=count,
                    micro_batch_size=size,
                    stages=tuple(
                        Stage(worker, stage, tuple(name for name in stage if name in again)) for stage in stages
                    ),
                )  # fmt: skip
                if worker_memory(self._cost, plan, worker).total <= self._cost.profile.worker[worker].capacity_bytes:
                    fitting.append(again)
        return fitting

    def _obeys(self, held: Sequence[str], again: frozenset[str]) -> bool:
        rules = {name: self._cost.profile.partition[name].rematerialise for name in held}
        return not any(rules[name] == ("always" if name not in again else "never") for name in held)
