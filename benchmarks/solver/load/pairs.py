"""Loads of very many stages at once: every pair of nested downsets is a stage.

What a value costs a stage depends on which of its source and targets lie in either downset, and few such patterns
occur. With L[I, r] = 1 where downset I shows pattern r of a value, and W[r, J] what that value costs a stage that ends
at J when I shows pattern r, the costs of all stages from I to J are the matrix product L W.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from load.items import Flow, Items, memory_binds
from load.remat import Choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Numbers = NDArray[np.intp]
Mask = Callable[[Bools, Bools], Bools]

_DENSE = 1 << 21
_ROWS = 1 << 12


@dataclass(frozen=True)
class Pairs:
    """Stages between downsets.

    Args:
        first: Number of the downset in front of each stage, ascending.
        last: Number of the downset that ends with it.
        loads: Row per choice of a class and a number of replicas: a lower bound on the load; inf: it does not fit.
        exact: Row per choice: the bound is the load.
    """

    first: Numbers
    last: Numbers
    loads: Floats
    exact: Bools


@dataclass(frozen=True)
class _Patterns:
    """How downsets look on the items that some flows touch, as codes; a flow's columns among them, its source first."""

    flows: tuple[tuple[Flow, list[int]], ...]
    rows: Bools
    code: Numbers


