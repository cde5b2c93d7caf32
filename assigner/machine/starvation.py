"""Do other programs take a process's processor time? What it wanted, what it got, and what its share allows.

A thread that could run computes, or is queued behind others; one that waits for a message does neither. A control
group's quota is the worker's own: a host that is held to 0.4 of a core is a worker of 0.4 of a core, and stopping it
takes nothing from it. So what a process got is held against its share of the machine:

    wanted     computed + queued, or computed + stopped by a quota where the kernel does not count that as queued; a
               quota stops all threads at once, which counts for as many as the worker is to compute with
    got        computed / wanted
    allowed    the cores that affinity and quota leave, over the ranks that share them and their threads; 1 at most
    starved    1 - got / allowed: what others had of its share

Threads that carry messages queue behind the computing of their own process: only those that compute much are looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from assigner.machine.cgroup import allowed_cores, throttled_s
from assigner.machine.launchedrank import launched

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NOTICED = 0.15
"""From this share on starvation is told."""

DISTURBED = 0.35
"""From this share on a measurement is made again."""

REFUSED = 0.7
"""From this share on a measurement is no measurement: others had more than two thirds of the worker's time."""

_sharing: list[int] = []  # ranks on this one's cores; empty: nobody has said so, and the launcher's number counts
_LOOK_S = 1.0  # between two looks at processes that will be gone when they are asked about
_LEAST_S = 0.05  # of wanted time: less tells nothing
_MUCH = 0.1  # of what the busiest thread computes


@dataclass(frozen=True)
class ProcessorTime:
    """What a process has had of the processors until now, in seconds.

    Args:
        wall_s: The time of this reading, on a clock of its own.
        threads: Of each thread that is there: what it has computed, and how long it has been queued.
        throttled_s: How long its control groups have been stopped by their quotas.
    """

    wall_s: float
    threads: Mapping[int, tuple[float, float]]
    throttled_s: float = 0.0


def processor_time(process: int | None = None) -> ProcessorTime:
    """What a process (None: this one) has had until now; of one that is gone, or where nobody tells, no threads."""
    folder = Path("/proc", "self" if process is None else str(process), "task")
    try:
        found = {int(each.name): _thread_time(each) for each in folder.iterdir()}
    except OSError:  # not Linux, or a process that is gone
        found = {}
    threads = {number: spent for number, spent in found.items() if spent is not None}
    return ProcessorTime(time.perf_counter(), threads, throttled_s())


def _thread_time(folder: Path) -> tuple[float, float] | None:
    """What a thread has computed and how long it was queued; None: it has just ended, or the kernel does not tell."""
    try:
        computed, queued, *_ = (folder / "schedstat").read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(computed) / 1e9, int(queued) / 1e9


def cores_shared(mine: Sequence[int], others: Iterable[Sequence[int]]) -> None:
    """Note how many ranks may run on this one's cores: a launcher may bind each to its own (Open MPI, Slurm)."""
    _sharing[:] = [_ranks_on(mine, others)]


def slower_together(threads: int, mine: Sequence[int], others: Iterable[Sequence[int]]) -> float:
    """How many times as long this rank computes as it would if the other ranks were idle; 1: there are cores for all.

    Args:
        threads: Compute threads of each rank.
        mine: The cores on which this process may run.
        others: The same of the host's other ranks that compute on cores.
    """
    return allowed_share(threads, 1) / allowed_share(threads, _ranks_on(mine, others))


def _ranks_on(mine: Sequence[int], others: Iterable[Sequence[int]]) -> int:
    return 1 + sum(not {*mine}.isdisjoint(each) for each in others)


def allowed_share(threads: int, ranks: int | None = None) -> float:
    """What a compute thread of this rank may have of a core: 1, or less where there are fewer cores than threads.

    Args:
        threads: Compute threads of each rank.
        ranks: Ranks on the same cores; None: as they told each other, or else all of the host, as the launcher says.
    """
    return min(1.0, allowed_cores() / (threads * (_ranks() if ranks is None else ranks)))


def spare_cores(threads: int) -> float:
    """Cores that affinity and quota leave beside the compute threads of the ranks on them; below 0: they lack some."""
    return allowed_cores() - threads * _ranks()


def _ranks() -> int:
    """Ranks on the same cores."""
    if _sharing:
        return _sharing[0]
    place = launched()
    return (place.local_ranks or 1) if place else 1


def starved_share(before: ProcessorTime, after: ProcessorTime, *, allowed: float, threads: int = 1) -> float:
    """The share of a process's processor time that others had between two readings, from 0 to 1.

    Args:
        before: The first reading.
        after: The second one.
        allowed: What each thread that computes may have of a core: `allowed_share`.
        threads: How many these are.
    """
    spent = []
    for thread, (computed_s, queued_s) in after.threads.items():
        computed_before, queued_before = before.threads.get(thread, (0.0, 0.0))
        spent.append((max(0.0, computed_s - computed_before), max(0.0, queued_s - queued_before)))
    busiest = max((computed_s for computed_s, _ in spent), default=0.0)
    computing = [each for each in spent if each[0] >= _MUCH * busiest]
    throttled = max(0.0, after.throttled_s - before.throttled_s)
    stops = sorted((min(queued_s, throttled) for _, queued_s in computing), reverse=True)
    computed = sum(computed_s for computed_s, _ in computing)
    wall = after.wall_s - before.wall_s
    queued = max(0.0, min(wall * threads - computed, sum(stops[:threads])))
    queued += sum(max(0.0, queued_s - throttled) for _, queued_s in computing)
    wanted = max(computed + queued, min(wall, computed + throttled))
    if wanted < _LEAST_S:
        return 0.0
    return max(0.0, 1 - computed / wanted / allowed)


class StarvationWatch:
    """Watches this process from its construction on."""

    def __init__(self, threads: int) -> None:
        self.allowed, self.threads = allowed_share(threads), threads
        self.begin = processor_time()

    def share(self) -> float:
        """The share of its processor time that others have had until now."""
        return starved_share(self.begin, processor_time(), allowed=self.allowed, threads=self.threads)


class RanksWatch:
    """Watches the processes that this one starts while the context is open, whatever they run."""

    def __init__(self, *, ranks: int, threads: int) -> None:
        self.allowed, self.threads = allowed_share(threads, ranks), threads
        self.readings: dict[int, tuple[ProcessorTime, ProcessorTime]] = {}  # the first and the last of each
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="assigner-starvation", daemon=True)

    def share(self) -> float:
        """The share of its processor time that others have had of the rank that lost the most of it."""
        shares = (starved_share(*each, allowed=self.allowed, threads=self.threads) for each in self.readings.values())
        return max(shares, default=0.0)

    def look(self) -> None:
        """Read what the processes have had until now."""
        for process in _children():
            now = processor_time(process)
            if now.threads:
                first, _ = self.readings.get(process, (ProcessorTime(now.wall_s, {}, now.throttled_s), now))
                self.readings[process] = first, now

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()


def _children() -> list[int]:
    """The processes that this one has started and that are there; none where the system does not tell."""
    try:
        texts = [(each / "children").read_text(encoding="ascii") for each in Path("/proc/self/task").iterdir()]
    except OSError:
        return []
    return [int(word) for text in texts for word in text.split()]
