"""Random orders for a plan's placement: of all those that can run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.formats.orders import ListedStep, written_order

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Edge


def with_drawn_order(plan: Plan, edges: Sequence[Edge], rng: random.Random, *, halves: bool = False) -> Plan:
    """The plan with an order that one draw after another has made: of all steps that are ready, whose turn is it?

    Args:
        plan: Its placement; which micro-batches a replica takes is drawn too, their number is the plan's.
        edges: The values between partitions.
        rng: What draws.
        halves: Some backwards are in two parts.
    """
    takers = [_takers(plan, n, rng) for n in range(len(plan.stages))]
    stage_of = {name: n for n, stage in enumerate(plan.stages) for name in stage.partitions}
    pairs = {(stage_of[edge.source], stage_of[edge.target], edge.gradient) for edge in edges}
    read = {(a, b) for a, b, _ in pairs if a != b}
    used = {(a, b) for a, b, gradient in pairs if gradient and a != b}
    waits: dict[ListedStep, set[ListedStep]] = {}
    for m in range(plan.micro_batches):
        parts = [halves and rng.random() < 0.5 for _ in plan.stages]
        for s, workers in enumerate(takers):
            before = [k for k in range(m) if workers[k] == workers[m]]
            last = ListedStep(s, "I" if parts[s] else "B", m)
            waits[ListedStep(s, "F", m)] = {ListedStep(a, "F", m) for a, b in read if b == s}
            waits[ListedStep(s, "F", m)] |= {ListedStep(s, "F", k) for k in before[-1:]}
            waits[last] = {ListedStep(b, "I" if parts[b] else "B", m) for a, b in used if a == s}
            waits[last].add(ListedStep(s, "F", m))
            if parts[s]:
                waits[ListedStep(s, "W", m)] = {last}
    favourite, strength = rng.choice("FBIW"), rng.choice([1, 1, 5, 100])
    orders: dict[str, list[ListedStep]] = defaultdict(list)
    while waits:
        ready = [step for step, missing in waits.items() if not missing]
        weights = [strength if step.letter == favourite else 1 for step in ready]
        step = rng.choices(ready, weights)[0]
        orders[takers[step.stage][step.micro_batch]].append(step)
        del waits[step]
        for missing in waits.values():
            missing.discard(step)
    stages = tuple(replace(stage, in_flight=None) for stage in plan.stages)
    texts = {worker: written_order(orders[worker]) for worker in plan.workers}
    return replace(plan, schedule="listed", orders=texts, stages=stages)


def _takers(plan: Plan, stage: int, rng: random.Random) -> list[str]:
    """A worker for each micro-batch of a stage, each as often as the plan says."""
    held = plan.stages[stage]
    if held.sole_worker is not None:
        return [held.sole_worker] * plan.micro_batches
    found = [each.worker for each in held.replicas for _ in range(each.micro_batches)]
    rng.shuffle(found)
    return found
