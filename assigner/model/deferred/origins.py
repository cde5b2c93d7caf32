"""What ranks compare of the models that their builders have made: each makes its own part, and all are of one model.

    seeds       the states of torch's generators from which a builder draws
    python      that of Python's generator, and
    numpy       of NumPy's, if it has drawn from them: nobody seeds these for it
    values      what each weight is made by: the calls, their numbers, and the draws before them; of one that was there
                before, its values; and what forwards can read of numbers in lists, sets, arrays, tensors and numbered
                dicts, and of fractions by name
    texts       in lists and dicts that forwards can read, and names of whole numbers: whether the same ones stand in
                another order

Other whole numbers by name, and other texts, may differ: a rank's number, a path. What a set has decided has another
order in each process.
"""

from __future__ import annotations

import hashlib
import numbers
import re
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from assigner.model.deferred.ownership import attributes_of
from assigner.model.deferred.reach import MOST_ITEMS, reach
from assigner.model.deferred.recorder import is_meta
from assigner.model.deferred.replay import Call, SharedDraws, View
from assigner.model.members import named_buffers, named_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from assigner.model.deferred.vocabulary import Vocabulary

_NUMBERS = (numbers.Number, np.bool_)
_WHOLE = 1 << 20
"""Elements of a tensor or an array up to which all of them count."""
_SAMPLED = 256
_MANY = 4
"""Entries of a dict from which on texts and numbers are no place among the ranks."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Origins:
    """What a model was made from; numbers of 48 bits, 0: nothing."""

    seeds: int  # of torch's draws
    python: int  # of draws from Python's generator
    numpy: int
    values: dict[str, int]  # of weights by name, and of numbers by where they are
    texts: dict[str, tuple[int, int]]  # of each container of texts: of what is in it, and of how that stands there

    @property
    def numbers(self) -> list[float]:
        """What ranks compare first: seeds, Python's, NumPy's, all values together."""
        return [self.seeds, self.python, self.numpy, digest(map(str, self.placed))]

    @property
    def placed(self) -> list[int]:
        """Of each place and its values."""
        return [digest([f"{where}: {each}"]) for where, each in self.values.items()]


def origins_of(
    calls: Sequence[Call],
    model: nn.Module,
    vocabulary: Vocabulary,
    draws: SharedDraws,
    unregistered: Sequence[tuple[torch.Tensor, View]],
) -> Origins:
    """Those of a builder, by its calls, the model that it has made, and the names by which forwards read of that.

    `unregistered` are tensors beside parameters and buffers, each with what stands for it in the calls: their values
    may be what memory held before, as those of torch.empty.
    """
    seeds = [call.source.numpy().tobytes() for call in calls if isinstance(call.source, torch.Tensor)]
    known, made = _known(calls), {id(tensor): view for tensor, view in unregistered}
    found: dict[str, int] = defaultdict(int)
    texts: dict[str, tuple[int, int]] = {}
    for where, value in (*named_parameters(model), *reach({}, model.named_modules(), vocabulary=vocabulary)):
        name = without_addresses(str(where))  # objects of a set have one name, and no order
        view = made.get(id(value))
        if numbers_ := list(_numbers(value, vocabulary) if view is None else _looked_at(view, known)):
            found[name] = (found[name] + digest(numbers_)) % (1 << 48)
        if there := _texts(value):
            texts[name] = digest(there[0]), digest(there[1])
    return Origins(
        digest(seeds),
        digest(map(repr, draws.python)) if draws.python else 0,
        digest(map(repr, draws.numpy)) if draws.numpy else 0,
        {**_weights(model, known), **dict(sorted(found.items()))},
        texts,
    )


def _known(calls: Sequence[Call]) -> dict[int, int]:
    """What has made each storage: all that its values follow from."""
    known, ends = dict[int, int](), list[int]()  # by storage, what it is; by call, where its draws ended
    for call in calls:
        parts = [without_addresses(str(call.function)), *_given(call, known)]
        if call.source is not None:
            parts.append(str(ends[call.source]) if isinstance(call.source, int) else call.source.numpy().tobytes())
        ends.append(digest(parts))
        for n, leaf in enumerate(pytree.tree_leaves(call.result)):
            if isinstance(leaf, View) and leaf.storage not in known:
                known[leaf.storage] = digest([str(ends[-1]), str(n)])
        known.update(dict.fromkeys(call.writes, ends[-1]))
    return known


def _weights(model: nn.Module, known: Mapping[int, int]) -> dict[str, int]:
    """What has made each parameter and buffer that has no values yet."""
    tensors = {name: each for name, each in (*named_parameters(model), *named_buffers(model)) if is_meta(each)}
    return {name: digest(_looked_at(View.of(each), known)) for name, each in tensors.items()}


def _given(call: Call, known: Mapping[int, int]) -> Iterator[str | bytes]:
    """The arguments of a call; not where memory lies."""
    named = {name: each for name, each in call.kwargs.items() if name not in ("pin_memory", "device")}
    for leaf in pytree.tree_leaves((call.args, named)):
        if isinstance(leaf, View):
            yield from _looked_at(leaf, known)
        elif isinstance(leaf, torch.Tensor):
            yield from _elements(leaf)
        elif isinstance(leaf, _NUMBERS):
            yield repr(leaf)


def _looked_at(view: View, known: Mapping[int, int]) -> Iterator[str]:
    yield f"{known.get(view.storage)} {view.dtype} {tuple(view.size)} {view.stride} {view.offset}"


def _texts(value: Any) -> tuple[list[str], list[str]] | None:
    """What texts a list has, a dict among its keys or values, or a module as names of whole numbers; how they stand.

    None: it has none, or they may tell of a place among the ranks, as {"row": 0, "column": 1}. A few that were numbered
    by going over a set are told from that by their numbers, which come in the same turn in every process.
    """
    if isinstance(value, list | tuple | deque) and len(value) > 1 and all(isinstance(each, str) for each in value):
        return sorted(value), [*value]
    named, are_few = value if isinstance(value, dict) else {}, isinstance(value, nn.Module)
    if isinstance(value, nn.Module) and not type(value).__module__.startswith("torch."):
        named = {name: each for name, each in attributes_of(value, plain=True).items() if type(each) is int}
    if len(named) < 2 or not _is_plain(named.keys(), str) or not _is_plain(named.values(), str):
        return None
    are_few |= len(named) < _MANY
    texts = sorted(repr(each) for pair in named.items() for each in pair if isinstance(each, str))
    in_turn = [repr(each) for pair in named.items() for each in pair if not isinstance(each, str)]
    if are_few and not (texts and in_turn):
        return None
    return texts + (in_turn if are_few else sorted(in_turn)), sorted(map(repr, named.items()))


def _numbers(value: Any, vocabulary: Vocabulary) -> Iterator[str | bytes]:
    """Those in a container, an array or a tensor with values; of a module and of a dict with names, fractions."""
    if isinstance(value, torch.Tensor):
        yield from _elements(value)
    elif isinstance(value, nn.Module):
        yield from _fractions(attributes_of(value, plain=True), vocabulary)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        items = [repr(each) for each in value if isinstance(each, _NUMBERS)]
        yield from sorted(items) if isinstance(value, set | frozenset) else items
        if len(value) > MOST_ITEMS:  # the walk does not enter it
            yield from (repr(each) for each in value if isinstance(each, list | tuple) and _is_plain(each))
    elif isinstance(value, dict) and all(isinstance(key, int) for key in value):
        yield from sorted(f"{key!r}: {each!r}" for key, each in value.items() if isinstance(each, _NUMBERS))
    elif isinstance(value, dict):
        yield from _fractions(value, vocabulary)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape}"
        yield (value if value.size <= _WHOLE else value.flat[:: -(-value.size // _SAMPLED)]).tobytes()


def _fractions(named: Mapping[Any, Any], vocabulary: Vocabulary) -> Iterator[str]:
    """Those among numbers by name that forwards can read; where code makes the names by which it asks, none."""
    names = vocabulary.names or ()
    found = [(name, float(each)) for name, each in named.items() if name in names and _is_fractional(each)]
    yield from sorted(f"{name}: {each!r}" for name, each in found if each % 1)


def _is_fractional(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)


def _is_plain(values: Iterable[Any], *kinds: type) -> bool:
    return all(isinstance(each, (*_NUMBERS, *kinds)) for each in values)


def digest(parts: Iterable[str | bytes]) -> int:
    """One number of 48 bits, which a float holds, for all of these in turn."""
    found = hashlib.blake2b(digest_size=6)
    for each in parts:
        found.update(each if isinstance(each, bytes) else f"{each};".encode())
    return int.from_bytes(found.digest(), "big")


def without_addresses(text: str) -> str:
    """What stands for an object, as every process has it: Python shows functions and objects by where they lie."""
    return _ADDRESS.sub("", text)


def _elements(tensor: torch.Tensor) -> Iterator[str | bytes]:
    """Its values; of many some."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    some = flat if len(flat) <= _WHOLE else flat[:: -(-len(flat) // _SAMPLED)]
    yield f"{tensor.dtype} {tuple(tensor.shape)}"
    yield some.cpu().contiguous().view(torch.uint8).numpy().tobytes()
