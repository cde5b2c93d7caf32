"""The user's code as in one process: the ranks of a run hold parts of one model, not copies of it.

A loss that divides by the number of processes, as scripts for data parallelism do, must not see the workers of a plan;
and a collective that it calls would meet nobody. A backward runs the user's code too (a Function's, a hook's, what a
checkpoint recomputes), and in between this program's own, which does talk to other ranks:

    with as_single_process():      the user's code: one process
        backward ...
            with as_rank():        sums of gradients that begin within it: a rank among others

To put stand-ins in the place of torch.distributed's functions takes longer than a small partition's forward. So a step
does it once, around all of its blocks (`StandIns`); who calls one is looked at when it is called.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_ANSWERS: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
_COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group",
    "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list",
)  # fmt: skip
_FUNCTIONAL = "torch.distributed._functional_collectives"  # what a compiler traces: it calls none of the above
_FUNCTIONAL_COLLECTIVES = (
    "all_gather_into_tensor_coalesced", "all_gather_single", "all_gather_single_autograd",
    "all_gather_single_coalesced", "all_gather_tensor", "all_gather_tensor_autograd", "all_reduce",
    "all_reduce_coalesced", "all_to_all_single", "all_to_all_single_autograd", "broadcast", "permute_tensor",
    "reduce_scatter_single", "reduce_scatter_single_autograd", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor", "reduce_scatter_tensor_autograd", "reduce_scatter_tensor_coalesced",
)  # fmt: skip


class as_single_process:  # noqa: N801 (used as a function: a generator's context costs a tenth of a small partition)
    """This thread's code finds no other process in torch.distributed while the block runs.

    So does the code of autograd's own threads, which run the backward of what lies on a GPU, and code that has imported
    a function of torch.distributed by its name.

    Raises:
        UsageError: it calls a collective operation.
    """

    __slots__ = ("_entered", "_is_rank", "_stand_ins")

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._is_rank = thread in _outside
        _outside.discard(thread)
        self._stand_ins: StandIns | None = None
        self._entered = thread not in _inside and (_blocks[0] > 0 or _has_ranks())
        if self._entered:
            if not _blocks[0] or not _is_looked_at():
                self._stand_ins = StandIns()
                self._stand_ins.__enter__()
            _inside.add(thread)

    def __exit__(self, *_: object) -> None:
        if self._entered:
            _inside.remove(threading.get_ident())
            if self._stand_ins is not None:
                self._stand_ins.__exit__()
        if self._is_rank:
            _outside.add(threading.get_ident())


class StandIns:
    """While such a block runs, functions of torch.distributed ask who calls them; without ranks nothing happens."""

    __slots__ = ("_entered",)

    def __enter__(self) -> None:
        self._entered = _has_ranks()
        if self._entered:
            with _lock:
                if not _is_looked_at():
                    if _blocks[0]:
                        _put(stand_ins=False)
                    _look_for_holders()
                    _put(stand_ins=True)
                elif not _blocks[0]:
                    _put(stand_ins=True)
                _blocks[0] += 1

    def __exit__(self, *_: object) -> None:
        if self._entered:
            with _lock:
                _blocks[0] -= 1
                if not _blocks[0]:
                    _put(stand_ins=False)


class as_rank:  # noqa: N801 (as above)
    """Within such a block: this thread is one of the run's processes again."""

    __slots__ = ("_left",)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._left = thread not in _outside
        _outside.add(thread)

    def __exit__(self, *_: object) -> None:
        if self._left:
            _outside.remove(threading.get_ident())


class _Holder(NamedTuple):
    """A module that holds functions of torch.distributed: its names, of these such functions, and their stand-ins."""

    names: dict[str, Any]
    originals: dict[str, Callable[..., Any]]
    stand_ins: dict[str, Callable[..., Any]]


_lock = threading.Lock()
_inside: set[int] = set()  # the threads in blocks of one process
_outside: set[int] = set()  # of these and of autograd's, the ones in blocks of a rank
_holders: list[_Holder] = []
_looked_at: list[tuple[int, Any]] = [(0, None)]  # how many modules there were then, and the newest of them
_blocks = [0]  # how many have put stand-ins there


def _is_looked_at() -> bool:
    (count, newest), now = _looked_at[0], sys.modules
    return len(now) == count and next(reversed(now.values())) is newest


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def _put(*, stand_ins: bool) -> None:
    for each in _holders:
        each.names.update(each.stand_ins if stand_ins else each.originals)


def _look_for_holders() -> None:
    """All modules but this program's own, and but those of torch below `torch.distributed.distributed_c10d`."""
    _looked_at[:] = [(len(sys.modules), next(reversed(sys.modules.values())))]
    _holders.clear()
    names = [name for name in (*_ANSWERS, *_COLLECTIVES) if hasattr(dist, name)]
    stands = {id(original): _stand_in(name, original) for name in names for original in [getattr(dist, name)]}
    functional = vars(sys.modules[_FUNCTIONAL]) if _FUNCTIONAL in sys.modules else {}
    stands |= {
        id(functional[name]): _stand_in(f"{_FUNCTIONAL.rpartition('.')[2]}.{name}", functional[name])
        for name in _FUNCTIONAL_COLLECTIVES
        if name in functional
    }
    own = {"torch.distributed", "torch.distributed.distributed_c10d", _FUNCTIONAL}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in {"torch", "assigner"} and name not in own:
            continue
        held = getattr(module, "__dict__", {})
        originals = {key: value for key, value in list(held.items()) if id(value) in stands}
        if originals:
            _holders.append(_Holder(held, originals, {key: stands[id(each)] for key, each in originals.items()}))


def is_user_code() -> bool:
    """Whether this thread is in a block of one process, and in no block of a rank within it."""
    thread = threading.get_ident()
    if not _inside or thread in _outside:
        return False
    if thread in _inside:
        return True
    # autograd's threads are not Python's, unless they have asked which thread they are; those that carry messages are
    return thread not in (each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread))


def _stand_in(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        if not is_user_code():
            return original(*args, **kwargs)
        if name in _ANSWERS:
            return _ANSWERS[name]
        raise UsageError(
            f"the model or its loss calls torch.distributed.{name}: the workers of a plan hold parts of one model",
            hint="leave it out: losses and gradients are those of the whole batch already",
        )

    return answer
