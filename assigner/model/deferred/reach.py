"""What Python code can reach when it runs: the walk of whoever keeps it, compares it or names it.

Each object is met once, under the name of a place where it is found, as code would name it: `loss.scale['a'][0]`.
What has no object of its own has one here: some names at the top of a file, and what hangs on a function.

    module -> attributes, buffers, hooks, submodules   function -> closure, names of its file, defaults, attributes
    object -> attributes, slots, its class             container -> items; of a class of the user's, as an object too
    class  -> its own bases, numbers, texts, methods   method, partial, cache -> what they call, and with what

What is torch's, Python's or this program's own is met and not looked into. What Python and torch keep for themselves as
they go is not met, under whatever name a file has it (`from linecache import cache as lines`, where torch files the
source of every graph): it moves with what Python, torch and this program do, and says nothing of the model.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import random
import sys
import types
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from assigner.model.deferred.codenames import imported_modules, read_names, words_in, written_names
from assigner.model.deferred.contents import ATOMS, IN_C, cached_values, filling_of
from assigner.model.deferred.ownership import (
    BARE,
    FORWARD_HOOKS,
    HOOKS,
    OPEN,
    WITH_CODE,
    attributes_of,
    given_attributes,
    home_of,
    is_installed,
    is_own,
    is_read_by_name,
    is_users,
    slots_of,
    users_classes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from assigner.model.deferred.vocabulary import Vocabulary

Top = Literal["followed", "read", "whole"]
"""How much of the top of files is met:

    followed   for what is compared or copied: what a function of the user's own (no library's) reads there, but for the
               methods of the modules that the walk begins with, whose reads a capture looks at
    read       for what a capture has for ever: what any function but torch's and transformers' reads there, with the
               names themselves, for others may be bound to them, and those by which it calls what is torch's
    whole      for what is put back behind a forward: the files of the classes of those modules as they stand, and last
               (`OUTER`) the user's own files, classes and functions that these name
