"""What a call changes of the lists, dicts and sets that it is given: the code around it may read that there.

    def forward(self, branches):                # as a stage of HRNet
        branches[0] = self.conv(branches[0])
        return self.fuse(branches)

A call that is captured has containers of its own, as one on another worker has. What it changes of them comes back
beside its result, and the capture puts it where the code around the call has it. A container stays one wherever it
stands: given twice, it is one for the call; returned, it is the one that was given.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


@dataclass(frozen=True)
class Slot:
    """The place of a value among constants: of the `index`-th tensor, size or whatever else they are filled with.

    Of a container, it stands where that stands once more (see `apart`).
    """

    kind: Literal["tensor", "size", "container", "parent", "target", "operand"]
    index: int

    @property
    def is_container(self) -> bool:
        """Whether it is that of a container."""
        return self.kind == "container"


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
    containers: bool = False  # any list, dict or set


class Arguments:
    """A call's arguments, as they are or as `once` gives them, with what their containers held to begin with."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, values = together((tuple(args), tuple(kwargs.values())))
        self.kwargs = dict(zip(kwargs, values, strict=True))
        held = {id(each): each for each in containers((*self.args, *values))}
        self._held = [(each, _entries(each)) for each in held.values()]

    @property
    def containers(self) -> list[Any]:
        """Those among them, each once, the outer ones first."""
        return [each for each, _ in self._held]

    def at(self, place: int | str) -> Any:
        """The argument by its position or its name."""
        return self.args[place] if isinstance(place, int) else self.kwargs[place]

    def beside(self, result: Any) -> Any:
        """What a call gives that was given these: its result, `Changed` where that is not all, or not once."""
        changed = {
            n: _changes(now, before)
            for n, (each, before) in enumerate(self._held)
            if [*(now := _entries(each))] != [*before] or not all(map(operator.is_, now.values(), before.values()))
        }
        found = Changed(result, changed)
        told = apart(found, self.containers)
        return told if changed or told is not found else result

    def changed_in(self, found: Any) -> list[Any]:
        """Those of these containers that a call has changed."""
        return [self.containers[n] for n in found.containers] if isinstance(found, Changed) else []

    def take(self, found: Any) -> Any:
        """Put into these containers what a call has left in its own, in the same places; gives its result."""
        if not isinstance(found, Changed):
            return found
        found = together(found, self.containers)
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
            elif isinstance(container, set):
                container.update(content.values())
            else:
                container.extend(content.values())
        return found.result


