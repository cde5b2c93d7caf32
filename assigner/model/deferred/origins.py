"""What ranks compare of the models that their builders have made: each makes its own part, and all are of one model.

    seeds       the states of torch's generators from which a builder draws
    python      that of Python's generator, and
    numpy       of NumPy's, if it has drawn from them: nobody seeds these for it
    values      numbers that it gives to torch, and those in lists, sets, arrays, tensors and numbered dicts of its
                modules

Numbers by themselves or by name, and texts, may differ: a rank's number, the time, a path.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from assigner.model.deferred.reach import reach
from assigner.model.deferred.replay import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from assigner.machine.generators import GeneratorStates
    from assigner.model.deferred.replay import Call

TENSORS = "tensors"
"""The place of all numbers and tensors that builders give to torch."""

_NUMBERS = (bool, int, float, complex)
_WHOLE = 16384
_SAMPLED = 256


@dataclass(frozen=True)
class Origins:
    """What a model was made from; numbers of 48 bits, 0: nothing.

    Args:
        seeds: Of torch's draws.
        python: Of draws from Python's generator.
        numpy: Of draws from NumPy's.
        values: Of numbers, by where they are.
    """

    seeds: int
    python: int = 0
    numpy: int = 0
    values: dict[str, int] = field(default_factory=dict)

    @property
    def numbers(self) -> list[float]:
        """What ranks compare first: seeds, Python's, NumPy's, all values together."""
        return [self.seeds, self.python, self.numpy, _digest(str(each) for each in self.values.values())]


def origins_of(calls: Sequence[Call], model: nn.Module, before: GeneratorStates, after: GeneratorStates) -> Origins:
    """Those of a builder.

    Args:
        calls: What it has torch do.
        model: What it has made.
        before: Python's and NumPy's generators before it ran.
        after: And after it.
    """
    seeds = [call.source.numpy().tobytes() for call in calls if isinstance(call.source, torch.Tensor)]
    has_drawn = before.numpy is not None and before.numpy != after.numpy  # loaded by the builder: nobody knows
    values = {TENSORS: _digest(_given(calls))}
    for where, value in reach({}, model.named_modules()):
        if numbers := list(_numbers(value)):
            values[str(where)] = _digest(numbers)
    return Origins(
        _digest(seeds),
        _digest([repr(before.python)]) if before.python != after.python else 0,
        _digest([repr(before.numpy)]) if has_drawn else 0,
        values,
    )


def _digest(parts: Iterable[str | bytes]) -> int:
    found = hashlib.blake2b(digest_size=6)
    for each in parts:
        found.update(each if isinstance(each, bytes) else f"{each};".encode())
    return int.from_bytes(found.digest(), "big")


def _given(calls: Iterable[Call]) -> Iterator[str | bytes]:
    """The numbers and the tensors with values among the arguments of calls."""
    for call in calls:
        for leaf in pytree.tree_leaves((call.args, call.kwargs)):
            if type(leaf) in _NUMBERS:
                yield repr(leaf)
            elif isinstance(leaf, torch.Tensor) and not isinstance(leaf, View):
                yield from _numbers(leaf)


def _numbers(value: Any) -> Iterator[str | bytes]:
    """Those in a container, an array or a tensor with values."""
    if isinstance(value, torch.Tensor):
        yield from _elements(value)
    elif isinstance(value, list | tuple | deque):
        yield from (repr(each) for each in value if type(each) in _NUMBERS)
    elif isinstance(value, set | frozenset):
        yield from sorted(repr(each) for each in value if type(each) in _NUMBERS)
    elif isinstance(value, dict):
        pairs = (f"{key!r}: {each!r}" for key, each in value.items() if type(each) in _NUMBERS)
        yield from sorted(pairs) if all(isinstance(key, int) for key in value) else ()
    elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape}"
        yield (value if value.size <= _WHOLE else value.flat[:: -(-value.size // _SAMPLED)]).tobytes()


def _elements(tensor: torch.Tensor) -> Iterator[str | bytes]:
    """Its values; of many some."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    some = flat if len(flat) <= _WHOLE else flat[:: -(-len(flat) // _SAMPLED)]
    yield f"{tensor.dtype} {tuple(tensor.shape)}"
    yield some.cpu().contiguous().view(torch.uint8).numpy().tobytes()
