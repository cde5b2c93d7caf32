"""Ways out by what is there: a smaller reserve, more memory, links between workers, one more worker."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.formats.profile import Link, LinkPoint
from assigner.location import MOST_RANKS, rank_name
from assigner.schedule.cost import message_s
from assigner.schedule.program import wire
from assigner.schedule.simulate import worker_memory
from assigner.solver.limits import tuning
from assigner.solver.why.case import Case, Change, together
from assigner.solver.why.choices import chosen
from assigner.solver.why.family import Family, ceiled, figure, floored, least_change, least_figure, least_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile, Worker
    from assigner.solver.why.case import Enquiry, Remedy


Pair = tuple[str, str]


class MoreLinks(Family):
    """Links that were not measured."""

    title = "links between more workers"

    def opened(self, case: Case) -> Case | None:
        """Links between all."""
        missing = _missing(case.profile)
        return _linked(case, missing) if missing else None

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """The missing links between two workers; a least set of pairs where that is not enough."""
        missing = _missing(case.profile)
        plan = enquiry.plan(_linked(case, missing)) if missing else None
        if plan is None:
            return
        if len(missing) <= tuning.LINKS_TRIED:
            singles = [way for pair in missing for way in enquiry.way_out(case, _change(case, [pair]))]
            if singles:
                yield min(singles, key=lambda way: way.value)
                return
        used = wires(case.profile, plan)
        needed = least_set(
            [pair for pair in missing if frozenset(pair) in used],
            lambda pairs: enquiry.plan(_linked(case, pairs)) is not None,
        )
        yield from enquiry.way_out(case, _change(case, needed))


class OneMore(Family):
    """One more worker of a kind that is there."""

    title = "one more worker"

    def opened(self, case: Case) -> Case | None:
        """One more of each kind."""
        return together(self._copies(case)).apply(case) if not case.options.order else None

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """Of one kind; of a least set of kinds where that is not enough."""
        if case.options.order:  # a worker that it does not name would not be used
            return
        copies = self._copies(case)
        singles = [way for copy in copies for way in enquiry.way_out(case, copy)]
        if singles:
            yield min(singles, key=lambda way: way.value)
        elif len(copies) > 1 and enquiry.plan(together(copies).apply(case)) is not None:
            needed = least_set(copies, lambda few: enquiry.plan(together(few).apply(case)) is not None)
            yield from enquiry.way_out(case, together(needed))

    @staticmethod
    def _copies(case: Case) -> list[Change]:
        """One for each kind of worker."""
        return [
            Change(
                f"one more worker of kind {worker.kind}", f"add a worker like {rank_name(worker.name)}",
                partial(with_copy, worker.name),
            )
            for worker in largest_of_kinds(case.workers)
        ]  # fmt: skip


def largest_of_kinds(workers: Iterable[Worker]) -> list[Worker]:
    """Of each kind of worker with its thread count the one with the most memory for plans, that one first."""
    largest: dict[tuple[str, int], Worker] = {}
    for worker in sorted(workers, key=lambda each: -each.capacity_bytes):
        largest.setdefault(worker.alike, worker)
    return list(largest.values())


def _missing(profile: Profile) -> list[Pair]:
    """Pairs of workers that cannot talk both ways."""
    pairs = itertools.combinations((worker.name for worker in profile.workers), 2)
    return [(u, v) for u, v in pairs if not {(u, v), (v, u)} <= profile.link.keys()]


def _linked(case: Case, pairs: Iterable[Pair]) -> Case:
    """The case with links between the pairs: as slow as the slowest that is known, for theirs is not.

    Pairs may name workers that another change adds; without it they are left out.
    """
    links, like = case.profile.links, _slowest(case.profile.links)
    more = [
        replace(like, source=source, target=target)
        for u, v in pairs if u in case.profile.worker and v in case.profile.worker
        for source, target in ((u, v), (v, u)) if (source, target) not in case.profile.link
    ]  # fmt: skip
    return case.with_profile(links=(*links, *more))


def _slowest(links: Sequence[Link]) -> Link:
    """The link that takes longest for a large message; without any, one that takes no time."""
    if not links:
        return Link("", "", (LinkPoint(1, 0.0),))
    size = max(link.points[-1].bytes for link in links)
    return max(links, key=lambda link: message_s(link.points, size))


def _change(case: Case, pairs: Sequence[Pair]) -> Change:
    names = ", ".join(f"{rank_name(u)} - {rank_name(v)}" for u, v in pairs)
    like = "taken to be as slow as the slowest" if case.profile.links else "taken to need no time"
    return Change(f"links {names}, {like}", f"profile the links {names}", lambda other: _linked(other, pairs))


def wires(profile: Profile, plan: Plan) -> set[frozenset[str]]:
    """The pairs of workers that talk in a plan."""
    return {frozenset((route.source, route.target)) for route in wire(plan, profile.edges, profile.ties).routes}


def with_copy(name: str, case: Case) -> Case:
    """The case with a copy of a worker: same kind, same memory, the same links to all others.

    It has the next free rank, and the measurements of its kind. Between the two there are the links of the worker to
    another of its kind; where there is none, its slowest.
    """
    profile = case.profile
    worker = next(each for each in case.workers if each.name == name)  # with the reserve asked for
    taken = {each.rank for each in profile.workers}
    behind = max(taken) + 1
    rank = behind if behind < MOST_RANKS else min(set(range(len(taken) + 1)) - taken)
    copy = f"worker:{rank}/{name.partition('/')[2]}"
    alike = [each.name for each in profile.workers if each.kind == worker.kind and each.name != name]
    leaving = [link for link in profile.links if link.source == name]
    coming = [link for link in profile.links if link.target == name]
    links = [replace(link, source=copy) for link in leaving] + [replace(link, target=copy) for link in coming]
    if leaving and coming:
        there = [link for link in leaving if link.target in alike] or [_slowest(leaving)]
        back = [link for link in coming if link.source in alike] or [_slowest(coming)]
        links += [replace(there[0], target=copy), replace(back[0], source=copy)]
    return case.with_profile(workers=(*profile.workers, replace(worker, name=copy)), links=(*profile.links, *links))


PLENTY = 1e18
"""Bytes that hold any model."""


class Reserve(Family):
    """Less memory left free."""

    title = "a smaller --reserve"

    def opened(self, case: Case) -> Case | None:
        """Nothing left free."""
        if not any(worker.reserve_bytes for worker in case.workers):
            return None
        return case.with_options(reserve={worker.name: 0 for worker in case.workers})

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """The least reduction, of one worker's reserve; of a least set of them, by one factor, where one is too few."""
        reserved = [worker for worker in case.workers if worker.reserve_bytes]
        some = _fewest(
            reserved,
            lambda few: enquiry.plan(case.with_options(reserve=_reserves(case, {each.name: 0 for each in few}))),
        )
        if not some:
            return

        def less(percent: int) -> dict[str, float]:
            """What stays when so much of each is given up, rounded down."""
            return {each.name: floored(each.reserve_bytes * (1 - percent / 100)) for each in some}

        def change(percent: int) -> Change:
            kept = less(percent)
            reserve = _reserves(case, kept)
            names = ", ".join(
                f"{fmt.size(kept[each.name])} instead of {fmt.size(each.reserve_bytes)} left free on"
                f" {rank_name(each.name)}"
                for each in some
            )
            flags = " ".join(f"--reserve {name}={figure(size)}" for name, size in reserve.items())
            return chosen(names, flags, reserve=reserve)

        yield from least_change(case, enquiry, change, high=100)


