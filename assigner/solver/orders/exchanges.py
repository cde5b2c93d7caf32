"""An order made better: tasks that stand on the critical path change places on their worker; and every order there is.

Only what is on a longest path through the step can make it shorter. Of such a path, tasks that follow each other on one
worker without a wait are a block, and within a block only this helps: to put a task in front of the block, so that
what its first one holds up starts earlier, or behind it (E. Balas and A. Vazacopoulos, Guided local search with
shifting bottleneck for job shop scheduling, Management Science 44, 1998). So those are the neighbours, the latest
blocks first. An order that keeps more in memory than there is room for, or waits for itself, is none. A neighbour as
good is taken too, once: steps have many orders of equal length, and the way down leads through them (F. Glover, Tabu
search, 1989: what was visited is not visited again).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from assigner.errors import FormatError
from assigner.schedule.orders import ActionKind
from assigner.solver.limits.tuning import ROUNDING, TIE
from assigner.solver.methods.local_search import local_search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.schedule.queues import Timed
    from assigner.solver.orders.tasks import Orders, PlacedTasks


class _Move(NamedTuple):
    """A task of a worker goes from one place in its order to another."""

    worker: int
    source: int
    target: int


class Exchanges:
    """Local search over the orders of one placement, of whose tasks so many are timed at most."""

    def __init__(self, tasks: PlacedTasks, *, most: int, stop: Callable[[], bool] = lambda: False) -> None:
        self._tasks, self._left, self._stop = tasks, most, stop
        self._behind = tasks.behind
        self._seen: set[int] = set()
        self._log: list[Timed] = []  # of the order that was timed last

    def run(self, orders: Orders, value: float, *, enough: float = 0.0) -> tuple[Orders, float]:
        """The best order met on the way from one that fits, and its step in seconds; `enough` is the least there is."""
        best = value

        def may_go_on() -> bool:
            return self._left > 0 and best > enough * (1 + ROUNDING) and not self._stop()

        def price(point: Orders) -> float:
            nonlocal best
            found = self._price(point)
            best = min(best, found)
            return found

        def accept(found: float, here: float) -> bool:
            return found <= here * (1 + TIE)

        self._seen.add(_key(orders))
        self._left -= self._tasks.count
        self._log = []
        self._tasks.step_s(orders, self._log)
        return local_search(orders, value, neighbours=self._neighbours, price=price, may_go_on=may_go_on, accept=accept)

    def _price(self, orders: Orders) -> float:
        """The step; inf: it was looked at before, or cannot be run."""
        key = _key(orders)
        if key in self._seen:
            return math.inf
        self._seen.add(key)
        self._left -= self._tasks.count
        log: list[Timed] = []
        try:
            value = self._tasks.step_s(orders, log)
        except FormatError:  # it waits for itself
            return math.inf
        self._log = log
        return value

    def _neighbours(self, orders: Orders) -> Iterator[Orders]:
        tried: set[_Move] = set()
        for worker, first, last in _blocks(self._tasks, orders, self._log):
            for move in self._moves(worker, first, last):
                if move not in tried:
                    tried.add(move)
                    found = self._moved(orders, move)
                    if found is not None:
                        yield found

    def _moves(self, worker: int, first: int, last: int) -> Iterator[_Move]:
        """Tasks of a block to its front or behind it, and its neighbours at both ends exchanged."""
        for at in range(first + 1, last + 1):
            yield _Move(worker, at, first)
        for at in range(last - 1, first - 1, -1):
            yield _Move(worker, at, last)

    def _moved(self, orders: Orders, move: _Move) -> Orders | None:
        """The order after a move; None: a task would stand in front of what it waits for, or there is no room."""
        worker, source, target = move
        old = orders[worker]
        task, behind = old[source], self._behind
        if target < source:
            if any(task in behind[each] for each in old[target:source]):
                return None
        elif any(each in behind[task] for each in old[source + 1 : target + 1]):
            return None
        order = [*old[:source], *old[source + 1 :]]
        order.insert(target, task)
        if self._tasks.peak(order) > self._tasks.room[worker]:
            return None
        return [*orders[:worker], order, *orders[worker + 1 :]]


def _key(orders: Orders) -> int:
    return hash(tuple(map(tuple, orders)))


def _blocks(tasks: PlacedTasks, orders: Orders, log: Sequence[Timed]) -> Iterator[tuple[int, int, int]]:
    """The critical path from its end: worker, and first and last place of tasks that follow without a wait."""
    start, end = _times(tasks, orders, log)
    last = max(log, key=lambda timed: timed.end_s)
    step = last.end_s
    if last.worker >= tasks.workers:
        return
    worker, k = last.worker, min(last.job, len(orders[last.worker]) - 1)
    while k >= 0:
        high, order = k, orders[worker]
        while k and start[order[k]] <= end[order[k - 1]] + tasks.row(order[k - 1]).busy_s + TIE * step:
            k -= 1
        if high > k:
            yield worker, k, high
        before = max(tasks.senders[order[k]], key=lambda each: end[each], default=None)
        if before is None:
            return
        worker = tasks.row(before).worker
        k = orders[worker].index(before)


def _times(tasks: PlacedTasks, orders: Orders, log: Sequence[Timed]) -> tuple[list[float], list[float]]:
    """Of each task its start and its end, in seconds; 0 where it was not timed."""
    start, end = [0.0] * tasks.count, [0.0] * tasks.count
    timed_as = [
        dict(zip((job for job, step in enumerate(steps) if step[0] is not ActionKind.REDUCE), order, strict=True))
        for steps, order in zip(tasks.steps(orders), orders, strict=True)
    ]
    for timed in log:
        task = timed_as[timed.worker].get(timed.job) if timed.worker < tasks.workers else None
        if task is not None:
            start[task], end[task] = timed.start_s, timed.end_s
    return start, end


class EveryOrder:
    """Every order of a tiny placement: branch and bound, for the proof and as the other opinion in tests.

    Orders are built task by task in the order of their starts; of tasks that start at once, the one of the first worker
    goes first. So every order that leaves no worker idle without need is built once. A branch ends where what a worker
    still has to do, with the least that follows, cannot be over in time. Micro-batches of one lane are alike: they
    enter in their order. Starts are those without wires that links share, which only delay: what an order takes the
    simulator says.

    Attributes:
        best: The best order found; None: none is below the limit.
        value: Its step in seconds, or the limit.
        finished: All were looked at: `value` is proven.
    """

    def __init__(self, tasks: PlacedTasks, *, limit: float = math.inf, nodes: int = 200_000) -> None:
        self._tasks, self._nodes = tasks, nodes
        self.value = limit
        self.best: Orders | None = None
        self.finished = True
        self._waits, self._there = list(tasks.waits), [0.0] * tasks.count
        self._free = [0.0] * tasks.workers
        self._links: dict[int, float] = {}
        self._left = [0.0] * tasks.workers
        for task in range(tasks.count):
            row = tasks.row(task)
            self._left[row.worker] += row.seconds + row.busy_s
        self._update = tasks.update_s
        self._ready = {task for task in range(tasks.count) if not self._waits[task]}
        self._orders: Orders = [[] for _ in range(tasks.workers)]

    def run(self) -> Orders | None:
        """The best order below the limit, if there is one."""
        if self._tasks.may_run:
            self._extend(0.0, -1)
        return self.best

    def _extend(self, now: float, last: int) -> None:
        tasks = self._tasks
        if not self._ready:
            if sum(map(len, self._orders)) == tasks.count:
                self._price()
            return
        self._nodes -= 1
        if self._nodes < 0:
            self.finished = False
            return
        choices = []
        for task in self._ready:
            row = tasks.row(task)
            start = max(self._free[row.worker], self._there[task])
            if (start, row.worker) <= (now, last):
                continue
            if tasks.peak([*self._orders[row.worker], task]) > tasks.room[row.worker]:
                continue
            choices.append((start, row.worker, task))
        for start, worker, task in sorted(choices):
            if start + self._left[worker] + self._update[worker] < self.value:
                self._take(start, worker, task)
            if not self.finished:
                return

    def _take(self, start: float, worker: int, task: int) -> None:
        """Put a task next, look at all that can follow, and take it back."""
        tasks, m_count = self._tasks, self._tasks.micro_batches
        row, m = tasks.row(task), task % self._tasks.micro_batches
        free, end = self._free[worker], start + row.seconds
        links, there = dict(self._links), list(self._there)
        freed = []
        self._free[worker] = end + row.busy_s
        self._left[worker] -= row.seconds + row.busy_s
        self._orders[worker].append(task)
        self._ready.discard(task)
        for link, seconds, reader in row.sends:
            later = reader * m_count + m
            self._links[link] = max(self._links.get(link, 0.0), end) + seconds
            self._there[later] = max(self._there[later], self._links[link])
            freed.append(later)
        freed += tasks.behind[task]
        for later in freed:
            self._waits[later] -= 1
            if not self._waits[later]:
                self._ready.add(later)
        # a task of no length ends as it starts: the next one of its worker may start at the same time
        self._extend(start, worker if self._free[worker] > start else worker - 1)
        for later in freed:
            if not self._waits[later]:
                self._ready.discard(later)
            self._waits[later] += 1
        self._ready.add(task)
        self._orders[worker].pop()
        self._left[worker] += row.seconds + row.busy_s
        self._free[worker], self._links, self._there = free, links, there

    def _price(self) -> None:
        try:
            value = self._tasks.step_s(self._orders)
        except FormatError:  # a reduction would wait for itself: no order of a program
            return
        if value < self.value:
            self.value, self.best = value, [list(order) for order in self._orders]
