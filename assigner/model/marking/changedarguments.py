"""What a call changes of the lists and dicts that it is given: the code around it may read that there.

    def forward(self, branches):                # as a stage of HRNet
        branches[0] = self.conv(branches[0])
        return self.fuse(branches)

A call that is captured has lists and dicts of its own, as one on another worker has. What it changes of them comes back
beside its result, and the capture puts it where the code around the call has it.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class Changed(NamedTuple):
    """A call's result, and what it has left in those containers among its arguments that it has changed."""

    result: Any
    containers: dict[int, Any]  # by their numbers among all of them


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
            n: {**each} if isinstance(each, dict) else [*each]
            for n, (each, before) in enumerate(self._held)
            if len(now := _entries(each)) != len(before) or not all(map(operator.is_, now, before))
        }
        return Changed(result, changed) if changed else result

    def take(self, found: Any) -> Any:
        """Put into these containers what a call has left in its own, in the same places; gives its result."""
        if not isinstance(found, Changed):
            return found
        for n, content in found.containers.items():
            container = self._held[n][0]
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(content)
        return found.result


def containers(values: Iterable[Any]) -> Iterator[Any]:
    """Those that can be changed, the outer ones first."""
    for each in values:
        if isinstance(each, list | dict | deque):
            yield each
        if isinstance(each, list | tuple | deque):
            yield from containers(each)
        elif isinstance(each, dict):
            yield from containers(each.values())


def _entries(container: Any) -> list[Any]:
    return [*itertools.chain.from_iterable(container.items())] if isinstance(container, dict) else [*container]
