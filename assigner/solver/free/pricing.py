"""A placement of any shape, and what it is worth: the step time, or the steady state.

The searches of this package ask for a bound of part of a placement, and for the price of a whole one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.solver.free.bounds import Bounds
from assigner.solver.free.row_timing import row_step_s
from assigner.solver.problem.perfect_split import split_among
from assigner.solver.problem.prices import PriceTable, bits
from assigner.solver.problem.set_memory import Masks, SetMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.terms import Schedule
    from assigner.solver.free.bounds import Turn


Stages = tuple[tuple[int, int], ...]
"""(worker, mask of positions) of each stage, in a topological order."""


@dataclass(frozen=True)
class Arrangement:
    """Stages, priced.

    Args:
        again: Of each stage the mask of what it rematerialises.
        value_s: The step time, or that of M micro-batches in the steady state, in seconds.
        exactness: So many times that is no more than with anything else rematerialised; said of one stage a worker.
    """

    table: PriceTable
    stages: Stages
    again: Masks
    value_s: float
    exactness: float = 1.0

    def plan(self, schedule: Schedule) -> Plan:
        """The plan, without a prediction."""
        problem, order = self.table.problem, self.table.problem.options.order
        names = [self.table.names[worker] for worker, _ in self.stages]
        rows = list(zip(names, [mask for _, mask in self.stages], self.again, strict=True))
        if order:
            rows.sort(key=lambda row: order.index(row[0]))  # every value goes along that order: still topological
        return Plan(
            workload=problem.workload,
            objective=problem.options.objective,
            schedule=schedule,
            micro_batches=self.table.micro_batches,
            micro_batch_size=self.table.size,
            stages=tuple(
                Stage(
                    name,
                    tuple(problem.order[i] for i in bits(mask)),
                    tuple(problem.order[i] for i in bits(again)),
                    threads=problem.profile.worker[name].threads,
                )
                for name, mask, again in rows
            ),
        )


def held_stages(stages: Stages) -> dict[int, list[int]]:
    """Of each worker the numbers of its stages."""
    held: dict[int, list[int]] = {}
    for n, (worker, _) in enumerate(stages):
        held.setdefault(worker, []).append(n)
    return held


def joined(stages: Stages, chosen: Sequence[Masks]) -> Masks:
    """What each stage rematerialises, from what the stages of each worker do, in the order of `held_stages`."""
    again = [0] * len(stages)
    for numbers, masks in zip(held_stages(stages).values(), chosen, strict=True):
        for n, mask in zip(numbers, masks, strict=True):
            again[n] = mask
    return tuple(again)


def cheapest_again(memory: SetMemory, stages: Stages, in_flight: int | None = None) -> Masks | None:
    """What each stage rematerialises for the least added time; None: they do not fit. In flight as of `SetMemory`."""
    chosen = []
    for worker, numbers in held_stages(stages).items():
        cheapest = memory.cheapest(worker, tuple(stages[n][1] for n in numbers), in_flight)
        if cheapest is None:
            return None
        chosen.append(cheapest)
    return joined(stages, chosen)


def again_s(memory: SetMemory, stages: Stages, again: Masks) -> tuple[float, ...]:
    """Seconds that each stage's backward takes longer."""
    return tuple(memory.again_s(worker, list(bits(mask))) for (worker, _), mask in zip(stages, again, strict=True))


class Pricing(Protocol):
    """The value of placements under one objective.

    Attributes:
        one_stage: True: at most one stage a worker; else any number.
    """

    memory: SetMemory
    one_stage: bool

    def price(self, stages: Stages) -> Arrangement | None:
        """The stages with what they rematerialise and their value; None: they do not fit, or a link is missing."""

    def actions(self, stages: Stages) -> int:
        """How much work it is to price the stages, in timed actions."""


