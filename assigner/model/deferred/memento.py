"""The Python values of some modules as they are at one time: counters, lists that grow, numbers that forward sets.

Values are kept by what Python can change of them: the attributes of modules and of the user's own objects, the items of
containers, the names that functions close over, the state of random generators. All else (tensors, torch's and Python's
own objects) is kept as the object that it is. One walk meets all that can be reached, each object once:

    module -> attributes, buffers, hooks        function -> closure, written globals, defaults, attributes
    object -> attributes, slots, its class      container -> items; of a class of the user's, as an object too
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import functools
import itertools
import operator
import random
import sys
import types
from collections import Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MOST_ITEMS = 10_000  # of a larger container the items are kept as the objects that they are
STANDARD = frozenset(nn.Module().__dict__) - {"training"}
_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKS = (*_FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
_BARE = frozenset((dict, list, set, deque, bytearray, tuple, frozenset, defaultdict, OrderedDict, Counter))
OPEN = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, UserString)  # of Python's own
_INSTALLED = ("site-packages", "dist-packages")

_PLAIN: dict[type, int] = {nn.Module: len(nn.Module().__dict__)}  # torch's own, and how many attributes they have


class Memento:
    """What modules hold now.

    Args:
        modules: Each once; their submodules are not followed.
        others: Functions and objects that run with them, as a loss. The names of its file that such a function reads
            are followed too.
        beside: Modules that are not looked into where they are met.
        backwards: False: what only hooks on backwards can reach is not met. No forward reads it.
        parameters: True: those of modules that are met are among the tensors.

    Attributes:
        tensors: That were met, but for those made in inference mode, of which torch counts no changes.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        others: Iterable[Any] = (),
        *,
        beside: Iterable[nn.Module] = (),
        backwards: bool = True,
        parameters: bool = False,
    ) -> None:
        modules = list(modules)
        self.tensors: list[torch.Tensor] = []
        self._hooks, self._parameters = HOOKS if backwards else _FORWARD_HOOKS, parameters
        # what was met, and stays alive while its id stands for it
        self._known: dict[int, Any] = {id(each): each for each in itertools.chain(modules, beside)}
        self._kept: list[tuple[_Keeper, Any, Any]] = []  # how, what, and what was in it
        self._waiting: list[Any] = []
        for module in modules:
            self._keep_module(module)
        for each in dict.fromkeys(map(type, modules)):
            self._keep_classes(each, reads=False)  # a capture looks at what they read in their files
        self._waiting += others
        while self._waiting:
            value = self._waiting.pop()
            kind: type = type(value)
            manner = _manner(kind)
            if manner is not None and id(value) not in self._known:
                self._known[id(value)] = value
                manner(self, value)
        self._versions = [each._version for each in self.tensors]

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

    def has_changed_beside_plain(self) -> bool:
        """As `has_changed`, but numbers and texts do not count, as attributes and as items."""
        if [each._version for each in self.tensors] != self._versions:
            return True
        return any(
            _differ(_without_atoms(keeper.copy(held)), _without_atoms(values)) for keeper, held, values in self._kept
        )

    def _keep(self, keeper: _Keeper, held: Any) -> None:
        self._kept.append((keeper, held, keeper.copy(held)))

    def _keep_module(self, module: nn.Module) -> None:
        """A module without its submodules."""
        space = module.__dict__
        made = [name for each in space["_forward_pre_hooks"].values() if (name := _remade(each))]
        self._keep(_space_but(made) if made else _SPACE, space)
        if values := _values(module):
            self._waiting += values
        if space["_buffers"]:
            self._waiting.append(space["_buffers"])
        for name in self._hooks:
            if space[name]:
                self._waiting += space[name].values()

    def _keep_classes(self, kind: type, *, reads: bool) -> None:
        """The user's own of an object's classes, and what their methods close over."""
        for each in users_classes(kind):
            if id(each) not in self._known:
                self._known[id(each)] = each
                self._keep(_CLASS, each)
                for value in vars(each).values():
                    if type(value) is types.FunctionType and id(value) not in self._known:
                        self._known[id(value)] = value
                        self._follow_function(value, reads=reads)

    def _meet_tensor(self, value: torch.Tensor) -> None:
        if not value.is_inference():
            self.tensors.append(value)

    def _meet_module(self, value: nn.Module) -> None:
        self._keep_module(value)
        self._keep_classes(type(value), reads=True)
        self._waiting += value._modules.values()
        if self._parameters:
            self._waiting += value._parameters.values()

    def _meet_class(self, value: type) -> None:
        self._known.pop(id(value))
        self._keep_classes(value, reads=True)

    def _meet_function(self, value: types.FunctionType) -> None:
        self._follow_function(value, reads=True)

    def _follow_function(self, value: types.FunctionType, *, reads: bool) -> None:
        """What code that is called can change: its closure's names, those of its file that it binds.

        Args:
            value: A function.
            reads: Also the names that it reads there, and its attributes; a library keeps nothing in these.
        """
        if not is_users(value.__module__):
            return
        for cell in value.__closure__ or ():
            if id(cell) not in self._known:
                self._known[id(cell)] = cell
                self._keep(_CELL, cell)
                self._waiting.append(_content(cell))
        if value.__defaults__:
            self._waiting += value.__defaults__
        if value.__kwdefaults__:
            self._waiting += value.__kwdefaults__.values()
        names = value.__globals__
        for name in _written_globals(value.__code__):
            self._keep(_GLOBAL, (names, name))
            self._waiting.append(names.get(name))
        if reads and not is_installed(value.__module__):
            self._waiting += [names.get(name) for name in read_globals(value.__code__)]
            self._waiting.append(value.__dict__)

    def _meet_method(self, value: types.MethodType) -> None:
        self._waiting += (value.__self__, value.__func__)

    def _meet_builtin(self, value: types.BuiltinMethodType) -> None:
        self._waiting.append(value.__self__)  # the list of `seen.append`

    def _meet_partial(self, value: functools.partial[Any]) -> None:
        self._waiting += (value.func, *value.args, value.keywords, value.__dict__)

    def _meet_cached(self, value: functools._lru_cache_wrapper[Any]) -> None:
        self._waiting.append(value.__wrapped__)

    def _meet_content(self, value: Any) -> None:
        kind: type = type(value)
        if (keeper := _keeper(kind)) is not None:
            self._keep(keeper, value)

    def _meet_container(self, value: Any) -> None:
        kind: type = type(value)
        keeper = _container(kind)
        if keeper is not None:
            self._keep(keeper, value)
        if len(value) <= _MOST_ITEMS:
            items = dict.values(value) if isinstance(value, dict) else value
            self._waiting += [each for each in items if type(each) not in ATOMS]
        if kind not in _BARE:
            self._meet_object(value)

    def _meet_object(self, value: Any) -> None:
        """One of a user's class."""
        space = getattr(value, "__dict__", None)
        if type(space) is dict:
            self._waiting.append(space)
        kind: type = type(value)
        if slot_names(kind):
            self._keep(_SLOTS, value)
            self._waiting += slots_of(value).values()
        self._keep_classes(kind, reads=True)


