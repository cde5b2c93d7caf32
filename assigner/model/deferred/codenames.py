"""The names in the code of functions: of their files, of attributes, and in texts that may name one."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import itertools
import re
import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BY_TEXT = {"getattr", "hasattr", "setattr", "delattr"}
_BY_ANY = {
    "__dict__", "__getattribute__", "__import__", "attrgetter", "dir", "eval", "exec", "getattr_static", "getmembers",
    "globals", "import_module", "locals", "methodcaller", "vars",
}  # fmt: skip


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside of it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from nested(each)


def _names_in(code: types.CodeType, operations: tuple[str, ...]) -> tuple[str, ...]:
    every = itertools.chain.from_iterable(map(dis.get_instructions, nested(code)))
    return tuple(dict.fromkeys(each.argval for each in every if each.opname in operations))


@functools.cache
def written_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of its file that a function's code binds anew (`global`), or one inside it."""
    return _names_in(code, ("STORE_GLOBAL", "DELETE_GLOBAL"))


@functools.cache
def read_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of its file, or of Python's own, that a function's code reads, or one inside it."""
    return _names_in(code, ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))


@functools.cache
def filled_names(code: types.CodeType) -> frozenset[str]:
    """The names of its file in whose objects a function's code sets items, as `KNOWN[type(x)] = made`."""
    found = set[str]()
    for each in nested(code):
        steps = [*dis.get_instructions(each)]
        for place, step in enumerate(steps):
            ends = (later.opname for later in steps[place + 1 :] if later.opname.startswith(_USING))
            if step.opname == "LOAD_GLOBAL" and next(ends, "") == "STORE_SUBSCR":
                found.add(step.argval)
    return frozenset(found)


_USING = ("STORE", "BINARY", "CONTAINS", "COMPARE", "IS_OP", "POP", "RETURN", "LOAD_ATTR", "LOAD_METHOD", "DELETE")


@functools.cache
def _imported_names(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """The Python modules that a function's code imports, or one inside it, and how many dots are before each."""
    found = list[tuple[str, int]]()
    for each in nested(code):
        steps = [*dis.get_instructions(each)]
        places = [place for place, step in enumerate(steps) if step.opname == "IMPORT_NAME"]
        loads = [[step.argval for step in steps[:place] if step.opname.startswith("LOAD_")][-2:] for place in places]
        found += [(steps[place].argval, dots) for place, (dots, _) in zip(places, loads, strict=True)]
    return tuple(dict.fromkeys(found))


def imported_modules(function: types.FunctionType) -> list[types.ModuleType]:
    """The Python modules that a function's code imports, or one inside it, as far as they are loaded."""
    package = str(function.__globals__.get("__package__") or "")
    names = list[str]()
    for name, dots in _imported_names(function.__code__):
        with contextlib.suppress(ImportError):  # beyond its package: the import itself would fail
            names.append(importlib.util.resolve_name("." * dots + name, package))
    return [each for each in map(sys.modules.get, names) if each is not None]


@functools.cache
def words_in(code: types.CodeType) -> frozenset[str]:
    """The names that a function's code has, or one inside it, and those in its texts."""
    found = set[str]()
    for each in nested(code):
        found.update(each.co_names, *map(words_of, each.co_consts))
    return frozenset(found)


def asks_objects(function: types.FunctionType, name: str) -> bool:
    """Whether a function's code may ask an object for an attribute of this name, and not only a Python module.

    `x.grad` does, and so may `getattr(x, "grad")`; `torch.autograd.grad(y, x)` does not.
    """
    code = function.__code__
    return name in words_in(code) and any(_asks(each, name, function) for each in nested(code))


def _asks(code: types.CodeType, name: str, function: types.FunctionType) -> bool:
    if any(name in words_of(each) for each in code.co_consts):
        return True
    steps = [each for each in dis.get_instructions(code) if each.opname not in _IDLE]
    places = [place for place, each in enumerate(steps) if each.argval == name and "_ATTR" in each.opname]
    places += [place for place, each in enumerate(steps) if each.argval == name and each.opname == "LOAD_METHOD"]
    return not all(isinstance(_loaded(steps[:place], function), types.ModuleType) for place in places)


def _loaded(steps: Sequence[dis.Instruction], function: types.FunctionType) -> object:
    """What these steps load last, if it is one of the file's names, or is in a module that they have loaded so."""
    *before, last = steps
    if last.opname == "LOAD_GLOBAL":
        return function.__globals__.get(last.argval)
    of = _loaded(before, function) if last.opname == "LOAD_ATTR" and before else None
    return vars(of).get(last.argval) if isinstance(of, types.ModuleType) else None


def words_of(text: object) -> set[str]:
    """The names in a text that may be `attrgetter`'s or `format`'s, or in a tuple of texts; prose has none."""
    if isinstance(text, tuple | frozenset):  # as `case Point(x=0)` has
        return set().union(*map(words_of, text))
    is_path = isinstance(text, str) and ("{" in text or re.fullmatch(r"[\w.]+", text))
    return set(re.findall(r"\w+", text)) if is_path and isinstance(text, str) else set()


@functools.cache
def makes_names(code: types.CodeType) -> bool:
    """Whether a function's code, or one inside it, may reach an attribute whose name it has not.

    `getattr(self.part, "scale", 1)` names what it reads, `getattr(self, name)` does not.
    """
    return any(map(_makes_names, nested(code)))


def _makes_names(code: types.CodeType) -> bool:
    names = set(code.co_names)
    if not names.isdisjoint(_BY_ANY) or {"sys", "modules"} <= names:
        return True
    if "__init__" in names and code.co_name != "__init__":
        return True
    steps = [each for each in dis.get_instructions(code) if each.opname not in _IDLE]
    return any(
        each.argval in _BY_TEXT and "CONST" not in each.opname and not _is_told(steps[place:])
        for place, each in enumerate(steps)
    )


def _is_told(steps: Sequence[dis.Instruction]) -> bool:
    """Whether these load `getattr`, a name or an attribute of one, and a text; then at most a default is loaded."""
    loads = [*itertools.takewhile(lambda each: each.opname in _LOADS, steps)]
    given = [place for place, each in enumerate(loads) if each.opname != "LOAD_ATTR"]
    if not loads or loads[0].opname != "LOAD_GLOBAL" or not 3 <= len(given) <= 4:
        return False
    texts = [type(loads[place].argval) is str and loads[place].opname == "LOAD_CONST" for place in given]
    is_whole = given[2] + 1 in (len(loads), *given)  # no attribute of the text
    return texts[1:3] == [False, True] and is_whole and steps[len(loads)].opname in ("PRECALL", "CALL")


_IDLE = ("PUSH_NULL", "NOP", "EXTENDED_ARG")
_LOADS = frozenset(
    ("LOAD_GLOBAL", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_ATTR")
)
