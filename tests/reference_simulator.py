"""A step as 3-cost-model.md words it, one event after the other: written from that page, from no code of the program.

Slow and plain. Workers and links are servers; a heap of moments says what happens next. Prices are looked up by the
page's own names for them: F, B, U, n bytes, t(n).
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Measurement, Profile


def price(profile: Profile, partition: str, worker: str, size: int) -> Measurement:
    """A measured size: that value (the instances here measure the sizes that they use)."""
    (found,) = [
        each
        for each in profile.measurements
        if (each.partition, each.worker, each.micro_batch) == (partition, worker, size)
    ]
    return found


def seconds(profile: Profile, source: str, target: str, size: float) -> tuple[float, float, float]:
    """t(n) of a message, and how long sender and receiver are busy with it."""
    (link,) = [each for each in profile.links if (each.source, each.target) == (source, target)]
    sizes = [each.bytes for each in link.points]
    n = bisect_left(sizes, size)
    if n == 0:
        t = link.points[0].seconds
    elif n == len(sizes):
        (x0, y0), (x1, y1) = ((each.bytes, each.seconds) for each in link.points[-2:])
        beta = (y1 - y0) / (x1 - x0)
        t = (y1 - beta * x1) + beta * size
    else:
        (x0, y0), (x1, y1) = ((math.log(each.bytes), math.log(each.seconds)) for each in link.points[n - 1 : n + 1])
        t = math.exp(y0 + (y1 - y0) * (math.log(size) - x0) / (x1 - x0))
    return t, link.sender_busy * t, link.receiver_busy * t


def messages(plan: Plan, profile: Profile) -> list[dict[str, Any]]:
    """One for each value and each other worker that reads it, and one back where an edge there bears a gradient."""
    stage_of = {name: n for n, stage in enumerate(plan.stages) for name in stage.partitions}
    worker_of = {name: plan.stages[n].worker for name, n in stage_of.items()}
    crossing: dict[tuple[str, int, str], list[Any]] = {}
    for edge in profile.edges:
        if worker_of[edge.source] != worker_of[edge.target]:
            crossing.setdefault((edge.source, edge.output, worker_of[edge.target]), []).append(edge)
    found = []
    for (source, _, target), edges in crossing.items():
        n = edges[0].bytes_per_sample * plan.micro_batch_size + edges[0].fixed_bytes
        maker, reader = stage_of[source], min(stage_of[edge.target] for edge in edges)
        found.append({"from": ("F", maker), "to": ("F", reader), "ends": (worker_of[source], target), "bytes": n})
        if any(edge.gradient for edge in edges):
            found.append({"from": ("B", reader), "to": ("B", maker), "ends": (target, worker_of[source]), "bytes": n})
    return found


def orders(plan: Plan) -> dict[str, list[tuple[str, int, int]]]:
    """Every worker's forwards and backwards: (F or B, stage, micro-batch)."""
    m, count, found = plan.micro_batches, len(plan.stages), {}
    for worker in plan.workers:
        mine = [n for n, stage in enumerate(plan.stages) if stage.worker == worker]
        if plan.schedule == "1f1b":
            (s,) = mine
            warm = min(m, plan.stages[s].in_flight or count - s)
            order = [("F", s, j) for j in range(warm)]
            for j in range(m):
                order += [("B", s, j)] + ([("F", s, j + warm)] if j + warm < m else [])
        else:
            order = [("F", s, j) for s in mine for j in range(m)]
            order += [("B", s, j) for s in reversed(mine) for j in reversed(range(m))]
        found[worker] = order
    return found


def reference(plan: Plan, profile: Profile) -> dict[tuple[str, str, int, int], tuple[float, float]]:
    """Start and end of every action, by (worker, F, B or U, stage, micro-batch); of an update, -1 and -1."""
    size, sent = plan.micro_batch_size, messages(plan, profile)
    length: dict[tuple[str, int], float] = {}
    for n, stage in enumerate(plan.stages):
        held = {name: price(profile, name, stage.worker, size) for name in stage.partitions}
        again = sum(held[name].forward_s for name in stage.rematerialise)
        length["F", n] = sum(each.forward_s for each in held.values())
        length["B", n] = sum(each.backward_s for each in held.values()) + again
    left = {worker: [*order, ("U", -1, -1)] for worker, order in orders(plan).items()}
    last_job = {worker: order[-2] for worker, order in left.items()}
    stages = [(stage.worker, name) for stage in plan.stages for name in stage.partitions]
    update = {
        worker: sum(price(profile, name, w, size).update_s for w, name in stages if w == worker) for worker in left
    }
    ties = [
        {"ends": (u, v), "bytes": tie.bytes}
        for tie in profile.ties
        for u, v in itertools.permutations(dict.fromkeys(plan.placement[name] for name in tie.partitions), 2)
    ]  # fmt: skip
    free, idle = dict.fromkeys(left, 0.0), dict.fromkeys(left, True)
    link_free: dict[tuple[str, str], float] = {}
    inbox: set[Any] = set()
    spans: dict[tuple[str, str, int, int], tuple[float, float]] = {}
    moments = [(0.0, n, "look", worker) for n, worker in enumerate(left)]
    tick = itertools.count(len(moments))

    def post(at: float, what: str, whom: Any) -> None:
        heapq.heappush(moments, (at, next(tick), what, whom))

    def dispatch(at: float, key: Any, message: dict[str, Any]) -> float:
        t, sender, _ = seconds(profile, *message["ends"], message["bytes"])
        begin = max(at, link_free.get(message["ends"], 0.0))
        link_free[message["ends"]] = begin + t
        post(begin + t, "arrive", (key, message["ends"][1]))
        return sender

    heapq.heapify(moments)
    while moments:
        at, _, what, whom = heapq.heappop(moments)
        if what == "arrive":
            inbox.add(whom[0])
            post(at, "look", whom[1])
        elif what == "end":
            worker, kind, stage, j = whom
            held_up = 0.0
            for number, message in enumerate(sent):
                if message["from"] == (kind, stage) and message["ends"][0] == worker:
                    held_up += dispatch(at, (number, j), message)
                if message["to"] == (kind, stage) and message["ends"][1] == worker:
                    held_up += seconds(profile, *message["ends"], message["bytes"])[2]
            if (kind, stage, j) == last_job[worker]:
                held_up += sum(
                    dispatch(at, ("tie", n), tie) for n, tie in enumerate(ties) if tie["ends"][0] == worker
                )  # fmt: skip
            free[worker] = at + held_up
            post(free[worker], "idle", worker)
        else:
            idle[whom] |= what == "idle"
            if not idle[whom] or not left[whom]:
                continue
            kind, stage, j = left[whom][0]
            needs = {
                (number, j)
                for number, message in enumerate(sent)
                if message["to"] == (kind, stage) and message["ends"][1] == whom
            }
            if kind == "U":
                needs = {("tie", n) for n, tie in enumerate(ties) if tie["ends"][1] == whom}
            if needs <= inbox:
                left[whom].pop(0)
                idle[whom] = False
                end = at + (update[whom] if kind == "U" else length[kind, stage])
                spans[whom, kind, stage, j] = at, end
                post(end, "end", (whom, kind, stage, j))
    assert not any(left.values()), "the program waits for itself"
    return spans