def once(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments, each container among them once, as `Arguments` puts them together again."""
    places, values = apart((tuple(args), tuple(kwargs.values())))
    return places, dict(zip(kwargs, values, strict=True))


def apart(tree: Any, known: Sequence[Any] = ()) -> Any:
    """A tree with a slot where one of the known containers stands, or one of the tree's own once more.

    They are numbered: those known, and then the tree's, outer ones first. Where there is none it is the tree itself.
    """
    numbers = {id(each): n for n, each in enumerate(known)}
    every = [id(each) for each in containers((tree,))]
    if len({*every}) == len(every) and numbers.keys().isdisjoint(every):
        return tree

    def visit(each: Any) -> Any:
        if _is_container(each):
            if id(each) in numbers:
                return Slot("container", numbers[id(each)])
            numbers[id(each)] = len(numbers)
        return _mapped(visit, each)

    return visit(tree)


def together(tree: Any, known: Sequence[Any] = ()) -> Any:
    """A tree of which `apart` has made this one, around these containers in the places of those known there."""
    if not any(map(_is_met, pytree.tree_leaves(tree))):
        return tree
    every = [*known]

    def visit(each: Any) -> Any:
        if _is_met(each):
            return every[each.index]
        if not _is_container(each):
            return _mapped(visit, each)
        place = len(every)
        every.append(None)
        every[place] = _mapped(visit, each)
        return every[place]

    return visit(tree)


def _is_met(leaf: Any) -> bool:
    return isinstance(leaf, Slot) and leaf.is_container


def _mapped(visit: Callable[[Any], Any], tree: Any) -> Any:
    """A tree with something else in the places of what stands directly in it."""
    if pytree.tree_is_leaf(tree):
        return tree
    inner, structure = pytree.tree_flatten(tree, is_leaf=lambda each: each is not tree)
    return pytree.tree_unflatten([*map(visit, inner)], structure)


def containers(values: Iterable[Any]) -> Iterator[Any]:
    """Those that can be changed, the outer ones first."""
    for each in values:
        if _is_container(each):
            yield each
        if isinstance(each, list | tuple | deque):
            yield from containers(each)
        elif isinstance(each, dict):
            yield from containers(each.values())
        elif has_fields(each):
            yield from containers(_entries(each).values())


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | deque | set) or has_fields(value)


def has_fields(value: Any) -> bool:
    """Whether it is a dataclass of its own kind, no dict as well."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | dict | Slot)


def fields_of(made: Any) -> dict[str, Any]:
    """What a dataclass holds by name, also in attributes that are no fields."""
    named = (each.name for each in dataclasses.fields(made))
    return {**{name: getattr(made, name) for name in named if hasattr(made, name)}, **getattr(made, "__dict__", {})}


def with_fields(kind: type, values: Iterable[Any], names: Iterable[str]) -> Any:
    """The dataclass of this kind that holds them."""
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # it may be frozen
    return made


def _entries(container: Any) -> dict[Any, Any]:
    if has_fields(container):
        return fields_of(container)
    if isinstance(container, set):  # in one order, whatever texts hash to
        return {each: each for each in sorted(container, key=repr)}
    return {**container} if isinstance(container, dict) else dict(enumerate(container))


def _changes(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, Any]]:
    order = {key: n for n, key in enumerate(before)}
    moved = {id(each): order[key] for key, each in before.items() if isinstance(each, _OBJECTS)}
    kept = {
        key: order[key] if key in before and before[key] is each else moved.get(id(each), -1)
        for key, each in now.items()
    }
    return kept, {key: each for key, each in now.items() if kept[key] < 0}


_OBJECTS = (torch.Tensor, list, dict, deque, set, tuple)
"""What counts as itself, wherever it stands; numbers and texts have no self of their own."""


def split(tree: Any) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """A tree's tensors, its symbolic sizes, and the tree with slots in their places."""
    tensors: list[torch.Tensor] = []
    sizes: list[Any] = []

    def slot(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return Slot("tensor", len(tensors) - 1)
        if isinstance(leaf, torch.SymInt):
            sizes.append(leaf)
            return Slot("size", len(sizes) - 1)
        return _own(leaf)

    return pytree.tree_map(slot, tree), tensors, sizes


def plain_leaves(template: Any) -> list[Any]:
    """The leaves of a template that are no slots."""
    return [leaf for leaf in pytree.tree_leaves(template) if not isinstance(leaf, Slot)]


def register_dataclasses(output: Any) -> None:
    """Let pytree see into plain dataclasses that a forward returns.

    One is put together without its constructor: what that computes has been computed. One that is a dict or a list,
    too, has what its constructor puts there.
    """
    while kinds := {type(each) for each in plain_leaves(output) if dataclasses.is_dataclass(each)}:
        for kind in kinds:
            if issubclass(kind, dict | list | tuple):
                pytree.register_dataclass(kind)
                continue
            pytree.register_pytree_node(
                kind,
                lambda made: ([*fields_of(made).values()], (*fields_of(made),)),
                partial(with_fields, kind),
                flatten_with_keys_fn=lambda made: (
                    [(pytree.GetAttrKey(name), each) for name, each in fields_of(made).items()], (*fields_of(made),)
                ),
            )  # fmt: skip


def fill(template: Any, **values: Sequence[Any]) -> Any:
    """A template with its slots filled, by their kinds; but those of containers, which `Arguments` puts together."""

    def filled(leaf: Any) -> Any:
        is_told = isinstance(leaf, Slot) and not leaf.is_container
        return values[leaf.kind][leaf.index] if is_told else _own(leaf)

    return pytree.tree_map(filled, template)


def _own(leaf: Any) -> Any:
    """A plain value; of a set, which code may change, a copy."""
    return copy.copy(leaf) if isinstance(leaf, set) else leaf
