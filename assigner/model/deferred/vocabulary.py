"""The names that a model's forward can reach anything by: what its code does not name, it cannot read.

    def forward(self, x): return self._scaled(x)     names _scaled: that method is code of the forward, too
    def _scaled(self, x): return x * self.factor     names factor
    def report(self): return self.history, STEP      nobody names report: neither history nor STEP is the forward's

Code is followed from what torch calls by itself: `forward`, hooks, and methods with two underscores, but for those that
make an object. Each name that is met opens what has it: methods, properties, attributes and what they hold, in whatever
class, object or file. So names lead on, whatever the objects are that they are asked of. Where code makes the names by
which it asks, as `getattr(self, name)` or `vars(self)`, every name counts.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import os
import random
import types
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assigner.model.deferred.codenames import (
    asks_objects,
    imported_modules,
    makes_names,
    read_names,
    words_in,
    words_of,
)
from assigner.model.deferred.contents import ATOMS, filling_of
from assigner.model.deferred.ownership import (
    OPEN,
    STANDARD,
    attributes_of,
    coded_classes,
    is_open,
    is_read_by_name,
    is_users,
    slots_of,
    users_classes,
)
from assigner.model.deferred.reach import METHODS, MOST_ITEMS, Called

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_RUN = frozenset(("forward", "backward", "setup_context", "jvp", "vmap"))
"""What torch calls where code runs."""
_CALLED = _RUN | frozenset(
    ("train", "eval", "get_extra_state", "set_extra_state", "state_dict", "load_state_dict", "_save_to_state_dict",
     "_load_from_state_dict")
)  # fmt: skip
"""What torch and this program call of a model."""
_MAKING = frozenset(
    ("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__class_getitem__", "__del__",
     "__repr__", "__str__", "__dir__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__copy__",
     "__deepcopy__")
)  # fmt: skip
"""Methods that make an object, copy or describe it: no forward's but where its code names the class."""
_OF_EACH = frozenset(dir(nn.Module()))  # all that torch's own code asks of any module
_HOOKS = [name for name in STANDARD if "hooks" in name]


@dataclass(frozen=True)
class Vocabulary:
    """The names that some code has; None: any."""

    names: frozenset[str] | None = None
    made: frozenset[type] = frozenset()  # classes of which it may make objects
    draws: bool = True  # it can reach the generators of Python's `random` and of NumPy that all code shares
    gradients: bool = False  # it asks objects for `.grad`; code that makes names is not taken to

    def has(self, name: str) -> bool:
        """Whether the code can reach an attribute of this name."""
        return self.names is None or name in self.names

    @functools.cached_property
    def attributes(self) -> frozenset[str]:
        """Those of modules."""
        return _OF_EACH | (self.names or frozenset())

    @property
    def asks_environment(self) -> bool:
        """Whether it names the environment; code that makes names is not taken to ask for it."""
        return self.names is not None and not self.names.isdisjoint(("environ", "environb", "getenv", "getenvb"))

    def has_attribute(self, kind: type, name: str) -> bool:
        """Whether it can reach this attribute of modules of some class; what torch's own read has no part in that."""
        return self.names is None or name in self.attributes or not _is_named(kind)

    def has_member(self, kind: type, name: str) -> bool:
        """Whether it can reach what a class keeps by this name, for itself or for its objects."""
        return kind in self.made if name in _MAKING and self.names is not None else self.has(name) or _is_special(name)

    def copier(self, value: Any) -> Callable[[Any], dict[str, Any]] | None:
        """How what it can reach is copied of a module's attributes, an object's or a class's; None: of none of these.

        What a cached property makes of a module is none of them: it is made when it is asked for.
        """
        kind: Any = type(value)

        def named(space: Mapping[str, Any]) -> dict[str, Any]:
            return {name: each for name, each in space.items() if self.has(name)}

        if issubclass(kind, type) and is_users(value.__module__):
            return lambda held: {name: each for name, each in named(vars(held)).items() if not name.startswith("__")}
        if kind is Called:
            return lambda held: _given(held.function) | named(vars(held.function))
        if kind is type(os.environ):
            return named
        if not issubclass(kind, nn.Module):
            return (lambda held: named(vars(held))) if is_read_by_name(kind) else None
        members = itertools.chain.from_iterable(vars(each).items() for each in kind.__mro__)
        made = {name for name, each in members if isinstance(each, functools.cached_property)} - vars(value).keys()
        if self.names is None or not _is_named(kind):
            return lambda held: {name: each for name, each in vars(held).items() if name not in made}
        seen = self.attributes - made if made else self.attributes
        return lambda held: {name: each for name, each in vars(held).items() if name in seen}


