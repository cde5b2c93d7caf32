"""Intervals and messages as arrays: what a stage of any kind, start and length takes, for chains of any size.

Where an interval must rematerialise, its backward is a lower bound at first (`memory.least_recompute_s`). `settle`
raises it to what stage options have: the seconds themselves, unless the search for them was cut off (`LeastRemat`).
What is at least as large as both can be left as it is. As a server a stage has the least that messages keep it busy,
too.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from assigner.schedule.cost import message_s
from assigner.solver.fleet.path_program import ServerPrices
from assigner.solver.problem.memory import least_recompute_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import LinkPoint
    from assigner.solver.problem.arrays import Flags, Floats
    from assigner.solver.problem.interval_prices import IntervalPrices, WorkerKind

_FIELDS = ("forward_s", "backward_s", "update_s", "activation_bytes", "workspace_bytes", "recompute_s")


class OptionArrays:
    """Seconds of every interval up to some length: arrays [kind, first, length - 1], inf where there is none.

    Args:
        kinds: Workers that count as alike; each interval has the least of their prices.
        in_flight: Micro-batches that a stage keeps at least; None: all, as under GPipe.

    Attributes:
        options: The stage options, priced one by one.
        forward, backward, update: Seconds as of `StageOption`; backward may be a lower bound.
        settled: Where no more is known of backward: it is exact, or what `settle` has made of it.
        stages: The same as a sweep sees them: seconds, as far as they lie on the spine; and as servers.
    """

    def __init__(
        self, table: IntervalPrices, kinds: Sequence[WorkerKind], longest: int, links: HopArrays,
        in_flight: int | None = None,
    ) -> None:  # fmt: skip
        self.table, self.kinds, self.longest, self._links = table, tuple(kinds), longest, links
        self._in_flight = in_flight or table.micro_batches
        self.options = table.gpipe
        rows = [self._kind(kind) for kind in self.kinds]
        self.forward: Floats = np.stack([row[0] for row in rows])
        self.backward: Floats = np.stack([row[1] for row in rows])
        self.update: Floats = np.stack([row[2] for row in rows])
        self.settled: Flags = np.stack([row[3] for row in rows])
        self.stages: ServerPrices = self._as_servers(links)

    def by_worker(self) -> tuple[OptionArrays, list[int]]:
        """The same without kinds: a row for all groups of workers that have the same prices, and which one each has."""
        firsts = sorted(set(self.table.like))
        if len(firsts) > len(self.kinds):
            arrays = OptionArrays(
                self.table, [(first,) for first in firsts], self.longest, self._links, self._in_flight
            )
            return arrays, [firsts.index(like) for like in self.table.like]
        number = {group: n for n, kind in enumerate(self.kinds) for group in kind}
        return self, [number[group] for group in range(len(self.table.groups))]

    def _as_servers(self, links: HopArrays) -> ServerPrices:
        spine = self.table.problem.spine
        forward, backward = (
            np.where(self._anywhere(on) | ~np.isfinite(seconds), seconds, 0.0)
            for seconds, on in ((self.forward, spine.forward), (self.backward, spine.backward))
        )
        seconds = forward + backward
        if self.table.problem.exact:
            seconds[:, 0] += self.update[:, 0]
        busy_f, busy_b = (_at_ends(*busy, self.longest) for busy in links.busy(self.kinds))
        return ServerPrices(seconds, forward + busy_f, backward + busy_b)

    @cached_property
    def busy(self) -> tuple[Floats, Floats]:
        """Seconds of a forward and a backward in which messages keep the worker from computing, at least."""
        forward, backward = known(self.forward), known(self.backward)
        return known(self.stages.forward) - forward, known(self.stages.backward) - backward

    @property
    def load(self) -> Floats:
        """Seconds of a step in which the worker is busy."""
        many = self.table.micro_batches
        loads: Floats = many * (self.forward + self.backward) + (many - 1) * sum(self.busy)
        loads[:, 0] += self.update[:, 0]
        return loads

    def _window(self, values: Floats) -> Floats:
        """Sums of each interval."""
        n = len(values)
        sums = np.concatenate([[0.0], np.cumsum(values)])
        ends = np.minimum(np.arange(n)[:, None] + 1 + np.arange(self.longest)[None, :], n)
        within: Floats = sums[ends] - sums[:n, None]
        return within

    def _running_max(self, values: Floats) -> Floats:
        """Largest of each interval."""
        n = len(values)
        ends = np.minimum(np.arange(n)[:, None] + np.arange(self.longest)[None, :], n - 1)
        largest: Floats = np.maximum.accumulate(values[ends], axis=1)
        return largest

    def _anywhere(self, flags: Sequence[bool] | Flags) -> Flags:
        """Whether any partition of an interval has the flag: [first, length - 1]."""
        return self._window(np.array(flags, dtype=float)) > 0

    @cached_property
    def _bytes(self) -> tuple[Floats, Floats, Floats]:
        """(state, values read, messages) of each interval; inf where it would leave the chain or may not be."""
        problem, n, bytes_ = self.table.problem, len(self.table.problem.order), self.table.interval_bytes
        if bytes_.ones is not None:
            ones = np.array(bytes_.ones)
            state, read = self._window(ones[:, 0]), self._window(ones[:, 1])
            ends = np.minimum(np.arange(n)[:, None] + np.arange(self.longest)[None, :], n - 1)
            messages = ones[ends, 2]
        else:
            grown = np.full((3, n, self.longest), np.inf)
            for i in range(n):
                some = list(itertools.islice(bytes_.grown_from(i), self.longest))
                grown[:, i, : len(some)] = np.array(some).T
            state, read, messages = grown
        first, last = np.arange(n)[:, None], np.arange(n)[:, None] + np.arange(self.longest)[None, :]
        open_at, apart = np.array(problem.may_cut), np.array(problem.apart, dtype=float)
        may = (last < n) & open_at[first] & open_at[np.minimum(last + 1, n)] & (self._running_max(apart) < first)
        return np.where(may, state, np.inf), read, messages

    def _kind(self, kind: WorkerKind) -> tuple[Floats, Floats, Floats, Flags]:
        """The least of the prices of a kind's groups."""
        rows = [self._group(group) for group in sorted({self.table.like[group] for group in kind})]
        forward, backward, update, settled = (list(each) for each in zip(*rows, strict=True))
        return (
            np.minimum.reduce(forward), np.minimum.reduce(backward), np.minimum.reduce(update),
            np.logical_and.reduce(settled),
        )  # fmt: skip

    def _group(self, group: int) -> tuple[Floats, Floats, Floats, Flags]:
        """Prices of each interval on the workers of one group."""
        self.table.problem.clock.check()
        figures = np.stack([self.table.figures(name)[group] for name in _FIELDS])
        nowhere = np.isinf(figures[0])
        f, b, u, a, w, r = np.where(nowhere, 0.0, figures)
        state, read, messages = self._bytes
        kept = self._in_flight
        fixed = state + kept * read + self._running_max(w) + messages
        again, settled = least_recompute_s(
            (r, a), self.table.problem.remat_rules, self.table.capacity(group) - fixed, kept,
            sums=self._window, largest=self._running_max,
        )  # fmt: skip
        missing = self._anywhere(nowhere) | ~np.isfinite(again)
        forward = np.where(missing, np.inf, self._window(f))
        backward = np.where(missing, np.inf, self._window(b) + np.where(missing, 0.0, again))
        return forward, backward, np.where(missing, np.inf, self._window(u)), settled | missing

    def settle(self, kind: int, first: int, length: int) -> None:
        """Raise the lower bound of one interval's backward to that of stage options, if that is more."""
        at = kind, first, length - 1
        if self.settled[at]:
            return
        groups = sorted({self.table.like[group] for group in self.kinds[kind]})
        found = [self.options.find(first, first + length - 1, group) for group in groups]
        least = min((option.backward_s for option in found if option is not None), default=math.inf)
        more = max(0.0, least - self.backward[at])
        self.backward[at] += more
        self.settled[at] = True
        if any(self.table.problem.spine.backward[first : first + length]):
            self.stages.seconds[at] += more
            self.stages.backward[at] += more