class StepPricing:
    """The step time, as the simulator has it."""

    def __init__(self, memory: SetMemory, *, one_stage: bool) -> None:
        self.memory, self.one_stage = memory, one_stage
        self._bounds = Bounds(memory)

    def least(self, where: Sequence[int], masks: Sequence[int], limit: float) -> tuple[float, list[Turn]]:
        """A bound of all placements that have these positions there, in seconds, and its turns.

        Args:
            where: Worker of each position, -1: not placed. Whatever a placed position reads is placed.
            masks: Positions of each worker.
            limit: A bound of this value or more need not be made sharper.

        Returns:
            The bound; inf: there is no such placement. The turns where rows of several stages are to be looked at.
        """
        bound, turns = self._bounds.least(where, masks)
        if self.one_stage and bound < limit:
            stages = self.memory.table.in_order(masks)
            bound = math.inf if stages is None else max(bound, self._bounds.convex(where, stages))
        return bound, turns

    def price(self, stages: Stages) -> Arrangement | None:
        """See `Pricing`: with the rematerialisation of least added time.

        With one stage a worker no other choice takes less, but for its exactness (`Arrangement`); with several another
        one may (set_memory.py).
        """
        memory, again = self.memory, cheapest_again(self.memory, stages)
        if again is None:
            return None
        rows = [(worker, tuple(bits(mask))) for worker, mask in stages]
        step = row_step_s(memory.table, rows, again_s(memory, stages, again))
        if step is None:
            return None
        each = (memory.exactness(worker, (mask,)) for worker, mask in stages if self.one_stage)
        return Arrangement(memory.table, stages, again, step, min(each, default=1.0))

    def actions(self, stages: Stages) -> int:
        """See `Pricing`: a forward and a backward of each stage and micro-batch, and what it takes to begin."""
        return 2 * self.memory.table.micro_batches * len(stages) + 100