def _remade(hook: Any) -> str | None:
    """The attribute that one of torch's hooks makes anew of parameters before each forward; None: it makes none."""
    if isinstance(hook, WeightNorm):
        return hook.name
    return hook._tensor_name if isinstance(hook, BasePruningMethod) else None


@functools.cache
def _manner(kind: type) -> Callable[[Memento, Any], None] | None:
    """How an object of some type is met; None: not at all."""
    for bases, manner in (
        ((torch.Tensor,), Memento._meet_tensor),
        ((nn.Module,), Memento._meet_module),
        ((type,), Memento._meet_class),
        ((types.FunctionType,), Memento._meet_function),
        ((types.MethodType,), Memento._meet_method),
        ((types.BuiltinMethodType,), Memento._meet_builtin),
        ((functools.partial,), Memento._meet_partial),
        ((functools._lru_cache_wrapper,), Memento._meet_cached),
        ((dict, list, set, deque, bytearray, tuple, frozenset), Memento._meet_container),
    ):
        if issubclass(kind, bases):
            return manner
    if _keeper(kind) is not None:
        return Memento._meet_content
    is_open = not issubclass(kind, types.ModuleType) and (is_users(kind.__module__) or issubclass(kind, OPEN))
    return Memento._meet_object if is_open else None


@functools.cache
def is_users(name: str | None) -> bool:
    """Whether a Python module is the user's: neither torch's nor Python's own, nor this program's."""
    return (name or "").partition(".")[0] not in _NOT_LOOKED_INTO


