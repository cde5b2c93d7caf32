"""Where several workers share a stage: what all of them rematerialise, and where its optimizer state is divided.

A plan has one set of rematerialised partitions for a stage, whoever runs it. Where one worker would choose other
partitions than another, what each must free is a row of a knapsack that they have in common: of the sets for which
every worker has room, those are looked at than which no other is better for each of them, and the best is the one
under which the slowest for its share takes least. Partitions that are alike on all workers count by their number; where
there are more choices than `tuning.REMAT_SETS`, names are dropped one by one from the union of what each must
recompute by itself, while there is room.

The workers can also divide the optimizer state (schedule/replication.py), for the time of handing each other what they
update: `divided` does it where the state as a whole would not leave room for what is kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from assigner.schedule.orders import in_flight
from assigner.schedule.simulate import worker_memory
from assigner.solver.limits import tuning
from assigner.solver.problem.memory import HeldPartitions, LeastRemat, RematSets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.stage import Stage
    from assigner.solver.problem.arrays import Flags
    from assigner.solver.problem.options import RematRule
    from assigner.solver.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class RematChoices:
    """What the workers of a stage may rematerialise.

    Args:
        sets: Partitions of the stage, the best first; empty: a worker has no room, whatever is rematerialised.
        alone_s: Seconds by which each worker's backward is longer at least, by what it must rematerialise by itself.
        every: Whether no other set makes a plan faster than each of these.
    """

    sets: tuple[tuple[str, ...], ...]
    alone_s: Mapping[str, float]
    every: bool


class StageRemat:
    """What is rematerialised in stages that several workers share; what was found is kept."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._rows: dict[tuple[object, ...], _Row] = {}
        self._stages: dict[tuple[object, ...], _SharedStage] = {}
        self._choices: dict[tuple[object, ...], RematChoices] = {}

    def choices(self, plan: Plan, n: int) -> RematChoices:
        """The sets for stage n of a plan, whatever it rematerialises there.

        What its workers have room for is kept by what they hold: of the plans that one is asked for each has the
        updates of a stage divided alike, and one stage a worker.
        """
        stage = plan.stages[n]
        deep = tuple(in_flight(plan, n, worker) for worker in stage.workers)
        held = (stage.partitions, plan.micro_batches, stage.workers, deep)
        shares = tuple(each.micro_batches for each in stage.replicas)
        if (*held, shares) not in self._choices:
            if held not in self._stages:
                self._stages[held] = _SharedStage(list(map(partial(self._row, plan, stage), stage.workers, deep)))
            self._choices[*held, shares] = self._stages[held].choices(stage, shares)
        return self._choices[*held, shares]

    def _row(self, plan: Plan, stage: Stage, worker: str, deep: int) -> _Row:
        """A stage on one of its workers; workers that are alike, with as much in flight, have one."""
        costs = [self._problem.cost.partition(name, worker, plan.micro_batch_size) for name in stage.partitions]
        size = {name: each.activation_bytes for name, each in zip(stage.partitions, costs, strict=True)}
        stored = sum(size[name] for name in stage.partitions if name not in stage.rematerialise)
        largest = max((size[name] for name in stage.rematerialise), default=0.0)
        room = _room(self._problem, plan, worker) + deep * stored + largest
        group = self._problem.prices(plan.micro_batches).intervals.group_of[worker]
        key = (stage.partitions, plan.micro_batches, group, deep, room)
        if key not in self._rows:
            rules = [_rule(self._problem, name) for name in stage.partitions]
            held = HeldPartitions(tuple(costs), rules, room, 0.0)
            self._rows[key] = _Row(held, deep, self._problem.remat.least(held, deep, self._problem.clock))
        return self._rows[key]


@dataclass(frozen=True, eq=False)
class _Row:
    """What a worker must free; workers that are alike have one.

    Args:
        held: The stage on the worker, with its room for what is kept of all micro-batches in flight.
        deep: How many these are, at most.
        again: What it rematerialises by itself; None: it has no room.
    """

    held: HeldPartitions
    deep: int
    again: LeastRemat | None

    @property
    def own(self) -> Flags:
        """Which positions it must rematerialise by itself."""
        found = np.zeros(len(self.held.costs), dtype=bool)
        found[list(self.again.positions if self.again else ())] = True
        return found


