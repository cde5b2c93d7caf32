"""A good plan in a fraction of a second: a beam of partial pipelines, built from the last stage to the first.

Built backwards, everything in the step time is known when a stage is added, also when its update ends. A label is a
pipeline for positions i .. n - 1; it carries

    forward, backward   sums over its stages and links
    slow_f, slow_b      slowest server so far, its newest stage left out
    pend_f, pend_b      the newest stage's own time with the busy shares of its right boundary
    tail                latest end of an update, counted from the turn

At each position the labels with the best optimistic completion are kept, a few for each (workers used, newest
group). The beam gives no proof; the ILP does.

Source: the dynamic program over (position, workers used, last worker) of 4-solver.md, cut to a beam as in P. S. Ow
and T. E. Morton, Filtered beam search in scheduling, IJPR 26(1), 1988.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.segments import Column

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from assigner.solver.instance import Instance

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

WIDTH = 600
PER_STATE = 4


@dataclass(slots=True)
class _Labels:
    """Labels that start at one position, as arrays of one length."""

    forward: Floats
    backward: Floats
    slow_f: Floats
    slow_b: Floats
    pend_f: Floats
    pend_b: Floats
    pend_u: Floats
    busy_b: Floats
    turn: Floats
    tail: Floats
    used: Ints
    group: Ints
    column: Ints
    parent: Ints
    serial: Ints

    def take(self, which: Ints | NDArray[np.bool_]) -> _Labels:
        return _Labels(*(getattr(self, field.name)[which] for field in fields(self)))


def _join(blocks: list[_Labels]) -> _Labels:
    return _Labels(*(np.concatenate([getattr(block, field.name) for block in blocks]) for field in fields(_Labels)))


class Beam:
    """The beam search of one instance.

    Args:
        instance: What to place.
        width: Labels kept at each position.
    """

    def __init__(self, instance: Instance, *, width: int = WIDTH) -> None:
        self._instance, self._width = instance, width
        self._more = instance.micro_batches - 1
        self._columns = list(instance.columns.values())
        self._ending: dict[tuple[int, int], list[int]] = {}
        for number, column in enumerate(self._columns):
            self._ending.setdefault((column.last, column.group), []).append(number)
        radix = np.cumprod([1] + [len(group) + 1 for group in instance.groups])
        self._place, self._count = radix[:-1], np.array([len(group) for group in instance.groups])
        self._history: list[tuple[Ints, Ints]] = []
        self._serial = 0
        self._rest = _rest(instance)

    def run(self, *, most: int = 8) -> list[tuple[Column, ...]]:
        """Up to `most` whole pipelines, the most promising first; empty: the beam found none."""
        n = len(self._instance.problem.order)
        buckets: list[list[_Labels]] = [[] for _ in range(n + 1)]
        for group in range(len(self._instance.groups)):
            self._first_stages(n, group, buckets)
        for position in range(n - 1, 0, -1):
            if buckets[position]:
                labels = self._cut(_join(buckets[position]), position)
                buckets[position] = []
                for left in range(len(self._instance.groups)):
                    self._extend(labels, position, left, buckets)
        if not buckets[0]:
            return []
        whole = _join(buckets[0])
        step = self._score(whole, 0)
        order = np.lexsort((whole.serial, step))[:most]
        history = self._trace(whole)
        return [history(index) for index in order]

    def _arrays(self, numbers: list[int]) -> tuple[Ints, Floats, Floats, Floats, Ints]:
        chosen = [self._columns[number] for number in numbers]
        return (
            np.array(numbers), np.array([c.forward_s for c in chosen]), np.array([c.backward_s for c in chosen]),
            np.array([c.update_s for c in chosen]), np.array([c.first for c in chosen]),
        )  # fmt: skip

    def _first_stages(self, n: int, group: int, buckets: list[list[_Labels]]) -> None:
        numbers = self._ending.get((n - 1, group))
        if numbers:
            ids, forward, backward, update, first = self._arrays(numbers)
            zero, none = np.zeros(len(ids)), np.full(len(ids), -1)
            labels = _Labels(
                forward, backward, zero, zero, forward, backward, update, zero, zero, zero,
                np.full(len(ids), self._place[group]), np.full(len(ids), group), ids, none, self._serials(len(ids)),
            )  # fmt: skip
            self._scatter(labels, first, buckets)

    def _serials(self, count: int) -> Ints:
        self._serial += count
        return np.arange(self._serial - count, self._serial)

    def _scatter(self, labels: _Labels, first: Ints, buckets: list[list[_Labels]]) -> None:
        for position in np.unique(first):
            buckets[position].append(labels.take(first == position))

    def _extend(self, labels: _Labels, position: int, left: int, buckets: list[list[_Labels]]) -> None:
        """All labels, with each stage of group `left` that ends before `position` in front."""
        numbers = self._ending.get((position - 1, left))
        hops = [self._instance.hops.get((position, left, right)) for right in range(len(self._instance.groups))]
        if not numbers or not any(hops):
            return
        table = np.array(
            [
                (hop.forward_s, hop.backward_s, *hop.forward_busy, *hop.backward_busy) if hop else (np.inf,) * 6
                for hop in hops
            ]
        )
        free = (labels.used // self._place[left]) % (self._count[left] + 1) < self._count[left]
        free &= self._used(labels) < self._instance.problem.most_workers
        labels = labels.take(free & np.isfinite(table[labels.group, 0]))
        if not len(labels.used):
            return
        c_f, c_b, send_f, receive_f, receive_b, send_b = table[labels.group].T
        # the newest stage's left boundary is known now, so its terms are complete
        slow_f = np.maximum.reduce([labels.slow_f, labels.pend_f + receive_f, c_f])
        stage_b = np.maximum(labels.slow_b, labels.pend_b + send_b)
        tail = np.maximum(labels.tail, labels.backward + self._more * stage_b + labels.busy_b + send_b + labels.pend_u)
        turn = np.where(labels.parent < 0, receive_f, labels.turn)
        slow_b = np.maximum(stage_b, c_b)
        ids, f, b, u, first = self._arrays(numbers)
        many = len(ids)

        def spread(old: Floats, new: Floats | float = 0.0) -> Floats:
            summed: Floats = (old[:, None] + np.broadcast_to(new, many)[None, :]).ravel()
            return summed

        grown = _Labels(
            spread(labels.forward + c_f, f), spread(labels.backward + c_b, b), spread(slow_f), spread(slow_b),
            spread(send_f, f), spread(receive_b, b), np.tile(u, len(c_f)), spread(receive_b), spread(turn),
            spread(tail), np.repeat(labels.used + self._place[left], many), np.full(many * len(c_f), left),
            np.tile(ids, len(c_f)), np.repeat(labels.serial, many), self._serials(many * len(c_f)),
        )  # fmt: skip
        self._scatter(grown, np.tile(first, len(c_f)), buckets)

    def _used(self, labels: _Labels) -> Ints:
        """How many workers each label uses."""
        used: Ints = ((labels.used[:, None] // self._place) % (self._count + 1)).sum(axis=1)
        return used

    def _score(self, labels: _Labels, position: int) -> Floats:
        """Optimistic step time: what is left is shared out perfectly among the workers that are free."""
        sums, loads_f, loads_b = self._rest
        level_f = np.maximum(labels.slow_f, labels.pend_f)
        level_b = np.maximum(labels.slow_b, labels.pend_b)
        dead = np.zeros(len(level_f), bool)
        if position:
            free = self._count[None, :] - (labels.used[:, None] // self._place) % (self._count + 1)
            rate_f, rate_b = free @ loads_f[position], free @ loads_b[position]
            dead = (rate_f <= 0) | (rate_b <= 0)
            level_f = np.maximum(level_f, 1 / np.where(dead, 1.0, rate_f))
            level_b = np.maximum(level_b, 1 / np.where(dead, 1.0, rate_b))
        start = labels.forward + self._more * level_f + labels.turn
        end = labels.backward + self._more * level_b + labels.busy_b + labels.pend_u
        return np.where(dead, np.inf, start + np.maximum(labels.tail, end) + sums[position])

    def _cut(self, labels: _Labels, position: int) -> _Labels:
        score = self._score(labels, position)
        labels, score = labels.take(np.isfinite(score)), score[np.isfinite(score)]
        order = np.lexsort((labels.serial, score))
        state = (labels.used * len(self._count) + labels.group)[order]
        by_state = np.argsort(state, kind="stable")
        sorted_state = state[by_state]
        starts = np.concatenate([[True], sorted_state[1:] != sorted_state[:-1]]) if len(state) else np.array([], bool)
        rank = np.arange(len(state)) - np.maximum.accumulate(np.where(starts, np.arange(len(state)), 0))
        keep = np.zeros(len(state), bool)
        keep[by_state] = rank < PER_STATE
        kept = labels.take(order[keep][: self._width])
        self._history.append((kept.serial, np.stack([kept.column, kept.parent])))
        return kept

    def _trace(self, whole: _Labels) -> _History:
        steps = {
            int(serial): (int(column), int(parent))
            for serials, pairs in self._history
            for serial, column, parent in zip(serials, *pairs, strict=True)
        }
        return _History(self._columns, whole, steps)


@dataclass(slots=True)
class _History:
    """How each label came about."""

    columns: list[Column]
    whole: _Labels
    steps: dict[int, tuple[int, int]]

    def __call__(self, index: int) -> tuple[Column, ...]:
        found, parent = [self.columns[int(self.whole.column[index])]], int(self.whole.parent[index])
        while parent >= 0:
            column, parent = self.steps[parent]
            found.append(self.columns[column])
        return tuple(found)


def _rest(instance: Instance) -> tuple[Floats, Floats, Floats]:
    """Of positions 0 .. i - 1, by i: least sum of forward and backward; rate at which each group could run them."""
    n, groups = len(instance.problem.order), len(instance.groups)
    single = np.full((n, groups, 2), np.inf)
    for i in range(n):
        for group in range(groups):
            column = instance.columns.get((i, i, group))
            if column is not None:
                single[i, group] = column.forward_s, column.backward_s
    least = np.where(np.isfinite(single), single, np.inf).sum(axis=2).min(axis=1)
    least = np.where(np.isfinite(least), least, 0.0)  # colocated partitions have no column of their own
    total = np.where(np.isfinite(single), single, 0.0).cumsum(axis=0)
    some = np.isfinite(single).any(axis=0, keepdims=True)
    with np.errstate(divide="ignore"):
        rate = np.where(some, 1 / total, 0.0)
    rate = np.concatenate([np.zeros((1, groups, 2)), np.minimum(rate, 1e18)])
    return np.concatenate([[0.0], np.cumsum(least)]), rate[:, :, 0], rate[:, :, 1]
