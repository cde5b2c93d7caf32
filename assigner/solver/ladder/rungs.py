"""Stages with their warm-up depths: under 1F1B, what a stage keeps in flight decides its memory and its recomputing.

A rung is a segment on a worker of one group with what it recomputes, and the depths from `least` to `deepest` for
which that is the least recomputing that fits. A deeper warm-up that needs more recomputing is a rung of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from assigner.cost import PartitionCost
from assigner.solver.remat import least_remat
from assigner.solver.segments import Column, SegmentSizes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.solver.instance import Instance

LEVELS = 10
"""So many rungs of one segment are told apart; of the last, a bound takes any deeper warm-up to be possible."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A stage.

    Args:
        column: Segment, group, times and what is rematerialised.
        least: Micro-batches in flight, at least; fewer would fit with less recomputing.
        deepest: The most micro-batches in flight that fit.
        promised: The most that a bound must reckon with; `deepest`, or M where deeper levels were left out.
    """

    column: Column
    least: int
    deepest: int
    promised: int


class Rungs:
    """The rungs of one instance.

    Args:
        instance: Prices.
        deep: True: from 1 to M micro-batches are in flight, as under 1F1B; False: all M, as under GPipe.
        relaxed: One rung for a segment, of least recomputing and any warm-up: for bounds.
    """

    def __init__(self, instance: Instance, *, deep: bool, relaxed: bool = False) -> None:
        self._instance, self._deep, self._relaxed = instance, deep, relaxed
        self._sizes = SegmentSizes(instance.problem, instance.size)
        self._least = 1 if deep else instance.micro_batches
        self.find = cache(self._find)

    def usual(self, stages: int) -> int:
        """The schedule's own warm-up depth of a stage, itself the first of `stages` to the pipeline's end."""
        most = self._instance.micro_batches
        return min(most, stages) if self._deep else most

    def count(self) -> int:
        """About how many rungs there are in all, those of deeper warm-ups left out."""
        rows = {id(row) for row in self._instance.prices}
        return len(self._instance.problem.order) ** 2 // 2 * len(rows)

    def _find(self, first: int, last: int, group: int, stages: int) -> Rung | None:
        """The rung of a segment whose warm-up is the usual one, or as deep as fits; None: it does not fit at all.

        Args:
            first: Position of its first partition.
            last: Position of its last.
            group: Of its worker.
            stages: As for `usual`.
        """
        problem, prices = self._instance.problem, self._instance.prices[group][first : last + 1]
        held = tuple(price for price in prices if price is not None)
        torn = any(behind >= first for behind in problem.apart[first : last + 1])
        if len(held) < len(prices) or torn or not (problem.may_cut[first] and problem.may_cut[last + 1]):
            return None
        state, read, messages = self._sizes.grown(first)[last - first]
        capacity = problem.profile.worker[self._instance.groups[group][0]].tensor_bytes
        room = capacity - state - messages - max(price.workspace_bytes for price in held)
        stage = _Stage(held, problem.remat_rules[first : last + 1], room, read)
        found = None
        for found in self._levels(stage, first, group):
            if found.deepest >= self.usual(stages):
                break
        return found

    @cached_property
    def all(self) -> tuple[Rung, ...]:
        """Every rung."""
        return tuple(self._all())

    def _all(self) -> Iterator[Rung]:
        instance, problem = self._instance, self._instance.problem
        ties = problem.profile.ties
        alike: dict[tuple[int, float, int], tuple[Rung, ...]] = {}
        for group, members in enumerate(instance.groups):
            capacity = problem.profile.worker[members[0]].tensor_bytes
            key = id(instance.prices[group]), capacity, group if ties else 0  # else the links play no part in a rung
            if key not in alike:
                starts = (first for first in range(len(problem.order)) if problem.may_cut[first])
                alike[key] = tuple(rung for first in starts for rung in self._from(first, group, capacity))
                yield from alike[key]
            else:
                yield from (replace(rung, column=replace(rung.column, group=group)) for rung in alike[key])

    def _from(self, first: int, group: int, capacity: float) -> Iterator[Rung]:
        """All segments that start at `first`."""
        problem, prices = self._instance.problem, self._instance.prices[group]
        held: list[PartitionCost] = []
        workspace = 0.0
        for last, (state, read, messages) in enumerate(self._sizes.grown(first), start=first):
            price = prices[last]
            if price is None or problem.apart[last] >= first:
                return
            held.append(price)
            workspace = max(workspace, price.workspace_bytes)
            if state + workspace + self._least * read > capacity:
                return
            if problem.may_cut[last + 1]:
                stage = _Stage(
                    tuple(held), problem.remat_rules[first : last + 1], capacity - state - workspace - messages, read
                )
                yield from self._levels(stage, first, group)

    def _levels(self, stage: _Stage, first: int, group: int) -> Iterator[Rung]:
        """The same segment with ever deeper warm-ups, as long as that costs recomputing."""
        most, at = self._instance.micro_batches, self._least
        for level in range(LEVELS):
            again = stage.again(at)
            if again is None:
                return
            deepest = stage.deepest(again, at, most)
            column = stage.column(first, group, again)
            tied = self._instance.tied_s(column.first, column.last, group)
            if math.isinf(tied):
                return
            column = column if tied <= column.update_s else replace(column, update_s=tied)
            last = level == LEVELS - 1 or self._relaxed
            yield Rung(column, at, deepest, most if last else deepest)
            at = deepest + 1
            if at > most or last:
                return


@dataclass(frozen=True, slots=True)
class _Stage:
    """A segment on one worker, before it is decided what it recomputes.

    Args:
        held: Prices of its partitions.
        rules: Which of them must never, or always, run twice.
        room: Bytes for activations and values read.
        read: Bytes of the values read by one micro-batch.
    """

    held: tuple[PartitionCost, ...]
    rules: tuple[str | None, ...]
    room: float
    read: float

    def again(self, depth: int) -> tuple[int, ...] | None:
        """What to run twice with `depth` micro-batches in flight; None: that many do not fit."""
        return least_remat(
            [price.activation_bytes for price in self.held], [price.recompute_s for price in self.held],
            in_flight=depth, room=self.room - depth * self.read, rules=self.rules,  # type: ignore[arg-type]
        )  # fmt: skip

    def deepest(self, again: tuple[int, ...], depth: int, most: int) -> int:
        """The most micro-batches, from `depth` to `most`, that fit with these partitions run twice."""
        twice = set(again)
        kept = self.read + sum(price.activation_bytes for i, price in enumerate(self.held) if i not in twice)
        room = self.room - max((self.held[i].activation_bytes for i in again), default=0.0)
        return most if not kept or kept * most <= room else max(depth, min(most, int(room / kept)))

    def column(self, first: int, group: int, again: tuple[int, ...]) -> Column:
        return Column(
            first, first + len(self.held) - 1, group, sum(price.forward_s for price in self.held),
            sum(price.backward_s for price in self.held) + sum(self.held[i].recompute_s for i in again),
            sum(price.update_s for price in self.held), tuple(first + i for i in again),
        )  # fmt: skip
