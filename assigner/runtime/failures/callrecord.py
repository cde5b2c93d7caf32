"""What a rank has called, where, and with what: told to the other ranks when they differ, and how they do.

A record holds words and sums, never a tensor: it must not keep a batch alive, nor see what a script writes into one
later. It goes to the other ranks as JSON.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from assigner.formatting import Unquoted
from assigner.model.plainvalues import dtype_name
from assigner.usercode import calling_place

if TYPE_CHECKING:
    from collections.abc import Sequence

_WHOLE, _SAMPLE = 1 << 18, 1024  # a tensor of so many bytes counts whole; of a larger one so many values and a few more
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_MOST_OF_LEAF, _MOST_OF_FORM = 60, 240  # letters


@dataclass(frozen=True)
class TreeRecord:
    """The inputs or the targets of a batch.

    Args:
        name: Which of both.
        form: All of them in words, as Python writes them.
        paths: Where each leaf stands: `inputs['ids']`.
        words: Of each leaf, type and shape of a tensor, a plain value itself.
        sums: Of each leaf's values.
    """

    name: str
    form: str
    paths: tuple[str, ...]
    words: tuple[str, ...]
    sums: tuple[int, ...]

    def difference(self, other: TreeRecord, mine: str, theirs: str) -> str:
        """In what two differ, with the names of both ranks; empty: in nothing."""
        if self.paths == other.paths:
            if unlike := _unlike(self.words, other.words):
                n = unlike[0]
                one, two, path = self.words[n], other.words[n], self.paths[n]
                return f"the {_kind(one, two)} of {path}{_more(unlike)}: {one} on {mine}, {two} on {theirs}"
            if unlike := _unlike(self.sums, other.sums):
                return f"the values of {self.paths[unlike[0]]}{_more(unlike)} ({self.words[unlike[0]]})"
            if self.form == other.form:
                return ""
        return f"the structure of {self.name}: {self.form} on {mine}, {other.form} on {theirs}"


def _unlike(ours: Sequence[Any], theirs: Sequence[Any]) -> list[int]:
    return [n for n, (one, two) in enumerate(zip(ours, theirs, strict=True)) if one != two]


SETTINGS = "the settings of the optimizer"
"""What calls differ in that are the same but for these."""

_OPTIMIZERS = re.compile(r"(lr [^()]*\()?settings [0-9a-f]{6}\)?")


@dataclass(frozen=True)
class ToldCall:
    """What the script called.

    Args:
        name: What is compared, with its arguments but the batch.
        shown: The same for people; it may say more.
        place: `FILE:LINE` of the script.
    """

    name: str
    shown: str
    place: str

    @classmethod
    def now(cls, name: str, shown: str) -> ToldCall:
        """A call that the script makes now."""
        place = calling_place()
        return cls(name, shown or name, "an unknown line" if place is None else f"{place[0]}:{place[1]}")

    def __str__(self) -> str:
        return f"{self.shown} at {self.place}"


@dataclass(frozen=True)
class CallRecord:
    """What ranks compare at one time.

    Args:
        number: How many comparisons this rank has made before.
        calls: The one that is about to run, and before it those since the last comparison, which exchanged nothing.
        inputs: None: this rank has none, or the call takes none.
        targets: Likewise.
    """

    number: int
    calls: tuple[ToldCall, ...]
    inputs: TreeRecord | None = None
    targets: TreeRecord | None = None

    @property
    def told(self) -> str:
        """The calls in their order, each with its line."""
        return ", then ".join(map(str, self.calls))

    @property
    def _without_settings(self) -> list[str]:
        return [_OPTIMIZERS.sub("", each.name) for each in self.calls]

    def difference(self, other: CallRecord, mine: str, theirs: str) -> str:
        """In what two differ, with the names of both ranks; empty: in nothing that both have."""
        if [each.name for each in self.calls] != [each.name for each in other.calls]:
            return SETTINGS if self._without_settings == other._without_settings else "the call"
        for one, two in ((self.inputs, other.inputs), (self.targets, other.targets)):
            if one is not None and two is not None and (found := one.difference(two, mine, theirs)):
                return found
        return ""


def _more(pairs: Sequence[Any]) -> str:
    return f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""


def _kind(one: str, other: str) -> str:
    """In what the words of two leaves differ."""
    (dtype, shaped, shape), (other_dtype, also, other_shape) = one.partition("["), other.partition("[")
    arrays = all(each.removeprefix("array ").isidentifier() for each in (dtype, other_dtype))
    if not (shaped and also and arrays):
        return "value"
    if dtype == other_dtype:
        return "shape"
    return "type" if shape == other_shape else "type and shape"


class TreeSums:
    """Inputs or targets as they are compared: cheap to make at every step.

    Attributes:
        form: Its structure, shapes, types and plain values; equal for trees that differ in values of tensors alone.
        strides: Of the tensors that are not contiguous, by their numbers.
    """

    __slots__ = ("form", "strides", "structure", "sums", "words")

    def __init__(self, tree: Any) -> None:
        leaves, self.structure = pytree.tree_flatten(tree)
        self.words = [described(leaf) for leaf in leaves]
        self.sums = [_added(0, leaf, inside=False) for leaf in leaves]
        self.form = f"{self.structure} {self.words}"
        self.strides = {n: leaf.stride() for n, leaf in enumerate(leaves) if _is_spread(leaf)}

    def record(self, name: str) -> TreeRecord:
        """Under its name in a batch, for another rank."""
        words = [Unquoted(_shortened(each, _MOST_OF_LEAF)) for each in self.words]
        try:
            tree = pytree.tree_unflatten(words, self.structure)
            form, paths = repr(tree), [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(tree)]
        except Exception:  # noqa: BLE001 - a class of the user's own that takes no words in the place of tensors
            form, paths = str(self.structure), [f"[leaf {n}]" for n in range(len(words))]
        places = tuple(f"{name}{path}" for path in paths)
        return TreeRecord(name, _shortened(form, _MOST_OF_FORM), places, tuple(map(repr, words)), tuple(self.sums))


class CallSums(NamedTuple):
    """A comparison of calls as this rank makes it; see `CallRecord`."""

    number: int
    calls: tuple[ToldCall, ...]
    inputs: TreeSums | None
    targets: TreeSums | None

    def record(self) -> CallRecord:
        """For another rank."""
        inputs = None if self.inputs is None else self.inputs.record("inputs")
        targets = None if self.targets is None else self.targets.record("targets")
        return CallRecord(self.number, self.calls, inputs, targets)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _is_spread(leaf: Any) -> bool:
    plain = isinstance(leaf, torch.Tensor) and not leaf.is_nested and leaf.layout is torch.strided
    return plain and not leaf.is_contiguous()


def described(leaf: Any) -> str:
    """A leaf of a batch in a word: a tensor's type and shape, a plain value itself."""
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return "a nested tensor"
    if isinstance(leaf, torch.Tensor):
        return f"{dtype_name(leaf.dtype)}{list(leaf.shape)}"
    if isinstance(leaf, np.ndarray):
        return f"array {leaf.dtype}{list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__


