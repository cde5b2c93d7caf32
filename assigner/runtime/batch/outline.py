"""What a rank must know of inputs that it does not have: structure, shapes, types and plain values, as text.

A rank whose partitions read none of a batch's inputs still needs their rows, to cut them, and what chooses the model's
graph. It gets them from a rank that has them, and puts tensors without values (on the meta device) in their place:

    {"ids": int64 (8, 16), "flag": True}   ->   {"ids": ["tensor", 0], "flag": true}, ["int64", [8, 16], [16, 1]]

JSON, like all that ranks tell each other: nothing in it can run code.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from assigner.errors import FormatError, UsageError, WorkerError
from assigner.model.plainvalues import DTYPES, dtype_name, from_json, to_json


def outline(inputs: Any) -> str:
    """A batch's inputs as text; those that cannot be told are text too, which says why."""
    tensors: list[torch.Tensor] = []
    try:
        plain = to_json(inputs, "inputs", tensors)
        return json.dumps({"inputs": plain, "tensors": [_facts_of(each) for each in tensors]})
    except UsageError as error:
        return json.dumps({"refused": error.message})


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
        if "refused" in found:
            raise UsageError(
                f"this rank was given no inputs, and {worker} cannot tell it what they are: {found['refused']}",
                hint="give every rank the inputs, or such values in plain tensors, numbers and text, in tuples, lists"
                " and dicts",
            )
        return from_json(found["inputs"], [_without_values(*facts) for facts in found["tensors"]])
    except UsageError:
        raise
    except (FormatError, ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise WorkerError(
            f"{worker} has told something else than inputs ({type(error).__name__})",
            hint="all hosts run one release of assigner",
        ) from error


def _facts_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise UsageError(f"one of the inputs is {'nested' if tensor.is_nested else f'of layout {tensor.layout}'}")
    return dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride()


def _without_values(dtype: str, sizes: list[int], strides: list[int]) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=DTYPES[dtype], device="meta")
