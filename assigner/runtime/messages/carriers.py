"""What carries messages through the host: gloo, or MPI (`mpi`). Both start sends and receives that are waited for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from assigner.errors import UsageError
from assigner.runtime.messages.mpi import open_mpi
from assigner.runtime.messages.rendezvous import all_gather, group_connections

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

    from assigner.formats.terms import Backend


class MessageUnderWay(Protocol):
    """A send or a receive that was started."""

    def wait(self, timeout: timedelta) -> object:
        """Wait until it has left, or is there; RuntimeError: the other end is gone, or late."""


class Carrier(Protocol):
    """One rank's messages to and from the others. A tag tells those of two ranks apart; all tensors are contiguous.

    Attributes:
        name: As links of a profile have it.
        most_tag: The largest tag.
    """

    name: str
    most_tag: int

    def isend(self, tensor: torch.Tensor, target: int, tag: int) -> MessageUnderWay:
        """Start to send a CPU tensor, which stays as it is until it has left."""

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> MessageUnderWay:
        """Start to receive as many bytes as a CPU tensor has."""

    def close(self, *, failed: bool) -> None:
        """Nothing follows; `failed`: messages are still under way, and every wait for one ends."""


class GlooCarrier:
    """The world group's own messages, which move in gloo's threads; see `Carrier`.

    gloo writes a message in the thread that sends it, under the lock of its connection. Where its own thread, woken for
    another message, takes the core from that one meanwhile, it asks for events over and over until its turn is up:
    1.7 million calls of the system a second. So its threads are made to wait until the computing's turn is up, which
    SCHED_BATCH says. (Two ranks on two cores that other work shared, 26 messages of 384 KiB each way a step: gloo's
    threads had 10 to 54 ms of a rank's processor time a step before, 5 to 11 ms since.)
    """

    name = "gloo"
    most_tag = (1 << 31) - 2  # the one above is that of turns (see `ranks.run`)

    def __init__(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        self._group = group  # itself: torch.distributed's functions look first who calls, at a third of its time
        for thread in _threads("gloo_tcp_loop"):
            with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it: it goes on as it was
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))

    def isend(self, tensor: torch.Tensor, target: int, tag: int) -> MessageUnderWay:
        """See `Carrier`."""
        return self._group.send([tensor], target, tag)

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> MessageUnderWay:
        """See `Carrier`."""
        return self._group.recv([tensor], source, tag)

    def close(self, *, failed: bool) -> None:
        """The process group, which others use too, ends what is under way when it is left."""


def _threads(name: str) -> list[int]:
    """This process's threads of a name, by number; none where the system is not Linux."""
    found = []
    for each in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if each.read_text(encoding="utf-8").rstrip() == name:
                found.append(int(each.parent.name))
    return found


def open_carrier(backend: Backend | None, *, timeout_s: float) -> Carrier:
    """What carries this rank's messages through the host. Every rank of the run calls this at the same time.

    Raises:
        UsageError: the ranks were asked for unlike backends; see also `open_mpi`.
        WorkerError: see `open_mpi`.
    """
    told = all_gather(str, backend or "")
    unlike = next((rank for rank, each in enumerate(told) if each != told[0]), None)
    if unlike is not None:
        raise UsageError(
            f"backend: worker:0 has {told[0] or 'none'}, and worker:{unlike} has {told[unlike] or 'none'}",
            hint="ask for the same on every rank; ASSIGNER_BACKEND must reach all hosts",
        )
    return open_mpi(group_connections(), timeout_s=timeout_s) if backend == "mpi" else GlooCarrier()
