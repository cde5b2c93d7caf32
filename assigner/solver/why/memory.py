"""Ways out by more bytes: a smaller reserve, workers with more memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.schedule.simulate import worker_memory
from assigner.solver.limits import tuning
from assigner.solver.why.amounts import ceiled, figure, floored, least_figure
from assigner.solver.why.case import Case, Change, short
from assigner.solver.why.choices import chosen
from assigner.solver.why.family import Family, least, least_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Worker
    from assigner.solver.why.case import Remedy
    from assigner.solver.why.enquiry import Enquiry

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
                f"{fmt.size(kept[each.name])} instead of {fmt.size(each.reserve_bytes)} left free on {short(each.name)}"
                for each in some
            )
            flags = " ".join(f"--reserve {name}={figure(size)}" for name, size in reserve.items())
            return chosen(names, flags, reserve=reserve)

        percent, plan = least(0, 100, lambda much: enquiry.plan(change(much).apply(case)))
        yield from enquiry.way_out(case, change(percent), plan)


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
        """The least memory of one worker that is enough.

        Returns:
            The bytes that it has more, and the way out, if there is one.
        """

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
        percent, found = least(
            0 if high == 10 else high // 2, high, lambda much: enquiry.plan(change(much).apply(case))
        )
        return enquiry.way_out(case, change(percent), found or plan)


def _given(case: Case, memory: Mapping[str, float]) -> Change:
    """The change of giving workers so many bytes."""
    old = {worker.name: worker.memory_bytes for worker in case.workers}
    return Change(
        ", ".join(
            f"{fmt.size(size)} on {short(name)} instead of {fmt.size(old[name])}" for name, size in memory.items()
        ),
        ", ".join(f"give {short(name)} {figure(size)}" for name, size in memory.items()),
        partial(Case.with_memory, memory=memory),
    )


def _reserves(case: Case, changed: Mapping[str, float]) -> dict[str, float]:
    """What --reserve must say: what is changed, and what it says now of other workers."""
    own = {worker.name: worker.reserve_bytes for worker in case.profile.workers}
    wanted = {worker.name: changed.get(worker.name, worker.reserve_bytes) for worker in case.workers}
    return {short(name): size for name, size in wanted.items() if size != own[name]}


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
