"""Of a tiny placement every order: branch and bound, for the proof and as the other opinion in tests.

Orders are built task by task in the order of their starts; of tasks that start at once, the one of the first worker
goes first. So every order that leaves no worker idle without need is built once. A branch ends where what a worker
still has to do, with the least that follows, cannot be over in time. Micro-batches of one lane are alike: they enter in
their order. Starts are those without wires that links share, which only delay: what an order takes the simulator says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assigner.errors import FormatError

if TYPE_CHECKING:
    from assigner.solver.orders.tasks import Orders, PlacedTasks


class EveryOrder:
    """One search.

    Args:
        tasks: The placement.
        limit: A step of this many seconds or more is of no use.
        nodes: So many are looked at, at most.

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
