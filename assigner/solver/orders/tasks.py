"""A placement's forwards and backwards, whatever their order: what each waits for, what it makes, what memory it takes.

A task is one action of one micro-batch. Tasks of one kind, stage and lane (micro-batches that run on the same workers)
are alike, so that what is known of them stands once, in a row:

    task = row * M + m        rows of two stages: F of 0, B of 0, F of 1, B of 1

A task waits for messages, and for tasks of its own worker. Those of a worker have no message, so that its order alone
must keep them: a backward stands behind its forward; a stage behind those of the worker that it reads, backwards the
other way round; where two stages of a worker read one value that was sent there, the first gets it; and a stage's
forwards go in the order of their micro-batches, as they run without a plan.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from assigner.schedule.orders import ActionKind, listed, with_reductions
from assigner.schedule.simulate import stages_memory
from assigner.schedule.timing import StepTimer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.schedule.cost import CostModel
    from assigner.schedule.orders import Step
    from assigner.schedule.queues import Timed

Orders = list[list[int]]
"""The tasks of each worker, by the number of the worker in `plan.workers`, in order."""


WHOLE = ActionKind.FORWARD, ActionKind.BACKWARD
SPLIT = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
"""The actions of a stage, with whole backwards and with backwards in two parts."""

MOST_LONGER = 0.05
"""Share of a stage's whole backward that its two parts together may take longer than it."""


def may_split(plan: Plan, cost: CostModel) -> bool:
    """Whether backwards may be planned in two parts: where they were measured, and hardly take longer so.

    In two parts a backward runs the same products, but finds less in the caches, and its gradients have memory of their
    own. Where that costs more than it can bring, no order is offered it.

    Raises:
        FormatError: the profile cannot price a partition where it is.
    """
    for worker, names in ((worker, stage.partitions) for stage in plan.stages for worker in stage.workers):
        prices = [cost.partition(name, worker, plan.micro_batch_size) for name in names]
        parts = [sum(price.parts[:2]) for price in prices if price.parts is not None]
        whole = sum(price.backward_s for price in prices)
        if len(parts) < len(prices) or sum(parts) > (1 + MOST_LONGER) * whole:
            return False
    return True


class TaskRow(NamedTuple):
    """What the micro-batches of a lane have in common in one action of one stage.

    Args:
        worker: The number of who does it.
        seconds: How long it computes.
        busy_s: How long its messages keep the worker from its next task.
        sends: (number of the link, seconds on the wire, row that waits for it) of the messages that it makes.
        before: Rows of the same worker that wait for it.
        waits: For how many messages and tasks of its worker it waits.
        bytes: What the worker keeps beyond it; below 0: what it frees.
        inputs: The part of that which is a stage's inputs: an input part of a backward leaves them.
    """

    kind: ActionKind
    stage: int
    worker: int
    seconds: float
    busy_s: float
    sends: tuple[tuple[int, float, int], ...]
    before: tuple[int, ...]
    waits: int
    bytes: float
    inputs: float

    @property
    def readers(self) -> Iterator[tuple[float, int]]:
        """Each row that waits for it, behind the least seconds from the end of this one to its start."""
        yield from ((seconds, reader) for _, seconds, reader in self.sends)
        yield from ((self.busy_s, reader) for reader in self.before)


