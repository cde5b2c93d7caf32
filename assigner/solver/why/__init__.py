"""Why nothing fits, and the cheapest ways out: constraints are relaxed, one kind at a time, and the search asked again.

case.py         a problem as the user states it; is there a plan for it?
family.py       a kind of constraints; how little of it has to go; several where one is not enough
choices.py      schedule, micro-batches, remat, step time, batch; hints
fleet.py        reserve and memory; links and one more worker
obstacle.py     the tightest obstacle in one sentence
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from assigner import errors
from assigner import formatting as fmt
from assigner.solver.limits import tuning
from assigner.solver.why.case import Case, Enquiry
from assigner.solver.why.choices import Batch, FewerInFlight, Hints, MostWorkers, Remat, StepLimit
from assigner.solver.why.family import combined
from assigner.solver.why.fleet import MoreLinks, MoreMemory, OneMore, Reserve
from assigner.solver.why.obstacle import obstacle, summed_obstacle, unmeasured_sizes

if TYPE_CHECKING:
    from assigner.formats.profile import Profile
    from assigner.solver.problem.options import SolveOptions
    from assigner.solver.why.case import Remedy
    from assigner.solver.why.family import Family

FLAGS: tuple[Family, ...] = (FewerInFlight(), Remat(), Hints(), MostWorkers(), StepLimit(), Reserve())
"""What only has to be said otherwise, the cheapest first: a flag, a wish given up."""

THINGS: tuple[Family, ...] = (Batch(), MoreLinks(), OneMore(), MoreMemory())
"""What changes the training or the machines, the cheapest first: other results, a measurement, hardware."""


Excluded = Literal["not asked for", "proven", "open"]
"""What is known of plans with several stages a worker, in any order, where one stage a worker has none."""


def explain(
    profile: Profile, options: SolveOptions, *, left_s: float, several: Excluded = "not asked for"
) -> errors.InfeasibleError | errors.LimitError:
    """The error to raise for a problem that was proven to have no plan with one stage a worker.

    `options` are best in the user's own words, for the ways out are told in them; `left_s` seconds may be spent, and a
    few are in any case.
    """
    case, enquiry = Case(profile, options), Enquiry(min(max(left_s, tuning.LEAST_S), tuning.MOST_S))
    enquiry.share(8)
    summed = summed_obstacle(case)  # what adding up proves holds for all plans
    message = summed or obstacle(case, enquiry)
    found, untried = ways_out(case, enquiry)
    told = tuple(_told(way, options) for way in found[: tuning.WAYS_OUT])
    if not told and (sizes := unmeasured_sizes(case)):
        hint = f"assigner profile --micro-batches {','.join(map(str, sizes))} measures that size, too"
    elif not told:
        hint = "a smaller model, or other workers: no other way out was found"
    else:
        hint = f"{told[0].how}: {_then(told[0])} or less"
    if summed is None and several != "not asked for":
        message = f"with one stage a worker, {message}; with several"
        if several == "open":
            return errors.LimitError(
                f"{message} no plan was found, and it is not proven that there is none",
                hint=hint, ways_out=told, untried=tuple(untried),
            )  # fmt: skip
        message += ", in any order, there is no plan either"
    return errors.InfeasibleError(message, hint=hint, ways_out=told, untried=tuple(untried))


def _told(way: Remedy, options: SolveOptions) -> errors.WayOut:
    """A way out in words. The ways out are solved for the step time, so what it takes may be to ask for no more."""
    if way.change.how:
        return errors.WayOut(way.change.what, way.change.how, way.value, options.objective)
    return errors.WayOut(f"objective step instead of {options.objective}", "--objective step", way.step_s)


def _then(way: errors.WayOut) -> str:
    """What a plan with a way out is worth, in the words of the objective."""
    if way.objective == "cost":
        return f"1000 samples then cost {1000 * way.value:.4g}"
    what = {"throughput": "a batch in the steady state", "latency": "one forward"}.get(way.objective, "a step")
    return f"{what} then takes {fmt.seconds(way.value)}"


def ways_out(case: Case, enquiry: Enquiry) -> tuple[list[Remedy], list[str]]:
    """Ways out, cheapest first, and the titles of those that the time was too short for."""
    found: list[Remedy] = []
    untried: list[str] = []
    families = FLAGS + THINGS
    for n, family in enumerate(families):
        if len(found) >= tuning.WAYS_OUT:
            break
        enquiry.share(len(families) - n + 1)
        if family is THINGS[0] and not found:
            found += combined(case, FLAGS, enquiry)
        more = list(family.ways_out(case, enquiry))
        found += more
        if not more and enquiry.undecided:
            untried.append(family.title)
    if not found:
        enquiry.share(1)
        found += combined(case, families, enquiry)
    return found, untried
