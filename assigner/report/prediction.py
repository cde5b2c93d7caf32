"""A plan priced anew: what the profile says of it now, beside what the plan says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.document import encode
from assigner.report.plan import describe_prediction, describe_split, fullness
from assigner.report.sheet import Column, Line, Report, Sheet
from assigner.simulate import overfull

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.occupancy import Occupancy
    from assigner.plan import Plan, Prediction


def prediction_report(plan: Plan, now: Prediction, memory: Sequence[Occupancy] | None = None) -> Report:
    """What `assigner simulate` prints.

    Args:
        plan: The plan as it was read, with the prediction that it stores, if any.
        now: What the simulator says of it.
        memory: Over time, where that was asked for.
    """
    head = Line(f"plan for {plan.workload.name} · {describe_split(plan)} · {plan.schedule}", "strong")
    held = () if memory is None else (_over_time(now, memory),)
    said = Line(f"predicted: {describe_prediction(now)}")
    return (head, said, *_against(plan, now), _workers(plan, now), *held, _fit(now))


def _against(plan: Plan, now: Prediction) -> Report:
    if plan.predicted is None:
        return (Line("the plan stores no prediction of its own"),)
    change = fmt.against(now.step_s, plan.predicted.step_s)
    if change is None:
        return ()
    if abs(change - 1) < 5e-4:
        return (Line("as the plan says itself"),)
    stored = fmt.seconds(plan.predicted.step_s)
    return (Line(f"the plan says step {stored}: {fmt.percent(change - 1, sign=True)} now", "warning"),)


def _workers(plan: Plan, now: Prediction) -> Sheet:
    stored = {each.worker: each for each in plan.predicted.workers} if plan.predicted else {}
    time = fmt.time_unit(*(each.compute_s for each in now.workers))
    memory = fmt.byte_unit(*(each.capacity_bytes for each in now.workers))
    rows = []
    for each in now.workers:
        old = stored.get(each.worker)
        share = fullness(each)
        rows.append(
            (
                each.worker,
                time.show(each.compute_s),
                _change(each.compute_s, old.compute_s if old else None),
                time.show(each.transfer_s),
                time.show(each.idle_s),
                memory.show(each.peak_bytes),
                _change(each.peak_bytes, old.peak_bytes if old else None),
                memory.show(each.capacity_bytes),
                f"{fmt.bar(share, width=8)} {100 * share:3.0f} %",
            )
        )
    columns = (
        Column("worker", "name"),
        Column(f"compute {time.name}"),
        Column("+/- %", rank=3),
        Column(f"transfer {time.name}"),
        Column(f"idle {time.name}"),
        Column(f"peak {memory.name}"),
        Column("+/- %", rank=2),
        Column(f"of {memory.name}", rank=1),
        Column("memory", "name"),
    )
    return Sheet("workers (+/-: against the plan's own prediction)" if stored else "workers", columns, tuple(rows))


def _over_time(now: Prediction, memory: Sequence[Occupancy]) -> Sheet:
    """When each worker holds the most, and of what."""
    time, size = fmt.time_unit(now.step_s), fmt.byte_unit(*(each.peak_bytes for each in now.workers))
    rows = tuple(
        (
            each.worker, size.show(each.state.total), size.show(each.highest.activations),
            size.show(each.highest.workspace), size.show(each.highest.messages), size.show(each.peak.total),
            time.show(each.highest.at_s), size.show(allowed.peak_bytes),
        )
        for each, allowed in zip(memory, now.workers, strict=True)
    )  # fmt: skip
    columns = (
        Column("worker", "name"), Column(f"always {size.name}", rank=1), Column("activations", rank=2),
        Column("workspace", rank=4), Column("messages", rank=3), Column("most at one time"), Column(f"at {time.name}"),
        Column("allowed for", rank=1),
    )  # fmt: skip
    return Sheet("memory over time: when a worker holds the most", columns, rows)


def _change(value: float, old: float | None) -> str:
    """The relative change in percent: from nothing to something has none."""
    factor = fmt.against(value, old)
    return fmt.NOTHING if factor is None else fmt.points(factor - 1, sign=True)


def _fit(now: Prediction) -> Line:
    over = overfull(now)
    if not over:
        return Line("fits: every worker's peak is within its capacity", "strong")
    worst = max(over, key=fullness)
    need, has = fmt.size(worst.peak_bytes), fmt.size(worst.capacity_bytes)
    return Line(f"does not fit: {worst.worker} needs {need} and has {has}", "warning")


def prediction_data(plan: Plan, now: Prediction, memory: Sequence[Occupancy] | None = None) -> dict[str, Any]:
    """The same for `--json`; memory over time as the moments at which it changes."""
    stored = plan.predicted
    held = {} if memory is None else {"memory_over_time": [_moments(each) for each in memory]}
    return {
        "kind": "prediction",
        "predicted": encode(now),
        "stored": encode(stored) if stored else None,
        "step_change": (fmt.against(now.step_s, stored.step_s) or 1.0) - 1 if stored else None,
        "fits": not overfull(now),
        "overfull": [each.worker for each in overfull(now)],
        **held,
    }


def _moments(memory: Occupancy) -> dict[str, Any]:
    return {
        "worker": memory.worker,
        "state": encode(memory.state),
        "peak_bytes": memory.peak.total,
        "peak_at_s": memory.highest.at_s,
        "moments": [each._asdict() for each in memory.held],
    }
