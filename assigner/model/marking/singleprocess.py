"""The user's code as in one process: the ranks of a run hold parts of one model, not copies of it.

A loss that divides by the number of processes, as scripts for data parallelism do, must not see the workers of a plan;
and a collective that it calls would meet nobody.
"""

from __future__ import annotations

import operator
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_ANSWERS: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "reduce", "barrier")


class as_single_process:  # noqa: N801 (used as a function: a generator's context costs a tenth of a small partition)
    """This thread's code finds no other process in torch.distributed while the block runs.

    Raises:
        UsageError: it calls a collective operation.
    """

    __slots__ = ("_entered",)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._entered = thread not in _inside and dist.is_available() and dist.is_initialized()
        if self._entered:
            with _lock:
                if not _inside:
                    _originals.update(zip(_STAND_INS, _now(dist.__dict__), strict=True))
                    dist.__dict__.update(_STAND_INS)
                _inside.add(thread)

    def __exit__(self, *_: object) -> None:
        if self._entered:
            with _lock:
                _inside.remove(threading.get_ident())
                if not _inside:
                    dist.__dict__.update(_originals)


_lock = threading.Lock()
_inside: set[int] = set()  # the threads in such blocks
_originals: dict[str, Callable[..., Any]] = {}


def _stand_in(name: str) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() not in _inside:
            return _originals[name](*args, **kwargs)
        if name in _ANSWERS:
            return _ANSWERS[name]
        raise UsageError(
            f"the model or its loss calls torch.distributed.{name}: the workers of a plan hold parts of one model",
            hint="leave it out: losses and gradients are those of the whole batch already",
        )

    return answer


_STAND_INS = {name: _stand_in(name) for name in (*_ANSWERS, *_COLLECTIVES)}
_now = operator.itemgetter(*_STAND_INS)
