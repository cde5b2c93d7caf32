"""Messages over every boundary between every two groups of workers, as arrays.

Boundaries over which messages of the same sizes go are of one type and priced once, and so are links that were
measured alike: a fleet of 64 workers with links of their own is priced in a moment.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from assigner.schedule.cost import message_s
from assigner.solver.fleet.path_program import ServerPrices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import LinkPoint
    from assigner.solver.problem.arrays import Flags, Floats
    from assigner.solver.problem.prices import PriceTable, WorkerKind


class HopArrays:
    """Seconds on the wire: arrays [type of boundary, left group, right group], inf: the two cannot be neighbours.

    Args:
        table: What is to be placed.

    Attributes:
        type_of: The type of each boundary, by position; that of position 0 means nothing.
        forward, backward: Of the activations and of the gradients, as far as they lie on the spine.
        same_host: Whether all workers of two groups are on one host.
        apart: Whether no worker of one group is on a host of the other.
    """

    def __init__(self, table: PriceTable) -> None:
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
        self.forward = np.full((len(kinds), len(groups), len(groups)), np.inf)
        self.backward = self.forward.copy()
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
        """The least between two kinds, by position.

        Args:
            kinds: Groups that count as alike.
            where: Only these pairs of groups are looked at; None: all.
        """
        found = []
        for seconds in (self.forward, self.backward):
            seen = seconds if where is None else np.where(where, seconds, np.inf)
            least = np.array([[seen[:, one][:, :, other].min(axis=(1, 2)) for other in kinds] for one in kinds])
            found.append(least.transpose(2, 0, 1)[self.type_of])
        return ServerPrices(found[0] + found[1], *found)

    def busy(self, kinds: Sequence[WorkerKind]) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """The least seconds that messages keep a stage busy, whoever is at their other end.

        Returns:
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

        Returns:
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