@functools.cache
def is_installed(name: str | None) -> bool:
    """Whether a Python module is a library's."""
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return any(each in file for each in _INSTALLED)


@functools.cache
def users_classes(kind: type) -> tuple[type, ...]:
    """The user's own among a class and its bases."""
    return tuple(each for each in kind.__mro__ if is_users(each.__module__))


@functools.cache
def _written_globals(code: types.CodeType) -> tuple[str, ...]:
    """The names of its file that a function's code binds anew (`global`), or one inside it."""
    return _globals_in(code, ("STORE_GLOBAL", "DELETE_GLOBAL"))


@functools.cache
def read_globals(code: types.CodeType) -> tuple[str, ...]:
    """The names of its file, or of Python's own, that a function's code reads, or one inside it."""
    return _globals_in(code, ("LOAD_GLOBAL",))


def _globals_in(code: types.CodeType, operations: tuple[str, ...]) -> tuple[str, ...]:
    own = [each.argval for each in dis.get_instructions(code) if each.opname in operations]
    inner = [_globals_in(each, operations) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys(itertools.chain(own, *inner)))


@functools.cache
def slot_names(kind: type) -> tuple[str, ...]:
    """The attributes that a user's class has places for, without a dictionary; `__x` by the name that it has there."""
    places = [vars(each) for each in kind.__mro__ if "__slots__" in vars(each) and is_users(each.__module__)]
    every = itertools.chain.from_iterable(each.items() for each in places)
    return tuple(name for name, place in every if isinstance(place, types.MemberDescriptorType))


def slots_of(held: Any) -> dict[str, Any]:
    """What an object's slots hold; those that hold nothing are left out."""
    kind: type = type(held)
    return {name: getattr(held, name) for name in slot_names(kind) if hasattr(held, name)}


def _differ(now: Any, then: Any) -> bool:
    if now is then:
        return False
    if isinstance(then, dict) and isinstance(now, dict):
        return len(now) != len(then) or any(_is_another(now.get(name, now), each) for name, each in then.items())
    if isinstance(then, tuple | list) and isinstance(now, tuple | list):
        return len(now) != len(then) or any(map(_is_another, now, then))
    if isinstance(then, torch.Tensor):
        return not isinstance(now, torch.Tensor) or not torch.equal(now, then)
    if isinstance(then, set):
        return bool(now != then)
    return repr(now) != repr(then)


