"""Large messages between CPU ranks of one host, through memory that both have mapped.

    sender      copies the message into its arena for the receiver, and announces where
    receiver    uses it there, and clears the mark in front of it when its last tensor is gone: the place is free again

The announcement is a small message of gloo's with the message's own tag, so that messages are matched, time out and
break off as they do without shared memory; and it orders the memory: who has it sees the message. A sender never waits
for a place. Where none is free the announcement says so, and the message itself follows it through gloo.

An arena is a file without a name (memfd_create) that the receiver opens as /proc/PID/fd/N. It ends with the processes
that have it mapped, however they end, and /dev/shm, which containers keep small, has no part in it. It goes one way
between two ranks and keeps memory as far as it was ever filled, up to 66 MiB or three of the largest messages: the
sender's control group pays, and `memory` does not count it. What is in it the sender would otherwise keep until gloo
has taken it, or the receiver in memory of its own, which is posted two actions ahead. A message that a receiver keeps
for its backward would leave no place for the next ones: it uses no more than a third of an arena, and copies the rest
out. To use them where they are saves most of the time: memory for a copy is new to the page tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import secrets
import sys
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.machine.cgroup import free_memory
from assigner.machine.kernel import host_mark
from assigner.runtime.messages.rendezvous import all_gather
from assigner.runtime.messages.sending import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SHARED_FROM_BYTES = 1 << 20
"""Smaller messages are faster through gloo: benchmarks/transport."""

SWITCH = "ASSIGNER_SHARED_MEMORY"

_ARENA_BYTES = 66 << 20  # four messages of 16 MiB, or 64 of 1 MiB, and the pages in front of them
_FEWEST_MESSAGES = 3  # two are on their way, and one is written
_LENT_SHARE = 3  # a receiver uses this part of an arena
_FREE_SHARE = 4  # an arena grows by no more than this part of what the host has left
_NOWHERE = -1
_UNTOLD = -2


@dataclass(frozen=True)
class ProcessPlace:
    """Where a rank runs, and a file that another process can open if it runs there, too.

    Args:
        host: Names the running system, and the network that its processes share.
        process: Its id there.
        file: A descriptor of that process.
        word: What is in the file.
    """

    host: str
    process: int
    file: int
    word: str

    def can_open(self, other: ProcessPlace) -> bool:
        """Whether another rank is a neighbour whose memory can be opened from here. Ids may mean other processes."""
        if self.host != other.host:
            return False
        try:
            file = os.open(_path(other.process, other.file), os.O_RDWR)
        except OSError:
            return False
        try:
            return os.pread(file, 2 * len(other.word), 0) == other.word.encode()
        finally:
            os.close(file)


def _path(process: int, file: int) -> str:
    return f"/proc/{process}/fd/{file}"


@contextlib.contextmanager
def own_place(device: torch.device) -> Iterator[ProcessPlace | None]:
    """This rank's place, which others can try to open in the block; None: it does not share memory."""
    if device.type != "cpu" or os.environ.get(SWITCH) == "0" or sys.platform != "linux":
        yield None
        return
    word = secrets.token_hex(16)
    try:
        host = host_mark()
        file = os.memfd_create("assigner-place")
    except OSError:  # no /proc, or a system call that is not allowed here
        yield None
        return
    try:
        os.pwrite(file, word.encode(), 0)
        yield ProcessPlace(host, os.getpid(), file, word)
    finally:
        os.close(file)


def host_memory(device: torch.device) -> HostMemory | None:
    """The memory that this rank shares with others; None: with none. Every rank calls this at the same time.

    Raises:
        LostConnectionError: a rank is gone.
    """
    if dist.get_world_size() < 2 or dist.get_backend() != "gloo":
        return None
    with own_place(device) as mine:
        try:
            places = all_gather(ProcessPlace | None, mine)
            opened = all_gather(tuple[int, ...], openable(mine, dist.get_rank(), places))
        except RuntimeError as error:
            raise LostConnectionError("another worker", error) from error
    targets = {rank for rank, found in enumerate(opened) if dist.get_rank() in found}
    sources = {rank: place.process for rank in opened[dist.get_rank()] if (place := places[rank]) is not None}
    return HostMemory(sources, targets) if sources or targets else None


def openable(mine: ProcessPlace | None, rank: int, places: Sequence[ProcessPlace | None]) -> tuple[int, ...]:
    """The ranks whose memory can be opened from one that is at `mine`."""
    if mine is None:
        return ()
    return tuple(n for n, each in enumerate(places) if each and n != rank and mine.can_open(each))


