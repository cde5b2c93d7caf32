"""A step in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Source of the format: Nat Duca, Dan Sinclair, Trace Event Format (Google, 2016), and how Perfetto's importer reads it.

The document has a process for each worker and side, predicted above measured, and one for the steps as a whole.
Counters are the memory of a worker over time, by what holds it where that is known, and in all. Arrows are messages,
each from its send to where it was waited for, and on to the action that needed it.

A viewer ties an arrow's points to the slices around them, so each lies inside of its slice, half a microsecond from an
edge:

    send         ├·──────┤ ╲
    receive           ├─────·┤ ╲         s (start) at the send, t (step) at the receive, f (finish) at the forward
    forward                  ├·────┤

An arrow runs forward in time. Where the clocks of two workers disagree by more than a message took, or a send was noted
late, a point that would lie before an earlier one is left out, and the whole arrow where that leaves its send alone.

Slices lie on tracks where none crosses another, on a grid of time that no viewer rounds. The format counts in
microseconds, with a fraction if one likes. Perfetto turns them into whole nanoseconds and cuts off what is below, so
that neighbours may cross by one; the Trace Viewer of Chrome compares ends by whole microseconds, so that shorter slices
seem to lie in each other. On whole microseconds both see what is meant. A slice takes at least one; its exact time is
in its arguments. One that begins while all tracks of its name are busy gets a further track:

    sends -> worker:1       ████ 0 ████    ████ 2 ████
    sends -> worker:1 (2)        ████ 1 ████
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import count, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from assigner import formatting as fmt
from assigner.files import put
from assigner.location import rank_name
from assigner.schedule.orders import TOGETHER
from assigner.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from assigner.formats.plan import Plan
    from assigner.schedule.occupancy import Occupancy
    from assigner.schedule.program import Route
    from assigner.validation.spans import Span, Spans

BY_USE, IN_ALL = "memory by use MiB", "memory MiB"
_MIB = 2**20
_Message = tuple[int, int, "Route | None"]
_NEEDED_BY = {"activation": "forward", "gradient": "backward", "tie": "update"}
_ORDER = {phase: n for n, phase in enumerate("MXCstf")}
"""Of events at one time: slices before the arrows that are tied to them."""
_SLACK = 20
"""Microseconds: neighbours that cross by no more, since a slice takes at least one, are set one behind the other."""
_COLOURS = {
    "forward": "rail_response",
    "backward": "rail_load",
    "backward_input": "rail_load",
    "backward_weight": "good",
    "recomputing backward": "thread_state_running",
    "update": "detailed_memory_dump",
    "send": "thread_state_iowait",
    "receive": "grey",
    "reduce": "rail_animation",
    "gather": "rail_idle",
}
"""By kind: blue, green, green, dark green, light green, violet, orange, grey, olive, light blue.

