"""Simpler ways to place the same profile, priced by the same simulator: what a plan has to beat.

Each takes the micro-batch count that suits it best, rematerialises nothing, or everything where it does not fit
otherwise, and keeps the pins. One that does not fit in any way has no step time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.plan import Baseline, Plan, Stage
from assigner.simulate import overfull, predict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from assigner.solver.problem import Problem

TITLES = {
    "single": "best single worker",
    "equal": "equal split",
    "proportional": "split in proportion to speed",
    "balance": "balance by time",
}
"""Names of the baselines, short and in full."""

Split = tuple[tuple[str, int], ...]
"""(worker, number of partitions) of each stage in order."""


def price_baselines(problem: Problem) -> tuple[Baseline, ...]:
    """The baselines in a fixed order, each at its own best micro-batch count."""
    found = ((title, baseline_plan(problem, name)) for name, title in TITLES.items())
    return tuple(Baseline(title, plan.predicted.step_s if plan and plan.predicted else None) for title, plan in found)


def baseline_plan(problem: Problem, name: str) -> Plan | None:
    """One baseline as a plan, priced, at its best micro-batch count; None: it fits at none.

    Args:
        problem: What is to be placed; its options hold for the baseline too.
        name: A key of `TITLES`.
    """
    makers: dict[str, Callable[[Problem, int], Iterable[Split]]] = {
        "single": _single, "equal": _equal, "proportional": _proportional, "balance": _balanced,
    }  # fmt: skip
    plans = (
        _priced(problem, split, count)
        for count in problem.options.counts(problem.cost)
        for split in makers[name](problem, problem.workload.batch_size // count)
    )
    return min(
        filter(None, plans), key=lambda plan: plan.predicted.step_s if plan.predicted else math.inf, default=None
    )


def _priced(problem: Problem, split: Split, count: int) -> Plan | None:
    """A split as a plan with its prediction, rematerialising nothing or else everything; None: it fits neither way."""
    stages, at = [], 0
    for worker, number in split:
        if number:
            threads = problem.profile.worker[worker].threads
            stages.append(Stage(worker, problem.order[at : at + number], threads=threads))
        at += number
    for stage in stages:
        device = problem.profile.worker[stage.worker]
        if not all(problem.allowed(name, device) for name in stage.partitions):
            return None
    plan = Plan(
        workload=problem.workload, micro_batches=count, micro_batch_size=problem.workload.batch_size // count,
        stages=tuple(stages),
    )  # fmt: skip
    if any(_torn(problem, plan)):
        return None
    again = replace(plan, stages=tuple(replace(stage, rematerialise=stage.partitions) for stage in stages))
    for tried in {"auto": (plan, again), "never": (plan,), "always": (again,)}[problem.options.remat]:
        try:
            prediction = predict(tried, problem.profile, problem.cost)
        except FormatError:  # a pair was not measured, or two workers cannot talk
            return None
        if not overfull(prediction):
            return replace(tried, predicted=prediction)
    return None


def _torn(problem: Problem, plan: Plan) -> Iterator[bool]:
    """For each `colocate` label, whether the plan spreads it over workers."""
    labels: dict[str, set[str]] = {}
    for name, worker in plan.placement.items():
        label = problem.profile.partition[name].colocate
        if label is not None:
            labels.setdefault(label, set()).add(worker)
    return (len(workers) > 1 for workers in labels.values())


def _ranked(problem: Problem) -> list[str]:
    return [worker.name for worker in sorted(problem.profile.workers, key=lambda worker: worker.rank)]


def _single(problem: Problem, _micro_batch: int) -> Iterator[Split]:
    for worker in _ranked(problem):
        yield ((worker, len(problem.order)),)


def _equal(problem: Problem, _micro_batch: int) -> Iterator[Split]:
    """The same number of partitions for every worker in rank order; the first ones take one more."""
    workers = _ranked(problem)
    each, more = divmod(len(problem.order), len(workers))
    yield tuple((worker, each + (n < more)) for n, worker in enumerate(workers))


def _seconds(problem: Problem, worker: str, micro_batch: int) -> list[float] | None:
    """Forward and backward of each partition; None: one of them has no price there."""
    found = []
    for name in problem.order:
        if problem.cost.obstacle(name, worker, micro_batch) is not None:
            return None
        price = problem.cost.partition(name, worker, micro_batch)
        found.append(price.forward_s + price.backward_s)
    return found


def _proportional(problem: Problem, micro_batch: int) -> Iterator[Split]:
    """Numbers of partitions in proportion to the speed at which each worker runs the whole model."""
    workers = _ranked(problem)
    times = [_seconds(problem, worker, micro_batch) for worker in workers]
    speeds = [1 / sum(seconds) if seconds and sum(seconds) else 0.0 for seconds in times]
    if sum(speeds):
        n, total = len(problem.order), sum(speeds)
        cuts = [math.floor(n * sum(speeds[:k]) / total + 0.5) for k in range(len(workers) + 1)]
        yield tuple((worker, cuts[k + 1] - cuts[k]) for k, worker in enumerate(workers))


def _balanced(problem: Problem, micro_batch: int) -> Iterator[Split]:
    """Blocks whose largest time, as measured on the first worker, is least: blind to how fast the others are.

    Source: torchgpipe.balance.balance_by_time (Kim et al., arXiv 2004.09910), which measures on one device and cuts
    with the block partitions of Barany and Grinberg; here the cut is the exact one.
    """
    workers = _ranked(problem)
    seconds = _seconds(problem, workers[0], micro_batch)
    if seconds:
        sizes = least_largest_blocks(seconds, len(workers))
        yield tuple(zip(workers, sizes, strict=False))


def least_largest_blocks(seconds: Sequence[float], most: int) -> list[int]:
    """Sizes of at most `most` contiguous blocks, none empty, whose largest sum is least."""
    n = len(seconds)
    sums = [0.0]
    for value in seconds:
        sums.append(sums[-1] + value)
    blocks = min(most, n)
    best = [[math.inf] * (n + 1) for _ in range(blocks + 1)]
    cut = [[0] * (n + 1) for _ in range(blocks + 1)]
    best[0][0] = 0.0
    for k in range(1, blocks + 1):
        for end in range(k, n + 1):
            for start in range(k - 1, end):
                value = max(best[k - 1][start], sums[end] - sums[start])
                if value < best[k][end]:
                    best[k][end], cut[k][end] = value, start
    sizes, end = [], n
    for k in range(blocks, 0, -1):
        sizes.append(end - cut[k][end])
        end = cut[k][end]
    return sizes[::-1]
