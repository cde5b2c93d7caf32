"""The plain values that a loss can read: names of its file, its closure, its attributes, and what these hold.

Every rank has them, and some ranks alone call the loss. So two kinds of change are told apart by when they come:

    rank 0    step ----------> ALPHA = 0.5 ----> step       by the script, between steps: the same on all ranks
    rank 1    step, calls += 1 ----------------> step       by the loss, within a step: its memory, on this rank alone

Only changes are held against each other: what is another value on each rank from the start, as a rank's number, may be
so for good.
"""

from __future__ import annotations

import functools
import types
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any

from torch import nn

from assigner.model.deferred.memento import (
    ATOMS,
    HOOKS,
    OPEN,
    STANDARD,
    is_installed,
    is_users,
    read_globals,
    slots_of,
    users_classes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from assigner.model.workload import Workload

_MOST = 10_000  # values, and items of a container
_SHOWN = 2  # changes
_LETTERS = 20  # of a value
_ABSENT = "nothing"


class LossValues:
    """What the loss and the metrics of a workload can read, held against what that was before.

    Args:
        workload: The loss, and metrics.

    Attributes:
        remembers: They have changed something themselves.
    """

    def __init__(self, workload: Workload) -> None:
        self._called = {"loss": workload.loss, **(workload.metrics or {})}
        self._first = self._last = plain_values(self._called)
        self._told: dict[str, Any] = {}
        self.remembers = False

    def begin(self) -> str:
        """A step or an evaluation comes next: what the script has changed so far, in words; empty: nothing."""
        now = plain_values(self._called)
        if now != self._last:
            for name in sorted(now.keys() | self._last.keys()):
                value = now.get(name, _ABSENT)
                if value != self._last.get(name, _ABSENT):
                    self._told[name] = value
                if name in self._told and self._told[name] == self._first.get(name, _ABSENT):
                    del self._told[name]
            self._last = now
        if not self._told:
            return ""
        told = sorted(self._told.items())
        shown = ", ".join(f"{name} = {str(value)[:_LETTERS]}" for name, value in told[:_SHOWN])
        return f" and a loss that reads {shown} (values {zlib.crc32(repr(told).encode()):08x})"

    def end(self) -> None:
        """It is done."""
        now = plain_values(self._called)
        if now != self._last:
            self.remembers, self._last = True, now


def plain_values(called: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and texts that functions or objects can read when they are called, by the names of their places."""
    found: dict[str, Any] = {}
    known: set[int] = set()
    waiting = deque(called.items())
    while waiting and len(found) < _MOST:
        name, value = waiting.popleft()
        if type(value) in ATOMS:
            found[name] = value
        elif id(value) not in known:
            known.add(id(value))
            waiting.extend(_parts(name, value))
    return found


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    kind: type = type(value)
    if isinstance(value, dict | list | tuple | deque):
        items = dict.items(value) if isinstance(value, dict) else enumerate(value)
        if len(value) <= _MOST:
            yield from ((f"{name}[{key!r}]", each) for key, each in items)
    elif isinstance(value, set | frozenset):
        yield name, str(sorted(map(repr, value)))
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(name, value)
    elif isinstance(value, types.MethodType):
        yield from ((name, value.__self__), (name, value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((name, value.func), (f"{name}.args", value.args), (f"{name}.keywords", value.keywords))
    elif isinstance(value, type):
        yield from _parts_of_class(value)
    elif isinstance(value, nn.Module):
        if is_users(kind.__module__):
            yield from ((f"{name}.{key}", each) for key, each in vars(value).items() if key not in STANDARD)
        yield from ((f"a hook of {name}", hook) for key in HOOKS for hook in vars(value)[key].values())
        yield from ((f"{name}.{key}", each) for key, each in value._modules.items())
        yield from _parts_of_class(kind)
    elif not isinstance(value, types.ModuleType) and (is_users(kind.__module__) or isinstance(value, OPEN)):
        space = getattr(value, "__dict__", None)
        every = {**(space if type(space) is dict else {}), **slots_of(value)}
        yield from ((f"{name}.{key}", each) for key, each in every.items())
        yield from _parts_of_class(kind)


def _parts_of_function(name: str, value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if not is_users(value.__module__):
        return
    for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield key, cell.cell_contents
    yield from ((f"{name}()[{n}]", each) for n, each in enumerate(value.__defaults__ or ()))
    yield from ((f"{name}()[{key!r}]", each) for key, each in (value.__kwdefaults__ or {}).items())
    yield from ((f"{name}.{key}", each) for key, each in value.__dict__.items())
    if not is_installed(value.__module__):
        names = value.__globals__
        yield from ((key, names[key]) for key in read_globals(value.__code__) if key in names)


def _parts_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """What its methods read, and its numbers and texts."""
    for each in users_classes(kind):
        for key, value in list(vars(each).items()):
            is_read = isinstance(value, types.FunctionType) and not is_installed(each.__module__)
            if is_read or (type(value) in ATOMS and not key.startswith("__")):
                yield f"{each.__name__}.{key}", value
