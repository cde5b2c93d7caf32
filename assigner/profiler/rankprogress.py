"""What the ranks of a profiling run tell each other, and where they stand; rank 0 shows what will take longest.

They tell it in JSON through the job's store, checked on reading. Whoever waits for others looks again and again: at
what they have told, and once a second at whether they still can. So the wait for a rank that is gone ends within a
second, and that for one that is stopped when its heart has not beaten for a while. What a rank waits in, and for whom,
is noted for the watch over the run, which ends waits elsewhere and answers ranks that ask.

How long a rank will still take is what is left of its work, at the pace of what is done.

A rank that is done with its part waits for the others by looking at what they tell, however long that takes: they are
at work as long as their hearts beat. Where one has stopped, the run has ended: every heart looks at the others, and
tells of it, so that no rank waits for a stopped one until a time-out, whatever it waits in. A heart is a thread of
Python's, and does not beat while C code keeps Python's lock, as a builder that reads a large file: where the rank's
launcher tells that its process runs, it has until the time-out.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import DistError

from assigner import formatting as fmt
from assigner.errors import WorkerError
from assigner.launch.limitedstore import LimitedStore, StoreSilentError
from assigner.launch.seal import seal, unseal
from assigner.location import rank_of
from assigner.runtime.messages.sending import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from assigner.runtime.failures.failure import FailureWatch


T = TypeVar("T")

_TELL_S = 1.0
_LOOK_S = 0.3
_BEAT_S = 5.0
_LOST_S = 30.0
_CHECK_S = 1.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.1
_MOST_NAMES = 8

OTHERS = "another rank"
"""Whom a rank waits for that waits for all."""


class Exchange:
    """The ranks' common table, in the job's store.

    A wait for another rank that takes longer than `timeout_s` fails; so does a call that the store does not answer.
    """

    def __init__(self, store: Store, rank: int, ranks: int, *, timeout_s: float) -> None:
        self.store, self.rank, self.ranks, self.timeout_s = LimitedStore(store), rank, ranks, timeout_s
        self.at, self.awaited = "the start", ""  # what this rank is at, and whom it waits for there, in words
        self.watch: FailureWatch | None = None  # is told of both
        self.why_lost: Callable[[int], str] = lambda _: ""  # why a rank will tell nothing any more; empty: it is there

    def close(self) -> None:
        """Exchange no more; whoever waits for something is told that the store is silent."""
        self.store.close()

    def begin(self, at: str, awaited: str = "") -> None:
        """From here on this rank is at something, and waits for somebody there; see `at` and `awaited`."""
        self.at, self.awaited = at, awaited
        if self.watch is not None:
            self.watch.busy_since = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, at: str) -> Iterator[None]:
        """Be at a wait for others during a block; where that fails, its words stay."""
        before = self.at
        self.begin(at, OTHERS)
        yield
        self.begin(before)

    def to_first(self, name: str, value: T, kind: type[T]) -> list[T]:
        """Every rank's `value`, in their order, on rank 0; empty elsewhere.

        Raises:
            LostConnectionError: a rank did not tell its own in time, or is gone; all that are missing are named.
        """
        self.tell(f"{name}/{self.rank}", value)
        if self.rank != 0:
            return []
        self._wait(name)
        return self.told([f"{name}/{rank}" for rank in range(self.ranks)], kind)

    def to_all(self, name: str, value: T, kind: type[T]) -> list[T]:
        """Every rank's `value`, in their order, on every rank; errors as of `to_first`."""
        self.tell(f"{name}/{self.rank}", value)
        self._wait(name)
        return self.told([f"{name}/{rank}" for rank in range(self.ranks)], kind)

    def tell(self, name: str, value: Any) -> None:
        """Write a value under a name, for whoever looks."""
        self.store.set(f"assigner/{name}", seal(f"assigner/{name}", value))

    def told(self, names: Sequence[str], kind: type[T]) -> list[T]:
        """What stands under some names, without a wait; nothing before all of it does."""
        keys = [f"assigner/{name}" for name in names]
        found = self.store.multi_get(keys) if keys and self.store.check(keys) else []
        return [unseal(kind, key, each) for key, each in zip(keys, found, strict=False)]

    def check_there(self, ranks: Sequence[int]) -> None:
        """Nothing where some ranks are still there.

        Raises:
            LostConnectionError: one of them will tell nothing any more.
        """
        for rank in ranks:
            if why := self.why_lost(rank):
                raise LostConnectionError(f"worker:{rank}", ConnectionError(why))

    def _wait(self, name: str) -> None:
        """Until every rank has told something under a name."""
        keys = {rank: f"assigner/{name}/{rank}" for rank in range(self.ranks)}
        begun, pause_s, looked = time.monotonic(), _LEAST_PAUSE_S, 0.0
        with self.waiting(f"the exchange of {name}"):
            while not self.store.check([*keys.values()]):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
                now = time.monotonic()
                if now - looked < _CHECK_S and now - begun < self.timeout_s:
                    continue
                looked = now
                missing = [rank for rank, key in keys.items() if not self.store.check([key])]
                self.awaited = workers_text(missing) or OTHERS
                self.check_there(missing)
                if missing and now - begun >= self.timeout_s:
                    raise LostConnectionError(
                        self.awaited, TimeoutError(f"timed out: nothing of it for {self.timeout_s:g} s")
                    )


def workers_text(ranks: Sequence[int]) -> str:
    """Ranks as workers, the first few of many."""
    names = [f"worker:{rank}" for rank in ranks[:_MOST_NAMES]]
    more = f" ({len(ranks) - _MOST_NAMES} more)" if len(ranks) > _MOST_NAMES else ""
    return f"{fmt.series(names)}{more}" if names else ""


