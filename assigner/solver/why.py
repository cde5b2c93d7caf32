"""Why nothing fits: the tightest obstacle, and the cheapest way out, found by relaxing and solving again."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import InfeasibleError
from assigner.profile import Link, LinkPoint, Profile
from assigner.solver.options import SolveOptions, divisors
from assigner.solver.instance import Instance
from assigner.solver.segments import SegmentSizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from assigner.profile import Worker
    from assigner.solver.problem import Problem


@dataclass(frozen=True)
class Relaxation:
    """A change to the problem, and the hint to give if a plan exists with it.

    Args:
        hint: What to do; `{count}` is replaced by the plan's number of micro-batches.
        profile: The changed profile.
        options: The changed options.
    """

    hint: str
    profile: Profile
    options: SolveOptions


def explain(problem: Problem, plan_count: Callable[[Profile, SolveOptions], int | None]) -> InfeasibleError:
    """The error to raise for a problem that has no plan.

    Args:
        problem: What has been proven infeasible.
        plan_count: Solves a relaxed problem: the number of micro-batches of a plan; None: it found none.
    """
    message = _alone(problem) or _together(problem)
    for relaxation in relaxations(problem):
        count = plan_count(relaxation.profile, relaxation.options)
        if count is not None:
            return InfeasibleError(message, hint=relaxation.hint.format(count=count))
    return InfeasibleError(message, hint="a smaller model, or other workers: no other way out was found")


def relaxations(problem: Problem) -> Iterator[Relaxation]:
    """Ways out, the cheapest for the user first."""
    profile, options = problem.profile, problem.options
    if options.remat != "auto":
        yield Relaxation("--remat auto fits", profile, replace(options, remat="auto"))
    if options.micro_batches is not None:
        yield Relaxation("--micro-batches {count} fits", profile, replace(options, micro_batches=None))
    open_ = replace(options, remat="auto", micro_batches=None)
    if options.remat != "auto" and options.micro_batches is not None:
        yield Relaxation("--remat auto with --micro-batches {count} fits", profile, open_)
    yield from _without_pins(profile, options)
    if any(worker.reserve_bytes for worker in profile.workers):
        workers = tuple(replace(worker, reserve_bytes=0) for worker in profile.workers)
        yield Relaxation("with no memory held in reserve it fits", replace(profile, workers=workers), options)
    if options.micro_batches is None:
        for batch in reversed(divisors(problem.workload.batch_size)[:-1]):
            yield Relaxation(f"a batch of {batch} fits", profile, replace(options, batch_size=batch))
    yield Relaxation("with links between all workers it fits: profile the missing pairs", _all_linked(profile), options)
    for percent in (110, 125, 150, 200, 300, 500, 1000):
        workers = tuple(
            replace(worker, memory_bytes=worker.reserve_bytes + worker.capacity_bytes * percent / 100)
            for worker in profile.workers
        )
        yield Relaxation(
            f"workers with {percent / 100:g} times the memory fit", replace(profile, workers=workers), options
        )


def _without_pins(profile: Profile, options: SolveOptions) -> Iterator[Relaxation]:
    for name, pin in options.pins.items():
        pins = {other: kept for other, kept in options.pins.items() if other != name}
        yield Relaxation(f"without the pin {name}={pin} it fits", profile, replace(options, pins=pins))
    for partition in profile.partitions:
        if partition.pin is not None:
            freed = tuple(replace(each, pin=None) if each is partition else each for each in profile.partitions)
            yield Relaxation(
                f"without the mark's pin {partition.name}={partition.pin} it fits",
                replace(profile, partitions=freed), options,
            )  # fmt: skip
    for label in dict.fromkeys(each.colocate for each in profile.partitions if each.colocate):
        freed = tuple(replace(each, colocate=None) if each.colocate == label else each for each in profile.partitions)
        yield Relaxation(
            f"without keeping the partitions of {label!r} together it fits", replace(profile, partitions=freed), options
        )
    if len(options.pins) + sum(each.pin is not None for each in profile.partitions) > 1:
        freed = tuple(replace(each, pin=None) for each in profile.partitions)
        yield Relaxation("without the pins it fits", replace(profile, partitions=freed), replace(options, pins={}))


def _all_linked(profile: Profile) -> Profile:
    """The profile with a free link wherever there was none."""
    there = {(link.source, link.target) for link in profile.links}
    names = [worker.name for worker in profile.workers]
    points = (LinkPoint(1, 0.0),)
    missing = [Link(u, v, points) for u in names for v in names if u != v and (u, v) not in there]
    return replace(profile, links=(*profile.links, *missing))


def _atoms(problem: Problem) -> Iterator[tuple[int, int]]:
    """The smallest pieces that can be placed: (first, last) positions between boundaries that may be cut."""
    cuts = [i for i, open_ in enumerate(problem.may_cut) if open_]
    yield from ((first, after - 1) for first, after in itertools.pairwise(cuts))


def _title(problem: Problem, first: int, last: int) -> str:
    names = problem.order
    return names[first] if first == last else f"{names[first]} .. {names[last]} (kept together)"


def _alone(problem: Problem) -> str | None:
    """The piece that fits on no worker even by itself, worst first; None: each of them fits somewhere."""
    worst: tuple[float, str] | None = None
    for first, last in _atoms(problem):
        title, names = _title(problem, first, last), problem.order[first : last + 1]
        allowed = [w for w in problem.profile.workers if all(problem.allowed(name, w) for name in names)]
        if not allowed:
            pins = ", ".join(dict.fromkeys(pin for name in names for pin in problem.pins(name)))
            return f"{title} is pinned to {pins}, and no worker matches that"
        found = [
            (need / worker.capacity_bytes if worker.capacity_bytes else float("inf"), need, count, worker)
            for count in problem.options.counts(problem.cost)
            for worker in allowed
            if (need := _need(problem, count, worker, first, last)) is not None
        ]
        if not found:
            size = problem.workload.batch_size // problem.options.counts(problem.cost)[0]
            obstacles = [problem.cost.obstacle(name, allowed[0].name, size) for name in names]
            return f"{title} cannot be priced: {next(why for why in obstacles if why)}"
        ratio, need, count, worker = min(found, key=lambda each: each[:3])
        if ratio > 1 and (worst is None or ratio > worst[0]):
            which = "the largest worker" if len(allowed) == len(problem.profile.workers) else worker.name
            worst = (
                ratio,
                (
                    f"{title} needs {fmt.byte_unit(need).text(need)} at {count} micro-batch{'es' if count > 1 else ''};"
                    f" {which} has {fmt.byte_unit(worker.capacity_bytes).text(worker.capacity_bytes)}"
                ),
            )
    return None if worst is None else worst[1]


def _need(problem: Problem, count: int, worker: Worker, first: int, last: int) -> float | None:
    """Least bytes that a piece needs on a worker; None: it has no price there."""
    instance = Instance(problem, count)
    names = problem.order[first : last + 1]
    if any(problem.cost.obstacle(name, worker.name, instance.size) is not None for name in names):
        return None
    prices = [problem.cost.partition(name, worker.name, instance.size) for name in names]
    activations = [price.activation_bytes for price in prices]
    stored = max(activations) if problem.options.remat != "never" else count * sum(activations)
    state, read, messages = SegmentSizes(problem, instance.size).grown(first)[last - first]
    return state + count * read + messages + stored + max(price.workspace_bytes for price in prices)


def _together(problem: Problem) -> str:
    """What to say where each piece fits alone and no chain of stages does."""
    total = sum(worker.capacity_bytes for worker in problem.profile.workers)
    state = problem.cost.state(problem.order).total
    counts = problem.options.counts(problem.cost)
    if state > total:
        return (
            f"the model's parameters, gradients and optimizer state need {fmt.byte_unit(state).text(state)};"
            f" the {len(problem.profile.workers)} workers have {fmt.byte_unit(total).text(total)} together"
        )
    return (
        f"no way of cutting the {len(problem.order)} partitions into stages fits the memory, links and pins of the"
        f" {len(problem.profile.workers)} workers at {' or '.join(map(str, counts[-4:]))} micro-batches"
    )
