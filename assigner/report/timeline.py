"""A step as text: a bar for each worker, from left to right in time.

    worker:0  0──1──2──3──   0█████1█████2█████3█████U
    worker:1     0──  0████1──1████2──2████3──3████U

What took the most of a cell's time fills it, and a number begins its micro-batch where there is room for it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.report.sheet import Column, Line, Report, Sheet, host_width
from assigner.schedule.orders import TOGETHER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import Profile
    from assigner.validation.spans import Span, Spans

MOST = 200
"""Columns that a timeline takes at most, and on a terminal of any width at least `LEAST` for its bars."""
LEAST = 24
PIPED = 120
"""Columns where there is no terminal."""

_SIGNS = {
    "backward_input": ("▓", "input part of a backward"), "backward_weight": ("▒", "weight part"),
    "forward": ("─", "forward"), "backward": ("█", "backward"), "recomputes": ("=", "backward with remat"),
    "update": ("U", "update"), "reduce": ("+", "gradients are added up"),
    "gather": ("*", "updated parameters are handed out"),
}  # fmt: skip


def timeline(sides: Sequence[Spans], profile: Profile | None = None, *, width: int) -> Report:
    """Every worker's step; where there are two sides, predicted above measured on one scale. Of each its first step.

    A pipe counts as a terminal of `PIPED` columns; of the profile's hosts, where there are several, `with_hosts` names
    them.
    """
    width = (PIPED if width > 10 * MOST else min(width, MOST)) - host_width(profile)
    end = max(side.steps[0].end_s for side in sides)
    names = sides[0].plan.workers
    beside = max(map(len, names)) + (2 + len("predicted") if len(sides) > 1 else 0) + 2 + len("busy %") + 2
    cells = max(LEAST, width - beside)
    used: set[str] = set()
    rows = []
    for worker in names:
        for side in sides:
            mine = [span for span in side.spans if span.worker == worker and span.message is None and span.step == 0]
            text = bar(mine, end, cells)
            used.update(text)
            name = worker if side is sides[0] else ""
            busy = sum(each.seconds for each in mine if each.kind not in TOGETHER)
            whole = side.steps[0].end_s - side.steps[0].start_s or 1.0
            rows.append((name, *([side.side] if len(sides) > 1 else []), text, fmt.points(busy / whole)))
    title = f"timeline of a step: {cells} columns of {fmt.seconds(end / cells)}"
    columns = (
        Column("worker", "name"), *([Column("", "name")] if len(sides) > 1 else []), Column(_axis(end, cells), "name"),
        Column("busy %"),
    )  # fmt: skip
    legend = ", ".join(f"{sign} {meaning}" for sign, meaning in _SIGNS.values() if sign in used)
    return Sheet(title, columns, tuple(rows)), Line(f"{legend}; a number begins a micro-batch; blank: waits")


def _axis(end_s: float, cells: int) -> str:
    """From 0 to the end; the middle is told where there is room."""
    unit = fmt.time_unit(end_s)
    last, middle = unit.text(end_s), unit.show(end_s / 2)
    half = cells // 2
    return ("0".ljust(half) + middle).ljust(cells - len(last)) + last


def bar(computes: Sequence[Span], end_s: float, cells: int) -> str:
    """One worker's bar of so many cells, up to `end_s`; where a reduction goes on beside an action, that is drawn."""
    shares: list[dict[int, float]] = [defaultdict(float) for _ in range(cells)]  # of each cell, by action
    order = sorted(range(len(computes)), key=lambda n: computes[n].kind in TOGETHER)
    for n in order:
        span = computes[n]
        start, end = (min(max(0.0, at / end_s * cells), cells) if end_s else 0.0 for at in (span.start_s, span.end_s))
        for cell in range(int(start), min(cells, int(end) + 1)):
            part = max(0.0, min(end, cell + 1) - max(start, cell))
            shares[cell][n] += part if span.kind not in TOGETHER else max(0.0, part - sum(shares[cell].values()))
    owners = [max(each, key=lambda n: each[n]) if sum(each.values()) >= 0.5 else None for each in shares]
    kinds = ["recomputes" if each.recomputes else each.kind for each in computes]
    signs = [" " if owner is None else _SIGNS[kinds[owner]][0] for owner in owners]
    for n, span in enumerate(computes):
        label = str(span.micro_batch)
        if span.micro_batch >= 0 and owners.count(n) > len(label):
            first = owners.index(n)
            signs[first : first + len(label)] = label
    return "".join(signs)


def timeline_data(sides: Sequence[Spans]) -> dict[str, Any]:
    """Every action for `--json`, by side, in seconds from the start of the first step that is drawn."""
    return {
        side.side: {"steps": encode(side.steps), "actions": [_action(span) for span in side.spans]} for side in sides
    }


def _action(span: Span) -> dict[str, Any]:
    message = span.message
    return {
        "worker": span.worker, "kind": span.kind, "step": span.step, "stage": span.stage if span.stage >= 0 else None,
        "micro_batch": span.micro_batch if span.micro_batch >= 0 else None, "start_s": span.start_s,
        "end_s": span.end_s, "recomputes": span.recomputes, "memory_bytes": span.memory_bytes,
        "message": None if message is None else {**encode(message), "queued_s": span.queued_s},
    }  # fmt: skip
