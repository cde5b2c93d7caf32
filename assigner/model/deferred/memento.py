"""The Python values of some modules as they are at one time: counters, lists that grow, numbers that forward sets.

Values are kept by what Python can change of them: the attributes of modules and of the user's own objects, the items of
containers, the state of random generators. All else (tensors, functions, torch's and Python's own objects) is kept as
the object that it is.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import random
import sys
import types
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MOST_ITEMS = 10_000  # of a larger container the items are kept as the objects that they are
STANDARD = frozenset(nn.Module().__dict__) - {"training"}

_PLAIN: set[type] = {nn.Module}


class Memento:
    """What modules hold now.

    Args:
        modules: Each once.
        others: Functions and objects that run with them, as a loss.

    Attributes:
        tensors: That were met, but for parameters.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[Any] = ()) -> None:
        modules = list(modules)
        self.tensors: list[torch.Tensor] = []
        self._known: dict[int, Any] = {}  # what was met, and stays alive while its id stands for it
        self._kept: list[tuple[_Keeper, Any, Any]] = []  # how, what, and what was in it
        for module in modules:
            self._keep(_SPACE, module.__dict__)
            for value in _values(module):
                self._meet(value)
            if module._buffers:
                self._meet(module._buffers)
        for kind in self._kinds(modules):
            self._keep(_CLASS, kind)
            for value in vars(kind).values():
                if isinstance(value, types.FunctionType):
                    self._meet_function(value)
        for other in others:
            self._meet_function(other)
        self._versions = [each._version for each in self.tensors]

    @staticmethod
    def _kinds(modules: Iterable[nn.Module]) -> list[type]:
        """The user's own classes of some modules."""
        kinds = dict.fromkeys(type(module) for module in modules)
        every = dict.fromkeys(each for kind in kinds for each in kind.__mro__)
        return [each for each in every if each.__module__.partition(".")[0] not in _NOT_LOOKED_INTO]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The values as they were then while the block runs; afterwards those of before the block."""
        now = [(keeper, held, keeper.copy(held)) for keeper, held, _ in self._kept]
        _put(self._kept)
        try:
            yield
        finally:
            _put(now)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Whatever the block changes, the values are as they were then behind it."""
        try:
            yield
        finally:
            _put(self._kept)

    def has_changed(self) -> bool:
        """Something is no more as it was then; tensors by torch's count of the changes to them."""
        if [each._version for each in self.tensors] != self._versions:
            return True
        return any(_differ(keeper.copy(held), values) for keeper, held, values in self._kept)

    def has_changed_beside_tensors(self) -> bool:
        """A number, a text, or an item is not as it was then; tensors in places of others do not count."""
        return any(
            _differ(_without_tensors(keeper.copy(held)), _without_tensors(values))
            for keeper, held, values in self._kept
        )

    def _keep(self, keeper: _Keeper, held: Any) -> None:
        self._kept.append((keeper, held, keeper.copy(held)))

    def _meet_function(self, value: Any) -> None:
        """What code that is called can change: its closure's names, the object that it is a method of."""
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._keep(_SPACE, module.__dict__)
                for each in (*_values(module), module._buffers):
                    self._meet(each)
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._meet_function(each)
        elif isinstance(value, types.MethodType):
            self._meet_function(value.__self__)
        elif not isinstance(value, types.FunctionType):
            self._meet(value)
        elif id(value) not in self._known and value.__module__.partition(".")[0] not in _NOT_LOOKED_INTO:
            self._known[id(value)] = value
            for cell in value.__closure__ or ():
                if cell != _EMPTY:
                    self._keep(_CELL, cell)
                    self._meet_function(cell.cell_contents)
            for name in _written_globals(value.__code__):
                self._keep(_GLOBAL, (value.__globals__, name))
                self._meet(value.__globals__.get(name))
            self._meet(value.__defaults__)

    def _meet(self, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS or id(value) in self._known:
            return
        self._known[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif kind is tuple:
            for each in value:
                self._meet(each)
        elif isinstance(value, dict | list | set | deque | bytearray):
            self._keep(_SPACE if isinstance(value, dict) else _SET if isinstance(value, set) else _SEQUENCE, value)
            if len(value) <= _MOST_ITEMS:
                for each in value.values() if isinstance(value, dict) else value:
                    self._meet(each)
        elif (keeper := _keeper(value)) is not None:
            self._keep(keeper, value)
        elif kind.__module__.partition(".")[0] not in _NOT_LOOKED_INTO and not isinstance(value, type | nn.Module):
            self._meet_object(value)
        elif isinstance(value, types.SimpleNamespace):
            self._meet(vars(value))

    def _meet_object(self, value: Any) -> None:
        """One of a user's class."""
        space = getattr(value, "__dict__", None)
        if type(space) is dict:
            self._meet(space)
        if slots := slots_of(value):
            self._keep(_SLOTS, value)
            for each in slots.values():
                self._meet(each)


@functools.cache
def _written_globals(code: types.CodeType) -> tuple[str, ...]:
    """The names of its file that a function's code binds anew (`global`), or one inside it."""
    own = [each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")]
    inner = [_written_globals(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys(itertools.chain(own, *inner)))


def slot_names(kind: type) -> tuple[str, ...]:
    """The attributes that a user's class has places for, without a dictionary."""
    named = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    every = itertools.chain.from_iterable((each,) if isinstance(each, str) else each for each in named)
    return tuple(each for each in every if each not in ("__dict__", "__weakref__"))


def slots_of(held: Any) -> dict[str, Any]:
    """What an object's slots hold; those that hold nothing are left out."""
    return {name: getattr(held, name) for name in slot_names(type(held)) if hasattr(held, name)}


def _differ(now: Any, then: Any) -> bool:
    if isinstance(then, dict):
        return len(now) != len(then) or any(_is_another(now.get(name, now), each) for name, each in then.items())
    if isinstance(then, tuple | list) and isinstance(now, tuple | list):
        return len(now) != len(then) or any(map(_is_another, now, then))
    if isinstance(then, torch.Tensor | set):
        return not torch.equal(now, then) if isinstance(then, torch.Tensor) else now != then
    return now is not then and repr(now) != repr(then)


def _without_tensors(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: None if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    if isinstance(values, tuple | list):
        return [None if isinstance(value, torch.Tensor) else value for value in values]
    return values


def _is_another(now: Any, then: Any) -> bool:
    """An item is no more the object that it was; numbers, and what consists of them, are told by their values."""
    if now is then:
        return False
    is_plain = type(then) in ATOMS or (isinstance(then, tuple) and all(type(each) in ATOMS for each in then))
    return not is_plain or repr(now) != repr(then)


def _values(module: nn.Module) -> list[Any]:
    """The attributes of a module that are more than a number; torch's own modules have none but by a hook."""
    if type(module) in _PLAIN and not module._forward_pre_hooks and not module._forward_hooks:
        return []
    if type(module).__module__.startswith("torch.nn.modules."):
        _PLAIN.add(type(module))
    return [value for name, value in module.__dict__.items() if type(value) not in ATOMS and name not in STANDARD]


def let_go(modules: Iterable[nn.Module]) -> None:
    """Have no tensor that forward has set as an attribute hold a graph, and with it the memory of what led to it."""
    for module in modules:
        for value in _values(module):
            if isinstance(value, list):
                value[:] = map(_without_graph, value)
            elif isinstance(value, dict):
                value.update({key: _without_graph(each) for key, each in value.items()})
            elif isinstance(value, torch.Tensor) and value.grad_fn is not None:
                space = module.__dict__
                space.update({name: value.detach() for name, each in space.items() if each is value})


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.grad_fn is not None else value


def _put(kept: Iterable[tuple[_Keeper, Any, Any]]) -> None:
    for keeper, held, values in kept:
        keeper.put(held, values)


class _Keeper(NamedTuple):
    """How the contents of an object are copied, and put back into it."""

    copy: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


def _keeper(value: Any) -> _Keeper | None:
    """Of a generator or an array, which have their contents in C."""
    if isinstance(value, itertools.count):
        return _Keeper(repr, lambda *_: None)  # nobody can put it back; that it has moved can be told
    if isinstance(value, random.Random):
        return _Keeper(random.Random.getstate, random.Random.setstate)
    if isinstance(value, torch.Generator):
        return _Keeper(torch.Generator.get_state, torch.Generator.set_state)
    if type(value).__module__.partition(".")[0] != "numpy":
        return None
    return _OF_NUMPY.get(type(value).__name__)


def state_of(value: Any) -> Any:
    """The contents of a generator or an array; None: it is neither."""
    keeper = _keeper(value)
    return None if keeper is None else keeper.copy(value)


def _put_space(space: dict[Any, Any], values: dict[Any, Any]) -> None:
    if len(space) != len(values) or any(space.get(name, space) is not value for name, value in values.items()):
        space.clear()
        space.update(values)


def _put_global(held: tuple[dict[str, Any], str], values: list[Any]) -> None:
    space, name = held
    if values[0] is not _ABSENT:
        space[name] = values[0]
    else:
        space.pop(name, None)


def put_slots(held: Any, values: dict[str, Any]) -> None:
    """Have an object's slots hold what `slots_of` gave."""
    for name in slot_names(type(held)):
        if name in values:
            object.__setattr__(held, name, values[name])
        elif hasattr(held, name):
            object.__delattr__(held, name)


def _put_sequence(sequence: Any, values: Any) -> None:
    sequence.clear()
    sequence.extend(values)


def _put_set(held: set[Any], values: set[Any]) -> None:
    held.clear()
    held.update(values)


_EMPTY = types.CellType()
_CELL = _Keeper(lambda cell: cell.cell_contents, lambda cell, value: setattr(cell, "cell_contents", value))


def _plain_of_class(kind: type) -> dict[str, Any]:
    """What a class keeps for all of its objects: not its methods."""
    return {name: value for name, value in vars(kind).items() if type(value) in ATOMS and not name.startswith("__")}


def _put_class(kind: type, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


_CLASS = _Keeper(_plain_of_class, _put_class)
_SPACE = _Keeper(dict, _put_space)
_ABSENT = object()
_GLOBAL = _Keeper(lambda held: [held[0].get(held[1], _ABSENT)], _put_global)
_SLOTS = _Keeper(slots_of, put_slots)
_SET = _Keeper(set, _put_set)
_SEQUENCE = _Keeper(tuple, _put_sequence)
_OF_NUMPY = {
    "ndarray": _Keeper(lambda array: array.copy(), lambda array, values: array.__setitem__(..., values)),
    "RandomState": _Keeper(lambda each: each.get_state(), lambda each, state: each.set_state(state)),
    "Generator": _Keeper(
        lambda each: each.bit_generator.state, lambda each, state: setattr(each.bit_generator, "state", state)
    ),
}
_NOT_LOOKED_INTO = sys.stdlib_module_names | {"torch", "assigner"}
