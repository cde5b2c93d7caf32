"""What every worker computes in which order: the rules of the named schedules, and orders that a plan lists.

An order is a row of steps: a forward or a backward of a stage, or a part of one, for a micro-batch. `program.py` adds
messages and the update.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from assigner.formats.orders import STEP_LETTERS, ListedStep, written_order
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
    """Several stages a worker, one forward, one backward in turn; `interleaved_orders` has the rule and its source."""
    found = interleaved_orders(tuple(takers(plan, stage) for stage in range(len(plan.stages))))
    return [*found.get(worker, ())]  # of few micro-batches a replica may have none


def _listed(plan: Plan, worker: str) -> list[Step]:
    """What the plan lists."""
    return [(_KINDS[letter], stage, m) for stage, letter, m in plan.listed[worker]]


@lru_cache(maxsize=64)
def interleaved_orders(takers: tuple[tuple[str, ...], ...]) -> dict[str, tuple[Step, ...]]:
    """Every worker's order, in pipeline order, where it has several stages: forwards and backwards in turn.

    `takers` has by stage the worker of each micro-batch.

    M micro-batches go in rounds of about as many as there are workers: a worker takes a round through its first stage,
    then through its second one, and so on, and backwards from its last stage to its first. It begins with a number of
    forwards, its warm-up, and then goes on with one forward, one backward in turn. Of 2 workers (P = 2) with 2 stages
    each and 4 micro-batches (rounds of 2; stages 0 and 2 are F and f on the first worker):

        worker 0:  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3
        worker 1:     F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    The warm-up of the r-th of P workers with k stages is (k - 1) g + 2 (P - 1 - r) forwards for rounds of g
    micro-batches. Where stages are dealt out to the workers in turn, that is the published schedule. Where they are
    not, some workers could wait for each other: then the one that has the first forward that nobody has run yet, by
    round, stage and micro-batch, runs it ahead of the backward at which it waits. All forwards in that order, and all
    backwards in theirs (by round, last stage first), wait for earlier ones only; so with forwards left there is always
    one to run, and no program stops.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021,
    section 2.2; depths as in Megatron-LM and torch.distributed.pipelining's ScheduleInterleaved1F1B.
    """
    held: dict[str, tuple[int, ...]] = {}
    for stage, workers in enumerate(takers):
        for worker in dict.fromkeys(workers):
            held[worker] = (*held.get(worker, ()), stage)
    places = list(dict.fromkeys(held.values()))  # replicas of the same stages have one place
    stages, rounds = range(len(takers)), _rounds(len(takers[0]), len(places))
    forwards = [(ActionKind.FORWARD, s, m) for each in rounds for s in stages for m in each]
    left = {worker: (deque[Step](), deque[Step]()) for worker in held}
    for step in forwards:
        left[takers[step[1]][step[2]]][0].append(step)
    for s, m in ((s, m) for each in rounds for s in reversed(stages) for m in each):
        left[takers[s][m]][1].append((ActionKind.BACKWARD, s, m))
    ahead = {}
    for worker, mine in held.items():
        whole = (len(mine) - 1) * len(rounds[0]) + 2 * (len(places) - 1 - places.index(mine))
        ahead[worker] = -(-whole * len(left[worker][0]) // (len(mine) * len(takers[0])))
    return {worker: tuple(steps) for worker, steps in _played(takers, forwards, left, ahead).items()}


def _rounds(micro_batches: int, workers: int) -> list[range]:
    """The micro-batches of each round: as many rounds as whole ones fit, none longer than another by more than one."""
    count = max(1, micro_batches // workers)
    least, more = divmod(micro_batches, count)
    found, first = [], 0
    for n in range(count):
        found.append(range(first, first + least + (n < more)))
        first = found[-1].stop
    return found


def _played(
    takers: Sequence[Sequence[str]], forwards: Sequence[Step], left: Mapping[str, tuple[deque[Step], deque[Step]]],
    ahead: dict[str, int],
) -> dict[str, list[Step]]:  # fmt: skip
    """Let everybody go on as far as it can; where all wait, the first forward that is left goes ahead.

    `left` has each worker's forwards and backwards, `ahead` how many forwards it may run ahead of its backwards.
    """
    orders: dict[str, list[Step]] = {worker: [] for worker in left}
    done: set[Step] = set()

    def due(worker: str) -> Step | None:
        mine, back = left[worker]
        return mine[0] if mine and ahead[worker] >= 0 else back[0] if back else None

    def run(worker: str, step: Step) -> None:
        is_forward = step[0] is ActionKind.FORWARD
        left[worker][not is_forward].popleft()
        ahead[worker] -= 1 if is_forward else -1
        orders[worker].append(step)
        done.add(step)

    waiting, moved = iter(forwards), True
    while moved:
        moved = False
        for worker in orders:
            while (step := due(worker)) is not None and _needs(step, len(takers)) <= done:
                run(worker, step)
                moved = True
        first = None if moved else next((step for step in waiting if step not in done), None)
        if first is not None:
            run(takers[first[1]][first[2]], first)
            moved = True
    return orders


def _needs(step: Step, stages: int) -> set[Step]:
    """What comes before a step: each stage is taken to need the one before it."""
    kind, stage, m = step
    if kind is ActionKind.FORWARD:
        return {(kind, stage - 1, m)} if stage else set()
    forward = (ActionKind.FORWARD, stage, m)
    return {forward, (kind, stage + 1, m)} if stage + 1 < stages else {forward}


SCHEDULES: Mapping[str, Callable[[Plan, str], list[Step]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _gpipe,
    "interleaved-1f1b": _interleaved_one_f_one_b,
    "listed": _listed,
}
