"""How far a profiling run is and how long it will still take: what is left, at the pace of what is done.

Every rank keeps count of its own work and tells the others once a second; rank 0 shows the one that will take longest.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed import Store  # type: ignore[attr-defined]

_TELL_S = 1.0
_LOOK_S = 0.3


@dataclass(frozen=True)
class Standing:
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
class _Work:
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
        self.works: dict[str, _Work] = {}
        self._current: _Work | None = None
        self._since = self.begun

    def plan(self, kind: str, pieces: float, each_s: float) -> None:
        """There are so many pieces of a kind of work, of about `each_s` seconds."""
        self.works[kind] = _Work(pieces, each_s)

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


class Standings:
    """Where all ranks stand.

    Args:
        store: The job's store.
        rank: This rank.
        ranks: How many there are.
        worker: This rank's worker.
        show: Called with the standing to show, the slowest rank's.

    Attributes:
        together: All ranks do the same from here on; rank 0 shows its own standing.
    """

    def __init__(self, store: Store, rank: int, ranks: int, worker: str, show: Callable[[Standing], None]) -> None:
        self.store, self.rank, self.ranks, self.show = store, rank, ranks, show
        self.mine = Standing(worker, "", 0.0, None)
        self.together = False
        self._others: list[Standing] = []
        self._told = -_TELL_S

    def tell(self, what: str, forecast: Forecast) -> None:
        """Note what this rank does; at most once a second the others hear of it."""
        self.mine = Standing(self.mine.worker, what, forecast.share(), forecast.left_s(), self.mine.phase)
        if time.perf_counter() - self._told >= _TELL_S:
            self._publish()
            if self.rank == 0:
                self._read()
        if self.rank == 0:
            self.show(self.mine if self.together else slowest([self.mine, *self._others]))

    def finish_phase(self) -> None:
        """This rank is done with its part; rank 0 shows the others until they are, too."""
        self.mine = Standing(self.mine.worker, self.mine.what, self.mine.share, self.mine.left_s, self.mine.phase + 1)
        self._publish()
        while self.rank == 0:
            self._read()
            behind = [each for each in self._others if each.phase < self.mine.phase]
            if len(self._others) == self.ranks - 1 and not behind:
                return
            if behind:
                self.show(slowest(behind))
            time.sleep(_LOOK_S)

    def _publish(self) -> None:
        self._told = time.perf_counter()
        if self.ranks > 1:
            self.store.set(f"assigner/standing/{self.rank}", json.dumps(asdict(self.mine)))

    def _read(self) -> None:
        names = [f"assigner/standing/{rank}" for rank in range(1, self.ranks)]
        found: Iterable[Any] = self.store.multi_get(names) if names and self.store.check(names) else ()
        self._others = [Standing(**json.loads(each)) for each in found]


def slowest(standings: Iterable[Standing]) -> Standing:
    """Of several ranks the one that will take longest."""
    return max(standings, key=lambda each: float("inf") if each.left_s is None else each.left_s)
