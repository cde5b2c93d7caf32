"""What a builder did to its tensors, as a list of calls, and running again those that some of the tensors depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class View:
    """A meta tensor as it was when a call saw it: which storage, and how it looks at it."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """The view that a tensor is."""
        storage = tensor.untyped_storage()._cdata
        return cls(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@dataclass(frozen=True)
class Call:
    """One recorded operation; meta tensors among its arguments and results are views."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    writes: bool
    is_random: bool
    random_state: torch.Tensor | None

    def reads(self) -> set[int]:
        """The storages among the arguments."""
        return {leaf.storage for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, View)}

    def makes(self) -> set[int]:
        """The storages among the results."""
        return {leaf.storage for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, View)}


@dataclass(frozen=True)
class _Memory:
    """Real memory behind a recorded storage."""

    storage: torch.UntypedStorage

    def look(self, view: View) -> torch.Tensor:
        return torch.empty(0, dtype=view.dtype).set_(self.storage, view.offset, view.size, view.stride)


class Replay:
    """Runs the recorded calls that the wanted storages depend on, and every random draw."""

    def __init__(self, calls: list[Call], wanted: set[int]) -> None:
        self.calls = calls
        self.wanted = wanted
        self.needed = self._needed()
        self.end = max((n + 1 for n, needed in enumerate(self.needed) if needed), default=0)
        self.last_use = {
            storage: n for n, call in enumerate(calls) if self.needed[n] for storage in call.reads() | call.makes()
        }
        self.memory: dict[int, _Memory] = {}

    def _needed(self) -> list[bool]:
        """Backwards from the end: a call is needed if a needed storage is among what it makes or writes."""
        alive, needed = set(self.wanted), []
        for call in reversed(self.calls):
            touched = call.makes() | (call.reads() if call.writes else set())
            needed.append(bool(touched & alive))
            if needed[-1]:
                alive |= call.reads()
        return needed[::-1]

    def needed_calls(self) -> list[Call]:
        """The calls that the wanted storages depend on."""
        return [call for call, needed in zip(self.calls, self.needed, strict=True) if needed]

    def run(self, seed: int | None) -> dict[int, _Memory]:
        """The wanted storages' memory. With a seed every draw is replayed; None: no draw is among the needed calls."""
        kept = torch.get_rng_state()
        try:
            if seed is not None:
                torch.manual_seed(seed)
            with torch.no_grad():
                for position, call in enumerate(self.calls[: self.end]):
                    if call.random_state is not None:
                        torch.set_rng_state(call.random_state)
                    if self.needed[position]:
                        self._call(call, self._real)
                        self._free(call, position)
                    elif call.is_random and seed is not None:
                        self._call(call, _scratch)
        finally:
            torch.set_rng_state(kept)
        return self.memory

    def _call(self, call: Call, real: Callable[[Any], Any]) -> None:
        """Run one call on real tensors; what it makes is remembered, unless it ran on scratch memory."""
        kwargs = {
            name: torch.device("cpu") if isinstance(word, torch.device) else word for name, word in call.kwargs.items()
        }
        result = call.function(*real(call.args), **real(kwargs))
        if real is _scratch:
            return
        for view, value in zip(pytree.tree_leaves(call.result), pytree.tree_leaves(result), strict=True):
            if isinstance(view, View) and view.storage not in self.memory:
                same = value.stride() == view.stride and value.storage_offset() == view.offset
                kept = value if same else torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(value)
                self.memory[view.storage] = _Memory(kept.untyped_storage())

    def _free(self, call: Call, position: int) -> None:
        for storage in call.reads() | call.makes():
            if self.last_use[storage] == position and storage not in self.wanted:
                self.memory.pop(storage, None)

    def _real(self, tree: Any) -> Any:
        return pytree.tree_map_only(View, lambda view: self.memory[view.storage].look(view), tree)


def _scratch(tree: Any) -> Any:
    """Memory of the same shape and strides: a draw takes as much from the generator as the true one."""
    return pytree.tree_map_only(View, lambda view: torch.empty_strided(view.size, view.stride, dtype=view.dtype), tree)
