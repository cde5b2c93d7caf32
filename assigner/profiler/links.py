"""Links between workers: one-way times over message sizes, and what a message costs the ends' computing.

Both ends compute before each message, as in training (`busy`: with what caches then hold it takes longer).
A round has each worker in one pair at most, so that pairs do not disturb each other; where neighbours were found to
share a wire, a small fleet's pairs are measured one at a time. The receiver notes when a message has arrived, and the
two ends' clocks are compared.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.formats.profile import Link, LinkPoint, Wire, WireLink
from assigner.formats.terms import Backend
from assigner.location import rank_of
from assigner.machine.starvation import StarvationWatch
from assigner.profiler.busy import ComputeLoad, answer_busy, send_busy
from assigner.profiler.contention import find_shared_wires
from assigner.profiler.host import HostFacts, worker_names
from assigner.profiler.lane import Lane
from assigner.profiler.options import Links
from assigner.profiler.pairs import ALONE_UP_TO, Classes, is_sampled, ring, rounds_of, sampled_pairs, tournament
from assigner.profiler.sampling import least_disturbed
from assigner.runtime.recording.clock import answer_clock, compare_clock
from assigner.samples import Samples
from assigner.schedule.cost import message_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from assigner.profiler.pairs import Pair

SMALLEST = 1024
LARGEST = 1 << 28
_GROWTH = 4
_LONGEST_S = 2.0  # sizes stop growing where one message would take about as long
_BUDGET_S = 0.2  # per size and direction, past the fewest samples
_FEWEST, _TELLING, _MOST = 3, 7, 30
_NARROW = 0.05  # with so many samples that tell, and a median that is known to this share, there are enough
_SHORTEST_S = 1e-6  # below what clocks can tell apart
_ACTION_S = 2e-3  # a message is sent behind so much computing, which leaves nothing of its handling in the caches
_SOON_S = 0.1  # what larger messages cost their ends is seen at one that takes no longer
_MEMORY_SHARE = 8  # a message takes no more than this part of the smallest worker's memory, at each end


@dataclass(frozen=True)
class SweepOptions:
    """What is measured of links, and of all-reduces."""

    largest: int  # the largest message or tensor, in bytes
    typical: int = 1  # the message at which a link's busy shares are measured, in bytes: one that training sends
    pairs: Links = "auto"  # which links: "all", "sampled", or "auto": all in a fleet of up to 16 workers
    dtype: torch.dtype = torch.float32  # what is added up
    timeout_s: float = 600.0  # a wait for another rank that takes longer ends the run
    force_busy: bool = False  # none is measured again where other programs had much of a worker's processor time
    # what carries messages, as `Pipeline` has it. MPI adds up nothing: gloo does, beside it
    backend: Backend | None = None


def message_sizes(largest: int) -> list[int]:
    """1 KiB, 4 KiB, ... up to the first size that is not below `largest`; 256 MiB at most."""
    sizes = [SMALLEST]
    while sizes[-1] < min(largest, LARGEST):
        sizes.append(sizes[-1] * _GROWTH)
    return sizes


def measure_links(
    fleet: Sequence[HostFacts],
    options: SweepOptions,
    device: Any,
    *,
    wanted: Callable[[int, int], bool],
    done: Callable[[Link], None],
    progress: Callable[[int, int], None],
) -> list[Wire]:
    """Measure the wanted links that start at this rank. Every rank calls this at the same time.

    `wanted` says whether the link from a source to a target is to be measured, the same on every rank; `done` is called
    with each link as soon as it was measured from here, `progress` before each round with (rounds done, rounds).

    Returns:
        The wires that links of all ranks share: the same on every rank.
    """
    rank, workers = dist.get_rank(), dist.get_world_size()
    fitting = min(each.memory_bytes for each in fleet) // _MEMORY_SHARE
    largest = min(options.largest, fitting)
    options = replace(options, largest=largest, typical=max(1, min(options.typical, largest)))
    names = worker_names(fleet)
    with Lane(rank, names, device=device, timeout_s=options.timeout_s, backend=options.backend) as lane:
        lane.open(ring(workers))
        wires = find_shared_wires(lane, fitting)
        rounds = link_rounds(fleet, options.pairs, alone=bool(wires))
        rounds = [pairs for pairs in rounds if any(wanted(low, high) or wanted(high, low) for low, high in pairs)]
        for n, pairs in enumerate(rounds):
            progress(n, len(rounds))
            lane.open(pairs)
            dist.barrier()
            for source, target in (way for pair in pairs for way in (pair, pair[::-1])):
                if rank == source and wanted(source, target):
                    done(_measure_pair(lane, target, options, one_clock=_same_host(fleet, source, target)))
                elif rank == target and wanted(source, target):
                    _answer_pair(lane, source)
        dist.barrier()
    return [
        Wire(tuple(WireLink(names[source], names[target]) for source, target in wire.links), wire.slower)
        for wire in wires
    ]


def link_rounds(fleet: Sequence[HostFacts], pairs: str, *, alone: bool) -> list[list[Pair]]:
    """Which pairs are measured, round by round; one at a time where the fleet is small enough for that."""
    workers = len(fleet)
    rounds = rounds_of(sampled_pairs(fleet)) if is_sampled(workers, pairs) else tournament(workers)
    if alone and workers <= ALONE_UP_TO:
        return [[pair] for each in rounds for pair in each]
    return rounds


def with_unmeasured(links: Sequence[Link], fleet: Sequence[HostFacts]) -> list[Link]:
    """The measured links, and for every other pair that has measured ones of its class those links' median.

    A point that was not measured has no samples, and the spread over the measured links.
    """
    classes, names = Classes(fleet), worker_names(fleet)
    measured = {(rank_of(link.source), rank_of(link.target)): link for link in links}
    alike: dict[Any, list[Link]] = {}
    for way, link in measured.items():
        alike.setdefault(classes.of(*way), []).append(link)
    typical = {name: _median_link(some) for name, some in alike.items()}
    missing = [way for way in permutations(range(len(fleet)), 2) if way not in measured and classes.of(*way) in typical]
    return [*links, *(replace(typical[classes.of(a, b)], source=names[a], target=names[b]) for a, b in missing)]


def _median_link(links: Sequence[Link]) -> Link:
    """The medians of some links, at the sizes that all of them have."""
    times = [{point.bytes: point.seconds for point in link.points} for link in links]
    sizes = sorted(set(times[0]).intersection(*times))
    points = [replace(LinkPoint.of(size, Samples(tuple(each[size] for each in times))), samples=0) for size in sizes]
    busy = {
        name: median(getattr(each, name) for each in links)
        for name in ("sender_busy", "receiver_busy", "sender_s", "receiver_s")
    }
    return replace(links[0], points=tuple(points), **busy)


def _same_host(fleet: Sequence[HostFacts], source: int, target: int) -> bool:
    """Whether two ranks read one clock (`perf_counter` is CLOCK_MONOTONIC): comparing it would only add an error."""
    return (fleet[source].host, fleet[source].node) == (fleet[target].host, fleet[target].node)


def _measure_pair(lane: Lane, target: int, options: SweepOptions, *, one_clock: bool) -> Link:
    """The source's side of a directed link."""
    ahead_s = compare_clock(target).ahead_s  # its small messages are the connection's first ones

    def measure() -> Link:
        lane.tell(target, 1.0)
        return _measure_once(lane, target, options, 0.0 if one_clock else ahead_s)

    link = least_disturbed(measure, lambda found: found.starved, once=options.force_busy)
    lane.tell(target, 0.0)
    return link


