"""The rules of the Trace Event Format, as its two viewers keep them; nothing here knows how assigner writes a file.

Trace Event Format (Duca, Sinclair; Google 2016)     phases, fields, that slices of a thread nest, flows
Perfetto, json_trace_parser and slice_tracker        microseconds become nanoseconds, cut off; an end behind that of
                                                     the slice around it is an error
Chrome's Trace Viewer (catapult), slice_group        ends are compared by whole microseconds; a flow's point is tied
                                                     to the one slice that it lies in; unknown colours are an error
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

COLOURS = frozenset({
    "thread_state_uninterruptible", "thread_state_iowait", "thread_state_running", "thread_state_runnable",
    "thread_state_sleeping", "thread_state_unknown", "background_memory_dump", "light_memory_dump",
    "detailed_memory_dump", "vsync_highlight_color", "generic_work", "good", "bad", "terrible", "black", "grey",
    "white", "yellow", "olive", "rail_response", "rail_animation", "rail_idle", "rail_load", "startup",
})  # fmt: skip
"""Colours that Chrome has by name (catapult, tracing/base/color_scheme.html), but for some special ones."""

Event = dict[str, Any]


@dataclass
class Read:
    """A document as a viewer sees it.

    Args:
        other: What is said of the whole.
        slices: By process and thread name.
        counters: By process and counter name.
        arrows: The slices that each arrow leads through.
        order: Names of processes from top to bottom.
        threads: Of each process, names from top to bottom.
    """

    other: dict[str, Any]
    slices: dict[tuple[str, str], list[Event]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[tuple[str, str], list[Event]] = field(default_factory=lambda: defaultdict(list))
    arrows: list[list[Event]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    threads: dict[str, list[str]] = field(default_factory=dict)


def read_trace_events(text: str) -> Read:
    """Read a document by the rules; AssertionError: it breaks one."""
    document = json.loads(text)
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert event["ph"] in set("MXCstf")
        assert all(type(event[key]) is int and event[key] > 0 for key in ("pid", "tid"))
        if event["ph"] != "M":
            assert math.isfinite(event["ts"])
            assert event["ts"] >= 0
    processes, threads = _names(events)
    found = Read(document["otherData"])
    about: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            about[event["pid"]].append(event)
    found.threads = {processes[pid]: _threads(mine) for pid, mine in about.items()}
    found.order = [processes[pid] for pid in sorted(processes, key=lambda pid: _sort_index(about[pid]))]
    by_thread: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append(event)
            found.slices[processes[event["pid"]], threads[event["pid"], event["tid"]]].append(event)
        elif event["ph"] == "C":
            found.counters[processes[event["pid"]], event["name"]].append(event)
    for slices in by_thread.values():
        _check_slices(slices)
    for values in found.counters.values():
        _check_counter(values)
    found.arrows = _arrows(events, by_thread)
    return found


def _names(events: list[Event]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    """Every process and every thread that has an event has one name; no two processes share a thread's number."""
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in events:
        if event["name"] == "process_name":
            assert event["pid"] not in processes
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in threads
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    assert len(set(processes.values())) == len(processes)
    assert len({tid for _, tid in threads}) == len(threads)
    assert {event["pid"] for event in events} == set(processes)
    assert {(event["pid"], event["tid"]) for event in events} == set(threads)
    return processes, threads


def _sort_index(about: list[Event]) -> int:
    (index,) = (event["args"]["sort_index"] for event in about if event["name"] == "process_sort_index")
    assert type(index) is int
    return index


def _threads(about: list[Event]) -> list[str]:
    """Of one process, from top to bottom."""
    names = {event["tid"]: event["args"]["name"] for event in about if event["name"] == "thread_name"}
    index = {event["tid"]: event["args"]["sort_index"] for event in about if event["name"] == "thread_sort_index"}
    assert index.keys() == names.keys()
    assert len(set(index.values())) == len(index)
    assert len(set(names.values())) == len(names)
    return [names[tid] for tid in sorted(names, key=lambda tid: index[tid])]


def _check_slices(slices: list[Event]) -> None:
    """One behind the other, in either viewer's rounding, in the order of the file."""
    for event in slices:
        assert math.isfinite(event["dur"])
        assert event["dur"] > 0
        assert event["cname"] in COLOURS
        assert event["cat"]
        assert isinstance(event["args"], dict)
    for before, after in pairwise(slices):
        end_ns = int(before["ts"] * 1000.0) + int(before["dur"] * 1000.0)
        assert end_ns <= int(after["ts"] * 1000.0)
        ends, starts = (round((at / 1000.0) * 1000.0) for at in (before["ts"] + before["dur"], after["ts"]))
        assert ends <= starts
        assert round(after["ts"]) < round(after["ts"] + after["dur"])


def _check_counter(values: list[Event]) -> None:
    """Forward in time, always the same series, each a number that is not negative."""
    for before, after in pairwise(values):
        assert before["ts"] <= after["ts"]
        assert before["args"].keys() == after["args"].keys()
    for event in values:
        assert all(math.isfinite(value) and value >= 0 for value in event["args"].values())


def _arrows(events: list[Event], slices: dict[tuple[int, int], list[Event]]) -> list[list[Event]]:
    """Each arrow starts once and ends once, runs forward in time and in the file, every point inside of one slice."""
    flows: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["cat"], event["name"], event["id"]].append(event)
    numbers = [number for _, _, number in flows]
    assert len(set(numbers)) == len(numbers)
    found = []
    for points in flows.values():
        phases = "".join(event["ph"] for event in points)
        assert phases[0] == "s"
        assert phases[-1] == "f"
        assert set(phases[1:-1]) <= {"t"}
        assert points[-1]["bp"] == "e"
        assert all(before["ts"] <= after["ts"] for before, after in pairwise(points))
        found.append([_around(event, slices) for event in points])
    return found


def _around(point: Event, slices: dict[tuple[int, int], list[Event]]) -> Event:
    """The one slice of the point's thread that it lies inside of."""
    mine = slices[point["pid"], point["tid"]]
    (found,) = (each for each in mine if each["ts"] < point["ts"] < each["ts"] + each["dur"])
    return found
