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

Where the workers of a stage divide its optimizer state, each behind its update gets what the others have updated.

A route carries one value from the partition that makes it to one other worker, whoever reads it there, and its
gradient back. Receives stand right before the action that needs them, sends right behind the one that makes them.
Where a stage has several workers, a route has messages for those micro-batches that its source makes and its target
reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from assigner.errors import FormatError
from assigner.formats.plan import Plan
from assigner.schedule.deadlock import check_orders_run, orders_run
from assigner.schedule.orders import ActionKind, Step, listed, order_of, warm_up
from assigner.schedule.replication import MicroBatchLane, gathered_stages, is_exchanged, lanes, taken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assigner.formats.profile import Edge, Tie

__all__ = [
    "Action", "ActionGroup", "ActionKind", "Payload", "Program", "Route", "Wiring", "build_forward_program",
    "build_program", "grouped", "wire",
]  # fmt: skip


class Payload(StrEnum):
    """What a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TIE = "tie"
    SHAPE = "shape"


class Route(NamedTuple):
    """The way of one value between two workers; messages of one route differ in the micro-batch.

    Args:
        payload: An activation goes from its maker to its readers, a gradient the way back, a tie is the summed
            gradient of a shared parameter. Outside of programs a shape goes ahead of a value whose shape depends on
            data.
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


class Action(NamedTuple):
    """One thing that a worker does.

    A reduction is begun, and goes on beside what the worker does next; its update waits for it. A gathering, of the
    parameters that the workers of a stage have updated for each other, comes behind the update.

    Args:
        kind: What it does.
        stage: The stage's position in the plan; -1 for an update and the messages of ties.
        micro_batch: 0 to M - 1; -1 for an update, a reduction, a gathering and the messages of ties.
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
        routes: All routes, in an order that is the same wherever the program is made.
    """

    plan: Plan
    actions: Mapping[str, tuple[Action, ...]]
    routes: tuple[Route, ...]

    @cached_property
    def sent(self) -> Counter[Route | None]:
        """How many messages of each route a step has."""
        done = (action for mine in self.actions.values() for action in mine)
        return Counter(action.route for action in done if action.kind is ActionKind.SEND)


class ActionGroup(NamedTuple):
    """An action that is no message itself, with the messages that it waits for and those that it makes."""

    action: Action
    receives: list[Route]
    sends: list[Action]


def grouped(actions: Iterable[Action]) -> list[ActionGroup]:
    """A worker's actions in its program's order, each with the receives right before it and the sends right behind."""
    groups: list[ActionGroup] = []
    receives: list[Route] = []
    for action in actions:
        if action.kind is ActionKind.RECEIVE:
            assert action.route is not None
            receives.append(action.route)
        elif action.kind is ActionKind.SEND:
            groups[-1].sends.append(action)
        else:
            groups.append(ActionGroup(action, receives, []))
            receives = []
    return groups


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
        back_out: Gradients that a stage's backward makes, as the last of those that add to them.
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
        """What a forward or a backward waits for and what it makes, of a lane's micro-batches.

        The input part of a backward has the messages of the whole; a weight part and a reduction have none.
        """
        if kind is ActionKind.BACKWARD_WEIGHT:
            return (), ()
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
    stage_of = plan.stage_of
    _check_direction(plan, edges)
    if plan.orders:
        check_orders_run(plan, edges)
    hung: tuple[dict[tuple[int, int], list[Route]], ...] = tuple(defaultdict(list) for _ in range(4))
    incoming, outgoing, back_in, back_out = hung
    routes: dict[Route, None] = {}
    found = lanes(plan)
    for n, lane in enumerate(found):
        placement = {name: lane.workers[stage] for name, stage in stage_of.items()}
        for (partition, output, target), readers in _crossings(edges, placement).items():
            maker, stages = stage_of[partition], [stage_of[edge.target] for edge in readers]
            first = stages[0] if len(stages) == 1 else min(stages, key=lane.forwards.index)
            there = Route(Payload.ACTIVATION, partition, output, placement[partition], target)
            outgoing[n, maker].append(there)
            incoming[n, first].append(there)
            routes[there] = None
            adding = [stage_of[edge.target] for edge in readers if edge.gradient]
            if adding:
                back = Route(Payload.GRADIENT, partition, output, target, placement[partition])
                last = adding[0] if len(adding) == 1 else max(adding, key=lane.backwards.index)
                back_out[n, last].append(back)
                back_in[n, maker].append(back)
                routes[back] = None
    tie_routes = _tie_routes(ties, plan)
    return Wiring(found, incoming, outgoing, back_in, back_out, tie_routes, (*routes, *tie_routes))