Names that chrome://tracing knows; Perfetto makes colours of its own from the slice's name without its numbers. So the
same kind of action has the same colour everywhere in both.
"""
_Key = tuple[str, str, int, int, int, str, str, int]
"""What makes an action the same one on both sides: worker, kind, step, stage, micro-batch, payload, output."""


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
    lead_s = max(0.0, -min((span.start_s for side in sides for span in side.spans), default=0.0))
    numbers, arrows = count(1), count(1)
    workers = list(dict.fromkeys(span.worker for side in sides for span in side.spans))
    pids = {(worker, side.side): pid for pid, (worker, side) in enumerate(product(workers, sides), start=2)}
    held = {each.worker: each for each in memory}
    seconds: dict[str, dict[_Key, float]] = {side.side: _seconds(side) for side in sides}
    events = list(_steps(sides, _Tracks(1, numbers, lead_s)))
    for side in sides:
        beside = next((each.side for each in sides if each is not side), "")
        drawn: list[tuple[Span, _SlicePlace]] = []
        for worker in workers:
            tracks = _Tracks(pids[worker, side.side], numbers, lead_s)
            mine = [(span, _place(tracks, span)) for span in side.spans if span.worker == worker]
            drawn += mine
            limit = None if capacity is None else capacity.get(worker)
            label = None if limit is None else f"{fmt.size(limit)} of memory"
            events += _process(tracks, f"{worker} {side.side}", label=label)
            events += [_action(span, place, side, seconds.get(beside, {}), beside) for span, place in mine]
            if side.side == "measured":
                events += _measured_memory([span for span, _ in mine], tracks)
            elif worker in held:
                events += _predicted_memory(held[worker], [step.start_s for step in side.steps], tracks)
        events += _arrows(drawn, arrows)
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


class _SlicePlace(NamedTuple):
    """Where a slice lies; `start` and `end` in microseconds, at least one apart."""

    pid: int
    tid: int
    start: int
    end: int


class _Tracks:
    """The tracks of one process, made as they are needed, each with the next of some numbers.

    Its time is 0 where the first thing of all sides happens, which may be `lead_s` before the steps' common start.
    """

    def __init__(self, pid: int, numbers: Iterator[int], lead_s: float) -> None:
        self.pid, self._numbers, self._lead_s = pid, numbers, lead_s
        self.made: list[tuple[int, str, int]] = []  # its number, which no other process has, its name, and its place
        self._free: dict[str, list[list[int]]] = defaultdict(list)  # by name: [tid, when it is free]

    def at(self, start_s: float, later_s: float = 0.0) -> int:
        """A time in microseconds."""
        return round(1e6 * (start_s + self._lead_s + later_s))

    def place(self, name: str, order: int, start_s: float, end_s: float) -> _SlicePlace:
        """Put a slice on a track that stands where `order` says; slices come in the order of their starts."""
        start, end, rows = self.at(start_s), self.at(end_s), self._free[name]
        row = next((each for each in rows if start >= each[1] - _SLACK), None)
        if row is None:
            row = [next(self._numbers), start]
            rows.append(row)
            self.made.append((row[0], name if len(rows) == 1 else f"{name} ({len(rows)})", order))
        start = max(start, row[1])
        row[1] = max(end, start + 1)
        return _SlicePlace(self.pid, row[0], start, row[1])


def _place(tracks: _Tracks, span: Span) -> _SlicePlace:
    """Compute above waiting above reductions above each link."""
    if span.kind in TOGETHER:
        name, order = ("adds up gradients" if span.kind == "reduce" else "hands out parameters"), 2
    elif span.message is None:
        name, order = "compute", 0
    elif span.kind == "receive":
        name, order = "waits for messages", 1
    else:
        name, order = f"sends -> {rank_name(span.message.peer)}", 3
    return tracks.place(name, order, span.start_s, span.end_s)


def _action(span: Span, place: _SlicePlace, side: Spans, other_s: Mapping[_Key, float], other: str) -> dict[str, Any]:
    """A slice, which can be filtered by its kind or payload, and by its side."""
    args = _details(span, side.plan, other_s, other)
    category = f"{span.message.payload if span.message else span.kind},{side.side}"
    colour = _COLOURS["recomputing backward" if span.recomputes else span.kind]
    return _slice(place, _slice_name(span, side.plan), category, args, cname=colour)


def _seconds(side: Spans) -> dict[_Key, float]:
    """What each action took, a reduction all its buckets."""
    found: dict[_Key, float] = defaultdict(float)
    for span in side.spans:
        found[_key(span)] += span.seconds
    return found


def _key(span: Span) -> _Key:
    what = (span.message.payload, span.message.partition, span.message.output) if span.message else ("", "", 0)
    peer = f" {span.message.peer}" if span.message else ""
    return span.worker, span.kind + peer, span.step, span.stage, span.micro_batch, *what


def _slice_name(span: Span, plan: Plan) -> str:
    """`forward 3`, `backward 3 (+remat)`, `send 3: activation block.2 -> worker:1`, `update`.

    The partition that makes a value has the output's number behind it where that is not the first.
    """
    number = f" {span.micro_batch}" if span.micro_batch >= 0 else ""
    if span.message is not None:
        to, message = "->" if span.kind == "send" else "<-", span.message
        output = f"{message.partition}:{message.output}" if message.output else message.partition
        return f"{span.kind}{number}: {message.payload} {output} {to} {rank_name(message.peer)}"
    several = span.stage >= 0 and (len(plan.held[span.worker]) > 1 or span.kind in TOGETHER)
    where = f" of stage {span.stage}" if several else ""
    return f"{span.kind}{number}{where}{' (+remat)' if span.recomputes else ''}"


def _details(span: Span, plan: Plan, other_s: Mapping[_Key, float], other: str) -> dict[str, Any]:
    """What is said of an action when it is clicked; `other_s`: of the other side, of a reduction of all its buckets."""
    found: dict[str, Any] = {"seconds": _exact(span.seconds)}
    seconds = other_s.get(_key(span))
    if seconds is not None:
        found[f"{other}_seconds"] = _exact(seconds)
    if span.micro_batch >= 0:
        found["micro_batch"] = span.micro_batch
    if span.stage >= 0:
        found["stage"] = span.stage
    return found | (_computed(span, plan) if span.message is None else _moved(span))


def _computed(span: Span, plan: Plan) -> dict[str, Any]:
    if span.stage < 0:
        names = [name for n in plan.held[span.worker] for name in plan.stages[n].partitions]
        return {"partitions": fmt.ranges(names)}
    stage = plan.stages[span.stage]
    again = {"rematerialised": fmt.ranges(stage.rematerialise)} if span.recomputes else {}
    return {"partitions": fmt.ranges(stage.partitions), **again}


def _moved(span: Span) -> dict[str, Any]:
    message, route = span.message, span.route
    assert message is not None
    assert route is not None
    found = {
        "payload": message.payload, "output": f"{message.partition}:{message.output}", "bytes": message.bytes,
        "from": route.source, "to": route.target,
    }  # fmt: skip
    return found | ({"queued_seconds": _exact(span.queued_s)} if span.kind == "send" else {})


def _exact(seconds: float) -> float:
    """Without the digits that float arithmetic leaves behind."""
    return float(f"{seconds:.9g}")


def _steps(sides: Sequence[Spans], tracks: _Tracks) -> Iterator[dict[str, Any]]:
    """The steps as a whole: how much longer or shorter one side is than the other."""
    for order, side in enumerate(sides):
        for step in side.steps:
            place, long = tracks.place(side.side, order, step.start_s, step.end_s), step.end_s - step.start_s
            number = f" {step.number}" if side.side == "measured" or len(side.steps) > 1 else ""
            name = f"step{number}: {fmt.seconds(long)} {side.side}"
            yield _slice(place, name, f"step,{side.side}", {"step": step.number, "seconds": long}, cname="generic_work")
    yield from _process(tracks, "steps")


def _slice(place: _SlicePlace, name: str, category: str, args: Mapping[str, Any], *, cname: str) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": place.pid, "tid": place.tid,
        "ts": place.start, "dur": place.end - place.start, "cname": cname, "args": args,
    }  # fmt: skip


def _process(tracks: _Tracks, name: str, *, label: str | None = None) -> Iterator[dict[str, Any]]:
    """The name and the place of a process and of its tracks."""
    first = tracks.made[0][0]
    yield _about(tracks.pid, first, "process_name", name=name)
    yield _about(tracks.pid, first, "process_sort_index", sort_index=tracks.pid)
    if label:
        yield _about(tracks.pid, first, "process_labels", labels=label)
    for n, (tid, row, _) in enumerate(sorted(tracks.made, key=itemgetter(2, 1))):
        yield _about(tracks.pid, tid, "thread_name", name=row)
        yield _about(tracks.pid, tid, "thread_sort_index", sort_index=n)


def _about(pid: int, tid: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _predicted_memory(occupancy: Occupancy, starts_s: Iterable[float], tracks: _Tracks) -> Iterator[dict[str, Any]]:
    """What a worker holds by the simulator in steps with these starts: by what it is for, and the sum."""
    state = occupancy.state.total
    for start_s in starts_s:
        moments = {
            tracks.at(start_s, held.at_s): {
                "state": state, "activations": held.activations, "workspace": held.workspace, "messages": held.messages,
            }
            for held in occupancy.held
        }  # fmt: skip
        for at, parts in moments.items():
            yield _counter(BY_USE, tracks, at, parts)
            yield _counter(IN_ALL, tracks, at, {"held": sum(parts.values())})


def _measured_memory(spans: Sequence[Span], tracks: _Tracks) -> Iterator[dict[str, Any]]:
    """What a worker held at the ends of its actions, where it was read."""
    read = {tracks.at(each.end_s): each.memory_bytes for each in spans if each.memory_bytes is not None}
    for at, held in sorted(read.items()):
        yield _counter(IN_ALL, tracks, at, {"held": held})


def _counter(name: str, tracks: _Tracks, at: int, parts: dict[str, float]) -> dict[str, Any]:
    """A figure of a process, which a viewer draws beside its tracks: any of them will do."""
    args, tid = {part: round(size / _MIB, 3) for part, size in parts.items()}, tracks.made[0][0]
    return {"ph": "C", "cat": "memory", "name": name, "pid": tracks.pid, "tid": tid, "ts": at, "args": args}


def _arrows(drawn: Sequence[tuple[Span, _SlicePlace]], numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """The points of all arrows of one side."""
    sends: dict[_Message, _SlicePlace] = {}
    computes: dict[tuple[str, int, str, int, int], _SlicePlace] = {}
    for span, place in drawn:
        if span.message is None:
            computes[span.worker, span.step, span.kind, span.stage, span.micro_batch] = place
        elif span.kind == "send":
            sends[_message(span)] = place
    for span, place in drawn:
        if span.message is None or span.kind != "receive" or _message(span) not in sends:
            continue
        need = computes.get((span.worker, span.step, _NEEDED_BY[span.message.payload], span.stage, span.micro_batch))
        points = _points(sends[_message(span)], place, need)
        if len(points) < 2:
            continue
        number = next(numbers)
        for n, (at, on) in enumerate(points):
            last = n == len(points) - 1
            yield {
                "ph": "s" if n == 0 else "f" if last else "t", "id": number, "name": span.message.payload,
                "cat": "message", "pid": on.pid, "tid": on.tid, "ts": at, **({"bp": "e"} if last else {}),
            }  # fmt: skip


def _message(span: Span) -> _Message:
    return span.step, span.micro_batch, span.route


def _points(send: _SlicePlace, receive: _SlicePlace, need: _SlicePlace | None) -> list[tuple[float, _SlicePlace]]:
    points = [(send.start + 0.5, send)]
    for wanted, place in ((receive.end - 0.5, receive), *(((need.start + 0.5, need),) if need else ())):
        at = max(wanted, points[-1][0])
        if at < place.end:
            points.append((at, place))
    return points
