"""What code of the user's own a model and the functions beside it run: ranks compare it, for each has its own file.

It is told by its instructions, constants and names, not by its text: comments and the places of files may differ. Two
releases of Python make unlike instructions of one text, so nothing can be told between these.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import nn

from assigner.model.deferred.origins import digest
from assigner.model.deferred.ownership import attributes_of, is_installed, is_users
from assigner.model.deferred.reach import METHODS, reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def own_code(functions: Mapping[str, Any], model: nn.Module) -> dict[str, list[int]]:
    """What each function, method and class is that they run, as far as it is of the user's own files.

    Args:
        functions: By name, as the loss; of an object what its class has. What a partial or one of torch's modules is
            given counts, too.
        model: Whose forwards run.

    Returns:
        By qualified name, numbers of 48 bits, in order: one for each of that name.
    """
    found: dict[str, set[int]] = defaultdict(set)
    reached = (value for _, value in reach(functions, model.named_modules(), top="read"))
    for name, told in itertools.chain(*map(_told, reached), *map(_of_modules, functions.values())):
        found[name].add(digest(told))
    return {name: sorted(numbers) for name, numbers in sorted(found.items())}


def python_release() -> int:
    """What has made instructions of text: a number that is the same where those of one text are."""
    return digest([sys.implementation.name, str(sys.version_info[:2]), str(sys.flags.optimize)])


def _told(value: Any) -> Iterator[tuple[str, Iterator[str]]]:
    if isinstance(value, types.FunctionType):
        if _is_own(value.__module__):
            yield value.__qualname__, _of_function(value)
    elif isinstance(value, type):
        if _is_own(value.__module__):
            for each in vars(value).values():
                for inner in METHODS.get(type(each), lambda each: (each,))(each):
                    if isinstance(inner, types.FunctionType):
                        yield inner.__qualname__, _of_function(inner)
    elif isinstance(value, functools.partial):
        given = [*map(repr, filter(_is_plain, value.args))]
        given += [f"{name}={each!r}" for name, each in sorted(value.keywords.items()) if _is_plain(each)]
        yield f"a partial of {getattr(value.func, '__qualname__', type(value.func).__name__)}", iter(given)


def _of_modules(value: Any) -> Iterator[tuple[str, Iterator[str]]]:
    """What torch's modules of a loss were made with, as CrossEntropyLoss(label_smoothing=0.1)."""
    for each in value.modules() if isinstance(value, nn.Module) else ():
        if not is_users(type(each).__module__):
            given = attributes_of(each, plain=True).items()
            yield type(each).__name__, (f"{name}={held!r}" for name, held in sorted(given) if _is_plain(held))


def _is_own(module: Any) -> bool:
    return isinstance(module, str) and is_users(module) and not is_installed(module)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _of_function(function: types.FunctionType) -> Iterator[str]:
    """Its code, and its defaults that are plain."""
    yield from _of_code(function.__code__)
    yield from (repr(each) for each in function.__defaults__ or () if _is_plain(each))
    yield from (f"{name}={each!r}" for name, each in sorted((function.__kwdefaults__ or {}).items()) if _is_plain(each))


def _of_code(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount, code.co_flags))
    yield from _of_constants(code.co_consts)


def _of_constants(constants: Iterable[Any]) -> Iterator[str]:
    for each in constants:
        if isinstance(each, types.CodeType):
            yield from _of_code(each)
        elif isinstance(each, tuple):
            yield from _of_constants(each)
        else:  # a set has another order in each process
            yield str(sorted(map(repr, each))) if isinstance(each, frozenset) else repr(each)