class Arena:
    """Memory for messages from this rank to another one.

    A place is as long as its message, and a page in front of it whose first byte says whether the message is still
    there. The first gap is taken: memory that was used before is in the page tables, and may be in the cache.
    """

    def __init__(self) -> None:
        self._file, self._size = os.memfd_create("assigner-messages"), _ARENA_BYTES
        os.ftruncate(self._file, self._size)
        self._memory = mmap.mmap(self._file, self._size)
        self._backed = 0
        self._taken: list[tuple[int, int]] = []  # begin and end, in order

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a message in, which is contiguous; its announcement."""
        length = mmap.PAGESIZE + -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        begin = self._find(length)
        if begin is None:
            return torch.tensor([_NOWHERE, 0, 0], device="cpu")
        self._memory[begin] = 1
        start = begin + mmap.PAGESIZE
        torch.frombuffer(self._memory, dtype=torch.uint8, count=tensor.nbytes, offset=start).copy_(_bytes_of(tensor))
        return torch.tensor([begin, self._size, self._file], device="cpu")

    def _find(self, length: int) -> int | None:
        """The first gap, taken; None: there is none, or no memory."""
        self._taken = [each for each in self._taken if self._memory[each[0]]]
        begin, at = 0, 0
        while at < len(self._taken) and self._taken[at][0] - begin < length:
            begin, at = self._taken[at][1], at + 1
        end = begin + length
        if end > max(self._size, _FEWEST_MESSAGES * length) or not self._back(end):
            return None
        self._taken.insert(at, (begin, end))
        return begin

    def _back(self, end: int) -> bool:
        """Have memory up to `end`: to touch pages that the system cannot provide would be a signal, not an error."""
        more = end - self._backed
        if more <= 0:
            return True
        if more * _FREE_SHARE > free_memory():
            return False
        try:
            os.posix_fallocate(self._file, self._backed, more)  # the file grows where it must
            if end > self._size:
                self._memory, self._size = mmap.mmap(self._file, end), end
        except OSError:
            return False
        self._backed = end
        return True

    def close(self) -> None:
        """Let go of the memory; the receiver keeps its own hold on it."""
        os.close(self._file)
        self._taken.clear()
        del self._memory


class HostMemory:
    """What one rank shares with others of its host.

    Args:
        sources: The ranks whose arenas this one can open, and their processes.
        targets: The ranks that can open this one's.
    """

    def __init__(self, sources: Mapping[int, int], targets: set[int]) -> None:
        self._sources, self._targets = sources, targets
        self._arenas: dict[int, Arena] = {}
        self._mapped: dict[int, mmap.mmap] = {}
        self._lent: dict[int, dict[int, int]] = defaultdict(dict)  # bytes in use, by source and place

    def carries(self, rank: int, size: int, *, sent: bool) -> bool:
        """Whether a message of `size` bytes is announced, to or from a rank; its other end finds the same."""
        return size >= SHARED_FROM_BYTES and rank in (self._targets if sent else self._sources)

    def put(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a contiguous message for a rank; what to announce."""
        if rank not in self._arenas:
            self._arenas[rank] = Arena()
        return self._arenas[rank].put(tensor)

    def take(self, rank: int, announcement: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The message that a rank has announced and that is not elsewhere.

        Raises:
            ProcessLookupError: the rank's process is gone.
        """
        begin, size, file = announcement.tolist()
        if rank not in self._mapped or len(self._mapped[rank]) < size:
            self._mapped[rank] = _mapped(self._sources[rank], file, size)
        memory, lent = self._mapped[rank], self._lent[rank]
        length = math.prod(shape) * dtype.itemsize
        if sum(lent.values()) + length <= size // _LENT_SHARE:
            return _bytes_at(memory, begin, length, lent).view(dtype).view(shape)
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        _bytes_of(tensor).copy_(_bytes_at(memory, begin, length, lent))
        return tensor

    def close(self) -> None:
        """Let go of all memory."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self._mapped.clear()


def _mapped(process: int, file: int, size: int) -> mmap.mmap:
    try:
        file = os.open(_path(process, file), os.O_RDWR)
    except (FileNotFoundError, PermissionError) as error:  # it could be opened at the start
        raise ProcessLookupError(f"process {process} is gone") from error
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _bytes_at(memory: mmap.mmap, begin: int, size: int, lent: dict[int, int]) -> torch.Tensor:
    """The message at a place, which is free when nothing refers to this tensor's memory any more.

    Those that do are counted in a way that orders their reads before what the last one brings about.
    """
    place = (ctypes.c_ubyte * size).from_buffer(memory, begin + mmap.PAGESIZE)
    lent[begin] = size
    weakref.finalize(place, _give_back, memory, begin, lent).atexit = False
    return torch.frombuffer(place, dtype=torch.uint8)


def _give_back(memory: mmap.mmap, begin: int, lent: dict[int, int]) -> None:
    """Called in any thread. The mark comes last: the place may be lent again at once."""
    del lent[begin]
    memory[begin] = 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory as it is: some types cannot be copied, and a NaN's bits must stay."""
    return tensor.view(-1).view(torch.uint8)


def unannounced() -> torch.Tensor:
    """Memory for an announcement to arrive in."""
    return torch.tensor([_UNTOLD, 0, 0], device="cpu")


def is_elsewhere(announcement: torch.Tensor) -> bool:
    """Whether it has arrived, and says that the message follows through gloo."""
    return int(announcement[0]) == _NOWHERE
