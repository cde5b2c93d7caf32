"""How a plan's actions are timed: jobs of one worker in a row, messages between them, in one pass.

A job is a compute action with the messages that it waits for and those that it makes. A directed link has one sender,
so the order in which its messages are ready is the order of that worker's jobs: every time follows from earlier ones.
Jobs know no names: search prices many thousands of plans.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from assigner.errors import FormatError
from assigner.schedule.cost import CostModel, PartitionOutput
from assigner.schedule.program import SCHEDULES, ActionKind, Payload, Route, wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan


@dataclass(frozen=True, slots=True)
class _Wire:
    """One message of a route: seconds on the wire, and in which its two ends are busy with it."""

    seconds: float
    sender_s: float
    receiver_s: float


Arrivals = list[float]
"""When each message of one route is there, by micro-batch; below 0: not yet."""


class _Once(list[float]):
    """The arrival of a tie's only message, whatever micro-batch is asked for."""

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(0)

    def __setitem__(self, _: Any, value: Any) -> None:
        super().__setitem__(0, value)


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


Compute = tuple[ActionKind, int, str]
"""A compute action whatever its micro-batch: what it does, its stage (-1: an update), its worker."""


@dataclass(frozen=True)
class Instead:
    """Figures that take the place of the profile's, all in seconds; what is not named stays as the profile says.

    Args:
        seconds: Of compute actions; a backward's recomputing included.
        flights: Of one message of a route; its busy shares follow it.
        busy: How long a worker is kept busy after an action, whatever its messages' shares.
        leads: When a worker's first action can start.
    """

    seconds: Mapping[Compute, float] = field(default_factory=dict)
    flights: Mapping[Route, float] = field(default_factory=dict)
    busy: Mapping[Compute, float] = field(default_factory=dict)
    leads: Mapping[str, float] = field(default_factory=dict)


AS_PROFILED = Instead()

Queue = list[tuple[Job, int]]
"""One worker's jobs in order, each with its micro-batch."""


class Timed(NamedTuple):
    """A job as it was timed: its worker's number, its own among that worker's, and when its messages start."""

    worker: int
    job: int
    start_s: float
    end_s: float
    begins_s: list[float]


def route_bytes(cost: CostModel, route: Route, micro_batch: int) -> float:
    """Bytes of one message of a route."""
    if route.payload is Payload.TIE:
        return cost.profile.ties[route.output].bytes
    return cost.output_bytes(PartitionOutput(route.partition, route.output), micro_batch)


def _wire(cost: CostModel, route: Route, micro_batch: int, flights: Mapping[Route, float]) -> _Wire:
    size = route_bytes(cost, route, micro_batch)
    seconds = cost.transfer_s(route.source, route.target, size)
    if math.isinf(seconds):
        raise FormatError(
            f"the plan needs a link from {route.source} to {route.target}, and the profile has none",
            hint="measure that pair, or place the partitions so that the two need not talk",
        )
    busy = cost.busy_s(route.source, route.target, size)
    if route in flights:
        share = flights[route] / seconds if seconds else 0.0
        return _Wire(flights[route], busy[0] * share, busy[1] * share)
    return _Wire(seconds, *busy)


def stage_s(cost: CostModel, plan: Plan, stage: int, kind: ActionKind) -> float:
    """Seconds of one forward or backward of a stage; a backward includes its recomputing."""
    held = plan.stages[stage]
    prices = {name: cost.partition(name, held.worker, plan.micro_batch_size) for name in held.partitions}
    if kind is ActionKind.FORWARD:
        return sum(price.forward_s for price in prices.values())
    return sum(price.backward_s for price in prices.values()) + sum(
        prices[name].recompute_s for name in held.rematerialise
    )


def update_s(cost: CostModel, plan: Plan, worker: str) -> float:
    """Seconds of one worker's optimizer update."""
    held = [name for stage in plan.stages if stage.worker == worker for name in stage.partitions]
    return sum(cost.partition(name, worker, plan.micro_batch_size).update_s for name in held)


class Prices:
    """What a plan's actions and messages cost.

    Args:
        plan: What is priced.
        cost: The prices.
        routes: All routes of the plan.
        instead: What takes the place of the profile's figures.
    """

    def __init__(self, plan: Plan, cost: CostModel, routes: Sequence[Route], *, instead: Instead = AS_PROFILED) -> None:
        self._plan, self._cost, self._instead = plan, cost, instead
        self._number = {worker: n for n, worker in enumerate(plan.workers)}
        self._seconds: dict[Compute, float] = dict(instead.seconds)
        self._wires = {route: _wire(cost, route, plan.micro_batch_size, instead.flights) for route in routes}
        self._arrivals = {
            route: _Once([-1.0]) if route.payload is Payload.TIE else [-1.0] * plan.micro_batches for route in routes
        }

    def seconds(self, timed: Compute) -> float:
        """How long a compute action takes."""
        if timed not in self._seconds:
            kind, stage, worker = timed
            if kind is ActionKind.UPDATE:
                self._seconds[timed] = update_s(self._cost, self._plan, worker)
            else:
                self._seconds[timed] = stage_s(self._cost, self._plan, stage, kind)
        return self._seconds[timed]

    def job(self, timed: Compute, receives: Sequence[Route], sends: Sequence[Route]) -> Job:
        """A compute action with its messages."""
        busy = 0.0
        for route in receives:
            busy += self._wires[route].receiver_s
        made = []
        for route in sends:
            wire, source, target = self._wires[route], self._number[route.source], self._number[route.target]
            busy += wire.sender_s
            made.append((self._arrivals[route], source * len(self._number) + target, wire.seconds, target))
        busy = self._instead.busy.get(timed, busy)
        return Job(self.seconds(timed), tuple([self._arrivals[route] for route in receives]), busy, tuple(made))


def run_queues(
    queues: Sequence[Queue], log: list[Timed] | None = None, *, leads: Sequence[float] = ()
) -> tuple[list[int], float]:
    """Time all jobs in one pass.

    Args:
        queues: By worker. Their jobs' arrivals are filled in.
        log: Takes each job in the order of timing.
        leads: By worker, when its first job can start; empty: at once.

    Returns:
        How many jobs of each worker were run (all, unless the program waits for itself), and the end of the last.
    """
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


def _plan_queues(plan: Plan, cost: CostModel, instead: Instead) -> list[Queue]:
    """The jobs of a plan's program without its actions: one job for all micro-batches of a stage."""
    wiring = wire(plan, cost.profile.edges, cost.profile.ties)
    prices, order = Prices(plan, cost, wiring.routes, instead=instead), SCHEDULES[plan.schedule]
    jobs: dict[tuple[ActionKind, int], Job] = {}
    for n, stage in enumerate(plan.stages):
        forward, backward = ((kind, n, stage.worker) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
        jobs[ActionKind.FORWARD, n] = prices.job(forward, wiring.incoming.get(n, ()), wiring.outgoing.get(n, ()))
        jobs[ActionKind.BACKWARD, n] = prices.job(backward, wiring.back_in.get(n, ()), wiring.back_out.get(n, ()))
    queues = []
    for worker in plan.workers:
        steps = order(plan, worker)
        queue = [(jobs[kind, stage], m) for kind, stage, m in steps]
        ties = [route for route in wiring.ties if route.source == worker]
        if ties:
            kind, last, m = steps[-1]
            before, behind = wiring.back_in.get(last, ()), wiring.back_out.get(last, ())
            queue[-1] = prices.job((kind, last, worker), before, [*behind, *ties]), m
        ties = [route for route in wiring.ties if route.target == worker]
        queue.append((prices.job((ActionKind.UPDATE, -1, worker), ties, ()), -1))
        queues.append(queue)
    return queues


def step_s(plan: Plan, cost: CostModel, *, instead: Instead = AS_PROFILED) -> float:
    """The step time alone, in seconds: `run_program(...).step_s` to the last bit, without building a program.

    Args:
        plan: What is priced.
        cost: The prices.
        instead: What takes the place of the profile's figures: "what if this worker were as fast as it was measured".

    Raises:
        FormatError: as `build_program` and `run_program`.
    """
    queues = _plan_queues(plan, cost, instead)
    done, last = run_queues(queues, leads=[instead.leads.get(worker, 0.0) for worker in plan.workers])
    for worker, queue, count in zip(plan.workers, queues, done, strict=True):
        if count < len(queue):
            kind, stage, _ = [*SCHEDULES[plan.schedule](plan, worker), (ActionKind.UPDATE, -1, -1)][count]
            raise stopped(worker, kind, stage)
    return last


def stopped(worker: str, kind: ActionKind, stage: int) -> FormatError:
    """The error of a program that waits for itself."""
    return FormatError(
        f"the program stops: {worker} waits for ever before {kind} of stage {stage}",
        hint="order the stages as the model's forward does",
    )
