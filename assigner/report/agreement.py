"""A plan's prediction beside a trace of its run: by stage, message and worker, and where the difference comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.report.plan import title
from assigner.report.sheet import Column, Line, Report, Sheet, with_hosts
from assigner.report.timeline import PIPED, timeline, timeline_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import Profile
    from assigner.validation.comparison import Agreement, Compared, Deviation
    from assigner.validation.spans import Spans

_SAME = 0.01
"""A step time predicted this well needs no cause."""
_OTHER = 0.05
"""A machine's reference time that differs by this much is listed."""
_ONCE = "forward", "backward", "backward_input", "backward_weight", "reduce", "gather"


def agreement_report(
    found: Agreement, sides: Sequence[Spans] = (), profile: Profile | None = None, *, width: int = PIPED
) -> Report:
    """What `assigner simulate --against` prints; no timeline without sides, a predicted and a measured step."""
    clocks = f"clocks of the workers agree to {fmt.seconds(found.clock_error_s)}"
    parts = (
        title(found.plan), Line(step_text(found.step)), *_machine(found),
        *([Line(other_remat(found.remat))] if found.remat != "plan" else []),
        *([Line(clocks)] if found.clock_error_s > 0 else []), _explanation(found),
        Line(largest_cause(found), "strong"), *_timeline(found, sides, profile, width), _stages(found),
        *_messages(found), _workers(found), *_memory(found),
    )  # fmt: skip
    return with_hosts(parts, profile)


def _timeline(found: Agreement, sides: Sequence[Spans], profile: Profile | None, width: int) -> Report:
    """Both sides on one scale, and which of the traced steps it is."""
    if not sides:
        return ()
    step = sides[-1].steps[0]
    took = fmt.seconds(step.end_s - step.start_s)
    what = f"measured: step {step.number} of 0 to {found.steps - 1}, which took {took}"
    return (*timeline(sides, profile, width=width), Line(what))


def step_text(step: Compared) -> str:
    """The step time as predicted and as measured, in one line."""
    unit = fmt.time_unit(step.measured_s)
    spread = f"IQR {unit.text(step.iqr_s)} over {fmt.plural(step.samples, 'step')}"
    said = f"step: {unit.text(step.predicted_s)} predicted, {unit.text(step.measured_s)} measured ({spread})"
    if not step.error:
        return said
    return f"{said}: the prediction is {missed_by(step.error)}"


def missed_by(error: float) -> str:
    """How far off a prediction is, as a share of what was measured, in words."""
    return f"{fmt.percent(abs(error))} too {'low' if error < 0 else 'high'}"


def _machine(found: Agreement) -> Report:
    """How far the machine is another than when it was profiled, and what that leaves of the prediction's error."""
    lines = [Line(f"warning: {text}; not all is the model's error", "warning") for text in found.disturbances]
    if found.paced_s is None or not found.step.measured_s or not found.step.predicted_s:
        return tuple(lines)
    change = found.paced_s / found.step.predicted_s - 1
    off = found.paced_s / found.step.measured_s - 1
    said = f"the machine is {_slower(change)} than when it was profiled: the step is predicted to take"
    model = f"the model of the step is {missed_by(off)}"
    if abs(change) < _SAME:
        lines.append(Line(f"the machine is as fast as when it was profiled; {model}"))
    else:
        lines.append(Line(f"{said} {fmt.seconds(found.paced_s)} on it; {model}"))
    for each in found.machines:
        if any(abs(ratio - 1) >= _OTHER for ratio in each.ratios.values()):
            told = ", ".join(f"{what} {_slower(ratio - 1)}" for what, ratio in each.ratios.items())
            lines.append(Line(f"  {each.worker}: {told}"))
    return tuple(lines)


def _slower(change: float) -> str:
    """A change of a time in words."""
    return f"{fmt.percent(abs(change))} {'slower' if change > 0 else 'faster'}"


def other_remat(remat: str) -> str:
    """What a run did with a plan's rematerialisation that is not what the plan says."""
    return f"the run rematerialised {_REMAT[remat]}, not as the plan says"


_REMAT = {
    "always": "every partition: it is priced so",
    "never": "no partition: it is priced so",
    "except_last": "all but the last micro-batch of each step: it is priced as if that one, too",
}


