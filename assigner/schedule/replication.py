"""Which of a stage's workers takes which micro-batch, who updates what of it, and what follows from both.

A stage may lie on several workers, its replicas. Each runs whole micro-batches, as many as the plan gives it, spread
evenly over the step: 8 micro-batches, of which A takes 5 and B takes 3, go A B A A B A B A. Where a plan lists its
orders, they say which.

Each of them has the gradients of the whole stage. They update all of it, each its own copy; or they divide the
optimizer's state among them: each updates whole partitions for all, and sends the others the parameters behind that.

    worker 0    a b c d  gradients    a b -> update    a b -> all         state of a b
    worker 1    a b c d  gradients    c d -> update    c d -> all         state of c d

A parameter that partitions of one stage share belongs to the first of them. One that partitions of several stages share
is updated by all that hold it, as its gradient is everywhere anyway.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020 (arXiv
1910.02054), stage 1; there parameters are cut into equal parts, whatever partition they are of.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from assigner.formats.orders import FORWARD, WEIGHT, forwards_taken

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Memory
    from assigner.formats.profile import Edge, Tie
    from assigner.schedule.cost import CostModel


@lru_cache(maxsize=1024)
def takes(micro_batches: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The position of the replica that takes each of M micro-batches, of which replica r takes n_r.

    Micro-batch m goes to the replica r that is furthest behind its share, n_r (m + 1) / M - taken_r; the first among
    equals. Before each m these add up to 1, so it is above 0 for who is chosen: nobody takes more than n_r.
    Replicas with one share take turns: only the next of them is compared with others.
    """
    alike: dict[int, deque[int]] = defaultdict(deque)
    for replica, count in enumerate(counts):
        alike[count].append(replica)
    taken, found = [0] * len(counts), []
    for m in range(micro_batches):
        chosen = -max((n * (m + 1) - taken[turn[0]] * micro_batches, -turn[0]) for n, turn in alike.items())[1]
        alike[counts[chosen]].rotate(-1)
        taken[chosen] += 1
        found.append(chosen)
    return tuple(found)


def takers(plan: Plan, stage: int) -> tuple[str, ...]:
    """The worker that runs a stage for each micro-batch, by micro-batch."""
    held = plan.stages[stage]
    if held.sole_worker is not None:
        return (held.sole_worker,) * plan.micro_batches
    if plan.orders:
        found = forwards_taken(plan.listed, stage)
        return tuple(found[m] for m in range(plan.micro_batches))
    chosen = takes(plan.micro_batches, tuple(each.micro_batches for each in held.replicas))
    return tuple(held.replicas[n].worker for n in chosen)


def taken(plan: Plan, stage: int, worker: str) -> Sequence[int]:
    """The micro-batches for which a worker runs a stage that it holds, in ascending order."""
    if plan.stages[stage].sole_worker is not None:
        return range(plan.micro_batches)
    return tuple(m for m, taker in enumerate(takers(plan, stage)) if taker == worker)


@dataclass(frozen=True)
class MicroBatchLane:
    """Micro-batches that run on the same workers, stage by stage, each of which takes its stages in the same order.

    Args:
        workers: By stage.
        micro_batches: In ascending order.
        forwards: The stages, those of one worker in the order in which it runs their forwards.
        backwards: Likewise of their backwards.
    """

    workers: tuple[str, ...]
    micro_batches: Sequence[int]
    forwards: Sequence[int]
    backwards: Sequence[int]


