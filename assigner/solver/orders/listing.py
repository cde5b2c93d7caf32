"""List scheduling: whenever a worker is free it takes, of what is ready, what comes first by a rule.

Time goes forward over all workers at once, so every message that can be there has been sent. A forward waits where the
worker has no room for what it keeps: then only what frees memory goes on. Each stage of a worker has room for one
micro-batch from the start, so the deepest one can always go on and nobody waits for ever. Each link is taken to have a
wire of its own; what an order takes with those that links share the simulator says.

Source: J. Blazewicz et al., Handbook on Scheduling, 2019, section 5.1; the rules are those of pipelines:

    early backward    backwards as soon as they are ready: 1F1B (Narayanan et al., PipeDream, SOSP 2019)
    forward first     forwards as far as memory and depth allow: GPipe (Huang et al., NeurIPS 2019)
    stage order       of several stages the deepest; or turn and turn about, as many micro-batches at a time as there
                      are workers (Narayanan et al., Megatron-LM, SC 2021, section 2.2)
    depth             how many micro-batches a stage has in flight (Qi et al., Zero Bubble, ICLR 2024, appendix)
    weight parts      where backwards run in two parts, the second goes where there is nothing else to do, or no room
                      for it (Qi et al., section 3)
    patience          whether a worker stays idle for something that comes earlier by the rule and will be there soon
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Literal

from assigner.schedule.orders import ActionKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.schedule.orders import Step
    from assigner.solver.orders.tasks import Orders, PlacedTasks, TaskRow


First = Literal["backward", "forward", "both parts", "micro-batch"]
StageOrder = Literal["deepest", "in turn"]


@dataclass(frozen=True)
class PriorityRule:
    """What goes first.

    Args:
        first: Backwards or forwards, with weight parts last; backwards in both parts; or the earlier micro-batch.
        stages: Which of a worker's stages goes first.
        depth: Micro-batches in flight, as a multiple of those of 1F1B; inf: as many as there is room for.
        patience: A worker waits for what goes first if that comes within this share of what it would do instead.
    """

    first: First = "backward"
    stages: StageOrder = "deepest"
    depth: float = math.inf
    patience: float = 0.0


_ORDERS: tuple[tuple[First, float], ...] = (
    ("forward", 1.0), ("forward", 1.5), ("backward", math.inf), ("backward", 1.5), ("backward", 1.0), ("forward", 2.0),
)  # fmt: skip
_STAGES: tuple[StageOrder, ...] = ("deepest", "in turn")

RULES = (
    *(
        PriorityRule(first, stages, depth, patience)
        for patience in (0.0, 0.1)
        for stages in _STAGES
        for first, depth in _ORDERS
    ),
    PriorityRule("micro-batch"),
    PriorityRule("both parts"),
)
"""All that are tried, the most promising first. With one stage a worker turns make no difference, nor both parts where
backwards are whole.
"""

QUICK = RULES[:3]
"""Those that tell best what a placement is worth."""


def rules_for(tasks: PlacedTasks) -> Iterator[PriorityRule]:
    """The rules that differ for a placement."""
    for rule in RULES:
        if (tasks.plan.is_looped or rule.stages == "deepest") and (tasks.split or rule.first != "both parts"):
            yield rule


def list_schedule(tasks: PlacedTasks, rule: PriorityRule) -> Orders | None:
    """The order that a rule makes; None: it does not come to an end within the memory there is."""
    return _Listing(tasks, rule, _priorities(tasks, rule)).run() if tasks.may_run else None


def made_to_fit(tasks: PlacedTasks, orders: Orders) -> Orders | None:
    """An order that keeps too much, followed as far as there is room; None as of `list_schedule`."""
    place = {task: float(n) for order in orders for n, task in enumerate(order)}
    rule = PriorityRule(patience=1.0)
    return _Listing(tasks, rule, [place[n] for n in range(tasks.count)]).run() if tasks.may_run else None


def zero_bubble(tasks: PlacedTasks) -> Orders | None:
    """The zero-bubble authors' order by hand of backwards in two parts; None: they have none for the placement.

    With one stage a worker ZB-H1: 1F1B's order, each weight part as many backwards later as its stage's number, so that
    all workers end at about the same time, in the memory of 1F1B's first stage. With two of them in a V, the first and
    the last stage on the first worker, ZB-V, as torch.distributed.pipelining has it.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.3; ZB-V: arXiv 2401.10241, section 6.
    """
    plan = tasks.plan
    if not tasks.split or plan.is_replicated:
        return None
    alone, count = len(plan.stages) == tasks.workers, len(plan.stages)
    in_v = count == 2 * tasks.workers and all(
        plan.stages[n].workers == plan.stages[count - 1 - n].workers for n in range(count)
    )
    if not (alone or in_v):
        return None
    orders: Orders = [[] for _ in range(tasks.workers)]
    for stage in range(tasks.workers):
        steps = _one_stage(stage, count, tasks.micro_batches) if alone else _in_v(stage, count, tasks.micro_batches)
        order = [tasks.task(*step) for step in steps]
        orders[tasks.row(order[0]).worker] = order
    return orders


def _one_stage(stage: int, stages: int, count: int) -> Iterator[Step]:
    """ZB-H1 of a stage."""
    warm_up = min(count, stages - stage)
    yield from ((ActionKind.FORWARD, stage, m) for m in range(warm_up))
    for m in range(count):
        yield ActionKind.BACKWARD_INPUT, stage, m
        if m >= stage:
            yield ActionKind.BACKWARD_WEIGHT, stage, m - stage
        if m + warm_up < count:
            yield ActionKind.FORWARD, stage, m + warm_up
    yield from ((ActionKind.BACKWARD_WEIGHT, stage, m) for m in range(max(0, count - stage), count))


def _in_v(stage: int, stages: int, count: int) -> Iterator[Step]:
    """ZB-V of a stage in the first half, A, and the one on its worker in the second half, B.

    It is that of at least two for each worker but one, of which those that there are not are left out.
    """
    ahead = stages // 2 - stage  # workers from this one on
    most = max(count, stages - 1)
    kinds = zip("FIW", (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT), strict=True)
    named = {
        letter + which: (kind, n) for letter, kind in kinds for which, n in (("A", stage), ("B", stages - 1 - stage))
    }
    words = ["FA"] * (2 * ahead - 1) + ["FB", "FA"] * stage + ["FB", "IB", "WB"] * ahead
    words += ["FA", "IA", "WA", "FB", "IB", "WB"] * (most - stages // 2)
    words += ["IA", "IB"] * stage + ["IA", "WA"] * ahead + ["WB"] * stage + ["WA"] * stage
    done = dict.fromkeys(named, 0)
    for word in words:
        kind, of = named[word]
        if done[word] < count:
            yield kind, of, done[word]
        done[word] += 1


class _Listing:
    """One pass.

    What a stage has kept at once on a worker stays its own (`_claims`): the simulator adds up the most of each stage.
    """

    def __init__(self, tasks: PlacedTasks, rule: PriorityRule, rank: Sequence[float]) -> None:
        self._tasks, self._patience, self._rank = tasks, rule.patience, rank
        self._most = _depths(tasks, rule)
        workers = range(tasks.workers)
        self.ready: list[list[tuple[float, int]]] = [[] for _ in workers]  # by priority
        self.coming: list[list[tuple[float, int]]] = [[] for _ in workers]  # by time
        self.blocked: list[list[int]] = [[] for _ in workers]  # for want of memory
        self._inputs, self._graphs = dict.fromkeys(tasks.kept, 0.0), dict.fromkeys(tasks.kept, 0.0)
        self._flying = dict.fromkeys(tasks.kept, 0)
        self._claims = {where: (tasks.kept[where] - graph, graph + tasks.waiting[where])
                        for where, graph in tasks.graph.items()}  # fmt: skip
        self._room = list(tasks.room)
        for (_, worker), least in tasks.least.items():
            self._room[worker] -= least

    def run(self) -> Orders | None:
        """The order of each worker; None: it stops before the end."""
        tasks = self._tasks
        m_count, lanes, lane_of, rank = tasks.micro_batches, tasks.lanes, tasks.lane_of, self._rank
        waits, there = list(tasks.waits), [0.0] * tasks.count
        free, link_s = [0.0] * tasks.workers, dict[int, float]()
        orders: Orders = [[] for _ in range(tasks.workers)]
        behind = tasks.behind
        for task, count in enumerate(waits):
            if not count:
                self.coming[tasks.row(task).worker].append((0.0, task))
        for coming in self.coming:
            heapify(coming)
        turns = [(0.0, worker) for worker in range(tasks.workers)]
        while turns:
            now, worker = heappop(turns)
            if now < free[worker]:
                continue  # it has begun something meanwhile, and has a turn when that is through
            coming, ready = self.coming[worker], self.ready[worker]
            while coming and coming[0][0] <= now:
                task = heappop(coming)[1]
                heappush(ready, (rank[task], task))
            task = self._chosen(worker, now)
            if task < 0:
                if coming:
                    heappush(turns, (coming[0][0], worker))
                continue
            orders[worker].append(task)
            number, m = divmod(task, m_count)
            row = lanes[lane_of[m]][number]
            end = now + row.seconds
            free[worker] = end + row.busy_s
            heappush(turns, (free[worker], worker))
            self._keep(row)
            for link, seconds, reader in row.sends:
                arrival = max(link_s.get(link, 0.0), end) + seconds
                link_s[link] = arrival
                later = reader * m_count + m
                there[later] = max(there[later], arrival)
                waits[later] -= 1
                if not waits[later]:
                    target = lanes[lane_of[m]][reader].worker
                    heappush(self.coming[target], (there[later], later))
                    heappush(turns, (max(there[later], free[target]), target))
            for later in behind[task]:
                waits[later] -= 1
                if not waits[later]:
                    heappush(coming, (there[later], later))
        return orders if sum(map(len, orders)) == tasks.count else None

    def _chosen(self, worker: int, now: float) -> int:
        """What a worker starts now; -1: nothing."""
        ready, coming = self.ready[worker], self.coming[worker]
        while ready:
            rank, task = heappop(ready)
            row = self._tasks.row(task)
            if not self._may(row):
                self.blocked[worker].append(task)
                continue
            if self._patience and coming:
                soon, other = coming[0]
                if (
                    soon <= now + self._patience * row.seconds
                    and self._rank[other] < rank
                    and self._may(self._tasks.row(other))
                ):
                    heappush(ready, (rank, task))
                    return -1
            return task
        return -1

    def _may(self, row: TaskRow) -> bool:
        """Whether there is room for what a task keeps, and while it runs."""
        where = row.stage, row.worker
        if row.kind is ActionKind.FORWARD and self._flying[where] >= self._most[where]:
            return False
        return sum(self._claim(row)) <= sum(self._claims[where]) + self._room[row.worker]

    def _claim(self, row: TaskRow) -> tuple[float, float]:
        """The most that a stage keeps once a task has run: of inputs, and of graphs with what waits for weight parts.

        A forward leaves room for the first part of its backward, as it is when no weight part is left to run.
        """
        where = row.stage, row.worker
        inputs, graphs = self._claims[where]
        now, graph = self._graphs[where] + row.bytes - row.inputs, self._tasks.graph[where]
        if row.kind is ActionKind.FORWARD:
            now = max(now, (self._flying[where] + 1) * graph + self._tasks.waiting[where])
        elif row.kind is ActionKind.BACKWARD_INPUT:
            now += graph
        return max(inputs, self._inputs[where] + row.inputs), max(graphs, now)

    def _keep(self, row: TaskRow) -> None:
        """Count what a task keeps, or frees."""
        where, claim = (row.stage, row.worker), self._claim(row)
        self._room[row.worker] -= sum(claim) - sum(self._claims[where])
        self._claims[where] = claim
        self._inputs[where] += row.inputs
        self._graphs[where] += row.bytes - row.inputs
        if row.kind is ActionKind.FORWARD:
            self._flying[where] += 1
            return
        if row.kind is not ActionKind.BACKWARD_WEIGHT:
            self._flying[where] -= 1
        for task in self.blocked[row.worker]:
            heappush(self.ready[row.worker], (self._rank[task], task))
        self.blocked[row.worker].clear()


def _depths(tasks: PlacedTasks, rule: PriorityRule) -> dict[tuple[int, int], float]:
    """The most micro-batches that a stage has in flight on a worker."""
    if math.isinf(rule.depth):
        return dict.fromkeys(tasks.kept, math.inf)
    stages, found = tasks.plan.stages, {}
    for stage, worker in tasks.kept:
        flying = sum(len(each.workers) for each in stages[stage:]) / len(stages[stage].workers)
        found[stage, worker] = max(1.0, math.ceil(rule.depth * flying - 1e-9))
    return found


def _priorities(tasks: PlacedTasks, rule: PriorityRule) -> list[float]:
    """Of each task its place by the rule: the least goes first."""
    m_count, stages = tasks.micro_batches, len(tasks.plan.stages)
    worlds, span = tasks.workers, float(m_count * stages)
    found: list[float] = []
    for stage, kind in itertools.product(range(stages), tasks.kinds):
        forward = kind is ActionKind.FORWARD
        for m in range(m_count):
            deep = stages - 1 - stage
            if rule.stages == "in turn":
                place = (m // worlds * stages + (stage if forward else deep)) * worlds + m % worlds
            else:
                place = deep * m_count + m
            if rule.first == "micro-batch":
                at = 2 * m_count if kind is ActionKind.BACKWARD_WEIGHT else 2 * m
                found.append(float((at + forward) * stages + deep))
            else:
                late: float = forward == (rule.first != "forward")
                if kind is ActionKind.BACKWARD_WEIGHT:
                    late = 0.5 if rule.first == "both parts" else 2
                found.append(place + span * 2 * late)
    return found
