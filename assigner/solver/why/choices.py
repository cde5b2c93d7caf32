"""Ways out by what is chosen freely otherwise: schedule, micro-batches, rematerialisation, step time, batch; hints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.schedule.timing import step_s
from assigner.solver.limits import tuning
from assigner.solver.problem.options import divisors
from assigner.solver.why.case import Case, Change, together
from assigner.solver.why.family import Family, figure, least_change, least_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.formats.profile import Partition
    from assigner.solver.why.case import Enquiry, Remedy


def chosen(what: str, how: str, **options: Any) -> Change:
    """The change that some options are."""
    return Change(what, how, partial(Case.with_options, **options))


class FewerInFlight(Family):
    """Fewer micro-batches in flight, or smaller ones: another schedule, another number of them."""

    title = "another schedule or number of micro-batches"

    def opened(self, case: Case) -> Case | None:
        """Both chosen freely."""
        if case.options.schedule == "auto" and case.options.micro_batches is None:
            return None
        return case.with_options(schedule="auto", micro_batches=None)

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """The schedule alone, the number alone; both only where neither does it."""
        options = case.options
        freed: list[dict[str, Any]] = []
        if options.schedule != "auto":
            freed.append({"schedule": "auto"})
        elif options.objective == "step":
            freed.append({"schedule": "interleaved"})  # several stages a worker are searched by request only
        if options.micro_batches is not None:
            freed.append({"micro_batches": None})
        alone = [way for free in freed for way in self._with(case, enquiry, **free)]
        yield from alone or (self._with(case, enquiry, schedule="auto", micro_batches=None) if len(freed) == 2 else ())

    def _with(self, case: Case, enquiry: Enquiry, **free: Any) -> tuple[Remedy, ...]:
        """The change to the schedule and number of a plan that there is with these options; none: there is no plan."""
        options, plan = case.options, enquiry.plan(case.with_options(**free))
        if plan is None:
            return ()
        what: list[str] = []
        how: list[str] = []
        changes: dict[str, Any] = {}
        covered = ("gpipe", "1f1b") if options.schedule in ("auto", "one-stage") else (options.schedule,)
        if plan.schedule not in covered:
            what.append(f"schedule {plan.schedule} instead of {options.schedule}")
            how.append(f"--schedule {plan.schedule}")
            changes["schedule"] = plan.schedule
        if options.micro_batches not in (None, plan.micro_batches):
            what.append(f"{fmt.plural(plan.micro_batches, 'micro-batch')} instead of {options.micro_batches}")
            how.append(f"--micro-batches {plan.micro_batches}")
            changes["micro_batches"] = plan.micro_batches
        return enquiry.way_out(case, chosen(", ".join(what), " ".join(how), **changes), plan)


class Remat(Family):
    """Rematerialisation where it is forbidden, or forced."""

    title = "--remat auto"

    def opened(self, case: Case) -> Case | None:
        """As the solver likes."""
        return None if case.options.remat == "auto" else case.with_options(remat="auto")

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """There is one."""
        if case.options.remat != "auto":
            change = chosen(f"remat auto instead of {case.options.remat}", "--remat auto", remat="auto")
            yield from enquiry.way_out(case, change)


class StepLimit(Family):
    """A longer step, where there is a limit to it."""

    title = "a longer --max-step"

    def opened(self, case: Case) -> Case | None:
        """Any step time."""
        return None if case.options.max_step_s is None else case.with_options(max_step_s=None)

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """The step time of the fastest plan, rounded up."""
        limit = case.options.max_step_s
        plan = None if limit is None else enquiry.plan(case.with_options(max_step_s=None), fastest=True)
        if limit is None or plan is None:
            return
        least_s = step_s(plan, case.cost)
        digits = 2 - math.floor(math.log10(least_s))
        seconds = math.ceil(least_s * 10**digits) / 10**digits
        if seconds <= limit:
            return
        what = f"a step of up to {fmt.seconds(seconds)} instead of {fmt.seconds(limit)}"
        longer = chosen(what, f"--max-step {seconds:g}", max_step_s=seconds)
        yield from enquiry.way_out(case, longer) or enquiry.way_out(case, longer, plan)


class Batch(Family):
    """A smaller batch."""

    title = "a smaller --batch-size"

    def opened(self, case: Case) -> Case | None:
        """The smallest that there can be."""
        sizes = self._sizes(case)
        return case.with_options(batch_size=sizes[0]) if sizes else None

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """The largest divisor of the batch that has a plan."""
        sizes = self._sizes(case)

        def change(smaller_by: int) -> Change:
            size = sizes[len(sizes) - smaller_by]
            what = f"a batch of {size} instead of {case.options.batch(case.profile)}"
            return chosen(what, f"--batch-size {size}", batch_size=size)

        plan = enquiry.plan(change(len(sizes)).apply(case)) if sizes else None
        if plan is not None:
            yield from least_change(case, enquiry, change, high=len(sizes), plan=plan)

    @staticmethod
    def _sizes(case: Case) -> list[int]:
        """Smaller batch sizes, smallest first."""
        count = case.options.micro_batches or 1
        return [size for size in divisors(case.options.batch(case.profile))[:-1] if size % count == 0]


class Hints(Family):
    """What each flag of the hints asks for, and what the marks in the model do."""

    title = "dropping a hint"

    def opened(self, case: Case) -> Case | None:
        """No hints."""
        found = hints(case)
        return together(found).apply(case) if found else None

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """Single hints; a least set of them only where no single one does it."""
        found = hints(case)
        if len(found) <= tuning.HINTS_TRIED:
            singles = [way for hint in found for way in enquiry.way_out(case, hint)]
            if singles:
                yield from sorted(singles, key=lambda way: way.value)[: tuning.HINTS_AT_ONCE]
                return
        if not found or (plan := enquiry.plan(together(found).apply(case))) is None:
            return
        needed = least_set(found, lambda some: enquiry.plan(together(some).apply(case)) is not None)
        change = together(needed)
        if len(needed) > tuning.HINTS_NAMED:
            what = f"{len(needed)} of {len(found)} hints dropped"
            change = Change(what, f"drop {named([title(hint) for hint in needed])}", change.apply)
        yield from enquiry.way_out(case, change, plan if len(needed) == len(found) else None)


class MostWorkers(Family):
    """More workers than were allowed."""

    title = "a larger --max-workers"

    def opened(self, case: Case) -> Case | None:
        """All of them."""
        most = case.options.max_workers
        return None if most is None or most >= len(case.workers) else case.with_options(max_workers=None)

    def ways_out(self, case: Case, enquiry: Enquiry) -> Iterator[Remedy]:
        """The least number that has a plan."""
        opened = self.opened(case)
        plan = None if opened is None else enquiry.plan(opened)
        if plan is None:
            return
        most = case.options.max_workers
        assert most is not None
        for number in range(most + 1, len(plan.workers) + 1):
            change = chosen(f"{number} workers instead of {most}", f"--max-workers {number}", max_workers=number)
            found = enquiry.way_out(case, change, plan if number == len(plan.workers) else None)
            if found:
                yield from found
                return


def hints(case: Case) -> list[Change]:
    """Every hint, as the change of dropping it."""
    return [*_flags(case), *_marks(case)]


def limits(case: Case) -> list[Change]:
    """The largest number of workers, if there is one, as the change of dropping it."""
    most = case.options.max_workers
    if most is None:
        return []
    return [_dropped("any number of workers", f"--max-workers {most}", partial(Case.with_options, max_workers=None))]


def named(titles: Sequence[str]) -> str:
    """Hints in a list, cut off where it grows long."""
    more = len(titles) - tuning.HINTS_NAMED
    return fmt.series([*titles[: tuning.HINTS_NAMED], f"{more} more"] if more > 0 else titles)


def title(hint: Change) -> str:
    """The hint itself, of the change that drops it."""
    return hint.how.removeprefix("drop ")


def _flags(case: Case) -> Iterator[Change]:
    options = case.options
    for pattern, pin in options.pins.items():
        yield _less("pins", pattern, f"{pattern} not pinned to {pin}", f"--pin {quote(f'{pattern}={pin}')}")
    for pair in options.forbid:
        yield _less("forbid", pair, f"{pair[0]} allowed on {pair[1]}", f"--forbid {quote('='.join(pair))}")
    for spec, size in options.memory.items():
        yield _less("memory", spec, f"all the memory of {spec}", f"--memory {quote(f'{spec}={figure(size)}')}")
    for group in options.together:
        names = ",".join(group)
        yield _less("together", group, f"{names} on any workers", f"--together {quote(names)}")
    for group in options.apart:
        names = ",".join(group)
        yield _less("apart", group, f"{names} on one worker or more", f"--apart {quote(names)}")
    if options.order:
        flag = f"--order {quote(','.join(options.order))}"
        yield _dropped("workers in any order", flag, partial(Case.with_options, order=()))
    if options.only:
        flag = " ".join(f"--only {quote(each)}" for each in options.only)
        yield _dropped("any workers used", flag, partial(Case.with_options, only=()))
    for pattern, rule in options.rematerialise.items():
        yield _less(
            "rematerialise", pattern, f"{pattern} rematerialised as it suits", f"--{rule}-remat {quote(pattern)}"
        )


def _dropped(what: str, flag: str, apply: Callable[[Case], Case]) -> Change:
    return Change(what, f"drop {flag}", apply)


def _less(field: str, item: object, what: str, flag: str) -> Change:
    """One entry less of an option: of a mapping the one with this key, of others this one."""

    def apply(case: Case) -> Case:
        given = getattr(case.options, field)
        kept = tuple(each for each in given if each != item)
        return case.with_options(**{field: {key: given[key] for key in kept} if isinstance(given, Mapping) else kept})

    return _dropped(what, flag, apply)


def _marks(case: Case) -> Iterator[Change]:
    """The hints that stand in the model's code, and so in the profile."""
    for field, what in (("pin", "not pinned to {}"), ("rematerialise", "rematerialised as it suits")):
        for partition in case.profile.partitions:
            value = getattr(partition, field)
            if value is not None:
                yield _unmarked(field, value, [partition], what.format(value))
    for field, what in (("colocate", "on any workers"), ("apart", "on one worker or more")):
        labels = dict.fromkeys(getattr(each, field) for each in case.profile.partitions)
        for label in labels:
            held = [each for each in case.profile.partitions if getattr(each, field) == label]
            if label is not None and len(held) > 1:
                yield _unmarked(field, label, held, what)


def _unmarked(field: str, value: str, held: list[Partition], what: str) -> Change:
    names = {each.name for each in held}
    nothing: dict[str, Any] = {field: None}

    def apply(case: Case) -> Case:
        return case.with_profile(
            partitions=tuple(
                replace(each, **nothing) if each.name in names else each for each in case.profile.partitions
            )
        )

    whose, be = fmt.ranges([each.name for each in held]), "is" if len(held) == 1 else "are"
    return _dropped(f"{whose} {what}", f'{field}="{value}" where {whose} {be} marked', apply)
