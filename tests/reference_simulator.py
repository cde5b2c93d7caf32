"""A step as 3-cost-model.md words it, one event after the other: written from that page, from no code of the program.

Slow and plain. Workers and links are servers; a heap of moments says what happens next. Prices are looked up by the
page's own names for them: F, B, U, n bytes, t(n).
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
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
    return t, link.sender_s + link.sender_busy * t, link.receiver_s + link.receiver_busy * t


def owners(plan: Plan, stage: int) -> list[str]:
    """Who runs each micro-batch of a stage: the one that is furthest behind n (m + 1) / M, the first among equals."""
    held, owner = plan.stages[stage], []
    if plan.schedule == "listed":
        by = {j: w for w, steps in plan.listed.items() for s, what, j in steps if (s, what) == (stage, "F")}
        return [by[m] for m in range(plan.micro_batches)]
    shares = {each.worker: each.micro_batches for each in held.replicas} or {held.worker: plan.micro_batches}
    for m in range(plan.micro_batches):
        behind = {w: Fraction(n * (m + 1), plan.micro_batches) - owner.count(w) for w, n in shares.items()}
        owner.append(next(w for w in shares if behind[w] == max(behind.values())))
    return owner


def messages(plan: Plan, profile: Profile) -> list[dict[str, Any]]:
    """One for each micro-batch, value and other worker that reads it, and one back where an edge bears a gradient."""
    stage_of = {name: n for n, stage in enumerate(plan.stages) for name in stage.partitions}
    owner = [owners(plan, n) for n in range(len(plan.stages))]
    turn = {step: n for order in orders(plan).values() for n, step in enumerate(order)}
    part = {(stage, m): what for what, stage, m in turn if what in "BI"}
    found = []
    for m in range(plan.micro_batches):
        worker_of = {name: owner[n][m] for name, n in stage_of.items()}
        crossing: dict[tuple[str, int, str], list[Any]] = {}
        for edge in profile.edges:
            if worker_of[edge.source] != worker_of[edge.target]:
                crossing.setdefault((edge.source, edge.output, worker_of[edge.target]), []).append(edge)
        for (source, _, target), edges in crossing.items():
            n = edges[0].bytes_per_sample * plan.micro_batch_size + edges[0].fixed_bytes
            maker, reader = stage_of[source], min((stage_of[e.target] for e in edges), key=lambda s: turn["F", s, m])
            there, back = (worker_of[source], target), (target, worker_of[source])
            found.append({"from": ("F", maker, m), "to": ("F", reader, m), "ends": there, "bytes": n})
            adding = [(part[s, m], s, m) for s in (stage_of[edge.target] for edge in edges if edge.gradient)]
            if adding:
                last, to = max(adding, key=turn.__getitem__), (part[maker, m], maker, m)
                found.append({"from": last, "to": to, "ends": back, "bytes": n})
    return found


def orders(plan: Plan) -> dict[str, list[tuple[str, int, int]]]:
    """Every worker's forwards, backwards, their parts and reductions: (F, B, I, W or R, stage, micro-batch)."""
    count, found = plan.micro_batches, {}
    owner = [owners(plan, n) for n in range(len(plan.stages))]
    for worker in plan.workers:
        mine = [n for n, stage in enumerate(plan.stages) if worker in stage.workers]
        if plan.schedule == "listed":
            order = [(letter, stage, j) for stage, letter, j in plan.listed[worker]]
        elif plan.schedule == "1f1b":
            (s,) = mine
            warm = min(count, plan.stages[s].in_flight or sum(len(stage.workers) for stage in plan.stages[s:]))
            order = [("F", s, j) for j in range(warm)]
            for j in range(count):
                order += [("B", s, j)] + ([("F", s, j + warm)] if j + warm < count else [])
        else:
            order = [("F", s, j) for s in mine for j in range(count)]
            order += [("B", s, j) for s in reversed(mine) for j in reversed(range(count))]
        own = [(what, s, j) for what, s, j in order if owner[s][j] == worker]
        found[worker] = []
        rings = [n for n in reversed(mine) if plan.stages[n].replicas]
        for n, (what, s, j) in enumerate(own):
            found[worker].append((what, s, j))
            left = {stage for later, stage, _ in own[n + 1 :] if later in "BW"}
            while what in "BW" and rings and rings[0] not in left:
                found[worker].append(("R", rings.pop(0), -1))
    return found


