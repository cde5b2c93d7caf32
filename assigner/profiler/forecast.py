"""How far a profiling run is and how long it will still take: what is left, at the pace of what is done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class RankProgress:
    """Where a rank stands.

    Args:
        worker: Its worker.
        what: What it measures now.
        share: The share of its work that is done, 0 to 1, by time.
        left_s: Seconds that it will still take; None: not known yet.
        phase: How many phases it has behind it.
    """

    worker: str
    what: str
    share: float
    left_s: float | None
    phase: int = 0


@dataclass
class _TaskKind:
    """One kind of work: pieces that take about the same time each."""

    pieces: float
    planned_s: float
    done: float = 0.0
    spent_s: float = 0.0

    def left_s(self) -> float:
        """The plan counts as one piece, so that the first short one does not decide alone."""
        pace = (self.planned_s + self.spent_s) / (1 + self.done)
        return max(0.0, self.pieces - self.done) * pace


class Forecast:
    """Time left of one rank's work.

    Args:
        clock: Gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.begun = clock()
        self.works: dict[str, _TaskKind] = {}
        self._current: _TaskKind | None = None
        self._since = self.begun

    def plan(self, kind: str, pieces: float, each_s: float) -> None:
        """There are so many pieces of a kind of work, of about `each_s` seconds."""
        self.works[kind] = _TaskKind(pieces, each_s)

    def begin(self, kind: str) -> None:
        """From here on this kind of work goes on."""
        now = self.clock()
        if self._current is not None:
            self._current.spent_s += now - self._since
        self._current, self._since = self.works[kind], now

    def work(self, kind: str, done: float) -> None:
        """This kind of work goes on, and so many of its pieces are done."""
        self.begin(kind)
        self.works[kind].done = done

    def done(self, kind: str) -> float:
        """How many pieces of a kind of work are done."""
        return self.works[kind].done

    def left_s(self) -> float | None:
        """Seconds until all that was planned is done; None: nothing was planned yet."""
        return sum(work.left_s() for work in self.works.values()) if self.works else None

    def share(self) -> float:
        """The share that is done, by time."""
        elapsed, left = self.clock() - self.begun, self.left_s()
        return 0.0 if left is None or elapsed + left == 0 else elapsed / (elapsed + left)


def slowest(ranks: Iterable[RankProgress]) -> RankProgress:
    """Of several ranks the one that will take longest."""
    return max(ranks, key=lambda each: float("inf") if each.left_s is None else each.left_s)
