"""Orders found by list scheduling beside those of others, at equal memory.

The zero-bubble authors' own examples (8 stages, 32 micro-batches, one with unequal costs and memory; 4 and 32 stages):
the figures stand in `auto_schedule.py` of sail-sg/zero-bubble-pipeline-parallelism (branch legacy-main), under
`__main__`. Of each: 1F1B, and ours in its memory with whole backwards; ZB-H1, the handcrafted order of Qi et al., Zero
Bubble Pipeline Parallelism (ICLR 2024), and ours in its memory with backwards in two parts; and ours in the memory that
their example gives. Memory counts what an input part frees until it has run, as our simulator does; their program does
not, so there it gives us a little less than them.

    python benchmarks/solver/orders.py
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from assigner.formats.plan import Plan
from assigner.formats.profile import (
    Edge,
    Link,
    LinkPoint,
    Measurement,
    Partition,
    Profile,
    Worker,
    WorkloadReference,
)
from assigner.formats.stage import Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.orders import order_of
from assigner.solver.orders.improving import best_orders
from assigner.solver.orders.listing import zero_bubble
from assigner.solver.orders.tasks import PlacedTasks

SCALE = 1e-6
"""Their units are taken as microseconds; of memory, as megabytes."""


@dataclass(frozen=True)
class Example:
    """One of their calls.

    Args:
        name: What it is.
        micro_batches: M.
        forward, backward, weight: Of each stage, in their units.
        message: The same of one message.
        kept: Memory of a forward, and what its backward's two parts free of that.
        most: What a stage may keep.
    """

    name: str
    micro_batches: int
    forward: list[float]
    backward: list[float]
    weight: list[float]
    message: float
    kept: list[tuple[float, float, float]]
    most: list[float]


def alike(stages: int, micro_batches: int, times: tuple[float, float, float], message: float, most: float) -> Example:
    """Stages that all take the same, and keep 2, of which each part of a backward frees 1."""
    f, b, w = times
    return Example(
        f"{stages} stages, {micro_batches} micro-batches, F B W = {f:g} {b:g} {w:g}", micro_batches, [f] * stages,
        [b] * stages, [w] * stages, message, [(2, 1, 1)] * stages, [most] * stages,
    )  # fmt: skip


EXAMPLES = (
    alike(4, 12, (5, 6, 4), 0, 10),
    alike(4, 12, (5, 6, 4), 0, 14),
    alike(4, 12, (5478, 5806, 3534), 200, 32),
    alike(32, 16, (1, 1, 1), 0, 64),
    Example(
        "8 unequal stages, 32 micro-batches", 32,
        [30715, 29233, 29106, 29078, 28850, 28919, 28924, 41678],
        [31308, 29344, 29357, 29455, 29217, 29384, 29354, 38731],
        [18746, 18789, 19062, 19367, 19455, 19967, 20096, 32833],
        473, [(943, 533, 410), *[(1240, 688, 552)] * 6, (1071, 588, 483)], [1240 * 16] * 8,
    ),
    Example(
        "8 equal stages, 32 micro-batches", 32, [29850] * 8, [29767] * 8, [18868] * 8, 466, [(3720, 2048, 1672)] * 8,
        [3720 * 16] * 8,
    ),
)  # fmt: skip


def profile_of(example: Example, most: list[float]) -> Profile:
    """One partition a stage, one worker each, which may keep `most` beside the part that runs."""
    count = len(example.forward)
    names = [f"s{i}" for i in range(count)]
    workers = [f"worker:{i}/cpu" for i in range(count)]
    points = (LinkPoint(1.0, example.message * SCALE, 5, 0.0),)
    return Profile(
        workload=WorkloadReference("pipe", "pipe.py:workload", "sha256:00", example.micro_batches, "float32", "SGD"),
        workers=tuple(
            Worker(worker, f"kind{i}", "host", "cpu", most[i] * 1e6 + 10)
            for i, worker in enumerate(workers)
        ),
        links=tuple(
            Link(workers[a], workers[b], points, "gloo", 0.0, 0.0)
            for i in range(count - 1)
            for a, b in ((i, i + 1), (i + 1, i))
        ),
        partitions=tuple(Partition(name, name, 0, 0, 0) for name in names),
        edges=tuple(Edge(names[i], names[i + 1], 1.0) for i in range(count - 1)),
        measurements=tuple(
            Measurement(
                names[i], workers[i], 1, example.forward[i] * SCALE, (example.backward[i] + example.weight[i]) * SCALE,
                0.0, example.kept[i][0] * 1e6, 0.0, 5, 0.0, backward_input_s=example.backward[i] * SCALE,
                backward_weight_s=example.weight[i] * SCALE, waiting_bytes=example.kept[i][2] * 1e6,
            )
            for i in range(count)
        ),
    )  # fmt: skip


def plan_of(profile: Profile) -> Plan:
    """Each partition a stage on its own worker."""
    stages = tuple(Stage(f"worker:{i}/cpu", (name,)) for i, name in enumerate(profile.order))
    return Plan(
        workload=profile.workload, schedule="1f1b", micro_batches=profile.workload.batch_size, micro_batch_size=1,
        stages=stages,
    )  # fmt: skip


def ours(example: Example, most: list[float], *, split: bool) -> tuple[float, float]:
    """The step found, in their units, and CPU seconds that it took."""
    profile = profile_of(example, most)
    tasks = PlacedTasks(plan_of(profile), CostModel(profile), split=split)
    begun = time.process_time()
    found = best_orders(tasks, most=600_000)
    assert found is not None, example.name
    assert tasks.fits(found.orders)
    return found.step_s / SCALE, time.process_time() - begun


def loops() -> None:
    """Two stages a rank, F = I = W = 1: torch's Interleaved1F1B, and ours in its memory."""
    print("| ranks | micro-batches | least work | Interleaved1F1B | ours in its memory | in two parts | CPU s |")
    print("| --- |" + " --- |" * 6)
    for ranks, count in ((4, 8), (4, 16), (8, 32)):
        example = alike(2 * ranks, count, (1, 1, 1), 0, 1e6)
        profile = profile_of(example, example.most)
        links = tuple(
            replace(profile.links[0], source=f"worker:{a}/cpu", target=f"worker:{b}/cpu")
            for a in range(ranks)
            for b in range(ranks)
            if a != b
        )
        workers = profile.workers[:ranks]
        measured = tuple(replace(point, worker=workers[n % ranks].name) for n, point in enumerate(profile.measurements))
        profile = replace(profile, links=links, workers=workers, measurements=measured)
        stages = tuple(Stage(workers[n % ranks].name, (name,)) for n, name in enumerate(profile.order))
        plan = replace(plan_of(profile_of(example, example.most)), schedule="interleaved-1f1b", stages=stages)
        tasks = PlacedTasks(plan, CostModel(profile))
        theirs = tasks.of_steps([order_of(plan, worker) for worker in plan.workers])
        step = tasks.step_s(theirs) / SCALE
        most = [tasks.peak(order) + 10 for order in theirs]
        tight = replace(profile, workers=tuple(replace(each, memory_bytes=most[n]) for n, each in enumerate(workers)))
        begun, cells = time.process_time(), []
        for split in (False, True):
            mine = PlacedTasks(plan, CostModel(tight), split=split)
            found = best_orders(mine, [] if split else [theirs], most=600_000)
            assert found is not None
            assert split or found.step_s <= step * SCALE * (1 + 1e-9)
            cells.append(f"{found.step_s / SCALE:,.0f}")
        spent = time.process_time() - begun
        print(f"| {ranks} | {count} | {2 * count * 3} | {step:,.0f} | {' | '.join(cells)} | {spent:.1f} |", flush=True)