def _answer_pair(lane: Lane, source: int) -> None:
    """The target's side of `_measure_pair`."""
    answer_clock(source)
    while lane.ask(source):
        watch = StarvationWatch(torch.get_num_threads())
        _answer_sweep(lane, source)
        answer_busy(lane, source)
        lane.tell(source, watch.share())


def _measure_once(lane: Lane, target: int, options: SweepOptions, offset: float) -> Link:
    """One measurement of a link, at its source."""
    watch = StarvationWatch(torch.get_num_threads())
    points = _sweep(lane, target, message_sizes(options.largest), offset)
    smallest, size = int(points[0].bytes), _handled(points, options.typical)
    small, large = send_busy(lane, target, [(each, message_s(points, each)) for each in (smallest, size)])
    seconds = message_s(points, size) if size > smallest else 0.0
    ends = [parts(*lost, seconds) for lost in zip(small, large, strict=True)]
    (sender_s, sender_busy), (receiver_s, receiver_busy) = ends
    return Link(
        lane.names[lane.rank], lane.names[target], tuple(points), lane.carrier_to(target), sender_busy, receiver_busy,
        starved=max(watch.share(), lane.ask(target)), sender_s=sender_s, receiver_s=receiver_s,
    )  # fmt: skip


def _handled(points: Sequence[LinkPoint], typical: int) -> int:
    """The message whose handling is measured: the typical one, or the largest that is soon there."""
    soon = max((point.bytes for point in points if point.seconds <= _SOON_S), default=points[0].bytes)
    return min(typical, int(soon))


