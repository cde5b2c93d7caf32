"""One failure, told to every rank: what failed first, where, and with which traceback.

Whoever fails writes the cause under one key of the job's store; the first to write wins. A thread on every rank looks
at that key, prints what it finds, and notes that this rank knows. Who knows of a failure stays until all do: it may
host the store, and a launcher may end the others when it ends. That takes as long as the slowest rank gets no
processor, and 10 s at most, for a rank may be gone without a word. The main thread mostly learns of a dead neighbour
from its closed connection and then asks for the cause; a main thread that sits in a wait which never ends is ended by
the watching thread. Of a process that died before it could join, its launcher tells.

    rank 1: raises in a forward        report ····· stays ···· raises, ends
    rank 0: waits for a gradient         prints the cause      connection closed: raises WorkerError, ends
    rank 2: waits for rank 0                  prints the cause ······ 3 s ······ ended by its watching thread

The watching thread ends the process where the main one stays for too long, as in a wait that never ends:

    what is known                                what the main thread has to do     within
    a failure that was told                      to come to know of it by itself    3 s, and a stay
    no store, or a host that does not answer:    to know, or to do something else   30 s
    nobody can tell a cause any more
    the main thread knows the cause              to leave the run                   30 s
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]  # without `__all__`

from assigner.errors import AssignerError, WorkerError
from assigner.launch.failurereport import ended_hint, shortened, words_of
from assigner.launch.launcherwatch import LOOK_S
from assigner.launch.limitedstore import LimitedStore, StoreSilentError, any_there
from assigner.launch.seal import clean, seal_first, unseal
from assigner.launch.shutdown import FAILED_KEY, HostFailure, read_host_failure, signalled, vouched
from assigner.location import rank_name
from assigner.runtime.failures.blame import (
    CUT_HINT,
    NO_STORE_HINT,
    SILENT_HINT,
    MissedRank,
    host_gone,
    is_one_host,
    was_late,
)
from assigner.runtime.failures.cause import Failure, gloo_words
from assigner.runtime.failures.questions import CALLS, DOINGS, Doing, asked_about

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import Store  # type: ignore[attr-defined]

    from assigner.launch.sockets import Connections

_KEY = "assigner/failure"
_KNOWN = "assigner/failure known to"
_WORKER, _RANK = re.compile(r"worker:\d+"), re.compile(r"worker:(\d+)")
_POLL_S = 0.25
_PAUSE_S = 5.0  # no busy machine keeps a thread from its processor for so long
_END_S = 10.0  # its thread ends after a poll; one that starves on a busy machine must not see the interpreter's end
_STAY_S = 10.0
_GONE_S = 1.5
_ORPHAN_S = 2 * LOOK_S
_ASK_S, _LOOK_S = 1.5, 0.05
_ANSWER_S = 4.0  # sixteen looks of a watching thread
_GRACE_S = 3.0
_LEAVE_S = 30.0  # more than a stay
_BUSY_S = 30.0
_MOMENT_S = 0.6  # more than two polls
_NO_ADDRESS = re.compile(r"tcp/device\.cc|Unable to (?:find|resolve)|makeDeviceFor|unsupported gloo device")


class _Pauses:
    """Times for which this process has not run, as one that is stopped: others may have given it up meanwhile."""

    def __init__(self) -> None:
        self._since: float | None = None  # since when the watching thread waits for its next look
        self._lasted_s = self._ended_at = 0.0

    def wait(self, event: threading.Event) -> bool:
        """Wait for the next look; True: the event has come."""
        since = self._since = time.monotonic()
        has_come = event.wait(_POLL_S)
        self._since = None
        self._note(since)
        return has_come

    def _note(self, since: float) -> None:
        now = time.monotonic()
        if now - since > _PAUSE_S:
            self._lasted_s, self._ended_at = now - since, now

    @property
    def words(self) -> str:
        """Of one that has just ended; empty: there was none."""
        if (since := self._since) is not None:
            self._note(since)  # the main thread is the first to run again
        if self._lasted_s < _PAUSE_S or time.monotonic() - self._ended_at > _PAUSE_S:
            return ""
        return (
            f" after it had not run for {self._lasted_s:.0f} s itself, as if stopped: the others may have given it up"
        )


def _as_told(told: HostFailure, noticed: str = "") -> Failure:
    """What a launcher tells of a rank."""
    said, hint = f"its process {told.how}", ended_hint(told.how)
    if told.said:
        said, hint = f"{told.said}; {said}", "the output of its host has all of it"
    return Failure(told.worker, "", "; ".join(filter(None, (said, noticed))), hint=hint).cleaned()


class FailureWatch:
    """Reports this rank's failure and learns of the others'.

    Args:
        store: The job's store, under the run's name, the same on every rank; a connection of its own.
        connections: The group's; None: they are not this package's to watch.

    Attributes:
        printed: Another rank's failure stands on this rank's stderr.
        on_question: Called with the store and the number of a comparison when another rank asks what this one has
            called, until it says that it has answered.
        busy_since: When the main thread began what it does for the run (`time.monotonic`); None: it does nothing there.
        idle_since: When it last ended something.
        doing: What it is at, in words, and the worker that it waits for, for ranks that ask; None: it tells nobody.
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        ranks: int,
        connections: Connections | None = None,
        exit_code: int = WorkerError.exit_code,
    ) -> None:
        self.store = LimitedStore(store)
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self.launcher = LimitedStore(store, beside=self.store)  # as launchers use it
        self.connections = connections
        if connections is not None:
            connections.guard()
        self.exit_code = exit_code
        self.worker, self.ranks = worker, ranks
        self.printed = self._has_noted = False
        self.busy_since: float | None = None
        self.idle_since = time.monotonic()
        self.doing: Callable[[], tuple[str, str]] | None = None
        self._missed = ""
        self.on_question: Callable[[Store, int], bool] | None = None
        self._found: Failure | None = None
        self._pauses = _Pauses()
        self.grace_s, self.stay_s = _GRACE_S, _STAY_S
        self.known = threading.Event()  # the main thread is about to raise by itself
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="assigner-failure", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a thread inside the store when the interpreter ends would abort the process

    def report(self, where: str, error: BaseException, worker: str | None = None, *, knows: bool = True) -> Failure:
        """Write a failure of this rank, or of another worker, unless there is one already; return the first.

        Args:
            where: What was being done.
            error: It.
            worker: Whose it is; None: this one's.
            knows: The thread that does something for the run knows of it, and leaves.
        """
        kind, trace = type(error), shortened("".join(traceback.format_exception(error)))
        hint = error.hint if isinstance(error, AssignerError) else None
        worker = worker or self.worker
        found = Failure(worker, where, words_of(error), kind.__name__, kind.__module__, trace, hint)
        return self._write(found, knows=knows)

    def accuse(self, worker: str, why: str) -> None:
        """Write that another rank is lost, which this one's main thread may not know: watching threads see to it."""
        with suppress(DistError):  # whoever keeps the store is lost as well
            seal_first(self.store, _KEY, Failure(worker, "", f"{why}; {self.worker} noticed", hint=SILENT_HINT))

    def vouched(self, rank: int) -> int:
        """How often a rank's launcher has told that its process runs; see `shutdown.vouched`."""
        return vouched(self.launcher, rank)

    def lost(self, peer: str, where: str, error: BaseException) -> Failure:
        """A connection broke, or a rank did not come: give its own report a moment to appear, else blame a rank.

        That is the peer, or the one that the peer waits for, in its turn.
        """
        self.known.set()
        self._missed = peer
        noticed = f"{self.worker} noticed in {where}{gloo_words(error)}{self._pauses.words}"
        is_cut, tells = self._is_cut, self.doing is not None
        is_alone = is_cut and self.connections is not None and self.connections.is_alone()
        missed = MissedRank(peer, self.worker, noticed, was_late(error), is_cut, is_alone, tells)
        begin, doings, asks = time.monotonic(), dict[int, Doing](), tells and not is_cut
        others = set(range(self.ranks)) - {self._rank}
        while True:
            try:
                found = self._read()
                if found is None and (ended := self._signalled(peer)) is not None:
                    return self._write(_as_told(ended, noticed))
                if asks and found is None:
                    if not doings:
                        DOINGS.ask(self.store)
                    doings.update(DOINGS.answers(self.store, others - doings.keys()))
            except DistError as lost:
                if self._found is not None:  # the watching thread was in time
                    return self._found
                is_silent = isinstance(lost, StoreSilentError)
                if not is_silent and is_one_host():  # the launcher's watch ends this process, and says why
                    time.sleep(_ORPHAN_S)
                mine = missed.without_store(is_silent=is_silent)
                mine.hand_over(to_tell_of=self.worker)
                return mine
            if found is not None:
                return self._agreed(found)
            waited_s = time.monotonic() - begin
            if is_cut or waited_s >= (_ANSWER_S if asks and others - doings.keys() else _ASK_S):
                mine = missed.among(doings, rank=self._rank, ranks=self.ranks) if asks else missed.failure
                return self._write(mine)
            time.sleep(_LOOK_S)

    def check(self) -> None:
        """Raise the first failure, where the watching thread has read it."""
        if self._found is not None:
            self.known.set()
            self._stay(self._found)  # this rank may host the store
            raise self._found.to_error(traced=not self.printed)

    @property
    def _is_cut(self) -> bool:
        return self.connections is not None and bool(self.connections.silent)

    @property
    def _rank(self) -> int:
        return int(rank_name(self.worker).removeprefix("worker:"))

    def _tell_doing(self) -> None:
        if self.doing is None or DOINGS.asked(self.store) is None:
            return
        busy = self.busy_since
        at, peer = ("", "") if busy is None else self.doing()
        since = self.idle_since if busy is None else busy
        doing = Doing(self.worker, shortened(at), self._missed or peer, max(0.0, time.monotonic() - since))
        DOINGS.answer(self.store, self._rank, doing)

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self.close)
        self.closed.set()
        if self.store.is_silent:
            self.store.close()
        self.thread.join(_END_S)
        self.store.close()

    def _write(self, failure: Failure, *, knows: bool = True) -> Failure:
        if knows:
            self.known.set()
        try:
            first = seal_first(self.store, _KEY, failure).cleaned()
        except DistError:
            return failure  # the store is gone as well: this rank says what it knows
        return self._agreed(first)

    def _agreed(self, first: Failure) -> Failure:
        """The first failure, of which this rank has just come to know: its launcher is told, and all ranks come to."""
        first.hand_over(to_tell_of=self.worker)
        self._stay(first)
        return first

    def _note_known(self) -> None:
        self.store.set(f"{_KNOWN} worker:{self._rank}", "")

    def _stay(self, failure: Failure) -> None:
        """This rank knows of a failure: come back when all ranks do, or time is up.

        One that seems to be gone is awaited for a moment: it may only be stuck, and has to learn why it is ended.
        """
        everyone = [f"worker:{rank}" for rank in range(self.ranks)]
        gone = set() if failure.kind else set(_WORKER.findall(failure.worker))  # one of several, it may say
        moments = (min(_GONE_S, self.stay_s), everyone), (self.stay_s, [each for each in everyone if each not in gone])
        begin = time.monotonic()
        with suppress(DistError):  # its host has left, and nobody can read any more
            self._note_known()
            for end_s, awaited in moments:
                keys = [f"{_KNOWN} {worker}" for worker in awaited]
                while not self.store.check(keys):
                    if time.monotonic() - begin >= end_s or self.closed.wait(_LOOK_S):
                        break
                else:
                    return

    def _read(self) -> Failure | None:
        if self.store.check([_KEY]):
            try:
                return unseal(Failure, _KEY, self.store.get(_KEY)).cleaned()
            except WorkerError as error:  # a stranger's: the run goes on, and its own first failure replaces it
                self._note_foreign(error)
        told = read_host_failure(self.launcher)
        return None if told is None else _as_told(told)

    def _signalled(self, peer: str) -> HostFailure | None:
        """What the launcher of a rank that is missed has told of a signal, or that of any, where nobody knows which."""
        named: list[int | None] = [int(each) for each in _RANK.findall(peer)]
        return next(filter(None, (signalled(self.launcher, rank) for rank in named or [None])), None)

    def _watch(self) -> None:
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 - a run that nobody watches any more must not go on
            with suppress(Exception):  # stderr may be what is broken
                sys.stderr.write(f"[{self.worker}] error: the watch over the run failed: {clean(repr(error))}\n")
            with suppress(Exception):
                self.report("watching the run", error)
            self._exit()

    def _note_foreign(self, error: WorkerError) -> None:
        if not self._has_noted:
            self._has_noted = True
            sys.stderr.write(f"[{self.worker}] warning: {clean(error.message)}; it is ignored\n")

    def _look(self) -> None:
        places = (self.store, _KEY), (self.launcher, FAILED_KEY), (self.store, CALLS.name), (self.store, DOINGS.name)
        while not self._pauses.wait(self.closed):
            try:
                found = self._news() if any_there(*places) else None
            except StoreSilentError:
                self._end_without("the job's store does not answer", while_silent=True)
                continue
            except DistError:  # its host has left, as it may: a rank that waits for somebody mostly finds it closed
                self._end_without("the job's store is gone")
                return
            if found is not None:
                self._end(found)
                return
            if self.connections is not None and self.connections.silent:
                self._end_without(f"{' and '.join(sorted(self.connections.silent))} does not answer")
                return

    def _news(self) -> Failure | None:
        """Answer what has been asked; the first failure."""
        found = self._read()
        number = None if self.on_question is None else asked_about(self.store)
        if self.on_question is not None and number is not None and self.on_question(self.store, number):
            self.on_question = None
        if found is None:
            self._tell_doing()
        return found

    def _end_without(self, noticed: str, *, while_silent: bool = False) -> None:
        """No rank can tell a cause: end the process when its main thread stays where it is and comes to know of none.

        A wait for NCCL or for a GPU does not notice that a connection is closed.

        Args:
            noticed: Why nobody can.
            while_silent: Come back once the store answers again.
        """
        since = time.monotonic()
        while not self.closed.wait(_POLL_S) and not self.known.is_set():
            if while_silent and not self.store.is_silent:
                return
            busy = self.busy_since
            if busy is not None and time.monotonic() - max(busy, since) > _BUSY_S:
                error = f"it has waited for {_BUSY_S:g} s since {noticed}"
                mine = Failure(self.worker, "", error, hint=CUT_HINT if self._is_cut else NO_STORE_HINT)
                mine = host_gone(mine, is_silent=True) if while_silent else mine
                if not mine.hand_over(to_tell_of=self.worker):
                    sys.stderr.write(f"[{self.worker}] error: {mine}\n[{self.worker}] hint: {mine.hint}\n")
                self._exit()
        self._see_out()

    def _end(self, found: Failure) -> None:
        """Print the cause, and end the process unless its main thread comes to know by itself."""
        self._found = found
        if self.connections is not None:
            self.connections.run_failed = True
        told = found.hand_over(to_tell_of=self.worker)
        if not self.known.is_set():
            self.printed = True
        if not self.known.is_set() and not told:
            sys.stderr.write(f"[{self.worker}] error: {found.told}\n")
            sys.stderr.flush()
        with suppress(DistError):
            self._note_known()
        if not self.known.wait(self.grace_s):
            self._stay(found)
            if not self.known.is_set() and not self.closed.is_set():
                self._exit()
        self._see_out()

    def _see_out(self) -> None:
        """The main thread knows, and leaves the run; one that gets stuck there is ended."""
        if not self.closed.wait(_LEAVE_S):
            sys.stderr.write(f"[{self.worker}] error: it could not leave the run within {_LEAVE_S:g} s: ended\n")
            self._exit()

    def _exit(self) -> None:
        for each in (sys.stdout, sys.stderr):
            with suppress(Exception):  # it is closed, or its reader is gone
                each.flush()
        os._exit(self.exit_code)


