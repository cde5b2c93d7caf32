"""The critical path: the chain of actions and messages without a gap that makes the step as long as it is.

Walked from the step's last action to its start: what begins the moment that something else ends was waiting for it. An
action waits for the one before it on its worker or for a message; a message for the action that makes it or for the one
before it on its link. The simulator computes a start as the largest of those ends, so the two are the same number.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.schedule.simulate import Timeline

Where = tuple[str, ...]
"""A worker, or the two ends of a link."""


def critical_path(timeline: Timeline) -> tuple[int, ...]:
    """Positions of the path's events in the timeline, the first one first.

    Args:
        timeline: What was simulated; its events stand behind all that they wait for.
    """
    free: dict[tuple[str, float], int] = {}  # by worker and moment: what it was busy with until then
    made: dict[tuple[str, float], int] = {}
    idle: dict[tuple[str, str, float], int] = {}  # by link and moment: the message that was on it until then
    there: dict[tuple[str, float], int] = {}
    before: list[int | None] = []
    last: int | None = None
    for n, event in enumerate(timeline.events):
        worker, route, start, end = event.worker, event.action.route, event.start_s, event.end_s
        if route is None:
            before.append(free.get((worker, start), there.get((worker, start))))
            free[worker, end + event.busy_s] = made[worker, end] = n
            last = n if last is None or end > timeline.events[last].end_s else last
        else:
            link = route.source, route.target
            before.append(made.get((worker, start), idle.get((*link, start))))
            idle[*link, end] = there[route.target, end] = n
    path = []
    while last is not None:
        path.append(last)
        last = before[last]
    return tuple(reversed(path))


def time_on_path(timeline: Timeline) -> dict[tuple[str, Where], list[float]]:
    """Seconds of the path's actions and messages, by what and where they are."""
    spent: dict[tuple[str, Where], list[float]] = defaultdict(list)
    path = [timeline.events[n] for n in critical_path(timeline)]
    for event in path:
        route = event.action.route
        what = event.action.kind.value if route is None else f"{route.payload} message"
        where = (event.worker,) if route is None else (route.source, route.target)
        spent[what, where].append(event.end_s - event.start_s)
    for event, following in pairwise(path):
        if event.busy_s and event.worker == following.worker and following.action.route is None:
            spent["busy with messages", (event.worker,)].append(event.busy_s)
    return spent


def path_shares(timeline: Timeline) -> Mapping[Where, float]:
    """The share of the step that the path spends on each worker and each link; all of them add up to 1."""
    found: dict[Where, float] = defaultdict(float)
    for (_, where), times in time_on_path(timeline).items():
        found[where] += sum(times) / (timeline.step_s or 1.0)
    return found
