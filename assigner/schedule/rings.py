"""What an all-reduce takes: the ring formula over the profile's links, times what measured all-reduces say of it.

A ring of r workers moves n bytes in 2 (r - 1) steps: in each of them every worker passes n / r bytes on, and all wait
for the slowest link, so

    seconds = 2 (r - 1) * max over the ring's links of t(n / r)

with t the one-way time of a message. Which ring: gloo goes round by rank, each worker to the next lower one, whatever
the wires are; NCCL looks for a good one, for which the best ring stands here, the one whose slowest link is fastest.
It is found by trying all rings of up to seven workers; for more it is the best nearest-neighbour ring from any start.

What the formula leaves out (adding up, copies at both ends, workers that compete for a processor or a wire) is in the
ratio of a measured all-reduce to its own formula, at messages of the same size. The most similar measurements count:
those of the same workers; else of the pairs that lie on the ring, or of pairs like them; else of the fewest workers
that include these; else the formula stands alone. A pair of like workers on the same hosts lends its time, as its way
is the same; one of other hosts its ratio alone.

Sources: P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69, 2009: the
ring, and that no algorithm sends less. Planners take a bandwidth B in place of measured times: PipeDream (SOSP 2019)
and Piper (NeurIPS 2021) count 4 (r - 1) n / (r B).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from functools import cache
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

    from assigner.formats.profile import Collective, Profile

BUCKET_BYTES = 25 << 20
"""Gradients are added up in buckets of at most so many bytes.

Smaller ones cost more messages, larger ones memory, and time in which nothing is on its way.
"""

GATHERING = 0.5
"""What gathering parts that add up to so many bytes takes of an all-reduce of them: it is the ring's second half.