"""
MOST_ITEMS = 10_000  # a larger container is met without its items
_CAPTURED = ("torch", "transformers")  # libraries whose files keep nothing that a forward reads
KEPT: tuple[type, ...] = (*ATOMS, list, dict, set, deque, torch.Tensor)
"""What counts among the names at the top of a file, and of what a class keeps for all of its objects."""
_CHANGING = (list, dict, set, deque, bytearray)
_CACHING = sys.stdlib_module_names | {"torch", "numpy"}
_CACHES = {("sys", "modules"), ("inspect", "modulesbyfile"), ("warnings", "onceregistry")}
"""Theirs that are not called so, by module and name."""

_ITEM, _ATTRIBUTE, _HOOK, _MEMBER = "{}[{!r}]", "{}.{}", "a hook of {}", "an item of {}"
DEFAULT = "{}()[{!r}]"
"""The form of a default of a function."""
SPACE = "{}."
"""The form of a dict that has the attributes of an object: its items are named as these."""
ORIGINS = MODULE, FILE, OWN, OUTER = "module", "file", "own name", "outer name"
"""Where names begin: a module; the file of a module's class; what else has a name; that, where the walk has come from
the top of a file alone, by a class, a function or another file."""


class Place(NamedTuple):
    """Where an object is found: its key in a holder, and the form in which its name is made of both.

    Without a holder the key is a name that begins here, and the form says where: one of `ORIGINS`.
    """

    form: str
    key: Any
    holder: Place | None = None

    def attribute(self, name: str) -> Place:
        """Of an attribute of what is here."""
        return Place(_ATTRIBUTE, name, self)

    def hooks(self) -> Place:
        """Of each of its hooks."""
        return Place(_HOOK, None, self)

    def member(self) -> Place:
        """Of each item of the set that is here, which has no order."""
        return Place(_MEMBER, None, self)

    def item(self, key: Any) -> Place:
        """Of an item of the dict that is here; if that has the attributes of an object, of the attribute."""
        if self.form == _HOOK:
            return self
        return Place(_ITEM, key, self) if self.form != SPACE or self.holder is None else self.holder.attribute(key)

    @property
    def origin(self) -> str:
        """Where its name begins, of `ORIGINS`: what holds it in the end."""
        place = self
        while place.holder is not None:
            place = place.holder
        return place.form

    def named(self, name: str) -> Place:
        """Of what has a name of its own, and was found from here."""
        return Place(OUTER if self.origin == OUTER else OWN, name)

    def __str__(self) -> str:
        """As code would name it: `loss.scale['a'][0]`; what a function closes over, by its own name."""
        steps, place = list[Place](), self
        while place.holder is not None:
            steps.append(place)
            place = place.holder
        name = str(place.key)
        for step in reversed(steps):
            name = step.form.format(name, step.key)
        return name


class Names(NamedTuple):
    """Some of the names at the top of a file: those that a function of it binds anew, or reads (`code`; None: any)."""

    space: dict[str, Any]
    names: tuple[str, ...]
    code: types.CodeType | None = None


class Called(NamedTuple):
    """What the script can change of a function beside its code: its defaults, and what hangs on it."""

    function: types.FunctionType


class _Extent(NamedTuple):
    """How far a walk goes; see `reach`."""

    hooks: tuple[str, ...]
    parameters: bool
    plain: bool
    top: Top
    vocabulary: Vocabulary | None
    told: set[tuple[int, str]]  # of the functions of torch, Python and NumPy: their modules, by id, and names


_HELD_ALONE = _Extent(HOOKS, parameters=True, plain=False, top="whole", vocabulary=None, told=set())

_Found = tuple[Place, Any]


def reach(
    started: Mapping[str, Any],
    modules: Iterable[tuple[str, nn.Module]] = (),
    *,
    beside: Iterable[Any] = (),
    backwards: bool = True,
    parameters: bool = False,
    plain: bool = False,
    top: Top = "followed",
    vocabulary: Vocabulary | None = None,
) -> Iterator[_Found]:
    """Everything that code can reach, each object once, what is nearest first.

    Args:
        started: Functions and objects, by name.
        modules: By name, each without its submodules.
        beside: What is not met.
        backwards: False: what only hooks on backwards can reach is not met. No forward reads it.
        parameters: True: those of modules are met.
        plain: True: numbers and texts are met too, each in all places, but for those in sets.
        top: Which names at the top of files are met, and what these lead to.
        vocabulary: What is met of modules and of their classes: what has one of these names. None: all.

    Yields:
        Where it is, and what: also cells of closures, and the `Names` of files that code binds, or as `top` says.
    """
    modules = list(modules)
    extent = _Extent(HOOKS if backwards else FORWARD_HOOKS, parameters, plain, top, vocabulary, set())
    known: dict[int, Any] = {id(each): each for each in itertools.chain((each for _, each in modules), beside)}
    caches = _library_caches(len(sys.modules))
    waiting: deque[_Found] = deque()
    kinds: list[type] = list(dict.fromkeys(type(each) for _, each in modules))
    for name, module in modules:
        place = Place(MODULE, name or type(module).__name__)
        yield place, module
        waiting += _of_module_alone(place, module, extent)
    for each in dict.fromkeys(itertools.chain.from_iterable(users_classes(kind) for kind in kinds)):
        known[id(each)] = each
        place = Place(OWN, each.__name__)
        yield place, each
        waiting += _of_class(place, each, extent, of_modules=True)
    if top == "whole":
        waiting += itertools.chain.from_iterable(_of_file(file) for file in files_of(kinds))
    if top == "read" and vocabulary is not None and vocabulary.asks_environment:
        waiting.append((Place(OWN, "os.environ"), os.environ))
    waiting += ((Place(OWN, name), value) for name, value in started.items())
    for queue in (waiting, deque(_outer(files_of(kinds)) if top == "whole" else ())):
        while queue:
            place, value = queue.popleft()
            kind: type = type(value)
            if kind in ATOMS:
                if plain:
                    yield place, value
            elif id(value) not in known and id(value) not in caches:
                known[id(value)] = value
                yield place, value
                parts = _parts(kind)
                if parts is not None:
                    queue.extend(parts(place, value, extent))


@functools.lru_cache(maxsize=1)
def _library_caches(_: int) -> dict[int, Any]:
    """The caches at the top of modules of Python and torch, by their ids: dicts, sets and lists that are called so."""
    owners = [each for each in [*sys.modules] if each.partition(".")[0] in _CACHING]
    spaces = ((owner, getattr(sys.modules[owner], "__dict__", None)) for owner in owners)
    return {
        id(each): each
        for owner, space in spaces
        if isinstance(space, dict)  # some put other objects in their own place in `sys.modules`
        for name, each in list(space.items())
        if ("cache" in name.lower() or (owner, name) in _CACHES) and issubclass(type(each), (dict, set, list, deque))
    }


def parts_of(place: Place, value: Any, vocabulary: Vocabulary | None = None) -> Iterable[_Found]:
    """What an object leads to by what it holds itself, not by the names of files; a module's parameters too."""
    kind: type = type(value)
    parts = _parts(kind)
    return () if parts is None else parts(place, value, _HELD_ALONE._replace(vocabulary=vocabulary))


