"""Which workers take the stages of a pipeline of kinds: the links between neighbours at their least.

A beam over the stages, then swaps of two workers of one kind, or with one that is free, as long as one helps. Where
links inside a host are faster, this is what keeps neighbours on one host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.limits import tuning
from assigner.solver.limits.tuning import ROUNDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from assigner.solver.fleet.option_arrays import OptionArrays
    from assigner.solver.fleet.path_program import KindStage
    from assigner.solver.fleet.relaxation import KindRelaxation
    from assigner.solver.problem.arrays import Floats, Ints
    from assigner.solver.problem.stage_options import StageOption


FAR = 1e6
"""Seconds for a link that is missing: a line that needs none is preferred."""


class WorkerAssignment:
    """The workers of a fleet.

    Args:
        prices: Those of intervals by kind, which its pipelines are made of.
    """

    def __init__(self, fleet: KindRelaxation, prices: OptionArrays) -> None:
        self._fleet, self._stages, links = fleet, prices.stages, fleet.links
        self._real, self._row = prices.by_worker()  # and the number there of each group of workers
        self._groups = [np.array(kind) for kind in fleet.kinds]
        self._size = np.array([len(group) for group in fleet.table.groups])
        self._forward = np.minimum(links.forward, FAR)
        self._backward = np.minimum(links.backward, FAR)

    def option(self, step: KindStage, group: int) -> StageOption | None:
        """A stage on a worker of a group; its own price is known by then."""
        self._real.settle(self._row[group], step.first, step.length)
        return self._real.options.find(step.first, step.first + step.length - 1, group)

    def line(self, steps: Sequence[KindStage]) -> list[int]:
        """A group for each stage of a pipeline of kinds.

        Messages slower than its slowest stages forward and backward count for every micro-batch.
        """
        if all(len(groups) == 1 for groups in self._groups):
            return [int(self._groups[step.kind][0]) for step in steps]
        more, kinds, slowest = self._fleet.more, [step.kind for step in steps], self._stages.slowest(steps)
        types = [int(self._fleet.links.type_of[step.first]) for step in steps]
        hops = {
            type_: self._forward[type_] + self._backward[type_]
            + more * np.maximum(0.0, self._forward[type_] - slowest[0])
            + more * np.maximum(0.0, self._backward[type_] - slowest[1])
            for type_ in sorted(set(types))
        }  # fmt: skip
        between = [hops[type_] for type_ in types]
        own = self._own(steps, slowest)
        return self._swapped(self._beam(kinds, between, own), kinds, between, own)

    def _own(self, steps: Sequence[KindStage], slowest: tuple[float, float]) -> Floats:
        """Seconds that each stage takes on each group, [stage, group], as far as that differs within a kind."""
        if len(self._real.kinds) == len(self._fleet.kinds):
            return np.zeros((len(steps), len(self._size)))
        stages, more = self._real.stages, self._fleet.more
        rows, own = np.array(self._row), []
        for step in steps:
            at = rows, step.first, step.length - 1
            forward, backward = (np.minimum(each[at], FAR) for each in (stages.forward, stages.backward))
            late = np.maximum(0.0, forward - slowest[0]) + np.maximum(0.0, backward - slowest[1])
            own.append(np.minimum(stages.seconds[at] + more * late, FAR))
        return np.array(own)

    def _beam(self, kinds: Sequence[int], between: Sequence[Floats], own: Floats) -> list[int]:
        used = np.zeros((1, len(self._size)), np.int16)
        seconds, lines = np.zeros(1), np.zeros((1, 0), np.int64)
        for at, kind in enumerate(kinds):
            groups = self._groups[kind]
            grown = seconds[:, None] + own[at, groups][None, :]
            if at:
                grown = grown + between[at][lines[:, -1]][:, groups]
            grown = np.where(used[:, groups] < self._size[groups], grown, np.inf)
            rows, columns = self._kept(grown, used, groups)
            seconds, used = grown[rows, columns], used[rows]
            used[np.arange(len(rows)), groups[columns]] += 1
            lines = np.concatenate([lines[rows], groups[columns][:, None]], axis=1)
        return [int(group) for group in lines[0]]

    def _kept(self, grown: Floats, used: NDArray[np.int16], groups: Ints) -> tuple[Ints, Ints]:
        """The most promising partial lines, the best first: few with one last worker, none with the same workers."""
        kept: list[tuple[int, int]] = []
        seen: set[tuple[bytes, int]] = set()
        of_group: dict[int, int] = {}
        for flat in np.argsort(grown, axis=None, kind="stable"):
            row, column = divmod(int(flat), grown.shape[1])
            if not np.isfinite(grown[row, column]) or len(kept) == tuning.ASSIGNMENT_BEAM:
                break
            workers = used[row].copy()
            workers[groups[column]] += 1
            key = workers.tobytes(), column
            if of_group.get(column, 0) < tuning.ASSIGNMENTS_PER_GROUP and key not in seen:
                seen.add(key)
                of_group[column] = of_group.get(column, 0) + 1
                kept.append((row, column))
        rows, columns = np.array(kept).T
        return rows, columns

    def _swapped(self, line: list[int], kinds: Sequence[int], between: Sequence[Floats], own: Floats) -> list[int]:
        """The line after every swap that helps."""
        free = self._size - np.bincount(line, minlength=len(self._size))
        count = len(line)

        def around(places: set[int], changed: list[int]) -> float:
            hops = {place for at in places for place in (at, at + 1) if 0 < place < count}
            there = sum(float(between[place][changed[place - 1], changed[place]]) for place in sorted(hops))
            return there + sum(float(own[at, changed[at]]) for at in sorted(places))

        improved = True
        while improved:
            improved = False
            for a in range(count):
                for b in range(a + 1, count):
                    if kinds[a] == kinds[b] and line[a] != line[b]:
                        changed = list(line)
                        changed[a], changed[b] = line[b], line[a]
                        if around({a, b}, changed) < around({a, b}, line) * (1 - ROUNDING):
                            line, improved = changed, True
                for group in self._groups[kinds[a]]:
                    if free[group]:
                        changed = list(line)
                        changed[a] = int(group)
                        if around({a}, changed) < around({a}, line) * (1 - ROUNDING):
                            free[line[a]] += 1
                            free[group] -= 1
                            line, improved = changed, True
        return line