def reduced(plan: Plan, profile: Profile, stage: int) -> float:
    """Bytes of a stage's gradients, without those of parameters that it shares with another stage elsewhere."""
    names = plan.stages[stage].partitions
    total = sum(part.gradient_bytes for part in profile.partitions if part.name in names)
    for tie in profile.ties:
        others = [s for s in plan.stages if set(s.partitions) & set(tie.partitions) and s is not plan.stages[stage]]
        elsewhere = {w for s in (*others, plan.stages[stage]) for w in s.workers}
        mine = [part for part in profile.partitions if part.name in set(names) & set(tie.partitions)]
        counted = 0 if others and len(elsewhere) > 1 else 1
        total -= sum(tie.bytes / part.parameter_bytes * part.gradient_bytes for part in mine[counted:])
    return max(0.0, total)


Reduce = Callable[[tuple[str, ...], float], tuple[float, float]]


def reference(  # noqa: PLR0912 - one branch for each kind of event
    plan: Plan, profile: Profile, reduce: Reduce
) -> dict[tuple[str, str, int, int], tuple[float, float]]:
    """Start and end of every action, by (worker, F, B, I, W, R or U, stage, micro-batch); -1 where there is none.

    Args:
        plan: What is timed.
        profile: Its prices.
        reduce: Seconds of an all-reduce of so many bytes, and in which its workers are busy.
    """
    size, sent = plan.micro_batch_size, messages(plan, profile)
    length: dict[tuple[str, int, str], float] = {}
    for n, stage in enumerate(plan.stages):
        for worker in stage.workers:
            held = {name: price(profile, name, worker, size) for name in stage.partitions}
            again = sum(held[name].forward_s for name in stage.rematerialise)
            length["F", n, worker] = sum(each.forward_s for each in held.values())
            length["B", n, worker] = sum(each.backward_s for each in held.values()) + again
            first = [
                name for name in stage.rematerialise if not any(e.target == name and e.gradient for e in profile.edges)
            ]
            later = sum(held[name].forward_s for name in first)
            length["I", n, worker] = sum(each.backward_input_s or 0.0 for each in held.values()) + again - later
            length["W", n, worker] = sum(each.backward_weight_s or 0.0 for each in held.values()) + later
    left = {worker: [*order, ("U", -1, -1)] for worker, order in orders(plan).items()}
    rings = {worker: [stage for what, stage, _ in order if what == "R"] for worker, order in left.items()}
    begun: dict[tuple[int, str], float] = {}
    last_job = {worker: order[-2] for worker, order in left.items()}
    stages = [(worker, name) for stage in plan.stages for worker in stage.workers for name in stage.partitions]
    update = {
        worker: sum(price(profile, name, w, size).update_s for w, name in stages if w == worker) for worker in left
    }
    ties = [
        {"ends": (u, v), "bytes": tie.bytes}
        for tie in profile.ties
        if sum(not set(stage.partitions).isdisjoint(tie.partitions) for stage in plan.stages) > 1
        for u, v in itertools.permutations(dict.fromkeys(w for name in tie.partitions for w in plan.holders[name]), 2)
    ]  # fmt: skip
    free, idle = dict.fromkeys(left, 0.0), dict.fromkeys(left, True)
    link_free: dict[tuple[str, str], float] = {}
    wire_of = {(each.source, each.target): wire for wire in profile.wires for each in wire.links}
    wire_free: dict[Any, float] = {}
    waiting: dict[tuple[str, str], list[tuple[Any, float]]] = {ends: [] for ends in wire_of}
    place = {worker: n for n, worker in enumerate(plan.workers)}
    inbox: set[Any] = set()
    spans: dict[tuple[str, str, int, int], tuple[float, float]] = {}
    moments = [(0.0, n, "look", worker) for n, worker in enumerate(left)]
    tick = itertools.count(len(moments))

    def post(at: float, what: str, whom: Any) -> None:
        heapq.heappush(moments, (at, next(tick), what, whom))

    def ask(at: float, ends: tuple[str, str]) -> None:
        """Of links that ask for a wire at once the first sender's goes first; behind all else of that moment."""
        heapq.heappush(moments, (at, 10**9 + 1000 * place[ends[0]] + place[ends[1]], "ask", ends))

    def dispatch(at: float, key: Any, message: dict[str, Any]) -> float:
        t, sender, _ = seconds(profile, *message["ends"], message["bytes"])
        if message["ends"] in wire_of:
            waiting[message["ends"]].append((key, t))
            if len(waiting[message["ends"]]) == 1:
                ask(max(at, link_free.get(message["ends"], 0.0)), message["ends"])
            return sender
        begin = max(at, link_free.get(message["ends"], 0.0))
        link_free[message["ends"]] = begin + t
        post(begin + t, "arrive", (key, message["ends"][1]))
        return sender

    going: set[int] = set()

    def ring(at: float) -> None:
        """Begin every reduction that all have begun, and that is the next one of all of its workers."""
        for stage in {mine[0] for mine in rings.values() if mine} - going:
            members = plan.stages[stage].workers
            if all((stage, w) in begun and rings[w][0] == stage for w in members):
                going.add(stage)
                post(at + reduce(members, reduced(plan, profile, stage))[0], "rung", stage)

    heapq.heapify(moments)
    while moments:
        at, _, what, whom = heapq.heappop(moments)
        if what == "arrive":
            inbox.add(whom[0])
            post(at, "look", whom[1])
        elif what == "ask":
            wire = wire_of[whom]
            key, t = waiting[whom].pop(0)
            begin = max(at, wire_free.get(wire, 0.0))
            wire_free[wire] = begin + t * min(1.0, wire.slower / len(wire.links))
            link_free[whom] = begin + t
            post(begin + t, "arrive", (key, whom[1]))
            if waiting[whom]:
                ask(begin + t, whom)
        elif what == "rung":
            for worker in plan.stages[whom].workers:
                rings[worker].remove(whom)
                spans[worker, "R", whom, -1] = begun[whom, worker], at
                post(at, "look", worker)
            ring(at)
        elif what == "end":
            worker, kind, stage, j = whom
            held_up = 0.0
            for number, message in enumerate(sent):
                if message["from"] == (kind, stage, j) and message["ends"][0] == worker:
                    held_up += dispatch(at, number, message)
                if message["to"] == (kind, stage, j) and message["ends"][1] == worker:
                    held_up += seconds(profile, *message["ends"], message["bytes"])[2]
            if kind == "R":
                members = plan.stages[stage].workers
                begun[stage, worker] = at
                held_up += reduce(members, reduced(plan, profile, stage))[1]
                ring(at)
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
            needs: set[Any] = {
                number
                for number, message in enumerate(sent)
                if message["to"] == (kind, stage, j) and message["ends"][1] == whom
            }
            if kind == "U" and rings[whom]:
                continue
            if kind == "U":
                needs = {("tie", n) for n, tie in enumerate(ties) if tie["ends"][1] == whom}
            if needs <= inbox:
                left[whom].pop(0)
                idle[whom] = False
                end = at + (update[whom] if kind == "U" else 0.0 if kind == "R" else length[kind, stage, whom])
                spans[whom, kind, stage, j] = at, end
                post(end, "end", (whom, kind, stage, j))
    assert not any(left.values()), "the program waits for itself"
    return spans
