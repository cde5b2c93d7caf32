"""What a rank has measured so far, on its own disk: an interrupted run goes on from there.

    {"kind": "profile-journal", "fingerprint": "sha256:...", "threads": 1, ...}   what it belongs to
    {"measurement": {"partition": "embed", "micro_batch": 4, ...}}   one line each, at once
    {"optimizer": {"kind": "9af3c1", "bytes": 1024}}
    {"link": {"source": 0, "target": 1, ...}}
    {"wires": {"wires": [{"links": [[0, 1], [2, 3]], "slower": 2.0}]}}   the first rank's, of all ranks
    {"collective": {"ranks": [0, 1, 2], ...}}

A process that is killed while it writes leaves part of a line: that line is dropped. Every other line is checked.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from assigner.errors import FormatError
from assigner.files import read_bytes
from assigner.formats.document import Count, Range, decode, encode, shown
from assigner.formats.profile import Measurement
from assigner.location import rank_of
from assigner.profiler.collectives import CollectiveSweep
from assigner.profiler.contention import SharedWire
from assigner.profiler.links import LinkSweep
from assigner.profiler.tasks import Point

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from assigner.formats.profile import LinkPoint

_HINT = "without --resume it is measured from the start"


@dataclass(frozen=True)
class Head:
    """What a journal belongs to; all of it must be the same for a run that goes on with it.

    Args:
        entry: The workload.
        fingerprint: Of its partitions.
        batch_size: Of the workload.
        optimizer: Its class.
        micro_batches: Sizes that are measured.
        largest_message: Of the link sweeps, in bytes.
        isolated: One worker at a time.
        only: What is measured again; empty: everything.
        updates: When the profile was made that is updated; empty: none is.
        worker: Name of the worker.
        device: Its kind.
        threads: Its compute threads.
        ranks: Ranks of the run.
        tool_version: Of the program.
        torch: Version of torch.
        backend: What was asked to carry messages; empty: nothing was.
        split_backward: The parts of backwards are timed too.
    """

    entry: str
    fingerprint: str
    batch_size: Count
    optimizer: str
    micro_batches: tuple[int, ...]
    largest_message: Annotated[int, Range(1)]
    isolated: bool
    only: tuple[str, ...]
    updates: str
    worker: str
    device: str
    threads: Count
    ranks: Count
    tool_version: str
    torch: str
    kind: Literal["profile-journal"] = "profile-journal"
    backend: str = ""
    split_backward: bool = False


@dataclass(frozen=True)
class OptimizerSize:
    """Bytes of the optimizer's state for a kind of partition."""

    kind: str
    bytes: int


@dataclass(frozen=True)
class Note:
    """What was seen while measuring, for the profile's warnings.

    Args:
        text: The warning.
        point: The point that it was seen at; None: it is not of one point.
    """

    text: str
    point: Point | None = None


@dataclass(frozen=True)
class FoundWires:
    """All wires that links were found to share when they were measured last."""

    wires: tuple[SharedWire, ...]


Entry = Measurement | OptimizerSize | LinkSweep | FoundWires | CollectiveSweep | Note


@dataclass(frozen=True)
class _JournalLine:
    """One line behind the head: exactly one of these."""

    measurement: Measurement | None = None
    optimizer: OptimizerSize | None = None
    link: LinkSweep | None = None
    wires: FoundWires | None = None
    collective: CollectiveSweep | None = None
    note: Note | None = None


_NAMES = {
    Measurement: "measurement", OptimizerSize: "optimizer", LinkSweep: "link", FoundWires: "wires",
    CollectiveSweep: "collective", Note: "note",
}  # fmt: skip


def journal_path(output: Path, rank: int) -> Path:
    """Where a rank keeps its journal while `output` is being measured."""
    return output.parent / f".{output.name}.part-{rank}.jsonl"