class MoreMemory(Family):
    """More memory."""

    title = "more memory"

    def opened(self, case: Case) -> Case | None:
        """As much as can be."""
        return case.with_memory({worker.name: PLENTY for worker in case.workers})

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """The least raise of one worker's memory; of a least set, by one factor, where one is too few."""
        singles: list[tuple[float, Remedy]] = []
        for worker in _by_kind(case.workers)[: tuning.MEMORIES_TRIED]:
            plan = enquiry.plan(case.with_memory({worker.name: PLENTY}))
            if plan is not None:
                singles += self._raised(case, worker, plan, enquiry)
        if singles:
            yield min(singles, key=lambda each: each[0])[1]
            return
        some = _fewest(case.workers, lambda few: enquiry.plan(case.with_memory({each.name: PLENTY for each in few})))
        if some:
            yield from self._scaled(case, some, enquiry)

    @staticmethod
    def _raised(case: Case, worker: Worker, plan: Plan, enquiry: Enquiry) -> list[tuple[float, Remedy]]:
        """The least memory of one worker that is enough: the bytes that it has more, and the way out, if any."""

        def change(size: float) -> Change:
            return _given(case, {worker.name: size})

        peak = worker_memory(case.cost, plan, worker.name).total + worker.reserve_bytes
        size, found = least_figure(
            worker.memory_bytes, peak * (1 + 1e-9), lambda size: enquiry.plan(change(size).apply(case))
        )
        return [(size - worker.memory_bytes, way) for way in enquiry.way_out(case, change(size), found)]

    @staticmethod
    def _scaled(case: Case, some: Sequence[Worker], enquiry: Enquiry) -> tuple[Remedy, ...]:
        """The least factor for the memory of several workers."""

        def change(percent: int) -> Change:
            return _given(case, {each.name: ceiled(each.memory_bytes * (1 + percent / 100)) for each in some})

        high = 10
        while (plan := enquiry.plan(change(high).apply(case))) is None:
            if high > 1e9 or enquiry.over:
                return ()
            high *= 2
        return least_change(case, enquiry, change, low=0 if high == 10 else high // 2, high=high, plan=plan)


def _given(case: Case, memory: Mapping[str, float]) -> Change:
    """The change of giving workers so many bytes."""
    old = {worker.name: worker.memory_bytes for worker in case.workers}
    return Change(
        ", ".join(
            f"{fmt.size(size)} on {rank_name(name)} instead of {fmt.size(old[name])}" for name, size in memory.items()
        ),
        ", ".join(f"give {rank_name(name)} {figure(size)}" for name, size in memory.items()),
        partial(Case.with_memory, memory=memory),
    )


def _reserves(case: Case, changed: Mapping[str, float]) -> dict[str, float]:
    """What --reserve must say: what is changed, and what it says now of other workers."""
    own = {worker.name: worker.reserve_bytes for worker in case.profile.workers}
    wanted = {worker.name: changed.get(worker.name, worker.reserve_bytes) for worker in case.workers}
    return {rank_name(name): size for name, size in wanted.items() if size != own[name]}


def _fewest(workers: Sequence[Worker], enough: Callable[[Sequence[Worker]], Plan | None]) -> list[Worker]:
    """A single worker of those that are enough, or a least set of them; empty: all of them are not."""
    for worker in _by_kind(workers)[: tuning.MEMORIES_TRIED]:
        if enough([worker]) is not None:
            return [worker]
    if enough(workers) is None:
        return []
    return least_set(workers, lambda few: enough(few) is not None)


def _by_kind(workers: Sequence[Worker]) -> list[Worker]:
    """The workers, taking turns by kind; of each kind the largest first."""
    turn: dict[str, int] = {}
    keys = {}
    for worker in sorted(workers, key=lambda each: -each.memory_bytes):
        keys[worker.name] = turn[worker.kind] = turn.get(worker.kind, -1) + 1
    return sorted(workers, key=lambda each: keys[each.name])
