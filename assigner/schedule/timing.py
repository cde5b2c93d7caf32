"""How a plan's actions are priced: as jobs of one worker in a row with messages between them (queues.py).

A reduction is timed like a worker of its own with one job: each replica tells it, by a message that takes no time, that
it has begun; it takes its time, and tells the replicas' updates and their next reduction. So it starts when the last of
its workers has begun it, and workers compute meanwhile; of two reductions that share a worker one goes after the other.
Its messages and those of routes do not wait for each other: they are many and short.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from assigner.errors import FormatError
from assigner.schedule.cost import CostModel, MessageTime, PartitionOutput
from assigner.schedule.orders import TOGETHER, ActionKind, order_of
from assigner.schedule.program import Payload, Route, wire
from assigner.schedule.queues import Job, run_queues
from assigner.schedule.replication import gathered_bytes, gathered_stages, is_exchanged, reduced_stages, update_s
from assigner.schedule.rings import BUCKET_BYTES, GATHERING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.schedule.orders import Step
    from assigner.schedule.queues import Arrivals, Queue, SharedLinks, Timed


class _Once(list[float]):
    """The arrival of a tie's only message, whatever micro-batch is asked for."""

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(0)

    def __setitem__(self, _: Any, value: Any) -> None:
        super().__setitem__(0, value)


Compute = tuple[ActionKind, int, str]
"""An action but a message, whatever its micro-batch: what it does, its stage (-1: an update), its worker."""


@dataclass(frozen=True)
class Instead:
    """Figures that take the place of the profile's, all in seconds; what is not named stays as the profile says.

    Args:
        seconds: Of compute actions, a backward's recomputing included; and of what workers do together, from when all
            have begun it.
        flights: Of one message of a route; its busy shares follow it.
        busy: How long a worker is kept busy after an action, whatever its messages' shares.
        leads: When a worker's first action can start.
    """

    seconds: Mapping[Compute, float] = field(default_factory=dict)
    flights: Mapping[Route, float] = field(default_factory=dict)
    busy: Mapping[Compute, float] = field(default_factory=dict)
    leads: Mapping[str, float] = field(default_factory=dict)


AS_PROFILED = Instead()


def route_bytes(cost: CostModel, route: Route, micro_batch: int) -> float:
    """Bytes of one message of a route."""
    if route.payload is Payload.TIE:
        return cost.profile.ties[route.output].bytes
    return cost.output_bytes(PartitionOutput(route.partition, route.output), micro_batch)


def _wire(cost: CostModel, route: Route, micro_batch: int, flights: Mapping[Route, float]) -> MessageTime:
    message = cost.message(route.source, route.target, route_bytes(cost, route, micro_batch))
    if math.isinf(message.seconds):
        raise FormatError(
            f"the plan needs a link from {route.source} to {route.target}, and the profile has none",
            hint="measure that pair, or place the partitions so that the two need not talk",
        )
    if route in flights:
        share = flights[route] / message.seconds if message.seconds else 0.0
        return MessageTime(flights[route], message.sender_s * share, message.receiver_s * share)
    return message


def stage_s(cost: CostModel, plan: Plan, stage: int, worker: str, kind: ActionKind) -> float:
    """Seconds of one forward or backward of a stage on one of its workers, or of a part of a backward.

    A backward includes its recomputing. Of one in two parts the input part does, where it needs the graph.

    Raises:
        FormatError: the profile cannot price a partition, or knows nothing of the parts of its backward.
    """
    held = plan.stages[stage]
    prices = {name: cost.partition(name, worker, plan.micro_batch_size) for name in held.partitions}
    if kind is ActionKind.FORWARD:
        return sum(price.forward_s for price in prices.values())
    if kind is ActionKind.BACKWARD:
        return sum(price.backward_s for price in prices.values()) + sum(
            prices[name].recompute_s for name in held.rematerialise
        )
    is_input = kind is ActionKind.BACKWARD_INPUT
    parts = [cost.parts(name, worker, plan.micro_batch_size) for name in held.partitions]
    return sum(part[0 if is_input else 1] for part in parts) + sum(
        prices[name].recompute_s for name in held.rematerialise if (name in cost.differentiated) == is_input
    )


def reduced_bytes(cost: CostModel, plan: Plan, stage: int) -> float:
    """Bytes of the gradients that the workers of a stage add up: a shared parameter's that they exchange left out."""
    apart = [tie for tie in cost.profile.ties if is_exchanged(plan, tie)]
    return cost.gradient_bytes(plan.stages[stage].partitions, apart)


def bucket_bytes(cost: CostModel, plan: Plan, worker: str) -> float:
    """Bytes of gradients, or of parameters, that a worker copies for others at once: the largest reduction's bucket."""
    shared = (n for n in plan.held[worker] if plan.stages[n].replicas)
    return min(max((reduced_bytes(cost, plan, n) for n in shared), default=0.0), float(BUCKET_BYTES))


