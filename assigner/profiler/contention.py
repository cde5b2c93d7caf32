"""Which links share a wire: neighbours send at once, and what then takes far longer than alone is looked at in pairs.

Neighbours send to the next rank, then to the one before. A wire that carries links of both rounds (between racks, 0 to
1 and 2 to 3 go the same way as 0 to 3 and 2 to 1) is found as one group in each, and the two are tried together. All
ranks run the same script and know all times, so that they agree on what comes next.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from assigner.profiler.lane import Lane

Directed = tuple[int, int]
"""A link, as (source, target)."""

Slowdown = Callable[[Sequence[Directed]], dict[Directed, float]]
"""How many times its own time each of some links takes when all of them send at once."""

SLOWER = 1.5
"""A link that takes so many times its own time is said to share its wire."""

_FIRST_BYTES = 1 << 16
_LARGEST_BYTES = 1 << 26
_LARGEST_GPU_BYTES = 1 << 28  # a GPU's bus carries the other one in about the time that is too short to tell
_GROWTH = 4
_TELLING_S = 0.05  # so long that bursts which pass a shaped wire, and the ranks' start, do not count
_LEAST_S = 0.01  # where the largest message takes less, it is taken to be this long
_LEAST_GPU_S = 0.002  # so of a link to or from a GPU: no thread of a CPU, which may have to wait for one, copies there
_REPEATS = 3
_PAIRS_UP_TO = 6  # slow links that are tried two at a time
_BOTH_WAYS_UP_TO = 16
_JOINED_UP_TO = 4  # groups of a round that are tried with those of the other


@dataclass(frozen=True)
class SharedWire:
    """Links that are slower together than alone."""

    links: tuple[Directed, ...]  # each as (source, target)
    slower: float  # how many times, for the link that loses most


def find_shared_wires(lane: Lane, largest: int) -> list[SharedWire]:
    """Let all neighbours send at once. Every rank calls this at the same time, and gets the same answer.

    No message has more than `largest` bytes.
    """
    workers = lane.workers
    if workers < 2:
        return []
    rings = [[(n, (n + 1) % workers) for n in range(workers)]]
    if 2 < workers <= _BOTH_WAYS_UP_TO:
        rings.append([(target, source) for source, target in rings[0]])
    found: list[list[SharedWire]] = []
    sizes: dict[Directed, int] = {}
    alone: dict[Directed, float] = {}

    def slower(some: Sequence[Directed]) -> dict[Directed, float]:
        return {link: seconds / alone[link] for link, seconds in _together(lane, some, sizes).items()}

    for links in rings:
        for link in links:
            most = _LARGEST_GPU_BYTES if lane.reaches_gpu(link) else _LARGEST_BYTES
            sizes[link] = _telling_size(lane, link, min(largest, most))
            least = _LEAST_GPU_S if lane.reaches_gpu(link) else _LEAST_S
            alone[link] = max(_together(lane, [link], sizes)[link], least)  # what is too short to tell is given longer
        found.append(shared_wires(links, slower))
    return joined_wires(found, slower)


def shared_wires(links: Sequence[Directed], slower: Slowdown) -> list[SharedWire]:
    """Which of some links are slower together."""
    all_at_once = slower(links)
    slow = [link for link, times in all_at_once.items() if times > SLOWER]
    if len(slow) < 2 or len(slow) > _PAIRS_UP_TO:
        return [SharedWire(tuple(slow), max(all_at_once.values()))] if len(slow) > 1 else []
    groups: list[set[Directed]] = []
    for pair in itertools.combinations(slow, 2):
        if max(slower(pair).values()) > SLOWER:
            joined = [group for group in groups if group & set(pair)]
            groups = [group for group in groups if group not in joined] + [set(pair).union(*joined)]
    if not groups:  # no two of them do it: the wire is full with three or more
        groups = [set(slow)]
    return [SharedWire(tuple(sorted(group)), max(all_at_once[link] for link in group)) for group in groups]


def joined_wires(rings: Sequence[Sequence[SharedWire]], slower: Slowdown) -> list[SharedWire]:
    """The wires of both rounds, with those made one that are one: beside the other's links some take far longer still.

    `rings` has the wires of each round of neighbours; of a round with many, none is tried.
    """
    if len(rings) < 2 or max(map(len, rings)) > _JOINED_UP_TO:
        return [wire for ring in rings for wire in ring]
    found, others = list[SharedWire](), list(rings[1])
    for wire in rings[0]:
        joined = wire
        for other in others:
            times = slower((*wire.links, *other.links))
            if any(times[link] > SLOWER * each.slower for each in (wire, other) for link in each.links):
                joined = SharedWire(tuple(sorted(times)), max(times.values()))
                others.remove(other)
                break
        found.append(joined)
    return [*found, *others]


def _telling_size(lane: Lane, link: Directed, largest: int) -> int:
    """The message of a link that takes long enough to tell, on every rank; the link's ends try sizes out."""
    source, target = link
    size = min(_FIRST_BYTES, largest)
    dist.barrier()
    while lane.rank in link:
        if lane.rank == source:
            lane.ask(target)
            lane.send(target, lane.buffer(size))
            seconds = lane.ask(target)
        else:
            lane.post(source, size)
            begin = time.perf_counter()
            lane.tell(source, 0.0)
            lane.receive(source)
            seconds = time.perf_counter() - begin
            lane.tell(source, seconds)
        if seconds >= _TELLING_S or size >= largest:
            break
        size = min(largest, size * _GROWTH)
    return int(_shared([float(size) if lane.rank == source else 0.0])[0])


def _together(lane: Lane, links: Sequence[Directed], sizes: dict[Directed, int]) -> dict[Directed, float]:
    """Seconds of a message on each of some links, all at once, on every rank: the least of a few.

    What disturbs a machine now and then only adds to it; a wire that is shared is so each time.
    """
    seconds: list[list[float]] = [[] for _ in links]
    for _ in range(_REPEATS):
        for link in links:
            if lane.rank == link[1]:
                lane.post(link[0], sizes[link])
        buffers = [(link[1], lane.buffer(sizes[link])) for link in links if lane.rank == link[0]]
        dist.barrier()
        begin = time.perf_counter()
        for target, buffer in buffers:
            lane.send(target, buffer)
        for n, link in enumerate(links):
            if lane.rank == link[1]:
                lane.receive(link[0])
                seconds[n].append(time.perf_counter() - begin)
        lane.flush()
    mine = [min(each, default=0.0) for each in seconds]
    return dict(zip(links, _shared(mine), strict=True))


def _shared(numbers: Sequence[float]) -> list[float]:
    """The sum over all ranks, where one of them has each number and the others have 0."""
    summed = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    dist.all_reduce(summed)
    return [float(each) for each in summed]