def files_of(kinds: Iterable[type]) -> list[str]:
    """The Python modules that classes are written in; none of torch's and transformers'."""
    names = dict.fromkeys(next(iter(users_classes(kind)), kind).__module__ for kind in kinds)
    return [name for name in names if name.partition(".")[0] not in _CAPTURED and name in sys.modules]


@functools.cache
def _parts(kind: type) -> Callable[[Place, Any, _Extent], Iterable[_Found]] | None:
    """What an object of some type leads to; None: nothing."""
    for bases, parts in (
        ((nn.Module,), _of_module),
        ((type,), _of_class),
        ((types.FunctionType,), _of_function),
        ((types.MethodType,), _of_method),
        ((types.BuiltinMethodType,), _of_builtin),
        ((types.CellType,), _of_cell),
        ((types.ModuleType,), _of_python_module),
        ((Names, Called), _of_names),
        ((functools.partial,), _of_partial),
        ((functools._lru_cache_wrapper,), _of_cached),
        ((dict, list, set, deque, tuple, frozenset), _of_container),
    ):
        if issubclass(kind, bases):
            return parts
    is_open = not issubclass(kind, torch.Tensor)
    return _of_object if is_open and (is_users(kind.__module__) or issubclass(kind, OPEN)) else None


def _of_module_alone(place: Place, module: nn.Module, extent: _Extent) -> list[_Found]:
    """Without its submodules and its class."""
    space = module.__dict__
    held, some = attributes_of(module, extent.plain), extent.vocabulary
    if some is not None:
        held = {name: value for name, value in held.items() if some.has_attribute(type(module), name)}
    found = [(place.attribute(name), value) for name, value in held.items()]
    kind: type = type(module)
    if space["_buffers"] or users_classes(kind):  # a forward may register its first one
        found.append((Place(SPACE, None, place), space["_buffers"]))
    if extent.parameters and space["_parameters"]:
        found.append((Place(SPACE, None, place), space["_parameters"]))
    for hooks in extent.hooks:
        if space[hooks]:
            found += [(place.hooks(), each) for each in space[hooks].values()]
    return found


def _of_module(place: Place, value: nn.Module, extent: _Extent) -> list[_Found]:
    found = _of_module_alone(place, value, extent)
    found += [(place.attribute(name), each) for name, each in value._modules.items()]
    return found + _classes(place, type(value))


