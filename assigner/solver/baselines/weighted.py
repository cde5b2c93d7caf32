"""A weighted heuristic: every partition has a probability for every worker, and these descend on a sum of four costs.

    bandwidth     share of the traffic that goes between workers, times how slow their link is against the mean
    compute       how far each worker's share of the work is from its share of the speed, squared
    memory        what a worker would hold beyond its capacity, against its capacity
    entropy       how undecided the probabilities are; its weight grows from 0, as in annealing

Source: machin's ModelAssigner (github.com/iffiX/machin, machin/parallel/assigner.py), which takes the softmax of free
scores, descends with Adam, and gives every model to its likeliest device. There work is bytes of parameters, speed the
idle share of a GPU, links are near or far, and the costs are means over the entries of matrices. Here the figures are
the profile's, and the costs sums of shares, so that one set of weights suits all sizes. The result need not be
contiguous: a worker may hold several stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.solver.limits import tuning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.schedule.cost import PartitionCost
    from assigner.solver.baselines.prices import BaselinePrices
    from assigner.solver.problem.arrays import Flags, Floats, Ints
    from assigner.solver.problem.problem import Problem


SMALLEST = -60.0
"""Logarithm of the least probability."""


def descent(pricing: BaselinePrices) -> Iterator[Plan]:
    """One placement, found at the middle one of the micro-batch counts, for all of them."""
    count = pricing.counts[len(pricing.counts) // 2]
    units = _units(pricing.problem)
    names = pricing.quickest(count)
    shares = _shares(pricing, names, units, count)
    if shares is None:
        return
    scores = np.random.default_rng(pricing.problem.options.seed).standard_normal(shares.allowed.shape)
    chosen = _descend(shares, scores).argmax(axis=1)
    workers = {name: names[int(chosen[n])] for n, unit in enumerate(units) for name in unit}
    stages = _stages(pricing.problem, workers)
    for each in pricing.counts:
        yield pricing.placed(each, stages)


def _units(problem: Problem) -> list[tuple[str, ...]]:
    """The partitions, those that must be on one worker as one."""
    return list(dict.fromkeys(problem.together[name] for name in problem.order))


def _stages(problem: Problem, workers: dict[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Stages in the model's order; a partition joins the last stage of its worker where the graph lets it."""
    stages: list[tuple[str, list[str]]] = []
    at: dict[str, int] = {}
    latest: dict[str, int] = {}
    for name in problem.order:
        newest = max((at[output.partition] for output in problem.cost.reads[name]), default=-1)
        number = latest.get(workers[name], -1)
        if number < max(newest, 0):
            number = latest[workers[name]] = len(stages)
            stages.append((workers[name], []))
        stages[number][1].append(name)
        at[name] = number
    return tuple((worker, tuple(names)) for worker, names in stages)


class _Shares(NamedTuple):
    """What the costs are made of, for n units and m workers.

    Args:
        allowed: (n, m) whether a unit may be there.
        work: (n, m) the unit's share of the worker's time for the whole model.
        speed: (m,) the worker's share of all speed.
        size: (n, m) what the unit holds there, as a share of the worker's capacity.
        distance: (m, m) seconds of a message and of its gradient, as multiples of the mean.
        ends: (2, e) units between which values go.
        traffic: (e,) shares of all bytes.
    """

    allowed: Flags
    work: Floats
    speed: Floats
    size: Floats
    distance: Floats
    ends: Ints
    traffic: Floats