class _SharedStage:
    """A stage with a row for each of its workers, and the sets for which all of them have room."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        number = {row: n for n, row in enumerate(dict.fromkeys(rows))}
        self._like = [number[row] for row in rows]
        """The number of each worker's row; arrays are [row, ...]."""
        self._fits = all(row.again is not None for row in rows)
        self._own = np.array([row.own for row in number])
        self._spared = np.array([row.again.seconds - row.again.floor_s if row.again else 0.0 for row in number])
        """Seconds that another choice of its own might spare each, at most."""
        costs = [row.held.costs for row in number]
        self._seconds = np.array([[cost.recompute_s for cost in each] for each in costs])
        self._once = np.array([sum(cost.forward_s + cost.backward_s for cost in each) for each in costs])
        self._sets = RematSets([row.held for row in number], [row.deep for row in number], self._seconds)

    def choices(self, stage: Stage, shares: tuple[int, ...]) -> RematChoices:
        """What its workers may rematerialise, the least seconds of the slowest first, then of all together."""
        if not self._fits:
            return RematChoices((), {}, every=True)
        sets, every = self._undominated
        loads = np.array(shares) * (self._once + sets @ self._seconds.T)[:, self._like]
        best_first = sets[np.lexsort((loads.sum(axis=1), loads.max(axis=1)))]
        least = ((self._own * self._seconds).sum(axis=1) - self._spared)[self._like]
        return RematChoices(
            tuple(tuple(stage.partitions[i] for i in np.flatnonzero(each)) for each in best_first),
            dict(zip(stage.workers, least.tolist(), strict=True)), every,
        )  # fmt: skip

    @cached_property
    def _undominated(self) -> tuple[Flags, bool]:
        """The sets with room than which no other is as good for all; whether none is left out."""
        if (self._own == self._own[0]).all() and not self._spared.any():
            return self._own[:1], True
        sets = self._sets
        every = math.prod(len(kind) + 1 for kind in sets.alike) <= tuning.REMAT_SETS
        found = sets.every() if every else self._dropped(list(itertools.chain(*sets.alike)))
        return sets.undominated(found if len(found) else self._union[None]), every  # none: by rounding

    def _dropped(self, free: Sequence[int]) -> Flags:
        """Sets of which no name can be dropped: for each worker, what takes longest there was dropped first."""
        found = np.array([self._without(sorted(free, key=lambda i: (-row[i], i))) for row in self._seconds])
        return found[self._sets.fit(found)]

    def _without(self, order: Sequence[int]) -> Flags:
        """The union of what each must without what it can do without, in that order; no name takes room from others."""
        found = self._union.copy()
        for i in order:
            if found[i]:
                found[i] = False
                found[i] = not self._sets.fit(found[None])[0]
        return found

    @property
    def _union(self) -> Flags:
        """What any of them must: there is room for the others' with it, as each frees what it holds itself."""
        return np.array(self._own.any(axis=0))


def divided(problem: Problem, plan: Plan) -> Plan | None:
    """A plan whose shared stages divide their optimizer state, and rematerialise the least that they then must.

    Of each such stage the largest states go first, each to the worker with the most room left.

    Returns:
        The plan; None: it does not fit so either, or without that nothing needs to be rematerialised.
    """
    shared = [n for n, stage in enumerate(plan.stages) if stage.replicas]
    always = {n: [name for name in plan.stages[n].partitions if _rule(problem, name) == "always"] for n in shared}
    kept = with_remat(plan, {n: tuple(names) for n, names in always.items()})
    room = {worker: _room(problem, kept, worker) for worker in kept.workers}
    if not shared or min(room.values()) >= 0:
        return None
    found = _with_updates(problem, kept, shared, room)
    memory = StageRemat(problem)
    again = {n: memory.choices(found, n).sets[:1] for n in shared}
    if not all(again.values()):
        return None
    found = with_remat(found, {n: each for n, (each,) in again.items()})
    return found if problem.fits(found) else None


def _room(problem: Problem, plan: Plan, worker: str) -> float:
    """Bytes for tensors that a worker has left under a plan; below 0: it does not fit."""
    device = problem.profile.worker[worker]
    return (device.capacity_bytes - worker_memory(problem.cost, plan, worker).total) / (1 + device.allocator_share)


def _rule(problem: Problem, name: str) -> RematRule | None:
    return problem.remat_rules[problem.position[name]]


def with_remat(plan: Plan, again: Mapping[int, tuple[str, ...]]) -> Plan:
    """The plan with these stages rematerialising that."""
    stages = list(plan.stages)
    for n, names in again.items():
        stages[n] = replace(stages[n], rematerialise=names)
    return replace(plan, stages=tuple(stages))


def _with_updates(problem: Problem, plan: Plan, shared: Sequence[int], room: dict[str, float]) -> Plan:
    """The plan with the updates of these stages divided; `room` is what workers have left with all of the state."""
    size = {name: problem.profile.partition[name].optimizer_bytes for name in plan.partitions}
    for n in shared:
        for worker in plan.stages[n].workers:
            room[worker] += problem.cost.state(plan.stages[n].partitions).optimizer
    stages = list(plan.stages)
    for n in shared:
        by: dict[str, str] = {}
        for name in sorted(stages[n].partitions, key=lambda name: -size[name]):
            by[name] = max(stages[n].workers, key=room.__getitem__)
            room[by[name]] -= size[name]
        replicas = tuple(
            replace(each, updates=tuple(name for name in stages[n].partitions if by[name] == each.worker))
            for each in stages[n].replicas
        )
        stages[n] = replace(stages[n], replicas=replicas)
    return replace(plan, stages=tuple(stages))
