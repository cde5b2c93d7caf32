"""What a model holds that was there before it: a config that the training script goes on changing, a table of settings.

The pipeline's modules are copies of the builder's, and so is what the builder has made for them. What the script, or a
file of the user's, holds too must stay the object that it is: `config.temperature *= 0.9` in the loop, on every rank,
then reaches all partitions, as in a plain run.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from assigner.model.deferred.contents import ATOMS, filling_of
from assigner.model.deferred.ownership import OPEN, STANDARD, home_of, is_open, is_own, is_users, slot_names
from assigner.model.deferred.reach import MOST_ITEMS, kept_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_LEAVES = (*ATOMS, torch.Tensor)
_CONTAINERS = (dict, list, tuple, set, deque, weakref.WeakSet)
_ONLY_LEAD = (tuple, types.MethodType, functools.partial)
_DEEPEST = 8
_OF_IMPORTS = frozenset({"__builtins__", "__loader__", "__spec__"})  # pytest's loader leads to all of a session's tests


def objects_outside(builder: Callable[[], nn.Module], model: nn.Module) -> dict[int, Any]:
    """The objects that a model holds and that are reached without it, or that a function has, by id.

    Outside is what its builder closes over, and the files of that and of the modules' classes.
    """
    kinds = dict.fromkeys(type(module) for module in model.modules())
    files = dict.fromkeys(kind.__module__ for kind in kinds if is_users(kind.__module__))
    names = [_named(vars(sys.modules[name])) for name in files if name in sys.modules]
    outside = _reached([builder, *kinds, *names])
    held = _reached(value for module in model.modules() for value in module.__dict__.values())
    shared = {number: each for number, each in held.items() if number in outside and not callable(each)}
    return shared | {id(each): each for each in _held_by_functions(model)}


def _held_by_functions(model: nn.Module) -> list[Any]:
    """The containers and objects of a model's modules that a function has, too, which runs or is made.

    `meter = Meter(); model = Net(meter)` in a function: nobody can look where its names are, but Python counts the
    references to an object, and those that lie elsewhere can be counted, too. What leads to modules or tensors is the
    model's own.
    """
    inside = Counter[int]()
    kept: list[Any] = [object()]  # to which nobody else refers
    for part in _parts_within([*model.modules()]):
        inside[id(part)] += 1
        if inside[id(part)] == 1 and _is_holder(part) and not isinstance(part, nn.Module):
            kept.append(part)
    del part
    references = {id(each): count for each, count in zip(kept, [sys.getrefcount(each) for each in kept], strict=True)}
    usual = references[id(kept[0])]
    standard = {id(vars(module)[name]) for module in model.modules() for name in STANDARD}
    others = [
        each
        for each in kept
        if references[id(each)] - inside[id(each)] > usual and id(each) not in standard
        if not isinstance(each, _ONLY_LEAD) and not _leads_to_models(each)
    ]
    elsewhere = Counter[int]()
    for holder in gc.get_referrers(*others) if others else ():
        if holder is not kept and holder is not others and not isinstance(holder, types.FrameType | types.CellType):
            elsewhere.update(map(id, gc.get_referents(holder)))
    return [each for each in others if references[id(each)] - elsewhere[id(each)] > usual]


def _is_holder(value: Any) -> bool:
    if isinstance(value, (*_CONTAINERS, *_ONLY_LEAD)):
        return True
    kind: Any = type(value)
    return is_open(kind) or bool(slot_names(kind))


def _parts_within(waiting: list[Any]) -> Iterator[Any]:
    """What some objects refer to, and the holders among that in turn: once for each reference."""
    known = {id(each) for each in waiting}
    while waiting:
        for part in gc.get_referents(waiting.pop()):
            if id(part) not in known and _is_holder(part):
                known.add(id(part))
                waiting.append(part)
            yield part


def _leads_to_models(value: Any) -> bool:
    """Also by what a bound method is bound to; functions close over what is theirs."""
    return any(isinstance(part, nn.Module | torch.Tensor) for part in _parts_within([value]))


def _reached(started: Iterable[Any]) -> dict[int, Any]:
    """Some objects and what they hold, what is nearest first, by id; what only modules hold is the model's own."""
    found: dict[int, Any] = {}
    files: set[int] = set()
    waiting = deque((value, _DEEPEST) for value in started)
    while waiting:
        value, depth = waiting.popleft()
        kind: type = type(value)
        if not issubclass(kind, _LEAVES) and id(value) not in found:
            found[id(value)] = value
            if depth and not isinstance(value, nn.Module):
                waiting.extend((part, depth - 1) for part in _parts(value, files))
    return found


def _parts(value: Any, files: set[int]) -> Iterator[Any]:
    """What an object holds; `files`: those whose names were given already, since each function can name them all."""
    if isinstance(value, _CONTAINERS):
        if len(value) <= MOST_ITEMS:
            yield from dict.values(value) if isinstance(value, dict) else value
    elif isinstance(value, np.ndarray):
        yield value.base
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        if is_users(home_of(value)):
            yield from _surroundings(value, files)
    elif isinstance(value, types.ModuleType | type):
        name = value.__module__ if isinstance(value, type) else value.__name__
        if is_own(name):
            yield from _named(dict(vars(value)))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from kept_objects(value)
    elif is_users(type(value).__module__) or isinstance(value, OPEN):
        yield from getattr(value, "__dict__", {}).values()


def _surroundings(function: types.FunctionType, files: set[int]) -> Iterator[Any]:
    """What a function can name: its closure, its defaults and the top of its file."""
    for cell in function.__closure__ or ():
        yield from filling_of(cell)
    yield from (function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).values()
    if id(function.__globals__) not in files:
        files.add(id(function.__globals__))
        yield from _named(function.__globals__)


def _named(names: dict[str, Any]) -> list[Any]:
    return [value for name, value in list(names.items()) if name not in _OF_IMPORTS]
