"""What every worker computes in which order: the rules of the named schedules, and orders that a plan lists.

An order is a row of steps: a forward or a backward of a stage, or a part of one, for a micro-batch. `program.py` adds
messages and the update.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from assigner.formats.orders import STEP_LETTERS, ListedStep, written_order
from assigner.schedule.interleaving import interleaved_orders
from assigner.schedule.replication import reduced_stages, taken, takers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from assigner.formats.plan import Plan


class ActionKind(StrEnum):
    """What an action does.

    A backward is one action, or two: its input part makes the gradients of what the stage read, and its weight part,
    later on the same worker, those of the weights.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"
    UPDATE = "update"
    GATHER = "gather"


TOGETHER = (ActionKind.REDUCE, ActionKind.GATHER)
"""What the workers of a stage do together: it goes on, from when all have begun it, beside what each does next."""

CALLED = {ActionKind.REDUCE: "reduction", ActionKind.GATHER: "gathering"}
"""As nouns."""

LETTERS = {ActionKind(kind): letter for kind, letter in STEP_LETTERS.items()}
"""The letter of each compute action in a listed order."""
ENDS_BACKWARD = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
"""The weights' gradients of a micro-batch are complete behind these."""
_COUNTED = ("interleaved-1f1b", "listed")  # schedules whose micro-batches in flight are counted from the order
_KINDS = {letter: kind for kind, letter in LETTERS.items()}

Step = tuple[ActionKind, int, int]
"""A forward, a backward, a part of one or a reduction of a stage, with its micro-batch."""


def warm_up(plan: Plan, stage: int) -> int:
    """How many micro-batches a stage takes in before its first backward: what its workers together keep in flight.

    Under 1f1b as many as there are workers from this stage on, so that each has one, if the plan does not say. Under
    interleaved-1f1b and of listed orders: those before each worker's own first backward of the stage, added up.
    """
    if plan.schedule in _COUNTED:
        return sum(_before_backward(order_of(plan, worker), stage) for worker in plan.stages[stage].workers)
    if plan.schedule != "1f1b":
        return plan.micro_batches
    depth = plan.stages[stage].in_flight
    if depth is None:
        depth = (
            sum(len(each.workers) for each in plan.stages[stage:]) if plan.is_replicated else len(plan.stages) - stage
        )
    return min(plan.micro_batches, depth)


def _before_backward(steps: Sequence[Step], stage: int) -> int:
    """How many forwards of a stage stand before its first backward."""
    mine = [kind for kind, of, _ in steps if of == stage]
    return next((n for n, kind in enumerate(mine) if kind is not ActionKind.FORWARD), 0)


def in_flight(plan: Plan, stage: int, worker: str) -> int:
    """How many micro-batches of a stage one of its workers keeps at once, at most.

    The workers of a stage keep `depth` micro-batches in a row between them (`warm_up`): the most of these that are the
    worker's own. Under interleaved-1f1b and of listed orders they are counted, from a forward to its backward's end.
    """
    if plan.schedule in _COUNTED:
        return most_in_flight(order_of(plan, worker), stage)
    depth = warm_up(plan, stage)
    if plan.stages[stage].sole_worker is not None:
        return depth
    own, first, most = taken(plan, stage, worker), 0, 0
    for n, m in enumerate(own):
        while own[first] <= m - depth:
            first += 1
        most = max(most, n - first + 1)
    return most


def most_in_flight(steps: Sequence[Step], stage: int) -> int:
    """The most micro-batches of a stage between their forward and the end of their backward, in an order."""
    now = most = 0
    for kind, of, _ in steps:
        if of == stage:
            now += (kind is ActionKind.FORWARD) - (kind in ENDS_BACKWARD)
            most = max(most, now)
    return most


def counted(plan: Plan, stage: int, worker: str) -> dict[ActionKind, int]:
    """How often a worker computes what of a stage in a step: whole backwards or parts of them, as its order has it."""
    if not plan.orders:
        return dict.fromkeys((ActionKind.FORWARD, ActionKind.BACKWARD), len(taken(plan, stage, worker)))
    found = Counter(kind for kind, of, _ in order_of(plan, worker) if of == stage)
    return {kind: found[kind] for kind in LETTERS if found[kind]}


def computes_of(plan: Plan) -> list[tuple[ActionKind, int, str]]:
    """Each action of a step but its messages once, whatever its micro-batch: what it does, its stage, its worker.

    Stage by stage and worker by worker, with the reduction and the gathering of a stage behind its computing; last the
    updates, of stage -1.
    """
    found = []
    for n, stage in enumerate(plan.stages):
        together = [ActionKind.REDUCE] * bool(stage.replicas) + [ActionKind.GATHER] * stage.is_divided
        found += [(kind, n, worker) for worker in stage.workers for kind in (*counted(plan, n, worker), *together)]
    return [*found, *((ActionKind.UPDATE, -1, worker) for worker in plan.workers)]


