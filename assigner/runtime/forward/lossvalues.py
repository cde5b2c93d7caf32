"""The plain values that a loss can read, and whether it keeps something.

The values are names of its file, its closure, its attributes, and what these hold.

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
from assigner.model.deferred.reach import reach
from assigner.runtime.forward.heldtensors import is_strided

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from assigner.model.workload import Workload

_MOST = 10_000  # values
_SHOWN = 2  # changes
_LETTERS = 20  # of a value
_NAMED = ATOMS | {set, frozenset}
_ABSENT = "nothing"


class LossValues:
    """What the loss and the metrics of a workload can read, held against what that was before.

    Args:
        workload: The loss, and metrics.
    """

    def __init__(self, workload: Workload) -> None:
        self._called = {"loss": workload.loss, **(workload.metrics or {})}
        self._first = self._last = plain_values(self._called)
        self._told: dict[str, Any] = {}
        self._kept = Memento((), [workload.loss], parameters=True)
        self._moves_values = False

    def begin(self) -> str:
        """A step or an evaluation comes next: what the script has changed so far, in words; empty: nothing."""
        now = plain_values(self._called)
        if now != self._last:
            for name in sorted(now.keys() | self._last.keys()):
                value = now.get(name, _ABSENT)
                if value != self._last.get(name, _ABSENT):
                    self._told[name] = value
                if name in self._told and self._told[name] == self._first.get(name, _ABSENT):
                    del self._told[name]
            self._last = now
        if not self._told:
            return ""
        told = sorted(self._told.items())
        shown = ", ".join(f"{name} = {str(value)[:_LETTERS]}" for name, value in told[:_SHOWN])
        return f" and a loss that reads {shown} (values {zlib.crc32(repr(told).encode()):08x})"

    def end(self) -> None:
        """It is done."""
        now = plain_values(self._called)
        if now != self._last:
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

        Args:
            digests: Of the ranks between which the loss goes. Where they are one, the script has given the tensors
                these values on all of them.
        """
        is_same = all(each == next(iter(digests)) for each in digests)
        return self._moves_values or self._kept.has_changed(ignoring="values" if is_same else "plain")


def plain_values(called: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and texts that functions or objects can read when they are called, by the names of their places."""
    found: dict[str, Any] = {}
    met = (pair for pair in reach(called, plain=True) if type(pair[1]) in _NAMED)
    for place, value in itertools.islice(met, _MOST):
        name = str(place)
        while name in found:
            name += "'"
        found[name] = value if type(value) in ATOMS else sorted(repr(each) for each in value if type(each) in ATOMS)
    return found