def compute_s(cost: CostModel, plan: Plan, timed: Compute) -> float:
    """Seconds that the profile says of a forward, a backward, an update, a reduction or a gathering."""
    kind, stage, worker = timed
    if kind is ActionKind.UPDATE:
        return update_s(cost, plan, worker)
    if kind in TOGETHER:
        size = together_bytes(cost, plan, kind, stage)
        return _share(kind) * cost.reduce_s(plan.stages[stage].workers, size)
    return stage_s(cost, plan, stage, worker, kind)


def together_bytes(cost: CostModel, plan: Plan, kind: ActionKind, stage: int) -> float:
    """Bytes of what the workers of a stage add up, or hand to each other."""
    return gathered_bytes(cost, plan, stage) if kind is ActionKind.GATHER else reduced_bytes(cost, plan, stage)


def _share(kind: ActionKind) -> float:
    """What it takes of an all-reduce of as many bytes."""
    return GATHERING if kind is ActionKind.GATHER else 1.0


class Prices:
    """What a plan's actions and messages cost, by a profile or by what stands instead of its figures."""

    def __init__(self, plan: Plan, cost: CostModel, routes: Sequence[Route], *, instead: Instead = AS_PROFILED) -> None:
        self._plan, self._cost, self._instead = plan, cost, instead
        self._number = {worker: n for n, worker in enumerate(plan.workers)}
        reduced = [(ActionKind.REDUCE, stage) for stage in reduced_stages(plan)]
        self.together = (*reduced, *((ActionKind.GATHER, stage) for stage in gathered_stages(plan)))
        self._server = {each: len(self._number) + n for n, each in enumerate(self.together)}
        self._count = len(self._number) + len(self._server)
        self._seconds: dict[Compute, float] = dict(instead.seconds)
        self._wires = {route: _wire(cost, route, plan.micro_batch_size, instead.flights) for route in routes}
        self._arrivals = {
            route: _Once([-1.0]) if route.payload is Payload.TIE else [-1.0] * plan.micro_batches for route in routes
        }
        self._begun = {
            (each, worker): _Once([-1.0]) for each in self.together for worker in plan.stages[each[1]].workers
        }
        self._ended = {each: _Once([-1.0]) for each in self.together}

    @cached_property
    def shared(self) -> SharedLinks:
        """The links of the plan that share a wire with another one of its, by number."""
        return {
            self._number[source] * self._count + self._number[target]: wire
            for (source, target), wire in self.wires.items()
        }

    @cached_property
    def wires(self) -> dict[tuple[str, str], tuple[int, float]]:
        """The same by source and target: one that has its wire for itself in this plan waits for no other."""
        if not self._cost.wires:  # search prices many thousands of plans
            return {}
        ways = dict.fromkeys((route.source, route.target) for route in self._wires)
        found = {way: self._cost.wires[way] for way in ways if way in self._cost.wires}
        many = Counter(number for number, _ in found.values())
        return {way: wire for way, wire in found.items() if many[wire[0]] > 1}

    def forget(self) -> None:
        """No message has arrived: before the jobs are timed once more."""
        for arrivals in itertools.chain(self._arrivals.values(), self._begun.values(), self._ended.values()):
            for m in range(len(arrivals)):
                arrivals[m] = -1.0

    def seconds(self, timed: Compute) -> float:
        """How long a compute action takes; what workers do together, from when all have begun it."""
        if timed not in self._seconds:
            self._seconds[timed] = compute_s(self._cost, self._plan, timed)
        return self._seconds[timed]

    def job(self, timed: Compute, receives: Sequence[Route], sends: Sequence[Route]) -> Job:
        """A compute action with its messages; of what workers do together, its beginning on one of them."""
        kind, stage, worker = timed
        seconds, busy = 0.0, 0.0
        for route in receives:
            busy += self._wires[route].receiver_s
        waits, made = [self._arrivals[route] for route in receives], []
        for route in sends:
            wire, source, target = self._wires[route], self._number[route.source], self._number[route.target]
            busy += wire.sender_s
            made.append((self._arrivals[route], source * self._count + target, wire.seconds, target))
        if kind in TOGETHER:
            size = together_bytes(self._cost, self._plan, kind, stage)
            busy += _share(kind) * self._cost.reduce_busy_s(self._plan.stages[stage].workers, size)
            made.append(
                self._tells(self._number[worker], self._server[kind, stage], self._begun[(kind, stage), worker])
            )
        else:
            seconds = self.seconds(timed)
        if kind is ActionKind.UPDATE and self.together:
            waits += [
                self._ended[each] for each in self.together
                if each[0] is ActionKind.REDUCE and worker in self._plan.stages[each[1]].workers
            ]  # fmt: skip
        return Job(seconds, tuple(waits), self._instead.busy.get(timed, busy), tuple(made))

    def collectives(self) -> list[Queue]:
        """What workers do together, as queues behind those of the workers: of each, from when all have begun it."""
        queues: list[Queue] = []
        for n, each in enumerate(self.together):
            kind, stage = each
            members = self._plan.stages[stage].workers
            shared = [not set(members).isdisjoint(self._plan.stages[other].workers) for _, other in self.together]
            waits: list[Arrivals] = [self._begun[each, worker] for worker in members]
            waits += [self._ended[other] for k, other in enumerate(self.together[:n]) if shared[k]]
            to = [self._number[worker] for worker in members]
            to += [self._server[other] for k, other in enumerate(self.together) if k > n and shared[k]]
            tells = tuple(self._tells(self._server[each], target, self._ended[each]) for target in to)
            seconds = min(self.seconds((kind, stage, worker)) for worker in members)
            queues.append([(Job(seconds, tuple(waits), 0.0, tells), -1)])
        return queues

    def _tells(self, source: int, target: int, arrivals: Arrivals) -> tuple[Arrivals, int, float, int]:
        """A message that takes no time."""
        return arrivals, source * self._count + target, 0.0, target


