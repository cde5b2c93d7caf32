"""The plain values that a loss can read, and whether it keeps something.

The values are names of its file, its closure, its attributes, and what these hold. Of a method's object and the like it
is what the loss's code names (`assigner.model.deferred.vocabulary`): what else a script has there, as a clock, is not
the loss's.

Every rank has them, and some ranks alone call the loss. So two kinds of change are told apart by when they come:

    rank 0    step ----------> ALPHA = 0.5 ----> step       by the script, between steps: the same on all ranks
    rank 1    step, calls += 1 ----------------> step       by the loss, within a step: its memory, on this rank alone

Only changes are held against each other: what is another value on each rank from the start, as a rank's number, may be
so for good. Tensors are not looked at in every step: before the loss goes to another rank, what has changed of them is
held against what has changed there.
"""

from __future__ import annotations

import itertools
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch

from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.reach import Place, reach
from assigner.model.deferred.vocabulary import vocabulary_of
from assigner.runtime.forward.heldtensors import is_strided

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from assigner.model.deferred.vocabulary import Vocabulary
    from assigner.model.workload import Workload

_MOST = 10_000  # values
_SHOWN = 2  # changes
_LETTERS = 20  # of a value
_NAMED = ATOMS | {set, frozenset}
_ABSENT = "nothing"

_Found = tuple[Place, Any]


class LossValues:
    """What the loss and the metrics of a workload can read, held against what that was before."""

    def __init__(self, workload: Workload) -> None:
        self._called, self._vocabulary = called_of(workload)
        self._last = self._now()
        self._first = _named(self._last)
        self._told: dict[str, Any] = {}
        self._kept = Memento((), [workload.loss], parameters=True, vocabulary=self._vocabulary)
        self._moves_values = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the loss can read of these."""
        return self._kept.tensors

    def _now(self) -> list[_Found]:
        return _plain_values(self._called, self._vocabulary)

    def begin(self) -> str:
        """A step or an evaluation comes next: what the script has changed so far, in words; empty: nothing."""
        found = self._now()
        if not _are_alike(found, self._last):
            now, last = _named(found), _named(self._last)
            for name in sorted(now.keys() | last.keys()):
                value = now.get(name, _ABSENT)
                if value != last.get(name, _ABSENT):
                    self._told[name] = value
                if name in self._told and self._told[name] == self._first.get(name, _ABSENT):
                    del self._told[name]
            self._last = found
        if not self._told:
            return ""
        told = sorted(self._told.items())
        shown = ", ".join(f"{name} = {str(value)[:_LETTERS]}" for name, value in told[:_SHOWN])
        return f" and a loss that reads {shown} (values {zlib.crc32(repr(told).encode()):08x})"

    def end(self) -> None:
        """It is done."""
        now = self._now()
        if not _are_alike(now, self._last):
            self._moves_values, self._last = True, now

    def digest(self) -> float:
        """Of the loss's tensors that are no more as they were, and their values; 0: none; NaN: nobody can say."""
        moved, found = {id(each) for each in self._kept.moved()}, 0
        for n, tensor in enumerate(self._kept.tensors):
            if id(tensor) in moved:
                if not is_strided(tensor) or tensor.is_meta:
                    return math.nan
                values = tensor.detach().as_subclass(torch.Tensor).cpu().contiguous().reshape(-1)
                found = zlib.crc32(f"{n} {tuple(tensor.shape)} {tensor.dtype}".encode(), found)
                found = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), found)
        return 1.0 + found if moved else 0.0

    def remembers(self, digests: Collection[float]) -> bool:
        """Whether they have changed plain values themselves, or the loss keeps other tensors or objects now.

        Where the digests of the ranks between which the loss goes are one, the script has given the tensors these
        values on all of them.
        """
        is_same = all(each == next(iter(digests)) for each in digests)
        has_moved = self._moves_values or (not is_same and bool(self._kept.moved()))
        return has_moved or self._kept.has_changed(ignoring="values")


def called_of(workload: Workload) -> tuple[dict[str, Any], Vocabulary]:
    """The loss and the metrics of a workload, by name, and the names by which these can reach anything."""
    called = {"loss": workload.loss, **(workload.metrics or {})}
    return called, vocabulary_of((), others=called.values())


def plain_values(called: Mapping[str, Any], vocabulary: Vocabulary | None = None) -> dict[str, Any]:
    """The numbers and texts that functions or objects can read when they are called, by the names of their places."""
    return _named(_plain_values(called, vocabulary))


def _plain_values(called: Mapping[str, Any], vocabulary: Vocabulary | None) -> list[_Found]:
    met = (pair for pair in reach(called, plain=True, vocabulary=vocabulary) if type(pair[1]) in _NAMED)
    return [
        (place, value if type(value) in ATOMS else sorted(repr(each) for each in value if type(each) in ATOMS))
        for place, value in itertools.islice(met, _MOST)
    ]


def _are_alike(one: Sequence[_Found], other: Sequence[_Found]) -> bool:
    """Whether the values are: to name all places takes longer than to find them."""
    return [value for _, value in one] == [value for _, value in other]


def _named(met: Sequence[_Found]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, value in met:
        name = str(place)
        while name in found:
            name += "'"
        found[name] = value
    return found