def build_program(plan: Plan, edges: Sequence[Edge], ties: Sequence[Tie] = ()) -> Program:
    """The program of a plan over the graph of its partitions.

    Raises:
        FormatError: an edge leads backwards through the stages, or names a partition that the plan does not place; or
            a 1f1b plan would wait for ever.
    """
    wiring = wire(plan, edges, ties)
    if plan.schedule == "1f1b":
        check_depths(plan, edges)
    actions = {}
    for worker in plan.workers:
        mine = _with_messages(order_of(plan, worker), wiring)
        mine += [Action(ActionKind.SEND, -1, -1, route) for route in wiring.ties if route.source == worker]
        mine += [Action(ActionKind.RECEIVE, -1, -1, route) for route in wiring.ties if route.target == worker]
        mine.append(Action(ActionKind.UPDATE, -1, -1))
        mine += [Action(ActionKind.GATHER, stage, -1) for stage in gathered_stages(plan, worker)]
        actions[worker] = tuple(mine)
    return Program(plan, actions, wiring.routes)


def build_forward_program(plan: Plan, edges: Sequence[Edge]) -> Program:
    """The program of a plan that computes the model's output and nothing else.

    Each worker runs all micro-batches through its first stage, then through its next one, whatever the schedule says of
    training; so every worker has the next micro-batch to work on while the one before is on its way:

        2 stages, M = 3      worker 0: F0 F1 F2
                             worker 1:    F0 F1 F2

    Arguments and errors as of `build_program`.
    """
    wiring = wire(plan, edges)
    actions = {}
    for worker in plan.workers:
        steps = ((ActionKind.FORWARD, n, m) for n in plan.held[worker] for m in taken(plan, n, worker))
        actions[worker] = tuple(_with_messages(steps, wiring))
    return Program(plan, actions, tuple(route for route in wiring.routes if route.payload is Payload.ACTIVATION))


def _with_messages(steps: Iterable[Step], wiring: Wiring) -> list[Action]:
    """What a worker computes, each with the receives that it needs before it and the sends of what it makes behind."""
    found: list[Action] = []
    for kind, stage, m in steps:
        before, behind = wiring.around(kind, wiring.lane_of[m], stage)
        found += [Action(ActionKind.RECEIVE, stage, m, route) for route in before]
        found.append(Action(kind, stage, m))
        found += [Action(ActionKind.SEND, stage, m, route) for route in behind]
    return found


def _check_direction(plan: Plan, edges: Sequence[Edge]) -> None:
    position = {name: n for n, name in enumerate(plan.partitions)}
    for edge in edges:
        for name in (edge.source, edge.target):
            if name not in position:
                raise FormatError(
                    f"the plan places no partition {name!r}", hint="solve again from a profile of this model"
                )
        if position[edge.source] > position[edge.target]:
            raise FormatError(
                f"stages[{plan.stage_of[edge.target]}]: {edge.target!r} needs a value of {edge.source!r}, which runs"
                " later",
                hint="order the stages and the partitions in them as the model's forward does",
            )


def check_depths(plan: Plan, edges: Sequence[Edge]) -> None:
    """Raise FormatError where a 1f1b plan would wait for ever.

    Where stages have several workers, each has a part of its stage's order, and waits for less: that is played.
    """
    found = deeper_reader(plan, edges)
    if found is None or (plan.is_replicated and orders_run(listed(plan), edges)):
        return
    source, target = found
    raise FormatError(
        f"stages[{target}].in_flight: the program would wait for ever: {warm_up(plan, target)} micro-batches in flight,"
        f" where stages[{source}], whose output it needs, has {warm_up(plan, source)}",
        hint="give a stage no more micro-batches in flight than the stages before it",
    )


def deeper_reader(plan: Plan, edges: Sequence[Edge]) -> tuple[int, int] | None:
    """A stage and one that reads what it makes and has more micro-batches in flight; None: no plan waits for ever so.

    Under 1f1b a stage's first backward waits for one that comes after as many forwards as its reader's depth.
    """
    for edge in edges:
        source, target = plan.stage_of[edge.source], plan.stage_of[edge.target]
        if edge.gradient and warm_up(plan, source) < warm_up(plan, target):
            return source, target
    return None


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
