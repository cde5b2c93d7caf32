"""Messages through MPI, by mpi4py: a tensor's memory as it is, no pickles. Asked for with `backend="mpi"`.

The ranks meet through gloo as ever, which goes on beside it: what they agree on, clocks, barriers, the sums of
gradients over the workers of a stage, and the connections by which a rank learns that another one is gone.

No call of MPI here waits, and one lock lets in one thread at a time (MPI_THREAD_SERIALIZED is enough):

    the training's thread     starts sends and receives; looks whether the awaited one is there
    the thread of sends       looks whether a send has left
    a thread of its own       looks every millisecond while something is under way: MPI moves messages in calls alone

So a message travels while its worker computes, and every wait ends: with the message, after the time-out, with the
word of another rank's failure, or some seconds after the awaited rank's connection of gloo's has closed. (MPI itself
tells nobody that a rank is gone: mpirun ends the others, where it has started them.)

A process that leaves MPI in order waits for all others to do so (MPI_Finalize); one whose run has failed does not, and
its launcher ends the others.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from assigner.errors import UsageError, WorkerError

if TYPE_CHECKING:
    from datetime import timedelta

    from assigner.launch.sockets import Connections

_PART_BYTES = 1 << 30  # MPI counts bytes in 31 bits
_LOOK_S = 1e-3
_EAGER_LOOKS = 50  # without a pause: a small message is there after some microseconds
_LEAST_PAUSE_S, _MOST_PAUSE_S = 5e-5, 5e-4
_ASK_S = 0.25  # how often a wait looks at the other rank's connection
_GRACE_S = 1.5  # a rank that has left may have sent before
_LAUNCHED = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_INSTALL = "pip install 'mpi4py>=4', and an MPI: apt-get install openmpi-bin, the cluster's own module"
_START = "start the ranks with MPI's own launcher: mpirun -n RANKS ..., or srun --mpi=pmix ..."

_lock = threading.Lock()  # of the process: it has one MPI
_running: list[MpiCarrier] = []
_given_up: list[Any] = []  # what is under way when a run fails: MPI may still write to its memory
_failed: list[bool] = []  # whether this process's last run has


def load() -> Any:
    """The module `mpi4py.MPI`, with MPI not yet begun where nobody else has begun it.

    Raises:
        UsageError: there is none, or no library behind it.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError("backend 'mpi': mpi4py is not installed", hint=_INSTALL)
    if "mpi4py.MPI" not in sys.modules:
        settings = importlib.import_module("mpi4py").rc
        settings.initialize = settings.finalize = False
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"backend 'mpi': mpi4py finds no MPI library ({reason})", hint=_INSTALL) from error


def open_mpi(connections: Connections | None, *, timeout_s: float) -> MpiCarrier:
    """The messages of this rank. Every rank of the run calls this at the same time, from gloo's group.

    Args:
        connections: The group's, which tell of ranks that are gone; None: a wait for one lasts its time-out.
        timeout_s: A wait for another rank that takes longer fails.

    Raises:
        UsageError: MPI is not there, has not started these ranks, or lets no second thread in.
        WorkerError: a rank did not come within the time-out.
    """
    mpi = load()
    _begin(mpi)
    world, rank, ranks = mpi.COMM_WORLD, dist.get_rank(), dist.get_world_size()
    if (world.rank, world.size) != (rank, ranks):
        raise UsageError(
            f"backend 'mpi': to MPI this process is rank {world.rank} of {world.size}, to the run {rank} of {ranks}",
            hint=_START,
        )
    own, request = world.Idup()  # its messages are nobody else's
    until = time.monotonic() + timeout_s
    while not _tested(request):
        if time.monotonic() > until:
            raise WorkerError(f"MPI's communicator was not there after {timeout_s:g} s")
        time.sleep(_LOOK_S)
    own.Set_errhandler(mpi.ERRORS_RETURN)
    return MpiCarrier(mpi, own, connections)


def _begin(mpi: Any) -> None:
    if not mpi.Is_initialized():
        if not any(name in os.environ for name in _LAUNCHED):
            raise UsageError("backend 'mpi': no launcher of MPI's has started this process", hint=_START)
        dist.barrier()  # MPI's own beginning waits for all ranks, without an end: they are here
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        atexit.register(_end, mpi)
    if mpi.Is_finalized():
        raise UsageError("backend 'mpi': this process has left MPI, and cannot begin it again")
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise UsageError(
            "backend 'mpi': this MPI was begun for one thread",
            hint="begin it with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE, or leave that to the pipeline",
        )


