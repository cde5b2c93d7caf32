"""One failure, told to every rank: what failed first, where, and with which traceback.

Whoever fails writes the cause under one key of the job's store; the first to write wins. A thread on every rank looks
at that key. The main thread mostly learns of a dead neighbour from its closed connection and then asks for the cause;
a main thread that sits in a wait which never ends is ended by the watching thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass

import torch.distributed as dist

from assigner.errors import WorkerError

_KEY = "assigner/failure"
_POLL_S = 0.25
_GRACE_S = 3.0


@dataclass(frozen=True)
class Failure:
    """The first cause.

    Args:
        worker: Who failed.
        where: What it was doing.
        error: Type and message.
        trace: Its traceback.
    """

    worker: str
    where: str
    error: str
    trace: str

    def to_error(self) -> WorkerError:
        """The failure as an error on a rank that did not fail itself."""
        trace = f"\n--- traceback of {self.worker} ---\n{self.trace.rstrip()}\n---" if self.trace else ""
        return WorkerError(f"{self.worker} failed in {self.where}: {self.error}{trace}")


class FailureWatch:
    """Reports this rank's failure and learns of the others'.

    Args:
        store: The job's store.
        worker: This rank's worker.
    """

    def __init__(self, store: dist.Store, worker: str) -> None:
        self.store = store
        self.worker = worker
        self.known = threading.Event()  # the main thread is about to raise by itself
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="assigner-failure", daemon=True)
        self.thread.start()

    def report(self, where: str, error: BaseException) -> Failure:
        """Write this rank's failure unless there is one already; return the first."""
        trace = "".join(traceback.format_exception(error))
        mine = Failure(self.worker, where, f"{type(error).__name__}: {error}", trace)
        return self._write(mine)

    def lost(self, peer: str, where: str, error: BaseException) -> Failure:
        """A connection broke: give the peer's own report a moment to appear, else report that the peer is gone."""
        self.known.set()
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            found = self._read()
            if found is not None:
                return found
            time.sleep(0.05)
        reason = str(error).strip().splitlines()
        text = f"its process is gone or cut off ({reason[-1][:160] if reason else type(error).__name__})"
        return self._write(Failure(peer, where, text, ""))

    def close(self) -> None:
        """Stop watching."""
        self.closed.set()
        self.thread.join(2 * _POLL_S + 1)

    def _write(self, failure: Failure) -> Failure:
        self.known.set()
        try:
            kept = self.store.compare_set(_KEY, "", json.dumps(asdict(failure)))
            return Failure(**json.loads(kept))
        except (dist.DistError, RuntimeError):
            return failure  # the store is gone as well: this rank says what it knows

    def _read(self) -> Failure | None:
        if not self.store.check([_KEY]):
            return None
        return Failure(**json.loads(self.store.get(_KEY)))

    def _watch(self) -> None:
        while not self.closed.wait(_POLL_S):
            try:
                found = self._read()
            except (dist.DistError, RuntimeError) as error:
                found = Failure("the job's store", "a look at it", f"no answer ({type(error).__name__})", "")
            if found is None:
                continue
            if not self.known.wait(_GRACE_S) and not self.closed.is_set():
                error = found.to_error()
                sys.stderr.write(f"[{self.worker}] error: {error.message}\n")
                sys.stderr.flush()
                os._exit(WorkerError.exit_code)  # the main thread sits in a wait that nothing else can end
            return
