"""Plans side by side: what each is predicted to do, what moved against the baseline, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.formats.fineness import cut_text
from assigner.formats.plan import Plan
from assigner.formats.profile import Profile
from assigner.report.measured import conclusions, measured, measured_data
from assigner.report.memory import fullness
from assigner.report.placementchanges import DETAILED, placement_changes, placement_changes_data, same
from assigner.report.plan import proven_gap, status
from assigner.report.sheet import Cell, Column, Line, Report, Sheet
from assigner.schedule.objective import HOUR_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.validation.steps import PlanRuns


@dataclass(frozen=True)
class Named:
    """A plan with the name under which it is shown, and the profile that knows what its workers cost, where one does.

    `notes` say why its figures are not those of its file, as `checked_plan` tells it; `prices` are money per hour of
    workers, kinds or hosts, before the profile's.
    """

    name: str
    plan: Plan
    profile: Profile | None = None
    notes: tuple[str, ...] = ()
    prices: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def differ(plans: Sequence[Named]) -> bool:
    """True if any plan would run otherwise than the first: other places, remat, split, schedule, order or depth."""
    return any(not same(plans[0].plan, each.plan) for each in plans[1:])


def check_comparable(plans: Sequence[Named]) -> None:
    """Raise FormatError unless all plans are for one workload: same fingerprint, same partitions."""
    first = plans[0]
    for other in plans[1:]:
        one, two = first.plan.workload, other.plan.workload
        if two.fingerprint != one.fingerprint:
            raise FormatError(
                f"{other.name} is for workload {two.label}, {first.name} for {one.label}",
                hint="compare plans of one workload; a changed model needs a new profile",
            )
        strange = set(other.plan.partitions) ^ set(first.plan.partitions)
        if strange:
            has, lacks = (first, other) if min(strange) in first.plan.holders else (other, first)
            raise FormatError(
                f"{has.name} places partition {min(strange)!r}, {lacks.name} does not",
                hint="compare plans that were solved from profiles of the same partitions",
            )


def comparison_report(
    plans: Sequence[Named],
    *,
    everything: bool = False,
    traces: Mapping[str, PlanRuns] | None = None,
    priced_by: str = "",
    digits: int | None = None,
) -> Report:
    """What `assigner compare` prints of plans of one workload (`check_comparable`); the first is the baseline.

    `traces` has what was measured of the plans, by name; `priced_by` is the profile that priced all of them anew, and
    empty where each says what it was solved with.
    """
    pairs = [(each.name, each.plan) for each in plans]
    return (
        _figures(plans, digits),
        *(Line(text, "warning") for text in notes(plans, priced_by=priced_by)),
        *measured(pairs, traces or {}, digits=digits),
        *placement_changes(pairs, everything=everything),
    )


def notes(plans: Sequence[Named], *, priced_by: str = "") -> list[str]:
    """What a reader has to know before comparing the figures.

    Plans whose file says something else, unpriced plans, other batches, other measurements.
    """
    told = [f"{each.name}: {text}" for each in plans for text in each.notes]
    unpriced = [each.name for each in plans if not each.plan.predicted and not each.notes]
    told += [f"{name} is not priced; `assigner simulate` predicts it" for name in unpriced]
    sizes = sorted({each.plan.workload.batch_size for each in plans})
    if len(sizes) > 1:
        told.append(
            f"batches differ ({', '.join(map(str, sizes))} samples): the speed-up is that of samples/s, and a step of"
            " another batch trains otherwise"
        )
    for what in ("dtype", "optimizer"):
        values = list(dict.fromkeys(getattr(each.plan.workload, what) for each in plans))
        if len(values) > 1:
            told.append(f"{what}s differ ({', '.join(values)}): these plans do not train alike")
    if priced_by:
        told.append(f"all are priced by {priced_by}, whatever they were solved from")
    elif len({each.plan.profile.sha256 for each in plans if each.plan.profile}) > 1:
        told.append(
            "the predictions rest on different measurements"
            f" ({'; '.join(_sources(plans))}): --profile PROFILE prices all plans by one"
        )
    return told


def _sources(plans: Sequence[Named]) -> list[str]:
    """The profiles that the plans were solved from, by their hashes, each with its plans."""
    found: dict[str, list[str]] = {}
    for each in plans:
        if each.plan.profile:
            source = f"{each.plan.profile.path} {each.plan.profile.sha256.removeprefix('sha256:')[:8]}"
            found.setdefault(source, []).append(each.name)
    return [f"{source}: {', '.join(names)}" for source, names in found.items()]


def samples_per_s(plan: Plan) -> float | None:
    """What the plan is predicted to train a second."""
    return fmt.against(plan.workload.batch_size, plan.predicted_step_s)


def money(each: Named) -> float | None:
    """Per 1000 samples, in the unit of the profile's `cost_per_hour`; None: not known."""
    plan, rate = each.plan, samples_per_s(each.plan)
    if each.profile is None or not rate or not set(plan.workers) <= set(each.profile.worker):
        return None
    prices = []
    for worker in map(each.profile.worker.__getitem__, plan.workers):  # the last price that matches, as `solve` has it
        matching = [price for spec, price in each.prices.items() if each.profile.matches(spec, worker)]
        prices.append(matching[-1] if matching else worker.cost_per_hour)
    return None if None in prices else 1000 * sum(filter(None, prices)) / HOUR_S / rate