def _explanation(found: Agreement) -> Sheet:
    """From the predicted to the measured step time, one group of figures after the other."""
    why, now = found.explanation, found.step.predicted_s
    unit = fmt.time_unit(found.step.measured_s, now)
    rows = [("predicted", "", unit.show(now))]
    for name, moved in (
        ("forwards, backwards and updates as measured", why.compute_s),
        ("messages as measured", why.transfers_s),
        ("overheads as measured", why.overheads_s),
        ("messages' processor time, taken from actions", why.handling_s),
        ("variation: means, not medians", why.variation_s),
        ("not explained", why.unexplained_s),
    ):
        now += moved
        rows.append((name, _signed(unit, moved), unit.show(now)))
    rows[-1] = (*rows[-1][:2], f"{unit.show(found.step.measured_s)} measured")
    columns = (Column("", "name"), Column(f"+/- {unit.name}"), Column(f"step {unit.name}", "name"))
    return Sheet("where the difference comes from", columns, tuple(rows))


def _signed(unit: fmt.Unit, value: float) -> str:
    text = unit.show(value)
    return text if value < 0 or text == "0" else f"+{text}"


def largest_cause(found: Agreement) -> str:
    """The thing that moves the step time most towards what was measured, in one sentence."""
    measured, why = found.step.measured_s, found.explanation
    assert measured is not None
    whole = measured - found.step.predicted_s
    if abs(whole) < _SAME * measured:
        return "largest cause: none to speak of; the step time is predicted to 1 %"
    cause = next((each for each in why.causes if each.step_s * whole > 0), None)
    unit = fmt.time_unit(measured)
    of = f" of the {_signed(unit, whole)} {unit.name}"
    beside = max(abs(why.unexplained_s), 0.0 if cause is None else abs(cause.step_s))
    if why.variation_s * whole > 0 and abs(why.variation_s) > beside:
        said = "actions and what lies between them vary, and their means are above their medians"
        return f"largest cause: {said}: {_signed(unit, why.variation_s)} {unit.name}{of}"
    if cause is None or abs(why.unexplained_s) > abs(cause.step_s):
        rest = f"{_signed(unit, why.unexplained_s)} {unit.name}, the step differs by {_signed(unit, whole)} {unit.name}"
        return f"most is not explained: {rest}; actions that run together may slow each other"
    if abs(cause.step_s) > abs(whole):
        of = f"; others go the other way, and the step differs by {_signed(unit, whole)} {unit.name}"
    return f"largest cause: {_describe(cause)}: {_signed(unit, cause.step_s)} {unit.name}{of}"


def _describe(cause: Deviation) -> str:
    if cause.group == "overheads":
        lost, said = fmt.seconds(cause.measured_s), fmt.seconds(cause.predicted_s)
        return f"{cause.worker} lost {lost} a step between its actions, where {said} was predicted"
    what = f"{cause.worker}'s {cause.what}" + ("" if cause.stage is None else f" of stage {cause.stage}")
    what = f"messages from {cause.worker} to {cause.target}" if cause.target else what
    change = fmt.against(cause.measured_s, cause.predicted_s)
    if change is None:
        return f"{what} took {fmt.seconds(cause.measured_s)}, and nothing was profiled"
    if change >= 2:
        return f"{what} took {fmt.ratio(change)} as long as profiled"
    return f"{what} took {fmt.percent(abs(change - 1))} {'longer' if change > 1 else 'less'} than profiled"


def _both(unit: fmt.Unit, once: Compared) -> str:
    """In one cell, so that neither is left out without the other."""
    return f"{unit.show(once.predicted_s)} / {unit.show(once.measured_s)}"


def _error(once: Compared) -> str:
    return fmt.points(once.error, sign=True)


def _stages(found: Agreement) -> Sheet:
    """One row per stage: one forward, one backward, and what both add up to in a step."""
    once: dict[tuple[int, str], dict[str, Compared]] = {}
    differences: dict[tuple[int, str], float] = {}
    for each in found.computes:
        if each.stage is not None:
            place = each.stage, each.worker
            once.setdefault(place, {})[each.kind] = each.once
            differences[place] = differences.get(place, 0.0) + each.difference_s
    times = [time for pair in once.values() for each in pair.values() for time in (each.predicted_s, each.measured_s)]
    unit, whole = fmt.time_unit(*times), fmt.time_unit(*differences.values())
    rows = []
    kinds = [kind for kind in _ONCE if any(kind in mine for mine in once.values())]
    for (n, worker), mine in once.items():
        cells = [
            (Column("#"), str(n)),
            (Column("worker", "name"), worker),
            (Column("partitions", "text", rank=4), fmt.ranges(found.plan.stages[n].partitions)),
        ]
        for kind in kinds:
            one = mine.get(kind)
            cells.append((Column(f"{kind} {unit.name}", rank=1), _both(unit, one) if one else ""))
            cells.append((Column("error %", rank=2), _error(one) if one else ""))
        rows.append([*cells, (Column(f"in a step {whole.name}", rank=3), _signed(whole, differences[n, worker]))])
    return Sheet.of("stages: one micro-batch as predicted / measured, and the difference in a step", rows)


