"""Every plan in which workers may share stages, written plainly: each cut, each set of workers for each stage, each
share of micro-batches, each warm-up depth, each choice of what to rematerialise, priced by the simulator.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.plan import Plan
from assigner.formats.stage import Replica, Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import steady_s
from assigner.schedule.replication import takes
from assigner.schedule.simulate import step_s, worker_memory
from assigner.solver.options import divisors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.formats.profile import Profile


def best_shared(
    profile: Profile, *, schedules: Sequence[str] = ("gpipe", "1f1b"), remat: bool = False, objective: str = "step",
    micro_batches: int | None = None, most_replicas: int = 99, keeps: Callable[[Plan], bool] = lambda _: True,
) -> tuple[float, Plan] | None:  # fmt: skip
    """The least value over all plans in which a worker has one stage and some stages may be shared; None: none fits.

    Args:
        profile: The instance, a chain.
        schedules: Those to choose from; of 1f1b, with every warm-up depth.
        remat: Whether every subset may be rematerialised; else none is.
        objective: "step", or "throughput", counted per batch.
        micro_batches: As in the options.
        most_replicas: No stage has more workers.
        keeps: Says which plans heed the hints.
    """
    cost, batch = CostModel(profile), profile.workload.batch_size
    best: tuple[float, Plan] | None = None
    for count in divisors(batch) if micro_batches is None else (micro_batches,):
        for placed, schedule in itertools.product(_placed(profile, count, most_replicas), schedules):
            for stages in _stages(placed, count, deep=schedule == "1f1b", remat=remat):
                plan = Plan(
                    workload=profile.workload, schedule=schedule, micro_batches=count, micro_batch_size=batch // count,
                    stages=stages,
                )  # fmt: skip
                try:
                    step = step_s(plan, cost)
                except FormatError:
                    continue  # no link, or a stage would wait for ever
                value = step if objective == "step" else count * steady_s(plan, cost)
                if (best is None or value < best[0]) and keeps(plan) and _fits(plan, cost):
                    best = value, plan
    return best


def _fits(plan: Plan, cost: CostModel) -> bool:
    return all(
        worker_memory(cost, plan, worker).total <= cost.profile.worker[worker].capacity_bytes for worker in plan.workers
    )


Placed = tuple[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], ...]


def _placed(profile: Profile, count: int, most: int) -> Iterator[Placed]:
    """Every cut of the order with every choice of workers and shares for each part."""
    order, names = profile.order, [worker.name for worker in profile.workers]
    for number in range(1, min(len(order), len(names)) + 1):
        for cuts in itertools.combinations(range(1, len(order)), number - 1):
            parts = [order[a:b] for a, b in itertools.pairwise((0, *cuts, len(order)))]
            for homes in itertools.product(range(-1, number), repeat=len(names)):
                sets = [[name for name, home in zip(names, homes, strict=True) if home == n] for n in range(number)]
                if all(0 < len(members) <= min(most, count) for members in sets):
                    shares = [[*zip_shares(members, count)] for members in sets]
                    yield from (tuple(zip(parts, chosen, strict=True)) for chosen in itertools.product(*shares))


def zip_shares(members: Sequence[str], count: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Every way to share `count` micro-batches so that each has one or more, and to name them: the first goes first.

    Ways that give each worker the same micro-batches are one.
    """
    seen = set()
    for named in itertools.permutations(members):
        for cuts in itertools.combinations(range(1, count), len(members) - 1):
            shares = [b - a for a, b in itertools.pairwise((0, *cuts, count))]
            takers = tuple(named[n] for n in takes(count, tuple(shares)))
            if takers not in seen:
                seen.add(takers)
                yield tuple(zip(named, shares, strict=True))


def _stages(placed: Placed, count: int, *, deep: bool, remat: bool) -> Iterator[tuple[Stage, ...]]:
    choices = []
    for part, held in placed:
        subsets = itertools.chain.from_iterable(
            itertools.combinations(part, k) for k in range(len(part) + 1 if remat else 1)
        )
        choices.append([
            Stage(
                None if len(held) > 1 else held[0][0], part, subset, in_flight=depth,
                replicas=tuple(Replica(*each) for each in held) if len(held) > 1 else (),
            )
            for subset in subsets for depth in (range(1, count + 1) if deep else (None,))
        ])  # fmt: skip
    yield from itertools.product(*choices)