class SteadyPricing:
    """The steady state of convex stages, one a worker: the largest load of a worker or a directed link.

    Loads are those of M micro-batches, as `schedule/objective.py` has them: a worker's forwards, backwards, recomputing
    and the busy shares of its messages; a link's messages. Of a partial placement they are a lower bound, and so is all
    work split perfectly (perfect_split.py). A worker w that holds S, as the d-th stage from the end of the pipeline,
    takes

        L(w, d) = M (sum over S of (f + b) + recompute(w, S, d)) + busy(w)

    Under GPipe recompute is that with M micro-batches in flight, under 1F1B with min(M, d), which grows with d. So the
    order of stages matters, and of all orders in which none stands in front of one that it reads from, the least
    maximum is found by choosing, from the first stage on, the one of least L among those that wait for no other. What
    is not placed yet adds to loads, stages and waiting, so the same of a partial placement is a bound, too.

    Source: E. L. Lawler, Optimal sequencing of a single machine subject to precedence constraints, Management Science
    19, 1973.

    Args:
        falling: A stage keeps no more micro-batches than its place from the end, as under 1F1B; else all M.
    """

    one_stage = True

    def __init__(self, memory: SetMemory, *, falling: bool) -> None:
        self.memory, self._table, self._falling = memory, memory.table, falling
        table = memory.table
        work = table.micro_batches * (np.array(table.forward_s) + np.array(table.backward_s))
        self._work: list[list[float]] = work.tolist()
        self._weight, self._share, self._weights = split_among(work, table.most_workers)
        order = table.problem.options.order
        self._turn = [order.index(name) if name in order else 0 for name in table.names]
        self._load_s = cache(self._least_load_s)

    def least(self, where: Sequence[int], masks: Sequence[int], limit: float) -> tuple[float, list[Turn]]:
        """As of `StepPricing`; there are no turns."""
        busy, bound = self._messages(where)
        total = sum([share for w, share in zip(where, self._share, strict=True) if w < 0])
        for w, mask in enumerate(masks):
            if mask:
                load = self._load_s(w, mask, self._in_flight(1)) + busy[w]
                total += self._weight[w] * load
                bound = max(bound, load)
        bound = max(bound, total / self._weights if self._weights else 0.0)
        if bound < limit:
            row = self._row(masks, lambda w, depth: self._load_s(w, masks[w], depth) + busy[w])
            bound = math.inf if row is None else max(bound, row[0])
        return bound, []

    def price(self, stages: Stages) -> Arrangement | None:
        """See `Pricing`. The stages come in the order of least value, whatever the order given is."""
        table, masks = self._table, [0] * len(self._table.names)
        where = [0] * len(table.problem.order)
        for w, mask in stages:
            masks[w] = mask
            for i in bits(mask):
                where[i] = w
        if table.travelling(where) is None:
            return None
        busy, links = self._messages(where)
        exactness = 1.0

        def seconds(w: int, depth: int) -> float:
            nonlocal exactness
            again = self.memory.cheapest(w, (masks[w],), depth)
            if again is None:
                return math.inf
            exactness = min(exactness, self.memory.exactness(w, (masks[w],), depth))
            recompute = self.memory.again_s(w, list(bits(again[0])))
            return self._own_s(w, masks[w]) + table.micro_batches * recompute + busy[w]

        row = self._row(masks, seconds)
        if row is None or math.isinf(row[0]):
            return None
        slowest, ordered = row
        again: list[int] = []
        for n, (w, mask) in enumerate(ordered):
            chosen = self.memory.cheapest(w, (mask,), self._in_flight(len(ordered) - n))
            assert chosen is not None
            again += chosen
        return Arrangement(table, ordered, tuple(again), max(slowest, links), exactness)

    def actions(self, stages: Stages) -> int:
        """See `Pricing`: no action is timed."""
        return 10 * len(stages) + 100

    def _in_flight(self, depth: int) -> int:
        """Micro-batches that a stage keeps, by its place from the end of the pipeline, from 1."""
        return min(depth, self._table.micro_batches) if self._falling else self._table.micro_batches

    def _own_s(self, worker: int, mask: int) -> float:
        row = self._work[worker]
        return sum([row[i] for i in bits(mask)])

    def _least_load_s(self, worker: int, mask: int, in_flight: int) -> float:
        """Seconds of the positions on a worker without messages, whatever follows; inf: they do not fit."""
        again = self.memory.least_s(worker, mask, in_flight)
        return self._own_s(worker, mask) + self._table.micro_batches * again

    def _messages(self, where: Sequence[int]) -> tuple[list[float], float]:
        """Seconds that messages keep each worker busy, and those of the slowest link; of what is placed."""
        table = self._table
        times, busy = table.micro_batches, [0.0] * len(table.names)
        links: dict[tuple[int, int], float] = {}
        sent: dict[tuple[int, int], bool] = {}  # value and reader's worker: whether the gradient comes back
        for maker, value, reader, gradient in table.edges:
            u, v = where[maker], where[reader]
            if u == v or u < 0 or v < 0:
                continue
            ways = [] if (value, v) in sent else [(u, v)]
            if gradient and not sent.get((value, v)):
                ways.append((v, u))
            sent[value, v] = gradient or sent.get((value, v), False)
            for a, b in ways:
                wire = table.wires[value][a][b]
                links[a, b] = links.get((a, b), 0.0) + times * wire.seconds
                busy[a] += times * wire.sender_s
                busy[b] += times * wire.receiver_s
        return busy, max(links.values(), default=0.0)

    def _row(self, masks: Sequence[int], seconds: Callable[[int, int], float]) -> tuple[float, Stages] | None:
        """The order of least slowest stage, by `seconds` of a worker with so many in flight; None: there is no order.

        A hint may give the order of workers.
        """
        slowest = 0.0

        def choose(ready: Sequence[int], left: int) -> int:
            nonlocal slowest
            depth, first = self._in_flight(left), min(self._turn[w] for w in ready)
            load, chosen = min((seconds(w, depth), w) for w in ready if self._turn[w] == first)
            slowest = max(slowest, load)
            return chosen

        stages = self._table.in_order(masks, choose)
        return None if stages is None else (slowest, stages)


BoundedPricing = StepPricing | SteadyPricing
"""One that also bounds the value of what is not placed yet."""
