"""The functions of a model that keep what they have made: `functools.cache` and `lru_cache`.

No module holds what they have made for their callers, and Python takes no object out of a cache again, but all of them.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch

from assigner.model.deferred.contents import cached_values
from assigner.model.deferred.reach import files_of, kept_objects, reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
    met = reach({str(n): each for n, each in enumerate(objects)})
    return any(isinstance(each, torch.Tensor) for _, each in met)
