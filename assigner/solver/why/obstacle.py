"""The tightest obstacle in one sentence, each of them proven: by adding up, or by searches without some constraints.

In the order in which they are looked for, the most particular first:

    a piece that may be on no worker, that has no price, or that is larger than any worker
    more to be held than all workers hold
    hints that contradict each other whatever the memory and the links; memory, links, step time likewise
    constraints of which any one would have to go
"""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.location import rank_name
from assigner.solver.problem.options import samples_in_each
from assigner.solver.search.search import Search
from assigner.solver.why.case import together
from assigner.solver.why.choices import Hints, MostWorkers, StepLimit, hints, limits, named, title
from assigner.solver.why.family import Family, least_set, opened
from assigner.solver.why.fleet import MoreLinks, MoreMemory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.profile import Worker
    from assigner.solver.problem.problem import Problem
    from assigner.solver.why.case import Case, Change, Enquiry


def summed_obstacle(case: Case) -> str | None:
    """What is in the way of all plans, in a sentence, where adding up proves it; None: it does not."""
    search = Search(*case.resolved)
    all_in_flight = all(candidate.schedule == "gpipe" for candidate in search.candidates)
    sums = StateSums(search.problem, all_in_flight=all_in_flight)
    return sums.misplaced() or sums.too_large() or sums.too_much()


def unmeasured_sizes(case: Case) -> tuple[int, ...]:
    """Where a piece has no price at any size that is in question: those that were measured, and one that is.

    Empty: it is not that which keeps plans out, or the piece does not run at that size.
    """
    return StateSums(Search(*case.resolved).problem, all_in_flight=False).unmeasured()


