"""What one change would bring: a larger micro-batch count, one more worker of a kind, twice the thinnest wire.

Each changed problem is searched anew, with the same options and hints: schedule and placement may be others after it,
and so may the micro-batch count, unless that is the change. No answer is worse than the plan at hand with the change
and nothing else, where that fits. With one more worker or a wider wire it always does, and a change that cannot be
used well is no loss; more micro-batches are told as they are, also where they take longer. And a step that is shorter
by less than what the plan's own search left open is no gain: no one knows that it takes the change.

    micro-batches   the next larger count that the batch can be cut into, kept fixed
    one more worker like the one of its kind with the most memory: the same prices, memory and links, on the same host.
                    A worker without links has no such question: no one knows what the links of another would be
    thinnest wire   of those that the plan sends messages over (of all, where it sends none), the two workers with the
                    least bandwidth between them, in the slower direction, at the largest message that was measured;
                    both directions are twice as wide, and the latency stays
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from assigner.formats.fineness import rows_each
from assigner.formats.plan import Plan
from assigner.formats.solverreport import WhatIf
from assigner.location import rank_name
from assigner.schedule.cost import collectives_over
from assigner.solver.baselines import find_baselines
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock
from assigner.solver.methods.candidate import GIVEN, PROVEN, Proposal
from assigner.solver.orders.bounds import least_of_all_s
from assigner.solver.orders.search import unlisted, with_orders
from assigner.solver.problem.options import SolveOptions, samples_in_each
from assigner.solver.problem.problem import Problem
from assigner.solver.search.preference import simpler
from assigner.solver.search.relief import relieved
from assigner.solver.search.search import Search
from assigner.solver.why.case import Case
from assigner.solver.why.fleet import largest_of_kinds, wires, with_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from assigner.formats.profile import Link, Profile
    from assigner.solver.problem.answer import Progress, Solution

WIDER = 2.0
"""How many times the bandwidth the thinnest wire has after the change."""


@dataclass(frozen=True)
class Question:
    """One change.

    Args:
        plan: The plan at hand with the change and nothing else.
        keeps: It is the plan at hand itself, which stays possible: the plan to beat.
    """

    change: Literal["micro_batches", "worker", "link"]
    what: str
    case: Case
    plan: Plan
    keeps: bool


def what_ifs_are_cheap(profile: Profile, options: SolveOptions | None = None) -> bool:
    """Whether `price_what_ifs` takes seconds, judged by the size of the problem alone and not by the clock.

    Graphs with branches, whose searches are long, are left out, and so are other objectives than the step time, which
    is what a what-if tells.
    """
    options = options or SolveOptions()
    if options.objective != "step":
        return False
    case = Case(profile, options)
    searches = len(largest_of_kinds(case.workers)) + 2
    problem = Problem(*case.resolved, case.cost)
    size = len(profile.partitions) * (len(profile.workers) + 1) * searches
    times = 1.0 if problem.exact else tuning.SKIPS * len(problem.ordered)
    return size * times <= tuning.CHEAP and not problem.branched


def price_what_ifs(
    solution: Solution,
    profile: Profile,
    options: SolveOptions | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The solution with its plan's what-ifs, as many as what its search left of the time limit has room for.

    A solution of another objective than "step" comes back as it is, and so does one whose search was interrupted:
    whoever stopped it waits for no more searches. KeyboardInterrupt, raised by `progress`, which is told what is
    priced, or by Ctrl-C, ends the pricing: the what-ifs that are complete are kept.
    """
    options = options or SolveOptions()
    plan = solution.plan
    found: list[WhatIf | None] = []
    if plan.objective != "step" or plan.solver is None or plan.predicted is None or plan.solver.interrupted:
        return solution
    clock = SolveClock(options.time_limit - plan.solver.seconds)
    case = Case(profile, options)
    asked = tuple(questions(plan, case))
    try:
        for n, question in enumerate(asked):
            left_s = clock.left_s / (len(asked) - n)
            if left_s <= 0:
                break
            found.append(answered(question, plan, left_s, _told(progress, n, asked)))
    except KeyboardInterrupt:  # the plan is there, and so are the answers so far
        pass
    answers = tuple(each for each in found if each is not None)
    told = {**plan.solver.options, "what_if": True, "what_if_left_out": len(asked) - len(answers)}
    return replace(solution, plan=replace(plan, solver=replace(plan.solver, options=told), what_if=answers))


