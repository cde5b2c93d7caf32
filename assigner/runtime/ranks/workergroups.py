"""Workers that share a stage, as process groups of their own: in them they add up what each of them has made.

torch wants every process of a run to make every group, in one order; so all ranks open those of a plan together, and
each keeps its own for as long as the run lasts. A group is gloo's, which takes tensors on a GPU too, through the host;
or NCCL's, where every member has a GPU for itself (see `nccl`). All are tried out before a step needs them.
"""

from __future__ import annotations

import functools
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


@dataclass(slots=True)
class PendingTensor:
    """What a group makes together, a sum or a copy, on its way.

    Args:
        tensor: Gets it; nobody touches it before `wait`.
        work: torch's.
        group: Whose members make it.
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
        group: Theirs.
        direct: It is NCCL's.
        timeout: A wait for another member that takes longer fails.
        device: This worker's.
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
        rank: This rank.
        device: Where it computes.
        direct: The ranks that NCCL reaches.
        timeout_s: A wait for another member that takes longer fails.
    """

    def __init__(self, rank: int, device: torch.device, direct: frozenset[int], *, timeout_s: float) -> None:
        self._rank, self._device, self._direct = rank, device, direct
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup | None] = {}
        self._meetings: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

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
            reached = direct and self._direct.issuperset(ranks)
            key = reached, ranks
            is_new = key not in self._groups
            others = [worker for worker in workers if rank_of(worker) != self._rank]
            peer = others[0] if len(workers) == 2 else f"one of {', '.join(others)}"
            if is_new:
                self._groups[key] = checked(peer, functools.partial(self._made, ranks, direct=reached))
                if reached:
                    self._meetings[ranks] = checked(peer, functools.partial(self._made, ranks, direct=False))
            group = self._groups[key]
            if group is not None:
                meeting = self._meeting(workers, ranks, peer) if reached else None
                found[workers] = WorkerGroup(workers, group, reached, self._timeout, self._device, peer, meeting)
                if is_new:
                    self._try_out(found[workers])
        return found

    def _meeting(self, workers: tuple[str, ...], ranks: tuple[int, ...], peer: str) -> Meeting | None:
        """Through the host; None: the group is no group of NCCL's. One that is known has met as often everywhere."""
        group = self._meetings.get(ranks)
        if group is None:
            return None
        return Meeting(WorkerGroup(workers, group, False, self._timeout, torch.device("cpu"), peer).largest)

    def _made(self, ranks: Sequence[int], *, direct: bool) -> dist.ProcessGroup | None:
        backend = nccl.GROUP_BACKEND if direct else dist.get_backend()
        group = dist.new_group(ranks, timeout=self._timeout, backend=backend)
        settle_group(ranks)
        return group if self._rank in ranks else None

    def _try_out(self, group: WorkerGroup) -> None:
        """A number, waited for: connections and communicators are there when it has been added up."""
        number = torch.ones(1, device=self._device)
        group.add_up(number).wait()
        assert number.item() == len(group.workers)

    def hang_up(self) -> None:
        """End what is on its way through NCCL: without its peers it would be waited for."""
        if self._device.type == "cuda":
            mine = {key: group for key, group in self._groups.items() if key[0] and group is not None}
            if nccl.aborted(mine.values()):
                self._groups = {key: group for key, group in self._groups.items() if key not in mine}

    def close(self) -> None:
        """Leave the groups, where the world group has not been left with them in it."""
        if dist.is_initialized():
            for group in (*self._groups.values(), *self._meetings.values()):
                if group is not None:
                    dist.destroy_process_group(group)
        self._groups.clear()
        self._meetings.clear()