class PairCosts:
    """Prices of the stages between given downsets.

    Args:
        items: The problem's items.
        held: Row per downset, column per item.
    """

    def __init__(self, items: Items, held: Bools) -> None:
        self.items, self.held = items, held
        problem = items.problem
        self.classes = len(problem.devices)
        base = [[problem.nodes[n].options[0] for n in group] for group in items.members]
        seconds = np.array([np.sum([option.seconds for option in group], axis=0) for group in base]).reshape(
            items.count, self.classes
        )
        self.seconds = seconds
        self.choices = tuple(
            (c, r)
            for c, device in enumerate(problem.devices)
            for r in range(1, max(1, min(problem.replicas, device.count)) + 1)
        )
        self._sync = sums(held, np.array([sum(problem.nodes[n].sync for n in group) for group in items.members]))
        self._impossible = sums(held, np.isinf(seconds).astype(np.float64))
        self._time = sums(held, np.where(np.isinf(seconds), 0.0, seconds))
        self._stored = sums(held, np.array([sum(option.stored for option in group) for group in base]))
        self._fixed = sums(held, np.array([sum(option.fixed for option in group) for group in base]))
        padded = np.packbits(held, axis=1, bitorder="little")
        words = -(-padded.shape[1] // 8)
        padded = np.pad(padded, ((0, 0), (0, 8 * words - padded.shape[1])))
        self._words = padded.view(np.uint64).reshape(len(held), words)
        self.memory_matters = memory_binds(problem)
        self._choices: dict[tuple[int, int], Choices] = {}

    @cached_property
    def _patterns(self) -> tuple[_Patterns, ...]:
        flows: dict[tuple[int, ...], list[Flow]] = {}
        for flow in self.items.flows:
            flows.setdefault(tuple(sorted((flow.source, *flow.targets))), []).append(flow)
        found = []
        for touched, group in flows.items():
            columns = self.held[:, touched]
            place = {item: n for n, item in enumerate(touched)}
            ends = tuple((flow, [place[flow.source], *(place[item] for item in flow.targets)]) for flow in group)
            if len(touched) <= 62:
                key = columns @ (1 << np.arange(len(touched), dtype=np.int64))
                _, at, code = np.unique(key, return_index=True, return_inverse=True)
                found.append(_Patterns(ends, columns[at], code.reshape(-1)))
            else:
                rows, code = np.unique(columns, axis=0, return_inverse=True)
                found.append(_Patterns(ends, rows, code.reshape(-1)))
        return tuple(found)

    def pairs(self, firsts: Numbers, lasts: Numbers, *, limit: float, position: int) -> Iterator[Pairs]:
        """The stages with a load below `limit`, in blocks of ascending `first`.

        Args:
            firsts: Numbers of the downsets in front of stages, ascending.
            lasts: Numbers of those that end with them.
            limit: Stages that reach it are of no interest.
            position: Of the stage, from the end of the line.
        """
        height = min(_ROWS, max(1, _DENSE // max(1, len(lasts))))
        tables = self._tables(lasts)
        for start in range(0, len(firsts), height):
            rows = firsts[start : start + height]
            mask = self._nested(rows, lasts)
            if math.isfinite(limit):
                mask &= self._compute(rows[:, None], lasts[None, :]).min(axis=0) < limit
            at = np.nonzero(mask)
            if len(at[0]):
                yield self._block(rows, lasts, at, tables, limit=limit, position=position)

    def _nested(self, rows: Numbers, columns: Numbers) -> Bools:
        left, right = self._words[rows], ~self._words[columns]
        mask: Bools = rows[:, None] != columns[None, :]
        for word in range(left.shape[1]):
            mask &= (left[:, word, None] & right[None, :, word]) == 0
        return mask

    def _compute(self, first: Numbers, last: Numbers) -> Floats:
        """Per choice the time by first options; inf where a node cannot run on the class."""
        sync = self._sync[last] - self._sync[first]
        return np.stack(
            [
                np.where(
                    self._impossible[last, c] > self._impossible[first, c], np.inf,
                    (self._time[last, c] - self._time[first, c] + (r - 1) / r * sync) / r,
                )
                for c, r in self.choices
            ]
        )  # fmt: skip

    def _tables(self, lasts: Numbers) -> dict[str, Floats]:
        return {name: self._table(values, lasts) for name, values in self._values.items()}

    @cached_property
    def _values(self) -> dict[str, list[Floats]]:
        """What flows cost a stage, by patterns in front and at the end."""
        added = self.items.problem.transfer.rule == "added"
        masks: dict[str, Mask] = {"both": _moves} if added else {"out": _passes_end, "in": _passes_front}
        return {name: [_of_flows(pattern, mask) for pattern in self._patterns] for name, mask in masks.items()}

    def _table(self, values: Sequence[Floats], lasts: Numbers) -> Floats:
        """W: row per pattern, column per ending downset."""
        parts = [by_pair[:, pattern.code[lasts]] for by_pair, pattern in zip(values, self._patterns, strict=True)]
        return np.concatenate(parts) if parts else np.zeros((0, len(lasts)))

    def _fronts(self, rows: Numbers) -> Floats:
        """L: row per downset in front, column per pattern of each flow."""
        width = sum(len(pattern.rows) for pattern in self._patterns)
        result = np.zeros((len(rows), width))
        offset = 0
        for pattern in self._patterns:
            result[np.arange(len(rows)), offset + pattern.code[rows]] = 1.0
            offset += len(pattern.rows)
        return result

    def _block(
        self,
        rows: Numbers,
        lasts: Numbers,
        at: tuple[Numbers, ...],
        tables: dict[str, Floats],
        *,
        limit: float,
        position: int,
    ) -> Pairs:
        first, last = rows[at[0]], lasts[at[1]]
        fronts = self._fronts(rows)
        found = {name: (fronts @ table)[at] for name, table in tables.items()}
        compute = self._compute(first, last)
        loads, exact = np.empty_like(compute), np.ones(compute.shape, dtype=bool)
        for n, (c, _) in enumerate(self.choices):
            added = np.zeros(len(first))
            below = self._load(n, compute[n], found) < limit
            if self.memory_matters and math.isfinite(self.items.problem.devices[c].memory):
                added, exact[n] = self._memory(c, position, (first, last), below)
            loads[n] = self._load(n, compute[n] + added, found)
        kept = loads.min(axis=0) < limit
        return Pairs(first[kept], last[kept], loads[:, kept], exact[:, kept])

    def price(self, first: int, last: int, *, choice: int, added: float) -> float:
        """The load of one stage to whose compute second options add `added` seconds."""
        rows, lasts = np.array([first]), np.array([last])
        fronts = self._fronts(rows)
        found = {name: (fronts @ table)[0] for name, table in self._tables(lasts).items()}
        return float(self._load(choice, self._compute(rows, lasts)[choice] + added, found)[0])

    def _load(self, choice: int, compute: Floats, found: dict[str, Floats]) -> Floats:
        c, r = self.choices[choice]
        if not self.items.problem.devices[c].pays:
            return compute
        if "both" in found:
            return compute + found["both"] / r
        return np.maximum(compute, np.maximum(found["out"], found["in"]) / r)

    def _memory(
        self, device: int, position: int, between: tuple[Numbers, Numbers], wanted: Bools
    ) -> tuple[Floats, Bools]:
        """Seconds that second options must add at least, and whether that is exact; inf: the stage does not fit."""
        problem, (first, last) = self.items.problem, between
        depth, room = problem.in_flight(position), problem.devices[device].memory * (1 + 1e-12)
        need = self._fixed[last] - self._fixed[first] - room + depth * (self._stored[last] - self._stored[first])
        sure = need <= 0
        added = np.where(sure, 0.0, np.inf)
        asked = np.flatnonzero(~sure & wanted)
        if (device, position) not in self._choices:
            self._choices[device, position] = Choices(self.items, device, position)
        choices = self._choices[device, position]
        for start in range(0, len(asked), _ROWS):
            part = asked[start : start + _ROWS]
            inside = self.held[last[part]] & ~self.held[first[part]]
            added[part] = choices.bound(inside, need[part])
        return added, sure | np.isinf(added)


def sums(held: Bools, values: Floats) -> Floats:
    """Per downset the sum of the items' values, a block of downsets at a time."""
    return np.concatenate([held[start : start + _ROWS] @ values for start in range(0, len(held), _ROWS)])


def _of_flows(pattern: _Patterns, mask: Mask) -> Floats:
    """By patterns in front and at the end: what the flows that touch the same items cost a stage."""
    by_pair = np.zeros((len(pattern.rows), len(pattern.rows)))
    for flow, columns in pattern.flows:
        rows = pattern.rows[:, columns]
        by_pair += flow.cost * mask(rows[:, None, :], rows[None, :, :])
    return by_pair


# What a value does to a stage, by how its source (first on the last axis) and targets lie in the downsets that the
# stage has in front and ends with.


def _moves(front: Bools, end: Bools) -> Bools:
    """It leaves the stage, or arrives there."""
    inside = end & ~front
    return np.where(inside[..., 0], ~inside[..., 1:].all(axis=-1), inside[..., 1:].any(axis=-1))


def _passes_end(_front: Bools, end: Bools) -> Bools:
    return end[..., 0] & ~end[..., 1:].all(axis=-1)


def _passes_front(front: Bools, _end: Bools) -> Bools:
    return front[..., 0] & ~front[..., 1:].all(axis=-1)
