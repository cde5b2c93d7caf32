"""Paths through a fleet: pipelines of kinds of workers, with the least sum within two limits on the slowest servers.

Where links inside a host are faster than between hosts, visits to hosts are part of the path (path_program.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from assigner.solver import tuning
from assigner.solver.fleet.option_arrays import OptionArrays
from assigner.solver.fleet.path_program import PathProgram, ServerPrices
from assigner.solver.prices import WorkerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from assigner.solver.fleet.hop_arrays import HopArrays
    from assigner.solver.fleet.path_program import KindPipeline, KindStage
    from assigner.solver.fleet.relaxation import KindRelaxation
    from assigner.solver.prices import PriceTable

    Floats = NDArray[np.float64]


class KindPrices:
    """A table of segments as a sweep sees it.

    Args:
        instance: What is to be placed.
        kinds: Workers that count as alike.
        longest: Partitions in the longest segment.
        links: The least that messages keep a stage busy counts for it as a server.

    Attributes:
        table: The segments.
        stages: Their seconds, as far as they lie on the spine; as servers with the least that messages keep them busy.
    """

    def __init__(self, instance: PriceTable, kinds: Sequence[WorkerKind], longest: int, links: HopArrays) -> None:
        table, spine = OptionArrays(instance, kinds, longest), instance.problem.spine
        forward, backward = (
            np.where(table.anywhere(on) | ~np.isfinite(seconds), seconds, 0.0)
            for seconds, on in ((table.forward, spine.forward), (table.backward, spine.backward))
        )
        seconds = forward + backward
        if instance.problem.exact:
            seconds[:, 0] += table.update[:, 0]
        busy_f, busy_b = (_at_ends(*busy, longest) for busy in links.busy(kinds))
        self.table, self.stages = table, ServerPrices(seconds, forward + busy_f, backward + busy_b)
        self._on = table.anywhere(spine.backward)

    def settle(self, kind: int, first: int, length: int) -> None:
        """Price one segment exactly."""
        at = kind, first, length - 1
        if not self.table.settled[at]:
            more = -self.table.backward[at] + self.table.settle(kind, first, length)
            if self._on[first, length - 1]:
                self.stages.seconds[at] += more
                self.stages.backward[at] += more


def _at_ends(left: Floats, right: Floats, longest: int) -> Floats:
    """What both boundaries of each segment add up to: [kind, first, length - 1]."""
    n = left.shape[1] - 1
    ends = np.minimum(np.arange(n)[:, None] + np.arange(1, longest + 1)[None, :], n)
    both: Floats = left[:, :n, None] + right[:, ends]
    return both


class KindPaths:
    """Paths through a fleet, with segments up to some length.

    Args:
        fleet: The relaxation.
        limit: No slowest server forward is above, in seconds.

    Attributes:
        prices: Of the segments, by kind.
        real: The same for each group of workers with the same prices; `row` has a group's number there.
        exact: Whether all prices of segments within the limit are exact, and not bounds.
    """

    def __init__(self, fleet: KindRelaxation, limit: float) -> None:
        self.fleet, instance = fleet, fleet.instance
        self.prices = KindPrices(instance, fleet.kinds, fleet.reach(limit), fleet.links)
        self._sweep = _sweep(fleet)
        table = self.prices.table
        open_ = np.argwhere(~table.settled & np.less_equal(table.forward, limit))
        self.exact = int(open_[:, 2].sum()) <= tuning.SETTLED
        if self.exact:
            for kind, first, length in open_:
                instance.problem.clock.check()
                self.prices.settle(int(kind), int(first), int(length) + 1)
        firsts = sorted(set(instance.like))
        self.merged = len(firsts) > len(fleet.kinds)
        self.row = [firsts.index(like) for like in instance.like]
        self.real = self.prices
        if self.merged:
            self.real = KindPrices(instance, [WorkerKind((first,), 1) for first in firsts], table.longest, fleet.links)
        else:
            number = {group: n for n, kind in enumerate(fleet.kinds) for group in kind.groups}
            self.row = [number[group] for group in range(len(instance.groups))]

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
    instance, kinds, links = fleet.instance, fleet.kinds, fleet.links
    counts, most = [kind.count for kind in kinds], instance.problem.most_workers
    every, clock = links.between(kinds), instance.problem.clock
    inside, between = (links.between(kinds, where=where) for where in (links.same_host, links.apart))
    if not (links.same_host | links.apart).all() or not (between.seconds > inside.seconds).any():
        return PathProgram(counts, most=most, work=fleet.work, between=every, clock=clock)
    worker = instance.problem.profile.worker
    hosts: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        for group in kind.groups:
            for name in instance.groups[group]:
                hosts.setdefault(worker[name].host, [0] * len(kinds))[number] += 1
    each_host = [tuple(used) for used in hosts.values()]
    visits = PathProgram(
        counts, most=most, work=fleet.work, between=between, inside=inside, hosts=each_host, clock=clock
    )
    if visits.states * fleet.n <= tuning.VISIT_STATES:
        return visits
    some = np.isfinite(between.seconds[1:])
    toll = float(np.min((between.seconds[1:] - every.seconds[1:])[some], initial=np.inf)) if some.any() else 0.0
    return PathProgram(
        counts, most=most, work=fleet.work, between=every, hosts=each_host, toll=max(0.0, toll), clock=clock
    )