class Halves(NamedTuple):
    """What a worker holds of a stage whose backwards run in two parts.

    Args:
        graphs: Micro-batches that have their graph.
        waiting: Those that wait for their weight part.
    """

    graphs: int
    waiting: int


def halves(steps: Sequence[Step], stage: int) -> frozenset[Halves]:
    """What an order holds of a stage at each moment; empty: no backward of it runs in two parts.

    While an input part runs, the micro-batch has its graph still, and what will wait as well.
    """
    found, graphs, waiting = set(), 0, 0
    for kind, of, _ in steps:
        if of != stage:
            continue
        graphs += kind is ActionKind.FORWARD
        waiting += kind is ActionKind.BACKWARD_INPUT
        found.add(Halves(graphs, waiting))
        graphs -= kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        waiting -= kind is ActionKind.BACKWARD_WEIGHT
    return frozenset(found) if any(each.waiting for each in found) else frozenset()


def order_of(plan: Plan, worker: str) -> list[Step]:
    """What a worker computes before its update, in order, with the reductions that it begins.

    A reduction stands behind the worker's last backward of its stage, and behind those that come before it on all
    workers (`reduced_stages`).
    """
    return with_reductions(plan, worker, SCHEDULES[plan.schedule](plan, worker))


def with_reductions(plan: Plan, worker: str, steps: list[Step]) -> list[Step]:
    """A worker's forwards and backwards with the reductions that it begins, as `order_of` says."""
    if not plan.is_replicated:
        return steps
    waiting = [stage for stage in reduced_stages(plan) if worker in plan.stages[stage].workers]
    left = {stage: len(taken(plan, stage, worker)) for stage in waiting}
    found: list[Step] = []
    for step in steps:
        found.append(step)
        if step[0] in ENDS_BACKWARD and step[1] in left:
            left[step[1]] -= 1
        while waiting and not left[waiting[0]] and step[0] in ENDS_BACKWARD:
            found.append((ActionKind.REDUCE, waiting.pop(0), -1))
    return [*found, *((ActionKind.REDUCE, stage, -1) for stage in waiting)]


def reduced_within(steps: Iterable[Step]) -> frozenset[Step]:
    """The last backwards of shared stages within which their reductions begin, of a worker's steps with reductions.

    They do partition by partition, where the reduction is due right behind: no other stage's stands in front of it.
    """
    return frozenset(
        last for last, step in pairwise(steps) if step[0] is ActionKind.REDUCE and last[0] in ENDS_BACKWARD
        and last[1] == step[1]
    )  # fmt: skip


def listed(plan: Plan, steps: Mapping[str, Iterable[Step]] | None = None) -> Plan:
    """The plan with the orders of its workers written out; None: those of its schedule, with errors as `order_of`."""
    orders = {
        worker: written_order(ListedStep(stage, LETTERS[kind], m) for kind, stage, m in mine if kind in LETTERS)
        for worker, mine in (steps or {worker: order_of(plan, worker) for worker in plan.workers}).items()
    }
    stages = tuple(replace(stage, in_flight=None) for stage in plan.stages)
    return replace(plan, schedule="listed", orders=orders, stages=stages)


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
    (stage,) = plan.held[worker]
    depth = warm_up(plan, stage)
    steps = [(ActionKind.FORWARD, stage, m) for m in range(depth)]
    for m in range(plan.micro_batches):
        steps.append((ActionKind.BACKWARD, stage, m))
        if m + depth < plan.micro_batches:
            steps.append((ActionKind.FORWARD, stage, m + depth))
    if plan.stages[stage].sole_worker is None:
        own = set(taken(plan, stage, worker))
        steps = [step for step in steps if step[2] in own]
    return steps


def _interleaved_one_f_one_b(plan: Plan, worker: str) -> list[Step]:
    """Several stages a worker, one forward, one backward in turn; interleaving.py has the rule and its source."""
    found = interleaved_orders(tuple(takers(plan, stage) for stage in range(len(plan.stages))))
    mine = found.get(worker, ())  # of few micro-batches a replica may have none
    return [(ActionKind.FORWARD if forward else ActionKind.BACKWARD, stage, m) for stage, forward, m in mine]


def _listed(plan: Plan, worker: str) -> list[Step]:
    """What the plan lists."""
    return [(_KINDS[letter], stage, m) for stage, letter, m in plan.listed[worker]]


SCHEDULES: Mapping[str, Callable[[Plan, str], list[Step]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _gpipe,
    "interleaved-1f1b": _interleaved_one_f_one_b,
    "listed": _listed,
}