def parts(small_s: float, large_s: float, seconds: float) -> tuple[float, float]:
    """What an end loses for any message, and the share of its time that it loses beside.

    Of what the smallest message costs it, and a larger one that takes `seconds` (0: there is none), for which they are
    exact.
    """
    if not seconds:
        return min(small_s, large_s), 0.0
    share = min(1.0, max(0.0, large_s - small_s) / seconds)
    return max(0.0, large_s - share * seconds), share  # the last digit may fall below


def _sweep(lane: Lane, target: int, sizes: Sequence[int], offset: float) -> list[LinkPoint]:
    """Source's side: announce each message's size (0 ends the sweep), send it, learn when it arrived.

    Where an end is a GPU the first message of each size does not count.
    """
    points: list[LinkPoint] = []
    work = ComputeLoad(lane.device)
    first = int(lane.reaches_gpu((lane.rank, target)))  # a message of this size pins the memory that others then have
    for size in sizes:
        buffer = lane.buffer(size)
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < first + _FEWEST or (time.perf_counter() - begun < _BUDGET_S and not is_known(times[first:])):
            lane.tell(target, size)
            lane.ask(target)  # the receiver has its buffer ready
            work.until(time.perf_counter() + _ACTION_S)
            begin = time.perf_counter()
            lane.send(target, buffer)
            times.append(max(_SHORTEST_S, lane.ask(target) - offset - begin))
        points.append(LinkPoint.of(size, Samples(tuple(times[first:]))))
        if points[-1].seconds * _GROWTH > _LONGEST_S:
            break
    lane.tell(target, 0)
    return points


def is_known(times: Sequence[float]) -> bool:
    """Whether some samples are enough: the most, or fewer whose median hardly moves any more.

    The error of a normal distribution's median is 0.93 times its quartiles' distance over the root of their number.
    """
    if len(times) < _TELLING:
        return False
    return len(times) >= _MOST or Samples(tuple(times)).spread / math.sqrt(len(times)) < _NARROW


def _answer_sweep(lane: Lane, source: int) -> None:
    """Target's side of a sweep: say when the buffer is ready, and when the message has arrived."""
    work = ComputeLoad(lane.device)
    while size := int(lane.ask(source)):
        lane.post(source, size)
        lane.tell(source, 0.0)
        work.until(time.perf_counter() + _ACTION_S / 2)  # and waits when the message comes
        lane.receive(source)
        lane.tell(source, time.perf_counter())
