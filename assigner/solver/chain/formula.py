"""The step time of a chain of stages under GPipe, in closed form.

Identical jobs through a line of servers take the sum of one job plus M - 1 times the slowest server. Forward, the
servers are the stages (f and what their messages keep them busy, g = f + busy) and the links between them (c);
backward the same with b and c'. The turn from forward to backward happens at the last stage, or, where a stage's
last message keeps it busy for longer than all that lies behind it takes, at that stage t. Stage s starts its
update u when its own last backward is through. So, with F(t) and B(s, t) the two line times,

    F(t)    = sum f[0..t] + sum c[0..t-1] + (M - 1) max(g[0..t], c[0..t-1])
    B(s, t) = sum b[s..t] + sum c'[s..t-1] + (M - 1) max(h[s..t], c'[s..t-1])          h = b + busy
    step    = max over s <= t of  F(t) + (g[t] - f[t]) + B(s, t) + (h[s] - b[s]) + u[s]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.solver.prices import Hop, StageOption


def turn_steps_s(columns: Sequence[StageOption], hops: Sequence[Hop], micro_batches: int) -> list[float]:
    """The longest way, in seconds, with the turn at each stage t; their largest is the step time.

    The last entry is what the ILP minimises. An entry before it is 0 where it cannot be the largest: only a message
    that stage t received, and that keeps it busy, can make a turn before the last stage late.

    Args:
        columns: The stages in order.
        hops: The boundaries between them, one fewer.
        micro_batches: M.
    """
    count = len(columns)
    busy_f = [0.0] * count
    busy_b = [0.0] * count
    for n, hop in enumerate(hops):
        for side in (0, 1):
            busy_f[n + side] += hop.forward_busy[side]
            busy_b[n + side] += hop.backward_busy[side]
    steps = [0.0] * count
    there = slowest = 0.0
    for turn, column in enumerate(columns):
        if turn:
            there += hops[turn - 1].forward_s
            slowest = max(slowest, hops[turn - 1].forward_s)
        there += column.forward_s
        slowest = max(slowest, column.forward_s + busy_f[turn])
        if turn < count - 1 and not busy_f[turn]:
            continue
        start = there + (micro_batches - 1) * slowest + busy_f[turn]
        back = worst = 0.0
        for s in range(turn, -1, -1):
            if s < turn:
                back += hops[s].backward_s
                worst = max(worst, hops[s].backward_s)
            back += columns[s].backward_s
            worst = max(worst, columns[s].backward_s + busy_b[s])
            end = start + back + (micro_batches - 1) * worst + busy_b[s] + columns[s].update_s
            steps[turn] = max(steps[turn], end)
    return steps