def vocabulary_of(
    modules: Iterable[nn.Module], beside: Iterable[nn.Module] = (), others: Iterable[Any] = ()
) -> Vocabulary:
    """The names that the forward of modules, each without its submodules, can reach anything by; or functions alone.

    The forward of those `beside` is other code; what they else have may be asked for by name.
    """
    modules = list(modules)
    listener = _Listener(_CALLED if modules else _RUN)  # `train` of an object that has a loss is the script's own loop
    try:
        for module in modules:
            listener.add_module(module)
        for module in beside:
            listener.add_other(module)
        listener.follow(others)
    except _AnyNameError:
        return Vocabulary()
    return Vocabulary(frozenset(listener.words), frozenset(listener.made), listener.draws, listener.gradients)


class _AnyNameError(Exception):
    """Code makes names."""


class _Listener:
    """Follows code by its names (`words`), and notes the classes that it may make objects of (`made`)."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words, self.made = set(words), set[type]()
        self.gradients = False  # code of it asks for `.grad`
        self._waiting: deque[Any] = deque()
        self._closed: dict[str, list[Any]] = defaultdict(list)  # what no code has named yet, by name
        self._known: dict[int, Any] = {}
        self._classes, self._others = set[type](), set[type]()  # whose members are there; those that are only named

    @property
    def draws(self) -> bool:
        """Whether a shared generator was met: by its module's name, or a module or function of it by any name."""
        return "random" in self.words or any(map(_is_generator, self._known.values()))

    def add_module(self, module: nn.Module) -> None:
        """One whose forward is followed."""
        self._known[id(module)] = module
        kind: Any = type(module)
        held = attributes_of(module)
        if _is_named(kind):
            self._open(held)
        else:
            self._waiting += held.values()
        self._waiting += (module.__dict__[name] for name in _HOOKS if module.__dict__[name])
        self._add_class(kind)

    def add_other(self, module: nn.Module) -> None:
        """One of which only what is named counts, and that is not its forward."""
        self._known[id(module)] = module
        self._open(attributes_of(module))
        named: Any = type(module)
        for kind in {*users_classes(named)} - self._classes - self._others:
            self._others.add(kind)
            self._open({name: each for name, each in vars(kind).items() if not (_is_special(name) or name in _CALLED)})

    def follow(self, started: Iterable[Any]) -> None:
        """Go where names lead."""
        self._waiting += started
        while self._waiting:
            value = self._waiting.popleft()
            if type(value) not in ATOMS and id(value) not in self._known:
                self._known[id(value)] = value
                self._parts(value)

    def _say(self, words: Iterable[str]) -> None:
        for name in set(words) - self.words:
            self.words.add(name)
            self._waiting += self._closed.pop(name, ())

    def _open(self, space: Mapping[str, Any]) -> None:
        for name, value in list(space.items()):
            if type(value) not in ATOMS and name not in _MAKING:
                (self._waiting if name in self.words else self._closed[name]).append(value)

    def _parts(self, value: Any) -> None:
        kind: Any = type(value)
        if kind is types.FunctionType:
            self._add_function(value)
        elif issubclass(kind, type):
            self._add_class(value, is_made=True)
        elif issubclass(kind, nn.Module):
            self.add_module(value)
            self._waiting += value._modules.values()
        elif issubclass(kind, types.ModuleType):
            self._open(vars(value) if is_users(value.__name__) else {})
        elif issubclass(kind, operator.attrgetter | operator.methodcaller):
            named = words_of(f"{{{value!r}")
            self.gradients |= "grad" in named
            self._say(named)
        elif not issubclass(kind, torch.Tensor):
            self._waiting += next((leads(value) for bases, leads in _LEADS if issubclass(kind, bases)), ())
            if is_users(kind.__module__) or issubclass(kind, OPEN):
                space = getattr(value, "__dict__", {})
                if is_open(kind) and not is_read_by_name(kind):
                    self._waiting += space.values()
                else:
                    self._open(space)
                self._open(slots_of(value))
                self._add_class(kind)

    def _add_function(self, value: types.FunctionType) -> None:
        """What it names counts; of its file too, if that is the user's."""
        code, space = value.__code__, value.__globals__
        is_own, is_of_each = is_users(space.get("__name__")), value.__module__ == nn.Module.__module__
        if makes_names(code) and (is_own or (code.co_varnames[:1] == ("self",) and not is_of_each)):
            raise _AnyNameError
        self._say(words_in(code) if is_own else _OF_EACH & {*code.co_names} if is_of_each else code.co_names)
        self.gradients |= (is_own or not is_of_each) and asks_objects(value, "grad")
        closed = zip(code.co_freevars, value.__closure__ or (), strict=True)
        self._waiting += (cell for name, cell in closed if name != "__class__")  # of super()
        self._waiting += (value.__defaults__, value.__kwdefaults__, value.__dict__)
        if is_own:
            self._waiting += (space[name] for name in read_names(code) if name in space)
            self._waiting += imported_modules(value)

    def _add_class(self, kind: Any, *, is_made: bool = False) -> None:
        """Its methods, and those of torch's that call them; of a class whose objects the code makes, all."""
        bases = coded_classes(kind)
        if is_users(type(kind).__module__):  # its calls and attributes are by its own class
            self._waiting.append(type(kind))
        for base in bases if is_made else ():
            if base not in self.made:
                self.made.add(base)
                self._waiting += (each for name, each in vars(base).items() if name in _MAKING)
        for base in bases:
            if base not in self._classes:
                self._classes.add(base)
                if is_users(base.__module__) and any(type(each).__name__ in _COMPILED for each in vars(base).values()):
                    raise _AnyNameError
                self._waiting += (each for name, each in vars(base).items() if _is_special(name) and _is_code(each))
                self._open({name: each for name, each in vars(base).items() if not _is_special(name)})


