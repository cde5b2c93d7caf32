"""Every placement there is, priced by the simulator: what a solver must equal on instances this small."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from assigner.errors import FormatError
from assigner.formats.plan import Plan
from assigner.formats.profile import (
    Edge,
    Link,
    LinkPoint,
    Measurement,
    Partition,
    Profile,
    Tie,
    Worker,
    WorkloadReference,
)
from assigner.formats.stage import Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import objective_value
from assigner.schedule.program import build_program
from assigner.schedule.simulate import run_program
from assigner.solver.problem.options import divisors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def best_plan(
    profile: Profile, *, remat: str = "auto", micro_batches: int | None = None, pins: dict[str, str] | None = None,
    schedules: Sequence[str] = ("gpipe",), objective: str = "step", within: float = math.inf,
    rules: Mapping[str, str] = MappingProxyType({}), keeps: Callable[[Plan], bool] = lambda _: True,
) -> tuple[float, Plan] | None:  # fmt: skip
    """The least value over all plans with one stage a worker, with such a plan; None: there is none.

    Args:
        profile: The measurements.
        remat: As in the options.
        micro_batches: As in the options.
        pins: As in the options.
        schedules: Those to choose from; of 1f1b, with every warm-up depth.
        objective: As in the options; throughput is counted per batch.
        within: No longer step than this.
        rules: Partitions that "never" or "always" run twice.
        keeps: Says which plans heed the hints.
    """
    cost = CostModel(profile)
    best: tuple[float, Plan] | None = None
    batch = profile.workload.batch_size
    for count in divisors(batch) if micro_batches is None else (micro_batches,):
        for split, schedule in itertools.product(_splits(profile, pins or {}), schedules):
            for stages in _remats(cost, split, count, batch // count, remat, rules, deep=schedule == "1f1b"):
                plan = Plan(
                    workload=profile.workload, schedule=schedule, micro_batches=count, micro_batch_size=batch // count,
                    stages=stages,
                )  # fmt: skip
                if not keeps(plan):
                    continue
                try:
                    step = run_program(build_program(plan, profile.edges, profile.ties), cost).step_s
                except FormatError:
                    continue
                value = objective_value(plan, objective, cost, step_s=step)
                if step <= within and (best is None or value < best[0]):
                    best = value, plan
    return best


def _splits(profile: Profile, pins: dict[str, str]) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """Every ordered choice of workers with every choice of cuts that pins and colocation allow."""
    order, names = profile.order, [worker.name for worker in profile.workers]
    for stages in range(1, min(len(order), len(names)) + 1):
        for cuts in itertools.combinations(range(1, len(order)), stages - 1):
            bounds = (0, *cuts, len(order))
            parts = [order[a:b] for a, b in itertools.pairwise(bounds)]
            if _torn(profile, parts):
                continue
            for workers in itertools.permutations(names, stages):
                split = list(zip(workers, parts, strict=True))
                if all(_allowed(profile, pins, name, worker) for worker, part in split for name in part):
                    yield split


def _torn(profile: Profile, parts: list[tuple[str, ...]]) -> bool:
    where: dict[str, set[int]] = {}
    for n, part in enumerate(parts):
        for name in part:
            label = profile.partition[name].colocate
            if label is not None:
                where.setdefault(label, set()).add(n)
    return any(len(found) > 1 for found in where.values())


def _allowed(profile: Profile, pins: dict[str, str], name: str, worker: str) -> bool:
    found = [pin for pin in (profile.partition[name].pin, pins.get(name)) if pin is not None]
    return all(profile.matches(pin, profile.worker[worker]) for pin in found)


def _remats(
    cost: CostModel,
    split: list[tuple[str, tuple[str, ...]]],
    count: int,
    size: int,
    remat: str,
    rules: Mapping[str, str],
    *,
    deep: bool,
) -> Iterator[tuple[Stage, ...]]:
    """Every choice of what to rematerialise that fits, and of warm-up depths; memory is a matter of one worker."""
    if any(cost.obstacle(name, worker, size) is not None for worker, part in split for name in part):
        return
    choices: list[list[Stage]] = []
    for worker, part in split:
        subsets: Sequence[tuple[str, ...]] = {"never": [()], "always": [part]}.get(remat) or [
            subset
            for k in range(len(part) + 1)
            for subset in itertools.combinations(part, k)
            if all((name in subset) == (rules[name] == "always") for name in part if name in rules)
        ]
        found: list[Stage] = []
        for depth in range(1, count + 1) if deep else (count,):
            fitting: list[tuple[str, ...]] = []
            for subset in subsets:
                if any(set(other) < set(subset) for other in fitting):
                    continue  # the same and more run twice: never faster
                if cost.memory(worker, [(part, subset, depth)], size).total <= (
                    cost.profile.worker[worker].capacity_bytes
                ):
                    fitting.append(subset)
            found += [Stage(worker, part, subset, in_flight=depth if deep else None) for subset in fitting]
        choices.append(found)
    yield from itertools.product(*choices)


def with_shared_values(profile: Profile, seed: int) -> Profile:
    """The same graph where all readers of a partition read one value; half of them send no gradient back."""
    rng = random.Random(f"values {seed}")
    edges = tuple(replace(edge, output=0, gradient=rng.random() < 0.5) for edge in profile.edges)
    return replace(profile, edges=edges)


def random_instance(
    seed: int, *, partitions: int, workers: int, busy: bool = False, tight: bool = False, missing: float = 0.0,
    pins: bool = False, late_updates: bool = False, alike: bool = False, graph: bool = False, batch: int = 4,
) -> Profile:  # fmt: skip
    """A seeded instance in which every price is drawn by itself: links differ by direction, workers by partition.

    Args:
        seed: Of the draw.
        partitions: How many.
        workers: How many.
        busy: Links keep their ends busy.
        tight: About half of the model fits on a worker without rematerialising.
        missing: Share of the directed links that are missing.
        pins: Some partitions are pinned or kept together.
        late_updates: Updates take as long as a whole step, so that the last to end may be any.
        alike: Workers come in pairs that nothing tells apart.
        graph: Skips and branches instead of a chain, some edges without gradient.
        batch: Samples in a step.
    """
    rng = random.Random(seed)
    names = [f"p{i}" for i in range(partitions)]
    kinds = [w // 2 if alike else w for w in range(workers)]
    workers_ = [f"worker:{w}/cpu" for w in range(workers)]
    activation = [rng.uniform(2e5, 2e6) for _ in names]
    whole = sum(activation) * batch + partitions * 2e6
    capacity = {kind: whole * rng.uniform(0.35, 0.8) if tight else 1e12 for kind in sorted(set(kinds))}
    speed = {kind: rng.choice([1.0, 1.5, 3.0]) for kind in sorted(set(kinds))}
    price = {
        (i, kind): (
            rng.uniform(1e-3, 9e-3) * speed[kind], rng.uniform(2e-3, 2e-2) * speed[kind],
            rng.uniform(0, 0.1 if late_updates else 1e-3),
        )
        for i in range(partitions) for kind in speed
    }  # fmt: skip
    sweep = {
        (a, b): (
            tuple(LinkPoint(s, rng.uniform(1e-4, 1e-3) + s / rng.choice([1e8, 3e8, 1e9])) for s in (1e3, 1e6)),
            rng.choice([0.0, 0.3, 1.0]) if busy else 0.0,
            rng.choice([0.0, 0.5, 1.0]) if busy else 0.0,
        )
        for a in sorted(set(kinds)) for b in sorted(set(kinds))
    }  # fmt: skip
    edges = [(i, i + 1) for i in range(partitions - 1)]
    if graph:
        edges = [edge for edge in edges if rng.random() < 0.8]
        edges += [
            pair for pair in itertools.combinations(range(partitions), 2) if pair not in edges and rng.random() < 0.25
        ]
    pin, colocate = dict.fromkeys(names), dict.fromkeys(names)
    if pins:
        pin[rng.choice(names)] = rng.choice([*workers_, "worker:0", f"host{kinds[-1]}", "kind0"])
        start = rng.randrange(partitions - 1)
        colocate[names[start]] = colocate[names[min(partitions - 1, start + rng.choice([1, 2]))]] = "together"
    weight = rng.uniform(2e4, 4e5)
    return Profile(
        workload=WorkloadReference("tiny", "tiny.py:workload", "sha256:00", batch, "float32", "SGD"),
        workers=tuple(
            Worker(name, f"kind{kind}", f"host{kind}", "cpu", capacity[kind])
            for name, kind in zip(workers_, kinds, strict=True)
        ),
        links=tuple(
            Link(workers_[u], workers_[v], *_link(sweep[kinds[u], kinds[v]]))
            for u in range(workers) for v in range(workers) if u != v and rng.random() >= missing
        ),
        partitions=tuple(
            Partition(name, name, 5e5, 5e5, 1e6, pin=pin[name], colocate=colocate[name]) for name in names
        ),
        edges=tuple(
            Edge(names[i], names[j], weight * (1 + i % 3), gradient=not (graph and rng.random() < 0.15))
            if not graph else Edge(names[i], names[j], weight, output=j, gradient=rng.random() > 0.15)
            for i, j in edges
        ),
        ties=(Tie("shared", (names[0], names[-1]), 4e5),) if graph and rng.random() < 0.3 else (),
        measurements=tuple(
            Measurement(
                names[i], workers_[w], size, size * price[i, kinds[w]][0], size * price[i, kinds[w]][1],
                price[i, kinds[w]][2], activation[i] * size, 1e5,
            )
            for i in range(partitions) for w in range(workers) for size in (1, 4)
        ),
    )  # fmt: skip


def _link(price: tuple[tuple[LinkPoint, ...], float, float]) -> tuple[Any, ...]:
    points, sender, receiver = price
    return points, "gloo", sender, receiver, 0.0, 2e-4 * sender, 1e-4 * receiver  # and seconds for any message
