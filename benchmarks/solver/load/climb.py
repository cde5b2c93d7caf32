"""Local search on a line whose links count: move items over a border, exchange the devices of two stages."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from load.evaluate import evaluate
from load.problem import Stage
from load.remat import choose

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from load.problem import LoadProblem


def climb(problem: LoadProblem, stages: Sequence[Stage], *, deadline: float) -> tuple[Stage, ...]:
    """The first improvement again and again, until there is none or `deadline` (monotonic seconds) has passed."""
    best, value = tuple(stages), evaluate(problem, stages).value
    improved = True
    while improved:
        improved = False
        for candidate in _neighbours(problem, best):
            if time.monotonic() > deadline:
                return best
            found = evaluate(problem, candidate).value
            if found < value * (1 - 1e-9):
                best, value, improved = candidate, found, True
                break
    return best


def _neighbours(problem: LoadProblem, stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    used = [stage.device for stage in stages]
    for one, other in itertools.combinations(range(len(stages)), 2):
        if used[one] != used[other]:
            yield from _settled(problem, _exchanged(stages, one, other))
    for s, c in itertools.product(range(len(stages)), range(len(problem.devices))):
        if used.count(c) < problem.devices[c].count:
            yield from _settled(problem, (*stages[:s], replace(stages[s], device=c), *stages[s + 1 :]))
    for s, t in itertools.pairwise(range(len(stages))):
        for giver, taker in ((s, t), (t, s)):
            for node in stages[giver].nodes:
                if len(stages[giver].nodes) > 1:
                    yield from _settled(problem, _moved(stages, node, giver, taker))


def _exchanged(stages: tuple[Stage, ...], one: int, other: int) -> tuple[Stage, ...]:
    changed = list(stages)
    changed[one] = replace(stages[one], device=stages[other].device)
    changed[other] = replace(stages[other], device=stages[one].device)
    return tuple(changed)


def _moved(stages: tuple[Stage, ...], node: int, giver: int, taker: int) -> tuple[Stage, ...]:
    changed = list(stages)
    left = tuple(n for n in stages[giver].nodes if n != node)
    more = tuple(sorted((*stages[taker].nodes, node)))
    changed[giver] = Stage(stages[giver].device, left, (0,) * len(left))
    changed[taker] = Stage(stages[taker].device, more, (0,) * len(more))
    return tuple(changed)


def _settled(problem: LoadProblem, stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """The stages with their second options chosen, if they fit."""
    done = []
    for s, stage in enumerate(stages):
        choice = choose(problem, stage.nodes, device=stage.device, position=len(stages) - s)
        if choice is None:
            return
        done.append(replace(stage, options=tuple(int(node in choice.again) for node in stage.nodes)))
    yield tuple(done)
