"""How what Python can change of an object is copied, and put back, by the object's type.

    module, object   attributes, slots            list, dict, set, deque   items
    class            what it keeps for all        file                     some of the names at its top
    function         the cells of its closure     partial                  what it is called with

Of all else nothing is kept but what lies in C (`contents`).
"""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

from torch import nn

from assigner.model.deferred.contents import CONTENTS, Keeper, filling_of, keeper_of
from assigner.model.deferred.ownership import (
    LAST_COMPUTED,
    WITH_CODE,
    given_attributes,
    is_users,
    slot_names,
    slots_of,
)
from assigner.model.deferred.reach import KEPT, Names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from assigner.model.deferred.vocabulary import Vocabulary


@functools.cache
def keepers(kind: type) -> tuple[Keeper, ...]:
    """Of what can change in an object of some type; none: nothing that Python could change."""
    contents = keeper_of(kind, CONTENTS)
    if contents is not None:
        return (contents,)
    entries, slots = keeper_of(kind, _ENTRIES), SLOTS if slot_names(kind) else None
    return tuple(each for each in (entries, slots) if each is not None)


def named_keepers(value: Any, vocabulary: Vocabulary) -> tuple[Keeper, ...]:
    """How that is copied which code with some names can read; it is not put back."""
    kind: Any = type(value)
    copy, kept = vocabulary.copier(value), keepers(kind)
    return kept if copy is None else (Keeper(copy, lambda *_: None), *(each for each in kept if each is SLOTS))


def is_as(space: dict[Any, Any], values: dict[Any, Any]) -> bool:
    """Whether the same objects are under the same names, in the same order."""
    if len(space) != len(values) or not all(map(operator.is_, dict.values(space), values.values())):
        return False
    return [*dict.keys(space)] == [*values]


def _put_space(space: dict[Any, Any], values: dict[Any, Any]) -> None:
    """Without what a class of the user's does when items are set."""
    if not is_as(space, values):
        dict.clear(space)
        dict.update(space, values)


def _put_ordered(held: OrderedDict[Any, Any], values: dict[Any, Any]) -> None:
    OrderedDict.clear(held)  # its order is not that of the dict below it
    for name, value in values.items():
        OrderedDict.__setitem__(held, name, value)


def _put_deque(held: deque[Any], values: Iterable[Any]) -> None:
    deque.clear(held)
    deque.extend(held, values)


def _put_set(held: set[Any], values: set[Any]) -> None:
    set.clear(held)
    set.update(held, values)


def _copy_names(held: Names) -> dict[str, Any]:
    return {name: held.space[name] for name in held.names if name in held.space}


def _put_names(held: Names, values: dict[str, Any]) -> None:
    for name in held.names:
        if name not in values:
            held.space.pop(name, None)
        elif held.space.get(name, ABSENT) is not values[name]:
            held.space[name] = values[name]


def _put_given(held: Any, values: dict[str, Any]) -> None:
    """What lazy properties have made of other values goes, and what a transform has computed last."""
    space = vars(held)
    if not is_as(given_attributes(held), values):
        fresh = {LAST_COMPUTED: (None, None)} if LAST_COMPUTED in space else {}
        space.clear()
        space.update(values | fresh)


def _put_slots(held: Any, values: dict[str, Any]) -> None:
    kind: type = type(held)
    for name in slot_names(kind):
        if name in values:
            object.__setattr__(held, name, values[name])
        elif hasattr(held, name):
            object.__delattr__(held, name)


def _put_cell(cell: types.CellType, values: list[Any]) -> None:
    if values:
        cell.cell_contents = values[0]
    elif cell != types.CellType():
        del cell.cell_contents


def _copy_partial(held: functools.partial[Any]) -> dict[str, Any]:
    """What it is called with by place; what it has by name is a dict that is kept by itself."""
    return {"args": held.args}


def _put_partial(held: functools.partial[Any], values: dict[str, Any]) -> None:
    if held.args is not values["args"]:
        held.__setstate__((held.func, values["args"], held.keywords, held.__dict__))  # type: ignore[attr-defined]


def _copy_class(kind: type) -> dict[str, Any]:
    """What a class of the user's keeps for all of its objects: not its methods."""
    if not is_users(kind.__module__):
        return {}
    return {name: value for name, value in vars(kind).items() if isinstance(value, KEPT) and not name.startswith("__")}


def _put_class(kind: type, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if vars(kind).get(name, ABSENT) is not value:
            setattr(kind, name, value)


ABSENT = object()
"""In the place of a value: there is none."""
SLOTS = Keeper(slots_of, _put_slots)
"""Of what an object has places for, without a dictionary."""
_ENTRIES = {
    nn.Module: Keeper(lambda held: held.__dict__.copy(), lambda held, values: _put_space(held.__dict__, values)),
    type: Keeper(_copy_class, _put_class),
    functools.partial: Keeper(_copy_partial, _put_partial),
    types.CellType: Keeper(filling_of, _put_cell),
    **dict.fromkeys(WITH_CODE, Keeper(given_attributes, _put_given)),
    Names: Keeper(_copy_names, _put_names),
    OrderedDict: Keeper(dict, _put_ordered),
    dict: Keeper(dict, _put_space),
    set: Keeper(set, _put_set),
    deque: Keeper(tuple, _put_deque),
    list: Keeper(tuple, lambda held, values: list.__setitem__(held, slice(None), values)),
    bytearray: Keeper(bytes, lambda held, values: bytearray.__setitem__(held, slice(None), values)),
}
