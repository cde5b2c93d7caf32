"""From a plan to its program: what every worker does, in which order.

The program is what the simulator prices and the runtime executes. An action names a stage and a micro-batch:

    gpipe, 2 stages, M = 3                    1f1b, 2 stages, M = 3
    worker 0: F0 F1 F2          B2 B1 B0 U    worker 0: F0 F1       B0 F2 B1    B2 U
    worker 1:    F0 F1 F2 B2 B1 B0 U          worker 1:    F0 B0 F1 B1    F2 B2 U

    interleaved, 3 stages, the first (F, B) and the last (f, b) on worker 0, M = 2
    worker 0: F0 F1 f0 f1 b1 b0       B1 B0 U
    worker 1:    F0 F1    B1 B0 U

    1f1b, 2 stages, the first on workers 0 and 1, M = 4; R: they add up its gradients
    worker 0: F0 F2    B0    B2 R U
    worker 1: F1 F3       B1    B3 R U
    worker 2:    F0 B0 F1 B1 F2 B2 F3 B3 U

A route carries one value from the partition that makes it to one other worker, whoever reads it there, and its
gradient back. Receives stand right before the action that needs them, sends right behind the one that makes them.
Where a stage has several workers, a route has messages for those micro-batches that its source makes and its target
reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.plan import Plan
from assigner.schedule.replication import MicroBatchLane, is_exchanged, lanes, reduced_stages, taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from assigner.formats.profile import Edge, Tie


class ActionKind(StrEnum):
    """What an action does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"
    UPDATE = "update"


class Payload(StrEnum):
    """What a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TIE = "tie"
    SHAPE = "shape"
    OUTPUT = "output"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one value between two workers; messages of one route differ in the micro-batch.

    Args:
        payload: An activation goes from its maker to its readers, a gradient the way back, a tie is the summed
            gradient of a shared parameter. Outside of programs: an output of the model goes to the rank that asks for
            it, a shape goes ahead of a value whose shape depends on data, state that is carried from batch to batch
            goes from where it was made to where it is read.
        partition: The partition that makes the value (of a tie: the first that holds the parameter).
        output: Which of its outputs (of a tie: the number of the tie).
        source: The worker that sends.
        target: The worker that receives.
    """

    payload: Payload
    partition: str
    output: int
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a worker does.

    A reduction is begun, and goes on beside what the worker does next; its update waits for it.

    Args:
        kind: What it does.
        stage: The stage's position in the plan; -1 for an update and the messages of ties.
        micro_batch: 0 to M - 1; -1 for an update, a reduction and the messages of ties.
        route: Of a send or a receive.
    """

    kind: ActionKind
    stage: int
    micro_batch: int
    route: Route | None = None


@dataclass(frozen=True)
class Program:
    """Every worker's actions in order, and the routes between stages.

    Args:
        plan: What was scheduled.
        actions: By worker.
        routes: All routes, in an order that is the same wherever the program is made.
    """

    plan: Plan
    actions: Mapping[str, tuple[Action, ...]]
    routes: tuple[Route, ...]


def warm_up(plan: Plan, stage: int) -> int:
    """How many micro-batches a stage takes in before its first backward: what its workers together keep in flight.

    Under 1f1b as many as there are workers from this stage on, so that each has one, if the plan does not say.
    """
    if plan.schedule != "1f1b":
        return plan.micro_batches
    depth = plan.stages[stage].in_flight
    if depth is None:
        depth = (
            sum(len(each.workers) for each in plan.stages[stage:]) if plan.is_replicated else len(plan.stages) - stage
        )
    return min(plan.micro_batches, depth)


def in_flight(plan: Plan, stage: int, worker: str) -> int:
    """How many micro-batches of a stage one of its workers keeps at once, at most.

    The workers of a stage keep `depth` micro-batches in a row between them (`warm_up`): the most of these that are the
    worker's own.
    """
    depth = warm_up(plan, stage)
    if plan.stages[stage].sole_worker is not None:
        return depth
    own, first, most = taken(plan, stage, worker), 0, 0
    for n, m in enumerate(own):
        while own[first] <= m - depth:
            first += 1
        most = max(most, n - first + 1)
    return most


Hung = Mapping[tuple[int, int], "Sequence[Route]"]
"""Routes by (number of the lane, stage): those of the micro-batches of a lane that hang on a stage's action."""


@dataclass(frozen=True)
class Wiring:
    """The routes of a plan, by the micro-batches and the stage whose forward or backward they hang on.

    Args:
        lanes: The plan's micro-batches by the workers that run them.
        incoming: Activations that a stage's forward waits for.
        outgoing: Activations that a stage's forward makes.
        back_in: Gradients that a stage's backward waits for.
        back_out: Gradients that a stage's backward makes.
        ties: Gradients of shared parameters, exchanged before the update.
        routes: All of them, lane by lane in the order of their values.
    """

    lanes: tuple[MicroBatchLane, ...]
    incoming: Hung
    outgoing: Hung
    back_in: Hung
    back_out: Hung
    ties: Sequence[Route]
    routes: tuple[Route, ...]

    def around(self, kind: ActionKind, lane: int, stage: int) -> tuple[Sequence[Route], Sequence[Route]]:
        """What a forward or a backward waits for and what it makes, of a lane's micro-batches; a reduction, nothing."""
        before, behind = (self.incoming, self.outgoing) if kind is ActionKind.FORWARD else (self.back_in, self.back_out)
        return before.get((lane, stage), ()), behind.get((lane, stage), ())

    @cached_property
    def lane_of(self) -> Sequence[int]:
        """The number of each micro-batch's lane; of -1, where there is no micro-batch, -1."""
        found = [0] * sum(len(lane.micro_batches) for lane in self.lanes) + [-1]
        for n, lane in enumerate(self.lanes[1:], 1):
            for m in lane.micro_batches:
                found[m] = n
        return found


def wire(plan: Plan, edges: Sequence[Edge], ties: Sequence[Tie] = ()) -> Wiring:
    """The routes of a plan; arguments and errors as `build_program`."""
    stage_of = {name: n for n, stage in enumerate(plan.stages) for name in stage.partitions}
    _check_direction(plan, edges, stage_of)
    hung: tuple[dict[tuple[int, int], list[Route]], ...] = tuple(defaultdict(list) for _ in range(4))
    incoming, outgoing, back_in, back_out = hung
    routes: dict[Route, None] = {}
    found = lanes(plan)
    for n, lane in enumerate(found):
        placement = {name: lane.workers[stage] for name, stage in stage_of.items()}
        for (partition, output, target), readers in _crossings(edges, placement).items():
            maker, first = stage_of[partition], min(stage_of[edge.target] for edge in readers)
            there = Route(Payload.ACTIVATION, partition, output, placement[partition], target)
            outgoing[n, maker].append(there)
            incoming[n, first].append(there)
            routes[there] = None
            if any(edge.gradient for edge in readers):
                back = Route(Payload.GRADIENT, partition, output, target, placement[partition])
                back_out[n, first].append(back)  # the first reader's backward is the last to add to the gradient
                back_in[n, maker].append(back)
                routes[back] = None
    tie_routes = _tie_routes(ties, plan)
    return Wiring(found, incoming, outgoing, back_in, back_out, tie_routes, (*routes, *tie_routes))


def build_program(plan: Plan, edges: Sequence[Edge], ties: Sequence[Tie] = ()) -> Program:
    """The program of a plan over the graph of its partitions.

    Args:
        plan: Who holds what, the schedule and the number of micro-batches.
        edges: The values between partitions.
        ties: The parameters that several partitions hold.

    Raises:
        FormatError: an edge leads backwards through the stages, or names a partition that the plan does not place; or
            a 1f1b plan would wait for ever.
    """
    wiring = wire(plan, edges, ties)
    _check_depths(plan, edges)
    actions = {}
    for worker in plan.workers:
        mine: list[Action] = []
        for kind, stage, micro_batch in order_of(plan, worker):
            before, behind = wiring.around(kind, wiring.lane_of[micro_batch], stage)
            mine += [Action(ActionKind.RECEIVE, stage, micro_batch, route) for route in before]
            mine.append(Action(kind, stage, micro_batch))
            mine += [Action(ActionKind.SEND, stage, micro_batch, route) for route in behind]
        mine += [Action(ActionKind.SEND, -1, -1, route) for route in wiring.ties if route.source == worker]
        mine += [Action(ActionKind.RECEIVE, -1, -1, route) for route in wiring.ties if route.target == worker]
        mine.append(Action(ActionKind.UPDATE, -1, -1))
        actions[worker] = tuple(mine)
    return Program(plan, actions, wiring.routes)


def build_forward_program(plan: Plan, edges: Sequence[Edge]) -> Program:
    """The program of a plan that computes the model's output and nothing else.

    Each worker runs all micro-batches through its first stage, then through its next one, whatever the schedule says of
    training; so every worker has the next micro-batch to work on while the one before is on its way:

        2 stages, M = 3      worker 0: F0 F1 F2
                             worker 1:    F0 F1 F2

    Args:
        plan: As in `build_program`.
        edges: As in `build_program`.

    Raises:
        FormatError: as `build_program`.
    """
    wiring = wire(plan, edges)
    actions = {}
    for worker in plan.workers:
        mine: list[Action] = []
        for stage in plan.held[worker]:
            for m in taken(plan, stage, worker):
                before, behind = wiring.around(ActionKind.FORWARD, wiring.lane_of[m], stage)
                mine += [Action(ActionKind.RECEIVE, stage, m, route) for route in before]
                mine.append(Action(ActionKind.FORWARD, stage, m))
                mine += [Action(ActionKind.SEND, stage, m, route) for route in behind]
        actions[worker] = tuple(mine)
    return Program(plan, actions, tuple(route for route in wiring.routes if route.payload is Payload.ACTIVATION))


def _check_direction(plan: Plan, edges: Sequence[Edge], stage_of: Mapping[str, int]) -> None:
    position = {name: n for n, name in enumerate(plan.partitions)}
    for edge in edges:
        for name in (edge.source, edge.target):
            if name not in stage_of:
                raise FormatError(
                    f"the plan places no partition {name!r}", hint="solve again from a profile of this model"
                )
        if position[edge.source] > position[edge.target]:
            raise FormatError(
                f"stages[{stage_of[edge.target]}]: {edge.target!r} needs a value of {edge.source!r}, which runs later",
                hint="order the stages and the partitions in them as the model's forward does",
            )


def _check_depths(plan: Plan, edges: Sequence[Edge]) -> None:
    """Under 1f1b a stage's first backward waits for one that comes after as many forwards as its reader's depth."""
    stage_of = {name: n for n, stage in enumerate(plan.stages) for name in stage.partitions}
    for edge in edges:
        source, target = stage_of[edge.source], stage_of[edge.target]
        first, then = warm_up(plan, source), warm_up(plan, target)
        if edge.gradient and first < then:
            raise FormatError(
                f"stages[{target}].in_flight: the program would wait for ever: {then} micro-batches in flight,"
                f" where stages[{source}], whose output it needs, has {first}",
                hint="give a stage no more micro-batches in flight than the stages before it",
            )


def _crossings(edges: Iterable[Edge], placement: Mapping[str, str]) -> dict[tuple[str, int, str], list[Edge]]:
    """Edges that leave their worker, by (partition, output, worker that reads it): one route each."""
    found: dict[tuple[str, int, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        if placement[edge.source] != placement[edge.target]:
            found[edge.source, edge.output, placement[edge.target]].append(edge)
    return found


def _tie_routes(ties: Sequence[Tie], plan: Plan) -> list[Route]:
    """Each worker that holds a shared parameter sends its gradient to each other one that does."""
    routes = []
    for n, tie in enumerate(ties):
        holders = dict.fromkeys(worker for name in tie.partitions for worker in plan.holders[name])
        routes += [
            Route(Payload.TIE, tie.partitions[0], n, source, target)
            for source in holders
            for target in holders
            if source != target and is_exchanged(plan, tie)
        ]
    return routes


Step = tuple[ActionKind, int, int]
"""A forward, a backward or a reduction of a stage, with its micro-batch."""


def order_of(plan: Plan, worker: str) -> list[Step]:
    """What a worker computes before its update, in order, with the reductions that it begins.

    A reduction stands behind the worker's last backward of its stage, and behind those that come before it on all
    workers (`reduced_stages`).

    Raises:
        FormatError: the schedule cannot order the worker's stages.
    """
    steps = SCHEDULES[plan.schedule](plan, worker)
    if not plan.is_replicated:
        return steps
    waiting = [stage for stage in reduced_stages(plan) if worker in plan.stages[stage].workers]
    left = {stage: len(taken(plan, stage, worker)) for stage in waiting}
    found: list[Step] = []
    for step in steps:
        found.append(step)
        if step[0] is ActionKind.BACKWARD and step[1] in left:
            left[step[1]] -= 1
        while waiting and not left[waiting[0]] and step[0] is ActionKind.BACKWARD:
            found.append((ActionKind.REDUCE, waiting.pop(0), -1))
    return [*found, *((ActionKind.REDUCE, stage, -1) for stage in waiting)]


def _gpipe(plan: Plan, worker: str) -> list[Step]:
    """All forwards in micro-batch order, then all backwards in reverse order; stage by stage where there are several.

    Source: Huang et al., GPipe, NeurIPS 2019, section 2; with several stages a worker, Lamy-Poirier, Breadth-First
    Pipeline Parallelism, 2022 (arXiv 2211.05953).
    """
    mine = plan.held[worker]
    forwards = [(ActionKind.FORWARD, stage, m) for stage in mine for m in taken(plan, stage, worker)]
    backwards = [
        (ActionKind.BACKWARD, stage, m) for stage in reversed(mine) for m in reversed(taken(plan, stage, worker))
    ]
    return [*forwards, *backwards]


def _one_f_one_b(plan: Plan, worker: str) -> list[Step]:
    """Warm up with as many forwards as the stage's depth, then one backward, one forward in turn.

    A replica does its own part of that order: what it warms up with are its own of the first `depth` micro-batches.

    Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2; flushed at the end of a step.
    """
    mine = plan.held[worker]
    if len(mine) > 1:
        raise FormatError(
            f"schedule 1f1b: {worker} holds {len(mine)} stages; this schedule has one a worker",
            hint="merge them, or use the interleaved schedule",
        )
    (stage,), depth = mine, warm_up(plan, mine[0])
    steps = [(ActionKind.FORWARD, stage, m) for m in range(depth)]
    for m in range(plan.micro_batches):
        steps.append((ActionKind.BACKWARD, stage, m))
        if m + depth < plan.micro_batches:
            steps.append((ActionKind.FORWARD, stage, m + depth))
    if plan.stages[stage].sole_worker is None:
        own = set(taken(plan, stage, worker))
        steps = [step for step in steps if step[2] in own]
    return steps


SCHEDULES: Mapping[str, Callable[[Plan, str], list[Step]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _gpipe,
}