def _classes(place: Place, kind: type) -> list[_Found]:
    return [(place.named(each.__name__), each) for each in users_classes(kind)]


def _of_class(place: Place, value: type, extent: _Extent, *, of_modules: bool = False) -> Iterable[_Found]:
    """The user's own among its bases, its methods, and what it keeps for all of its objects.

    `of_modules`: the walk has begun with modules of it: a capture looks at what their methods read in files, and at
    that of no other class.
    """
    if extent.top == "read" and not of_modules:
        return _members(place.named(value.__name__), value, extent) if is_own(value.__module__) else []
    if not is_users(value.__module__):
        return _classes(place, value)
    is_looked_at = of_modules or is_installed(value.__module__)  # what its methods read, elsewhere
    if extent.top != "followed" or extent.plain or not is_looked_at:
        return _members(place.named(value.__name__), value, extent)
    if extent.vocabulary is not None:
        return _held_by(value, extent)
    now = [*vars(value).values()]
    then, found = _HELD.get(value, ([], []))
    if len(now) != len(then) or not all(map(operator.is_, now, then)):
        found = _held_by(value, extent)
        _HELD[value] = now, found
    return found


_HELD: dict[type, tuple[list[Any], list[_Found]]] = {}  # by classes' members, what these hold: most hold nothing


def _held_by(kind: type, extent: _Extent) -> list[_Found]:
    """What the members of a class hold, without what its methods read."""
    found = list[_Found]()
    for place, each in _members(Place(OWN, kind.__name__), kind, extent):
        found += _of_code(place, each, extent) if type(each) is types.FunctionType else [(place, each)]
    return found


def _members(place: Place, kind: type, extent: _Extent) -> list[_Found]:
    found = [each for each in _classes(place, kind) + _classes(place, type(kind)) if each[1] is not kind]
    for name, each in list(vars(kind).items()):
        if extent.vocabulary is not None and not extent.vocabulary.has_member(kind, name):
            continue
        if type(each) is types.FunctionType:
            found.append((place.attribute(name), each))
        elif type(each) in METHODS:
            found += [(place.attribute(name), inner) for inner in METHODS[type(each)](each)]
        elif (extent.plain or type(each) not in ATOMS) and not name.startswith("__"):
            found.append((place.attribute(name), each))
    return found


METHODS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    staticmethod: lambda each: (each.__func__,),
    classmethod: lambda each: (each.__func__,),
    property: lambda each: (each.fget, each.fset),
    functools.cached_property: lambda each: (each.func,),
    functools.partialmethod: lambda each: (each.func, each.args, each.keywords),
    functools.singledispatchmethod: lambda each: tuple(each.dispatcher.registry.values()),
}
"""What leads from a class to its code, and what code that is."""


def _of_function(place: Place, value: types.FunctionType, extent: _Extent) -> list[_Found]:
    """What code that is called can read and change."""
    found, home = _of_code(place, value, extent), home_of(value)
    if not is_users(home):
        return found
    space = value.__globals__
    if extent.top == "read":
        if str(home).partition(".")[0] not in _CAPTURED:
            found += [(place, Called(value)), *_of_read_names(value, extent.told)]
    elif not is_installed(home):
        found.append((Place(SPACE, None, place), value.__dict__))
        if extent.top == "followed":
            found += [(Place(OWN, name), space[name]) for name in read_names(value.__code__) if name in space]
    return found


def _of_read_names(value: types.FunctionType, told: set[tuple[int, str]]) -> Iterator[_Found]:
    """The names that a function reads at the top of its file; a function there may be another one later."""
    space, imported = value.__globals__, imported_modules(value)
    if names := tuple(name for name in read_names(value.__code__) if name in space):
        yield Place(OWN, _short(str(space.get("__name__", "")))), Names(space, names, value.__code__)
    yield from ((Place(OWN, each.__name__), each) for each in imported)
    yield from _of_libraries(value.__code__, [*map(space.get, names), *imported], told)


