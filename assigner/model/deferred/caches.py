"""The functions of a model that keep what they have made: `functools.cache` and `lru_cache`.

No module holds what they have made for their callers, and Python takes no object out of a cache again, but all of them.
So a capture, whose tensors have no values, finds them empty, and behind it they have what they had before: a run goes
on with what its forwards have made, as plain torch does, though it may be of weights as they were then.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.machine.generators import kept_python
from assigner.model.deferred.contents import ATOMS, cache_table, cached_entries, cached_values, called_with
from assigner.model.deferred.reach import files_of, kept_objects, reach
from assigner.model.deferred.recorder import is_meta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    Cached = functools._lru_cache_wrapper[Any]


def cached_functions(modules: Iterable[tuple[str, nn.Module]]) -> list[Cached]:
    """Those that modules, and the files of their classes, lead to, each once."""
    modules = list(modules)
    files = files_of(dict.fromkeys(type(each) for _, each in modules))
    met = itertools.chain.from_iterable(vars(sys.modules[name]).values() for name in files)
    every = itertools.chain(met, (each for _, each in reach({}, modules, top="whole")))
    return [*{id(each): each for each in every if isinstance(each, functools._lru_cache_wrapper)}.values()]


def clear_caches(model: nn.Module, kept: Mapping[int, list[int]] | None = None) -> dict[int, list[int]]:
    """Empty what functools.cache keeps in the files of a model: fake tensors must neither stay there nor come.

    An object that the user's code makes once, and sets up, is no tensor: it stays, and its function with it. So does
    the model itself, where its builder is cached. What stays is given back, by the ids of the functions: behind the
    forward (`kept`) all that came since goes again.
    """
    stay: dict[int, list[int]] = {}
    modules = {id(each) for each in model.modules()}
    for value in cached_functions(model.named_modules()):
        if not modules.isdisjoint(map(id, cached_values(value))):
            continue
        objects = kept_objects(value)
        if kept is None:
            is_kept = bool(objects) and not _lead_to_tensors(objects)
        else:
            is_kept = [*map(id, objects)] == kept.get(id(value))
        if is_kept:
            stay[id(value)] = [*map(id, objects)]
        else:
            value.cache_clear()
    return stay


def that_made(model: nn.Module, before: Mapping[int, list[int]]) -> list[str]:
    """The functions that have made objects, no tensors and nothing that leads to one, since `clear_caches`, by name."""
    pairs = ((each, kept_objects(each)) for each in cached_functions(model.named_modules()))
    return [
        each.__qualname__
        for each, objects in pairs
        if objects and [*map(id, objects)] != before.get(id(each)) and not _lead_to_tensors(objects)
    ]


def _lead_to_tensors(objects: Sequence[Any]) -> bool:
    return any(True for each in objects for _ in _tensors_in(each))


@contextlib.contextmanager
def caches_put_back(model: nn.Module) -> Iterator[None]:
    """Behind the block, which empties them, the cached functions of a model have what they had before.

    But for tensors without values, which the builder has made: there are others by now. A function that drops some
    (`lru_cache` with a size) cannot be given what it had: it makes that anew.

    Raises:
        MarkingError: such a function makes something else now.
    """
    before = [(each, cached_entries(each)) for each in cached_functions(model.named_modules())]
    lost = list[str]()
    try:
        yield
    finally:
        for cached, entries in before:
            if not _put_back(cached, entries):
                lost.append(cached.__qualname__)
    if lost:
        raise MarkingError(
            f"{lost[0]} keeps what it has made (functools.lru_cache), which a capture of the forward for other inputs,"
            " or for evaluations, drops, and now makes something else, as of weights that have been trained since",
            hint="functools.cache in its place keeps all, and is put back; or keep it in an attribute of its module, or"
            " a buffer",
        )


def _put_back(cached: Cached, entries: Sequence[tuple[Any, Any]]) -> bool:
    """Have a cached function keep these alone; False: it makes something else now."""
    now = cached_entries(cached)
    if len(now) == len(entries) and all(one is other for (_, one), (_, other) in zip(now, entries, strict=True)):
        return True
    cached.cache_clear()
    real = [(key, value) for key, value in entries if not any(map(_lacks_values, _tensors_in(value)))]
    if (table := cache_table(cached)) is not None:
        table.update(real)
        return True
    with kept_python(), torch.random.fork_rng(devices=[]):
        return all(_makes_again(cached, key, value) for key, value in real)


def _makes_again(cached: Cached, key: Any, value: Any) -> bool:
    args, kwargs = called_with(cached, key)
    try:
        with torch.set_grad_enabled(any(each.requires_grad for each in _tensors_in(value))):
            made = cached(*args, **kwargs)
    except Exception:  # noqa: BLE001 - whatever the user's code raises when it is called now
        return False
    one, other = ([each for _, each in reach({"": start}, plain=True)] for start in (made, value))
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor):
        is_alike = (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        return is_alike and bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN
    return repr(one) == repr(other) if isinstance(one, (*ATOMS, np.ndarray)) else True


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    return (each for _, each in reach({"": value}) if isinstance(each, torch.Tensor))


def _lacks_values(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or is_meta(tensor)


def kept_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The tensors that cached functions keep for calls that there may be again, each with the function's name.

    What one has made of a tensor that is neither parameter nor buffer is found by nobody who comes with another one.
    """
    own = {id(each) for each in itertools.chain(model.parameters(), model.buffers())}
    return [
        (cached.__qualname__, tensor)
        for cached in cached_functions(model.named_modules())
        for key, value in cached_entries(cached)
        if own.issuperset(
            id(each) for each in pytree.tree_leaves(called_with(cached, key)) if isinstance(each, torch.Tensor)
        )
        for tensor in _tensors_in(value)
    ]
