"""A step time that a placement cannot beat, without the simulator: so that only those that may win are simulated.

Under GPipe a worker computes M forwards of all its stages, and behind them M backwards. Along a chain, nothing of that
starts before one micro-batch has come through the stages before the worker's first, and nothing is through before one
gradient has gone back through them; and between its forwards and its backwards one micro-batch has to go through all
stages behind its last and come back.

    stage        0    1    2    3        worker w has stages 1 and 2:
    forward      before  [ w  w ] behind     before + M (its forwards and backwards) + behind
    backward     before  [ w  w ] behind
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.baselines.placement import SimplePlacement
    from assigner.solver.baselines.prices import BaselinePrices


@dataclass(slots=True)
class _Load:
    """One stage, or all of a worker: seconds of one micro-batch and of all, of the update, and bytes of state."""

    once_s: float = 0.0
    all_s: float = 0.0
    update_s: float = 0.0
    state_bytes: float = 0.0
    before_s: float = 0.0
    behind_s: float = 0.0


def least_step_s(pricing: BaselinePrices, candidate: SimplePlacement) -> float:
    """No step is shorter; inf: a partition has no price where it is, or a worker cannot hold its parameters."""
    problem, count = pricing.problem, candidate.micro_batches
    stages = [_load(pricing, worker, names, count) for worker, names, _ in candidate.held]
    if any(stage is None for stage in stages):
        return math.inf
    found = [stage for stage in stages if stage is not None]
    if problem.exact and not candidate.replicas:
        _along(found, _hops(pricing, candidate))
    workers: dict[str, _Load] = {}
    for (worker, _, share), stage in zip(candidate.held, found, strict=True):
        load = workers.setdefault(worker, _Load(before_s=stage.before_s))
        load.all_s += share * stage.once_s
        load.update_s += stage.update_s
        load.state_bytes += stage.state_bytes
        load.behind_s = stage.behind_s
    if any(load.state_bytes > problem.profile.worker[worker].tensor_bytes for worker, load in workers.items()):
        return math.inf
    return max(load.all_s + load.behind_s + max(load.before_s, load.update_s) for load in workers.values())


def _load(pricing: BaselinePrices, worker: str, names: Sequence[str], count: int) -> _Load | None:
    problem, prices, load = pricing.problem, pricing.prices_on(worker, count), _Load()
    for name in names:
        price = prices[problem.position[name]]
        if price is None:
            return None
        again = pricing.again(name, everything=problem.options.remat == "always")
        load.once_s += price.forward_s + again * price.recompute_s + price.backward_s
        load.update_s += price.update_s
        load.state_bytes += pricing.state_bytes[name]
    return load


def _along(stages: Sequence[_Load], hops: Sequence[float]) -> None:
    """Fill in what lies before and behind each stage of a chain; `hops[k]`: messages both ways in front of stage k."""
    gone = 0.0
    whole = sum(stage.once_s for stage in stages) + sum(hops)
    for stage, hop in zip(stages, hops, strict=True):
        gone += hop
        stage.before_s = gone
        gone += stage.once_s
        stage.behind_s = max(0.0, whole - gone)


def _hops(pricing: BaselinePrices, candidate: SimplePlacement) -> list[float]:
    """Seconds of the values into each stage of a chain, and of their gradients back."""
    problem, cost, size = pricing.problem, pricing.problem.cost, pricing.size(candidate.micro_batches)
    found = [0.0]
    for (left, _), (right, names) in itertools.pairwise(candidate.stages):
        seconds = 0.0
        for output, has_gradient in problem.hops[problem.position[names[0]]]:
            there = cost.output_bytes(output, size)
            seconds += cost.transfer_s(left, right, there)
            seconds += cost.transfer_s(right, left, there) if has_gradient else 0.0
        found.append(seconds)
    return found