class StateSums:
    """Obstacles that adding up proves, by whether each schedule in question keeps all micro-batches or may keep one."""

    def __init__(self, problem: Problem, *, all_in_flight: bool) -> None:
        self._problem, self._all_in_flight = problem, all_in_flight
        self._counts = problem.options.counts(problem.cost)

    def _pieces(self) -> Iterator[tuple[str, ...]]:
        """What is not cut, each as its partitions' names."""
        cuts = [i for i, open_ in enumerate(self._problem.may_cut) if open_]
        yield from (self._problem.order[first:after] for first, after in itertools.pairwise(cuts))

    def _allowed(self, names: Sequence[str]) -> list[Worker]:
        return [w for w in self._problem.workers if self._problem.barred[w.name].isdisjoint(names)]

    def misplaced(self) -> str | None:
        """The first piece that may be on no worker, or has no price on any that it may be on."""
        for names in self._pieces():
            allowed = self._allowed(names)
            if not allowed:
                return self._nowhere(names)
            if not self._has_price(names, allowed):
                size = samples_in_each(self._problem.workload.batch_size, self._counts[0])
                why = (self._problem.cost.obstacle(name, allowed[0].name, size) for name in names)
                return f"{_title(names)} cannot be priced: {next(filter(None, why))}"
        return None

    def unmeasured(self) -> tuple[int, ...]:
        """See `unmeasured_sizes`."""
        cost = self._problem.cost
        for names in self._pieces():
            allowed = self._allowed(names)
            if allowed and not self._has_price(names, allowed):
                points = [point for name in names for point in cost.measurements(name, allowed[0].name)]
                if not points or any(point.infeasible is not None for point in points):
                    return ()
                size = samples_in_each(self._problem.workload.batch_size, self._counts[0])
                return tuple(sorted({size, *(point.micro_batch for point in points)}))
        return ()

    def _has_price(self, names: Sequence[str], allowed: Sequence[Worker]) -> bool:
        return any(self._priced(names, worker, count) for worker in allowed for count in self._counts)

    def _nowhere(self, names: Sequence[str]) -> str:
        problem = self._problem
        pins = ", ".join(dict.fromkeys(pin for name in names for pin in problem.pins(name)))
        forbidden = ", ".join(dict.fromkeys(spec for name in names for spec in problem.forbidden(name)))
        said = ((f"pinned to {pins}", pins), (f"forbidden on {forbidden}", forbidden))
        where = " and ".join(text for text, there in said if there)
        if any(problem.barred[worker.name].isdisjoint(names) for worker in problem.profile.workers):
            return f"{_title(names)} is {where}, which leaves none of the workers that may be used"
        return f"{_title(names)} is {where}, which leaves no worker"

    def _priced(self, names: Sequence[str], worker: Worker, count: int) -> bool:
        size = samples_in_each(self._problem.workload.batch_size, count)
        return all(self._problem.cost.obstacle(name, worker.name, size) is None for name in names)

    def _needs(self, names: Sequence[str], worker: Worker, count: int) -> float:
        """Bytes that a stage with the piece needs at least; messages are left out, for neighbours may take them in."""
        problem = self._problem
        rules = {name: problem.remat_rules[problem.position[name]] for name in names}
        twice = [name for name in names if rules[name] != "never"]
        kept = count if self._all_in_flight else 1
        size = samples_in_each(problem.workload.batch_size, count)
        memory = problem.cost.memory(worker.name, [(names, twice, kept)], size)
        spare = memory.messages
        if problem.most_replicas > 1:  # workers that share the piece may divide its optimizer state by partition
            spare += memory.optimizer - max(problem.cost.state([name]).optimizer for name in names)
        return memory.total - spare * (1 + worker.allocator_share)

    def too_large(self) -> str | None:
        """The piece that is larger than any worker it may be on, worst first."""
        least = []
        for names in self._pieces():
            found = [
                (need / worker.capacity_bytes if worker.capacity_bytes else float("inf"), need, count, worker, names)
                for count in self._counts
                for worker in self._allowed(names)
                if self._priced(names, worker, count)
                for need in [self._needs(names, worker, count)]
            ]
            least.append(min(found, key=lambda each: each[:3]))
        ratio, need, count, worker, names = max(least, key=itemgetter(0))
        if ratio <= 1:
            return None
        largest = max(each.capacity_bytes for each in self._problem.workers)
        which = "the largest worker" if worker.capacity_bytes == largest else rank_name(worker.name)
        return (
            f"{_title(names)} needs {fmt.size(need)} at {fmt.plural(count, 'micro-batch')};"
            f" {which} has {fmt.size(worker.capacity_bytes)}"
        )

    def too_much(self) -> str | None:
        """More to be held by all workers together than they hold."""
        problem, cost = self._problem, self._problem.cost
        sizes = sorted((worker.tensor_bytes for worker in problem.workers), reverse=True)[: problem.most_workers]
        state = cost.state(problem.order).total
        if state > sum(sizes):
            what, need = "the model's parameters, gradients and optimizer state need", state
        else:
            count, kept = min(((count, self._kept(count)) for count in self._counts), key=lambda each: each[1])
            what = f"the model and what its partitions keep at {fmt.plural(count, 'micro-batch')} need at least"
            need = state + kept
        if need <= sum(sizes):
            return None
        most = "" if len(sizes) == len(problem.profile.workers) else "largest that may be used "
        workers = "the worker has" if len(sizes) == 1 else f"the {len(sizes)} workers {most}have"
        return f"{what} {fmt.size(need)}; {workers} {fmt.size(sum(sizes))}" + (" together" if len(sizes) > 1 else "")

    def _kept(self, count: int) -> float:
        """Bytes kept of micro-batches by all stages of any plan: values read, and what must not run twice."""
        problem, cost = self._problem, self._problem.cost
        size = samples_in_each(problem.workload.batch_size, count)
        kept = sum(cost.output_bytes(output, size) for output in cost.outputs)
        for name, rule in zip(problem.order, problem.remat_rules, strict=True):
            prices = [
                cost.partition(name, worker.name, size).activation_bytes
                for worker in self._allowed([name]) if self._priced([name], worker, count)
            ]  # fmt: skip
            kept += min(prices, default=float("inf")) if rule == "never" else 0.0
        return kept * (count if self._all_in_flight else 1)


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} (kept together)"


