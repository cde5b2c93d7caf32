"""Workers that share a stage, as process groups of their own: in them they add up what each of them has made.

torch wants every process of a run to make every group, in one order; so all ranks open those of a plan together, and
each keeps its own for as long as the run lasts. A group is gloo's, which takes tensors on a GPU too, through the host;
or NCCL's, where every member has a GPU for itself (see `nccl`). All are tried out before a step needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.location import rank_of
from assigner.runtime.messages import nccl
from assigner.runtime.messages.handshake import Meeting
from assigner.runtime.messages.rendezvous import settle_group
from assigner.runtime.messages.sending import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_DIRECT = "direct"


@dataclass(slots=True)
class PendingTensor:
    """What a group makes together, a sum or a copy, on its way.

    Args:
        tensor: Gets it; nobody touches it before `wait`.
    """

    tensor: torch.Tensor
    work: dist.Work
    group: WorkerGroup

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this, in another thread, once it is there; on NCCL once the device has been told of it."""
        self.work.get_future().then(lambda _: call())

    def wait(self) -> torch.Tensor:
        """It, once it is there; on a GPU what its stream does next waits for it.

        Raises:
            LostConnectionError: a member is gone, or did not come within the time-out.
        """
        limit = () if self.group.direct else (self.group.timeout,)
        checked(self.group.peer, lambda: self.work.wait(*limit))
        return self.tensor


@dataclass(frozen=True)
class WorkerGroup:
    """Some workers of a run, this one among them.

    Args:
        workers: Their names; the first one keeps what is kept once.
        peer: Who is lost where a connection of the group breaks.
        meeting: Where the members of one of NCCL's meet before each kernel (see `handshake`).
    """

    workers: tuple[str, ...]
    group: dist.ProcessGroup
    direct: bool
    timeout: timedelta
    device: torch.device
    peer: str
    meeting: Meeting | None = None

    def add_up(self, tensor: torch.Tensor) -> PendingTensor:
        """Begin to add up a contiguous tensor, of one size and type on all members, in its own memory.

        All get the same bits. Members begin the sums of their group in one order.
        """
        return self._begin(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of all members' values, element by element, in the tensor's own memory."""
        return self.begin_largest(tensor).wait()

    def are_alike(self, numbers: Iterable[int]) -> list[bool]:
        """Of so many whole numbers on each member, which are the same on all; all members find the same."""
        found = torch.tensor([*numbers], device=self.device)
        most, opposite = self.largest(torch.cat([found, -found])).chunk(2)
        return (most == -opposite).tolist()

    def begin_largest(self, tensor: torch.Tensor) -> PendingTensor:
        """Begin `largest`; members begin it in one order with their sums."""
        return self._begin(tensor, dist.ReduceOp.MAX)

    def hand_out(self, tensor: torch.Tensor, source: str) -> PendingTensor:
        """Begin to copy one member's contiguous tensor into those of the others, of its size and type."""
        rank = rank_of(source)
        return self._pending(tensor, lambda: dist.broadcast(tensor, rank, group=self.group, async_op=True))

    def _begin(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> PendingTensor:
        return self._pending(tensor, lambda: dist.all_reduce(tensor, operation, group=self.group, async_op=True))

    def _pending(self, tensor: torch.Tensor, begin: Callable[[], dist.Work | None]) -> PendingTensor:
        if self.meeting is None:
            work = checked(self.peer, begin)
        else:
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
            meeting = self.meeting
            work = checked(self.peer, lambda: meeting.launch(begin))
        assert work is not None
        return PendingTensor(tensor, work, self)


class WorkerGroups:
    """The groups of a run in which this rank is.

    Args:
        direct: The ranks that NCCL reaches.
    """

    def __init__(self, rank: int, device: torch.device, direct: frozenset[int], *, timeout_s: float) -> None:
        self._rank, self._device, self._direct = rank, device, direct
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}  # by use and ranks

    def open(self, sets: Iterable[Sequence[str]], *, direct: bool = True) -> dict[tuple[str, ...], WorkerGroup]:
        """The groups of these sets of workers, those of this rank. Every rank of the run gives the same sets.

        Args:
            sets: The workers' names.
            direct: Through NCCL where it reaches all of a set; else through the host.

        Raises:
            LostConnectionError: a rank is gone.
        """
        found: dict[tuple[str, ...], WorkerGroup] = {}
        for workers in dict.fromkeys(tuple(each) for each in sets):
            ranks = tuple(sorted(map(rank_of, workers)))
            if len(ranks) < 2:
                continue
            use = _DIRECT if direct and self._direct.issuperset(ranks) else "host"
            is_new = (use, ranks) not in self._groups
            others = [worker for worker in workers if rank_of(worker) != self._rank]
            peer = others[0] if len(workers) == 2 else f"one of {', '.join(others)}"
            group = self._group(use, ranks, peer)
            meets = self._group("meeting", ranks, peer) if use == _DIRECT else None
            if group is None:
                continue
            meeting = None
            if meets is not None:  # one that is known has met as often everywhere
                host = WorkerGroup(workers, meets, False, self._timeout, torch.device("cpu"), peer)
                meeting = Meeting(host.largest)
            made = WorkerGroup(workers, group, use == _DIRECT, self._timeout, self._device, peer, meeting)
            found[workers] = made
            if is_new:  # a number, waited for: connections and communicators are there when it has been added up
                number = torch.ones(1, device=self._device)
                made.add_up(number).wait()
                assert number.item() == len(workers)
        return found

    def _group(self, use: str, ranks: tuple[int, ...], peer: str) -> dist.ProcessGroup | None:
        """That of some ranks for a use, which all ranks of the run make at first; None: this one is not in it."""

        def made() -> dist.ProcessGroup | None:
            backend = nccl.GROUP_BACKEND if use == _DIRECT else dist.get_backend()
            group = dist.new_group(ranks, timeout=self._timeout, backend=backend)
            settle_group(ranks)
            return group if self._rank in ranks else None

        if (use, ranks) not in self._groups:
            self._groups[use, ranks] = checked(peer, made)
        return self._groups[use, ranks]

    def hang_up(self) -> None:
        """End what is on its way through NCCL: without its peers it would be waited for."""
        if self._device.type == "cuda":
            mine = {key: group for key, group in self._groups.items() if key[0] == _DIRECT and group is not None}
            if nccl.aborted(mine.values()):
                self._groups = {key: group for key, group in self._groups.items() if key not in mine}

    def close(self) -> None:
        """Leave the groups, where the world group has not been left with them in it."""
        if dist.is_initialized():
            for group in self._groups.values():
                if group is not None:
                    dist.destroy_process_group(group)
        self._groups.clear()