def lanes(plan: Plan) -> tuple[MicroBatchLane, ...]:
    """The lanes of a plan, by their first micro-batch; one, unless stages have several workers or orders are listed."""
    ascending = range(len(plan.stages))
    usual = tuple(ascending), tuple(reversed(ascending))
    if not plan.is_replicated and not plan.orders:
        workers = tuple(stage.worker for stage in plan.stages)
        return (MicroBatchLane(workers, range(plan.micro_batches), *usual),)
    listed = _stage_orders(plan)
    found: dict[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    for m, workers in enumerate(zip(*(takers(plan, n) for n in ascending), strict=True)):
        found[workers, *listed.get(m, usual)].append(m)
    return tuple(
        MicroBatchLane(workers, tuple(mine), forwards, backwards)
        for (workers, forwards, backwards), mine in found.items()
    )


def _stage_orders(plan: Plan) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By micro-batch: its forwards' and its backwards' stages, worker by worker in the order that the plan lists."""
    found: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for steps in plan.listed.values():
        for stage, letter, m in steps:
            if letter != WEIGHT:
                found[m][letter != FORWARD].append(stage)
    return {m: (tuple(forwards), tuple(backwards)) for m, (forwards, backwards) in found.items()}


def leaving(plan: Plan, edges: Sequence[Edge], worker: str) -> list[Edge]:
    """The edges over which a worker sends values: for a micro-batch at least, another one reads what it makes."""
    stage_of, found = plan.stage_of, lanes(plan)
    return [
        edge
        for edge in edges
        for source, target in ((stage_of[edge.source], stage_of[edge.target]),)
        if any(lane.workers[source] == worker != lane.workers[target] for lane in found)
    ]


def reduced_stages(plan: Plan) -> tuple[int, ...]:
    """The stages whose gradients several workers add up after their last backward, in the order in which they do.

    The last stage comes first, as its backwards end first. All workers keep to this order, so that no two of them wait
    for each other in different reductions.
    """
    return tuple(n for n in reversed(range(len(plan.stages))) if plan.stages[n].replicas)


def gathered_stages(plan: Plan, worker: str | None = None) -> tuple[int, ...]:
    """The stages, of one worker or of all, whose workers update each other's parameters, as `reduced_stages` goes."""
    return tuple(
        n
        for n in reduced_stages(plan)
        if plan.stages[n].is_divided and (worker is None or worker in plan.stages[n].workers)
    )


def tie_holders(plan: Plan, tie: Tie) -> tuple[str, ...]:
    """The workers that hold a shared parameter, in the plan's order."""
    stages = [stage for stage in plan.stages if not set(tie.partitions).isdisjoint(stage.partitions)]
    return tuple(dict.fromkeys(worker for stage in stages for worker in stage.workers))


def is_exchanged(plan: Plan, tie: Tie) -> bool:
    """Whether the holders of a shared parameter send each other what each of them has of its gradient.

    They do where it lies in several stages on several workers; the reduction of a stage leaves it out then. Where all
    partitions that share it are in one stage, it is one of that stage's parameters.
    """
    stages = {n for n, stage in enumerate(plan.stages) if not set(tie.partitions).isdisjoint(stage.partitions)}
    return len(stages) > 1 and len(tie_holders(plan, tie)) > 1


def update_s(cost: CostModel, plan: Plan, worker: str) -> float:
    """Seconds of one worker's optimizer update."""
    price = {name: cost.partition(name, worker, plan.micro_batch_size).update_s for name in _held(plan, worker)}
    whole = sum(price[name] for name in _updated(plan, worker))
    return max(0.0, whole + sum(share * price[name] for name, share in _beside(cost, plan, worker, once=False)))


def held_state(cost: CostModel, plan: Plan, worker: str) -> Memory:
    """Parameters, gradients, optimizer state and buffers of a worker, in bytes."""
    state = cost.state(_held(plan, worker))
    if not _divides(plan, worker):
        return state
    size = {name: cost.profile.partition[name].optimizer_bytes for name in _held(plan, worker)}
    own = cost.state(_updated(plan, worker)).optimizer
    beside = sum(share * size[name] for name, share in _beside(cost, plan, worker, once=True))
    return replace(state, optimizer=max(0.0, own + beside))


def gathered_bytes(cost: CostModel, plan: Plan, stage: int) -> float:
    """Bytes of parameters that the workers of a stage send each other: as many times the largest part as they are."""
    held = plan.stages[stage]
    parts = []
    for worker in held.workers:
        mine = held.updated_by(worker)
        apart = [tie for tie in cost.profile.ties if is_exchanged(plan, tie) or _first(plan, tie) not in mine]
        parts.append(cost.gradient_bytes(mine, apart))
    return len(parts) * max(parts)


def _held(plan: Plan, worker: str) -> list[str]:
    return [name for stage in plan.held[worker] for name in plan.stages[stage].partitions]


def _updated(plan: Plan, worker: str) -> list[str]:
    return [name for stage in plan.held[worker] for name in plan.stages[stage].updated_by(worker)]


def _divides(plan: Plan, worker: str) -> bool:
    return any(plan.stages[stage].is_divided for stage in plan.held[worker])


def _beside(cost: CostModel, plan: Plan, worker: str, *, once: bool) -> Iterator[tuple[str, float]]:
    """What a worker updates beside its own partitions (above 0), or does not of them: (partition, share of it).

    `once`: a parameter that several of its own partitions share counts once among them, as in their bytes; else each
    has it, as in their times.
    """
    if not _divides(plan, worker):
        return
    held, mine = set(_held(plan, worker)), set(_updated(plan, worker))
    for tie in cost.profile.ties:
        here = [name for name in tie.partitions if name in held]
        own = [name for name in here if name in mine]
        if is_exchanged(plan, tie):
            if here and not own:
                yield here[0], cost.tied_share(here[0], tie)
        elif _first(plan, tie) not in mine:
            yield from ((name, -cost.tied_share(name, tie)) for name in (own[:1] if once else own))


def _first(plan: Plan, tie: Tie) -> str:
    """The partition to which a shared parameter belongs."""
    return next(name for name in plan.partitions if name in tie.partitions)
