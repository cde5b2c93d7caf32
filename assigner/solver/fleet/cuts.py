"""Where to cut a chain between given workers in a given order: an exact path within two limits on the slowest servers.

behind[s, i] = least seconds of stages s, s + 1, ... when stage s starts at position i
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.fleet.path_program import KindPipeline, KindStage, ServerPrices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from assigner.solver.fleet.paths import KindPaths

    Floats = NDArray[np.float64]


class FixedOrder:
    """Stages in a fixed order of workers.

    Args:
        paths: Prices of the segments.
        groups: The group of each stage's worker.
    """

    def __init__(self, paths: KindPaths, groups: Sequence[int]) -> None:
        self._paths, self._rows = paths, [paths.row[group] for group in groups]
        links, n = paths.fleet.links, paths.fleet.n
        self._hops = [
            ServerPrices(forward + backward, forward, backward)
            for left, right in itertools.pairwise(groups)
            for forward, backward in [[each[links.type_of, left, right] for each in (links.forward, links.backward)]]
        ]
        self._ends = np.minimum(np.arange(n)[:, None] + 1 + np.arange(paths.prices.table.longest)[None, :], n)
        self._busier = _busier(paths, self._rows, groups)

    def _servers(self, at: int) -> ServerPrices:
        """Stage `at`: [first, length - 1]."""
        stages, row = self._paths.real.stages, self._rows[at]
        forward, backward = stages.forward[row], stages.backward[row]
        if self._busier is not None:
            forward, backward = (
                seconds + left[:, None] + right[self._ends]
                for seconds, left, right in zip((forward, backward), *self._busier[at], strict=True)
            )
        return ServerPrices(stages.seconds[row], forward, backward)

    def least(self, limit_f: float, limit_b: float) -> KindPipeline | None:
        """The cuts with the least sum of which no server is above its limit; None: there are none.

        A step's kind is the row of its worker's group in `paths.real`.
        """
        n = self._paths.fleet.n
        behind = np.full(n + 1, np.inf)
        behind[n] = 0.0
        taken: list[NDArray[np.int64]] = []
        for at in range(len(self._rows) - 1, -1, -1):
            ways = self._servers(at).within(limit_f, limit_b) + behind[self._ends]
            taken.append(np.argmin(ways, axis=1))
            behind = np.full(n + 1, np.inf)
            behind[:n] = ways[np.arange(n), taken[-1]]
            if at:
                behind[:n] += self._hops[at - 1].within(limit_f, limit_b)
        if not np.isfinite(behind[0]):
            return None
        steps, i = [], 0
        for row, lengths in zip(self._rows, reversed(taken), strict=True):
            steps.append(KindStage(i, int(lengths[i]) + 1, row))
            i += steps[-1].length
        return KindPipeline(float(behind[0]), tuple(steps))

    def seconds(self, found: KindPipeline) -> float:
        """The step time of these cuts."""
        slowest = []
        for at, step in enumerate(found.steps):
            own = self._servers(at)
            slowest.append((own.forward[step.first, step.length - 1], own.backward[step.first, step.length - 1]))
        slowest += [
            (hop.forward[step.first], hop.backward[step.first])
            for hop, step in zip(self._hops, found.steps[1:], strict=True)
        ]
        return found.seconds + self._paths.fleet.more * float(np.max(slowest, axis=0).sum())


def _busier(
    paths: KindPaths, rows: Sequence[int], groups: Sequence[int]
) -> list[tuple[list[Floats], list[Floats]]] | None:
    """What messages keep each stage busy beyond the least that counts already; None: they keep nobody busy.

    Returns:
        For each stage: by way (forward, backward), at its left boundary [position] and at its right one [0 .. n].
    """
    links, n = paths.fleet.links, paths.fleet.n
    if not any(each.any() for way in links.occupied for each in way):
        return None
    left, right = ([[np.zeros(n + 1) for _ in range(2)] for _ in rows] for _ in range(2))
    for at, (one, other) in enumerate(itertools.pairwise(groups)):
        here, there = (
            [np.append(way[end][links.type_of, one, other], 0.0) for way in links.occupied] for end in range(2)
        )
        right[at], left[at + 1] = here, there
    least = paths.real.busy
    for at, row in enumerate(rows):
        for way in range(2):
            if at:
                left[at][way] = np.maximum(0.0, left[at][way] - least[way][0][row])
            if at < len(rows) - 1:
                right[at][way] = np.maximum(0.0, right[at][way] - least[way][1][row])
    return [([each[:n] for each in ones], others) for ones, others in zip(left, right, strict=True)]
