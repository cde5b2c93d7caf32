"""No order of a placement, and no plan at all, takes less.

Of a placement: what a worker or a link has to do, with the least that lies before and after it. Wires that links share
only delay, and play no part.

Whatever the order, a task starts no earlier than a micro-batch can have come to it (its head), and behind it the step
goes on for as long as what must follow it takes at least (its tail). Tasks of one worker follow each other, and so do
messages of one link. So for any heads of at least r and tails of at least q,

    step  >=  r + seconds of the tasks with head >= r and tail >= q + q

which is the bound of one machine with heads and tails (J. Carlier, The one-machine sequencing problem, European Journal
of Operational Research 11, 1982). With one task in the set it is the longest path.

Of all plans, whatever their stages, replicas and orders: the work of a step split perfectly (`perfect_split.py`), and
the way of one micro-batch there and back where each partition is on the worker that runs it fastest.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from assigner.solver.orders.tasks import along
from assigner.solver.problem.perfect_split import least_work, perfect_split

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.solver.orders.tasks import PlacedTasks, TaskRow
    from assigner.solver.problem.problem import Problem


class RowLoad(NamedTuple):
    """Tasks of one row, or their messages over one link: when they can start, what they take, and what follows."""

    head_s: float
    seconds: float
    tail_s: float


def least_step_s(tasks: PlacedTasks) -> float:
    """No order of the placement's tasks has a shorter step, in seconds; inf: its stages do not fit."""
    if not tasks.may_run:
        return math.inf
    loads: dict[tuple[str, int], list[RowLoad]] = defaultdict(list)
    times: dict[int, int] = defaultdict(int)
    for lane in tasks.lane_of:
        times[lane] += 1
    update = tasks.update_s
    spare: dict[int, float] = defaultdict(float)  # the longest that messages keep a worker behind a task
    for lane, count in times.items():
        rows = tasks.lanes[lane]
        heads, tails = _heads_and_tails(rows, update)
        for row, head, tail in zip(rows, heads, tails, strict=True):
            # behind its last task a worker is busy with messages before the update, yet the step may end elsewhere
            seconds = row.seconds + row.busy_s
            loads["worker", row.worker].append(RowLoad(head, count * seconds, tail))
            spare[row.worker] = max(spare[row.worker], row.busy_s)
            for link, wire_s, reader in row.sends:
                after = rows[reader].seconds + tails[reader]
                loads["link", link].append(RowLoad(head + row.seconds, count * wire_s, after))
    best = 0.0
    for (what, number), found in loads.items():
        if what == "worker":
            whole = sum(each.seconds for each in found) + min(each.head_s for each in found)
            best = max(best, whole + update[number], _one_machine(found) - spare[number])
        else:
            best = max(best, _one_machine(found))
    return best


def least_of_all_s(problem: Problem, counts: Iterable[int]) -> float:
    """No plan has a shorter step, in seconds, with any of these micro-batch counts; inf: a partition can be nowhere."""
    return min((_least_of_count_s(problem, count) for count in counts), default=math.inf)


def _least_of_count_s(problem: Problem, count: int) -> float:
    table, spine = problem.prices(count).intervals, problem.spine
    seconds = np.full((len(table.groups), len(problem.order)), np.inf)
    updates = np.zeros_like(seconds)  # which one worker of a stage may do for the others
    least_updated = _least_updated(problem)
    once = np.full_like(seconds, np.inf)  # what of that lies on the way of one micro-batch
    for k, i in itertools.product(range(len(table.groups)), range(len(problem.order))):
        price = table.rows[k][i]
        if price is not None:
            again = price.recompute_s if problem.remat_rules[i] == "always" else 0.0
            input_s, weight_s = price.parts[:2] if price.parts is not None else (math.inf, math.inf)
            backward = min(price.backward_s, input_s + weight_s) + again
            seconds[k, i], updates[k, i] = count * (price.forward_s + backward), price.update_s * least_updated[i]
            # of a backward in two parts the partitions in front wait for the first alone
            there = min(price.backward_s + again, input_s)
            once[k, i] = spine.forward[i] * price.forward_s + spine.backward[i] * there
    weights, least = perfect_split(seconds)
    least = least + least_work(np.where(np.isfinite(seconds), updates, np.inf), weights)
    speeds = sorted((w for w, members in zip(weights, table.groups, strict=True) for _ in members), reverse=True)
    speed = float(sum(speeds[: problem.most_workers]))
    if not np.isfinite(least).all() or speed <= 0:
        return math.inf
    return max(float(least.sum()) / speed, float(once.min(axis=0).sum()))


def _least_updated(problem: Problem) -> list[float]:
    """The least share of its update that a partition may take, by position.

    Where workers of a stage divide their updates, a parameter that its partitions share is updated with the first of
    them in the plan: in a chain that is the first of all.
    """
    found = [1.0] * len(problem.order)
    for tie in problem.profile.ties if problem.most_replicas > 1 else ():
        holders = sorted(problem.position[name] for name in tie.partitions)
        for i in holders[1:] if problem.profile.is_chain else holders:
            found[i] = max(0.0, found[i] - problem.cost.tied_share(problem.order[i], tie))
    return found


def _one_machine(loads: Sequence[RowLoad]) -> float:
    """The bound over all sets of heads and tails."""
    best = 0.0
    for head in {each.head_s for each in loads}:
        late = sorted((each for each in loads if each.head_s >= head), key=lambda each: -each.tail_s)
        total = 0.0
        for each in late:
            total += each.seconds
            best = max(best, head + total + each.tail_s)
    return best


def _heads_and_tails(rows: Sequence[TaskRow], update: Sequence[float]) -> tuple[list[float], list[float]]:
    """When the first micro-batch can start in each row, if nothing else is in its way; and what must follow, at least.

    That is its worker's update, if nothing else.
    """
    order, heads, tails = list(along(rows)), [0.0] * len(rows), [0.0] * len(rows)
    for n in order:
        for wait_s, reader in rows[n].readers:
            heads[reader] = max(heads[reader], heads[n] + rows[n].seconds + wait_s)
    for n in reversed(order):
        row = rows[n]
        ways = [wait_s + rows[reader].seconds + tails[reader] for wait_s, reader in row.readers]
        tails[n] = max([row.busy_s + update[row.worker], *ways])
    return heads, tails