class PlacedTasks:
    """The tasks of a plan's stages; its schedule plays no part.

    Args:
        split: Every backward runs in two parts.

    Attributes:
        lanes: The rows of each lane, by stage and kind.
        lane_of: The lane of each micro-batch.
        room: Bytes that each worker has for what it keeps; below 0: its stages do not fit.

    Raises:
        FormatError: the profile cannot price the plan, or its parts of backwards, or a link is missing.
    """

    def __init__(self, plan: Plan, cost: CostModel, *, split: bool = False) -> None:
        self.plan, self.cost = plan, cost
        self.split = split
        self.kinds = SPLIT if split else WHOLE
        self.micro_batches = plan.micro_batches
        self.timer = StepTimer(plan, cost)
        self.lane_of = self.timer.wiring.lane_of[: plan.micro_batches]
        self._number = {worker: n for n, worker in enumerate(plan.workers)}
        self.room = tuple(self._room(worker) for worker in plan.workers)
        self.lanes = tuple(tuple(self._rows(n)) for n in range(len(self.timer.wiring.lanes)))

    @cached_property
    def may_run(self) -> bool:
        """Whether every worker has room for one micro-batch in each of its stages."""
        least = [0.0] * self.workers
        for (_, worker), kept in self.least.items():
            least[worker] += kept
        return all(bytes_ <= room for bytes_, room in zip(least, self.room, strict=True))

    @cached_property
    def least(self) -> dict[tuple[int, int], float]:
        """What one micro-batch of a stage takes at most on a worker: with parts, while the first one runs."""
        return {where: kept + self.waiting[where] for where, kept in self.kept.items()}

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.room)

    @cached_property
    def count(self) -> int:
        """How many tasks there are."""
        return len(self.plan.stages) * len(self.kinds) * self.micro_batches

    @cached_property
    def update_s(self) -> list[float]:
        """Seconds of each worker's update."""
        return [self.timer.prices.seconds((ActionKind.UPDATE, -1, worker)) for worker in self.plan.workers]

    def row(self, task: int) -> TaskRow:
        """What is known of a task."""
        row, m = divmod(task, self.micro_batches)
        return self.lanes[self.lane_of[m]][row]

    def task(self, kind: ActionKind, stage: int, micro_batch: int) -> int:
        """The number of a task."""
        return (stage * len(self.kinds) + self.kinds.index(kind)) * self.micro_batches + micro_batch

    def steps(self, orders: Orders) -> list[list[Step]]:
        """What each worker computes before its update, with the reductions that it begins."""
        known = self._steps
        return [
            with_reductions(self.plan, worker, [known[task] for task in order])
            for worker, order in zip(self.plan.workers, orders, strict=True)
        ]

    @cached_property
    def _steps(self) -> list[Step]:
        """Each task as a program has it."""
        stages, counts = range(len(self.plan.stages)), range(self.micro_batches)
        return [(kind, stage, m) for stage, kind, m in itertools.product(stages, self.kinds, counts)]

    def listed(self, orders: Orders) -> Plan:
        """The plan with these orders written out."""
        return listed(self.plan, dict(zip(self.plan.workers, self.steps(orders), strict=True)))

    def of_steps(self, orders: Sequence[Sequence[Step]]) -> Orders:
        """Orders of a program as tasks: its reductions follow from the rest."""
        return [[self.task(*step) for step in steps if step[0] is not ActionKind.REDUCE] for steps in orders]

    def step_s(self, orders: Orders, log: list[Timed] | None = None) -> float:
        """The step in seconds, as the simulator has it; FormatError: it waits for itself."""
        return self.timer.step_s(self.steps(orders), log)

    def fits(self, orders: Orders) -> bool:
        """Whether no worker keeps more than it has room for."""
        return all(self.peak(order) <= room for order, room in zip(orders, self.room, strict=True))

    def peak(self, order: Sequence[int]) -> float:
        """What a worker keeps for its backwards under an order: of each of its stages the most, in bytes.

        As the simulator has it: stages need not have their most at the same time.
        """
        inputs: dict[int, float] = {}
        graphs: dict[int, float] = {}
        most: dict[tuple[int, bool], float] = {}
        for task in order:
            row = self.row(task)
            stage = row.stage
            inputs[stage] = inputs.get(stage, 0.0) + row.inputs
            now = graphs[stage] = graphs.get(stage, 0.0) + row.bytes - row.inputs
            if row.kind is ActionKind.BACKWARD_INPUT:  # while it runs there are both
                now += self.graph[stage, row.worker]
            most[stage, True] = max(most.get((stage, True), 0.0), inputs[stage])
            most[stage, False] = max(most.get((stage, False), 0.0), now)
        return sum(most.values())

    @cached_property
    def waits(self) -> list[int]:
        """For how many messages and tasks of its worker each task waits."""
        found = [self.row(task).waits for task in range(self.count)]
        for task in self.next_forward.values():
            found[task] += 1
        return found

    @cached_property
    def next_forward(self) -> dict[int, int]:
        """Of each forward the same stage's next one on its worker."""
        found, last = {}, dict[tuple[int, int], int]()
        for stage in range(len(self.plan.stages)):
            for m in range(self.micro_batches):
                task = self.task(ActionKind.FORWARD, stage, m)
                before = last.get((stage, self.row(task).worker))
                if before is not None:
                    found[before] = task
                last[stage, self.row(task).worker] = task
        return found

    @cached_property
    def behind(self) -> list[frozenset[int]]:
        """Of each task those of its worker that must stand behind it, as far as they wait for it themselves."""
        found = []
        for task in range(self.count):
            m = task % self.micro_batches
            later = [reader * self.micro_batches + m for reader in self.row(task).before]
            if task in self.next_forward:
                later.append(self.next_forward[task])
            found.append(frozenset(later))
        return found

    @cached_property
    def senders(self) -> list[list[int]]:
        """Of each task those whose messages it waits for."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for task in range(self.count):
            for _, _, reader in self.row(task).sends:
                found[reader * self.micro_batches + task % self.micro_batches].append(task)
        return found

    def _held(self, worker: str, flying: int | None = None) -> float:
        """Bytes of a worker with one micro-batch in flight of one of its stages; None: of none."""
        plan, cost = self.plan, self.cost
        stages = [
            (plan.stages[n].partitions, plan.stages[n].rematerialise, int(n == flying)) for n in plan.held[worker]
        ]
        return stages_memory(cost, plan, worker, stages).total

    def _room(self, worker: str) -> float:
        return self.cost.profile.worker[worker].capacity_bytes - self._held(worker)

    @cached_property
    def kept(self) -> dict[tuple[int, int], float]:
        """Bytes that one micro-batch of a stage keeps on a worker from its forward to its backward."""
        found = {}
        for worker, stages in self.plan.held.items():
            empty = self._held(worker)
            for stage in stages:
                found[stage, self._number[worker]] = self._held(worker, stage) - empty
        return found

    @cached_property
    def graph(self) -> dict[tuple[int, int], float]:
        """The part of that which is not the stage's inputs; all of it where backwards are whole."""
        return {where: kept - self._inputs(*where) if self.split else kept for where, kept in self.kept.items()}

    @cached_property
    def waiting(self) -> dict[tuple[int, int], float]:
        """Bytes that a micro-batch keeps between the parts of its backward, inputs left out; 0 without parts."""
        if not self.split:
            return dict.fromkeys(self.kept, 0.0)
        found, size = {}, self.plan.micro_batch_size
        for stage, number in self.kept:
            held, worker = self.plan.stages[stage], self.plan.workers[number]
            share = 1 + self.cost.profile.worker[worker].allocator_share
            found[stage, number] = share * self.cost.waiting_bytes(
                held.partitions, held.rematerialise, worker, size
            )  # fmt: skip
        return found

    def _inputs(self, stage: int, number: int) -> float:
        names, worker = self.plan.stages[stage].partitions, self.plan.workers[number]
        share = 1 + self.cost.profile.worker[worker].allocator_share
        return share * self.cost.input_bytes(names, self.plan.micro_batch_size)

    def _rows(self, lane: int) -> Iterator[TaskRow]:
        """The rows of a lane."""
        wiring, timer, width = self.timer.wiring, self.timer, len(self.kinds)
        workers = [self._number[worker] for worker in wiring.lanes[lane].workers]
        jobs = [timer.job(kind, stage, lane) for stage in range(len(workers)) for kind in self.kinds]
        reader = {id(arrivals): row for row, job in enumerate(jobs) for arrivals in job.receives}
        before = self._before(workers)
        waits: dict[int, int] = defaultdict(int)
        for later in before.values():
            for row in later:
                waits[row] += 1
        for row, job in enumerate(jobs):
            stage, kind = row // width, self.kinds[row % width]
            yield TaskRow(
                kind, stage, workers[stage], job.seconds, job.busy_s,
                tuple((link, seconds, reader[id(arrivals)]) for arrivals, link, seconds, _ in job.sends),
                tuple(before.get(row, ())), waits[row] + len(job.receives), *self._keeps(kind, stage, workers[stage]),
            )  # fmt: skip

    def _keeps(self, kind: ActionKind, stage: int, worker: int) -> tuple[float, float]:
        """Bytes that a task adds to what is kept, and those of them that are its stage's inputs."""
        where = stage, worker
        kept, graph = self.kept[where], self.graph[where]
        if kind is ActionKind.FORWARD:
            return kept, kept - graph
        if kind is ActionKind.BACKWARD:
            return -kept, graph - kept
        if kind is ActionKind.BACKWARD_INPUT:
            return self.waiting[where] - graph, 0.0
        return graph - kept - self.waiting[where], graph - kept

    def _before(self, workers: Sequence[int]) -> dict[int, list[int]]:
        """Of each row of a lane the rows of the same worker that wait for it without a message."""
        width, stage_of = len(self.kinds), {}
        for n, stage in enumerate(self.plan.stages):
            stage_of.update(dict.fromkeys(stage.partitions, n))
        pairs: dict[tuple[int, int], bool] = {}  # stages of one worker, in this order forward; and whether also back
        first: dict[tuple[str, int, int, bool], int] = {}
        for edge in sorted(self.cost.profile.edges, key=lambda edge: stage_of[edge.target]):
            target = stage_of[edge.target]
            for back in (False, True) if edge.gradient else (False,):
                source = stage_of[edge.source]
                if workers[source] != workers[target]:  # whose message the others share, or who sends the gradient
                    source = first.setdefault((edge.source, edge.output, workers[target], back), target)
                if source != target:
                    pairs[source, target] = pairs.get((source, target), False) or back
        found: dict[int, list[int]] = {n: [n + 1] for n in range(len(workers) * width) if (n + 1) % width}
        for (source, target), back in pairs.items():
            found[source * width].append(target * width)
            if back:
                found.setdefault(target * width + 1, []).append(source * width + 1)
        return found


def along(rows: Sequence[TaskRow]) -> Iterator[int]:
    """The rows of a lane in an order in which each comes behind those that it waits for."""
    waits = [row.waits for row in rows]
    ready = [n for n, count in enumerate(waits) if not count]
    while ready:
        n = ready.pop()
        yield n
        for _, reader in rows[n].readers:
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
