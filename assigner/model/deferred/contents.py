"""Objects whose contents lie in C, where Python's attributes do not show them: generators, arrays, iterators, caches.

How each of them is copied and put back stands here once: what walks over objects knows them by it, too.
"""

from __future__ import annotations

import array
import ctypes
import gc
import io
import itertools
import pickle
import random
import types
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    import functools
    from collections.abc import Callable, Iterable, Mapping

ATOMS: frozenset[type] = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""Numbers and texts: what is told by its value, and does not change."""


class Keeper(NamedTuple):
    """How the contents of an object are copied, and put back into it."""

    copy: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


def keeper_of(kind: type, keepers: Mapping[type, Keeper]) -> Keeper | None:
    """That of the first of a type's bases which has one; None: none has."""
    return next((keepers[each] for each in kind.__mro__ if each in keepers), None)


def memory_of(value: Any) -> Any:
    """The array whose memory another one is a view of; any other object: itself."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return value


def cached_values(cached: functools._lru_cache_wrapper[Any]) -> list[Any]:
    """What a cached function has for its callers."""
    return [value for _, value in cached_entries(cached)]


def cached_entries(cached: functools._lru_cache_wrapper[Any]) -> list[tuple[Any, Any]]:
    """Likewise, each with what it was called with (see `called_with`); where it drops some, what is dropped next first.

    No other way leads there than what it refers to: one dict, where nothing is dropped, else a chain of what it has.
    """
    if not cached.cache_info().currsize:
        return []
    if (table := cache_table(cached)) is not None:
        return [*table.items()]
    held = gc.get_referents(cached)
    links = "_lru_list_elem"  # by which it knows what was asked for last
    tables = [each for each in held if type(each) is dict and links in (type(x).__name__ for x in each.values())]
    keys, found, steps = {id(key) for each in tables for key in each}, list[tuple[Any, Any]](), iter(held)
    for each in steps:
        if id(each) in keys:
            found.append((each, next(steps)))
    return found


def cache_table(cached: functools._lru_cache_wrapper[Any]) -> dict[Any, Any] | None:
    """The dict in which a cached function looks for what it has; None: it drops some, and looks elsewhere, too."""
    if cached.cache_parameters()["maxsize"] is not None:
        return None
    return next(each for each in gc.get_referents(cached) if type(each) is dict and each is not cached.__dict__)


def called_with(cached: functools._lru_cache_wrapper[Any], key: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the call that a cached function has something for: by place, and by name.

    They are one tuple, with an object that nobody else has before those by name, and the types of all behind them if
    the function tells calls by these, too; one number or text is itself.
    """
    if type(key) is not tuple:
        return (key,), {}
    marks = [n for n, each in enumerate(key) if type(each) is object]
    typed = cached.cache_parameters()["typed"]
    if not marks:
        return key[: len(key) // 2] if typed else key, {}
    place = marks[0]
    count = (len(key) - 2 * place - 1) // 3 if typed else (len(key) - place - 1) // 2
    named = key[place + 1 : place + 1 + 2 * count]
    return key[:place], dict(zip(named[::2], named[1::2], strict=True))


def filling_of(cell: types.CellType) -> list[Any]:
    """What a function closes over by one name; nothing where that has no value yet."""
    return [] if cell == types.CellType() else [cell.cell_contents]


def _copy_generator(generator: torch.Generator) -> np.ndarray[Any, Any]:
    with _disable_current_modes():  # while a forward is captured, tensors have no values
        found: np.ndarray[Any, Any] = generator.get_state().numpy()
    return found


def _put_generator(generator: torch.Generator, state: np.ndarray[Any, Any]) -> None:
    with _disable_current_modes():
        generator.set_state(torch.from_numpy(state))


def _put_array(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    if array.flags.writeable:
        array[...] = values
    elif array.tobytes() != values.tobytes():  # a forward that has let itself write to it, and nobody else since
        array.setflags(write=True)
        array[...] = values
        array.setflags(write=False)


def _copy_stream(stream: Any) -> Any:
    return None if stream.closed else stream.__getstate__()


def _put_stream(stream: Any, state: Any) -> None:
    if state is not None and not stream.closed:
        stream.__setstate__(state)


_ARRAY = Keeper(
    lambda each: each.tolist(), lambda each, held: each.__setitem__(slice(None), array.array(each.typecode, held))
)
_STREAM = Keeper(_copy_stream, _put_stream)
_MEMORY = Keeper(bytes, lambda held, values: ctypes.memmove(ctypes.addressof(held), values, len(values)))


def _progress(frame: types.FrameType | None) -> str:
    """How far a generator has come, and what numbers and texts it has."""
    if frame is None:
        return "done"
    return repr((frame.f_lasti, {name: each for name, each in frame.f_locals.items() if type(each) in ATOMS}))


def _position(iterator: Any) -> Any:
    """How far an iterator of Python's own has come; where it does not say so, unlike any other position."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 to 3.13, of itertools
            return pickle.dumps(iterator)  # never read
    except Exception:  # noqa: BLE001 - whatever the objects that it goes over raise
        return object()


_ITERABLES: tuple[Iterable[Any], ...] = ([], (), {}, {}.values(), {}.items(), set(), "", b"", range(1))
_OF_PYTHON: set[type] = {type(iter(each)) for each in _ITERABLES} | {enumerate, filter, map, reversed, zip}
_OF_ITERTOOLS: set[type] = {each for each in vars(itertools).values() if isinstance(each, type)}
ITERATORS = (types.GeneratorType, *_OF_PYTHON, *_OF_ITERTOOLS)
"""What nobody can put back; that it has moved can be told."""

CONTENTS: dict[type, Keeper] = {
    **dict.fromkeys(ITERATORS, Keeper(_position, lambda *_: None)),
    itertools.count: Keeper(repr, lambda *_: None),
    types.GeneratorType: Keeper(lambda each: _progress(each.gi_frame), lambda *_: None),
    random.Random: Keeper(random.Random.getstate, random.Random.setstate),
    torch.Generator: Keeper(_copy_generator, _put_generator),
    array.array: _ARRAY,
    **dict.fromkeys((io.StringIO, io.BytesIO), _STREAM),
    **dict.fromkeys((ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array), _MEMORY),
    np.ndarray: Keeper(lambda array: array.copy(), _put_array),
    np.random.RandomState: Keeper(
        lambda each: types.SimpleNamespace(state=each.get_state()), lambda each, held: each.set_state(held.state)
    ),
    np.random.Generator: Keeper(
        lambda each: types.SimpleNamespace(state=each.bit_generator.state),
        lambda each, held: setattr(each.bit_generator, "state", held.state),
    ),
}
"""By type."""
IN_C = tuple(CONTENTS)
"""Those types, for `isinstance`."""
