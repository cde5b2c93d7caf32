"""The document: a process for each worker and side, predicted above measured, and one for the steps as a whole.

Counters are the memory of a worker over time, by what holds it where that is known, and in all. Arrows are messages,
each from its send to where it was waited for, and on to the action that needed it.

A viewer ties an arrow's points to the slices around them, so each lies inside of its slice, half a microsecond from an
edge:

    send         ├·──────┤ ╲
    receive           ├─────·┤ ╲         s (start) at the send, t (step) at the receive, f (finish) at the forward
    forward                  ├·────┤

An arrow runs forward in time. Where the clocks of two workers disagree by more than a message took, or a send was noted
late, a point that would lie before an earlier one is left out, and the whole arrow where that leaves its send alone.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import count, product
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.export.traceevents import slices
from assigner.export.traceevents.tracks import SlicePlace, Tracks, microseconds
from assigner.files import put
from assigner.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from assigner.schedule.occupancy import Occupancy
    from assigner.schedule.program import Route
    from assigner.validation.spans import Span, Spans

BY_USE, IN_ALL = "memory by use MiB", "memory MiB"
_MIB = 2**20
_Message = tuple[int, int, "Route | None"]
_NEEDED_BY = {"activation": "forward", "gradient": "backward", "tie": "update"}
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
    pids = {(worker, side.side): pid for pid, (worker, side) in enumerate(product(workers, sides), start=2)}
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
        made = list(_arrows(drawn, arrow))
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
        if side.side == "measured":
            mine = [span for span in side.spans if span.worker == worker]
            yield from _measured_memory(mine, self.lead_s, tracks)
        elif held is not None:
            starts = [step.start_s + self.lead_s for step in side.steps]
            yield from _predicted_memory(held, starts, tracks)


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


def _predicted_memory(occupancy: Occupancy, starts_s: Iterable[float], tracks: Tracks) -> Iterator[dict[str, Any]]:
    """What a worker holds by the simulator in steps with these starts: by what it is for, and the sum."""
    state = occupancy.state.total
    for start in starts_s:
        moments = {
            microseconds(start + held.at_s): {
                "state": state, "activations": held.activations, "workspace": held.workspace, "messages": held.messages,
            }
            for held in occupancy.held
        }  # fmt: skip
        for at, parts in moments.items():
            yield _counter(BY_USE, tracks, at, parts)
            yield _counter(IN_ALL, tracks, at, {"held": sum(parts.values())})


def _measured_memory(spans: Sequence[Span], lead_s: float, tracks: Tracks) -> Iterator[dict[str, Any]]:
    """What a worker held at the ends of its actions, where it was read; the picture's 0 lies `lead_s` before theirs."""
    read = {microseconds(each.end_s + lead_s): each.memory_bytes for each in spans if each.memory_bytes is not None}
    for at, held in sorted(read.items()):
        yield _counter(IN_ALL, tracks, at, {"held": held})


def _counter(name: str, tracks: Tracks, at: int, parts: dict[str, float]) -> dict[str, Any]:
    """A figure of a process, which a viewer draws beside its tracks: any of them will do."""
    args, tid = {part: round(size / _MIB, 3) for part, size in parts.items()}, tracks.made[0].tid
    return {"ph": "C", "cat": "memory", "name": name, "pid": tracks.pid, "tid": tid, "ts": at, "args": args}


def _arrows(drawn: Sequence[tuple[Span, SlicePlace]], first: int) -> Iterator[dict[str, Any]]:
    """The points of all arrows of one side, which are numbered from `first` on."""
    sends: dict[_Message, tuple[Span, SlicePlace]] = {}
    computes: dict[tuple[str, int, str, int, int], SlicePlace] = {}
    for span, place in drawn:
        if span.message is None:
            computes[span.worker, span.step, span.kind, span.stage, span.micro_batch] = place
        elif span.kind == "send":
            sends[_message(span)] = span, place
    for span, place in drawn:
        if span.kind != "receive" or _message(span) not in sends:
            continue
        sent, start = sends[_message(span)]
        points = _points(start, place, _need(span, computes))
        if len(points) < 2:
            continue
        assert sent.message is not None
        for n, (at, on) in enumerate(points):
            last = n == len(points) - 1
            yield {
                "ph": "s" if n == 0 else "f" if last else "t", "id": first, "name": sent.message.payload,
                "cat": "message", "pid": on.pid, "tid": on.tid, "ts": at, **({"bp": "e"} if last else {}),
            }  # fmt: skip
        first += 1


def _message(span: Span) -> _Message:
    return span.step, span.micro_batch, span.route


def _need(span: Span, computes: Mapping[tuple[str, int, str, int, int], SlicePlace]) -> SlicePlace | None:
    """Where the action lies that a received message was for."""
    assert span.message is not None
    return computes.get((span.worker, span.step, _NEEDED_BY[span.message.payload], span.stage, span.micro_batch))


def _points(send: SlicePlace, receive: SlicePlace, need: SlicePlace | None) -> list[tuple[float, SlicePlace]]:
    points = [(send.start + 0.5, send)]
    for wanted, place in ((receive.end - 0.5, receive), *(((need.start + 0.5, need),) if need else ())):
        at = max(wanted, points[-1][0])
        if at < place.end:
            points.append((at, place))
    return points
