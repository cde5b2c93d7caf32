"""What a model keeps in Python beside its tensors: numbers, lists and objects on its modules and in their files.

A capture runs every forward once, on fake tensors. What that leaves in Python state would be in the pipeline's modules
from the start, so it is taken back; and what the forward itself changes there between two calls cannot be in a graph.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from assigner.model.deferred.memento import put_slots, slots_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, torch.Generator)
_HOOKS = frozenset(
    name for name in vars(nn.Module()) if name not in ("training", "_parameters", "_buffers")
)  # what torch itself keeps on a module, its children among it
_LIBRARIES = ("torch", "transformers")
_MOST_ITEMS = 10_000
_DEEPEST = 6


@dataclass(frozen=True)
class StateChange:
    """An entry that differs from what it was.

    Args:
        name: Where it stands, for people.
        before: What was there; ABSENT: nothing.
        now: What is there; ABSENT: nothing. Of a list, set or array: the whole of it.
    """

    name: str
    before: Any
    now: Any


@dataclass
class Holder:
    """A mutable Python object, and what was in it.

    Args:
        where: Its name for people.
        held: The object: a dict, list, set, deque or array.
        before: A shallow copy.
    """

    where: str
    held: Any
    before: Any
    is_beyond: ClassVar[bool] = False  # of a recompute, which sees what modules and their classes keep

    def changes(self) -> Iterator[StateChange]:
        """The entries that differ from what they were."""
        if isinstance(self.held, np.ndarray):
            if not np.array_equal(self.held, self.before):
                yield StateChange(self.where, self.before, self.held)
        elif len(self.held) != len(self.before) or not all(map(same, self.held, self.before)):
            yield StateChange(self.where, self.before, self.held)

    def restore(self) -> None:
        """Put back what was in it."""
        if not any(True for _ in self.changes()):
            return
        if isinstance(self.held, np.ndarray):
            self.held[...] = self.before
        elif isinstance(self.held, list):
            self.held[:] = self.before
        else:
            self.held.clear()
            (self.held.extend if isinstance(self.held, deque) else self.held.update)(self.before)


ABSENT = object()


def same(one: Any, other: Any) -> bool:
    """Two entries are one object, or equal plain values of one type."""
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, _ATOMS) and (one == other or (one != one and other != other))  # noqa: PLR0124 - NaN


@dataclass
class PythonState:
    """What some modules keep in Python, as it was when this was made.

    Args:
        holders: By the id of the object.
    """

    holders: dict[int, Holder] = field(default_factory=dict)

    @classmethod
    def of(cls, named: Iterable[tuple[str, nn.Module]], *, with_files: bool = False) -> PythonState:
        """Take down the state of these modules; their submodules are not followed.

        Args:
            named: Modules by name.
            with_files: Also what stands at the top of the files that they are written in.
        """
        state, modules = cls(), list(named)
        for name, module in modules:
            state._add_entries(name or type(module).__name__, module.__dict__, depth=0, skipped=_HOOKS)
        if with_files:
            for name in files_of(module for _, module in modules):
                state._add_file(name, vars(sys.modules[name]))
            for kind in dict.fromkeys(type(module) for _, module in modules):
                state._add_class(kind)
        return state

    @classmethod
    def of_code(cls, named: Iterable[tuple[str, nn.Module]]) -> PythonState:
        """What the forwards of these modules can read in Python: their attributes, and the names that their code uses.

        Args:
            named: Modules by name.
        """
        modules = list(named)
        state = cls.of(modules)
        for kind in dict.fromkeys(type(module) for _, module in modules):
            for name, cell in _cells(kind):
                state._add(name, _content(cell), depth=2)
                state.holders[id(cell)] = _CellHolder(name, cell, _content(cell))
            for entries, names in _globals_of(kind):
                kept = (*_ATOMS, list, dict, set, deque)
                chosen = {key: entries[key] for key in names if isinstance(entries[key], kept)}
                state.holders[id(entries)] = _FileHolder(str(entries.get("__name__", "")), entries, chosen)
                for key in names:
                    state._add(key, entries[key], depth=1)
        return state

    def _add_class(self, kind: type) -> None:
        """What the methods of a class close over, and what it keeps for all of its objects."""
        for name, cell in _cells(kind):
            self._add(name, _content(cell), depth=2)
            self.holders[id(cell)] = _CellHolder(name, cell, _content(cell))
        for each in _users_classes(kind):
            chosen = {
                key: value
                for key, value in vars(each).items()
                if isinstance(value, (*_ATOMS, list, dict, set, deque)) and not key.startswith("__")
            }
            if chosen and id(each) not in self.holders:
                self.holders[id(each)] = _ClassHolder(each.__name__, each, chosen)
                for key, value in chosen.items():
                    self._add(f"{each.__name__}.{key}", value, depth=1)

    def _add_file(self, name: str, entries: dict[str, Any]) -> None:
        chosen = {
            key: value
            for key, value in entries.items()
            if not key.startswith("__") and isinstance(value, (*_ATOMS, list, dict, set, deque))
        }
        for key, value in entries.items():
            if type(value).__module__ in (name, "types", "argparse") and not isinstance(value, nn.Module):
                self._add(f"{name.rpartition('.')[2]}.{key}", value, depth=1)
        if chosen:
            holder = _FileHolder(name.rpartition(".")[2], entries, chosen)
            self.holders[id(entries)] = holder
            for key, value in chosen.items():
                self._add(f"{holder.where}.{key}", value, depth=1)

    def _add_entries(self, where: str, entries: dict[Any, Any], *, depth: int, skipped: frozenset[str]) -> None:
        if id(entries) in self.holders:
            return
        self.holders[id(entries)] = _PartHolder(where, entries, dict(entries), skipped)
        for key, value in list(entries.items()):
            if key not in skipped:
                self._add(f"{where}.{key}", value, depth=depth + 1)

    def _add(self, where: str, value: Any, *, depth: int) -> None:
        if isinstance(value, (*_ATOMS, *_OPAQUE, torch.Tensor, nn.Module)) or depth > _DEEPEST:
            return
        if id(value) in self.holders:
            return
        if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
            self._add_entries(where, value, depth=depth, skipped=frozenset())
        elif isinstance(value, list | set | deque) and len(value) <= _MOST_ITEMS:
            self.holders[id(value)] = Holder(where, value, value.copy())
            for each in value:
                self._add(where, each, depth=depth + 1)
        elif isinstance(value, tuple) and len(value) <= _MOST_ITEMS:
            for each in value:
                self._add(where, each, depth=depth + 1)
        elif isinstance(value, np.ndarray):
            self.holders[id(value)] = Holder(where, value, value.copy())
        elif isinstance(value, itertools.count | types.GeneratorType):
            self.holders[id(value)] = _IteratorHolder(where, value, _progress(value))
        elif type(value).__module__.split(".")[0] != "torch":
            self._add_object(where, value, depth=depth)

    def _add_object(self, where: str, value: Any, *, depth: int) -> None:
        space = getattr(value, "__dict__", None)
        if type(space) is dict:  # `dict[str, int]` at the top of a file answers with that of the class `dict`
            self._add_entries(where, space, depth=depth, skipped=frozenset())
        if (slots := slots_of(value)) and type(value).__module__ not in sys.stdlib_module_names:
            self.holders.setdefault(id(value), _SlotsHolder(where, value, slots))
            for key, each in slots.items():
                self._add(f"{where}.{key}", each, depth=depth + 1)

    def changes(self) -> dict[int, list[StateChange]]:
        """What differs now, by the id of the object that has the entries."""
        found = {number: list(holder.changes()) for number, holder in self.holders.items()}
        return {number: changes for number, changes in found.items() if changes}

    def restore(self) -> None:
        """Put everything back as it was."""
        for holder in self.holders.values():
            holder.restore()


class _PartHolder(Holder):
    """A dict of which some entries do not count."""

    def __init__(self, where: str, held: dict[Any, Any], before: dict[Any, Any], skipped: frozenset[str]) -> None:
        super().__init__(where, held, {key: value for key, value in before.items() if key not in skipped})
        self._skipped = skipped

    def changes(self) -> Iterator[StateChange]:
        for key in {**self.before, **self.held}:
            before, now = self.before.get(key, ABSENT), self.held.get(key, ABSENT)
            if key not in self._skipped and not same(before, now):
                yield StateChange(
                    f"{self.where}.{key}" if isinstance(key, str) else f"{self.where}[{key!r}]", before, now
                )

    def restore(self) -> None:
        for key in [key for key in self.held if key not in self.before and key not in self._skipped]:
            del self.held[key]
        self.held.update({key: value for key, value in self.before.items() if self.held.get(key, ABSENT) is not value})


def _globals_of(kind: type) -> list[tuple[dict[str, Any], set[str]]]:
    """The names at the top of files that the methods of a class use, also through functions that they name."""
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    waiting = [
        inspect.unwrap(getattr(value, "__func__", value))
        for each in _users_classes(kind)
        for value in vars(each).values()
        if callable(value) or isinstance(value, staticmethod | classmethod)
    ]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if (function.__module__ or "").split(".")[0] in (*_LIBRARIES, "assigner"):
            continue
        entries, names = found.setdefault(id(function.__globals__), (function.__globals__, set()))
        used = {name for name in _names_in(function.__code__) if name in entries}
        waiting += [inspect.unwrap(entries[name]) for name in used if callable(entries[name])]
        names |= {name for name in used if not callable(entries[name])}
    return list(found.values())


def _names_in(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class _CellHolder(Holder):
    """A variable of an enclosing function."""

    def changes(self) -> Iterator[StateChange]:
        if not same(self.before, now := _content(self.held)):
            yield StateChange(self.where, self.before, now)

    def restore(self) -> None:
        if self.before is not ABSENT:
            self.held.cell_contents = self.before


class _SlotsHolder(Holder):
    """An object with places for its attributes (`__slots__`)."""

    def changes(self) -> Iterator[StateChange]:
        found = slots_of(self.held)
        for key in {**self.before, **found}:
            before, now = self.before.get(key, ABSENT), found.get(key, ABSENT)
            if not same(before, now):
                yield StateChange(f"{self.where}.{key}", before, now)

    def restore(self) -> None:
        put_slots(self.held, self.before)


def _progress(iterator: Any) -> Any:
    """How far an iterator has come."""
    if isinstance(iterator, types.GeneratorType):
        return iterator.gi_frame.f_lasti if iterator.gi_frame is not None else None
    return repr(iterator)


class _IteratorHolder(Holder):
    """An iterator, which nobody can put back: that it has moved can be told."""

    is_beyond = True

    def changes(self) -> Iterator[StateChange]:
        if _progress(self.held) != self.before:
            yield StateChange(self.where, self.before, _progress(self.held))

    def restore(self) -> None:
        """Nothing can be done."""


class _ClassHolder(Holder):
    """What a class keeps for all of its objects."""

    def changes(self) -> Iterator[StateChange]:
        for key, value in self.before.items():
            if not same(value, now := vars(self.held).get(key, ABSENT)):
                yield StateChange(f"{self.where}.{key}", value, now)

    def restore(self) -> None:
        for change in list(self.changes()):
            setattr(self.held, change.name.rpartition(".")[2], change.before)


class _FileHolder(Holder):
    """What stands at the top of a file: only what was a plain value or a container there."""

    is_beyond = True

    def __init__(self, where: str, entries: dict[str, Any], chosen: dict[str, Any]) -> None:
        super().__init__(where, entries, chosen)

    def changes(self) -> Iterator[StateChange]:
        for key, value in self.before.items():
            if not same(value, self.held.get(key, ABSENT)):
                yield StateChange(f"{self.where}.{key}", value, self.held.get(key, ABSENT))

    def restore(self) -> None:
        self.held.update({key: value for key, value in self.before.items() if self.held.get(key, ABSENT) is not value})


def files_of(modules: Iterable[nn.Module]) -> list[str]:
    """The Python modules that the classes of these modules are written in; none of torch's and transformers'."""
    names = dict.fromkeys(type(module).__module__ for module in modules)
    return [name for name in names if name.split(".")[0] not in _LIBRARIES and name in sys.modules]


def clear_caches(modules: Iterable[nn.Module]) -> None:
    """Empty what functools.cache keeps in the files of these modules: fake tensors must neither stay there nor come."""
    listed = list(modules)
    kinds = dict.fromkeys(type(module) for module in listed)
    values = [value for name in files_of(listed) for value in vars(sys.modules[name]).values()]
    values += [value for kind in kinds for each in _users_classes(kind) for value in vars(each).values()]
    values += [_content(cell) for kind in kinds for _, cell in _cells(kind)]
    for value in values:
        inner = getattr(value, "__func__", value)
        if isinstance(inner, functools._lru_cache_wrapper):
            inner.cache_clear()


def _users_classes(kind: type) -> list[type]:
    return [each for each in kind.__mro__ if each.__module__.split(".")[0] not in (*_LIBRARIES, "builtins")]


def _cells(kind: type) -> Iterator[tuple[str, types.CellType]]:
    """The variables of enclosing functions that the methods of a class use."""
    for each in _users_classes(kind):
        for value in list(vars(each).values()):
            inner = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
            if isinstance(inner, types.FunctionType) and not inner.__module__.startswith("assigner."):
                yield from zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
