"""The critical path: the chain of actions and messages without a gap that makes the step as long as it is.

Walked from the step's last action to its start: what begins the moment that something else ends was waiting for it. An
action waits for the one before it on its worker or for a message; a message for the action that makes it or for the one
before it on its link, or for the one before it on the wire that links share, whose end it need not wait for. The
simulator computes a start as the largest of those moments, so the two are the same number.

A reduction begins when the last of its workers does, or when the one before it on one of them has ended; an update
waits for those of its worker. So does a gathering of updated parameters, for which nothing waits but the step's end.
The path goes through the event of the worker that was last.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

from assigner.schedule.orders import CALLED, TOGETHER, ActionKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assigner.schedule.simulate import Timeline

Where = tuple[str, ...]
"""A worker, the two ends of a link, or what the workers of a stage do together."""


def critical_path(timeline: Timeline) -> tuple[int, ...]:
    """Positions of the path's events in the timeline, each behind all that it waits for; the first one first."""
    free: dict[tuple[str, float], int] = {}  # by worker and moment: what it was busy with until then
    made: dict[tuple[str, float], int] = {}
    idle: dict[tuple[str, str, float], int] = {}  # by link and moment: the message that was on it until then
    there: dict[tuple[str, float], int] = {}
    together: dict[tuple[int, int], list[int]] = defaultdict(list)  # by what and stage: on each of its workers
    before: list[int | None] = []
    last: int | None = None
    for n, event in enumerate(timeline.events):
        worker, route, start, end = event.worker, event.action.route, event.start_s, event.end_s
        if event.action.kind in TOGETHER:
            before.append(free.get((worker, start)))
            free[worker, start + event.busy_s] = made[worker, start] = n
            together[TOGETHER.index(event.action.kind), -event.action.stage].append(n)
        elif route is None:
            before.append(free.get((worker, start), there.get((worker, start))))
            free[worker, end + event.busy_s] = made[worker, end] = n
            last = n if last is None or end > timeline.events[last].end_s else last
        else:
            link = route.source, route.target
            before.append(made.get((worker, start), idle.get((*link, start))))
            idle[*link, end] = there[route.target, end] = n
    _wait_for_wires(timeline, before)
    _wait_together(timeline, together, before)
    for mine in together.values():  # behind the updates: parameters that workers have updated for each other
        latest = max(mine, key=lambda n: timeline.events[n].start_s)
        if last is None or timeline.events[latest].end_s > timeline.events[last].end_s:
            last = latest
    path = []
    while last is not None:
        path.append(last)
        last = before[last]
    return tuple(reversed(path))


def _wait_for_wires(timeline: Timeline, before: list[int | None]) -> None:
    """Fill in what waited for a wire: a message that nothing else held up, for the one that had the wire last."""
    on: dict[int, list[int]] = defaultdict(list)
    for n, event in enumerate(timeline.events):
        route = event.action.route
        wire = route and timeline.wires.get((route.source, route.target))
        if wire:
            on[wire[0]].append(n)
    for mine in on.values():
        mine.sort(key=lambda n: (timeline.events[n].start_s, timeline.events[n].end_s))
        for earlier, n in pairwise(mine):
            if before[n] is None:
                before[n] = earlier


def _wait_together(timeline: Timeline, together: Mapping[tuple[int, int], list[int]], before: list[int | None]) -> None:
    """Fill in what waited for a reduction or a gathering: an update, or the next one that a worker has a part in."""
    events = timeline.events
    ended: dict[tuple[str, float], int] = {}  # by worker and moment: what ended then
    for key in sorted(together):  # as all workers begin them
        mine = together[key]
        last = max(mine, key=lambda n: events[n].start_s)
        earlier = [ended[each] for each in ended if each[0] in {events[n].worker for n in mine}]
        latest = max(earlier, key=lambda n: events[n].end_s, default=last)
        if events[last].start_s < events[latest].end_s < events[last].end_s:
            before[last] = latest
        ended |= {(events[n].worker, events[n].end_s): last for n in mine}
    for n, event in enumerate(events):
        if event.action.kind is ActionKind.UPDATE:
            before[n] = ended.get((event.worker, event.start_s), before[n])


def time_on_path(timeline: Timeline) -> dict[tuple[str, Where], list[float]]:
    """Seconds of the path's actions and messages, by what and where they are."""
    spent: dict[tuple[str, Where], list[float]] = defaultdict(list)
    path = [timeline.events[n] for n in critical_path(timeline)]
    reached = 0.0
    for event, following in zip_longest(path, path[1:]):
        route, action = event.action.route, event.action
        what = action.kind.value if route is None else f"{route.payload} message"
        where = (event.worker,) if route is None else (route.source, route.target)
        if action.kind in TOGETHER:
            begun = max(event.start_s, reached)
            goes_on = following and following.action.kind in TOGETHER and following.start_s < event.end_s
            if following is None or following.start_s == event.end_s or goes_on:
                where = (f"the {CALLED[action.kind]} of stage {action.stage}",)
                spent[what, where].append(event.end_s - begun)
                reached = event.end_s
                continue
        else:
            until = min(event.end_s, following.start_s) if following else event.end_s  # the wire is free earlier
            spent[what, where].append(until - event.start_s)
            reached = until
        if event.busy_s and following and event.worker == following.worker and following.action.route is None:
            spent["busy with messages", (event.worker,)].append(event.busy_s)
    return spent


def path_shares(timeline: Timeline) -> Mapping[Where, float]:
    """The share of the step that the path spends on each worker and each link; all of them add up to 1."""
    found: dict[Where, float] = defaultdict(float)
    for (_, where), times in time_on_path(timeline).items():
        found[where] += sum(times) / (timeline.step_s or 1.0)
    return found
