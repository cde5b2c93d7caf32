"""From a plan to its program: what every worker does, in which order.

The program is what the simulator prices and the runtime executes. An action names a stage and a micro-batch:

    gpipe, 2 stages, M = 3                    1f1b, 2 stages, M = 3
    worker 0: F0 F1 F2          B2 B1 B0 U    worker 0: F0 F1       B0 F2 B1    B2 U
    worker 1:    F0 F1 F2 B2 B1 B0 U          worker 1:    F0 B0 F1 B1    F2 B2 U

    interleaved, 3 stages, the first (F, B) and the last (f, b) on worker 0, M = 2
    worker 0: F0 F1 f0 f1 b1 b0       B1 B0 U
    worker 1:    F0 F1    B1 B0 U

A route carries one value from the partition that makes it to one other worker, whoever reads it there, and its
gradient back. Receives stand right before the action that needs them, sends right behind the one that makes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from assigner.formats.profile import Edge, Tie


class ActionKind(StrEnum):
    """What an action does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECEIVE = "receive"
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

    Args:
        kind: What it does.
        stage: The stage's position in the plan; -1 for an update and the messages of ties.
        micro_batch: 0 to M - 1; -1 for an update and the messages of ties.
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
        routes: All routes, in the order of their values.
    """

    plan: Plan
    actions: Mapping[str, tuple[Action, ...]]
    routes: tuple[Route, ...]


def warm_up(plan: Plan, stage: int) -> int:
    """How many micro-batches stage `stage` takes in before its first backward: what it keeps in flight."""
    if plan.schedule != "1f1b":
        return plan.micro_batches
    depth = plan.stages[stage].in_flight or len(plan.stages) - stage
    return min(plan.micro_batches, depth)


@dataclass(frozen=True)
class Wiring:
    """The routes of a plan, by the stage whose forward or backward they hang on.

    Args:
        incoming: Activations that a stage's forward waits for.
        outgoing: Activations that a stage's forward makes.
        back_in: Gradients that a stage's backward waits for.
        back_out: Gradients that a stage's backward makes.
        ties: Gradients of shared parameters, exchanged before the update.
        routes: All of them, in the order of their values.
    """

    incoming: Mapping[int, Sequence[Route]]
    outgoing: Mapping[int, Sequence[Route]]
    back_in: Mapping[int, Sequence[Route]]
    back_out: Mapping[int, Sequence[Route]]
    ties: Sequence[Route]
    routes: tuple[Route, ...]


def wire(plan: Plan, edges: Sequence[Edge], ties: Sequence[Tie] = ()) -> Wiring:
    """The routes of a plan; arguments and errors as `build_program`."""
    stage_of = {name: n for n, stage in enumerate(plan.stages) for name in stage.partitions}
    _check_direction(plan, edges, stage_of)
    incoming: dict[int, list[Route]] = defaultdict(list)
    outgoing: dict[int, list[Route]] = defaultdict(list)
    back_in: dict[int, list[Route]] = defaultdict(list)
    back_out: dict[int, list[Route]] = defaultdict(list)
    routes = []
    for (partition, output, target), readers in _crossings(edges, plan.placement).items():
        maker, first = stage_of[partition], min(stage_of[edge.target] for edge in readers)
        there = Route(Payload.ACTIVATION, partition, output, plan.placement[partition], target)
        outgoing[maker].append(there)
        incoming[first].append(there)
        routes.append(there)
        if any(edge.gradient for edge in readers):
            back = Route(Payload.GRADIENT, partition, output, target, plan.placement[partition])
            back_out[first].append(back)  # the first reader's backward is the last to add to the gradient
            back_in[maker].append(back)
            routes.append(back)
    tie_routes = _tie_routes(ties, plan.placement)
    return Wiring(incoming, outgoing, back_in, back_out, tie_routes, (*routes, *tie_routes))


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
    order = SCHEDULES[plan.schedule]
    actions = {}
    for worker in plan.workers:
        mine: list[Action] = []
        for kind, stage, micro_batch in order(plan, worker):
            forward = kind is ActionKind.FORWARD
            before, behind = (wiring.incoming, wiring.outgoing) if forward else (wiring.back_in, wiring.back_out)
            mine += [Action(ActionKind.RECEIVE, stage, micro_batch, route) for route in before.get(stage, ())]
            mine.append(Action(kind, stage, micro_batch))
            mine += [Action(ActionKind.SEND, stage, micro_batch, route) for route in behind.get(stage, ())]
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
        for stage in _stages_of(plan, worker):
            for m in range(plan.micro_batches):
                mine += [Action(ActionKind.RECEIVE, stage, m, route) for route in wiring.incoming.get(stage, ())]
                mine.append(Action(ActionKind.FORWARD, stage, m))
                mine += [Action(ActionKind.SEND, stage, m, route) for route in wiring.outgoing.get(stage, ())]
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


def _tie_routes(ties: Sequence[Tie], placement: Mapping[str, str]) -> list[Route]:
    """Each worker that holds a shared parameter sends its gradient to each other one that does."""
    routes = []
    for n, tie in enumerate(ties):
        holders = dict.fromkeys(placement[name] for name in tie.partitions)
        routes += [
            Route(Payload.TIE, tie.partitions[0], n, source, target)
            for source in holders
            for target in holders
            if source != target
        ]
    return routes


_Step = tuple[ActionKind, int, int]


def _stages_of(plan: Plan, worker: str) -> list[int]:
    return [n for n, stage in enumerate(plan.stages) if stage.worker == worker]


def _gpipe(plan: Plan, worker: str) -> list[_Step]:
    """All forwards in micro-batch order, then all backwards in reverse order; stage by stage where there are several.

    Source: Huang et al., GPipe, NeurIPS 2019, section 2; with several stages a worker, Lamy-Poirier, Breadth-First
    Pipeline Parallelism, 2022 (arXiv 2211.05953).
    """
    mine = _stages_of(plan, worker)
    forwards = [(ActionKind.FORWARD, stage, m) for stage in mine for m in range(plan.micro_batches)]
    backwards = [
        (ActionKind.BACKWARD, stage, m) for stage in reversed(mine) for m in reversed(range(plan.micro_batches))
    ]
    return [*forwards, *backwards]


def _one_f_one_b(plan: Plan, worker: str) -> list[_Step]:
    """Warm up with as many forwards as the stage's depth, then one backward, one forward in turn.

    Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2; flushed at the end of a step.
    """
    mine = _stages_of(plan, worker)
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
    return steps


SCHEDULES: Mapping[str, Callable[[Plan, str], list[_Step]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _gpipe,
}