def _of_libraries(code: types.CodeType, waiting: list[Any], told: set[tuple[int, str]]) -> Iterator[_Found]:
    """The functions of torch, Python and NumPy that code calls by their modules, as `F.relu`, and of tensors: by names.

    A script may put others there. What else stands in these modules moves as they go. `told` are those that were met.
    """
    words, known = words_in(code), list[types.ModuleType]()
    for each in waiting:
        if isinstance(each, types.ModuleType) and not is_users(each.__name__) and each not in known:
            known.append(each)
            named = {name: value for name, value in vars(each).items() if name in words}
            waiting += named.values()
            yield from _untold(each, [name for name, value in named.items() if callable(value)], told)
    yield from _untold(torch.Tensor, words & _OF_TENSORS, told)


def _untold(holder: Any, names: Iterable[str], told: set[tuple[int, str]]) -> Iterator[_Found]:
    if some := tuple(sorted(name for name in names if (id(holder), name) not in told)):
        told.update((id(holder), name) for name in some)
        yield Place(OWN, holder.__name__), Names(vars(holder), some)


_OF_TENSORS = frozenset(dir(torch.Tensor))


def _of_python_module(place: Place, value: types.ModuleType, extent: _Extent) -> Iterator[_Found]:
    """The names at the top of the user's own, by which code may ask for them: `settings.scale`."""
    name, some = value.__name__, extent.vocabulary
    if extent.top == "read" and is_own(name):
        space = vars(value)
        if names := tuple(each for each in space if some is None or (some.has(each) and not each.startswith("__"))):
            yield place.named(_short(name)), Names(space, names)


def _outer(files: Iterable[str]) -> Iterator[_Found]:
    """The user's own classes, functions and files that stand at the top of some files."""
    met = dict.fromkeys(files)
    for file in files:
        for name, value in list(vars(sys.modules[file]).items()):
            of = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if not isinstance(of, str) or not is_own(of):
                continue
            if isinstance(value, type | types.FunctionType | functools._lru_cache_wrapper):
                yield Place(OUTER, name), value
            elif isinstance(value, types.ModuleType) and of in sys.modules and of not in met:
                met[of] = None
                yield from _of_file(of, OUTER)


def _of_file(file: str, form: str = FILE) -> Iterator[_Found]:
    """What stands at the top of a file: plain values and containers, and objects of the user's classes."""
    space, place = vars(sys.modules[file]), Place(form, _short(file))
    names = tuple(name for name, each in space.items() if isinstance(each, KEPT) and not name.startswith("__"))
    if names:
        yield place, Names(space, names)
    for name, each in space.items():
        is_kept = is_own(type(each).__module__) and not isinstance(each, nn.Module)
        if is_kept or isinstance(each, (*IN_C, *OPEN)):
            yield place.attribute(name), each


def _short(file: str) -> str:
    return file.rpartition(".")[2]


def _of_code(place: Place, value: types.FunctionType, extent: _Extent) -> list[_Found]:
    """Its closure's names, its defaults, and the names of its file that it binds."""
    if not is_users(home_of(value)):
        return []
    closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    found: list[_Found] = [(place.named(name), cell) for name, cell in closed if name != "__class__"]  # of super()
    defaults = itertools.chain(enumerate(value.__defaults__ or ()), (value.__kwdefaults__ or {}).items())
    found += [(Place(DEFAULT, key, place), each) for key, each in defaults if extent.plain or type(each) not in ATOMS]
    if written := written_names(value.__code__):
        found.append((place.named(_short(str(home_of(value)))), Names(value.__globals__, written)))
    return found


def _of_method(place: Place, value: types.MethodType, _: _Extent) -> list[_Found]:
    return [(place, value.__func__)] if _draws_for_all(value) else [(place, value.__self__), (place, value.__func__)]


