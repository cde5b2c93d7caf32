"""What two ranks tell each other before they launch a message from GPU to GPU: no kernel may wait there for long.

A send or a receive of NCCL is a kernel that spins until its peer's runs. Meanwhile its device never comes to rest; and
whatever waits for that on its host (a kernel's first launch, memory that is freed to be allocated anew) waits as long,
also where CUDA loads all kernels at its start (benchmarks/gpu/RESULT.md, B). Two ranks that wait so for each other's
launches never end. So:

    sender      a thread of the channel: READY once the tensor is computed   waits for GO, launches, LAUNCHED
    receiver    the training's own thread, between two actions: memory, GO   waits for LAUNCHED, launches

A kernel is launched first by the sender alone, while the receiver does nothing but wait for it: that one's launch waits
for no device. So each launched kernel's peer is launched, too, whatever any host waits for, and every device comes to
rest in the end. (What waits for a device gives up Python's lock, as torch's functions do.) A receiver holds up no rank
that it would not hold up with gloo, and a sender nobody: it has a thread for each target.

A sum over several workers is a kernel on each of them, which spins until all of theirs run. Its members meet first,
through the host, each with its part computed: none launches before all have come to this sum. Sums that share a member
are begun in one order by all; so of those that are launched in part, the first in that order waits for no device that
waits for another one.

    worker 0    computed   in │ launches            what is sent from here in threads goes on while it waits
    worker 1    B2 B3      computed   in │ launches

Source of the circle: pytorch/pytorch issue 136248.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Meeting:
    """Where the members of a group meet before each kernel that all of them launch.

    Args:
        largest: Of all members' values, element by element; there once all have given theirs.
    """

    def __init__(self, largest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._largest, self._count = largest, 0

    def launch(self, launch: Callable[[], T]) -> T:
        """Launch this member's kernel once every member is about to.

        Raises:
            RuntimeError: another member is at another one.
        """
        self._count += 1
        most, least = self._largest(torch.tensor([self._count, -self._count], device="cpu")).tolist()
        if most != -least:
            raise RuntimeError(f"workers of a group are at unlike sums: at number {-least} and at number {most}")
        return launch()


class Signal(IntEnum):
    """What is told of a message."""

    UNTOLD = 0
    READY = 1
    NOTHING = 2
    GO = 3
    LAUNCHED = 4


@dataclass(frozen=True)
class Told:
    """A signal that is waited for."""

    number: torch.Tensor
    work: dist.Work
    wait: Callable[[dist.Work], None]

    @property
    def is_there(self) -> bool:
        """Whether it has arrived by now."""
        return int(self.number) != Signal.UNTOLD

    def taken(self) -> Signal:
        """It, once it is there; RuntimeError: the other end is gone, or late."""
        self.wait(self.work)
        return Signal(int(self.number))


@dataclass(frozen=True)
class Handshake:
    """The signals of one message, at one of its ends.

    Args:
        peer: The other end's rank.
        tag: The message's own, under which nothing else passes through gloo.
        wait: Waits for a signal.
    """

    peer: int
    tag: int
    wait: Callable[[dist.Work], None]

    def _tell(self, signal: Signal) -> None:
        work = dist.isend(torch.tensor(int(signal), device="cpu"), self.peer, tag=self.tag)
        assert work is not None
        self.wait(work)

    def listen(self) -> Told:
        """Get ready for the next signal of the other end."""
        number = torch.tensor(int(Signal.UNTOLD), device="cpu")
        work = dist.irecv(number, self.peer, tag=self.tag)
        assert work is not None
        return Told(number, work, self.wait)

    def offer(self, launch: Callable[[], T]) -> T:
        """The sender's side, of a tensor that is there: launch the send when its receiver waits for that."""
        go = self.listen()
        self._tell(Signal.READY)
        go.taken()
        launched = launch()
        self._tell(Signal.LAUNCHED)
        return launched

    def decline(self) -> None:
        """The sender's side where there is nothing to send."""
        self._tell(Signal.NOTHING)

    def accept(self, launch: Callable[[], T]) -> T:
        """The receiver's side, once READY has been taken and its memory is there: launch the receive."""
        launched = self.listen()
        self._tell(Signal.GO)
        launched.taken()
        return launch()
