"""The document: a process for each worker and side, predicted above measured, and one for the steps as a whole."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.export.traceevents import slices
from assigner.export.traceevents.arrows import arrows
from assigner.export.traceevents.counters import measured_memory, predicted_memory
from assigner.export.traceevents.tracks import SlicePlace, Tracks, microseconds
from assigner.files import put
from assigner.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from assigner.schedule.occupancy import Occupancy
    from assigner.validation.spans import Span, Spans

_ORDER = {phase: n for n, phase in enumerate("MXCstf")}
"""Of events at one time: slices before the arrows that are tied to them."""


def trace_events(
    sides: Sequence[Spans],
    memory: Sequence[Occupancy] = (),
    *,
    capacity: Mapping[str, float] | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Spans and memory as a document of the Trace Event Format.

    Args:
        sides: What was predicted, what was measured, or both; of the same plan.
        memory: By worker, over one predicted step; bytes.
        capacity: Of each worker, in bytes; it stands beside the worker's name.
        about: What else is known: the files that it comes from.

    Returns:
        An object for `json.dumps`: events sorted by time, in microseconds from the first thing that happens.
    """
    picture = _Picture(sides)
    numbers = count(1)
    workers = list(dict.fromkeys(span.worker for side in sides for span in side.spans))
    pids = {(worker, side.side): pid for pid, (worker, side) in enumerate(_pairs(workers, sides), start=2)}
    held = {each.worker: each for each in memory}
    events = list(_steps(picture, numbers))
    arrow = 1
    for side in sides:
        drawn: list[tuple[Span, SlicePlace]] = []
        for worker in workers:
            tracks = Tracks(pids[worker, side.side], numbers)
            mine = [(span, picture.place(tracks, span)) for span in side.spans if span.worker == worker]
            drawn += mine
            limit = None if capacity is None else capacity.get(worker)
            label = None if limit is None else f"{fmt.size(limit)} of memory"
            events += _process(tracks, f"{worker} {side.side}", label=label)
            events += picture.slices(side, mine)
            events += picture.memory(side, worker, tracks, held.get(worker))
        made = list(arrows(drawn, arrow))
        arrow += sum(event["ph"] == "s" for event in made)
        events += made
    events.sort(key=lambda event: (event.get("ts", -1), _ORDER[event["ph"]]))
    step_s = {f"{side.side}_step_seconds": [step.end_s - step.start_s for step in side.steps] for side in sides}
    other = {"made_by": f"assigner {__version__}", **(about or {}), **step_s}
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": other}


def save_trace_events(document: Mapping[str, Any], path: Path, *, force: bool = False) -> int:
    """Write a document, packed where the name ends in `.gz`.

    Returns:
        The file's size in bytes.

    Raises:
        UsageError: the file exists and `force` is not given, or the folder does not exist.
    """
    content = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    put(path, content, force=force)
    return len(content)


def _pairs(workers: Sequence[str], sides: Sequence[Spans]) -> Iterator[tuple[str, Spans]]:
    """Each worker's sides below each other."""
    for worker in workers:
        for side in sides:
            yield worker, side


class _Picture:
    """All sides on one clock.

    Its 0 is where the first thing happens, which may be a little before the steps' common start.
    """

    def __init__(self, sides: Sequence[Spans]) -> None:
        self.sides = sides
        self.lead_s = max(0.0, -min((span.start_s for side in sides for span in side.spans), default=0.0))
        self.seconds: dict[str, dict[slices.Key, float]] = {side.side: defaultdict(float) for side in sides}
        for side in sides:
            for span in side.spans:
                self.seconds[side.side][slices.key(span)] += span.seconds

    def place(self, tracks: Tracks, span: Span) -> SlicePlace:
        """Where a span lies."""
        name, order = slices.track(span)
        return tracks.place(
            name, order, microseconds(span.start_s + self.lead_s), microseconds(span.end_s + self.lead_s)
        )

    def slices(self, side: Spans, drawn: Sequence[tuple[Span, SlicePlace]]) -> Iterator[dict[str, Any]]:
        """The slices of one worker."""
        other = next((each.side for each in self.sides if each is not side), "")
        for span, place in drawn:
            args = slices.details(span, side.plan, self.seconds.get(other, {}), other)
            name, category = slices.slice_name(span, side.plan), slices.category(span, side.side)
            yield _slice(place, name, category, args, cname=slices.colour(span))

    def memory(self, side: Spans, worker: str, tracks: Tracks, held: Occupancy | None) -> Iterator[dict[str, Any]]:
        """The counters of one worker."""
        tid = tracks.made[0].tid
        if side.side == "measured":
            mine = [span for span in side.spans if span.worker == worker]
            yield from measured_memory(mine, self.lead_s, tracks.pid, tid)
        elif held is not None:
            starts = [step.start_s + self.lead_s for step in side.steps]
            yield from predicted_memory(held, starts, tracks.pid, tid)


def _steps(picture: _Picture, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """The steps as a whole: how much longer or shorter one side is than the other."""
    tracks = Tracks(1, numbers)
    for order, side in enumerate(picture.sides):
        for step in side.steps:
            start, end = (microseconds(at + picture.lead_s) for at in (step.start_s, step.end_s))
            place = tracks.place(side.side, order, start, end)
            long = step.end_s - step.start_s
            number = f" {step.number}" if side.side == "measured" or len(side.steps) > 1 else ""
            name = f"step{number}: {fmt.seconds(long)} {side.side}"
            yield _slice(place, name, f"step,{side.side}", {"step": step.number, "seconds": long}, cname="generic_work")
    yield from _process(tracks, "steps")


def _slice(place: SlicePlace, name: str, category: str, args: Mapping[str, Any], *, cname: str) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": place.pid, "tid": place.tid,
        "ts": place.start, "dur": place.end - place.start, "cname": cname, "args": args,
    }  # fmt: skip


def _process(tracks: Tracks, name: str, *, label: str | None = None) -> Iterator[dict[str, Any]]:
    """The name and the place of a process and of its tracks."""
    first = tracks.made[0].tid
    yield _about(tracks.pid, first, "process_name", name=name)
    yield _about(tracks.pid, first, "process_sort_index", sort_index=tracks.pid)
    if label:
        yield _about(tracks.pid, first, "process_labels", labels=label)
    for n, track in enumerate(sorted(tracks.made, key=lambda each: (each.order, each.name))):
        yield _about(tracks.pid, track.tid, "thread_name", name=track.name)
        yield _about(tracks.pid, track.tid, "thread_sort_index", sort_index=n)


def _about(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
