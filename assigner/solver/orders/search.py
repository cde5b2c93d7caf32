"""Orders that are solved, for a whole problem: placements with any number of stages a worker, each with its best order.

    plans at hand   the best of every candidate, baselines, loops over all workers ── priced by a quick list schedule
    interleaved     of few partitions, the best plan of that schedule that is near those at hand, or better
    placements      local search from the best of them, with the micro-batch counts that promise most
    orders          of the best placements: the named schedules' own, every rule, exchanges

Of what is found, `bounds.py` says how far it may be from the best.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.orders import INPUT
from assigner.schedule.orders import ActionKind, listed, order_of
from assigner.solver.free.annealing import Annealing
from assigner.solver.free.exhaustive import Exhaustive
from assigner.solver.free.pricing import Arrangement, StepPricing, cheapest_again, held_stages
from assigner.solver.free.starts import loop, of_plan
from assigner.solver.limits import tuning
from assigner.solver.limits.tuning import ROUNDING
from assigner.solver.methods.candidate import BASELINE, PROVEN, Proposal
from assigner.solver.orders.bounds import least_step_s
from assigner.solver.orders.exchanges import EveryOrder, Exchanges
from assigner.solver.orders.listing import QUICK, list_schedule, made_to_fit, rules_for, zero_bubble
from assigner.solver.orders.tasks import Orders, PlacedTasks, may_split
from assigner.solver.problem.prices import bits
from assigner.solver.problem.set_memory import SetMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.terms import Schedule
    from assigner.solver.baselines import FoundBaseline
    from assigner.solver.free.pricing import Stages
    from assigner.solver.problem.set_memory import Masks
    from assigner.solver.search.search import Search

LIST_SCHEDULING = "list scheduling"
"""How listed orders are found."""


def with_orders(
    search: Search, best: Proposal | None, simple: Sequence[FoundBaseline], *, fastest_s: float, effort: float = 1.0
) -> Proposal | None:
    """The plan to answer with, where several stages a worker and any order may be better.

    A named schedule, and one stage a worker above all, is simpler: what gains less than `tuning.LISTED_GAIN` is not
    worth another plan, unless a baseline is faster. `best` is the plan chosen there, or a baseline; it may have been
    preferred to a faster one, of `fastest_s`, inf: there was none.
    """
    allowed = [each for each in simple if each.plan and _may_share(search, each.plan)]
    found = OrderSearch(search, simple, effort=effort).run()
    if search.listed:
        listed_ = [each for each in found if each.plan.schedule == "listed"]
        if listed_:
            return min(listed_, key=lambda each: each.value)
        return best and Proposal(listed(best.plan), best.value, best.found_by)
    found += [Proposal(_named(each.plan), each.step_s, f"{BASELINE}: {each.title}") for each in allowed if each.plan]
    least = min((each.value for each in found), default=math.inf)
    baseline = min((each.step_s for each in allowed), default=math.inf) * (1 + PROVEN)
    chosen = best
    fastest_s = min(fastest_s, math.inf if best is None else best.value)
    if best is None or best.value > baseline or least < fastest_s * (1 - tuning.LISTED_GAIN):
        most = min(least * (1 + tuning.LISTED_GAIN), max(baseline, least))
        good = [each for each in found if each.value <= most]
        chosen = min(good, key=lambda each: (each.plan.schedule == "listed", each.value), default=best)
    if chosen is not None and least < chosen.value * (1 - PROVEN):
        search.any_order_found_s = least
    return chosen


def _may_share(search: Search, plan: Plan) -> bool:
    """Whether no stage of a plan, which keeps the hints else, has more workers than were asked for."""
    return max(len(stage.workers) for stage in plan.stages) <= search.problem.most_replicas


def _named(plan: Plan) -> Plan:
    """A plan with several stages a worker under GPipe has this schedule's other name."""
    return replace(plan, schedule="interleaved") if plan.is_looped else plan


