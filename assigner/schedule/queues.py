"""Jobs of workers in a row, and the messages between them, timed in one pass.

A job is a compute action with the messages that it waits for and those that it makes. A directed link has one sender,
so the order in which its messages are ready is the order of that worker's jobs: every time follows from earlier ones.
Jobs know no names: search prices many thousands of plans.

Links that share a wire have several senders: where two of a plan's do, jobs are timed in the order of their ends, so
that a message has the wire before those that ask for it later. It asks when it is ready and its link is free, has the
link for its whole time and the wire for a share of it, and begins when both are free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from heapq import heappop, heappush
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Arrivals = list[float]
"""When each message of one route is there, by micro-batch; below 0: not yet."""


class Job(NamedTuple):
    """A compute action, whatever its micro-batch, with the messages that it waits for and those that it makes.

    Args:
        seconds: How long it computes.
        receives: Of the messages that it waits for.
        busy_s: Seconds that its messages keep the worker busy after it.
        sends: (arrivals, link, seconds on the wire, number of the receiving worker) of the messages that it makes.
    """

    seconds: float
    receives: tuple[Arrivals, ...]
    busy_s: float
    sends: tuple[tuple[Arrivals, int, float, int], ...]


SharedLinks = Mapping[int, tuple[int, float]]
"""Of links that share a wire, by number: the wire's number, and for which share of a message's time it is taken."""

Queue = list[tuple[Job, int]]
"""One worker's jobs in order, each with its micro-batch."""


class Timed(NamedTuple):
    """A job as it was timed: its worker's number, its own among that worker's, and when its messages start."""

    worker: int
    job: int
    start_s: float
    end_s: float
    begins_s: list[float]


def run_queues(
    queues: Sequence[Queue],
    log: list[Timed] | None = None,
    *,
    leads: Sequence[float] = (),
    shared: SharedLinks = MappingProxyType({}),
) -> tuple[list[int], float]:
    """Time all jobs in one pass.

    Args:
        queues: By worker. Their jobs' arrivals are filled in.
        log: Takes each job in the order of timing.
        leads: By queue, when its first job can start; empty: at once.
        shared: The links that share a wire; empty: none does.

    Returns:
        How many jobs of each worker were run (all, unless the program waits for itself), and the end of the last.
    """
    if shared:
        return _InTime(queues, log, leads, shared).run()
    count, last = len(queues), 0.0
    done, free_s, link_free_s = [0] * count, list(leads) or [0.0] * count, [0.0] * (count * count)
    ready = deque(range(count))
    while ready:
        worker = ready.popleft()
        queue, at, free = queues[worker], done[worker], free_s[worker]
        while at < len(queue):
            job, m = queue[at]
            start = free
            for arrivals in job.receives:
                arrival = arrivals[m]
                if arrival > start:
                    start = arrival
                elif arrival < 0.0:
                    break
            else:
                end = start + job.seconds
                begins = []
                for arrivals, link, seconds, target in job.sends:
                    begin = link_free_s[link]
                    if end > begin:  # noqa: PLR1730 - the innermost loop
                        begin = end
                    link_free_s[link] = arrivals[m] = begin + seconds
                    begins.append(begin)
                    ready.append(target)
                free = end + job.busy_s
                if end > last:  # noqa: PLR1730
                    last = end
                if log is not None:
                    log.append(Timed(worker, at, start, end, begins))
                at += 1
                continue
            break
        done[worker], free_s[worker] = at, free
    return done, last


class _InTime:
    """Jobs in the order of their ends, for links that share wires; arguments as of `run_queues`.

    Of what ends at once the job of the first worker goes first, and jobs before links.
    """

    def __init__(
        self, queues: Sequence[Queue], log: list[Timed] | None, leads: Sequence[float], shared: SharedLinks
    ) -> None:
        count = len(queues)
        self._queues, self._log, self._shared = queues, log, shared
        self._done, self._free_s = [0] * count, list(leads) or [0.0] * count
        self._start_s: list[float | None] = [None] * count  # of the job that runs
        self._link_free_s, self._wire_free_s = defaultdict[int, float](float), defaultdict[int, float](float)
        # messages that wait for their link and wire: as in `Job.sends`, and where each notes its start
        self._waiting: dict[int, deque[tuple[Arrivals, int, float, int, list[float], int]]] = {
            link: deque() for link in shared
        }
        self._events: list[tuple[float, bool, int]] = []  # when; whether a link can ask for its wire; which one, or who

    def run(self) -> tuple[list[int], float]:
        """As of `run_queues`."""
        last = 0.0
        for worker in range(len(self._queues)):
            self._start(worker)
        while self._events:
            now, is_link, number = heappop(self._events)
            if is_link:
                self._ask(number, now)
            else:
                self._end(number, now)
                last = max(last, now)
        return self._done, last

    def _start(self, worker: int) -> None:
        """Start a worker's next job, if it is idle and what the job waits for is known."""
        queue, at = self._queues[worker], self._done[worker]
        if self._start_s[worker] is not None or at == len(queue):
            return
        job, m = queue[at]
        arrivals = [each[m] for each in job.receives]
        if all(arrival >= 0.0 for arrival in arrivals):
            self._start_s[worker] = start = max([self._free_s[worker], *arrivals])
            heappush(self._events, (start + job.seconds, False, worker))

    def _end(self, worker: int, now: float) -> None:
        """Send what a job has made, and start the worker's next one."""
        at, start = self._done[worker], self._start_s[worker]
        job, m = self._queues[worker][at]
        begins = [now] * len(job.sends)
        assert start is not None
        if self._log is not None:
            self._log.append(Timed(worker, at, start, now, begins))
        self._start_s[worker], self._free_s[worker], self._done[worker] = None, now + job.busy_s, at + 1
        for n, (arrivals, link, seconds, target) in enumerate(job.sends):
            if link in self._shared:
                waiting = self._waiting[link]
                waiting.append((arrivals, m, seconds, target, begins, n))
                if len(waiting) == 1:
                    heappush(self._events, (max(now, self._link_free_s[link]), True, link))
            else:
                begins[n] = begin = max(self._link_free_s[link], now)
                self._link_free_s[link] = arrivals[m] = begin + seconds
                self._start(target)
        self._start(worker)

    def _ask(self, link: int, now: float) -> None:
        """A link that is free takes its next message, as soon as the wire is free."""
        wire, share = self._shared[link]
        arrivals, m, seconds, target, begins, n = self._waiting[link].popleft()
        begins[n] = begin = max(now, self._wire_free_s[wire])
        self._wire_free_s[wire] = begin + seconds * share
        self._link_free_s[link] = arrivals[m] = begin + seconds
        if self._waiting[link]:
            heappush(self._events, (begin + seconds, True, link))
        self._start(target)
