"""Plain Python values as JSON, and back to the same values: in checkpoints, and between ranks.

JSON has no tuples, no keys but text, no types of tensors and no Counter (which torch's MultiStepLR keeps); each is
written as a list with its name in front, and so is a list:

    {"steps": (3, 5), 7: [1]}  ->  ["dict", ["steps", ["tuple", 3, 5]], [7, ["list", 1]]]

A dict whose keys are all text stays an object. Where tensors may be among the values, each is written as its number,
["tensor", 0], and kept apart.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

SINGLE = (bool, int, float, str, type(None))
DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
"""Torch's types by their names, as `float32`."""
_SEQUENCES = {each.__name__: each for each in (list, tuple, torch.Size)}
_PAIRS = {each.__name__: each for each in (dict, Counter, OrderedDict)}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name by which `DTYPES` has a type."""
    return str(dtype).removeprefix("torch.")


def to_json(value: Any, where: str, tensors: list[torch.Tensor] | None = None) -> Any:
    """A value as JSON can carry it.

    Args:
        value: None, a bool, a number, text, a type of tensors, or lists, tuples, sizes, dicts and Counters of these.
        where: Its name, for errors: `state`.
        tensors: Gets the tensors that are met; None: there may be none.

    Raises:
        UsageError: another value is among them; the message says where.
    """
    kind = type(value)
    if kind in SINGLE or isinstance(value, float):  # a step's result is its loss, with more hung on it
        return value if kind in SINGLE else float(value)
    if kind in _SEQUENCES.values():
        return [kind.__name__, *(to_json(each, f"{where}[{n}]", tensors) for n, each in enumerate(value))]
    if kind is dict and all(type(key) is str for key in value):
        return {key: to_json(each, f"{where}[{key!r}]", tensors) for key, each in value.items()}
    if kind in _PAIRS.values():
        pairs = (
            [to_json(key, f"a key of {where}"), to_json(each, f"{where}[{key!r}]", tensors)]
            for key, each in value.items()
        )
        return [kind.__name__, *pairs]
    if kind is torch.dtype:
        return ["dtype", dtype_name(value)]
    if tensors is not None and isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if tensors is not None:
        raise UsageError(
            f"{where} is a {kind.__name__}; only plain values and tensors go to other ranks",
            hint="numbers, text, None, lists, tuples and dicts of these; of a NumPy number, .item()",
        )
    raise UsageError(
        f"{where} is a {kind.__name__}; a checkpoint keeps plain values",
        hint="numbers, text, None, lists, tuples and dicts; of a tensor, .item() or .tolist()",
    )


def from_json(found: Any, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """The value that `to_json` was given.

    Args:
        found: What it gave.
        tensors: Those that it met.

    Raises:
        FormatError: it did not write this.
    """
    try:
        return _value(found, tensors)
    except RecursionError as error:
        raise FormatError("a checkpoint's state is nested too deeply", hint="the checkpoint is damaged") from error


def _value(found: Any, tensors: Sequence[torch.Tensor] = ()) -> Any:
    if isinstance(found, dict):
        return {key: _value(each, tensors) for key, each in found.items()}
    if not isinstance(found, list):
        return found
    name = found[0] if found else None
    if name == "tensor" and tensors:
        return tensors[found[1]]
    try:
        if name == "dtype" and found[1:] and found[1] in DTYPES:
            return DTYPES[found[1]]
        if name in _SEQUENCES:
            return _SEQUENCES[name]([_value(each, tensors) for each in found[1:]])
        if name in _PAIRS:
            pairs = {_value(key): _value(each, tensors) for key, each in map(_pair, found[1:])}
            return pairs if name == "dict" else _PAIRS[name](pairs)
    except (TypeError, ValueError) as error:
        raise FormatError(f"a checkpoint's state has a broken {name}", hint="the checkpoint is damaged") from error
    raise FormatError("a checkpoint's state has a list without its kind", hint="the checkpoint is damaged")


def _pair(found: Any) -> tuple[Any, Any]:
    """A key and its value; text of two letters is none."""
    if not isinstance(found, list):
        raise TypeError("a pair is a list")
    key, value = found
    return key, value
