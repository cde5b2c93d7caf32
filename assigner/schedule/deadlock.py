"""Whether workers that keep to a plan's orders would wait for each other for ever.

A forward waits for the forwards of the stages that its stage reads, a backward for the backwards of those that read
what its stage made, of the same micro-batch: on other workers, and on its own, where they must stand before it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.orders import FORWARD, WEIGHT, ListedStep

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Edge

Need = tuple[int, bool, int]
"""What is waited for: the forward (True) or the gradients of the backward of a stage, for a micro-batch."""


def check_orders_run(plan: Plan, edges: Sequence[Edge]) -> None:
    """Play the listed orders of a plan, sound in themselves, against each other.

    Raises:
        FormatError: some steps cannot run; the message names who waits for whom.
    """
    at, stuck = played(plan.listed, *_dependencies(plan, edges))
    if stuck:
        raise FormatError(
            f"the listed orders would wait for ever: {_circle(plan, at, stuck)}",
            hint="move one of these steps",
        )


def orders_run(plan: Plan, edges: Sequence[Edge]) -> bool:
    """Whether the listed orders of a plan come to an end; arguments as of `check_orders_run`."""
    return not played(plan.listed, *_dependencies(plan, edges))[1]


def played(
    listed: Mapping[str, Sequence[ListedStep]], read: Mapping[int, Iterable[int]], used: Mapping[int, Iterable[int]]
) -> tuple[dict[str, int], dict[str, Need]]:
    """Play the orders of workers against each other, as far as they go.

    `read` has by stage those whose values it reads, `used` those that send a gradient back to it.

    Returns:
        How many steps each worker can make, and what those wait for that cannot make all of them.
    """
    needs = {worker: [_needs(step, read, used) for step in steps] for worker, steps in listed.items()}
    at, done = dict.fromkeys(listed, 0), set[Need]()
    waiting: dict[Need, list[str]] = defaultdict(list)
    ready = list(listed)
    while ready:
        worker = ready.pop()
        steps = listed[worker]
        while at[worker] < len(steps):
            missing = next((need for need in needs[worker][at[worker]] if need not in done), None)
            if missing is not None:
                waiting[missing].append(worker)
                break
            step = steps[at[worker]]
            at[worker] += 1
            if step.letter != WEIGHT:
                made = step.stage, step.letter == FORWARD, step.micro_batch
                done.add(made)
                ready += waiting.pop(made, ())
    return at, {worker: need for need, workers in waiting.items() for worker in workers}


def _dependencies(plan: Plan, edges: Sequence[Edge]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """By stage: those whose values it reads, and those that send a gradient back to it."""
    read: dict[int, set[int]] = defaultdict(set)
    used: dict[int, set[int]] = defaultdict(set)
    for edge in edges:
        source, target = plan.stage_of[edge.source], plan.stage_of[edge.target]
        if source != target:
            read[target].add(source)
            if edge.gradient:
                used[source].add(target)
    return read, used


def _needs(step: ListedStep, read: Mapping[int, Iterable[int]], used: Mapping[int, Iterable[int]]) -> list[Need]:
    if step.letter == WEIGHT:
        return []
    forward = step.letter == FORWARD
    stages = (read if forward else used).get(step.stage, ())
    return [(stage, forward, step.micro_batch) for stage in sorted(stages)]


def _circle(plan: Plan, at: Mapping[str, int], stuck: Mapping[str, Need]) -> str:
    """Who waits for whom, from a worker round to itself, in words."""
    position = {
        (step.stage, step.letter == FORWARD, step.micro_batch): (worker, step)
        for worker, steps in plan.listed.items()
        for step in steps
        if step.letter != WEIGHT
    }
    worker, seen = next(iter(stuck)), list[str]()
    while worker not in seen:
        seen.append(worker)
        worker = position[stuck[worker]][0]
    parts = []
    for each in seen[seen.index(worker) :]:
        holder, step = position[stuck[each]]
        where = "later in its own order" if holder == each else f"of {holder}"
        parts.append(f"{each} waits at {plan.listed[each][at[each]]} for {step} {where}")
    return ", and ".join(parts)