_COMPILED = ("cython_function_or_method", "method_descriptor")
"""Methods whose code has names that nobody can read."""
_LEADS: tuple[tuple[tuple[type, ...], Callable[[Any], Iterable[Any]]], ...] = (
    ((types.MethodType,), lambda each: (each.__self__, each.__func__)),
    ((types.BuiltinMethodType, types.MethodWrapperType), lambda each: (each.__self__,)),
    ((types.CellType,), filling_of),
    ((weakref.ref,), lambda each: (each(),)),
    (tuple(METHODS), lambda each: next(METHODS[kind] for kind in type(each).__mro__ if kind in METHODS)(each)),
    ((functools.partial,), lambda each: (each.func, each.args, each.keywords)),
    ((functools._lru_cache_wrapper,), lambda each: (each.__wrapped__,)),
    ((types.MappingProxyType,), gc.get_referents),
    ((dict,), lambda each: dict.values(each) if len(each) <= MOST_ITEMS else ()),
    ((list, tuple, set, frozenset, deque), lambda each: each if len(each) <= MOST_ITEMS else ()),
)
"""What an object has without a name, or calls."""


def _is_generator(value: Any) -> bool:
    """What draws from the generators of Python and NumPy that all code shares, or may do so."""
    named = value.__name__ if isinstance(value, types.ModuleType) else str(type(value).__module__)
    return isinstance(value, random.Random) or named == "random" or named.startswith("numpy.random")


def _given(function: types.FunctionType) -> dict[str, Any]:
    """What the arguments of a function are where a call does not say."""
    by_name = {f"__kwdefaults__[{name!r}]": each for name, each in (function.__kwdefaults__ or {}).items()}
    return {"__defaults__": function.__defaults__, **by_name}


def _is_named(kind: type) -> bool:
    """Modules whose attributes are read by names that can be followed: torch's own may make theirs."""
    return bool(users_classes(kind)) or kind in (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _is_special(name: str) -> bool:
    """By Python itself, wherever an object is used."""
    return name.startswith("__") and name.endswith("__") and name not in _MAKING


def _is_code(value: Any) -> bool:
    return isinstance(value, types.FunctionType | functools._lru_cache_wrapper) or type(value) in METHODS