@dataclass(frozen=True)
class RankProgress:
    """Where a rank stands."""

    worker: str
    what: str  # what it measures now
    share: float  # the share of its work that is done, 0 to 1, by time
    left_s: float | None  # seconds that it will still take; None: not known yet
    phase: int = 0  # how many phases it has behind it
    kind: str = ""  # of the work that it is at, as its forecast has it; empty: it measures nothing yet


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
    """Time left of one rank's work; `kind` is of the work that goes on, and empty where none has begun."""

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
    """A thread that tells the others every few seconds that this process is there, and looks whether they are.

    Its table has a connection of its own, and is closed with it. `on_stop` is called once with a rank whose heart has
    stopped for a while, and with why it is lost; `vouched` says how often a rank's launcher has told that its process
    runs.
    """

    def __init__(
        self,
        table: Exchange,
        on_stop: Callable[[int, str], None] = lambda *_: None,
        vouched: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.table, self._on_stop, self._vouched = table, on_stop, vouched
        self.closed = threading.Event()
        self._seen: dict[int, tuple[int, float]] = {}  # each rank's last beat, and for how long it was that
        self._running: dict[int, tuple[int, float]] = {}  # since then, what its launcher told, likewise
        self._looked: float | None = None
        self.thread = threading.Thread(target=self._live, name="assigner-heart", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a thread inside the store when the interpreter ends would abort the process

    def close(self) -> None:
        """Stop."""
        atexit.unregister(self.close)
        self.closed.set()
        self.table.close()
        self.thread.join(_BEAT_S)

    def why_stopped(self, rank: int) -> str:
        """Why another rank is lost whose heart has not beaten for a while; empty: it has, or its process runs."""
        silent_s, limit_s = self._seen.get(rank, (0, 0.0))[1], max(_LOST_S, self.table.timeout_s)
        if silent_s > limit_s:
            return f"it has not answered for {limit_s:g} s: it is stopped, or code in it keeps Python's lock"
        if silent_s > _LOST_S and self._running.get(rank, (0, 0.0))[1] > _LOST_S:
            return f"it has not answered for {_LOST_S:g} s: its process is stopped, or its host cut off"
        return ""

    def _live(self) -> None:
        beats, has_told = 0, False
        while not self.closed.is_set():
            try:
                self.table.tell(f"beat/{self.table.rank}", beats)
                self._look()
            except StoreSilentError:
                self._looked = None  # a stopped store that goes on finds this one still there
            except DistError:
                return  # the store's host has left: whoever waits for this rank has found that out
            lost = [(rank, why) for rank in self._seen if (why := self.why_stopped(rank))]
            if lost and not has_told:
                has_told = True
                self._on_stop(*lost[0])
            beats += 1
            self.closed.wait(_BEAT_S)

    def _beats(self, ranks: Sequence[int]) -> list[int]:
        """Their last beats; empty: one of them has not beaten yet, or a stranger has written there."""
        with suppress(WorkerError):
            return self.table.told([f"beat/{rank}" for rank in ranks], int)
        return []

    def _look(self) -> None:
        others = [rank for rank in range(self.table.ranks) if rank != self.table.rank]
        found = self._beats(others) or [(self._beats([rank]) or [-1])[0] for rank in others]
        now = time.monotonic()
        # a process that was stopped itself, as by Ctrl-Z, has not looked meanwhile
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * _BEAT_S)
        self._looked = now
        for rank, last in zip(others, found, strict=True):
            beat, silent_s = self._seen.get(rank, (-1, 0.0))
            self._seen[rank] = (last, silent_s + passed if last == beat else 0.0)
            if last != beat:
                self._running.pop(rank, None)
                continue
            told = self._vouched(rank)
            before, silent_s = self._running.get(rank, (told, silent_s))
            self._running[rank] = (told, silent_s + passed if told == before else 0.0)


class RanksProgress:
    """Where all ranks stand; `show` is called with the progress to show, the slowest rank's."""

    def __init__(self, table: Exchange, worker: str, show: Callable[[RankProgress], None]) -> None:
        self.table, self.rank, self.ranks, self.show = table, table.rank, table.ranks, show
        self.mine = RankProgress(worker, "", 0.0, None)
        self.together = False  # all ranks do the same from here on; rank 0 shows its own progress
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
        """This rank is done with its part: wait for the others; rank 0 shows the slowest.

        `meanwhile` is called again and again until then, and says whether there was anything to do.

        Raises:
            LostConnectionError: one is gone, or its heart has stopped.
        """
        self.mine = replace(self.mine, phase=self.mine.phase + 1)
        self._publish()
        looked = time.perf_counter()
        with self.table.waiting("the wait for those that still measure"):
            while self.ranks > 1:
                self._read()
                behind = [each for each in self._others if each.phase < self.mine.phase]
                if len(self._others) == self.ranks - 1 and not behind:
                    return
                self.table.awaited = workers_text([rank_of(each.worker) for each in behind]) or OTHERS
                if time.perf_counter() - looked >= _CHECK_S:
                    looked = time.perf_counter()
                    self.table.check_there([rank for rank in range(self.ranks) if rank != self.rank])
                if behind and self.rank == 0:
                    self.show(slowest(behind))
                look = time.perf_counter() + _LOOK_S
                while time.perf_counter() < look:
                    if not meanwhile():
                        time.sleep(_LOOK_S)

    def _publish(self) -> None:
        self._told = time.perf_counter()
        if self.ranks > 1:
            self.table.tell(f"progress/{self.rank}", self.mine)

    def _read(self) -> None:
        others = [f"progress/{rank}" for rank in range(self.ranks) if rank != self.rank]
        self._others = self.table.told(others, RankProgress)
