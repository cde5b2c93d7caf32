"""A plan priced anew, beside what it says of itself; and the order in which its workers do what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.report.clock import clock_data, clock_table, legend
from assigner.report.links import transfers
from assigner.report.memory import fullness_text, misfit
from assigner.report.plan import describe_prediction, title
from assigner.report.sheet import Cell, Column, Line, Report, Sheet, with_hosts
from assigner.report.timeline import timeline, timeline_data
from assigner.schedule.orders import in_flight, listed, warm_up
from assigner.schedule.simulate import overfull
from assigner.validation.checkedplan import holds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Prediction
    from assigner.formats.profile import Profile
    from assigner.schedule.occupancy import Occupancy
    from assigner.validation.spans import Spans

_MOST = 48
"""Steps of a worker above which those in the middle are left out."""
_LINKS = 8
"""So many links are shown, the busiest ones."""


def prediction_report(
    plan: Plan,
    profile: Profile,
    now: Prediction,
    spans: Spans,
    memory: Sequence[Occupancy] | None,
    *,
    own_profile: bool | None,
    width: int,
) -> Report:
    """What `assigner simulate` prints of a plan, as it was read, and of what the simulator says of it now.

    `memory` is over time, where that was asked for; `own_profile`: it was priced with the profile that it was solved
    from; None: the plan does not say which that is.
    """
    said = Line(f"predicted: {describe_prediction(now)}")
    held = () if memory is None else (_over_time(now, memory),)
    parts = (
        title(plan), said, *_against(plan, now, own_profile=own_profile), *timeline([spans], profile, width=width),
        _workers(plan, now), *transfers(now, most=_LINKS), *held, fit(now),
    )  # fmt: skip
    return with_hosts(parts, profile)


def _against(plan: Plan, now: Prediction, *, own_profile: bool | None) -> Report:
    """What the plan says of itself, and why it says something else where it does."""
    stored = plan.predicted
    if stored is None:
        return (Line("the plan holds no prediction of its own to compare with"),)
    change = fmt.against(now.step_s, stored.step_s)
    if change is None:
        return ()
    whose, why = _ORIGINS[own_profile]
    if holds(plan, now):
        return (Line(f"priced with {whose}: the same as the plan's own prediction"),)
    how = "as fast as before"
    if abs(change - 1) >= fmt.SHOWN:
        how = f"{fmt.percent(abs(change - 1))} {'slower' if change > 1 else 'faster'} now"
    gone = [each.worker for each in stored.workers if each.worker not in plan.workers]
    return (
        Line(f"the plan itself says: {describe_prediction(stored)}; it is {how}", "warning"),
        Line(f"priced with {whose}{why}"),
        *([Line(f"in the plan's own prediction, and without a stage now: {', '.join(gone)}")] if gone else []),
    )


_ORIGINS = {
    True: ("the profile it was solved from", ", so the plan was changed since or solved by another version"),
    False: ("another profile than it was solved from", ", so times may differ"),
    None: ("the profile that was named", ""),
}
"""What a plan was priced with, and what follows where its own prediction is another; by `own_profile`."""


def _workers(plan: Plan, now: Prediction) -> Sheet:
    changed = plan.predicted is not None and not holds(plan, now)
    time = fmt.time_unit(*(each.compute_s for each in now.workers))
    memory = fmt.byte_unit(*(each.peak_bytes for each in now.workers))
    limit = fmt.byte_unit(*(each.capacity_bytes for each in now.workers))

    def change(value: float, stored: float | None) -> Sequence[Cell]:
        return ((Column("+/- %", rank=1), fmt.change(value, stored)),) if changed else ()

    rows = []
    for each in now.workers:
        held, in_flight_of = stages_held(plan, each.worker)
        old = plan.predicted_workers.get(each.worker)
        rows.append(
            (
                (Column("worker", "name"), each.worker),
                (Column("stage", "name", rank=4), held),
                (Column("in flight", rank=5), in_flight_of),
                (Column(f"compute {time.name}"), time.show(each.compute_s)),
                *change(each.compute_s, old.compute_s if old else None),
                (Column(f"transfer {time.name}", rank=3), time.show(each.transfer_s)),
                (Column(f"idle {time.name}"), time.show(each.idle_s)),
                (Column(f"peak {memory.name}"), memory.show(each.peak_bytes)),
                *change(each.peak_bytes, old.peak_bytes if old else None),
                (Column(f"of {limit.name}", rank=2), limit.show(each.capacity_bytes)),
                (Column("memory %"), fullness_text(each)),
            )
        )
    return Sheet.of("workers (+/-: against the plan's own prediction)" if changed else "workers", rows)


def stages_held(plan: Plan, worker: str) -> tuple[str, str]:
    """The stages that a worker holds, and how many micro-batches it keeps of each: `0, 2` and `4 + 2`."""
    held = plan.held[worker]
    return ", ".join(map(str, held)), " + ".join(str(in_flight(plan, n, worker)) for n in held)


def _over_time(now: Prediction, memory: Sequence[Occupancy]) -> Sheet:
    """When each worker holds the most, and of what."""
    time, size = fmt.time_unit(now.step_s), fmt.byte_unit(*(each.peak_bytes for each in now.workers))
    rows = [
        (
            (Column("worker", "name"), each.worker),
            (Column(f"always {size.name}", rank=1), size.show(each.state.total)),
            (Column("activations", rank=2), size.show(each.highest.activations)),
            (Column("workspace", rank=4), size.show(each.highest.workspace)),
            (Column("messages", rank=3), size.show(each.highest.messages)),
            (Column(f"most {size.name}"), size.show(each.peak.total)),
            (Column(f"at {time.name}"), time.show(each.highest.at_s)),
            (Column(f"allowed for {size.name}", rank=1), size.show(allowed.peak_bytes)),
        )
        for each, allowed in zip(memory, now.workers, strict=True)
    ]
    return Sheet.of("memory over time: when a worker holds the most, and of what", rows)


def fit(now: Prediction) -> Line:
    """Whether every worker has the memory; which has not."""
    return misfit(now) or Line("fits: every worker's peak is within its capacity", "strong")


def fit_data(now: Prediction) -> dict[str, Any]:
    """The same for `--json`."""
    return {"fits": not overfull(now), "overfull": [each.worker for each in overfull(now)]}


def prediction_data(
    plan: Plan,
    now: Prediction,
    spans: Spans,
    memory: Sequence[Occupancy] | None = None,
    *,
    own_profile: bool | None,
) -> dict[str, Any]:
    """The same for `--json`; memory over time as the moments at which it changes."""
    stored = plan.predicted
    held = [
        {
            "worker": each.worker,
            "state": encode(each.state),
            "peak_bytes": each.peak.total,
            "peak_at_s": each.highest.at_s,
            "moments": encode(each.held),
        }
        for each in memory or ()
    ]
    return {
        "kind": "prediction",
        "predicted": encode(now),
        "stored": encode(stored) if stored else None,
        "step_change": (fmt.against(now.step_s, stored.step_s) or 1.0) - 1 if stored else None,
        "own_profile": own_profile,
        "in_flight": [warm_up(plan, n) for n in range(len(plan.stages))],
        **fit_data(now),
        "timeline": timeline_data([spans]),
        **({} if memory is None else {"memory_over_time": held}),
    }


def order_report(
    plan: Plan, profile: Profile, now: Prediction, spans: Spans, *, width: int, everything: bool
) -> Report:
    """The order of a plan whose program runs: what the simulator says of it, and every step, or as many as fit."""
    orders = listed(plan).orders
    head = Column("worker", "name"), Column("stages", "name", rank=2), Column("in flight", rank=3)
    rows = tuple(
        (worker, *stages_held(plan, worker), _shown(order, everything=everything)) for worker, order in orders.items()
    )
    table = Sheet(f"order ({legend(plan)})", (*head, Column("stage, what, micro-batch", "text")), rows)
    parts = (
        title(plan), Line(f"predicted: {describe_prediction(now)}"), table,
        *clock_table(plan, profile, everything=everything), *timeline([spans], profile, width=width), fit(now),
    )  # fmt: skip
    return with_hosts(parts, profile)


def _shown(order: str, *, everything: bool) -> str:
    steps = order.split()
    if everything or len(steps) <= _MOST:
        return order
    ends = _MOST // 2
    middle = f"... ({len(steps) - 2 * ends} more: -v lists all) ..."
    return " ".join([*steps[:ends], middle, *steps[-ends:]])


def order_data(plan: Plan, profile: Profile, now: Prediction) -> dict[str, Any]:
    """The same for `--json`; `orders` is what a file for `--orders` holds."""
    return {
        "kind": "schedule",
        "schedule": plan.schedule,
        "orders": listed(plan).orders,
        "in_flight": {worker: {n: in_flight(plan, n, worker) for n in held} for worker, held in plan.held.items()},
        "predicted": encode(now),
        "clock": clock_data(plan, profile),
        **fit_data(now),
    }
