"""What the pipelines of a process have together: their process group, the watch over it, and one call at a time.

    made       the first one joins the run's process group, or finds the script's own; from then on it is a part of it
    closed     in any order, each by all ranks together; with the last one the group is left
    dropped    without being closed: it stays a part of the group, for nobody knows when other ranks drop theirs
    failed     on any rank: all of them leave the run, for messages may be under way in any

They send their messages through one group, where those of several are told apart by the order of calls alone. So this
process is in one call at a time, in one thread; and where several are open, rank 0 tells first which one it calls.

A group that the script has made is left to it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # without `__all__`

from assigner.errors import UsageError
from assigner.launch.failurereport import words_of
from assigner.model.singleprocess import is_user_code
from assigner.runtime.failures.failure import FailureWatch
from assigner.runtime.failures.questions import CALLS, awaited, called
from assigner.runtime.messages.carriers import GlooCarrier
from assigner.runtime.messages.rendezvous import farewell, group_connections, group_store, leave_group
from assigner.runtime.messages.sending import checked
from assigner.runtime.ranks.process import join_run
from assigner.usercode import calling_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.distributed import Store  # type: ignore[attr-defined]

    from assigner.formats.plan import Plan
    from assigner.formats.terms import Backend
    from assigner.runtime.failures.callrecord import CallSums
    from assigner.runtime.failures.cause import Failure
    from assigner.runtime.messages.sending import LostConnectionError
    from assigner.runtime.ranks.membership import Membership

_TURN_TAG = GlooCarrier.most_tag + 1
_LONGEST_WAIT_S = 60.0  # for the call of another thread, which may itself wait for this one

_count = itertools.count()  # the n-th run of every rank is the same one
_joined: list[ProcessRun] = []  # the one that this process is in


class _Threads:
    """The threads of this process that are in a call of a pipeline, one at a time, or ask one something."""

    def __init__(self) -> None:
        self.calling = threading.RLock()  # held by the thread that is in a call
        self.asking = threading.RLock()  # by that one, too, or by one that only asks
        self.inside: list[str] = []  # its name, once for each call that it is in: a closure calls methods, too


_threads = [_Threads()]
os.register_at_fork(after_in_child=lambda: _threads.__setitem__(0, _Threads()))  # of all threads one is there


@contextlib.contextmanager
def one_call(*, asks: bool = False) -> Iterator[None]:
    """A block, or a method, in which no other thread of this process is in a call of a pipeline.

    Args:
        asks: It tells other ranks nothing, so it waits for another thread's call, for a minute at most, and that for
            it. Of other calls none waits: the one that waits could come first on another rank.

    Raises:
        UsageError: another thread is in a call. Ranks that wait for this one are told, and the run ends. Or the call is
            made by what a call runs, as by a loss, on these ranks alone: what it told others would be taken for that
            call's own messages.
    """
    threads = _threads[0]
    if not asks and is_user_code() and any(run.ranks > 1 for run in _own_runs()):
        place = calling_place()
        raise UsageError(
            f"the model, its loss, a metric or a hook calls a pipeline{f' at {place[0]}:{place[1]}' if place else ''},"
            " in a call of one: not every rank runs it there",
            hint="call it in the script, between two steps, and hand over what it gives with the batch, as a target",
        )
    if not asks and not threads.calling.acquire(blocking=False):
        _refuse_thread()
    try:
        if not threads.asking.acquire(timeout=_LONGEST_WAIT_S):
            _refuse_thread()
        threads.inside.append(threading.current_thread().name)
        try:
            yield
        finally:
            threads.inside.pop()
            try:
                if not asks and not threads.inside:
                    _end_left()
            finally:
                threads.asking.release()
    finally:
        if not asks:
            threads.calling.release()


def _own_runs() -> list[ProcessRun]:
    """The run that this process has joined, if any; a fork of it has joined none."""
    return [each for each in _joined if each.process == os.getpid()]


def _refuse_thread() -> NoReturn:
    mine, other, place = threading.current_thread().name, "another one", calling_place()
    with contextlib.suppress(IndexError):  # it has just come out
        other = repr(_threads[0].inside[-1])
    error = UsageError(
        f"thread {mine!r} calls a pipeline{f' at {place[0]}:{place[1]}' if place else ''} while thread {other} is in a"
        " call of one",
        hint="one thread at a time calls pipelines, all of this process, and on every rank in the same order: have one"
        " thread make all calls, or have each wait for the other's",
    )
    for run in _own_runs():
        if run.ranks > 1:
            run.fail(f"a call of thread {mine!r}", error)
    raise error


def _end_left() -> None:
    """Leave the run where it is over, or where the script has left the group."""
    for run in _own_runs():
        if run.why:
            run.end(run.why)
        elif run.group is not dist.group.WORLD:
            run.end("the script has left its process group")


class ProcessRun:
    """This process in its run.

    Attributes:
        watch: Over all of its pipelines.
        group: The process group.
        calls: The last calls that were compared with those of other ranks, which may ask for them.
        why: Why it is over; empty: it is not.
        process: The process that has joined; a fork of it has all of this, and no part in the run.
    """

    def __init__(self, *, is_ours: bool) -> None:
        self._is_ours = is_ours
        self.group: dist.ProcessGroup | None = dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._parts = self._made = 0
        self._members: WeakSet[Membership] = WeakSet()  # one that is dropped without a close goes, and stays a part
        self._working: tuple[Membership, int] | None = None
        self.calls: deque[CallSums] = deque(maxlen=2)
        self.why, self.process = "", os.getpid()
        store = PrefixStore(f"pipelines {next(_count)}", group_store().clone())  # type: ignore[attr-defined]
        self.watch = FailureWatch(store, f"worker:{self.rank}", ranks=self.ranks, connections=group_connections())
        self.watch.on_question = self._answer
        self.watch.doing = self._doing

    @classmethod
    def joined(cls, plan: Plan, timeout_s: float, backend: Backend | None) -> ProcessRun | None:
        """That which this process is in, or joins now; None: it is alone. Errors as `join_run`."""
        _end_left()
        is_made = join_run(plan, timeout_s, backend)
        if not _joined and dist.is_initialized():
            try:
                _joined.append(cls(is_ours=is_made))
            except BaseException:
                if is_made:
                    leave_group()
                raise
        return _joined[0] if _joined else None

    def add(self, member: Membership) -> int:
        """Have one more pipeline in it; which one it is, from 1 on, the same on every rank."""
        self._parts += 1
        self._made += 1
        self._members.add(member)
        return self._made

    @property
    def is_shared(self) -> bool:
        """Whether several pipelines are open."""
        return self._parts > 1

    def begin(self, member: Membership) -> tuple[Membership, int] | None:
        """This process does something for a pipeline until `rest`; what it did something for before."""
        before, self._working = self._working, (member, threading.get_ident())
        self.watch.worker, self.watch.busy_since = member.name, time.monotonic()
        return before

    def rest(self, before: tuple[Membership, int] | None) -> None:
        """It goes on with what it did before that; None: with the script."""
        awaited.pop(threading.get_ident(), None)
        self._working, self.watch.idle_since = before, time.monotonic()
        self.watch.busy_since = None if before is None else self.watch.idle_since

    def _doing(self) -> tuple[str, str]:
        if self._working is None:
            return "", ""
        member, thread = self._working
        which = f" of pipeline {member.number}" if self.is_shared else ""
        return f"{member.at}{which}", awaited.get(thread, "")

    def _answer(self, store: Store, number: int) -> bool:
        """The watching thread's answer to a question; False: this rank has not come to that comparison yet."""
        calls = tuple(self.calls)
        if not calls or calls[-1].number < number:
            return False
        CALLS.answer(store, self.rank, tuple(each.record() for each in calls))
        return True

    @property
    def ends_together(self) -> bool:
        """Whether all ranks close a pipeline together: not the last one in a group of the script's, nor behind that."""
        return (self._is_ours or self.is_shared) and self.group is dist.group.WORLD

    def take_turn(self, member: Membership, mine: CallSums) -> None:
        """Find that rank 0 calls a method of the same pipeline, before anything is sent for it.

        Raises:
            UsageError: it calls one of another pipeline.
            LostConnectionError: a rank is gone.
        """
        if not self.is_shared or self.ranks < 2:
            return
        told = torch.tensor(member.number, device="cpu")
        start: Callable[..., dist.Work | None] = dist.irecv if self.rank else dist.isend
        works = {
            peer: checked(f"worker:{peer}", functools.partial(start, told, peer, tag=_TURN_TAG))
            for peer in ([0] if self.rank else range(1, self.ranks))
        }
        for peer, work in works.items():
            assert work is not None
            checked(f"worker:{peer}", functools.partial(work.wait, member.timeout))
        if int(told) != member.number:
            records = called(self.watch.store, [0], mine.number).get(0, ())
            theirs = [each.told for each in records if each.number == mine.number]
            raise UsageError(
                f"worker:{self.rank} and worker:0 are in calls of different pipelines: worker:{self.rank} calls"
                f" {mine.record().told}, of pipeline {member.number}; worker:0 calls"
                f" {theirs[0] if theirs else 'a method'}, of pipeline {int(told)}",
                hint="every rank calls the same pipelines in the same order; they are numbered as they were made",
            )

    def meet(self) -> None:
        """Wait until every rank is here."""
        checked("another worker", dist.barrier)

    def farewell(self) -> Callable[[], None]:
        """What to call behind the close that comes next: the rank that hosts the job's store stays for the others."""
        return (lambda: None) if self.is_shared or not self._is_ours else farewell()

    def leave(self, member: Membership, why: str) -> None:
        """A pipeline leaves the run, on all ranks."""
        if self.why or member not in self._members:
            return
        self._members.discard(member)
        self._parts -= 1
        self._see_out([member], why, failed=False)

    def lost(self, error: LostConnectionError, at: str) -> Failure:
        """A message broke off: what failed first. All pipelines of this process leave the run."""
        failure = self.watch.lost(error.peer, at, error)
        self.end(str(failure))
        return failure

    def fail(self, at: str, error: BaseException) -> None:
        """This rank failed: tell the others; all pipelines of this process leave the run."""
        calling = _threads[0].calling
        is_alone = calling.acquire(blocking=False)
        if is_alone:
            calling.release()
        self.watch.report(at, error, knows=is_alone)
        self.end(f"it failed in {at}: {words_of(error)}")

    def end(self, why: str) -> None:
        """The run is over. Where another thread is in a call, that one wakes up, and leaves behind its call."""
        self.why = self.why or why
        calling = _threads[0].calling
        if not calling.acquire(blocking=False):
            if self.watch.connections is not None:
                self.watch.connections.hang_up()
            return
        try:
            if self in _joined:
                self._see_out([*self._members], self.why, failed=True)
        finally:
            calling.release()

    def _see_out(self, members: Iterable[Membership], why: str, *, failed: bool) -> None:
        """Have pipelines leave; where the run has failed, or has no others, leave the process group that was made here.

        In the middle: a thread that waits for a message wakes up when the group's connections are closed.
        """
        is_over = failed or not self._parts
        if is_over:
            _joined.remove(self)
            self.group = None
        with contextlib.ExitStack() as leaving:
            for member in members:
                leaving.enter_context(member.leaving(why, failed=failed))
            if is_over and self._is_ours:
                leave_group()
        if is_over:
            self.watch.close()
