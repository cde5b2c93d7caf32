"""Every plan in which workers may share stages, written plainly: each cut, each set of workers for each stage, each
share of micro-batches, each warm-up depth, each choice of what to rematerialise, priced by the simulator.

Left out is only what cannot matter: rematerialising more than is enough for the memory.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.plan import Plan
from assigner.formats.stage import Replica, Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import steady_s
from assigner.schedule.replication import takes
from assigner.schedule.simulate import step_s, worker_memory
from assigner.solver.problem.options import divisors

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
            empty = Plan(
                workload=profile.workload, schedule=schedule, micro_batches=count, micro_batch_size=batch // count,
                stages=tuple(map(_stage, placed)),
            )  # fmt: skip
            for stages in itertools.product(*_choices(empty, cost, remat=remat)):
                plan = replace(empty, stages=stages)
                try:
                    step = step_s(plan, cost)
                except FormatError:
                    continue  # no link, or a stage would wait for ever
                value = step if objective == "step" else count * steady_s(plan, cost)
                if (best is None or value < best[0]) and keeps(plan):
                    best = value, plan
    return best


Held = tuple[tuple[str, ...], tuple[tuple[str, int], ...]]
"""A stage: its partitions, and who has it with how many micro-batches."""

Placed = tuple[Held, ...]


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


def _stage(placed: Held) -> Stage:
    part, held = placed
    if len(held) == 1:
        return Stage(held[0][0], part)
    return Stage(None, part, replicas=tuple(Replica(*each) for each in held))


def _choices(empty: Plan, cost: CostModel, *, remat: bool) -> Iterator[list[Stage]]:
    """Of each stage every warm-up depth with what it may rematerialise: what fits, and of which no part does.

    What a worker holds depends on its own stage alone.
    """
    depths = range(1, empty.micro_batches + 1) if empty.schedule == "1f1b" else (None,)
    for n, stage in enumerate(empty.stages):
        found = []
        for depth in depths:
            fitting: list[tuple[str, ...]] = []
            for number in range(len(stage.partitions) + 1 if remat else 1):
                for subset in itertools.combinations(stage.partitions, number):
                    tried = replace(stage, rematerialise=subset, in_flight=depth)
                    plan = replace(empty, stages=(*empty.stages[:n], tried, *empty.stages[n + 1 :]))
                    if not any(set(less) <= set(subset) for less in fitting) and _fits(plan, cost, stage.workers):
                        fitting.append(subset)
                        found.append(tried)
        yield found


def _fits(plan: Plan, cost: CostModel, workers: Sequence[str]) -> bool:
    return all(worker_memory(cost, plan, name).total <= cost.profile.worker[name].capacity_bytes for name in workers)