def obstacle(case: Case, enquiry: Enquiry) -> str:
    """Which kinds of constraints leave no plan with one stage a worker, by searches without the others."""
    families: dict[str, list[Family]] = {
        "the hints": [Hints(), MostWorkers()], "the memory": [MoreMemory()], "the links": [MoreLinks()],
        "the step time asked for": [StepLimit()],
    }  # fmt: skip
    there = {name: some for name, some in families.items() if opened(case, some) is not case}
    for name in there:
        enquiry.undecided = False
        others = opened(case, [family for other, some in there.items() if other != name for family in some])
        if enquiry.plan(others) is None and not enquiry.undecided:
            return _contradiction(case, enquiry) if name == "the hints" else _alone(case, name, [*there])
    single = [name for name, some in there.items() if enquiry.plan(opened(case, some)) is not None]
    if len(single) > 1:
        return f"{_no_cut(case)} keeps to {fmt.series(single)} at once; giving up one of them is enough"
    if single:
        more = [name for name in there if name != single[0]]
        rest = f"; {fmt.series(more)} need not give way" if more else ""
        return f"{_no_cut(case)} keeps to {single[0]}{rest}"
    if len(there) > 1:
        return f"{_no_cut(case)} keeps to {fmt.series([*there])} at once; more than one of them must give way"
    return f"{_no_cut(case)} fits"


def _contradiction(case: Case, enquiry: Enquiry) -> str:
    """The least set of hints that leave no plan, whatever the memory and the links."""
    free = opened(case, [MoreMemory(), MoreLinks(), StepLimit()])
    held = hints(case) + limits(case)

    def contradict(some: Sequence[Change]) -> bool:
        enquiry.undecided = False
        dropped = together([hint for hint in held if hint not in some])
        return enquiry.plan(dropped.apply(free)) is None and not enquiry.undecided

    names = [title(hint) for hint in least_set(held, contradict)]
    chosen = "" if case.options.remat == "auto" else f" under --remat {case.options.remat}"
    free_of = "the links" if any(name.startswith("--memory") for name in names) else "the memory and the links"
    steady = f" {_counts(case)}" if _steady(case) else ","
    return f"{named(names)} leave{'s' if len(names) == 1 else ''} no plan{chosen}{steady} whatever {free_of}"


def _alone(case: Case, name: str, there: Sequence[str]) -> str:
    """The sentence on constraints that leave no plan even without all others that there are."""
    if name == "the step time asked for":
        return f"no plan has a step of {fmt.seconds(case.options.max_step_s)} or less"
    without = {"the hints": "without hints", "the memory": "with any memory", "the links": "with links between all"}
    others = [words for other, words in without.items() if other in there and other != name]
    even = f", even {fmt.series(others)}" if others else ""
    if name == "the memory":
        total = fmt.size(sum(worker.capacity_bytes for worker in case.workers))
        workers = "the worker's" if len(case.workers) == 1 else f"the {len(case.workers)} workers'"
        return f"{_no_cut(case)} fits {workers} memory, {total} in all{even}"
    return f"{_no_cut(case)} keeps to the links that were measured{even}"


def _no_cut(case: Case) -> str:
    return f"{_counts(case)} no cut of the {fmt.plural(len(case.profile.partitions), 'partition')} into stages"


def _counts(case: Case) -> str:
    counts = case.resolved[1].counts(case.cost)[-4:]
    words = fmt.plural(counts[0], "micro-batch") if len(counts) == 1 else f"{fmt.series(counts, 'or')} micro-batches"
    return f"at {words}{_steady(case)}"


def _steady(case: Case) -> str:
    """How many workers the micro-batches keep at work in a steady state, where that may be in the way."""
    most = case.resolved[1].counts(case.cost)[-1]
    if case.options.objective != "throughput" or most >= min(len(case.workers), len(case.profile.partitions)):
        return ""
    return (
        f", which keep{'s' * (most == 1)} no more than {fmt.plural(most, 'worker')} at work (--objective throughput),"
    )
