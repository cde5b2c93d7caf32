"""Interleaved 1F1B: several stages a worker, forwards and backwards in turn.

M micro-batches go in rounds of about as many as there are workers: a worker takes a round through its first stage,
then through its second one, and so on, and backwards from its last stage to its first. It begins with a number of
forwards, its warm-up, and then goes on with one forward, one backward in turn. Of 2 workers (P = 2) with 2 stages each
and 4 micro-batches (rounds of 2; stages 0 and 2 are F and f on the first worker):

    worker 0:  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3
    worker 1:     F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

The warm-up of the r-th of P workers with k stages is (k - 1) g + 2 (P - 1 - r) forwards for rounds of g micro-batches.
Where stages are dealt out to the workers in turn, that is the published schedule. Where they are not, some workers
could wait for each other: then the one that has the first forward that nobody has run yet, by round, stage and
micro-batch, runs it ahead of the backward at which it waits. All forwards in that order, and all backwards in theirs
(by round, last stage first), wait for earlier ones only; so with forwards left there is always one to run, and no
program stops.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021,
section 2.2; depths as in Megatron-LM and torch.distributed.pipelining's ScheduleInterleaved1F1B.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Turn = tuple[int, bool, int]
"""A stage, whether it is its forward, and a micro-batch."""


@lru_cache(maxsize=64)
def interleaved_orders(takers: tuple[tuple[str, ...], ...]) -> dict[str, tuple[Turn, ...]]:
    """Every worker's order.

    Args:
        takers: By stage, the worker of each micro-batch.

    Returns:
        By worker, in pipeline order.
    """
    held: dict[str, tuple[int, ...]] = {}
    for stage, workers in enumerate(takers):
        for worker in dict.fromkeys(workers):
            held[worker] = (*held.get(worker, ()), stage)
    places = list(dict.fromkeys(held.values()))  # replicas of the same stages have one place
    rounds = _rounds(len(takers[0]), len(places))
    players = {worker: _Player(worker, held[worker], takers, rounds) for worker in held}
    for worker, player in players.items():
        whole = (len(held[worker]) - 1) * len(rounds[0]) + 2 * (len(places) - 1 - places.index(held[worker]))
        player.warm_up = -(-whole * len(player.forwards) // (len(held[worker]) * len(takers[0])))
    _play(players, takers, rounds)
    return {worker: tuple(player.order) for worker, player in players.items()}


def _rounds(micro_batches: int, workers: int) -> list[range]:
    """The micro-batches of each round: as many rounds as whole ones fit, none longer than another by more than one."""
    count = max(1, micro_batches // workers)
    least, more = divmod(micro_batches, count)
    found, first = [], 0
    for n in range(count):
        found.append(range(first, first + least + (n < more)))
        first = found[-1].stop
    return found


class _Player:
    """One worker: its forwards and its backwards in their orders, and how far it is in each."""

    def __init__(
        self, worker: str, stages: Sequence[int], takers: Sequence[Sequence[str]], rounds: Sequence[range]
    ) -> None:
        own = [(s, m) for each in rounds for s in stages for m in each if takers[s][m] == worker]
        self.forwards = [(s, True, m) for s, m in own]
        self.backwards = [
            (s, False, m) for each in rounds for s in reversed(stages) for m in each if takers[s][m] == worker
        ]
        self.warm_up, self.run_forwards = 0, 0
        self.order: list[Turn] = []

    @property
    def due(self) -> Turn | None:
        """What its warm-up has it do next; None: it has done everything."""
        done = len(self.order) - self.run_forwards
        if self.run_forwards < len(self.forwards) and self.run_forwards - done <= self.warm_up:
            return self.forwards[self.run_forwards]
        return self.backwards[done] if done < len(self.backwards) else None

    def run(self, turn: Turn) -> None:
        """Do it."""
        self.order.append(turn)
        self.run_forwards += turn[1]


def _play(players: dict[str, _Player], takers: Sequence[Sequence[str]], rounds: Sequence[range]) -> None:
    """Let everybody go on as far as it can; where all wait, the first forward that is left goes ahead."""
    left = iter([(s, True, m) for each in rounds for s in range(len(takers)) for m in each])
    done: set[Turn] = set()
    moved = True
    while moved:
        moved = False
        for player in players.values():
            while (turn := player.due) is not None and _needs(turn, len(takers)) <= done:
                player.run(turn)
                done.add(turn)
                moved = True
        if not moved:
            first = next((turn for turn in left if turn not in done), None)
            if first is not None:
                players[takers[first[0]][first[2]]].run(first)
                done.add(first)
                moved = True


def _needs(turn: Turn, stages: int) -> set[Turn]:
    """What comes before a turn: each stage is taken to need the one before it."""
    stage, forward, m = turn
    if forward:
        return {(stage - 1, True, m)} if stage else set()
    return {(stage, True, m), (stage + 1, False, m)} if stage + 1 < stages else {(stage, True, m)}
