"""Paths through a fleet: pipelines of kinds of workers, with the least sum within two limits on the slowest servers.

Where links inside a host are faster than between hosts, visits to hosts are part of the path (path_program.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from assigner.solver.fleet.option_arrays import OptionArrays
from assigner.solver.fleet.path_program import PathProgram
from assigner.solver.limits import tuning
from assigner.solver.problem.prices import WorkerKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from assigner.solver.fleet.path_program import KindPipeline, KindStage
    from assigner.solver.fleet.relaxation import KindRelaxation

    Floats = NDArray[np.float64]


class KindPaths:
    """Paths through a fleet, with intervals up to some length.

    Args:
        fleet: The relaxation.
        limit: No slowest server forward is above, in seconds.

    Attributes:
        prices: Of the intervals, by kind.
        real: The same for each group of workers with the same prices; `row` has a group's number there.
        exact: Whether all prices of intervals within the limit are exact, and not bounds.
    """

    def __init__(self, fleet: KindRelaxation, limit: float) -> None:
        self.fleet, table = fleet, fleet.table
        self.prices = OptionArrays(table, fleet.kinds, fleet.reach(limit), fleet.links)
        self._sweep = _sweep(fleet)
        open_ = np.argwhere(~self.prices.settled & np.less_equal(self.prices.forward, limit))
        self.exact = int(open_[:, 2].sum()) <= tuning.SETTLED
        if self.exact:
            for kind, first, length in open_:
                table.problem.clock.check()
                self.prices.settle(int(kind), int(first), int(length) + 1)
        firsts = sorted(set(table.like))
        self.merged = len(firsts) > len(fleet.kinds)
        self.row = [firsts.index(like) for like in table.like]
        self.real = self.prices
        if self.merged:
            each = [WorkerKind((first,), 1) for first in firsts]
            self.real = OptionArrays(table, each, self.prices.longest, fleet.links)
        else:
            number = {group: n for n, kind in enumerate(fleet.kinds) for group in kind.groups}
            self.row = [number[group] for group in range(len(table.groups))]

    @property
    def largest(self) -> tuple[float, float]:
        """The slowest that any stage or message is, forward and backward, in seconds."""
        forward, backward = self.servers
        return float(forward.max(initial=0.0)), float(backward.max(initial=0.0))

    @property
    def servers(self) -> tuple[Floats, Floats]:
        """All seconds that a server forward, and backward, can have, sorted; backward, bounds unless `exact`."""
        hops = self._sweep.boundaries
        forward, backward = (
            np.unique(np.concatenate([each[np.isfinite(each)] for each in (first, *more)]))
            for first, *more in (
                (self.prices.stages.forward, *(hop.forward for hop in hops)),
                (self.prices.stages.backward, *(hop.backward for hop in hops)),
            )
        )
        return forward, backward

    def least(self, limit_f: float, limit_b: float) -> KindPipeline | None:
        """The path with the least sum of which no server is above its limit; None: there is none."""
        return self._sweep.least(self.prices.stages, limit_f, limit_b)

    def slowest(self, steps: tuple[KindStage, ...]) -> tuple[float, float]:
        """The slowest stage forward and backward."""
        at = tuple(np.array([(step.kind, step.first, step.length - 1) for step in steps]).T)
        return float(self.prices.stages.forward[at].max()), float(self.prices.stages.backward[at].max())

    def seconds(self, found: KindPipeline) -> float:
        """The step time of a path."""
        return found.seconds + self.fleet.more * sum(self.slowest(found.steps))


def _sweep(fleet: KindRelaxation) -> PathProgram:
    """The sweep of a fleet, with visits to hosts where that tells more and is small enough."""
    table, kinds, links = fleet.table, fleet.kinds, fleet.links
    counts, most = [kind.count for kind in kinds], table.most_workers
    every, clock = links.between(kinds), table.problem.clock
    inside, between = (links.between(kinds, where=where) for where in (links.same_host, links.apart))
    if not (links.same_host | links.apart).all() or not (between.seconds > inside.seconds).any():
        return PathProgram(counts, most=most, work=fleet.work, between=every, clock=clock)
    worker = table.problem.profile.worker
    hosts: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        for group in kind.groups:
            for name in table.groups[group]:
                hosts.setdefault(worker[name].host, [0] * len(kinds))[number] += 1
    each_host = [tuple(used) for used in hosts.values()]
    some = np.isfinite(between.seconds)
    some[0] = False  # no boundary is in front of the first position
    toll = float((between.seconds[some] - every.seconds[some]).min()) if some.any() else 0.0
    plain = PathProgram(
        counts, most=most, work=fleet.work, between=every, hosts=each_host, toll=max(0.0, toll), clock=clock
    )
    room = tuning.VISIT_STATES * len(kinds) // (plain.states * fleet.n)
    if max(math.prod(count + 1 for count in host) for host in each_host) - 1 > room:
        return plain  # the visits to one host alone are too many to be made
    visits = PathProgram(
        counts, most=most, work=fleet.work, between=between, inside=inside, hosts=each_host, clock=clock
    )
    return visits if visits.states * fleet.n <= tuning.VISIT_STATES else plain