def main() -> None:
    """Print one row for each example."""
    print(
        "| example | least work | 1F1B | ours in its memory | ZB-H1 | ours in its memory |"
        " in the example's memory: ours, whole | in two parts | CPU s |"
    )
    print("| --- |" + " --- |" * 8)
    for example in EXAMPLES:
        stages, count = len(example.forward), example.micro_batches
        profile = profile_of(example, [1e9] * stages)
        plan, cost = plan_of(profile), CostModel(profile)
        whole, parts = PlacedTasks(plan, cost), PlacedTasks(plan, cost, split=True)
        ranks = whole.of_steps([order_of(replace(plan, schedule="1f1b"), worker) for worker in plan.workers])
        one, one_held = whole.step_s(ranks) / SCALE, [whole.peak(order) / 1e6 for order in ranks]
        ranks = zero_bubble(parts) or []
        zero, zero_held = parts.step_s(ranks) / SCALE, [parts.peak(order) / 1e6 for order in ranks]
        beside_one, a = ours(example, one_held, split=False)
        beside_zero, b = ours(example, zero_held, split=True)
        assert beside_one <= one * (1 + 1e-9)
        assert beside_zero <= zero * (1 + 1e-9)
        theirs, c = ours(example, example.most, split=False)
        theirs_in_parts, d = ours(example, example.most, split=True)
        work = max(
            count * (f + b + w) for f, b, w in zip(example.forward, example.backward, example.weight, strict=True)
        )
        cells = (work, one, beside_one, zero, beside_zero, theirs, theirs_in_parts)
        print(f"| {example.name} | {' | '.join(f'{each:,.0f}' for each in cells)} | {a + b + c + d:.1f} |", flush=True)


if __name__ == "__main__":
    main()
    print()
    loops()
