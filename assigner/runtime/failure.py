"""One failure, told to every rank: what failed first, where, and with which traceback.

Whoever fails writes the cause under one key of the job's store; the first to write wins. Who knows of a failure stays
a moment before it ends, so that all can read it. A thread on every rank looks at that key and prints what it finds.
The main thread mostly learns of a dead neighbour from its closed connection and then asks for the cause; a main thread
that sits in a wait which never ends is ended by the watching thread.

    rank 1: raises in a forward        report  ······ stays 0.6 s ······ raises, ends
    rank 0: waits for a gradient                 prints the cause        connection closed: raises WorkerError, ends
    rank 2: waits for rank 0                     prints the cause ······ 3 s ······ ended by its watching thread
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch.distributed import DistError

from assigner.errors import WorkerError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_KEY = "assigner/failure"
_POLL_S = 0.25
_STAY_S = 0.6  # more than two polls
_ASK_S = 1.5
_GRACE_S = 3.0


@dataclass(frozen=True)
class Failure:
    """The first cause.

    Args:
        worker: Who failed.
        where: What it was doing; empty: nobody knows.
        error: Type and message.
        trace: Its traceback.
    """

    worker: str
    where: str
    error: str
    trace: str

    def __str__(self) -> str:
        return f"{self.worker} failed{' in ' if self.where else ''}{self.where}: {self.error}"

    def to_error(self, *, traced: bool = True) -> WorkerError:
        """The failure as an error on a rank that did not fail itself, with or without the traceback."""
        trace = f"\n--- traceback of {self.worker} ---\n{self.trace.rstrip()}\n---" if self.trace and traced else ""
        return WorkerError(f"{self}{trace}")


class FailureWatch:
    """Reports this rank's failure and learns of the others'.

    Args:
        store: The job's store; a connection of its own.
        worker: This rank's worker.
        exit_code: Of a process whose main thread has to be ended.

    Attributes:
        printed: Another rank's failure stands on this rank's stderr.
    """

    def __init__(self, store: Store, worker: str, *, exit_code: int = WorkerError.exit_code) -> None:
        self.store = store
        self.exit_code = exit_code
        self.worker = worker
        self.printed = False
        self.known = threading.Event()  # the main thread is about to raise by itself
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="assigner-failure", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # a thread inside the store when the interpreter ends would abort the process

    def report(self, where: str, error: BaseException) -> Failure:
        """Write this rank's failure unless there is one already; return the first."""
        trace = "".join(traceback.format_exception(error))
        mine = Failure(self.worker, where, f"{type(error).__name__}: {error}", trace)
        return self._write(mine)

    def lost(self, peer: str, where: str, error: BaseException) -> Failure:
        """A connection broke: give the peer's own report a moment to appear, else report that the peer is gone."""
        self.known.set()
        mine = Failure(
            peer, "", f"its process is gone, cut off or stuck; {self.worker} noticed in {where}{_why(error)}", ""
        )
        deadline = time.monotonic() + _ASK_S
        while time.monotonic() < deadline:
            try:
                found = self._read()
            except DistError:
                return mine if _launcher_keeps_store() else _host_gone(mine)
            if found is not None:
                time.sleep(_STAY_S)
                return found
            time.sleep(0.05)
        return self._write(mine)

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self.close)
        self.closed.set()
        self.thread.join(2 * _POLL_S + 1)

    def _write(self, failure: Failure) -> Failure:
        self.known.set()
        try:
            first = Failure(**json.loads(self.store.compare_set(_KEY, "", json.dumps(asdict(failure)))))
        except DistError:
            return failure  # the store is gone as well: this rank says what it knows
        time.sleep(_STAY_S)  # this process may host the store, or a launcher end the others when it ends
        return first

    def _read(self) -> Failure | None:
        if not self.store.check([_KEY]):
            return None
        return Failure(**json.loads(self.store.get(_KEY)))

    def _watch(self) -> None:
        while not self.closed.wait(_POLL_S):
            try:
                found = self._read()
            except DistError:
                return  # the store's host has left: a rank that still waits for somebody finds the connection closed
            if found is not None:
                self._end(found)
                return

    def _end(self, found: Failure) -> None:
        """Print the cause, and end the process unless its main thread comes to know by itself."""
        if not self.known.is_set():
            self.printed = True
            sys.stderr.write(f"[{self.worker}] error: {found.to_error()}\n")
            sys.stderr.flush()
        if not self.known.wait(_GRACE_S) and not self.closed.is_set():
            os._exit(self.exit_code)


def _launcher_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _host_gone(noticed: Failure) -> Failure:
    """Rank 0 keeps the store, and does not answer: whoever lost a connection after that is no first cause."""
    if noticed.worker.startswith("worker:0"):
        return noticed
    return Failure("worker:0", "", f"its process is gone with the job's store; after it, {noticed}", "")


def _why(error: BaseException) -> str:
    """What gloo says of a broken connection, without the line of its source and its advice."""
    text = re.sub(r"^\[\S+\] |\. This is typically.*", "", " ".join(str(error).split()))
    return f" ({text[:160]})" if text else ""
