"""Who updates what of a stage that several workers share, and what that takes: time, and bytes of optimizer state.

Each of the workers has the gradients of the whole stage. They update all of it, each its own copy; or they divide the
optimizer's state among them: each updates whole partitions for all, and sends the others the parameters behind that.

    worker 0    a b c d  gradients    a b -> update    a b -> all         state of a b
    worker 1    a b c d  gradients    c d -> update    c d -> all         state of c d

A parameter that partitions of one stage share belongs to the first of them. One that partitions of several stages share
is updated by all that hold it, as its gradient is everywhere anyway.

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020 (arXiv
1910.02054), stage 1; there parameters are cut into equal parts, whatever partition they are of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.schedule.replication import is_exchanged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Memory
    from assigner.formats.profile import Tie
    from assigner.schedule.cost import CostModel


def update_s(cost: CostModel, plan: Plan, worker: str) -> float:
    """Seconds of one worker's optimizer update."""
    price = {name: cost.partition(name, worker, plan.micro_batch_size).update_s for name in _held(plan, worker)}
    whole = sum(price[name] for name in _updated(plan, worker))
    return max(0.0, whole + sum(share * price[name] for name, share in _beside(cost, plan, worker)))


def held_state(cost: CostModel, plan: Plan, worker: str) -> Memory:
    """Parameters, gradients, optimizer state and buffers of a worker, in bytes."""
    state = cost.state(_held(plan, worker))
    if not _divides(plan, worker):
        return state
    size = {name: cost.profile.partition[name].optimizer_bytes for name in _held(plan, worker)}
    own = cost.state(_updated(plan, worker)).optimizer
    beside = sum(share * size[name] for name, share in _beside(cost, plan, worker))
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


def _beside(cost: CostModel, plan: Plan, worker: str) -> Iterator[tuple[str, float]]:
    """What a worker updates beside its own partitions (above 0), or does not of them: (partition, share of it)."""
    if not _divides(plan, worker):
        return
    held, mine = set(_held(plan, worker)), set(_updated(plan, worker))
    for tie in cost.profile.ties:
        here = [name for name in tie.partitions if name in held]
        own = [name for name in here if name in mine]
        if is_exchanged(plan, tie):
            if here and not own:
                yield here[0], cost.tied_share(here[0], tie)
        elif own and _first(plan, tie) not in mine:
            yield own[0], -cost.tied_share(own[0], tie)


def _first(plan: Plan, tie: Tie) -> str:
    """The partition to which a shared parameter belongs."""
    return next(name for name in plan.partitions if name in tie.partitions)
