"""Where the ranks of a profiling run stand: each tells the others, rank 0 shows the one that will take longest.

How long a rank will still take is what is left of its work, at the pace of what is done.

A rank that is done with its part waits for the others by looking at what they tell, however long that takes: they are
at work as long as their hearts beat. Where one has stopped, the wait is over, and whatever the ranks do together next
finds out why.
"""

from __future__ import annotations

import atexit
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.distributed import DistError

from assigner.location import rank_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from assigner.profiler.exchange import Exchange

_TELL_S = 1.0
_LOOK_S = 0.3
_BEAT_S = 5.0
_LOST_S = 30.0


@dataclass(frozen=True)
class RankProgress:
    """Where a rank stands.

    Args:
        worker: Its worker.
        what: What it measures now.
        share: The share of its work that is done, 0 to 1, by time.
        left_s: Seconds that it will still take; None: not known yet.
        phase: How many phases it has behind it.
        kind: Of the work that it is at, as its forecast has it; empty: it measures nothing yet.
    """

    worker: str
    what: str
    share: float
    left_s: float | None
    phase: int = 0
    kind: str = ""


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

    Attributes:
        kind: Of the work that goes on; empty: none has begun.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.begun = clock()
        self.works: dict[str, _TaskKind] = {}
        self.kind = ""
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
        self._current, self._since, self.kind = self.works[kind], now, kind

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


class Heartbeat:
    """A thread that tells the others every few seconds that this process is there.

    Args:
        table: What the ranks tell each other, through a connection of its own; it is closed with this.
    """

    def __init__(self, table: Exchange) -> None:
        self.table = table
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="assigner-heart", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a thread inside the store when the interpreter ends would abort the process

    def close(self) -> None:
        """Stop."""
        atexit.unregister(self.close)
        self.closed.set()
        self.table.close()
        self.thread.join(_BEAT_S)

    def _beat(self) -> None:
        beats = 0
        while not self.closed.is_set():
            try:
                self.table.tell(f"beat/{self.table.rank}", beats)
            except DistError:
                return  # the store's host has left: whoever waits for this rank has found that out
            beats += 1
            self.closed.wait(_BEAT_S)


class RanksProgress:
    """Where all ranks stand.

    Args:
        table: What the ranks tell each other.
        worker: This rank's worker.
        show: Called with the progress to show, the slowest rank's.

    Attributes:
        together: All ranks do the same from here on; rank 0 shows its own progress.
    """

    def __init__(self, table: Exchange, worker: str, show: Callable[[RankProgress], None]) -> None:
        self.table, self.rank, self.ranks, self.show = table, table.rank, table.ranks, show
        self.mine = RankProgress(worker, "", 0.0, None)
        self.together = False
        self._others: list[RankProgress] = []
        self._told = -_TELL_S

    def tell(self, what: str, forecast: Forecast) -> None:
        """Note what this rank does; at most once a second the others hear of it."""
        self.mine = replace(
            self.mine, what=what, share=forecast.share(), left_s=forecast.left_s(), kind=forecast.kind
        )  # fmt: skip
        if time.perf_counter() - self._told >= _TELL_S:
            self._publish()
            if self.rank == 0:
                self._read()
        if self.rank == 0:
            self.show(self.mine if self.together else slowest([self.mine, *self._others]))

    def finish_phase(self, meanwhile: Callable[[], bool] = lambda: False) -> None:
        """This rank is done with its part: wait for the others, until one is lost; rank 0 shows the slowest.

        Args:
            meanwhile: Called again and again until then; whether there was anything to do.
        """
        self.mine = replace(self.mine, phase=self.mine.phase + 1)
        self._publish()
        seen: dict[str, tuple[int, float]] = {}
        while self.ranks > 1:
            self._read()
            behind = [each for each in self._others if each.phase < self.mine.phase]
            if (len(self._others) == self.ranks - 1 and not behind) or self._is_lost(behind, seen):
                return
            if behind and self.rank == 0:
                self.show(slowest(behind))
            look = time.perf_counter() + _LOOK_S
            while time.perf_counter() < look:
                if not meanwhile():
                    time.sleep(_LOOK_S)

    def _is_lost(self, behind: Iterable[RankProgress], seen: dict[str, tuple[int, float]]) -> bool:
        """Whether a rank that is waited for has not beaten for a while; `seen`: its last beat, and since when."""
        names = [f"beat/{rank_of(each.worker)}" for each in behind]
        beats = self.table.told(names, int) or [-1] * len(names)
        now = time.perf_counter()
        for name, beat in zip(names, beats, strict=True):
            if name not in seen or seen[name][0] != beat:
                seen[name] = (beat, now)
        return any(now - seen[name][1] > _LOST_S for name in names)

    def _publish(self) -> None:
        self._told = time.perf_counter()
        if self.ranks > 1:
            self.table.tell(f"progress/{self.rank}", self.mine)

    def _read(self) -> None:
        others = [f"progress/{rank}" for rank in range(self.ranks) if rank != self.rank]
        self._others = self.table.told(others, RankProgress)