def _messages(found: Agreement) -> Report:
    """One row per route; how long a message took is seen only where its receiver waited for it."""
    if not found.routes:
        return ()
    unit = fmt.time_unit(*(time for each in found.routes for time in (each.once.predicted_s, each.once.measured_s)))
    size = fmt.byte_unit(*(each.bytes for each in found.routes))
    rows = [
        (
            (Column("from", "name"), each.route.source),
            (Column("to", "name"), each.route.target),
            (Column("what", "name", rank=2), each.route.payload.value),
            (Column("output", "name", rank=4), f"{each.route.partition}:{each.route.output}"),
            (Column(size.name, rank=3), size.show(each.bytes)),
            (Column(f"predicted {unit.name}"), unit.show(each.once.predicted_s)),
            (Column("measured"), unit.show(each.once.measured_s)),
            (Column("error %"), _error(each.once)),
            (Column("seen", rank=1), f"{each.once.samples} of {each.count * found.steps}"),
        )
        for each in found.routes
    ]
    return (Sheet.of("messages: one way (seen: the receiver waited, so that its arrival is known)", rows),)


def _workers(found: Agreement) -> Sheet:
    """What a worker does beside forwards and backwards, and its memory."""
    updates = {each.worker: each.once for each in found.computes if each.kind == "update"}
    timed = [one for each in found.workers for one in (each.wait, each.overhead, updates[each.worker])]
    unit = fmt.time_unit(*(time for one in timed for time in (one.predicted_s, one.measured_s)))
    memory = fmt.byte_unit(*(size for each in found.workers for size in (each.predicted_bytes, each.measured_bytes)))
    limit = fmt.byte_unit(*(each.capacity_bytes for each in found.workers))
    rows = [
        (
            (Column("worker", "name"), each.worker),
            (Column(f"waits {unit.name}", rank=1), _both(unit, each.wait)),
            (Column(f"overhead {unit.name}", rank=2), _both(unit, each.overhead)),
            (Column(f"update {unit.name}", rank=4), _both(unit, updates[each.worker])),
            (Column(f"peak {memory.name}"), memory.show(each.predicted_bytes)),
            (Column("measured"), memory.show(each.measured_bytes)),
            (Column("error %"), fmt.points(each.memory_error, sign=True)),
            (Column(f"of {limit.name}", rank=3), limit.show(each.capacity_bytes)),
        )
        for each in found.workers
    ]
    return Sheet.of("workers: times of a step as predicted / measured, and the peak of memory", rows)


def _memory(found: Agreement) -> Report:
    over = [each for each in found.workers if each.measured_bytes > 1.05 * each.predicted_bytes]
    if not over:
        return ()
    worst = max(over, key=lambda each: each.measured_bytes - each.predicted_bytes)
    held, said = fmt.size(worst.measured_bytes), fmt.size(worst.predicted_bytes)
    return (Line(f"memory: {worst.worker} held {held}, more than the {said} that were predicted", "warning"),)


def agreement_data(found: Agreement, sides: Sequence[Spans] = ()) -> dict[str, Any]:
    """The same for `--json`."""
    return {
        "kind": "agreement",
        "steps": found.steps,
        "remat": found.remat,
        "clock_error_s": found.clock_error_s,
        "step": _compared(found.step),
        "difference": {**encode(found.explanation), "largest_cause": largest_cause(found)},
        "computes": [
            {
                "kind": each.kind, "stage": each.stage, "worker": each.worker, "count": each.count,
                **_compared(each.once), "difference_s": each.difference_s,
            }
            for each in found.computes
        ],
        "messages": [
            {**encode(each.route), "bytes": each.bytes, "count": each.count * found.steps, **_compared(each.once)}
            for each in found.routes
        ],
        "workers": [
            {
                "worker": each.worker, "wait": _compared(each.wait), "overhead": _compared(each.overhead),
                "predicted_peak_bytes": each.predicted_bytes, "measured_peak_bytes": each.measured_bytes,
                "memory_error": each.memory_error, "capacity_bytes": each.capacity_bytes,
            }
            for each in found.workers
        ],
        "machine": {
            "paced_step_s": found.paced_s, "workers": encode(found.machines),
            "disturbances": list(found.disturbances),
        },
        "timeline": timeline_data(sides),
    }  # fmt: skip


def _compared(once: Compared) -> dict[str, Any]:
    return {**encode(once), "error": once.error}
