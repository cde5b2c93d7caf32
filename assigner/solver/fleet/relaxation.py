"""One micro-batch count with workers taken by kind: a relaxation that is small whatever the fleet.

Workers of one kind count as alike, each interval and each message at the least price of any of them, so no plan is
faster than the best pipeline of kinds. Within two limits on the slowest servers that pipeline is a
path (path_program.py), and a search over the limits bounds the step time (hierarchy.py).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from assigner.solver.fleet.option_arrays import HopArrays, OptionArrays
from assigner.solver.fleet.path_program import PathProgram, ServerPrices, WorkSplit
from assigner.solver.limits import tuning
from assigner.solver.limits.tuning import ROUNDING
from assigner.solver.problem.perfect_split import perfect_split

if TYPE_CHECKING:
    from assigner.solver.problem.arrays import Flags, Floats
    from assigner.solver.problem.interval_prices import IntervalPrices, WorkerKind


class KindRelaxation:
    """The relaxation of one instance, and what it says without looking at intervals.

    Args:
        server: What a worker is limited by: its forwards and its backwards, "each" as under GPipe, or "both" together
            as under 1F1B; "forward": by its forwards, and messages count forward alone.
    """

    def __init__(self, table: IntervalPrices, *, server: Literal["each", "both", "forward"] = "each") -> None:
        self.table, self.more, self._server = table, table.micro_batches - 1, server
        self.n = len(table.problem.order)

    @cached_property
    def kinds(self) -> tuple[WorkerKind, ...]:
        """The workers by kind; where that is too many for a sweep, the two that differ least count as one."""
        kinds = list(self.table.kinds)
        while len(kinds) * math.prod(self._count(kind) + 1 for kind in kinds) * self.n > tuning.MOST_STATES:
            kinds.sort(key=self._speed)
            at = min(range(len(kinds) - 1), key=lambda at: self._speed(kinds[at + 1]) / self._speed(kinds[at]))
            kinds[at : at + 2] = [kinds[at] + kinds[at + 1]]
        return tuple(kinds)

    def _count(self, kind: WorkerKind) -> int:
        return sum(len(self.table.groups[group]) for group in kind)

    @property
    def counts(self) -> list[int]:
        """Workers of each kind."""
        return [self._count(kind) for kind in self.kinds]

    def _speed(self, kind: WorkerKind) -> float:
        prices = [price for group in kind for price in self.table.rows[group] if price is not None]
        return sum(price.forward_s + price.backward_s for price in prices) / max(1, len(prices)) + 1e-12

    @cached_property
    def links(self) -> HopArrays:
        """The messages."""
        return HopArrays(self.table)

    def prices(self, limit: float, in_flight: int | None = None) -> OptionArrays:
        """Those of all intervals that limit a worker to `limit` seconds; `in_flight` as of `OptionArrays`."""
        return OptionArrays(self.table, self.kinds, self.reach(limit), self.links, in_flight)

    @cached_property
    def sweep(self) -> PathProgram:
        """Finds paths, with visits to hosts where that tells more and is small enough."""
        table, kinds, links = self.table, self.kinds, self.links
        every, most = self._messages(), table.most_workers
        program = partial(PathProgram, self.counts, most=most, work=self.work, clock=table.problem.clock)
        inside, between = (self._messages(where) for where in (links.same_host, links.apart))
        if not (links.same_host | links.apart).all() or not (between.seconds > inside.seconds).any():
            return program(between=every)
        worker = table.problem.profile.worker
        hosts: dict[str, list[int]] = {}
        for number, kind in enumerate(kinds):
            for group in kind:
                for name in table.groups[group]:
                    hosts.setdefault(worker[name].host, [0] * len(kinds))[number] += 1
        each_host = [tuple(used) for used in hosts.values()]
        some = np.isfinite(between.seconds)
        some[0] = False  # no boundary is in front of the first position
        toll = float((between.seconds[some] - every.seconds[some]).min()) if some.any() else 0.0
        plain = program(between=every, hosts=each_host, toll=max(0.0, toll))
        room = tuning.VISIT_STATES * len(kinds) // (plain.states * self.n)
        if max(math.prod(count + 1 for count in host) for host in each_host) - 1 > room:
            return plain  # the visits to one host alone are too many to be made
        visits = program(between=between, inside=inside, hosts=each_host)
        return visits if visits.states * self.n <= tuning.VISIT_STATES else plain

    def _messages(self, where: Flags | None = None) -> ServerPrices:
        found = self.links.between(self.kinds, where=where)
        return replace(found, seconds=found.forward) if self._server == "forward" else found

    @cached_property
    def _seconds(self) -> Floats:
        """Least seconds [kind, position, forward or backward], 0 off the spine; inf: not there."""
        spine = self.table.problem.spine
        each = np.stack([self.table.figures("forward_s"), self.table.figures("backward_s")], axis=2)
        rows = np.stack([each[list(kind)].min(axis=0) for kind in self.kinds])
        on = np.array([spine.forward, spine.backward]).T
        return np.where(np.isfinite(rows), np.where(on, rows, 0.0), np.inf)

    def _work(self, seconds: Floats) -> WorkSplit:
        """Forwards, backwards or both, weighted by how fast each kind does all of them."""
        speed, least = perfect_split(seconds)
        behind = np.concatenate([np.cumsum(least[::-1])[::-1], [0.0]])
        return WorkSplit(speed, behind, float(speed @ np.array(self.counts)))

    @cached_property
    def _served(self) -> Floats:
        """Of `_seconds` those that a worker is limited by: [kind, position]."""
        return self._seconds.sum(axis=2) if self._server == "both" else self._seconds[:, :, 0]

    @cached_property
    def work(self) -> WorkSplit:
        """What everything from a position on must be done by: forwards, or forwards and backwards."""
        return self._work(self._served)

    @cached_property
    def low(self) -> tuple[float, float]:
        """Of GPipe: no slowest server forward, backward is faster; all is shared out perfectly among all workers."""
        return self.work.level, self._work(self._seconds[:, :, 1]).level

    @cached_property
    def sums(self) -> float:
        """Least seconds of one forward and one backward of everything, wherever that runs."""
        return float(self._seconds.sum(axis=2).min(axis=0).sum())

    @property
    def quick_bound(self) -> float:
        """No step is faster, in seconds; inf: a partition fits nowhere."""
        return self.sums + self.more * sum(self.low) if math.isfinite(self.sums) else math.inf

    def highest(self, target: float) -> tuple[float, float]:
        """A pipeline below the target has no slowest server forward, backward above."""
        if not self.more:
            return math.inf, math.inf
        spare = (target - self.sums) / self.more
        return spare - self.low[1], spare - self.low[0]

    def reach(self, limit: float) -> int:
        """Partitions in the longest interval that limits a worker to `limit` seconds: of "each", by its forward."""
        longest = 1
        for row in self._served * (1 - ROUNDING):
            sums = list(itertools.accumulate(np.where(np.isfinite(row), row, 0.0).tolist(), initial=0.0))
            longest = max([longest, *(bisect_right(sums, sums[i] + limit) - 1 - i for i in range(self.n))])
        return min(self.n, longest)
