"""Ways out by what is chosen freely otherwise: schedule, micro-batches, rematerialisation, step time, batch."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.solver.problem.options import divisors
from assigner.solver.why.case import Case, Change
from assigner.solver.why.family import Family, least

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assigner.formats.plan import Plan
    from assigner.solver.why.case import Remedy
    from assigner.solver.why.enquiry import Enquiry


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
        options, alone = case.options, False
        freed: list[dict[str, Any]] = []
        if options.schedule != "auto":
            freed.append({"schedule": "auto"})
        elif options.objective == "step":
            freed.append({"schedule": "interleaved"})  # several stages a worker are searched by request only
        if options.micro_batches is not None:
            freed.append({"micro_batches": None})
        for free in freed:
            plan = enquiry.plan(case.with_options(**free))
            if plan is not None:
                yield from self._named(case, plan, enquiry)
                alone = True
        if len(freed) == 2 and not alone:
            plan = enquiry.plan(case.with_options(schedule="auto", micro_batches=None))
            if plan is not None:
                yield from self._named(case, plan, enquiry)

    def _named(self, case: Case, plan: Plan, enquiry: Enquiry) -> tuple[Remedy, ...]:
        """The change that leads to the plan's own schedule and number."""
        options = case.options
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
        plan = None if limit is None else enquiry.fastest(case)
        if limit is None or plan is None:
            return
        (free,) = enquiry.way_out(case, chosen("", "", max_step_s=None), plan)
        digits = 2 - math.floor(math.log10(free.step_s))
        seconds = math.ceil(free.step_s * 10**digits) / 10**digits
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

        def enough(smaller_by: int) -> Plan | None:
            return enquiry.plan(case.with_options(batch_size=sizes[len(sizes) - smaller_by]))

        plan = enough(len(sizes)) if sizes else None
        if plan is None:
            return
        by, found = least(0, len(sizes), enough)
        size = sizes[len(sizes) - by]
        change = chosen(
            f"a batch of {size} instead of {case.options.batch(case.profile)}", f"--batch-size {size}", batch_size=size
        )
        yield from enquiry.way_out(case, change, found or plan)

    @staticmethod
    def _sizes(case: Case) -> list[int]:
        """Smaller batch sizes, smallest first."""
        count = case.options.micro_batches or 1
        return [size for size in divisors(case.options.batch(case.profile))[:-1] if size % count == 0]
