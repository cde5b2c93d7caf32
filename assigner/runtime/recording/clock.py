"""Two workers' clocks compared: what one of them noted can then be told on the other's.

Of a round trip sent at a and back at b, the peer's answer was given at about (a + b) / 2, and at worst (b - a) / 2
off that; the fastest of many says best. Clocks drift apart, so for a longer time two comparisons are needed.

Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_ROUNDS = 100
_TAG_ANSWER, _TAG_QUESTION = 2, 3


@dataclass(frozen=True)
class ClockComparison:
    """A peer's `time.perf_counter` against this process's.

    Args:
        at_s: When, on this clock.
        ahead_s: How far the peer's clock is ahead of this one.
        error_s: How far that may be off: half of the fastest round trip.
    """

    at_s: float
    ahead_s: float = 0.0
    error_s: float = 0.0


def compare_clock(peer: int) -> ClockComparison:
    """Compare with rank `peer`, which calls `answer_clock` at the same time; nothing else may travel between them."""
    answer = torch.zeros(1, dtype=torch.float64, device="cpu")
    found = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        dist.send(answer, peer, tag=_TAG_QUESTION)
        dist.recv(answer, peer, tag=_TAG_ANSWER)
        end = time.perf_counter()
        middle = (begin + end) / 2
        found.append((end - begin, float(answer) - middle, middle))
    seconds, ahead, at = min(found)
    return ClockComparison(at, ahead, seconds / 2)


def answer_clock(peer: int) -> None:
    """The peer's side of `compare_clock`."""
    question = torch.zeros(1, dtype=torch.float64, device="cpu")
    for _ in range(_ROUNDS):
        dist.recv(question, peer, tag=_TAG_QUESTION)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64, device="cpu"), peer, tag=_TAG_ANSWER)


@dataclass(frozen=True)
class PeersClock:
    """A peer's clock between two comparisons.

    Comparisons that agree within their errors show no drift: then the better one holds throughout, and no duration
    changes. Otherwise the lead changes evenly from the first to the last.
    """

    first: ClockComparison
    last: ClockComparison

    def time(self, own_s: float) -> float:
        """What the peer's clock says when this one says `own_s`."""
        return own_s + self._ahead(own_s)

    @property
    def error_s(self) -> float:
        """How far that may be off at the two comparisons, at worst."""
        return max(each.error_s + abs(self._ahead(each.at_s) - each.ahead_s) for each in (self.first, self.last))

    def _ahead(self, own_s: float) -> float:
        change = self.last.ahead_s - self.first.ahead_s
        if abs(change) <= self.first.error_s + self.last.error_s:
            return min(self.first, self.last, key=lambda each: each.error_s).ahead_s
        return self.first.ahead_s + change * (own_s - self.first.at_s) / (self.last.at_s - self.first.at_s)
