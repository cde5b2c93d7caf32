"""What a rank must know of inputs that it does not have: structure, shapes, types and plain values, as text.

A rank whose partitions read none of a batch's inputs still needs their rows, to cut them, and what chooses the model's
graph. It gets them from a rank that has them, and puts tensors without values (on the meta device) in their place:

    {"ids": int64 (8, 16), "flag": True}   ->   ["dict", ["ids", ["tensor", "int64", [8, 16], [16, 1]]], ["flag", true]]

JSON, like all that ranks tell each other: nothing in it can run code.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import torch

from assigner.errors import UsageError, WorkerError
from assigner.runtime.packedvalues import DTYPES, dtype_name

_SINGLE = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, torch.Size)


def outline(inputs: Any) -> str:
    """A batch's inputs as text; those that cannot be told are text too, which says why."""
    try:
        return json.dumps(_told(inputs, "inputs"))
    except UsageError as error:
        return json.dumps(["refused", error.message])


def inputs_of(text: str, worker: str) -> Any:
    """The inputs that an outline is of, with tensors that have no values.

    Args:
        text: What `outline` gave.
        worker: Who has told it.

    Raises:
        UsageError: they are of a kind that cannot be told.
        WorkerError: this is no outline.
    """
    try:
        found = json.loads(text)
        if isinstance(found, list) and found[0] == "refused":
            raise UsageError(
                f"this rank was given no inputs, and {worker} cannot tell it what they are: {found[1]}",
                hint="give every rank the inputs, or such values in plain tensors, numbers and text, in tuples, lists"
                " and dicts",
            )
        return _made(found)
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise WorkerError(
            f"{worker} has told something else than inputs ({type(error).__name__})",
            hint="all hosts run one release of assigner",
        ) from error


def _told(value: Any, where: str) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise UsageError(f"{where} is {'nested' if value.is_nested else f'of layout {value.layout}'}")
        dtype = dtype_name(value.dtype)
        return ["tensor", dtype, list(value.shape), list(value.stride())]
    if kind in _SINGLE:
        return value
    if kind in _CONTAINERS:
        return [kind.__name__, *(_told(each, f"{where}[{n}]") for n, each in enumerate(value))]
    if kind in (dict, OrderedDict):
        if any(type(key) not in _SINGLE for key in value):
            raise UsageError(f"{where} has keys that are neither text nor numbers")
        return [kind.__name__, *([key, _told(each, f"{where}[{key!r}]")] for key, each in value.items())]
    if kind is torch.dtype:
        return ["dtype", dtype_name(value)]
    raise UsageError(f"{where} is a {kind.__name__}")


def _made(found: Any) -> Any:
    if not isinstance(found, list):
        return found
    name, *parts = found
    if name == "tensor":
        dtype, sizes, strides = parts
        return torch.empty_strided(sizes, strides, dtype=DTYPES[dtype], device="meta")
    if name == "dtype":
        return DTYPES[parts[0]]
    if name in ("dict", "OrderedDict"):
        pairs = [(key, _made(each)) for key, each in parts]
        return dict(pairs) if name == "dict" else OrderedDict(pairs)
    sequence = [_made(each) for each in parts]
    return {"list": list, "tuple": tuple, "Size": torch.Size}[name](sequence)
