"""Where the difference between the predicted and the measured step time comes from.

The simulator is asked again with measured figures in the place of predicted ones, one group after the other:

    predicted ─ compute ─▶ ─ transfers ─▶ ─ overheads ─▶ ─ messages' processor time ─▶ ─ variation ─▶
              ─ not explained ─▶ measured

Each group moves the step time by what the plan makes of it: a slow worker that nobody waits for moves nothing. The
first three are medians. Variation is what means say beyond: where an action now and then takes long, workers that wait
for each other at every stage pay for each such time. (Two ranks on two cores with other work on them, plans of 6 and
14 stages: medians left 19 to 73 ms of 300 to 372 ms unexplained, means -1 to 20 ms.) A part of it may be the processor
time of messages: priced behind an action, and taken by other threads from whichever action runs. So what was priced and
not seen between actions is said by itself, as far as means are beyond medians. What is left over are actions that get
in each other's way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Literal

from assigner.samples import Samples
from assigner.schedule.orders import LETTERS, counted
from assigner.schedule.program import wire
from assigner.schedule.timing import Instead, compute_s, route_bytes, step_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from assigner.formats.plan import Plan
    from assigner.schedule.cost import CostModel
    from assigner.schedule.program import Route
    from assigner.schedule.timing import Compute
    from assigner.validation.observed import Observed

_CANDIDATES = 8
"""Of each group, so many are tried alone: those that differ most, added up over a step."""


@dataclass(frozen=True)
class Deviation:
    """One thing that took another time than predicted, and how far it alone moves the step time.

    Args:
        group: What kind of thing it is.
        what: `forward`, `backward`, `update`, `messages` or `overhead`.
        worker: Whose; of messages their sender.
        stage: Of a forward or a backward.
        target: Of messages, their receiver.
        predicted_s: Seconds of one of them; of overheads, of all in a step.
        measured_s: The same as measured.
        step_s: How much longer the predicted step gets with this figure as it was measured, and no other.
    """

    group: Literal["compute", "transfers", "overheads"]
    what: str
    worker: str
    stage: int | None
    target: str | None
    predicted_s: float
    measured_s: float
    step_s: float = 0.0


@dataclass(frozen=True)
class Explanation:
    """What adds up to the difference between the predicted and the measured step time, in seconds.

    Args:
        compute_s: Forwards, backwards and updates.
        transfers_s: Messages on the wire.
        overheads_s: What workers lose between two actions, and before the first and after the last of a step.
        handling_s: Processor time that messages were predicted to take and did not take between actions: as far as the
            actions' means have it beyond their medians.
        variation_s: Of all these, what their means are beyond their medians, without that.
        unexplained_s: The rest.
        causes: Single ones, that which moves the step time most first.
    """

    compute_s: float
    transfers_s: float
    overheads_s: float
    handling_s: float
    variation_s: float
    unexplained_s: float
    causes: tuple[Deviation, ...]


def explain(plan: Plan, cost: CostModel, predicted: Observed, measured: Observed) -> Explanation:
    """Replace what was predicted by what was measured.

    Args:
        plan: As it was run.
        cost: Prices of the profile.
        predicted: The simulator's own figures, read from its rehearsed trace.
        measured: What the trace says.
    """
    wiring = wire(plan, cost.profile.edges, cost.profile.ties)
    compute = {key: samples.median_s for key, samples in measured.compute.items()}
    flights = _flights(plan, cost, wiring.routes, measured, _MEDIAN)
    with_compute = Instead(seconds=compute)
    with_transfers = replace(with_compute, flights=flights)
    with_overheads = replace(_all(measured, _MEDIAN), flights=flights)
    with_means = replace(_all(measured, _MEAN), flights=_flights(plan, cost, wiring.routes, measured, _MEAN))
    with_handling = replace(with_overheads, busy=_at_least(predicted, with_overheads.busy))
    said = step_s(plan, cost)
    steps = [
        step_s(plan, cost, instead=figures)
        for figures in (with_compute, with_transfers, with_overheads, with_handling, with_means)
    ]
    steps[2] += measured.tail.median_s
    steps[3] += measured.tail.median_s
    steps[4] += measured.tail.mean_s
    steps[3] = max(steps[2], min(steps[3], steps[4]))
    moved = [after - before for before, after in pairwise([said, *steps, measured.step.median_s])]
    tried = [
        *_first(_computes(plan, cost, compute)), *_first(_transfers(plan, cost, flights)),
        *_first(_losses(plan, cost, predicted, measured)),
    ]  # fmt: skip
    alone = [replace(cause, step_s=step_s(plan, cost, instead=figures) - said) for _, cause, figures in tried]
    causes = tuple(sorted(alone, key=lambda cause: -abs(cause.step_s)))
    computing_s, transfers_s, overheads_s, handling_s, variation_s, unexplained_s = moved
    return Explanation(computing_s, transfers_s, overheads_s, handling_s, variation_s, unexplained_s, causes)


def _at_least(predicted: Observed, busy: Mapping[Compute, float]) -> dict[Compute, float]:
    """What workers lose behind their actions, where that is less than was predicted as much as was."""
    said = {key: samples.median_s for key, samples in predicted.behind.items()}
    return {key: max(seconds, said.get(key, 0.0)) for key, seconds in busy.items()}


_Middle = Callable[[Samples], float]
_MEDIAN: _Middle = attrgetter("median_s")
_MEAN: _Middle = attrgetter("mean_s")


def _flights(
    plan: Plan, cost: CostModel, routes: tuple[Route, ...], measured: Observed, middle: _Middle
) -> dict[Route, float]:
    """Seconds of one message of each route: as measured, or as its link's other messages say; else not in it."""
    said = {
        route: cost.transfer_s(route.source, route.target, route_bytes(cost, route, plan.micro_batch_size))
        for route in routes
    }
    factors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for route, samples in measured.flights.items():
        if said.get(route):
            factors[route.source, route.target].append(middle(samples) / said[route])
    found = {}
    for route in routes:
        if route in measured.flights:
            found[route] = middle(measured.flights[route])
        elif factors[route.source, route.target]:
            found[route] = said[route] * median(factors[route.source, route.target])
    return found