def questions(plan: Plan, case: Case) -> Iterator[Question]:
    """The changes to a problem, as far as each can be made: more micro-batches, more workers, a wider wire."""
    free = replace(case.options, micro_batches=None).counts(case.cost)
    count = min((each for each in free if each > plan.micro_batches), default=None)
    if count is not None:
        batch, now = plan.workload.batch_size, plan.micro_batches
        what = f"{count} micro-batches of {rows_each(batch, count)} instead of {now} of {rows_each(batch, now)}"
        cut = unlisted(plan).cut(count, samples_in_each(batch, count), batch_size=batch)
        yield Question("micro_batches", what, case.with_options(micro_batches=count), cut, keeps=False)
    if not case.options.order:  # which a new worker is not in
        usable = [each for each in case.workers if not case.options.only or each.name in case.resolved[1].only]
        kinds = sorted(largest_of_kinds(usable), key=case.workers.index)
        linked = {link.source for link in case.profile.links} & {link.target for link in case.profile.links}
        for worker in (each for each in kinds if each.name in linked):
            twice = sum(each.kind == worker.kind for each in kinds) > 1
            what = f"one more worker: {worker.kind}" + (f", {worker.threads} threads" if twice else "")
            yield Question("worker", what, _hired(case, worker.name), plan, keeps=True)
    wire = _thinnest(plan, case)
    if wire:
        what = f"twice the bandwidth between {' and '.join(sorted(rank_name(link.source) for link in wire))}"
        yield Question("link", what, _widened(case, wire), plan, keeps=True)


def answered(question: Question, plan: Plan, left_s: float, told: Callable[[Progress], None] | None) -> WhatIf | None:
    """The best step after a change, and its bound; None: its time was too short to know of any plan.

    Raises:
        KeyboardInterrupt: Ctrl-C, which the search itself takes for the end of its time.
    """
    assert plan.predicted is not None
    assert plan.solver is not None
    profile, options = question.case.resolved
    gap = min(0.99, tuning.LOOSER * options.stop_gap) if question.change == "worker" else options.stop_gap
    search = Search(profile, replace(options, time_limit=left_s, gap=gap), told)
    step, surely = plan.predicted.step_s, plan.solver.bound_s * (1 - PROVEN)
    changed = search.problem.step_s(question.plan)
    if question.keeps:
        search.state.best = Proposal(plan, min(step, changed), GIVEN)
    search.run(brief=True)
    if search.state.interrupted:
        raise KeyboardInterrupt
    best, bound = min(search.state.best_value, changed), search.bound
    of_all = least_of_all_s(search.problem, {candidate.micro_batches for candidate in search.candidates})
    lighter = relieved(search, search.state.best)
    if lighter is not None and lighter.value < best:
        best, bound = lighter.value, of_all
    if search.any_order and not search.problem.options.searches(plan):  # as the plan at hand was found
        simple = find_baselines(search.problem)
        chosen = with_orders(search, search.state.best, simple, fastest_s=best, effort=tuning.WHAT_IF_EFFORT)
        best, bound = best if chosen is None else min(best, chosen.value), of_all
        surely = step * (1 - tuning.MORE_SEARCH)
    if options.schedule == "interleaved" or not search.decided:
        better = simpler(search, find_baselines(search.problem))
        best = best if better is None else min(best, better.value)
    if surely <= best < step:
        best = step
    if math.isinf(best) and not search.decided:
        return None
    return WhatIf(
        question.change, question.what, best if math.isfinite(best) else None,
        min(bound, best) if math.isfinite(bound) else None,
    )  # fmt: skip


def _told(
    progress: Callable[[Progress], None] | None, done: int, asked: tuple[Question, ...]
) -> Callable[[Progress], None] | None:
    """The progress of one search as that of all."""
    if progress is None:
        return None
    pricing = f"pricing what-ifs, {done + 1} of {len(asked)}: {asked[done].what}"
    return lambda inner: progress(replace(inner, pricing=pricing))


def _hired(case: Case, name: str) -> Case:
    """The case with one more worker like the named one, which may be used where that one may be."""
    hired = with_copy(name, case)
    only = case.options.only
    return hired.with_options(only=(*only, hired.profile.workers[-1].name)) if only else hired


def _thinnest(plan: Plan, case: Case) -> tuple[Link, ...]:
    """Both directions of the wire to be widened; empty: there is none."""
    found: dict[frozenset[str], list[Link]] = {}
    for link in case.profile.links:
        found.setdefault(frozenset((link.source, link.target)), []).append(link)
    used = wires(case.profile, plan)
    pairs = [links for pair, links in found.items() if pair in used] or list(found.values())
    return tuple(min(pairs, key=lambda links: min(map(_bandwidth, links)), default=()))


def _bandwidth(link: Link) -> float:
    """Bytes per second of the largest message that was measured."""
    point = link.points[-1]
    return point.bytes / point.seconds if point.seconds > 0 else math.inf


def _widened(case: Case, wire: tuple[Link, ...]) -> Case:
    """The case with the links of a wire `WIDER` times as wide."""
    links = tuple(_wider(link) if link in wire else link for link in case.profile.links)
    return case.with_profile(links=links, collectives=collectives_over(case.profile, links))


def _wider(link: Link) -> Link:
    """The link with what a message takes beyond the smallest one's time, its latency, divided by `WIDER`."""
    latency_s = link.points[0].seconds
    points = (
        replace(point, seconds=min(point.seconds, latency_s + (point.seconds - latency_s) / WIDER))
        for point in link.points
    )
    return replace(link, points=tuple(points))
