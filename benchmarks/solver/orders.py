"""Orders found by list scheduling beside those of others, at equal memory.

The zero-bubble authors' own examples (8 stages, 32 micro-batches, one with unequal costs and memory; 4 and 32 stages):
the figures stand in `auto_schedule.py` of sail-sg/zero-bubble-pipeline-parallelism (branch legacy-main), under
`__main__`. Of each: 1F1B, and ours in its memory with whole backwards; ZB-H1, the handcrafted order of Qi et al., Zero
Bubble Pipeline Parallelism (ICLR 2024), and ours in its memory with backwards in two parts; and ours in the memory that
their example gives. Memory counts what an input part frees until it has run, as our simulator does; their program does
not, so there it gives us a little less than them. With `--theirs auto_schedule.py`, a copy of that file, their own
heuristic runs too: our simulator prices its order, and says what that keeps on each worker, which is what ours may.

The schedules of torch.distributed.pipelining with two stages a rank, as this torch makes them: its DualPipeV of 4 ranks
and 10 micro-batches is the golden one among its tests (`artifacts/dualpipev_4rank_10mb.csv`).

    python benchmarks/solver/orders.py [--theirs FOLDER/auto_schedule.py]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed.pipelining.schedules as peer

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
from assigner.schedule.simulate import step_s, worker_memory
from assigner.solver.orders.listing import zero_bubble
from assigner.solver.orders.search import best_orders, named_orders
from assigner.solver.orders.tasks import SPLIT, PlacedTasks

if TYPE_CHECKING:
    from assigner.solver.orders.search import FoundOrders
    from assigner.solver.orders.tasks import Orders

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


def ours(example: Example, most: list[float], *, split: bool) -> FoundOrders:
    """What is found where stages may keep so much."""
    profile = profile_of(example, most)
    tasks = PlacedTasks(plan_of(profile), CostModel(profile), split=split)
    found = best_orders(tasks, most=600_000)
    assert found is not None, example.name
    assert tasks.fits(found.orders)
    return found


def in_units(found: FoundOrders) -> str:
    """A step in their units, and whether no order takes less."""
    return f"{found.step_s / SCALE:,.0f}{' *' if found.step_s <= found.bound_s * (1 + 1e-9) else ''}"


def heuristic(program: Any, example: Example, tasks: PlacedTasks) -> Orders:
    """The order that the authors' own program gives for their example."""
    config = program.GraphConfig(
        mem_f=[each[0] for each in example.kept], mem_b=[-each[1] for each in example.kept],
        mem_w=[-each[2] for each in example.kept], max_mem=example.most, cost_f=example.forward,
        cost_b=example.backward, cost_w=example.weight, cost_comm=example.message,
    )  # fmt: skip
    stages, count = len(example.forward), example.micro_batches
    _, places, _ = program.do_heuristic_search(stages, count, config)
    steps = [(places[(n * stages + s) * count + m], s, SPLIT[n], m)
             for n in range(3) for s in range(stages) for m in range(count)]  # fmt: skip
    return [[tasks.task(kind, s, m) for _, s, kind, m in sorted(steps) if s == stage] for stage in range(stages)]


def in_file(path: Path) -> Any:
    """Their program."""
    spec = importlib.util.spec_from_file_location("auto_schedule", path)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