class OrderSearch:
    """One search, after that of the named schedules, with a share of what may be spent."""

    def __init__(self, search: Search, simple: Sequence[FoundBaseline], *, effort: float = 1.0) -> None:
        self._search, self._state, self._problem = search, search.state, search.problem
        self._effort, self._counts = effort, list(dict.fromkeys(each.micro_batches for each in search.candidates))
        self._plans = list(self._at_hand(simple))

    def run(self) -> list[Proposal]:
        """Plans, of each placement under the named schedules and with listed orders; empty where there is no time.

        Ctrl-C ends it with those found so far.
        """
        proposals: list[Proposal] = []
        try:
            self._look(proposals)
        except KeyboardInterrupt:
            self._search.interrupt()
        return proposals

    def _look(self, proposals: list[Proposal]) -> None:
        """Look for plans until there is no time."""
        if self._over():
            return
        found = self._sorted(self._plans)
        found = sorted([*found, *self._sorted(self._looped(found))], key=lambda each: each[0])
        if not found:
            found = self._sorted(self._sparing())
        found = sorted([*found, *self._placements(found)], key=lambda each: each[0])
        for _, plan in found[: tuning.LISTED_POLISHED]:
            if not (self._over() and proposals):
                proposals += self._polished(plan)

    def _over(self) -> bool:
        return self._state.clock.left_s <= 0 or self._state.interrupted

    def _at_hand(self, simple: Sequence[FoundBaseline]) -> Iterator[Plan]:
        """Plans whose placement is worth a look, each once."""
        seen = set[object]()
        plans = [candidate.best.plan for candidate in self._search.candidates if candidate.best]
        plans += [each.plan for each in simple if each.plan is not None]
        if self._state.best is not None:
            plans.insert(0, self._state.best.plan)
        for plan in plans:
            stages = tuple((stage.workers, stage.partitions, stage.rematerialise) for stage in plan.stages)
            count = 2 * len(plan.stages) * plan.micro_batches
            if (plan.micro_batches, stages) not in seen and count <= tuning.MOST_TASKS:
                seen.add((plan.micro_batches, stages))
                if _may_share(self._search, plan):
                    yield plan

    def _sorted(self, plans: Iterable[Plan]) -> list[tuple[float, Plan]]:
        """Those that promise anything, each with what its placement promises, the best first."""
        found = [(self._rough_s(plan), plan) for plan in plans]
        return sorted((each for each in found if math.isfinite(each[0])), key=lambda each: each[0])

    def _looped(self, found: Sequence[tuple[float, Plan]]) -> Iterator[Plan]:
        """Of few partitions what schedule interleaved has, with each micro-batch count, of least bound first.

        Local search over placements goes from one that fits to another: where links are missing, pins scatter the
        partitions or memory is tight, there may be no such way from the plans at hand to the best, or no plan at hand.
        None is looked for where the plans found are better by far.
        """
        problem = self._state.problem
        turns: list[tuple[float, int, StepPricing]] = []
        limit = found[0][0] * (1 + tuning.HOT) if found else math.inf
        nodes = tuning.LOOPED_NODES * (1 if found else tuning.LOOPED_ALONE)
        for count in self._counts if len(problem.workers) ** len(problem.order) <= tuning.SMALL else ():
            pricing = StepPricing(SetMemory(problem, count), one_stage=False)
            bound, _ = pricing.least([-1] * len(problem.order), [0] * len(problem.workers), 0.0)
            if bound < limit:
                turns.append((bound, count, pricing))
        for bound, _, pricing in sorted(turns, key=lambda each: each[:2]):
            if self._over() or bound >= limit:
                return
            best, _ = self._best_loop(pricing, limit, nodes / len(turns))
            if best is not None:
                limit = best.value_s
                yield best.plan("interleaved")

    def _sparing(self) -> Iterator[Plan]:
        """Placements that fit with one micro-batch at a time, which some order has, where there is no other plan.

        No order keeps less: what does not fit so fits under none.
        """
        problem, names = self._problem, len(self._problem.workers)
        if len(problem.order) * names * names > tuning.LISTED_VALUES:
            return
        nodes = tuning.LOOPED_NODES * tuning.LOOPED_ALONE / len(self._counts)
        is_excluded = True
        for count in self._counts:
            pricing = StepPricing(SetMemory(problem, count, in_flight=1), one_stage=False)
            best, finished = self._best_loop(pricing, math.inf, nodes)
            is_excluded = is_excluded and finished and best is None
            if best is not None:
                yield best.plan("interleaved")
        self._search.any_order_excluded = is_excluded

    def _best_loop(self, pricing: StepPricing, limit: float, nodes: float) -> tuple[Arrangement | None, bool]:
        """The best placement below a limit in seconds, as far as counted nodes reach; and whether all was looked at."""
        search = Exhaustive(pricing, limit=limit, nodes=int(self._effort * nodes), stop=self._over)
        finished = search.run()
        return (search.found[-1] if search.found else None), finished

    def _rough_s(self, plan: Plan) -> float:
        """What a plan's placement promises: under its own schedule, or by a quick list schedule."""
        try:
            tasks = PlacedTasks(plan, self._problem.cost, split=_in_parts(plan))
            tried = [
                *(orders for _, orders in itertools.islice(named_orders(plan, tasks), 1)),
                *(list_schedule(tasks, rule) for rule in QUICK),
            ]
            return min((tasks.step_s(each) for each in tried if each and tasks.fits(each)), default=math.inf)
        except FormatError:
            return math.inf

    def _placements(self, found: Sequence[tuple[float, Plan]]) -> list[tuple[float, Plan]]:
        """Local search over placements, from the best ones with one worker a stage."""
        problem = self._problem
        names = len(problem.workers)
        if len(problem.order) * names * names > tuning.LISTED_VALUES or names < 2:
            return []
        alone = [(value, plan) for value, plan in found if not plan.is_replicated]  # what is looked for is such a one
        limit = max(self._state.best_value, min((value for value, _ in alone), default=0.0)) * (1 + tuning.HOT)
        starts: list[tuple[Arrangement, Annealing]] = []
        actions = int(self._effort * tuning.LISTED_TASKS / tuning.LISTED_COUNTS)
        for count in self._counts:
            per_try = 2 * count * 2 * names + 50
            if self._over() or per_try * 20 > actions:
                continue
            memory = SetMemory(problem, count)
            if not all(memory.table.homes):  # at this size, a partition has no worker that it is priced on and fits
                continue
            annealing = Annealing(
                ListedPricing(memory, limit), seed=problem.options.seed, stop=self._over, actions=actions,
                tries=min(tuning.LISTED_TRIES, max(1, actions // per_try)),
            )  # fmt: skip
            stages = [of_plan(problem, plan) for _, plan in alone[:6]]
            stages += [loop(memory.table, times) for times in (1, 2, 3)]
            priced = [each for each in map(annealing.start, dict.fromkeys(stages)) if each]
            if priced:
                starts.append((min(priced, key=lambda each: each.value_s), annealing))
        starts.sort(key=lambda each: (each[0].value_s, each[0].table.micro_batches))
        better = []
        for first, annealing in starts[: tuning.LISTED_COUNTS]:
            if not self._over():
                best = annealing.run(first)
                better.append((best.value_s, best.plan("interleaved")))
        return better

    def _polished(self, plan: Plan) -> Iterator[Proposal]:
        """The placement under the named schedules that fit, and with the best orders found for it."""
        tasks, starts = PlacedTasks(plan, self._problem.cost), []
        for named, orders in named_orders(plan, tasks):
            if tasks.fits(orders):
                starts.append(orders)
                with contextlib.suppress(FormatError):  # its reductions would wait for each other
                    yield Proposal(named, tasks.step_s(orders), LIST_SCHEDULING)
        yield from self._listed(tasks, starts)
        if may_split(plan, self._problem.cost):
            parts = PlacedTasks(plan, self._problem.cost, split=True)
            own = [orders for _, orders in named_orders(plan, parts)] if _in_parts(plan) else []
            yield from self._listed(parts, own)

    def _listed(self, tasks: PlacedTasks, starts: Iterable[Orders]) -> Iterator[Proposal]:
        """The best orders found for a placement, from these on."""
        found = best_orders(tasks, starts, most=int(self._effort * tuning.ORDER_TASKS), stop=self._over)
        if found is not None:
            yield Proposal(tasks.listed(found.orders), found.step_s, LIST_SCHEDULING)


@dataclass(frozen=True)
class FoundOrders:
    """Orders of a placement, their step, and what no order of it takes less than."""

    orders: Orders
    step_s: float
    bound_s: float


def best_orders(
    tasks: PlacedTasks, starts: Iterable[Orders] = (), *, most: int, stop: Callable[[], bool] = lambda: False
) -> FoundOrders | None:
    """The best order that is found for a placement; None: none fits.

    It is never worse than those of `starts` that fit, as a named schedule's; the others are followed as far as there is
    room. Exchanges time `most` tasks at most.
    """
    bound, seen = least_step_s(tasks), set[int]()
    found: list[tuple[float, int, Orders]] = []

    def take(orders: Orders | None) -> bool:
        """Price an order; True: it cannot be better."""
        if orders is not None and not tasks.fits(orders):
            orders = made_to_fit(tasks, orders)
        key = hash(tuple(map(tuple, orders or ())))
        if orders is not None and key not in seen and tasks.fits(orders):
            seen.add(key)
            try:
                found.append((tasks.step_s(orders), len(found), orders))
            except FormatError:  # reductions of several stages would wait for each other
                return False
            return found[-1][0] <= bound * (1 + ROUNDING)
        return False

    if not any(take(orders) for orders in (*starts, zero_bubble(tasks))):
        for rule in rules_for(tasks):
            if take(list_schedule(tasks, rule)) or stop():
                break
    if not found:
        return None
    found.sort()
    step, _, orders = found[0]
    for first, _, start in found[: tuning.ORDER_STARTS]:
        better, value = Exchanges(tasks, most=most // tuning.ORDER_STARTS, stop=stop).run(start, first, enough=bound)
        if value < step:
            step, orders = value, better
        if step <= bound * (1 + ROUNDING) or stop():
            break
    if tasks.count <= tuning.EVERY_TASK and step > bound * (1 + ROUNDING):
        every = EveryOrder(tasks, limit=step * (1 - ROUNDING), nodes=tuning.EVERY_NODES)
        orders = every.run() or orders
        step = min(step, every.value) if every.best else step
        bound = step if every.finished else bound
    return FoundOrders(orders, step, min(bound, step))


STARTING_RULES: tuple[Schedule, ...] = ("interleaved-1f1b", "1f1b")
"""Rules whose orders are starts of every placement that they run, beside GPipe's."""


def named_orders(plan: Plan, tasks: PlacedTasks) -> Iterator[tuple[Plan, Orders]]:
    """What the named schedules make of a plan's stages: its own first, with its warm-up depths.

    Those alone that `tasks` can have: with whole backwards, or with backwards in two parts.
    """
    named_gpipe: Schedule = "interleaved" if plan.is_looped else "gpipe"
    own = named_gpipe if plan.schedule == "gpipe" else plan.schedule
    for schedule in dict.fromkeys((own, named_gpipe, *STARTING_RULES)):
        try:
            named = plan if schedule == plan.schedule else _renamed(plan, schedule)
            steps = [order_of(named, worker) for worker in plan.workers]
        except FormatError:  # it cannot order several stages a worker
            continue
        if all(kind in tasks.kinds or kind is ActionKind.REDUCE for kind, _, _ in itertools.chain(*steps)):
            yield named, tasks.of_steps(steps)


def _in_parts(plan: Plan) -> bool:
    """Whether its own order has backwards in two parts."""
    return any(step.letter == INPUT for steps in plan.listed.values() for step in steps)


def unlisted(plan: Plan) -> Plan:
    """A plan with listed orders under the named schedule that any placement has; another one as it is."""
    return _renamed(plan, "interleaved" if plan.is_looped else "gpipe") if plan.orders else plan


def _renamed(plan: Plan, schedule: Schedule) -> Plan:
    """The plan under a named schedule with its usual depths."""
    stages = tuple(replace(stage, in_flight=None) for stage in plan.stages)
    return replace(plan, schedule=schedule, stages=stages, orders={})


class ListedPricing:
    """The step time with the order that list scheduling gives.

    It keeps what the worker has room for: so the choice of what to rematerialise is between holding few micro-batches
    with little recomputing, and many with more. Placements that cannot take less than about `limit` are not priced.
    """

    one_stage = False

    def __init__(self, memory: SetMemory, limit: float) -> None:
        self.memory, self.limit = memory, limit
        self._least_s = math.inf  # of what was priced
        self._known: dict[Stages, Arrangement | None] = {}

    def _load(self, masks: Sequence[int]) -> float:
        """Seconds of the slowest worker's work."""
        table, longest = self.memory.table, 0.0
        for worker, mask in enumerate(masks):
            forward, backward, update = table.forward_s[worker], table.backward_s[worker], table.update_s[worker]
            seconds = sum([table.micro_batches * (forward[i] + backward[i]) + update[i] for i in bits(mask)])
            longest = max(longest, seconds)
        return longest

    def price(self, stages: Stages) -> Arrangement | None:
        """See `Pricing`; stages of one worker that follow each other are one."""
        merged = _merged(stages)
        if merged not in self._known:
            self._known[merged] = self._priced(merged)
        return self._known[merged]

    def _priced(self, stages: Stages) -> Arrangement | None:
        masks = [0] * len(self.memory.table.names)
        for worker, mask in stages:
            masks[worker] |= mask
        if self._load(masks) >= self.limit:
            return None
        best: Arrangement | None = None
        for again in self._rematerialised(stages):
            found = Arrangement(self.memory.table, stages, again, math.inf)
            value = self._step_s(found)
            if value < (math.inf if best is None else best.value_s):
                best = replace(found, value_s=value)
        return best

    def _rematerialised(self, stages: Stages) -> Iterator[Masks]:
        """Choices of what to rematerialise: for all micro-batches in flight, for one a worker, or for one."""
        seen: set[Masks] = set()
        count = self.memory.table.micro_batches
        for depth in dict.fromkeys((count, min(count, len(held_stages(stages))), 1)):
            found = cheapest_again(self.memory, stages, depth)
            if found is not None and found not in seen:
                seen.add(found)
                yield found
                if not any(found):
                    return

    def _step_s(self, found: Arrangement) -> float:
        try:
            tasks = PlacedTasks(found.plan("interleaved"), self.memory.table.problem.cost)
            best = math.inf
            for rule in QUICK:
                orders = list_schedule(tasks, rule)
                best = min(best, tasks.step_s(orders) if orders else math.inf)
                if best > self._least_s * (1 + 4 * tuning.HOT):  # hardly to be taken, whatever the other rules make
                    break
            self._least_s = min(self._least_s, best)
            return best
        except FormatError:  # a link is missing
            return math.inf

    def actions(self, stages: Stages) -> int:
        """See `Pricing`."""
        merged = _merged(stages)
        return 1 if merged in self._known else 2 * self.memory.table.micro_batches * len(merged) + 100


def _merged(stages: Stages) -> Stages:
    """The stages with those joined that follow each other on one worker."""
    found: list[tuple[int, int]] = []
    for worker, mask in stages:
        if found and found[-1][0] == worker:
            found[-1] = worker, found[-1][1] | mask
        else:
            found.append((worker, mask))
    return tuple(found)
