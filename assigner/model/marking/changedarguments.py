"""What a call changes of the lists and dicts that it is given: the code around it may read that there.

    def forward(self, branches):                # as a stage of HRNet
        branches[0] = self.conv(branches[0])
        return self.fuse(branches)

A call that is captured has lists and dicts of its own, as one on another worker has. What it changes of them comes back
beside its result, and the capture puts it where the code around the call has it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class Changed(NamedTuple):
    """A call's result, and what it has left in those containers among its arguments that it has changed.

    Of each of these, by its number among all: for each entry where that stood before, by place, or -1; and those that
    stood nowhere. What is there as before is no result: it stays the object that the code around the call has.
    """

    result: Any
    containers: dict[int, tuple[dict[Any, int], dict[Any, Any]]]


class InputWrites(NamedTuple):
    """What a forward changes of the model's inputs."""

    tensors: frozenset[int] = frozenset()  # in place, by their numbers among the flattened inputs
    containers: bool = False  # any list or dict


class Arguments:
    """A call's arguments, with what their containers held to begin with."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self._held = [(each, _entries(each)) for each in containers((*args, *kwargs.values()))]

    def at(self, place: int | str) -> Any:
        """The argument by its position or its name."""
        return self.args[place] if isinstance(place, int) else self.kwargs[place]

    def beside(self, result: Any) -> Any:
        """What a call gives that was given these: its result, `Changed` where it has changed a container."""
        changed = {
            n: _changes(now, before)
            for n, (each, before) in enumerate(self._held)
            if [*(now := _entries(each))] != [*before] or not all(map(operator.is_, now.values(), before.values()))
        }
        return Changed(result, changed) if changed else result

    def take(self, found: Any) -> Any:
        """Put into these containers what a call has left in its own, in the same places; gives its result."""
        if not isinstance(found, Changed):
            return found
        for n, (kept, new) in found.containers.items():
            container, before = self._held[n]
            own = [*before.values()]
            content = {key: own[place] if place >= 0 else new[key] for key, place in kept.items()}
            if has_fields(container):
                for key, each in content.items():
                    setattr(container, key, each)
                continue
            container.clear()
            if isinstance(container, dict):
                for key, each in content.items():  # a ModelOutput has no `update`
                    container[key] = each
            else:
                container.extend(content.values())
        return found.result


def containers(values: Iterable[Any]) -> Iterator[Any]:
    """Those that can be changed, the outer ones first."""
    for each in values:
        if isinstance(each, list | dict | deque) or has_fields(each):
            yield each
        if isinstance(each, list | tuple | deque):
            yield from containers(each)
        elif isinstance(each, dict):
            yield from containers(each.values())
        elif has_fields(each):
            yield from containers(_entries(each).values())


def has_fields(value: Any) -> bool:
    """Whether it is a dataclass of its own kind, no dict as well."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | dict)


def _entries(container: Any) -> dict[Any, Any]:
    if has_fields(container):
        return {each.name: getattr(container, each.name) for each in dataclasses.fields(container)}
    return {**container} if isinstance(container, dict) else dict(enumerate(container))


def _changes(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, Any]]:
    order = {key: n for n, key in enumerate(before)}
    moved = {id(each): order[key] for key, each in before.items() if isinstance(each, _OBJECTS)}
    kept = {
        key: order[key] if key in before and before[key] is each else moved.get(id(each), -1)
        for key, each in now.items()
    }
    return kept, {key: each for key, each in now.items() if kept[key] < 0}


_OBJECTS = (torch.Tensor, list, dict, deque, tuple)
"""What counts as itself, wherever it stands; numbers and texts have no self of their own."""