class Journal:
    """The journal of one rank, and what is in it.

    Args:
        path: Its file; None: nothing is kept on the disk.
        head: What it belongs to.

    Attributes:
        points: Measurements by (partition, micro-batch size).
        optimizer_bytes: By kind of partition.
        sweeps: Links by their target; they start here.
        wires: Which links share a wire.
        collectives: All-reduces by their ranks, of which this one is the first.
        notes: For the profile's warnings.
    """

    def __init__(self, path: Path | None, head: Head) -> None:
        self.path, self.head = path, head
        self.points: dict[tuple[str, int], Measurement] = {}
        self.optimizer_bytes: dict[str, int] = {}
        self.sweeps: dict[int, LinkSweep] = {}
        self.wires: tuple[SharedWire, ...] = ()
        self.collectives: dict[tuple[int, ...], CollectiveSweep] = {}
        self.notes: dict[str, None] = {}

    def start(self) -> None:
        """Begin an empty one: what an interrupted run left is deleted. The file is made with the first measurement."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def load(self) -> bool:
        """Take over what an interrupted run left.

        Returns:
            False: there was nothing.

        Raises:
            FormatError: it belongs to another measurement, or a line of it is wrong; the message says what and where.
        """
        if self.path is None or not self.path.exists():
            return False
        data = read_bytes(self.path, hint=_HINT)
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                if number == 1:
                    there = decode(Head, json.loads(line))
                else:
                    self._take(json.loads(line))
            except (ValueError, RecursionError) as error:  # FormatError is one
                why = error.message if isinstance(error, FormatError) else "not JSON"
                raise FormatError(f"{self.path}, line {number}: {why}", hint=_HINT) from error
            if number == 1:
                self._check_head(there)
        with self.path.open("r+b") as stream:
            stream.truncate(len(whole))
        return bool(self.points or self.sweeps or self.collectives)

    def add(self, found: Entry) -> None:
        """Keep one finished measurement."""
        self._keep(found)
        if self.path is not None:
            self._append({_NAMES[type(found)]: encode(found)})

    def remove(self) -> None:
        """The profile is written: delete the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as stream:
            if not stream.tell():
                stream.write(json.dumps(encode(self.head), allow_nan=False) + "\n")
            stream.write(json.dumps(line, allow_nan=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _take(self, line: Any) -> None:
        found = [each for each in vars(decode(_JournalLine, line)).values() if each is not None]
        if len(found) != 1:
            raise FormatError(f"expected one of {', '.join(_NAMES.values())}")
        self._keep(found[0])

    def _check_head(self, there: Head) -> None:
        unlike = [
            f"{each.name} {shown(getattr(there, each.name))} there, {shown(getattr(self.head, each.name))} now"
            for each in fields(Head)
            if getattr(there, each.name) != getattr(self.head, each.name)
        ]
        if unlike:
            raise FormatError(f"{self.path} belongs to another measurement: {'; '.join(unlike)}", hint=_HINT)

    def _keep(self, found: Entry) -> None:
        if isinstance(found, Measurement):
            if found.worker != self.head.worker or found.micro_batch not in self.head.micro_batches:
                raise FormatError(f"{found.partition} on {found.worker} at {found.micro_batch} is not of this worker")
            self.points[found.partition, found.micro_batch] = found
        elif isinstance(found, OptimizerSize):
            self.optimizer_bytes[found.kind] = found.bytes
        elif isinstance(found, LinkSweep):
            self._check_sweep(found)
            self.sweeps[found.target] = found
        elif isinstance(found, FoundWires):
            self._check_wires(found)
            self.wires = found.wires
        elif isinstance(found, CollectiveSweep):
            self._check_collective(found)
            self.collectives[found.ranks] = found
        else:
            self.notes[found.text] = None

    def _check_sweep(self, found: LinkSweep) -> None:
        """A link of this rank with growing sizes, and shares that are shares."""
        rank = rank_of(self.head.worker)
        if found.source != rank or found.target == rank or not 0 <= found.target < self.head.ranks:
            raise FormatError(f"the link from {found.source} to {found.target} is none of {self.head.worker}")
        _check_swept(f"the link to {found.target}", found.points, found.sender_busy, found.receiver_busy)

    def _check_wires(self, found: FoundWires) -> None:
        """Two or more links each, between ranks of the run, none on two wires."""
        ends = [link for wire in found.wires for link in wire.links]
        sound = all(len(set(link)) == len(link) == 2 and set(link) <= set(range(self.head.ranks)) for link in ends)
        few = any(len(wire.links) < 2 or not 1 <= wire.slower < math.inf for wire in found.wires)
        if not sound or few or len(set(ends)) < len(ends):
            raise FormatError(f"wires that links of {self.head.ranks} ranks cannot share: {shown(ends)}")

    def _check_collective(self, found: CollectiveSweep) -> None:
        """Two or more ranks of the run in their order, this one first."""
        rank, ranks = rank_of(self.head.worker), list(found.ranks)
        if len(ranks) < 2 or ranks != sorted(set(ranks)) or ranks[0] != rank or ranks[-1] >= self.head.ranks:
            raise FormatError(f"the all-reduce among {ranks} is none of {self.head.worker}")
        _check_swept(f"the all-reduce among {ranks}", found.points, found.busy)


def _check_swept(what: str, points: Sequence[LinkPoint], *shares: float) -> None:
    sizes = [point.bytes for point in points]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise FormatError(f"{what}: sizes must grow, each once; found {sizes[:6]}")
    if max(shares) > 1:
        raise FormatError(f"{what}: busy shares go from 0 to 1")
