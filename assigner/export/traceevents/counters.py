"""Counters: the memory of a worker over time, by what holds it where that is known, and in all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner.export.traceevents.tracks import microseconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from assigner.schedule.occupancy import Occupancy
    from assigner.validation.spans import Span

BY_USE, IN_ALL = "memory by use MiB", "memory MiB"
_MIB = 2**20


def predicted_memory(occupancy: Occupancy, starts_s: Iterable[float], pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """What a worker holds by the simulator: state, activations, workspace, messages, and their sum.

    Args:
        occupancy: The worker's, over one step.
        starts_s: When each step starts.
        pid: The worker's process.
        tid: Any of its tracks.
    """
    state = occupancy.state.total
    for start in starts_s:
        moments = {
            microseconds(start + held.at_s): {
                "state": state, "activations": held.activations, "workspace": held.workspace, "messages": held.messages,
            }
            for held in occupancy.held
        }  # fmt: skip
        for at, parts in moments.items():
            yield _counter(BY_USE, pid, tid, at, parts)
            yield _counter(IN_ALL, pid, tid, at, {"held": sum(parts.values())})


def measured_memory(spans: Sequence[Span], lead_s: float, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """What a worker held at the ends of its actions, where it was read.

    Args:
        spans: The worker's.
        lead_s: How far the picture's 0 lies before the step.
        pid: The worker's process.
        tid: Any of its tracks.
    """
    read = {microseconds(each.end_s + lead_s): each.memory_bytes for each in spans if each.memory_bytes is not None}
    for at, held in sorted(read.items()):
        yield _counter(IN_ALL, pid, tid, at, {"held": held})


def _counter(name: str, pid: int, tid: int, at: int, parts: dict[str, float]) -> dict[str, Any]:
    args = {part: round(size / _MIB, 3) for part, size in parts.items()}
    return {"ph": "C", "cat": "memory", "name": name, "pid": pid, "tid": tid, "ts": at, "args": args}
