"""The user's code as in one process: the ranks of a run hold parts of one model, not copies of it.

A loss that divides by the number of processes, as scripts for data parallelism do, must not see the workers of a plan;
and a collective that it calls would meet nobody.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ANSWERS: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "reduce", "barrier")


@contextlib.contextmanager
def as_single_process() -> Iterator[None]:
    """This thread's code finds no other process in torch.distributed while the block runs.

    Raises:
        UsageError: it calls a collective operation.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    thread = threading.get_ident()
    before = {name: getattr(dist, name) for name in (*_ANSWERS, *_COLLECTIVES)}
    for name, original in before.items():
        setattr(dist, name, _answering(name, original, thread))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(dist, name, original)


def _answering(name: str, original: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        if name in _ANSWERS:
            return _ANSWERS[name]
        raise UsageError(
            f"the model or its loss calls torch.distributed.{name}: the workers of a plan hold parts of one model",
            hint="leave it out: losses and gradients are those of the whole batch already",
        )

    return answer
