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
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from assigner.formats.prediction import Memory
from assigner.schedule.cost import CostModel, PartitionOutput
from assigner.schedule.orders import TOGETHER, ActionKind, counted
from assigner.schedule.program import Payload
from assigner.schedule.replication import held_state, leaving
from assigner.schedule.timing import bucket_bytes

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
    """What every worker of a program that was timed with these prices holds, over the step; in the plan's order."""
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


Part = tuple[str, int | PartitionOutput]
"""What a worker holds for a while: its kind, and the stage or the output that it is of."""
_BUCKET: Part = ("bucket", 0)


class _Ledger:
    """One worker's parts: which of them appear and go when, and what each takes."""

    def __init__(self, plan: Plan, cost: CostModel, worker: str) -> None:
        self.worker = worker
        stages = plan.held[worker]
        held = [name for n in stages for name in plan.stages[n].partitions]
        price = {name: cost.partition(name, worker, plan.micro_batch_size) for name in held}
        self.state = held_state(cost, plan, worker)
        self.beyond = cost.profile.worker[worker].allocator_share
        self.kept, self.read, self.waiting = dict[Part, float](), dict[Part, float](), dict[Part, float]()
        self.workspace, self.again = dict[Part, float](), dict[Part, float]()
        self.put_off: dict[int, bool] = {}
        for n in stages:
            names, remat = plan.stages[n].partitions, plan.stages[n].rematerialise
            kept = sum(price[name].activation_bytes for name in names if name not in remat)
            inputs = cost.input_bytes(names, plan.micro_batch_size)
            is_split = ActionKind.BACKWARD_INPUT in counted(plan, n, worker)
            waiting = cost.waiting_bytes(names, remat, worker, plan.micro_batch_size) if is_split else 0.0
            self.kept["kept", n] = kept if is_split else kept + inputs
            self.read["read", n] = inputs if is_split else 0.0
            self.waiting["waiting", n] = waiting
            self.put_off[n] = any(name not in cost.differentiated for name in remat)
            self.workspace["workspace", n] = max(price[name].workspace_bytes for name in names)
            self.again["again", n] = max((price[name].activation_bytes for name in remat), default=0.0)
        sent = (PartitionOutput(edge.source, edge.output) for edge in leaving(plan, cost.profile.edges, worker))
        self.sizes = {output: cost.output_bytes(output, plan.micro_batch_size) for output in dict.fromkeys(sent)}
        self.bucket = bucket_bytes(cost, plan, worker)
        self.maker = {name: n for n in stages for name in plan.stages[n].partitions}
        self.changes: list[tuple[float, int, Part]] = []  # (when, -1 or 1, part)
        self.due: dict[tuple[int, int], list[Part]] = defaultdict(list)  # gradients that a backward will use
        self.ended_s = 0.0

    def compute(self, event: Event) -> None:
        """A forward, a backward or a part of one, an update, a reduction or a gathering."""
        action, start, end = event.action, event.start_s, event.end_s
        if action.kind in TOGETHER:
            self.changes += ((start, 1, _BUCKET), (end, -1, _BUCKET))
            return
        self.ended_s = end
        if action.kind is ActionKind.UPDATE:
            return
        n, changes = action.stage, self.changes
        changes += ((start, 1, ("workspace", n)), (end, -1, ("workspace", n)))
        if action.kind is ActionKind.FORWARD:
            changes += ((start, 1, ("kept", n)), (start, 1, ("read", n)))
            return
        is_input, is_weight = (action.kind is ActionKind.BACKWARD_INPUT, action.kind is ActionKind.BACKWARD_WEIGHT)
        changes.append((start, 1, ("waiting", n)) if is_input else (end, -1, ("read", n)))
        if self.again["again", n] and (not is_weight or self.put_off[n]):
            changes += ((start, 1, ("again", n)), (end, -1, ("again", n)))
        if is_weight:
            changes.append((end, -1, ("waiting", n)))
            return
        changes.append((end, -1, ("kept", n)))
        changes += ((end, -1, part) for part in self.due.pop((n, action.micro_batch), ()))

    def send(self, route: Route, event: Event) -> None:
        """An output on its way out: there from the end of the forward that made it, the last thing that was timed."""
        part = "output", PartitionOutput(route.partition, route.output)
        self.changes += ((self.ended_s, 1, part), (event.end_s, -1, part))

    def expect(self, route: Route, event: Event) -> None:
        """A gradient on its way here."""
        part = "gradient", PartitionOutput(route.partition, route.output)
        self.changes.append((event.start_s, 1, part))
        self.due[self.maker[route.partition], event.action.micro_batch].append(part)

    def closed(self) -> Occupancy:
        """The sums after each moment's changes."""
        there: dict[Part, int] = defaultdict(int)
        state = self.state.total
        held = [Held(0.0, 0.0, self.beyond * state, 0.0)]
        for at_s, changes in groupby(sorted(self.changes, key=itemgetter(0)), key=itemgetter(0)):
            for _, step, part in changes:
                there[part] += step
            activations = 0.0
            for sizes in (self.kept, self.read, self.waiting):
                for part, each in sizes.items():
                    activations += there[part] * each
            activations += max(each if there[part] else 0.0 for part, each in self.again.items())
            busy = max(each if there[part] else 0.0 for part, each in self.workspace.items())
            moved = self.bucket if there[_BUCKET] else 0.0
            for output, size in self.sizes.items():
                moved += size * ((there["output", output] > 0) + (there["gradient", output] > 0))
            busy += self.beyond * (state + activations + busy + moved)
            if (activations, busy, moved) != held[-1][1:]:
                if held[-1].at_s == at_s:
                    held.pop()
                held.append(Held(at_s, activations, busy, moved))
        return Occupancy(self.worker, self.state, tuple(held))
