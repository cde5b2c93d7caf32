"""Random ways to run the drawn models: plan, number of micro-batches, schedule, rematerialisation, steps."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from drawn_models import drawn_model
from drawn_orders import with_drawn_order
from kept import kept
from workloads import Reference

from assigner import MarkingError, Pipeline
from assigner.formats.graph import topological_order
from assigner.formats.orders import BACKWARD, INPUT, WEIGHT, ListedStep, written_order
from assigner.formats.plan import Plan
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Replica, Stage
from assigner.formats.terms import RunRemat
from assigner.model.marking import partition_graph
from assigner.model.marking.writing import STORES
from assigner.schedule.orders import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload

MODELS_EVERY = 3
"""So many combinations in a row have one model: to find its partitions takes a second."""
EXACT = 1e-9


@dataclass(frozen=True)
class Combination:
    """One way to run a model.

    Args:
        plan: Who runs what, in how many micro-batches.
        remat: What `Pipeline` is told.
        batches: (rows, update) of each step.
    """

    plan: Plan
    remat: Any
    batches: tuple[tuple[int, bool], ...]

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"  {_shares(each)} {' '.join(each.partitions)}; remat {' '.join(each.rematerialise) or '-'};"
            f" depth {each.in_flight}"
            for each in plan.stages
        ]
        what = f"{plan.schedule}, {plan.micro_batches} micro-batches of {plan.micro_batch_size}, remat={self.remat}"
        listed = [f"  {worker}: {order}" for worker, order in plan.orders.items()]
        return "\n".join([f"{what}, (rows, update) {self.batches}", *lines, *listed])


@kept
def captured(number: int) -> PartitionGraph | MarkingError:
    """The partitions of a drawn model, or why there are none."""
    try:
        return partition_graph(drawn_model(number).workload)
    except MarkingError as error:
        return error


def capture_all(first: str, behind: str) -> None:
    """The partitions of all models that these combinations have."""
    for seed in range(int(first), int(behind), MODELS_EVERY):
        captured(seed // MODELS_EVERY)


def drawn_combination(
    made: Workload, graph: PartitionGraph, seed: int, *, workers: int, orders: bool = False
) -> Combination:
    """The combination of a seed, the same in every process; with `orders` its order is drawn too."""
    rng = random.Random(f"combination {seed} {workers}")
    rows = rng.choice([1, 2, 5, 6, 7, 8, 11, 12])
    size = -(-rows // rng.randint(1, 8))
    micro_batches = -(-rows // size)
    schedule = "interleaved" if orders else rng.choice(["gpipe", "1f1b", "interleaved"])
    stages = list(_stages(graph, rng, schedule, workers=workers, micro_batches=micro_batches))
    if workers > 1 and seed % 2:
        stages = list(_with_replicas(stages, graph, rng, schedule, workers=workers, micro_batches=micro_batches))
    plan = Plan(
        workload=WorkloadReference(made.name, batch_size=rows, fingerprint=graph.fingerprint),
        schedule=schedule, micro_batches=micro_batches, micro_batch_size=size, stages=tuple(stages),
    )  # fmt: skip
    if orders and rng.random() < 0.2:
        plan = replace(plan, schedule="interleaved-1f1b")
    elif orders:
        plan = with_drawn_order(plan, graph.edges, rng)
    steps = rng.randint(2, 3)
    batches = [(rng.choice([rows, rows, 1, 3, 9]) if n else rows, rng.random() < 0.75) for n in range(steps)]
    if seed % 3 == 0:
        plan = in_parts(plan, rng)
        batches = [(min(rows, each), update) for each, update in batches]
    batches[-1] = batches[-1][0], True
    return Combination(plan, rng.choice(get_args(RunRemat)), tuple(batches))


def _stages(
    graph: PartitionGraph, rng: random.Random, schedule: str, *, workers: int, micro_batches: int
) -> Iterator[Stage]:
    """Stages cut from a random topological order; under 1f1b one a worker, of depths that never grow."""
    names = [piece.name for piece in graph.pieces]
    rng.shuffle(names)
    order = topological_order(names, [(edge.source, edge.target) for edge in graph.edges])
    most = workers if schedule == "1f1b" else len(order)
    cuts = sorted(rng.sample(range(1, len(order)), rng.randint(0, min(most, len(order)) - 1)))
    parts = [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(order)])]
    if schedule == "1f1b":
        ranks = rng.sample(range(workers), len(parts))
        depths: list[int | None] = [None] * len(parts)
        if rng.random() < 0.7:
            depths = sorted((rng.randint(1, micro_batches) for _ in parts), reverse=True)
    else:
        ranks = [rng.randrange(workers) for _ in parts]
        depths = [None] * len(parts)
    for rank, part, depth in zip(ranks, parts, depths, strict=True):
        again = tuple(name for name in part if rng.random() < 0.35)
        yield Stage(f"worker:{rank}/cpu", tuple(part), again, depth)


def _with_replicas(
    stages: Sequence[Stage],
    graph: PartitionGraph,
    rng: random.Random,
    schedule: str,
    *,
    workers: int,
    micro_batches: int,
) -> Iterator[Stage]:
    """Some of the stages on several workers, with random shares; those that cannot be shared stay where they are."""
    free = [f"worker:{n}/cpu" for n in range(workers)]
    if schedule == "1f1b":
        free = [worker for worker in free if worker not in {stage.worker for stage in stages}]
    for stage in stages:
        others = [worker for worker in free if worker != stage.worker]
        most = min(len(others), micro_batches - 1)
        if not most or rng.random() < 0.3 or stores(graph, stage.partitions):
            yield stage
            continue
        more = rng.sample(others, rng.randint(1, most))
        if schedule == "1f1b":
            free = [worker for worker in free if worker not in more]
        bounds = sorted(rng.sample(range(1, micro_batches), len(more)))
        shares = [b - a for a, b in itertools.pairwise([0, *bounds, micro_batches])]
        replicas = tuple(map(Replica, [stage.worker, *more], shares))
        yield replace(stage, sole_worker=None, replicas=replicas)


def in_parts(plan: Plan, rng: random.Random) -> Plan:
    """The plan with its orders listed, most backwards in two parts of which the second comes any time later."""
    plan, orders = listed(plan), {}
    for worker, steps in plan.listed.items():
        found: list[ListedStep] = []
        waiting: list[ListedStep] = []
        for stage, letter, m in steps:
            if letter == BACKWARD and rng.random() < 0.8:
                found.append(ListedStep(stage, INPUT, m))
                waiting.append(ListedStep(stage, WEIGHT, m))
            else:
                found.append(ListedStep(stage, letter, m))
            while waiting and rng.random() < 0.4:
                found.append(waiting.pop(rng.randrange(len(waiting))))
        rng.shuffle(waiting)
        orders[worker] = written_order([*found, *waiting])
    return replace(plan, orders=orders)


def stores(graph: PartitionGraph, partitions: Sequence[str]) -> bool:
    """Whether a forward of these changes a buffer or parameter: then several workers cannot share them."""
    return any(node.target in STORES for name in partitions for node in graph.piece[name].graph.nodes)


def _shares(stage: Stage) -> str:
    return " ".join(f"{each.worker} x{each.micro_batches}" for each in stage.replicas) or stage.worker


def differences(made: Workload, graph: PartitionGraph, combination: Combination) -> Iterator[str]:
    """What this rank finds to be other than in the plain model, trained on whole batches; nothing: all is equal."""
    reference = Reference(made)
    with Pipeline(made, combination.plan, remat=combination.remat, graph=graph, timeout_s=60) as pipeline:
        reference.optimizer.zero_grad()
        for n, (rows, update) in enumerate(combination.batches):
            batch = made.make_batch(rows, n)
            expected = reference.loss(batch)
            expected.backward()
            if update:
                reference.optimizer.step()
            loss = pipeline.step(batch, update=update)
            if not abs(loss - expected.item()) <= EXACT * max(1.0, abs(loss)):
                yield f"step {n}: loss {loss!r}, plain {expected.item()!r}"
            plain = dict(reference.model.named_parameters(remove_duplicate=False))
            for name, parameter in pipeline.named_parameters():
                yield from _compare(f"step {n}: gradient of {name}", parameter.grad, plain[name].grad)
            state = reference.model.state_dict()
            for name, tensor in pipeline.state_dict().items():
                yield from _compare(f"step {n}: {name}", tensor.detach(), state[name])
            if update:
                reference.optimizer.zero_grad()


def _compare(what: str, mine: torch.Tensor | None, plain: torch.Tensor | None) -> Iterator[str]:
    if mine is None or plain is None:
        if mine is not plain:
            yield f"{what} is {_size(mine)}, plain {_size(plain)}"
        return
    distance = float((mine - plain).abs().max()) if mine.shape == plain.shape else math.inf
    if not distance <= EXACT * max(1.0, float(plain.abs().max())):
        yield f"{what} is {distance:.3g} off"


def _size(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"a tensor up to {float(tensor.abs().max()):.3g}"