def checksum(batch: Any) -> int:
    """Of shapes, types and values of every tensor in a tree, some thousand of a large one's, and of its plain values.

    Arrays count like tensors, an object of another class by its attributes.
    """
    return _all_added(0, batch, inside=False)


def _all_added(found: int, tree: Any, *, inside: bool) -> int:
    for leaf in pytree.tree_leaves(tree):
        found = _added(found, leaf, inside=inside)
    return found


def _added(found: int, leaf: Any, *, inside: bool) -> int:
    """A checksum with a leaf's added to it; `inside` an object no other is looked into, for they may be in circles."""
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return _all_added(found, list(leaf.unbind()), inside=inside)
    if isinstance(leaf, torch.Tensor):
        found = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), found)
        own = type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # else its values are elsewhere
        if own and leaf.device.type in ("cpu", "cuda") and leaf.layout is torch.strided and leaf.numel():
            values = leaf.detach().as_subclass(torch.Tensor).reshape(-1)
            every = 1 if values.nbytes <= _WHOLE else -(-len(values) // _SAMPLE)
            sample = values[::every].contiguous().cpu()
            found = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), found)
    elif isinstance(leaf, np.ndarray):
        flat = leaf.reshape(-1)
        sampled = flat[:: 1 if flat.nbytes <= _WHOLE else -(-flat.size // _SAMPLE)]
        values_of = sampled.tolist() if leaf.dtype.hasobject else sampled.tobytes()
        found = zlib.crc32(f"{leaf.shape} {leaf.dtype} {values_of!r}".encode(), found)
    elif isinstance(leaf, _PLAIN):
        found = zlib.crc32(repr(leaf).encode(), found)
    elif not inside and hasattr(leaf, "__dict__") and not isinstance(leaf, type):
        found = _all_added(found, dict(vars(leaf)), inside=True)
    return found