PEERS = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SIZES, TIMES = ((4, 8), (4, 10), (4, 16), (8, 32)), ((1, 1, 1), (5, 6, 4))
LETTER = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def peer_plan(name: str, ranks: int, count: int, times: tuple[int, int, int]) -> tuple[Plan, Profile]:
    """A schedule of torch.distributed.pipelining as a listed plan, and what its stages take."""
    example = alike(2 * ranks, count, times, 0, 1e6)
    stages = [SimpleNamespace(group_size=ranks, group_rank=0, num_stages=2 * ranks, is_last=False, submod=None)] * 2
    schedule = getattr(peer, f"Schedule{name}")(stages, count)
    alone = profile_of(example, example.most)
    workers = alone.workers[:ranks]
    homes = [workers[schedule.stage_index_to_group_rank[n]].name for n in range(2 * ranks)]
    orders = {}
    for rank, actions in schedule.pipeline_order.items():
        parts = [part for action in actions if action is not None for part in action.sub_actions or [action]]
        orders[workers[rank].name] = " ".join(
            f"{part.stage_index}{LETTER[part.computation_type.name]}{part.microbatch_index}" for part in parts
        )
    links = tuple(
        replace(alone.links[0], source=a.name, target=b.name) for a, b in itertools.permutations(workers, 2)
    )  # fmt: skip
    measured = tuple(replace(point, worker=homes[n]) for n, point in enumerate(alone.measurements))
    placed = tuple(Stage(homes[n], (partition,)) for n, partition in enumerate(alone.order))
    plan = replace(plan_of(alone), schedule="listed", stages=placed, orders=orders)
    return plan, replace(alone, links=links, workers=workers, measurements=measured)


def peers() -> None:
    """Print torch's schedules with two stages a rank, and ours in the memory of each."""
    print("| schedule | ranks | micro-batches | F I W | least work | its step | ours, whole | in two parts | CPU s |")
    print("| --- |" + " --- |" * 8)
    for name, (ranks, count), times in itertools.product(PEERS, SIZES, TIMES):
        plan, profile = peer_plan(name, ranks, count, times)
        cost, begun = CostModel(profile), time.process_time()
        step = step_s(plan, cost)
        workers = tuple(
            replace(each, memory_bytes=worker_memory(cost, plan, each.name).total) for each in profile.workers
        )
        tight = CostModel(replace(profile, workers=workers))
        rule = replace(plan, schedule="interleaved-1f1b" if name == "Interleaved1F1B" else "interleaved", orders={})
        whole, parts = PlacedTasks(rule, tight), PlacedTasks(rule, tight, split=True)
        starts = [orders for _, orders in named_orders(rule, whole)]  # as `solve` has them
        found = [best_orders(whole, starts, most=600_000), best_orders(parts, most=600_000)]
        assert min(each.step_s for each in found if each) <= step * (1 + 1e-9), (name, ranks, count, times)
        cells = [
            name, ranks, count, " ".join(map(str, times)), f"{2 * count * sum(times):,}", f"{step / SCALE:,.0f}",
            *(in_units(each) if each else "no room" for each in found), f"{time.process_time() - begun:.1f}",
        ]  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    """Print one row for each example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--theirs", type=Path, metavar="auto_schedule.py", help="the zero-bubble authors' program")
    theirs = parser.parse_args().theirs
    columns = ["example", "least work", "1F1B", "ours in its memory", "ZB-H1", "ours in its memory"]
    columns += ["their heuristic", "ours in its memory"] if theirs else []
    columns += ["in the example's memory: ours, whole", "in two parts", "CPU s"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    program = theirs and in_file(theirs)
    for example in EXAMPLES:
        profile = profile_of(example, [1e9] * len(example.forward))
        plan, cost, begun = plan_of(profile), CostModel(profile), time.process_time()
        whole, parts = PlacedTasks(plan, cost), PlacedTasks(plan, cost, split=True)
        others = [(whole, whole.of_steps([order_of(plan, worker) for worker in plan.workers]))]
        others.append((parts, zero_bubble(parts) or []))
        if program:
            others.append((parts, heuristic(program, example, parts)))
        times = zip(example.forward, example.backward, example.weight, strict=True)
        cells = [f"{max(example.micro_batches * sum(each) for each in times):,}"]
        for tasks, orders in others:
            step, held = tasks.step_s(orders), [tasks.peak(order) / 1e6 for order in orders]
            found = ours(example, held, split=tasks.split)
            assert found.step_s <= step * (1 + 1e-9), example.name
            cells += [f"{step / SCALE:,.0f}", in_units(found)]
        cells += [in_units(ours(example, example.most, split=split)) for split in (False, True)]
        print(f"| {example.name} | {' | '.join(cells)} | {time.process_time() - begun:.1f} |", flush=True)


if __name__ == "__main__":
    main()
    print()
    peers()
