"""What a model holds that was there before it: a config that the training script goes on changing, a table of settings.

The pipeline's modules are copies of the builder's, and so is what the builder has made for them. What the script, or a
file of the user's, holds too must stay the object that it is: `config.temperature *= 0.9` in the loop, on every rank,
then reaches all partitions, as in a plain run.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assigner.model.deferred.contents import ATOMS
from assigner.model.deferred.reach import is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LEAVES = (*ATOMS, type, torch.Tensor, types.ModuleType, nn.Module)
_DEEPEST, _MOST_ITEMS = 5, 10_000


def objects_from_outside(builder: Callable[[], nn.Module], model: nn.Module) -> dict[int, Any]:
    """Objects that the model holds and that are reached without it: by id, themselves.

    Args:
        builder: Has made the model; what it closes over, and its file's names, are the outside.
        model: Its modules' classes tell of further files.
    """
    outside, held = _Reach(), _Reach()
    outside.follow(builder)
    for name in dict.fromkeys(type(module).__module__ for module in model.modules()):
        if is_users(name) and name in sys.modules:
            for value in outside.names_of(vars(sys.modules[name])):
                outside.follow(value)
    for module in model.modules():
        for value in module.__dict__.values():
            held.follow(value)
    return {number: value for number, value in held.found.items() if number in outside.found and not callable(value)}


class _Reach:
    """What is reached from some objects, by id; modules are not followed: what only they hold is the model's own."""

    def __init__(self) -> None:
        self.found: dict[int, Any] = {}
        self._files: set[int] = set()
        self._is_leaf: dict[type, bool] = {}

    def follow(self, value: Any, depth: int = _DEEPEST) -> None:
        """Note an object and what it holds."""
        kind = type(value)
        if kind not in self._is_leaf:
            self._is_leaf[kind] = issubclass(kind, _LEAVES)
        if self._is_leaf[kind] or id(value) in self.found:
            return
        self.found[id(value)] = value
        if depth:
            for part in self._parts(value):
                self.follow(part, depth - 1)

    def names_of(self, file: dict[str, Any]) -> list[Any]:
        """What stands at the top of a file, the first time: each of its functions can name all of it."""
        if id(file) in self._files:
            return []
        self._files.add(id(file))
        return list(file.values())

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, dict | list | tuple | set):
            if len(value) <= _MOST_ITEMS:
                yield from value.values() if isinstance(value, dict) else value
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, types.FunctionType):
            if is_users(value.__module__):
                yield from self._surroundings(value)
        elif is_users(type(value).__module__):
            yield from getattr(value, "__dict__", {}).values()

    def _surroundings(self, function: types.FunctionType) -> Iterator[Any]:
        """What a function can name: its closure, its defaults and the top of its file."""
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue  # a name that has no value yet
        yield from (function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).values()
        yield from self.names_of(function.__globals__)
