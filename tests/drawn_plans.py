"""Random plans of every schedule, over random chains and graphs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from brute_force import random_instance
from builders import make_plan

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
