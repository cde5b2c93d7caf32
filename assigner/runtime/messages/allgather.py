"""Every rank's facts, on every rank: JSON in tensors, checked on reading. Objects torch would unpickle."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from assigner.errors import FormatError, WorkerError
from assigner.formats.document import decode, encode

T = TypeVar("T")


def all_gather(kind: type[T], value: T) -> list[T]:
    """Every rank's `value`, in their order, on every rank. All ranks call this at the same time.

    Args:
        kind: Their type, see `decode`.
        value: This rank's.

    Raises:
        RuntimeError: a rank is gone, in torch's words.
        WorkerError: a rank has sent something else.
    """
    mine = torch.frombuffer(bytearray(json.dumps(encode(value)).encode()), dtype=torch.uint8)
    sizes = _gathered(torch.tensor([len(mine)], device="cpu"))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(mine)] = mine
    texts = [text[: int(size)] for text, size in zip(_gathered(padded), sizes, strict=True)]
    return [_read(kind, bytes(text.tolist()), rank) for rank, text in enumerate(texts)]


def _gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return found


def _read(kind: type[T], text: bytes, rank: int) -> T:
    try:
        found: Any = decode(kind, json.loads(text))
    except (ValueError, RecursionError, FormatError) as error:
        raise WorkerError(
            f"worker:{rank} has told something else than was asked for ({type(error).__name__})",
            hint="all hosts run one release of assigner",
        ) from error
    return found  # type: ignore[no-any-return]
