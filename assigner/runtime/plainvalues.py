"""Plain Python values as JSON, and back to the same values: what a training script keeps in a checkpoint.

JSON has no tuples, no keys but text and no Counter (which torch's MultiStepLR keeps); each is written as a list with
its name in front, and so is a list:

    {"steps": (3, 5), 7: [1]}  ->  ["dict", ["steps", ["tuple", 3, 5]], [7, ["list", 1]]]

A dict whose keys are all text stays an object. Where tensors may be among the values, each is written as its number,
["tensor", 0], and kept apart.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

SINGLE = (bool, int, float, str, type(None))


def to_json(value: Any, where: str, tensors: list[torch.Tensor] | None = None) -> Any:
    """A value as JSON can carry it.

    Args:
        value: None, a bool, a number, text, or lists, tuples, dicts and Counters of these.
        where: Its name, for errors: `state`.
        tensors: Gets the tensors that are met; None: there may be none.

    Raises:
        UsageError: another value is among them; the message says where.
    """
    kind = type(value)
    if kind in SINGLE:
        return value
    if isinstance(value, float):  # a step's result is its loss, with more hung on it
        return float(value)
    if kind in (list, tuple):
        return [kind.__name__, *(to_json(each, f"{where}[{n}]", tensors) for n, each in enumerate(value))]
    if kind is dict and all(type(key) is str for key in value):
        return {key: to_json(each, f"{where}[{key!r}]", tensors) for key, each in value.items()}
    if kind in (dict, Counter):
        pairs = (
            [to_json(key, f"a key of {where}"), to_json(each, f"{where}[{key!r}]", tensors)]
            for key, each in value.items()
        )
        return [kind.__name__, *pairs]
    if tensors is not None and kind in (torch.Tensor, torch.nn.Parameter):
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
    if name in ("list", "tuple"):
        parts = [_value(each, tensors) for each in found[1:]]
        return parts if name == "list" else tuple(parts)
    if name in ("dict", "Counter"):
        try:
            pairs = {_value(key): _value(each, tensors) for key, each in map(_pair, found[1:])}
        except (TypeError, ValueError) as error:
            raise FormatError(f"a checkpoint's state has a broken {name}", hint="the checkpoint is damaged") from error
        return pairs if name == "dict" else Counter(pairs)
    raise FormatError("a checkpoint's state has a list without its kind", hint="the checkpoint is damaged")


def _pair(found: Any) -> tuple[Any, Any]:
    """A key and its value; text of two letters is none."""
    if not isinstance(found, list):
        raise TypeError("a pair is a list")
    key, value = found
    return key, value
