"""Ways out by dropping hints, of the flags or of the marks in the model's code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.solver.limits import tuning
from assigner.solver.why.amounts import figure
from assigner.solver.why.case import Case, Change, together
from assigner.solver.why.choices import chosen
from assigner.solver.why.family import Family, least_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.formats.profile import Partition
    from assigner.solver.why.case import Remedy
    from assigner.solver.why.enquiry import Enquiry


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
                yield from sorted(singles, key=lambda way: way.step_s)[: tuning.HINTS_AT_ONCE]
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
    if len(titles) == 1:
        return titles[0]
    *first, last = (
        [*titles[: tuning.HINTS_NAMED], f"{len(titles) - tuning.HINTS_NAMED} more"]
        if len(titles) > tuning.HINTS_NAMED
        else titles
    )
    return f"{', '.join(first)} and {last}"


def title(hint: Change) -> str:
    """The hint itself, of the change that drops it."""
    return hint.how.removeprefix("drop ")


def _flags(case: Case) -> Iterator[Change]:
    options = case.options
    for pattern, pin in options.pins.items():
        flag = f"--pin {quote(f'{pattern}={pin}')}"
        yield _dropped(f"{pattern} not pinned to {pin}", flag, partial(_without, "pins", pattern))
    for pair in options.forbid:
        flag = f"--forbid {quote('='.join(pair))}"
        yield _dropped(f"{pair[0]} allowed on {pair[1]}", flag, partial(_without, "forbid", pair))
    for spec, size in options.memory.items():
        flag = f"--memory {quote(f'{spec}={figure(size)}')}"
        yield _dropped(f"all the memory of {spec}", flag, partial(_without, "memory", spec))
    for group in options.together:
        names = ",".join(group)
        yield _dropped(f"{names} on any workers", f"--together {quote(names)}", partial(_without, "together", group))
    for group in options.apart:
        names = ",".join(group)
        yield _dropped(f"{names} on one worker or more", f"--apart {quote(names)}", partial(_without, "apart", group))
    if options.order:
        flag = f"--order {quote(','.join(options.order))}"
        yield _dropped("workers in any order", flag, partial(Case.with_options, order=()))
    if options.only:
        flag = " ".join(f"--only {quote(each)}" for each in options.only)
        yield _dropped("any workers used", flag, partial(Case.with_options, only=()))
    for pattern, rule in options.rematerialise.items():
        flag = f"--{rule}-remat {quote(pattern)}"
        yield _dropped(f"{pattern} rematerialised as it suits", flag, partial(_without, "rematerialise", pattern))


def _dropped(what: str, flag: str, apply: Callable[[Case], Case]) -> Change:
    return Change(what, f"drop {flag}", apply)


def _without(field: str, item: object, case: Case) -> Case:
    """The case with one entry less of an option: of a mapping the one with this key, of others this one."""
    given = getattr(case.options, field)
    kept = tuple(each for each in given if each != item)
    return case.with_options(**{field: {key: given[key] for key in kept} if isinstance(given, Mapping) else kept})


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

    whose = fmt.ranges([each.name for each in held])
    return Change(f"{whose} {what}", f'drop {field}="{value}" where {whose} {_is_marked(held)}', apply)


def _is_marked(held: list[Partition]) -> str:
    return "is marked" if len(held) == 1 else "are marked"
