"""Random plans of every schedule, over random chains and graphs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from brute_force import random_instance
from builders import make_plan

from assigner.formats.profile import Wire, WireLink
from assigner.formats.stage import Replica, Stage

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Measurement, Profile


def whole_numbers(profile: Profile) -> Profile:
    """The same with every compute time rounded to whole milliseconds, so that actions end at the same moment."""

    def rounded(each: Measurement) -> Measurement:
        times = (round(1e3 * t / each.micro_batch) * 1e-3 * each.micro_batch for t in (each.forward_s, each.backward_s))
        return replace(each, **dict(zip(("forward_s", "backward_s"), times, strict=True)))

    return replace(profile, measurements=tuple(map(rounded, profile.measurements)))


def drawn(seed: int, schedule: str) -> tuple[Profile, Plan]:
    """A chain or a branched graph on unlike workers, cut anywhere, some of it rematerialised."""
    rng = random.Random(f"{schedule} {seed}")
    profile = random_instance(
        seed, partitions=8, workers=4, busy=seed % 3 > 0, graph=seed % 2 > 0, late_updates=seed % 5 == 0, batch=16
    )
    if seed % 4 == 0:
        profile = whole_numbers(profile)
    cuts = sorted(rng.sample(range(1, 8), rng.randint(0, 3) if schedule == "1f1b" else rng.randint(0, 7)))
    order = rng.sample(range(4), 4)
    stages = [(order[n % 4], profile.order[a:b]) for n, (a, b) in enumerate(itertools.pairwise([0, *cuts, 8]))]
    plan = replace(make_plan(profile, stages, micro_batches=rng.choice([4, 16])), schedule=schedule)
    deep = schedule == "1f1b" and seed % 2 > 0
    more = sorted((rng.randint(0, 3) for _ in plan.stages), reverse=True)  # a deeper later stage waits for ever
    return profile, replace(
        plan,
        stages=tuple(
            replace(
                each,
                rematerialise=tuple(name for name in each.partitions if rng.random() < 0.3),
                in_flight=min(plan.micro_batches, len(plan.stages) - n + more[n]) if deep else None,
            )
            for n, each in enumerate(plan.stages)
        ),
    )


def with_wires(profile: Profile, seed: int) -> Profile:
    """The same with links that share two wires, drawn from all that there are."""
    rng = random.Random(f"wires {seed}")
    links = [WireLink(link.source, link.target) for link in profile.links]
    rng.shuffle(links)
    count = rng.randint(2, len(links) - 2) if len(links) > 4 else 2
    parts = [part for part in (links[:count], links[count : count + rng.randint(0, 4)]) if len(part) > 1]
    return replace(profile, wires=tuple(Wire(tuple(part), rng.uniform(1.5, len(part) + 0.5)) for part in parts))


def replicated(profile: Profile, plan: Plan, seed: int) -> tuple[Profile, Plan]:
    """The same plan with some of its stages on several workers, each with micro-batches of its own.

    Under gpipe and interleaved on any workers, those that hold other stages among them; under 1f1b, which has one stage
    a worker, on those that are left over, and on a stage's neighbour's after the two are merged.
    """
    rng = random.Random(f"replicas {plan.schedule} {seed}")
    names = [worker.name for worker in profile.workers]
    stages = list(plan.stages)
    if plan.schedule == "1f1b":
        while len(stages) > 2 or (len(stages) == len(names)):
            first, second = stages[:2]
            both = replace(
                first, partitions=first.partitions + second.partitions,
                rematerialise=first.rematerialise + second.rematerialise,
            )  # fmt: skip
            stages = [both, *stages[2:]]
        used = {stage.sole_worker for stage in stages}
        left = [name for name in names if name not in used]
        sets = [[stage.worker] for stage in stages]
        for name in left:
            rng.choice(sets).append(name)
    else:
        sets = [rng.sample(names, rng.randint(2, 4)) if rng.random() < 0.6 else [stage.worker] for stage in stages]
        if seed % 5 == 0:
            sets = [names] * len(stages)  # data parallelism

    def on(stage: Stage, workers: list[str]) -> Stage:
        if len(workers) == 1:
            return stage
        cuts = sorted(rng.sample(range(1, plan.micro_batches), len(workers) - 1))
        counts = [b - a for a, b in itertools.pairwise([0, *cuts, plan.micro_batches])]
        shares = tuple(itertools.starmap(Replica, zip(workers, counts, strict=True)))
        return replace(stage, sole_worker=None, replicas=shares)

    return profile, replace(plan, stages=tuple(itertools.starmap(on, zip(stages, sets, strict=True))))
