"""All-reduces among workers: times over sizes, and what they cost the workers' computing.

Measured are one pair of each class, as far as links are (see `reduced_sets`), and all workers together, in the groups
in which training adds up gradients, up to the size of its buckets, and with the copy into one. Pairs that share no
worker are measured at the same time where the fleet is large. All members begin together, and the last one to have the
sum says how long it took.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.formats.profile import Collective, LinkPoint
from assigner.machine.starvation import StarvationWatch
from assigner.profiler.busy import ComputeLoad
from assigner.profiler.host import HostFacts, worker_names
from assigner.profiler.pairs import ALONE_UP_TO, rounds_of
from assigner.profiler.sampling import least_disturbed
from assigner.runtime.messages.nccl import direct_ranks
from assigner.runtime.ranks.workergroups import WorkerGroups
from assigner.samples import Samples
from assigner.schedule.rings import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.profiler.links import SweepOptions
    from assigner.runtime.ranks.workergroups import PendingTensor, WorkerGroup

SIZES = (1 << 14, 1 << 18, 1 << 22, BUCKET_BYTES)
_LONGEST_S = 1.0  # sizes stop growing where one would take about as long
_BUDGET_S = 0.2  # per size, past the fewest samples; workers compute beside the largest that takes no longer
_FEWEST, _MOST = 3, 30
_SPACING = 2.0  # while workers compute, all-reduces start so many of their own times apart
_STREAM_S = 0.3  # of them; the median counts
_WATCH_S = 0.5  # five periods of a quota, which may have been used up when computing begins
_MEMORY_SHARE = 8  # a tensor takes no more than this part of the smallest worker's memory


def measure_collectives(
    fleet: Sequence[HostFacts],
    sets: Sequence[Sequence[int]],
    options: SweepOptions,
    device: torch.device,
    *,
    done: Callable[[Collective], None],
    progress: Callable[[int, int], None],
) -> None:
    """Measure the all-reduces of some sets of ranks. Every rank calls this at the same time with the same sets.

    `done` is called with each as soon as it was measured, on its first rank; `progress` before each round with (rounds
    done, rounds).

    Raises:
        LostConnectionError: a rank is gone, or did not come within the time-out.
    """
    rank = dist.get_rank()
    names = worker_names(fleet)
    fitting = min(each.memory_bytes for each in fleet) // _MEMORY_SHARE
    options = replace(options, largest=min(options.largest, fitting))
    direct = direct_ranks(names, device, options.backend)
    groups = WorkerGroups(rank, device, direct, timeout_s=options.timeout_s)
    rounds = collective_rounds(sets, len(fleet))
    try:
        opened = groups.open([names[each] for each in ranks] for together in rounds for ranks in together)
        for n, together in enumerate(rounds):
            progress(n, len(rounds))
            dist.barrier()
            for ranks in together:
                workers = tuple(names[each] for each in ranks)
                group = opened.get(workers)
                if group is not None:
                    found = _measured(group, workers, options)
                    if rank == ranks[0]:
                        done(found)
        dist.barrier()
    except BaseException:
        groups.hang_up()
        raise
    finally:
        groups.close()


def collective_rounds(sets: Sequence[Sequence[int]], workers: int) -> list[list[tuple[int, ...]]]:
    """Which sets are measured together: in a large fleet those without a common worker, else each by itself."""
    found = [tuple(each) for each in sets]
    return [[each] for each in found] if workers <= ALONE_UP_TO else rounds_of(found)


def _measured(group: WorkerGroup, workers: tuple[str, ...], options: SweepOptions) -> Collective:
    """One set.

    Settings may differ between hosts: the smallest tensor that a member asks for is the largest one, and one that wants
    no second time is enough.
    """
    largest, element = int(-_largest(group, -options.largest)), options.dtype.itemsize
    sizes = sorted({element * max(1, min(size, largest) // element) for size in SIZES})

    def measure() -> Collective:
        starved = _starved(group)
        points = _sweep(group, sizes, options.dtype)
        steady = max(
            (each for each in points if each.seconds <= _BUDGET_S), key=lambda each: each.bytes, default=points[0]
        )
        busy = _busy_share(group, _repeated_sum(group, int(steady.bytes), options.dtype), steady.seconds)
        return Collective(workers, points, "nccl" if group.direct else "gloo", busy, starved)

    return least_disturbed(measure, lambda found: found.starved, once=bool(_largest(group, options.force_busy)))


def _sweep(group: WorkerGroup, sizes: Sequence[int], dtype: torch.dtype) -> tuple[LinkPoint, ...]:
    """All members do the same: how often each size is tried follows from a first time that all know."""
    points: list[LinkPoint] = []
    for n, size in enumerate(sizes):
        add_up = _repeated_sum(group, size, dtype)
        once = _largest(group, _reduce_s(group, add_up))
        if once < _BUDGET_S:  # the first one finds its memory and wakes threads: nothing beside a long one
            once = _largest(group, _reduce_s(group, add_up))
        count = max(_FEWEST, min(_MOST, int(_BUDGET_S / max(once, 1e-6))))
        mine = torch.tensor([_reduce_s(group, add_up) for _ in range(count)], dtype=torch.float64, device=group.device)
        points.append(LinkPoint.of(size, Samples(tuple(group.largest(mine).tolist()))))
        if n + 1 < len(sizes) and points[-1].seconds * sizes[n + 1] / size > _LONGEST_S:
            break
    return tuple(points)


def _repeated_sum(group: WorkerGroup, size: int, dtype: torch.dtype) -> Callable[[], PendingTensor]:
    """What begins to add up `size` bytes, with the copy of what lies elsewhere, as gradients do; again and again."""
    gradients = torch.zeros(size // dtype.itemsize, dtype=dtype, device=group.device)
    flat = torch.empty_like(gradients)
    return lambda: group.add_up(flat.copy_(gradients))


def _reduce_s(group: WorkerGroup, add_up: Callable[[], PendingTensor]) -> float:
    """Seconds of one all-reduce at this member; all members begin when the last one is there."""
    _meet(group)
    begin = time.perf_counter()
    add_up().wait()
    _finish(group)
    return time.perf_counter() - begin


def _busy_share(group: WorkerGroup, add_up: Callable[[], PendingTensor], seconds: float) -> float:
    """What all-reduces of `seconds` each cost the member that loses most, as a share of their time, on all members.

    Each computes in small pieces, first alone, then while some go on at half of the rate at which they could; what went
    missing is their cost (see `busy`).
    """
    count = max(_FEWEST, min(_MOST, int(_STREAM_S / (_SPACING * seconds))))

    def added_up() -> None:
        pending = add_up()
        while not pending.work.is_completed():
            work.run()
        pending.wait()

    with ComputeLoad(group.device) as work:
        work.alone()
        _meet(group)
        lost = work.lost_s(count, (_SPACING - 1) * seconds, added_up)
    return _largest(group, min(1.0, lost / seconds))


def _starved(group: WorkerGroup) -> float:
    """What others have of the member that loses most, while all compute: in an all-reduce its own threads queue."""
    work = ComputeLoad(group.device)
    _meet(group)
    watch = StarvationWatch(torch.get_num_threads())
    work.until(time.perf_counter() + _WATCH_S)
    return _largest(group, watch.share())


def _meet(group: WorkerGroup) -> None:
    """Wait for all members."""
    group.add_up(torch.ones(1, device=group.device)).wait()
    _finish(group)


def _finish(group: WorkerGroup) -> None:
    """What a GPU was told to do is done."""
    if group.device.type == "cuda":
        torch.cuda.current_stream(group.device).synchronize()


def _largest(group: WorkerGroup, value: float) -> float:
    """The largest of all members' values."""
    return float(group.largest(torch.tensor([value], dtype=torch.float64, device=group.device)))