def _of_builtin(place: Place, value: types.BuiltinMethodType, extent: _Extent) -> list[_Found]:
    """The list of `seen.append`: code that has no more of it cannot read it."""
    return [] if extent.top == "whole" or _draws_for_all(value) else [(place, value.__self__)]


def _draws_for_all(value: types.MethodType | types.BuiltinMethodType) -> bool:
    """`random` of `from random import random`, which is a method of the generator that all code draws from.

    As with `random.random`, whose name leads there too, draws are looked at where they are made, and seeded. What
    asks for the generator's state leads to it.
    """
    return any(value.__self__ is each for each in _OF_ALL) and value.__name__ not in ("getstate", "get_state")


_OF_ALL: tuple[Any, ...] = (random.getrandbits.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]


def _of_cell(place: Place, value: types.CellType, _: _Extent) -> list[_Found]:
    return [(place, each) for each in filling_of(value)]


def _of_names(place: Place, value: Names | Called, extent: _Extent) -> list[_Found]:
    """Of a file, or of what hangs on a function; what is plain among them is met where it is read."""
    if isinstance(value, Names):
        held = {name: value.space.get(name) for name in value.names}
    else:  # its defaults are met with its code
        some = extent.vocabulary
        held = {name: each for name, each in value.function.__dict__.items() if some is None or some.has(name)}
    return [(place.attribute(name), each) for name, each in held.items() if type(each) not in ATOMS]


def _of_partial(place: Place, value: functools.partial[Any], _: _Extent) -> list[_Found]:
    given = [(place.attribute("args"), value.args), (place.attribute("keywords"), value.keywords)]
    return [(place, value.func), *given, (Place(SPACE, None, place), value.__dict__)]


def _of_cached(place: Place, value: functools._lru_cache_wrapper[Any], extent: _Extent) -> list[_Found]:
    kept = kept_objects(value)
    if extent.top == "read":  # containers may be caches of what is made alike
        kept = [each for each in kept if is_users(type(each).__module__)]
    return [(place, value.__wrapped__), *((place.attribute("cache"), each) for each in kept)]


def kept_objects(cached: functools._lru_cache_wrapper[Any]) -> list[Any]:
    """What a cached function has for its callers that can change: containers, and objects of the user's classes.

    No modules and tensors.
    """
    others = (type, types.FunctionType, nn.Module, torch.Tensor)
    every = [each for each in cached_values(cached) if not isinstance(each, others)]
    return [each for each in every if isinstance(each, _CHANGING) or is_users(type(each).__module__)]


def _of_container(place: Place, value: Any, extent: _Extent) -> list[_Found]:
    found = list[_Found]()
    if len(value) <= MOST_ITEMS:
        if isinstance(value, set | frozenset):
            found = [(place.member(), each) for each in value if type(each) not in ATOMS]
        else:
            items = dict.items(value) if isinstance(value, dict) else enumerate(value)
            found = [(place.item(key), each) for key, each in items if extent.plain or type(each) not in ATOMS]
    if type(value) not in BARE:
        found += _of_object(place, value, extent)
    return found


def _of_object(place: Place, value: Any, extent: _Extent) -> list[_Found]:
    """One of a user's class."""
    space, some = getattr(value, "__dict__", None), extent.vocabulary
    found: list[_Found] = []
    kind: Any = type(value)
    if type(space) is dict and some is not None and is_read_by_name(kind):
        found += [(place.attribute(name), each) for name, each in space.items() if some.has(name)]
        found = [each for each in found if extent.plain or type(each[1]) not in ATOMS]
    elif type(space) is dict and issubclass(kind, WITH_CODE):
        found += [(place.attribute(name), each) for name, each in given_attributes(value).items()]
    elif type(space) is dict:
        found.append((Place(SPACE, None, place), space))
    found += [(place.attribute(name), each) for name, each in slots_of(value).items()]
    return found + _classes(place, type(value))