def _all(measured: Observed, middle: _Middle) -> Instead:
    """What is measured of compute and of what workers lose between."""
    return Instead(
        seconds={
            key: middle(samples) + (middle(measured.before[key]) if key in measured.before else 0.0)
            for key, samples in measured.compute.items()
        },
        busy={key: middle(samples) for key, samples in measured.behind.items()},
        leads={worker: middle(samples) for worker, samples in measured.lead.items()},
    )


_Tried = tuple[float, Deviation, Instead]  # how large it is over a step, the cause, what is replaced


def _first(found: Iterator[_Tried]) -> list[_Tried]:
    return sorted(found, key=lambda each: -abs(each[0]))[:_CANDIDATES]


def _computes(plan: Plan, cost: CostModel, compute: Mapping[Compute, float]) -> Iterator[_Tried]:
    for key, seconds in compute.items():
        kind, stage, worker = key
        said, count = compute_s(cost, plan, key), actions_of(plan, key)
        cause = Deviation("compute", kind.value, worker, stage if stage >= 0 else None, None, said, seconds)
        yield count * (seconds - said), cause, Instead(seconds={key: seconds})


def actions_of(plan: Plan, compute: Compute) -> int:
    """How many of a step's actions these are."""
    kind, stage, worker = compute
    return counted(plan, stage, worker).get(kind, 0) if kind in LETTERS else 1


def _transfers(plan: Plan, cost: CostModel, flights: Mapping[Route, float]) -> Iterator[_Tried]:
    links: dict[tuple[str, str], dict[Route, float]] = defaultdict(dict)
    for route, seconds in flights.items():
        links[route.source, route.target][route] = seconds
    for (source, target), mine in links.items():
        said = sum(cost.transfer_s(source, target, route_bytes(cost, r, plan.micro_batch_size)) for r in mine)
        took = sum(mine.values())
        cause = Deviation("transfers", "messages", source, None, target, said / len(mine), took / len(mine))
        yield plan.micro_batches * (took - said), cause, Instead(flights=mine)


def _losses(plan: Plan, cost: CostModel, predicted: Observed, measured: Observed) -> Iterator[_Tried]:
    for worker in plan.workers:
        said, took = predicted.overheads[worker].median_s, measured.overheads[worker].median_s
        mine = [key for key in measured.before if key[2] == worker]
        figures = Instead(
            seconds={key: compute_s(cost, plan, key) + measured.before[key].median_s for key in mine},
            busy={key: measured.behind[key].median_s for key in mine if key in measured.behind},
            leads={worker: measured.lead[worker].median_s},
        )
        yield took - said, Deviation("overheads", "overhead", worker, None, None, said, took), figures
