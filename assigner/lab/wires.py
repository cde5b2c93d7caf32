"""What links say about the wires behind them: a rate for each host, and whether hosts fall into racks.

The model is the lab's own: a message between two hosts goes at the lower rate of their two wires, or of the wire
between their racks where that is lower. So a host's wire is as fast as its fastest link, and a pair far below both its
wires is a pair in two racks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from math import log
from statistics import median
from typing import TYPE_CHECKING

from assigner.schedule.cost import message_s

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.formats.profile import Link, Profile

_NEAR = 0.5  # a pair with at least this share of what its two wires could do is in one rack
Pair = tuple[str, str]


@dataclass(frozen=True)
class Misfit:
    """A pair of hosts, its rate as measured, and as its wires explain it, in bytes/s."""

    pair: Pair
    measured: float
    explained: float


@dataclass(frozen=True)
class Wires:
    """Rates in bytes/s, latencies in seconds; a host without links is in neither.

    Args:
        rate: Of each host's wire.
        latency_s: Of the smallest message that a host sends, within its rack where it has company there.
        rack: Of each host: the name of its first host.
        rack_rate: Of the wire between racks; None: there is one rack.
        rack_latency_s: What is added between racks.
        worst: The pair that these explain worst; None: there are no links.
    """

    rate: dict[str, float]
    latency_s: dict[str, float]
    rack: dict[str, str]
    rack_rate: float | None
    rack_latency_s: float
    worst: Misfit | None


def link_rate(link: Link) -> float | None:
    """The rate of messages beyond the largest that was measured, in bytes/s; None: noise hides it."""
    size = link.points[-1].bytes
    seconds = message_s(link.points, 2 * size) - link.points[-1].seconds
    return size / seconds if seconds > 0 else None


def find_wires(profile: Profile) -> Wires:
    """The wires that explain a profile's links between hosts."""
    host = {worker.name: worker.host for worker in profile.workers}
    rates: dict[Pair, list[float]] = defaultdict(list)
    latencies: dict[Pair, list[float]] = defaultdict(list)
    for link in profile.links:
        source, target = host[link.source], host[link.target]
        if source != target:
            latencies[source, target].append(link.points[0].seconds)
            rate = link_rate(link)
            if rate:
                rates[min(source, target), max(source, target)].append(rate)
    pairs = {pair: median(found) for pair, found in rates.items()}
    wire: dict[str, float] = defaultdict(float)
    for pair, rate in pairs.items():
        for name in pair:
            wire[name] = max(wire[name], rate)
    rack = _racks(list(dict.fromkeys(host.values())), pairs, wire)
    far = [rate for (left, right), rate in pairs.items() if rack[left] != rack[right]]
    between_racks = median(far) if far else None
    latency, between = _latencies({pair: median(found) for pair, found in latencies.items()}, rack)
    return Wires(dict(wire), latency, rack, between_racks, between, _worst(pairs, wire, rack, between_racks))


def _racks(hosts: Sequence[str], pairs: Mapping[Pair, float], wire: Mapping[str, float]) -> dict[str, str]:
    """Complete-linkage clustering: racks are joined, the nearest pair first, where no measured pair across is far.

    By chains of near pairs alone, a host on a thin wire, which is near to everybody, would make all racks one. Hosts
    without links are in the first rack.
    """
    share = {(left, right): rate / min(wire[left], wire[right]) for (left, right), rate in pairs.items()}
    near = [(u, v) for u, v in combinations(hosts, 2) if share.get((min(u, v), max(u, v)), 0.0) >= _NEAR]
    rack = {name: name for name in hosts}
    for pair in sorted(near, key=lambda pair: -share[min(pair), max(pair)]):
        new, old = sorted((rack[name] for name in pair), key=hosts.index)
        across = [each for (u, v), each in share.items() if new != old and {rack[u], rack[v]} == {new, old}]
        if across and min(across) >= _NEAR:
            rack = {name: new if of == old else of for name, of in rack.items()}
    first = next((name for name in hosts if name in wire), hosts[0])
    return {name: rack[name if name in wire else first] for name in hosts}


def _worst(
    pairs: Mapping[Pair, float], wire: Mapping[str, float], rack: Mapping[str, str], between: float | None
) -> Misfit | None:
    """The pair whose rate is the furthest from what the wires explain; None: no pair was measured."""
    found = []
    for (left, right), rate in pairs.items():
        limits = [wire[left], wire[right], *([between] if between is not None and rack[left] != rack[right] else [])]
        found.append(Misfit((left, right), rate, min(limits)))
    return max(found, key=lambda each: abs(log(each.measured / each.explained)), default=None)


def _latencies(pairs: Mapping[Pair, float], rack: Mapping[str, str]) -> tuple[dict[str, float], float]:
    """Seconds from each host, and what a pair in two racks has more."""
    near: dict[str, list[float]] = defaultdict(list)
    far: dict[str, list[float]] = defaultdict(list)
    for (source, target), seconds in pairs.items():
        (near if rack[source] == rack[target] else far)[source].append(seconds)
    own = {name: median(found) for name, found in near.items()}
    more = [seconds - own[name] for name, found in far.items() for seconds in found if name in own]
    return own, max(0.0, median(more)) if more else 0.0