class StepTimer:
    """The jobs of a plan's stages, each made once, to be timed in one order after another, whatever its schedule.

    One job serves all micro-batches of a lane in a stage. FormatError: a link is missing.

    Raises:
        FormatError: a link is missing.
    """

    def __init__(self, plan: Plan, cost: CostModel, *, instead: Instead = AS_PROFILED) -> None:
        self.plan, self._instead = plan, instead
        self.wiring = wire(plan, cost.profile.edges, cost.profile.ties)
        self.prices = prices = Prices(plan, cost, self.wiring.routes, instead=instead)
        self._jobs: dict[tuple[ActionKind, int, int], Job] = {}
        self._together = {
            (kind, stage, worker): prices.job((kind, stage, worker), (), ())
            for kind, stage in prices.together
            for worker in plan.stages[stage].workers
        }

    def job(self, kind: ActionKind, stage: int, lane: int) -> Job:
        """The job of a forward, a backward or a part of one; FormatError: the profile has no price of it."""
        what = kind, stage, lane
        if what not in self._jobs:
            worker = self.wiring.lanes[lane].workers[stage]
            self._jobs[what] = self.prices.job((kind, stage, worker), *self.wiring.around(kind, lane, stage))
        return self._jobs[what]

    def queues(self, orders: Sequence[Sequence[Step]]) -> list[Queue]:
        """The jobs of the plan's program without its actions, and behind them what workers do together.

        `orders` has what each worker computes before its update, in the order of `plan.workers`.
        """
        found = [self._queue(worker, steps) for worker, steps in zip(self.plan.workers, orders, strict=True)]
        return [*found, *self.prices.collectives()]

    def _queue(self, worker: str, steps: Sequence[Step]) -> Queue:
        wiring, prices, lane_of = self.wiring, self.prices, self.wiring.lane_of
        jobs = self._jobs
        queue: Queue = []
        for kind, stage, m in steps:
            what = kind, stage, lane_of[m]
            if kind in TOGETHER:
                queue.append((self._together[kind, stage, worker], m))
                continue
            queue.append((jobs.get(what) or self.job(*what), m))
        ties = [route for route in wiring.ties if route.source == worker]
        if ties:
            kind, last, m = steps[-1]
            before, behind = wiring.around(kind, lane_of[m], last)
            queue[-1] = prices.job((kind, last, worker), before, [*behind, *ties]), m
        ties = [route for route in wiring.ties if route.target == worker]
        queue.append((prices.job((ActionKind.UPDATE, -1, worker), ties, ()), -1))
        queue += [(self._together[ActionKind.GATHER, n, worker], -1) for n in gathered_stages(self.plan, worker)]
        return queue

    def step_s(self, orders: Sequence[Sequence[Step]], log: list[Timed] | None = None) -> float:
        """The step time in seconds, of orders as of `queues`; may be asked again and again. `log` takes what was timed.

        Raises:
            FormatError: the program waits for itself, or the profile cannot price an action.
        """
        self.prices.forget()
        queues = self.queues(orders)
        leads = [self._instead.leads.get(worker, 0.0) for worker in self.plan.workers]
        done, last = run_queues(queues, log, leads=leads + [0.0] * len(self.prices.together), shared=self.prices.shared)
        for worker, steps, count in zip(self.plan.workers, orders, done, strict=False):
            if count <= len(steps):
                kind, stage, _ = [*steps, (ActionKind.UPDATE, -1, -1)][count]
                raise stopped(worker, kind, stage)
        return last


def step_s(plan: Plan, cost: CostModel, *, instead: Instead = AS_PROFILED) -> float:
    """The step time alone, in seconds: `run_program(...).step_s` to the last bit, without building a program.

    Raises:
        FormatError: as `build_program` and `run_program`.
    """
    timer = StepTimer(plan, cost, instead=instead)
    return timer.step_s([order_of(plan, worker) for worker in plan.workers])


def stopped(worker: str, kind: ActionKind, stage: int) -> FormatError:
    """The error of a program that waits for itself."""
    return FormatError(
        f"the program stops: {worker} waits for ever before {kind} of stage {stage}",
        hint="order the stages as the model's forward does",
    )
