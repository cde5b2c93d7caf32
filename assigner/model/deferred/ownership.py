"""What is the user's own: Python modules, classes, attributes and slots; neither torch's, Python's nor this program's.

Of others' objects what a user has given them counts: the attributes of a namespace, what a module of torch's calls.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution, Transform
from torch.distributions.constraints import Constraint
from torch.distributions.utils import lazy_property

from assigner.model.deferred.contents import ATOMS

STANDARD = frozenset(nn.Module().__dict__) - {"training"}
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
BARE = frozenset((dict, list, set, deque, bytearray, tuple, frozenset, defaultdict, OrderedDict, Counter))
"""Python's own containers, which are looked into by their items alone."""
WITH_CODE = (Distribution, Transform, Constraint)
"""Classes of torch's whose methods read what their objects have by names of their own."""
LAST_COMPUTED = "_cached_x_y"
"""Where a transform keeps what it has computed last, and of what."""
_met: dict[int, tuple[weakref.ref[Any], frozenset[str]]] = {}
"""Such objects by their ids, and the lazy properties that they had then: what they were given."""
_HOLDING = (UserDict, UserList, UserString, ChainMap, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
OPEN = (types.SimpleNamespace, argparse.Namespace, threading.local, *_HOLDING, *WITH_CODE)
"""Classes of Python's and torch's whose objects hold what a user has given them."""
_INSTALLED = ("site-packages", "dist-packages")
_NOT_LOOKED_INTO = sys.stdlib_module_names | {"torch", "assigner", "numpy"}

_PLAIN: dict[type, tuple[frozenset[str], tuple[str, ...]]] = {}
"""Torch's own modules: the names of their attributes, and which of these are neither numbers nor texts."""
_LISTS = frozenset(
    ("_reversed_padding_repeated_twice", "_flat_weight_refs", "_flat_weights_names", "_all_weights", "_flat_weights")
)  # of theirs


@functools.cache
def is_open(kind: type) -> bool:
    """Whether objects of a type have attributes in a dict that are looked into: of the user's classes, and of `OPEN`.

    A container's count with its items.
    """
    is_object = not issubclass(kind, (nn.Module, type, torch.Tensor, types.ModuleType, *BARE, *_HOLDING))
    return is_object and bool(kind.__dictoffset__) and (is_users(kind.__module__) or issubclass(kind, OPEN))


def is_read_by_name(kind: type) -> bool:
    """Whether all code that reads such attributes is the user's, which has their names."""
    return is_open(kind) and not issubclass(kind, WITH_CODE)


def given_attributes(held: Any) -> dict[str, Any]:
    """What one of `WITH_CODE` has, without what lazy properties have made since it was first met."""
    names = (name for name in vars(held) if isinstance(inspect.getattr_static(type(held), name, None), lazy_property))
    lazy = frozenset(names)
    key = id(held)
    known = _met.get(key)
    if known is None or known[0]() is not held:
        known = _met[key] = weakref.ref(held, lambda _: _met.pop(key, None)), lazy
    made = (lazy - known[1]) | {LAST_COMPUTED}
    return {name: each for name, each in vars(held).items() if name not in made}


def attributes_of(module: nn.Module, plain: bool = False) -> dict[str, Any]:
    """The attributes of a module beside those that each has; of torch's own, of those that are given something to call.

    Numbers and texts are among them where `plain` says so.
    """
    kind, space = type(module), module.__dict__
    if not plain and kind in _PLAIN:
        every, names = _PLAIN[kind]
        is_plain = space.keys() == every and all(_is_torchs(name, space[name]) for name in names)
        if is_plain and not any(space[hooks] for hooks in HOOKS):
            return {}
    found = {
        name: value for name, value in space.items() if name not in STANDARD and (plain or type(value) not in ATOMS)
    }
    of_torch = not plain and kind.__module__.startswith("torch.nn.modules.")
    if of_torch and all(itertools.starmap(_is_torchs, found.items())):
        _PLAIN[kind] = frozenset(space), tuple(found)
    return found


def _is_torchs(name: str, value: Any) -> bool:
    """What torch's own modules keep as attributes: sizes, types, functions of its own."""
    if isinstance(value, tuple):
        return all(type(each) in ATOMS for each in value)
    is_torchs = name in _LISTS or isinstance(value, torch.dtype | torch.device | types.BuiltinFunctionType)
    return is_torchs or (isinstance(value, types.FunctionType) and not is_users(home_of(value)))


@functools.cache
def is_users(name: str | None) -> bool:
    """Whether a Python module is the user's: neither torch's nor Python's own, nor this program's.

    What a class written in C has in the place of a name is nobody's.
    """
    return (name if isinstance(name, str) else "").partition(".")[0] not in _NOT_LOOKED_INTO


def home_of(code: Any) -> str | None:
    """The Python module that a function is of, or another object to call.

    What wraps a function (`functools.wraps`) says that it is of that one's: the user's is it where one of the two is.
    """
    said: str | None = getattr(code, "__module__", None)
    space = getattr(code, "__globals__", None)
    made = space.get("__name__") if isinstance(space, dict) else None
    return made if isinstance(made, str) and is_users(made) and not is_users(said) else said


@functools.cache
def is_installed(name: str | None) -> bool:
    """Whether a Python module is a library's."""
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return any(each in file for each in _INSTALLED)


def is_own(name: str | None) -> bool:
    """Whether a Python module is the user's, and no library's."""
    return is_users(name) and not is_installed(name)


@functools.cache
def users_classes(kind: type) -> tuple[type, ...]:
    """The user's own among a class and its bases."""
    return tuple(each for each in kind.__mro__ if is_users(each.__module__))


def coded_classes(kind: type) -> tuple[type, ...]:
    """Of a module's class and its bases those by whose methods code of the user's may run; none: they are all torch's.

    All where one of them is the user's, as below the class that torch makes for a parametrization. Or the one with a
    forward that torch.fx has made of a graph, which calls what the user has given it, or that the user has put there.
    """
    if users_classes(kind) or not kind.__module__.startswith("torch."):
        return kind.__mro__[:-1]
    holder = next((each for each in kind.__mro__ if "forward" in vars(each)), object)
    forward = vars(holder).get("forward")
    is_own = isinstance(forward, types.FunctionType) and is_users(forward.__globals__.get("__name__"))
    return (holder,) if is_own else ()


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