def stored_prices(plan: Plan) -> Mapping[str, float]:
    """The prices that a plan was solved with, as they were given; none where its file has nothing sound."""
    found = plan.solver.options.get("prices") if plan.solver else None
    known = isinstance(found, dict) and all(
        isinstance(spec, str) and isinstance(price, int | float) and price >= 0 for spec, price in found.items()
    )
    return found if isinstance(found, dict) and known else {}


def _figures(plans: Sequence[Named], digits: int | None) -> Sheet:
    numbered, priced = len(plans) - 1 > DETAILED, any(money(each) is not None for each in plans)
    sizes = {each.plan.workload.batch_size for each in plans}
    left_out = {name for name, there in (("#", numbered), ("batch", len(sizes) > 1), ("per 1000", priced)) if not there}
    rows = [[(Column("#"), str(n)), *_figures_row(each, plans, digits)] for n, each in enumerate(plans, start=1)]
    title = f"plans for {plans[0].plan.workload.name}"
    title += f", batch of {sizes.pop()}" if len(sizes) == 1 else ", by samples/s"
    title += "; per 1000: what 1000 samples cost, in the unit of cost_per_hour" if priced else ""
    return Sheet.of(title, [[cell for cell in row if cell[0].header not in left_out] for row in rows])


def _figures_row(each: Named, plans: Sequence[Named], digits: int | None) -> Sequence[Cell]:
    plan, predicted, fullest = each.plan, each.plan.predicted, memory_share(each.plan)
    time = fmt.time_unit(*(other.plan.predicted_step_s for other in plans))
    alike = len({other.plan.workload.batch_size for other in plans}) == 1
    gain = fmt.ratio(fmt.against(samples_per_s(plan), samples_per_s(plans[0].plan)), digits=digits)
    again = sum(len(stage.rematerialise) for stage in plan.stages)
    bubble = predicted.bubble_fraction if predicted else None
    return (
        (Column("plan", "text"), each.name),
        (Column("batch"), fmt.count(plan.workload.batch_size)),
        (Column(f"step {time.name}", rank=0 if alike else 3), time.show(plan.predicted_step_s, digits=digits)),
        (Column("samples/s", rank=8 if alike else 0), fmt.number(samples_per_s(plan), digits=digits)),
        (Column("speed-up"), "baseline" if each is plans[0] else gain),
        (Column("per 1000", rank=2), fmt.number(money(each), digits=digits)),
        (Column("bubble %", rank=1), fmt.points(bubble, digits=digits)),
        (Column("workers", rank=4), str(len(plan.workers))),
        (Column("micro-batches", rank=3), cut_text(plan.workload.batch_size, plan.micro_batches)),
        (Column("remat", rank=6), f"{again} of {len(plan.partitions)}"),
        (Column("memory %"), fmt.points(fullest, digits=digits) + ("!" if (fullest or 0) > 1 else "")),
        (Column("transfer %", rank=5), fmt.points(transfer_share(plan), digits=digits)),
        (Column("schedule", "name", rank=7), plan.schedule),
        (Column("gap %", rank=9), fmt.points(proven_gap(plan), digits=digits)),
    )


def memory_share(plan: Plan) -> float | None:
    """The fullest worker's peak against its capacity."""
    return max(map(fullness, plan.predicted_workers.values()), default=None)


def transfer_share(plan: Plan) -> float | None:
    """The share of the workers' time in which they wait while a message is on its way."""
    if plan.predicted is None:
        return None
    waiting = sum(each.transfer_s for each in plan.predicted.workers)
    return fmt.against(waiting, len(plan.predicted.workers) * plan.predicted.step_s)


def comparison_data(
    plans: Sequence[Named], *, traces: Mapping[str, PlanRuns] | None = None, priced_by: str = ""
) -> dict[str, Any]:
    """The same for `--json`; arguments as `comparison_report`."""
    pairs = [(each.name, each.plan) for each in plans]
    return {
        "kind": "comparison",
        "workload": plans[0].plan.workload.name,
        "baseline": plans[0].name,
        "priced_by": priced_by or None,
        "differ": differ(plans),
        "notes": [*notes(plans, priced_by=priced_by), *(line.text for line in conclusions(pairs, traces or {}))],
        "plans": [_plan_data(each, plans[0], traces or {}) for each in plans],
    }


def figures_data(plan: Plan, baseline: Plan) -> dict[str, Any]:
    """How a plan cuts its batch, and what it is predicted to do."""
    predicted = plan.predicted
    return {
        "batch_size": plan.workload.batch_size,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "micro_batch_size": plan.micro_batch_size,
        "step_s": plan.predicted_step_s,
        "samples_per_s": samples_per_s(plan),
        "bubble_fraction": predicted.bubble_fraction if predicted else None,
        "speed_up": fmt.against(samples_per_s(plan), samples_per_s(baseline)),
        "status": status(plan.solver) if plan.solver else None,
    }


def _plan_data(each: Named, baseline: Named, traces: Mapping[str, PlanRuns]) -> dict[str, Any]:
    plan = each.plan
    return {
        "name": each.name,
        "profile_sha256": plan.profile.sha256 if plan.profile else None,
        **figures_data(plan, baseline.plan),
        "cost_per_1000_samples": money(each),
        "workers": list(plan.workers),
        "rematerialised": sum(len(stage.rematerialise) for stage in plan.stages),
        "partitions": len(plan.partitions),
        "memory_share": memory_share(plan),
        "transfer_share": transfer_share(plan),
        "gap": proven_gap(plan),
        "measured": measured_data(plan, traces.get(each.name), baseline.plan, traces.get(baseline.name)),
        **placement_changes_data(baseline.plan, plan),
    }