The first r - 1 of its 2 (r - 1) steps add up, each worker a part; the others hand these parts round.
"""

_EXACT_UP_TO = 7  # workers: 720 rings
_HERE = 2  # of the keys of a pair, those of like workers on its own hosts
_RING_BYTES = 1 << 20  # of the message by which rings are compared


class ReducePrices:
    """Prices of all-reduces in one profile.

    Args:
        profile: Its workers, links and collectives.
        transfer_s: Seconds of one message from a worker to another of so many bytes; inf: they cannot talk.
    """

    def __init__(self, profile: Profile, transfer_s: Callable[[str, str, float], float]) -> None:
        self.profile, self.transfer_s = profile, transfer_s
        self.ring = cache(self._ring)
        self.factors = cache(self._factors)
        self._measured = {frozenset(each.workers): each for each in profile.collectives}
        self._pairs: dict[Hashable, list[Collective]] = defaultdict(list)
        for each in profile.collectives:
            if len(each.workers) == 2:
                for key in self._keys(*each.workers):
                    self._pairs[key].append(each)

    def _keys(self, one: str, other: str) -> Iterator[Hashable]:
        """What may stand for a pair, the nearest first: itself, like workers of these hosts, of others, and any."""
        ends = [self.profile.worker[name] for name in (one, other)]
        kinds = tuple(sorted(each.alike for each in ends))
        hosts = frozenset(each.host for each in ends)
        yield from (frozenset((one, other)), (hosts, kinds), (len(hosts), kinds), len(hosts))

    def _ring(self, workers: frozenset[str]) -> tuple[str, ...]:
        """Some workers in the order in which data goes round, each to the next and the last to the first."""
        members = sorted(workers, key=lambda name: self.profile.worker[name].rank)
        if self.backend(members) == "gloo":
            return tuple(reversed(members))
        first, *others = members
        if len(members) <= _EXACT_UP_TO:
            rings: Iterable[tuple[str, ...]] = ((first, *each) for each in itertools.permutations(others))
        else:
            rings = (self._nearest_neighbours(start, members) for start in members)
        return min(rings, key=lambda ring: max(self.transfer_s(*way, _RING_BYTES) for way in ways(ring)))

    def backend(self, workers: Collection[str]) -> str:
        """What adds up among workers, `nccl` or `gloo`: as was measured, else NCCL where each has a GPU of its own."""
        known = self._measured.get(frozenset(workers))
        finds_its_way = not self.go_by_rank(workers) if known is None else known.backend == "nccl"
        return "nccl" if finds_its_way else "gloo"

    def go_by_rank(self, workers: Collection[str]) -> bool:
        """Whether rings among some of these may go round by rank: then it matters who stands between whom."""
        devices = {(self.profile.worker[name].host, self.profile.worker[name].device) for name in workers}
        return len(devices) < len(workers) or not all(device.startswith("cuda") for _, device in devices)

    def _nearest_neighbours(self, start: str, members: Sequence[str]) -> tuple[str, ...]:
        ring, left = [start], [name for name in members if name != start]
        while left:
            ring.append(min(left, key=lambda name: self.transfer_s(ring[-1], name, _RING_BYTES)))
            left.remove(ring[-1])
        return tuple(ring)

    def pair_class(self, one: str, other: str) -> Hashable:
        """What the price of an all-reduce knows of two workers beside their links and who was measured with whom.

        Pairs of one class can stand for each other in any ring.
        """
        like, here = self._like(one, other)
        devices = [(each.host, each.device) for each in (self.profile.worker[one], self.profile.worker[other])]
        gpus = tuple(device.startswith("cuda") for _, device in devices)
        return tuple(map(id, like)), here, gpus, all(gpus) and devices[0] == devices[1]

    def obstacle(self, workers: Iterable[str]) -> str | None:
        """Why an all-reduce among workers cannot be priced; None: it can."""
        names = frozenset(workers)
        unknown = sorted(names - self.profile.worker.keys())
        if unknown:
            return f"{unknown[0]} is not a worker of this profile"
        cut = next((way for way in ways(self.ring(names)) if math.isinf(self.transfer_s(*way, 0))), None)
        if cut is None:
            return None
        among = ", ".join(reversed(self.ring(names)))
        return f"an all-reduce among {among} needs a link from {cut[0]} to {cut[1]}, and there is none"

    def formula_s(self, workers: frozenset[str], size: float) -> float:
        """What the links alone say of an all-reduce of `size` bytes, in seconds; inf: one of the ring is missing."""
        count = len(workers)
        return 2 * (count - 1) * max(self.transfer_s(*way, size / count) for way in ways(self.ring(workers)))

    def seconds(self, workers: frozenset[str], size: float) -> float:
        """Seconds of one all-reduce of `size` bytes among workers to which there is no `obstacle`."""
        message = size / len(workers)
        own = self._own(workers)
        if own is not None:
            return factor_at(self.factors(own), message) * self.formula_s(workers, size)
        ring = ways(self.ring(workers))
        if any(self._like(*way)[0] for way in ring):
            return 2 * (len(workers) - 1) * max(self._step_s(*way, message) for way in ring)
        wider = self._wider(workers)
        return (1.0 if wider is None else factor_at(self.factors(wider), message)) * self.formula_s(workers, size)

    def busy_share(self, workers: frozenset[str]) -> float:
        """The share of an all-reduce's time in which each of its workers cannot compute, 0 to 1.

        Without measured all-reduces it is what sending and receiving cost: a worker of a ring does both all the time.
        """
        own = self._own(workers)
        if own is not None:
            return own.busy
        ring = ways(self.ring(workers))
        pairs = [median(each.busy for each in like) for like, _ in (self._like(*way) for way in ring) if like]
        if pairs:
            return max(pairs)
        wider = self._wider(workers)
        if wider is not None:
            return wider.busy
        links = self.profile.link

        def lost(coming: tuple[str, str], going: tuple[str, str]) -> float:
            beside = [(links[coming].receiver_s, coming), (links[going].sender_s, going)]
            fixed = sum(
                seconds / max(seconds, self.transfer_s(*way, _RING_BYTES)) for seconds, way in beside if seconds
            )
            return links[coming].receiver_busy + links[going].sender_busy + fixed

        return max(min(1.0, lost(*ends)) for ends in zip(ring, [*ring[1:], ring[0]], strict=True))

    def _own(self, workers: frozenset[str]) -> Collective | None:
        known = self._measured.get(workers)
        return known if known is not None and self.factors(known) else None

    def _wider(self, workers: frozenset[str]) -> Collective | None:
        """The measured all-reduce of the fewest workers that these are among."""
        around = [each for each in self.profile.collectives if workers.issubset(each.workers) and self.factors(each)]
        return min(around, key=lambda each: len(each.workers), default=None)

    def _like(self, one: str, other: str) -> tuple[list[Collective], bool]:
        """The measured pairs that are most like this one, and whether they are of like workers on these hosts."""
        for n, key in enumerate(self._keys(one, other)):
            found = [each for each in self._pairs.get(key, ()) if self.factors(each)]
            if found:
                return found, n < _HERE
        return [], False

    def _step_s(self, one: str, other: str, message: float) -> float:
        """Seconds of a step of a ring over one of its links, as measured pairs have it."""
        like, here = self._like(one, other)
        if not like:
            return self.transfer_s(one, other, message)

        def step_s(each: Collective) -> float:
            links = ways(each.workers) if here else [(one, other)]
            return factor_at(self.factors(each), message) * max(self.transfer_s(*way, message) for way in links)

        return median(step_s(each) for each in like)

    def _factors(self, measured: Collective) -> tuple[tuple[float, float], ...]:
        """By the size of its messages, how many times as long as the formula a measured all-reduce takes."""
        workers = frozenset(measured.workers)
        said = [(point, self.formula_s(workers, point.bytes)) for point in measured.points]
        return tuple(
            (point.bytes / len(workers), point.seconds / seconds) for point, seconds in said if 0 < seconds < math.inf
        )


def ways(ring: Sequence[str]) -> list[tuple[str, str]]:
    """The links of a ring, as (source, target)."""
    return list(zip(ring, [*ring[1:], ring[0]], strict=True))


def factor_at(factors: Sequence[tuple[float, float]], size: float) -> float:
    """The factor at a size: on the line in log(bytes) between the sizes around it, beyond them the nearest one's."""
    at = bisect_left([each for each, _ in factors], size)
    if at in (0, len(factors)):
        return factors[min(at, len(factors) - 1)][1]
    (low, before), (high, after) = factors[at - 1 : at + 1]
    share = math.log(size / low) / math.log(high / low) if low > 0 else (size - low) / (high - low)
    return before + share * (after - before)
