"""What code of the user's own a model and what is beside it can run: ranks compare it, for each has files of its own.

It is told by the text of what stands at the top of a file, a function or a class, of which comments, docstrings and
formatting do not count. What such a text makes of a rank's number or of a host's name is its own business, so values
are not looked at, and of a name that is defined in two ways both count.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
import types
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from assigner.model.deferred.codenames import nested
from assigner.model.deferred.contents import filling_of
from assigner.model.deferred.origins import digest
from assigner.model.deferred.ownership import is_own, users_classes
from assigner.model.deferred.reach import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_LAMBDA = "<lambda>"
_CACHED = functools._lru_cache_wrapper
_TOLD = (bool, int, float, str)
_WITH_NAMES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def own_code(functions: Iterable[Any], model: nn.Module) -> dict[str, list[int]]:
    """What functions, as the loss, and a model's forwards can run of the user's own files; of an object its class's.

    By name and file, as `loss (model.py)`, numbers of 48 bits, in order: one for each definition.
    """
    found: dict[str, set[int]] = defaultdict(set)
    waiting: list[Any] = [*functions, *(type(each) for each in model.modules())]
    known: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in known:
            continue
        known[id(value)] = value  # an id stays that of one object
        with contextlib.suppress(Exception):  # what an object of odd classes cannot tell is no reason to end a run
            for function in _functions_of(value):
                module = function.__globals__.get("__name__")
                if isinstance(module, str) and is_own(module):
                    code = function.__code__
                    name = code.co_qualname.partition(".")[0]
                    found[f"{name} ({_place(function)})"].update(_definitions(code.co_filename).get(name, ()))
                    waiting += _named(function)
    return {name: sorted(numbers) for name, numbers in sorted(found.items()) if numbers}


def python_release() -> int:
    """What has read the text: a number that is the same where one text is the same to it."""
    return digest([sys.implementation.name, str(sys.version_info[:2])])


def _place(function: types.FunctionType) -> str:
    """Its file, in its package: the folder of that is another one on every host."""
    package, _, _ = str(function.__globals__["__name__"]).rpartition(".")
    return f"{package}{'/' if package else ''}{Path(function.__code__.co_filename).name}"


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """What is run where a function is called, or an object of a class; nothing of the object itself is asked."""
    kind = type(value)
    if kind is types.FunctionType:
        yield value
        yield from _functions_of(vars(value).get("__wrapped__"))
    elif kind in (types.MethodType, functools.partial, _CACHED):
        name = {types.MethodType: "__func__", functools.partial: "func"}.get(kind, "__wrapped__")
        yield from _functions_of(getattr(value, name))
    elif issubclass(kind, type):
        for each in users_classes(value):
            for member in [*vars(each).values()]:
                for inner in METHODS.get(type(member), lambda member: (member,))(member):
                    if type(inner) in (types.FunctionType, _CACHED):
                        yield from _functions_of(inner)
    elif kind not in (type(None), types.BuiltinFunctionType):
        yield from _functions_of(kind)


def _named(function: types.FunctionType) -> Iterator[Any]:
    """The functions, classes and partials that a function's code has names for, at the top of files or around it."""
    names = dict.fromkeys(name for each in nested(function.__code__) for name in each.co_names)
    space = function.__globals__
    for value in [space.get(name) for name in names]:
        if type(value) is types.ModuleType:
            yield from filter(_is_code, [vars(value).get(name) for name in names])
        elif _is_code(value):
            yield value
    for cell in function.__closure__ or ():
        yield from filter(_is_code, filling_of(cell))


def _is_code(value: Any) -> bool:
    return issubclass(type(value), (types.FunctionType, type, functools.partial, _CACHED))


@functools.cache
def _definitions(file: str) -> Mapping[str, list[int]]:
    """What stands at the top of a file, by name; nothing where there is no text."""
    found: dict[str, list[int]] = defaultdict(list)
    if not Path(file).is_absolute():
        return found
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, which has had the file before
            tree = ast.parse("".join(linecache.getlines(file)))
        for name, node in _outermost(tree):
            found[name].append(digest([ast.dump(_without_docstrings(node))]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # changed since, or nested too deeply for this
        return {}
    return found


def _outermost(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _NAMED):
            yield node.name, node
        elif isinstance(node, ast.Lambda):
            yield _LAMBDA, node
        else:
            yield from _outermost(node)


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, _NAMED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return tree


def named(value: Any) -> str:
    """What is given as a loss or the like, in words that are the same where it is: its name, and settings of torch's.

    Nothing else of an object is asked: it may know a rank or a host.
    """
    value = _compiled_of(value)
    if issubclass(type(value), functools.partial):
        func, given = value.func, ""
        if str(getattr(func, "__module__", "")).startswith("torch."):
            given = str(sorted((name, each) for name, each in value.keywords.items() if type(each) in _TOLD))
        return f"a partial of {named(func)} {given}"
    if issubclass(type(value), _WITH_NAMES):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    kind = type(value)
    names = kind.__dict__.get("__constants__", ()) if str(kind.__module__).startswith("torch.nn.modules.") else ()
    settings = {name: each for name in names if type(each := vars(value).get(name)) in _TOLD}
    return f"{kind.__qualname__} {settings or ''}"


def _compiled_of(value: Any) -> Any:
    """What torch.compile was given, of what that has made: a rank may compile, and another one not."""
    kind = type(value)
    if str(kind.__module__).startswith("torch._dynamo") and issubclass(kind, nn.Module):
        return value._orig_mod
    return vars(value).get("_torchdynamo_orig_callable", value) if kind is types.FunctionType else value