@contextmanager
def joining(store: Store, name: str, worker: str, ranks: int) -> Iterator[FailureWatch]:
    """Watch while a block makes the process group: a launcher may tell of a rank that will not come.

    Args:
        store: The job's store, without prefixes; a connection of its own.
        name: The group's, the same on every rank.
        worker: This rank.
        ranks: How many the group will have.

    Raises:
        WorkerError: the ranks lost each other, or this one cannot take part.
    """
    watch = FailureWatch(PrefixStore(f"{name} joining", store), worker, ranks=ranks)
    # a rank that waits for one that will not come learns of nothing by itself, and that one never knows
    watch.grace_s = watch.stay_s = _MOMENT_S
    watch.busy_since = time.monotonic()
    try:
        yield watch
    except RuntimeError as error:  # torch has no type of its own for a connection that broke
        if _is_own(error):
            watch.report("joining the run", error)
            raise WorkerError(
                f"{worker} cannot join the run{gloo_words(error)}",
                hint="GLOO_SOCKET_IFNAME names the network interface to use; without it, the host's name must resolve",
            ) from error
        raise watch.lost("another worker", "joining the run", error).to_error() from None  # the cause says it all
    finally:
        watch.close()


def _is_own(error: RuntimeError) -> bool:
    """Whether gloo found no interface or address of this host; all else that it says while it joins is of others."""
    return not isinstance(error, DistError) and bool(_NO_ADDRESS.search(str(error)))
