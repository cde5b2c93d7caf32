"""What fills each worker's memory at its peak, as a bar of letters and as a table of the same."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.report.sheet import Column, Line, Report, Sheet, foremost
from assigner.schedule.simulate import overfull

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.formats.plan import Plan
    from assigner.formats.prediction import Prediction, WorkerPrediction
    from assigner.formats.profile import Profile

WORKER_LIMIT = 16
"""Workers above which the fullest are shown."""
BAR = 20
"""Characters of a bar."""

PARTS = {
    "parameters": "P", "gradients": "G", "optimizer": "O", "buffers": "B", "activations": "A", "workspace": "W",
    "messages": "M", "reserve": "R",
}  # fmt: skip
"""What a worker's memory holds, with its letter, in the order of the bar; what is left is free."""
_RANKS = {"optimizer": 1, "gradients": 2, "workspace": 3, "buffers": 4, "reserve": 5, "messages": 6}


def contents(worker: WorkerPrediction, reserve_bytes: float | None = None) -> dict[str, float]:
    """Bytes of a worker by what holds them, the reserve too where it is known; `free` below zero: it does not fit."""
    held = {name: getattr(worker.memory, name) for name in PARTS if name != "reserve"}
    if reserve_bytes is not None:
        held["reserve"] = reserve_bytes
    return {**held, "free": worker.capacity_bytes - worker.peak_bytes}


def stacked(held: Mapping[str, float], scale: float, *, width: int = BAR) -> str:
    """A bar of `width` signs, shared out by the largest remainders: letters, then dots up to the end of `scale` bytes.

    The reserve is nobody's use and has no letters; what does not fit into the worker ends the bar in `!`.
    """
    used = {name: max(0.0, size) for name, size in held.items() if name not in ("free", "reserve")}
    whole = max(scale, sum(used.values()))
    if whole <= 0:
        return "." * width
    used["free"] = whole - sum(used.values())
    exact = {name: width * size / whole for name, size in used.items()}
    cells = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: cells[name] - exact[name])[: width - sum(cells.values())]:
        cells[name] += 1
    drawn = "".join(PARTS.get(name, ".") * cells[name] for name in used)
    return drawn if held["free"] >= 0 else drawn[: width - 1] + "!"


def memory_bars(plan: Plan, profile: Profile | None = None, *, everything: bool = False) -> Report:
    """A bar and the figures of each worker; nothing where the plan has no prediction.

    The bars have one scale, to the largest peak: many a model needs a hundredth of its worker's memory, and a bar of
    the whole of that would be empty.
    """
    if plan.predicted is None or not plan.predicted.workers:
        return ()
    whole = plan.predicted.workers
    shown = foremost(whole, None if everything else WORKER_LIMIT, lambda each: -fullness(each))
    held = {each.worker: contents(each, _reserve(profile, each.worker)) for each in shown}
    parts = [name for name in PARTS if any(each.get(name) for each in held.values())]
    unit = fmt.byte_unit(*(each.peak_bytes for each in shown))
    scale = max(each.peak_bytes for each in shown)
    rows = [
        (
            (Column("worker", "name"), worker),
            (Column("", "name"), stacked(each, scale)),
            *((Column(PARTS[name], rank=_RANKS.get(name, 0)), unit.show(each[name])) for name in parts),
            (Column("free"), unit.show(each["free"])),
        )
        for worker, each in held.items()
    ]
    legend = ", ".join(f"{PARTS[name]} {name}" for name in parts)
    title = f"peak memory, {unit.name}: {legend}; a whole bar is the largest peak, {unit.show(scale)}"
    if len(shown) < len(whole):
        title += f"; the {len(shown)} fullest of {len(whole)} workers, -v lists all"
    over = misfit(plan.predicted)
    return (Sheet.of(title, rows), *([over] if over else []))


def misfit(prediction: Prediction) -> Line | None:
    """The fullest of the workers whose memory is too small; None: all fit."""
    over = overfull(prediction)
    if not over:
        return None
    worst = max(over, key=fullness)
    need, has = fmt.size(worst.peak_bytes), fmt.size(worst.capacity_bytes)
    more = f", and {fmt.plural(len(over) - 1, 'more worker')}" if len(over) > 1 else ""
    return Line(f"does not fit: {worst.worker} needs {need} and has {has}{more}", "warning")


def _reserve(profile: Profile | None, worker: str) -> float | None:
    return profile.worker[worker].reserve_bytes if profile and worker in profile.worker else None


def fullness(worker: WorkerPrediction) -> float:
    """Peak against capacity; above 1 it does not fit."""
    if worker.capacity_bytes > 0:
        return worker.peak_bytes / worker.capacity_bytes
    return 0.0 if worker.peak_bytes == 0 else math.inf


def fullness_text(worker: WorkerPrediction) -> str:
    """The same in percent; what does not fit is marked."""
    share = fullness(worker)
    return fmt.points(share) + (" !" if share > 1 else "")


def memory_data(plan: Plan, profile: Profile | None = None) -> dict[str, Any]:
    """The same for `--json`: bytes by worker, all of them."""
    return {name: contents(each, _reserve(profile, name)) for name, each in plan.predicted_workers.items()}