def known(seconds: Floats) -> Floats:
    """Seconds, 0 where there is no stage."""
    return np.where(np.isfinite(seconds), seconds, 0.0)


def _at_ends(left: Floats, right: Floats, longest: int) -> Floats:
    """What both boundaries of each interval add up to: [kind, first, length - 1]."""
    n = left.shape[1] - 1
    ends = np.minimum(np.arange(n)[:, None] + np.arange(1, longest + 1)[None, :], n)
    both: Floats = left[:, :n, None] + right[:, ends]
    return both


class HopArrays:
    """Seconds on the wire: arrays [type of boundary, left group, right group], inf: the two cannot be neighbours.

    Boundaries over which messages of the same sizes go are of one type and priced once, and so are links that were
    measured alike: a fleet of 64 workers with links of their own is priced in a moment.

    Attributes:
        type_of: The type of each boundary, by position; that of position 0 means nothing.
        forward, backward: Of the activations and of the gradients, as far as they lie on the spine.
        same_host: Whether all workers of two groups are on one host.
        apart: Whether no worker of one group is on a host of the other.
    """

    def __init__(self, table: IntervalPrices) -> None:
        problem = table.problem
        self._table, spine = table, problem.spine
        kinds: dict[tuple[tuple[tuple[float, bool], ...], bool, bool], int] = {}
        self.type_of = np.array(
            [
                kinds.setdefault((self._sizes(i), spine.forward_hop[i], spine.backward_hop[i]), len(kinds))
                for i in range(len(problem.order))
            ]
        )
        self._lengths = np.unique([size for sizes, _, _ in kinds for size, _ in sizes])
        messages = [(number, size, gradient) for number, (sizes, _, _) in enumerate(kinds) for size, gradient in sizes]
        self._number = np.array([number for number, _, _ in messages], dtype=np.int64)
        self._at = np.searchsorted(self._lengths, [size for _, size, _ in messages])
        self._graded = np.array([gradient for _, _, gradient in messages], dtype=bool)
        self._on = np.array([on for _, *on in kinds], dtype=bool).T
        self._swept: dict[object, Floats] = {}
        groups = table.groups
        self.forward: Floats = np.full((len(kinds), len(groups), len(groups)), np.inf)
        self.backward: Floats = self.forward.copy()
        for left, lefts in enumerate(groups):
            for right, rights in enumerate(groups):
                if (left != right or len(lefts) > 1) and problem.follows(lefts[0], rights[-1]):
                    self._price(left, right)
        hosts = [{problem.profile.worker[name].host for name in group} for group in groups]
        self.same_host: Flags = np.array([[len(one | other) == 1 for other in hosts] for one in hosts])
        self.apart: Flags = np.array([[not one & other for other in hosts] for one in hosts])

    def _sizes(self, i: int) -> tuple[tuple[float, bool], ...]:
        cost = self._table.problem.cost
        return tuple(
            (cost.output_bytes(output, self._table.size), gradient) for output, gradient in self._table.problem.hops[i]
        )

    def _price(self, left: int, right: int) -> None:
        source, target = self._table.groups[left][0], self._table.groups[right][-1]
        count = len(self.forward)
        there = np.bincount(self._number, self._seconds(source, target)[self._at], count)
        back_s = self._seconds(target, source)[self._at]
        back = np.bincount(self._number, np.where(self._graded, back_s, 0.0), count)
        may = np.isfinite(there + back)
        self.forward[:, left, right] = np.where(may, np.where(self._on[0], there, 0.0), np.inf)
        self.backward[:, left, right] = np.where(may, np.where(self._on[1], back, 0.0), np.inf)

    def _seconds(self, source: str, target: str) -> Floats:
        """One message of each size."""
        link = self._table.problem.cost.link(source, target)
        if link is None:
            return np.full(len(self._lengths), np.inf)
        key = tuple((point.bytes, point.seconds) for point in link.points)
        if key not in self._swept:
            self._swept[key] = messages_s(link.points, self._lengths)
        return self._swept[key]

    def between(self, kinds: Sequence[WorkerKind], *, where: Flags | None = None) -> ServerPrices:
        """The least between two kinds, by position, of all pairs of their groups or of some."""
        found = []
        for seconds in (self.forward, self.backward):
            seen = seconds if where is None else np.where(where, seconds, np.inf)
            least = np.array([[seen[:, one][:, :, other].min(axis=(1, 2)) for other in kinds] for one in kinds])
            found.append(least.transpose(2, 0, 1)[self.type_of])
        return ServerPrices(found[0] + found[1], *found)

    def busy(self, kinds: Sequence[WorkerKind]) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """The least seconds that messages keep a stage busy, whoever is at their other end.

        Forward and backward, each at the stage's left and at its right boundary: arrays [kind, position].
        """
        here = np.isfinite(self.forward)
        forward, backward = (
            (self._least(right, here, kinds, 1), self._least(left, here, kinds, 2)) for left, right in self.occupied
        )
        return forward, backward

    @cached_property
    def occupied(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Seconds in which messages keep the left, the right worker from computing, as `Hop` has them.

        Forward and backward: arrays [type of boundary, left group, right group], 0 without a link.
        """
        cost, groups = self._table.problem.cost, self._table.groups
        ends = np.zeros((2, 2, len(groups), len(groups)))  # what a message's sender and its receiver lose
        for left, lefts in enumerate(groups):
            for right, rights in enumerate(groups):
                link = cost.link(lefts[0], rights[-1])
                if link is not None:
                    ends[:, :, left, right] = (link.sender_s, link.sender_busy), (link.receiver_s, link.receiver_busy)
        counts = [np.bincount(self._number, which, len(self.forward)) for which in (None, self._graded)]
        back = ends[::-1].swapaxes(2, 3)  # over the same boundary the right worker sends
        here = np.isfinite(self.forward)  # and back

        def both(ends: Floats, seconds: Floats, count: Floats) -> tuple[Floats, Floats]:
            wire = np.where(here, seconds, 0.0)
            left, right = (fixed * (here * count[:, None, None]) + share * wire for fixed, share in ends)
            return left, right

        return both(ends, self.forward, self._on[0] * counts[0]), both(back, self.backward, self._on[1] * counts[1])

    def _least(self, seconds: Floats, here: Flags, kinds: Sequence[WorkerKind], over: int) -> Floats:
        """The least over the groups at the other end, and over those of each kind: [kind, position 0 .. n]."""
        least = np.where(here, seconds, np.inf).min(axis=over)
        least = np.where(np.isfinite(least), least, 0.0)
        by_kind = np.array([least[:, kind].min(axis=1)[self.type_of] for kind in kinds])
        by_kind[:, 0] = 0.0
        return np.concatenate([by_kind, np.zeros((len(kinds), 1))], axis=1)


def messages_s(points: Sequence[LinkPoint], sizes: Floats) -> Floats:
    """`cost.message_s` of many sizes, to within rounding."""
    x, y = (np.array([getattr(point, name) for point in points], dtype=float) for name in ("bytes", "seconds"))
    if len(sizes) < 8 or min(x.min(), y.min()) <= 0 or len(points) < 2:
        return np.array([message_s(points, size) for size in sizes])
    inside = np.exp(np.interp(np.log(np.maximum(sizes, x[0])), np.log(x), np.log(y)))
    slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
    found: Floats = np.where(sizes <= x[0], y[0], np.where(sizes >= x[-1], y[-1] + slope * (sizes - x[-1]), inside))
    return found