def _shares(
    pricing: BaselinePrices, workers: Sequence[str], units: Sequence[Sequence[str]], count: int
) -> _Shares | None:
    """The figures of these workers at one micro-batch count; None: a unit may be nowhere."""
    problem, table, barred = pricing.problem, pricing.problem.prices(count), pricing.problem.barred
    rows = [table.measured(worker) for worker in workers]
    held = [[[row[problem.position[name]] for name in unit] for row in rows] for unit in units]
    seconds = np.array([[_seconds(each) for each in unit] for unit in held])
    allowed = np.isfinite(seconds) & [[barred[w].isdisjoint(unit) for w in workers] for unit in units]
    if not allowed.any(axis=1).all():
        return None
    typical = np.array([row[np.isfinite(row)].mean() for row in seconds])
    seconds = np.where(np.isfinite(seconds), seconds, typical[:, None])
    whole = np.maximum(seconds.sum(axis=0), 1e-30)
    devices = [problem.profile.worker[worker] for worker in workers]
    capacity = np.array([max(1.0, device.tensor_bytes) for device in devices])
    size = np.array([_bytes(pricing, unit, row, count) for unit, row in zip(units, held, strict=True)])
    unit_of = {name: n for n, unit in enumerate(units) for name in unit}
    edges = [edge for edge in problem.profile.edges if unit_of[edge.source] != unit_of[edge.target]]
    traffic = np.array([edge.bytes_per_sample * table.size + edge.fixed_bytes for edge in edges])
    return _Shares(
        allowed=allowed,
        work=seconds / whole,
        speed=(1 / whole) / (1 / whole).sum(),
        size=size / capacity,
        distance=_distance(pricing, workers, float(traffic.mean()) if edges else 0.0),
        ends=np.array([[unit_of[edge.source] for edge in edges], [unit_of[edge.target] for edge in edges]], dtype=int),
        traffic=traffic / max(1e-30, traffic.sum()),
    )


def _seconds(prices: Sequence[PartitionCost | None]) -> float:
    return sum(float("inf") if price is None else price.forward_s + price.backward_s for price in prices)


def _bytes(
    pricing: BaselinePrices, unit: Sequence[str], row: Sequence[Sequence[PartitionCost | None]], count: int
) -> list[float]:
    """On each worker: state, values read and, if they are stored, activations of all micro-batches."""
    cost = pricing.problem.cost
    held = cost.state(unit).total + count * cost.input_bytes(unit, pricing.problem.prices(count).size)
    if pricing.problem.options.remat == "always":
        return [held] * len(row)
    return [held + count * sum(price.activation_bytes for price in prices if price is not None) for prices in row]


def _distance(pricing: BaselinePrices, workers: Sequence[str], size: float) -> Floats:
    cost = pricing.problem.cost
    there = np.array([[cost.transfer_s(a, b, size) for b in workers] for a in workers])
    both = there + there.T
    finite = np.isfinite(both)
    between = both[finite & ~np.eye(len(workers), dtype=bool)]
    mean = between.mean() if between.size and between.any() else 1.0
    slowest = max(1.0, between.max(initial=0.0) / mean)
    distance: Floats = np.where(finite, both / mean, 10 * slowest)  # no link is a very slow one
    return distance


def _descend(shares: _Shares, scores: Floats) -> Floats:
    """The scores (n, m) at the end; -inf where a unit may not be."""
    first, second = np.zeros_like(scores), np.zeros_like(scores)
    iterations = max(tuning.FEWEST, min(tuning.ITERATIONS, tuning.ITERATIONS * tuning.LARGE // scores.size))
    rate = tuning.RATE * tuning.ITERATIONS / iterations
    for step in range(1, iterations + 1):
        logs = _log_softmax(scores, shares.allowed)
        placed = np.exp(logs)
        gradient = _gradient(shares, placed, logs, tuning.ENTROPY * step / iterations)
        gradient = placed * (gradient - (gradient * placed).sum(axis=1, keepdims=True))
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        scores = scores - rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-12)
    return np.where(shares.allowed, scores, -np.inf)


def _log_softmax(scores: Floats, allowed: Flags) -> Floats:
    """Logarithms of the probabilities; none is so small that arithmetic becomes slow."""
    scores = np.where(allowed, scores, -np.inf)
    scores = np.maximum(scores - scores.max(axis=1, keepdims=True), SMALLEST)
    logs: Floats = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return logs


def _gradient(shares: _Shares, placed: Floats, logs: Floats, entropy: float) -> Floats:
    """Of the sum of the four costs by the probabilities."""
    load = (placed * shares.work).sum(axis=0) / shares.speed  # 1: as much as its speed is worth
    total: Floats = tuning.COMPUTE * 2 * (load - 1) * shares.work
    over = (placed * shares.size).sum(axis=0) > 1
    total += tuning.MEMORY * over * shares.size
    total -= entropy * (logs + 1) / len(placed)
    source, target = shares.ends
    far = placed @ shares.distance * tuning.BANDWIDTH
    np.add.at(total, source, shares.traffic[:, None] * far[target])
    np.add.at(total, target, shares.traffic[:, None] * far[source])
    return total
