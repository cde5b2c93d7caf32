"""What a rank has measured so far, on its own disk: an interrupted run goes on from there.

    {"kind": "profile-journal", "fingerprint": "sha256:...", "threads": 1, ...}   what it belongs to
    {"measurement": {"partition": "embed", "micro_batch": 4, ...}}   one line each, at once
    {"optimizer": {"kind": "9af3c1", "bytes": 1024}}
    {"link": {"source": "worker:0/cpu", "target": "worker:1/cpu", ...}}
    {"wires": {"wires": [{"links": [{"source": "worker:0/cpu", ...}, ...], "slower": 2.0}]}}   the first rank's, of all
    {"collective": {"workers": ["worker:0/cpu", "worker:1/cpu"], ...}}

What is measured stands here as it will in the profile. A process that is killed while it writes leaves part of a line:
that line is dropped. Every other line is checked.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from assigner.errors import FormatError, MeasurementError
from assigner.files import read_bytes
from assigner.formats.document import Count, Range, decode, encode, shown
from assigner.formats.profile import Collective, Link, Measurement, Wire
from assigner.formats.profilechecks import check_points
from assigner.location import rank_of
from assigner.profiler.tasks import Point

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_HINT = "without --resume it is measured from the start"


@dataclass(frozen=True)
class Head:
    """What a journal belongs to; all of it must be the same for a run that goes on with it."""

    entry: str
    fingerprint: str
    batch_size: Count
    optimizer: str
    micro_batches: tuple[int, ...]
    largest_message: Annotated[int, Range(1)]  # of the link sweeps, in bytes
    isolated: bool
    only: tuple[str, ...]  # what is measured again; empty: everything
    updates: str  # when the profile was made that is updated; empty: none is
    worker: str
    device: str
    threads: Count
    ranks: Count
    tool_version: str
    torch: str
    kind: Literal["profile-journal"] = "profile-journal"
    backend: str = ""  # what was asked to carry messages; empty: nothing was
    split_backward: bool = False


@dataclass(frozen=True)
class OptimizerSize:
    """Bytes of the optimizer's state for a kind of partition."""

    kind: str
    bytes: int


@dataclass(frozen=True)
class Note:
    """What was seen while measuring, for the profile's warnings; without a point it is not of one."""

    text: str
    point: Point | None = None


@dataclass(frozen=True)
class FoundWires:
    """All wires that links were found to share when they were measured last."""

    wires: tuple[Wire, ...]


Entry = Measurement | OptimizerSize | Link | FoundWires | Collective | Note


_KINDS: dict[str, type] = {
    "measurement": Measurement, "optimizer": OptimizerSize, "link": Link, "wires": FoundWires,
    "collective": Collective, "note": Note,
}  # fmt: skip
"""What a line behind the head holds, exactly one of these, by its name there."""
_NAMES = {kind: name for name, kind in _KINDS.items()}


def journal_path(output: Path, rank: int) -> Path:
    """Where a rank keeps its journal while `output` is being measured."""
    return output.parent / f".{output.name}.part-{rank}.jsonl"


class Journal:
    """The journal of one rank, and what is in it; without a path nothing is kept on the disk."""

    def __init__(self, path: Path | None, head: Head) -> None:
        self.path, self.head = path, head
        self.points: dict[Point, Measurement] = {}
        self.optimizer_bytes: dict[str, int] = {}  # by kind of partition
        self.links: dict[int, Link] = {}  # by the rank of their target; they start here
        self.wires: tuple[Wire, ...] = ()
        self.collectives: dict[tuple[int, ...], Collective] = {}  # by their ranks, of which this one is the first
        self.notes: dict[str, None] = {}

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
        return bool(self.points or self.links or self.collectives)

    def add(self, found: Entry) -> None:
        """Keep one finished measurement.

        Raises:
            MeasurementError: its file cannot be written, as on a full disk.
        """
        self._keep(found)
        if self.path is None:
            return
        line = {_NAMES[type(found)]: encode(found)}
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                if not stream.tell():
                    stream.write(json.dumps(encode(self.head), allow_nan=False) + "\n")
                stream.write(json.dumps(line, allow_nan=False) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise MeasurementError(
                f"cannot keep what was measured in {self.path}: {error.strerror}",
                hint="make room there first; a run with another -o starts over",
            ) from error

    def remove(self) -> None:
        """Delete the file: the profile is written, or a run begins anew; the first measurement makes another one."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _take(self, line: Any) -> None:
        if not isinstance(line, dict) or len(line) != 1 or not line.keys() <= _KINDS.keys():
            raise FormatError(f"expected an object with one of {', '.join(_KINDS)}")
        for name, value in line.items():
            self._keep(decode(_KINDS[name], value, name))

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
            self.points[Point(found.partition, found.micro_batch)] = found
        elif isinstance(found, OptimizerSize):
            self.optimizer_bytes[found.kind] = found.bytes
        elif isinstance(found, Link):
            target = self._ranks((found.source, found.target), f"the link from {found.source} to {found.target}")[1]
            check_points(found.points, "link", "a link")
            self.links[target] = found
        elif isinstance(found, FoundWires):
            self._check_wires(found.wires)
            self.wires = found.wires
        elif isinstance(found, Collective):
            ranks = self._ranks(found.workers, f"the all-reduce among {', '.join(found.workers)}")
            if list(ranks) != sorted(ranks):
                raise FormatError(f"the all-reduce among {', '.join(found.workers)}: ranks stand in their order")
            check_points(found.points, "collective", "an all-reduce")
            self.collectives[ranks] = found
        else:
            self.notes[found.text] = None

    def _ranks(self, workers: Sequence[str], what: str) -> tuple[int, ...]:
        """The ranks of two or more workers of the run, of which this one is the first."""
        ranks = tuple(rank_of(name) for name in workers)
        if len(set(ranks)) < max(2, len(ranks)) or workers[0] != self.head.worker or max(ranks) >= self.head.ranks:
            raise FormatError(f"{what} is none of {self.head.worker}")
        return ranks

    def _check_wires(self, wires: Sequence[Wire]) -> None:
        """Two or more links each, between ranks of the run, none on two wires."""
        ends = [(rank_of(link.source), rank_of(link.target)) for wire in wires for link in wire.links]
        sound = all(source != target and max(source, target) < self.head.ranks for source, target in ends)
        if not sound or any(len(wire.links) < 2 for wire in wires) or len(set(ends)) < len(ends):
            raise FormatError(f"wires that links of {self.head.ranks} ranks cannot share: {shown(ends)}")
