"""Memory over time: what each worker holds at each moment of a timed program, by what it holds.

The sum of `CostModel.memory`, unrolled along a timeline. From when to when each part of it is on its worker:

    parameters, gradients, optimizer state, buffers      always
    of a micro-batch: what stored partitions keep        start of its forward .. end of its backward's input part
    what waits for the weight part                       start of the input part .. end of the weight part
    every distinct output that the stage reads           start of its forward .. end of its backward
    the largest rematerialised partition's activations   start .. end of a backward that recomputes
    the largest workspace of the stage                   start .. end of a forward or a backward
    an output that leaves                                end of its forward .. it has left
    its gradient                                         it sets out .. end of the (input part of the) backward that
                                                         uses it
    a bucket of the largest reduction                    while one goes on, or a gathering

What the worker's allocator takes beyond tensors is, as in the cost model, a share of all that is held at the moment,
and counts as workspace.

An output is there once as a message, and once as a gradient, however many micro-batches of it wait for the link: so
the sum never exceeds what `CostModel.memory` allows for, and reaches it where all parts meet.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from assigner.formats.plan import Memory
from assigner.schedule.cost import CostModel, PartitionOutput
from assigner.schedule.orders import ActionKind, order_of
from assigner.schedule.program import TOGETHER, Payload
from assigner.schedule.replication import leaving
from assigner.schedule.timing import bucket_bytes
from assigner.schedule.updating import held_state

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.schedule.program import Route
    from assigner.schedule.simulate import Event, Timeline


class Held(NamedTuple):
    """What a worker holds beside its state from a moment on, in bytes; seconds from the step's start.

    Its workspace includes what the allocator takes beyond tensors, those of the state among them.
    """

    at_s: float
    activations: float
    workspace: float
    messages: float


@dataclass(frozen=True)
class Occupancy:
    """One worker's memory over a step.

    Args:
        worker: Its name.
        state: Parameters, gradients, optimizer state and buffers: there all the time.
        held: What comes and goes, at each moment at which it changes; the first is the step's start.
    """

    worker: str
    state: Memory
    held: tuple[Held, ...]

    @cached_property
    def highest(self) -> Held:
        """The first moment at which the worker holds the most."""
        rest = self.state.total
        return max(self.held, key=lambda held: rest + held.activations + held.workspace + held.messages)

    @property
    def peak(self) -> Memory:
        """The most that the worker holds at one time, by what it holds."""
        held = self.highest
        return replace(
            self.state, activations=held.activations, workspace=held.workspace, messages=held.messages
        )  # fmt: skip


def memory_over_time(timeline: Timeline, cost: CostModel) -> tuple[Occupancy, ...]:
    """What every worker of a timed program holds, over the step.

    Args:
        timeline: What `run_program` gave.
        cost: The prices that it was timed with.

    Returns:
        One for each worker of the plan, in its order.
    """
    plan = timeline.program.plan
    ledgers = {worker: _Ledger(plan, cost, worker) for worker in plan.workers}
    for event in timeline.events:
        route = event.action.route
        if route is None:
            ledgers[event.worker].compute(event)
        elif route.payload is Payload.ACTIVATION:
            ledgers[event.worker].send(route, event)
        elif route.payload is Payload.GRADIENT:
            ledgers[route.target].expect(route, event)
    return tuple(ledger.closed() for ledger in ledgers.values())


class _Ledger:
    """One worker's parts: which of them appear and go when.

    A part's number counts how often it is there: of the i-th of S stages i (micro-batches that have their graph), S + i
    (it computes), 2 S + i (it recomputes), 3 S + i (micro-batches in flight) and 4 S + i (those that wait for their
    weight part); of the o-th of the outputs that leave 5 S + 2 o, and one more its gradient; the last one is a
    reduction's bucket.
    """

    def __init__(self, plan: Plan, cost: CostModel, worker: str) -> None:
        self.worker, self.cost = worker, cost
        self.stages = {n: i for i, n in enumerate(plan.held[worker])}
        held = [name for n in self.stages for name in plan.stages[n].partitions]
        price = {name: cost.partition(name, worker, plan.micro_batch_size) for name in held}
        steps = order_of(plan, worker) if plan.orders else []
        self.state = held_state(cost, plan, worker)
        self.beyond = cost.profile.worker[worker].allocator_share
        self.kept, self.workspace, self.again = list[float](), list[float](), list[float]()
        self.read, self.waiting, self.put_off = list[float](), list[float](), list[bool]()
        for n in self.stages:
            names, remat = plan.stages[n].partitions, plan.stages[n].rematerialise
            read = dict.fromkeys(output for name in names for output in cost.reads[name])
            kept = sum(price[name].activation_bytes for name in names if name not in remat)
            inputs = sum(cost.output_bytes(output, plan.micro_batch_size) for output in read)
            is_split = any(step[:2] == (ActionKind.BACKWARD_INPUT, n) for step in steps)
            self.kept.append(kept if is_split else kept + inputs)
            self.read.append(inputs if is_split else 0.0)
            self.waiting.append(cost.waiting_bytes(names, remat, worker, plan.micro_batch_size) if is_split else 0.0)
            self.put_off.append(any(name not in cost.differentiated for name in remat))
            self.workspace.append(max(price[name].workspace_bytes for name in names))
            self.again.append(max((price[name].activation_bytes for name in remat), default=0.0))
        sent = dict.fromkeys(
            PartitionOutput(edge.source, edge.output) for edge in leaving(plan, cost.profile.edges, worker)
        )
        self.part = {output: 5 * len(self.stages) + 2 * o for o, output in enumerate(sent)}
        self.sizes = [cost.output_bytes(output, plan.micro_batch_size) for output in sent]
        self.bucket = bucket_bytes(cost, plan, worker)
        self.maker = {name: n for n in self.stages for name in plan.stages[n].partitions}
        self.changes: list[tuple[float, int, int]] = []  # (when, -1 or 1, part)
        self.due: dict[tuple[int, int], list[int]] = defaultdict(list)  # gradients that a backward will use
        self.ended_s = 0.0

    def compute(self, event: Event) -> None:
        """A forward, a backward or a part of one, an update, a reduction or a gathering."""
        action, start, end = event.action, event.start_s, event.end_s
        if action.kind in TOGETHER:
            self.changes += ((start, 1, self.bucket_part), (end, -1, self.bucket_part))
            return
        self.ended_s = end
        if action.kind is ActionKind.UPDATE:
            return
        count, i, changes = len(self.stages), self.stages[action.stage], self.changes
        changes += ((start, 1, count + i), (end, -1, count + i))
        if action.kind is ActionKind.FORWARD:
            changes += ((start, 1, i), (start, 1, 3 * count + i))
            return
        is_input, is_weight = (action.kind is ActionKind.BACKWARD_INPUT, action.kind is ActionKind.BACKWARD_WEIGHT)
        if is_input:
            changes.append((start, 1, 4 * count + i))
        else:
            changes.append((end, -1, 3 * count + i))
        if self.again[i] and (not is_weight or self.put_off[i]):
            changes += ((start, 1, 2 * count + i), (end, -1, 2 * count + i))
        if is_weight:
            changes.append((end, -1, 4 * count + i))
            return
        changes.append((end, -1, i))
        for part in self.due.pop((action.stage, action.micro_batch), ()):
            changes.append((end, -1, part))

    def send(self, route: Route, event: Event) -> None:
        """An output on its way out: there from the end of the forward that made it, the last thing that was timed."""
        part = self.part[PartitionOutput(route.partition, route.output)]
        self.changes += ((self.ended_s, 1, part), (event.end_s, -1, part))

    def expect(self, route: Route, event: Event) -> None:
        """A gradient on its way here."""
        part = self.part[PartitionOutput(route.partition, route.output)] + 1
        self.changes.append((event.start_s, 1, part))
        self.due[self.maker[route.partition], event.action.micro_batch].append(part)

    @property
    def bucket_part(self) -> int:
        """The number of a reduction's bucket."""
        return 5 * len(self.stages) + 2 * len(self.sizes)

    def closed(self) -> Occupancy:
        """The sums after each moment's changes."""
        count = len(self.stages)
        there = [0] * (self.bucket_part + 1)
        kept, workspace, again, read, waiting = (range(n * count, (n + 1) * count) for n in range(5))
        messages = range(5 * count, self.bucket_part, 2)
        state = self.state.total
        held = [Held(0.0, 0.0, self.beyond * state, 0.0)]
        self.changes.sort()
        following = iter(self.changes[1:])
        for at_s, step, part in self.changes:
            there[part] += step
            if next(following, _NEVER)[0] == at_s:
                continue
            activations = 0.0
            for parts, sizes in ((kept, self.kept), (read, self.read), (waiting, self.waiting)):
                for n, each in zip(parts, sizes, strict=True):
                    activations += there[n] * each
            activations += max(each if there[n] else 0.0 for n, each in zip(again, self.again, strict=True))
            busy = max(each if there[n] else 0.0 for n, each in zip(workspace, self.workspace, strict=True))
            moved = self.bucket if there[self.bucket_part] else 0.0
            for n, size in zip(messages, self.sizes, strict=True):
                moved += size * ((there[n] > 0) + (there[n + 1] > 0))
            busy += self.beyond * (state + activations + busy + moved)
            if (activations, busy, moved) != held[-1][1:]:
                if held[-1].at_s == at_s:
                    held.pop()
                held.append(Held(at_s, activations, busy, moved))
        return Occupancy(self.worker, self.state, tuple(held))


_NEVER = (float("inf"), 0, 0)