def _end(mpi: Any) -> None:
    """At the process's end. One that ends in the middle of a run hangs up first: nobody has to wait for it."""
    for each in _running:
        if each.connections is not None:
            each.connections.hang_up()
    if not mpi.Is_finalized() and not any(_failed) and getattr(sys, "last_value", None) is None:
        mpi.Finalize()


def _tested(request: Any) -> bool:
    with _lock:
        return bool(request.Test())


class MpiMessage:
    """A send or a receive of some parts; see `MessageUnderWay`."""

    def __init__(self, carrier: MpiCarrier, peer: int, tensor: torch.Tensor, requests: list[tuple[Any, int]]) -> None:
        self._carrier, self.peer, self.tensor, self.requests = carrier, peer, tensor, requests
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        """Whether it has left, or is there; MPI's RuntimeError where it failed."""
        with _lock:
            self.look()
        if self._error is not None:
            raise self._error
        return not self.requests

    def look(self) -> bool:
        """Whether it is over, well or not. The caller has the lock."""
        status = self._carrier.mpi.Status()
        try:
            while self.requests and self._error is None:
                request, size = self.requests[0]
                if not request.Test(status):
                    break
                self.requests.pop(0)
                if size >= 0 and (came := status.Get_count(self._carrier.mpi.BYTE)) != size:
                    self._error = RuntimeError(f"worker:{self.peer} has sent {came} bytes where {size} are due")
        except RuntimeError as error:  # MPI's
            self._error = error
        return not self.requests or self._error is not None

    def wait(self, timeout: timedelta) -> None:
        """See `MessageUnderWay`."""
        begin = asked = time.monotonic()
        gone_since: float | None = None
        looks, pause_s, connections = 0, 0.0, self._carrier.connections
        while not self.is_completed():
            now = time.monotonic()
            if self._carrier.closed.is_set():
                raise RuntimeError("the run was left before the message was there")
            if connections is not None and connections.run_failed:
                raise RuntimeError("the run has failed")
            if now - begin > timeout.total_seconds():
                raise RuntimeError(f"no message for {timeout.total_seconds():g} s")
            if now - asked > _ASK_S:
                asked = now
                if connections is not None and connections.has_ended(self.peer):
                    gone_since = gone_since or now
                    if now - gone_since > _GRACE_S:
                        raise RuntimeError("its connection is closed")
            looks += 1
            if looks > _EAGER_LOOKS:
                pause_s = min(max(_LEAST_PAUSE_S, 1.2 * pause_s), _MOST_PAUSE_S)
            time.sleep(pause_s)


class MpiCarrier:
    """One rank's messages through MPI; see `Carrier`.

    Args:
        communicator: Of all ranks of the run, for these messages alone. It is left to MPI_Finalize: to free it would
            wait for ranks that may be gone.
    """

    name = "mpi"

    def __init__(self, mpi: Any, communicator: Any, connections: Connections | None) -> None:
        self.mpi, self.connections, self._communicator = mpi, connections, communicator
        self.most_tag: int = communicator.Get_attr(mpi.TAG_UB)
        self.closed, self._some = threading.Event(), threading.Event()
        self._under_way: list[MpiMessage] = []
        self._thread = threading.Thread(target=self._move, name="assigner-mpi", daemon=True)
        self._thread.start()
        _running.append(self)
        _failed.clear()

    def isend(self, tensor: torch.Tensor, target: int, tag: int) -> MpiMessage:
        """See `Carrier`."""
        return self._start(self._communicator.Isend, tensor, target, tag, sent=True)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> MpiMessage:
        """See `Carrier`."""
        return self._start(self._communicator.Irecv, tensor, source, tag, sent=False)

    def _start(self, call: Any, tensor: torch.Tensor, peer: int, tag: int, *, sent: bool) -> MpiMessage:
        """Parts of one tag arrive in their order; a tensor without bytes is a message, too."""
        memory = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        parts = [memory[at : at + _PART_BYTES] for at in range(0, max(1, len(memory)), _PART_BYTES)]
        with _lock:
            requests = [(call([part, self.mpi.BYTE], peer, tag), -1 if sent else len(part)) for part in parts]
            found = MpiMessage(self, peer, tensor, requests)
            if not found.look():
                self._under_way.append(found)
                self._some.set()
        return found

    def _move(self) -> None:
        """The thread that lets MPI move what is under way, whatever the others do."""
        while True:
            self._some.wait()
            if self.closed.is_set():
                return
            with _lock:
                self._under_way = [each for each in self._under_way if not each.look()]
                if not self._under_way:
                    self._some.clear()
            time.sleep(_LOOK_S)

    def close(self, *, failed: bool) -> None:
        """See `Carrier`."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._some.set()
        self._thread.join()
        _running.remove(self)
        _given_up.extend(self._under_way)
        if failed:
            _failed.append(True)