def _without_tensors(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: None if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    if isinstance(values, tuple | list):
        return [None if isinstance(value, torch.Tensor) else value for value in values]
    return values


def _without_atoms(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: value for name, value in values.items() if type(value) not in ATOMS}
    if isinstance(values, tuple | list):
        return [value for value in values if type(value) not in ATOMS]
    return None if type(values) in ATOMS else values


def _is_another(now: Any, then: Any) -> bool:
    """An item is no more the object that it was; numbers, and what consists of them, are told by their values."""
    if now is then:
        return False
    is_plain = type(then) in ATOMS or (isinstance(then, tuple) and all(type(each) in ATOMS for each in then))
    return not is_plain or repr(now) != repr(then)


def _values(module: nn.Module) -> list[Any]:
    """The attributes of a module that are more than a number; torch's own modules have none that anybody changes."""
    kind, space = type(module), module.__dict__
    if _PLAIN.get(kind) == len(space) and not (
        space["_forward_pre_hooks"]
        or space["_forward_hooks"]
        or space["_backward_pre_hooks"]
        or space["_backward_hooks"]
    ):
        return []
    if kind.__module__.startswith("torch.nn.modules."):
        _PLAIN[kind] = min(len(space), _PLAIN.get(kind, len(space)))
    return [value for name, value in space.items() if type(value) not in ATOMS and name not in STANDARD]


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


@functools.cache
def _keeper(kind: type) -> _Keeper | None:
    """Of a type of generators or arrays, which have their contents in C."""
    if issubclass(kind, itertools.count):
        return _Keeper(repr, lambda *_: None)  # nobody can put it back; that it has moved can be told
    if issubclass(kind, random.Random):
        return _Keeper(random.Random.getstate, random.Random.setstate)
    if issubclass(kind, torch.Generator):
        return _Keeper(torch.Generator.get_state, torch.Generator.set_state)
    names = [each.__name__ for each in kind.__mro__ if each.__module__.partition(".")[0] == "numpy"]
    return next((_OF_NUMPY[name] for name in names if name in _OF_NUMPY), None)


def state_of(value: Any) -> Any:
    """The contents of a generator or an array; None: it is neither."""
    kind: type = type(value)
    keeper = _keeper(kind)
    return None if keeper is None else keeper.copy(value)


@functools.cache
def _container(kind: type) -> _Keeper | None:
    """Of a type of containers; None: its items are for good."""
    for base, keeper in (
        (OrderedDict, _Keeper(dict, _put_ordered)),
        (dict, _SPACE),
        (set, _Keeper(set, _put_set)),
        (deque, _Keeper(tuple, _put_deque)),
        (list, _Keeper(tuple, lambda held, values: list.__setitem__(held, slice(None), values))),
        (bytearray, _Keeper(bytes, lambda held, values: bytearray.__setitem__(held, slice(None), values))),
    ):
        if issubclass(kind, base):
            return keeper
    return None


def _is_as(space: dict[Any, Any], values: dict[Any, Any]) -> bool:
    """The same objects under the same names, in the same order."""
    if len(space) != len(values) or not all(map(operator.is_, dict.values(space), values.values())):
        return False
    return [*dict.keys(space)] == [*values]


def _put_space(space: dict[Any, Any], values: dict[Any, Any]) -> None:
    """Without what a class of the user's does when items are set."""
    if not _is_as(space, values):
        dict.clear(space)
        dict.update(space, values)


def _space_but(names: Sequence[str]) -> _Keeper:
    """Of a module whose hook makes some attributes anew before each forward."""

    def copy(space: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in space.items() if name not in names}

    def put(space: dict[str, Any], values: dict[str, Any]) -> None:
        _put_space(space, {**values, **{name: space[name] for name in names if name in space}})

    return _Keeper(copy, put)


def _put_ordered(held: OrderedDict[Any, Any], values: dict[Any, Any]) -> None:
    OrderedDict.clear(held)  # its order is not that of the dict below it
    for name, value in values.items():
        OrderedDict.__setitem__(held, name, value)


def _put_deque(held: deque[Any], values: Iterable[Any]) -> None:
    deque.clear(held)
    deque.extend(held, values)


def _put_set(held: set[Any], values: set[Any]) -> None:
    set.clear(held)
    set.update(held, values)


def _put_global(held: tuple[dict[str, Any], str], values: list[Any]) -> None:
    space, name = held
    if values[0] is not _ABSENT:
        space[name] = values[0]
    else:
        space.pop(name, None)


def put_slots(held: Any, values: dict[str, Any]) -> None:
    """Have an object's slots hold what `slots_of` gave."""
    kind: type = type(held)
    for name in slot_names(kind):
        if name in values:
            object.__setattr__(held, name, values[name])
        elif hasattr(held, name):
            object.__delattr__(held, name)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _put_cell(cell: types.CellType, value: Any) -> None:
    if value is not _ABSENT:
        cell.cell_contents = value
    elif cell != types.CellType():
        del cell.cell_contents


def _plain_of_class(kind: type) -> dict[str, Any]:
    """What a class keeps for all of its objects: not its methods."""
    return {name: value for name, value in vars(kind).items() if type(value) in ATOMS and not name.startswith("__")}


def _put_class(kind: type, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


_ABSENT = object()
_CLASS = _Keeper(_plain_of_class, _put_class)
_SPACE = _Keeper(dict, _put_space)
_CELL = _Keeper(_content, _put_cell)
_GLOBAL = _Keeper(lambda held: [held[0].get(held[1], _ABSENT)], _put_global)
_SLOTS = _Keeper(slots_of, put_slots)
_OF_NUMPY = {
    "ndarray": _Keeper(lambda array: array.copy(), lambda array, values: array.__setitem__(..., values)),
    "RandomState": _Keeper(lambda each: each.get_state(), lambda each, state: each.set_state(state)),
    "Generator": _Keeper(
        lambda each: each.bit_generator.state, lambda each, state: setattr(each.bit_generator, "state", state)
    ),
}
_NOT_LOOKED_INTO = sys.stdlib_module_names | {"torch", "assigner", "numpy"}
