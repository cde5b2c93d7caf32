"""Calls whose results are kept for the whole run of the tests.

functools.cache would not do: in a capture it is empty, for functions in the files of the model's classes
(`clear_caches` in assigner/model/deferred/caches.py), and most workloads stand in one file with their models.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields, is_dataclass
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Given = ParamSpec("Given")
Made = TypeVar("Made")


def kept(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """A function that is called once for each set of arguments, defaults among them.

    Two functions are one argument where they have the same code and the same values around it, as those that a test
    makes in each of its cases: what is captured of one is that of the other.
    """
    made: dict[Hashable, Made] = {}
    signature = inspect.signature(make)

    @functools.wraps(make)
    def once(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        key = _form((given.args, *sorted(given.kwargs.items())))
        if key not in made:
            made[key] = make(*args, **kwargs)
        return made[key]

    return once


class _Itself:
    """A value that equals nothing but itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _form(value: Any, within: tuple[int, ...] = ()) -> Hashable:
    """What stands for a value in a key: of what can change, the object itself."""
    if id(value) in within:  # a function that calls itself
        return "around it"
    parts = _parts(value)
    if parts is not None:
        return type(value), *(_form(each, (*within, id(value))) for each in parts)
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return type(value), value


def _parts(value: Any) -> tuple[Any, ...] | None:
    """What a function, a part of one, a tuple or a frozen dataclass is made of; None: it is nothing of these."""
    if isinstance(value, FunctionType):
        around, named = map(_held, value.__closure__ or ()), sorted((value.__kwdefaults__ or {}).items())
        return value.__module__, value.__code__, *around, value.__defaults__, *named
    if isinstance(value, functools.partial):
        return value.func, value.args, *sorted(value.keywords.items())
    if is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen:
        return tuple(getattr(value, each.name) for each in fields(value) if each.compare)
    return value if isinstance(value, tuple) else None


def _held(cell: CellType) -> Any:
    """What is in it; it itself where that is nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell
