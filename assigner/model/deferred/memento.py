"""The Python values of some modules as they are at one time: counters, lists that grow, numbers that forward sets.

What code can reach (`reach`) is kept by what Python can change of it: the attributes of modules and of the user's own
objects, the items of containers, the names that functions close over or bind in their file, the state of random
generators. All else (tensors, torch's and Python's own objects) is kept as the object that it is. How it is copied, and
put back, goes by the object's type:

    module, object   attributes, slots            list, dict, set, deque   items
    class            what it keeps for all        file                     some of the names at its top
    function         the cells of its closure     partial                  what it is called with

What lies in C `contents` has.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import types
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import _disable_current_modes

from assigner.model.deferred.codenames import filled_names, words_in
from assigner.model.deferred.contents import ATOMS, CONTENTS, IN_C, ITERATORS, Keeper, filling_of, keeper_of, memory_of
from assigner.model.deferred.ownership import LAST_COMPUTED, WITH_CODE, given_attributes, is_users, slot_names, slots_of
from assigner.model.deferred.reach import FILE, KEPT, MODULE, OUTER, SPACE, Names, Place, Top, reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from assigner.model.deferred.vocabulary import Vocabulary

_MOST_ELEMENTS = 10_000
_HOOK_DICTS = tuple(
    name for name, each in vars(nn.Module()).items()
    if isinstance(each, dict) and ("forward" in name or "backward" in name)
)  # fmt: skip

_Hooks = tuple[dict[int, Any], dict[int, Any] | None]
"""The hooks of one kind on a module, and those that were there; None: there were none."""


class StateChange(NamedTuple):
    """An entry that is not what it was; ABSENT: nothing was there, or is."""

    name: str  # where it stands, for people
    holder: Any  # what has it; of a name at the top of a file: all names there
    key: Any  # of a dict, a module, an object or a file: its entry; None: the holder as a whole
    before: Any
    now: Any
    is_beyond: bool  # a forward that runs again would not find it as it was


class Memento:
    """What modules hold now.

    Arguments are those of `reach`: modules by name, without their submodules, and others that run with them, as a loss.
    With a vocabulary it is to be compared, and cannot be put back.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        others: Iterable[Any] = (),
        *,
        beside: Iterable[Any] = (),
        backwards: bool = True,
        parameters: bool = False,
        top: Top = "followed",
        vocabulary: Vocabulary | None = None,
    ) -> None:
        started: dict[str, Any] = {}
        for each in others:
            name = type(each).__name__
            started[f"{name} {len(started) + 1}" if name in started else name] = each
        found = reach(
            started, modules,
            beside=beside, backwards=backwards, parameters=parameters, top=top, vocabulary=vocabulary,
        )  # fmt: skip
        self._keep(found, vocabulary, with_values=top == "whole")

    @classmethod
    def of(cls, found: Iterable[tuple[Place, Any]], vocabulary: Vocabulary) -> Memento:
        """What these objects hold now, each by itself; of modules what has one of these names."""
        made = cls(())
        made._keep(found, vocabulary, with_values=False)
        made._note_spaces()
        return made

    def _keep(self, found: Iterable[tuple[Place, Any]], vocabulary: Vocabulary | None, *, with_values: bool) -> None:
        self.tensors: list[torch.Tensor] = []  # but for those made in inference mode: torch counts no changes of these
        self._kept: list[_Kept] = []
        self._places: list[Place] = []  # of the tensors
        self._loose: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # tensor, part of it, its values
        self._hooks: list[_Hooks] = []
        for place, value in found:
            kind: type = type(value)
            if isinstance(value, nn.Module):
                self._hooks += [(held, held.copy() or None) for held in map(value.__dict__.__getitem__, _HOOK_DICTS)]
            own = keepers(kind)
            if vocabulary is not None and (copy := vocabulary.copier(value)) is not None:  # it is not put back
                own = (Keeper(copy, lambda *_: None), *(each for each in own if each is SLOTS))
            self._kept += [_Kept(keeper, value, keeper.copy(value), place) for keeper in own]
            if isinstance(value, nn.Module) and vocabulary is None:
                layers = value._modules
                self._kept.append(_Kept(_ENTRIES[dict], layers, dict(layers), Place(SPACE, None, place)))
            if isinstance(value, torch.Tensor) and not value.is_inference():
                self.tensors.append(value)
                self._places.append(place)
                if with_values and not value.is_meta and not isinstance(value, FakeTensor):
                    self._keep_tensor(value)
        self._versions = [each._version for each in self.tensors]

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.numel() <= _MOST_ELEMENTS:
            with _disable_current_modes():
                held = _each_once(tensor)
                self._loose.append((tensor, held, held.detach().clone()))

    def restore(self) -> None:
        """Put all values back as they were then; with `whole` files, those of small tensors that have some, too.

        A capture computes with these, as with a module's that is no buffer, and torch counts no change to them.
        """
        _put(self._kept)
        _put_hooks(self._hooks)
        with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():  # `.data` of originals counts
            for _, held, value in self._loose:
                held.data.copy_(value)

    def exchange(self, others: Mapping[int, torch.Tensor]) -> None:
        """Have other tensors in the places of some, whose ids these stand under."""
        for keeper, held, values, _ in self._kept if others else ():
            if (exchanged := _exchanged(values, others)) is not values:
                keeper.put(held, exchanged)

    @contextlib.contextmanager
    def exchanged(self, others: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """As `exchange` while the block runs; behind it the values are as they were then."""
        with self.put_back():
            self.exchange(others)
            yield

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The values as they were then while the block runs; afterwards those of before the block."""
        now = [each._replace(values=each.keeper.copy(each.held)) for each in self._kept]
        hooks = [(held, held.copy() or None) for held, _ in self._hooks]
        _put(self._kept)
        _put_hooks(self._hooks)
        try:
            yield
        finally:
            _put(now)
            _put_hooks(hooks)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Whatever the block changes, the values are as they were then behind it."""
        try:
            yield
        finally:
            self.restore()

    def has_changed(
        self,
        ignoring: Literal["nothing", "tensors", "values"] = "nothing",
        among: Sequence[_Kept] | None = None,
    ) -> bool:
        """Something is no more as it was then; tensors by torch's count of the changes to them.

        Without "tensors" neither their changes nor one in the place of another count; without "values" neither numbers
        and texts, as attributes and as items, nor changes within tensors.
        """
        if ignoring == "nothing" and self.moved():
            return True
        for keeper, held, values, _ in self._kept if among is None else among:
            now, then, made = keeper.copy(held), values, _made_anew(held)
            if made or ignoring != "nothing":
                now, then = _counting(now, made, ignoring), _counting(then, made, ignoring)
            if _differ(now, then):
                return True
        return False

    def moved(self) -> list[torch.Tensor]:
        """The tensors that are no more as they were then, by torch's count of the changes to them."""
        pairs = zip(self.tensors, self._versions, strict=True)
        return [each for each, version in pairs if each._version != version]

    def accept(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are as they should be now."""
        known = {id(each) for each in tensors}
        pairs = zip(self.tensors, self._versions, strict=True)
        self._versions = [each._version if id(each) in known else version for each, version in pairs]

    def is_settled(self) -> bool:
        """What `has_changed` says the other way round, for every step; of a memento that `of` has made.

        At once where all is the same objects under the same names; else what is not so is compared.
        """
        spaces, names, values, empty, rest = self._flat
        is_same = (
            not any(empty)
            and all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, spaces)), values))
            and all(map(operator.is_, itertools.chain.from_iterable(spaces), names))
            and sum(map(len, spaces)) == len(values)
        )
        others = (each for each, space, then in self._spaces if (space or then) and not is_as(space, then))
        touched = [] if is_same else [*others]
        return not self.has_changed(among=[*touched, *rest])

    def _note_spaces(self) -> None:
        """Modules' attributes and the dicts that are kept; what is in them; those that are empty; and all else."""
        in_dicts = [each for each in self._kept if isinstance(each.held, nn.Module | dict) and each.keeper is not SLOTS]
        every = [(each, vars(each.held) if isinstance(each.held, nn.Module) else each.held) for each in in_dicts]
        self._spaces = [(each, space, dict(dict.items(space))) for each, space in every]
        spaces, empty = ([space for _, space in every if bool(space) is full] for full in (True, False))
        names = [name for space in spaces for name in dict.keys(space)]
        values = [value for space in spaces for value in dict.values(space)]
        known = {id(each) for each in in_dicts}
        self._flat = spaces, names, values, empty, [each for each in self._kept if id(each) not in known]

    def changes(self) -> list[StateChange]:
        """What is not as it was then, entry by entry.

        Changes within tensors are none, but for those that classes and files keep: nobody puts these back.
        """
        found = list(itertools.chain.from_iterable(map(_changes, self._kept)))
        for tensor, version, place in zip(self.tensors, self._versions, self._places, strict=True):
            if tensor._version != version and place.origin != MODULE:
                found.append(StateChange(str(place), tensor, None, version, tensor._version, is_beyond=True))
        return found

    def left_outside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that were put since then where no module leads to, by name."""
        for keeper, held, values, place in self._kept:
            if place.origin == OUTER and isinstance(values, dict | tuple):
                then, now = (each.values() if isinstance(each, dict) else each for each in (values, keeper.copy(held)))
                known = {id(each) for each in then}
                name = str(place.holder if place.form == SPACE else place)
                yield from ((name, each) for each in now if isinstance(each, torch.Tensor) and id(each) not in known)

    def is_filled_by_readers(self, held: Any) -> bool:
        """Whether each function that names a dict at the top of a file sets items of it, too."""
        kept = [each.held for each in self._kept if isinstance(each.held, Names)]
        names = {name for each in kept for name in each.names if each.space.get(name) is held}
        readers = [(each.code, name) for each in kept if each.code for name in names & words_in(each.code)]
        return bool(readers) and all(name in filled_names(code) for code, name in readers)

    def beyond(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors whose values a forward that runs again would not find, by name: of files, and large ones."""
        kept = {id(tensor) for tensor, *_ in self._loose}
        for place, tensor in zip(self._places, self.tensors, strict=True):
            if place.origin in (FILE, OUTER) or (place.origin != MODULE and id(tensor) not in kept):
                yield str(place), tensor

    def holders(self) -> set[int]:
        """The ids of the objects whose entries are kept; of an array, that of the one whose memory it has."""
        return {id(memory_of(_holder(each.held))) for each in self._kept}


class _Kept(NamedTuple):
    """How something is put back, what it is, what was in it, and where it was found."""

    keeper: Keeper
    held: Any
    values: Any
    place: Place


def _changes(kept: _Kept) -> Iterator[StateChange]:
    """Of what no module leads to, numbers and texts alone: what else is left there may be a cache."""
    held, before, now = kept.held, kept.values, kept.keeper.copy(kept.held)
    holder, origin = _holder(held), kept.place.origin
    is_outer = origin == OUTER
    is_content = isinstance(held, IN_C)
    is_beyond = is_outer or isinstance(held, (Names, *ITERATORS))
    is_beyond = is_beyond or (is_content and origin == FILE)
    if not isinstance(before, dict):
        if _differ(now, before) and (is_content or not is_outer or _is_counted(now, before)):
            yield StateChange(str(kept.place), holder, None, before, now, is_beyond)
    elif now.keys() != before.keys() or not all(map(operator.is_, now.values(), before.values())):
        for key in {**before, **now}:
            one, other = before.get(key, ABSENT), now.get(key, ABSENT)
            if _is_another(other, one) and (not is_outer or (type(one) in ATOMS and type(other) in ATOMS)):
                place = kept.place.item(key) if isinstance(held, dict | type(os.environ)) else kept.place.attribute(key)
                yield StateChange(str(place), holder, key, one, other, is_beyond)


def _is_counted(now: Any, before: Any) -> bool:
    """Items of one list, or what a function closes over, are numbers and texts, and others than before.

    A list that grows may be a cache.
    """
    if not isinstance(before, tuple | list) or len(now) != len(before):
        return False
    return any(
        type(one) in ATOMS and type(other) in ATOMS and repr(one) != repr(other)
        for one, other in zip(now, before, strict=True)
    )


def _holder(held: Any) -> Any:
    return held.space if isinstance(held, Names) else held


def _differ(now: Any, then: Any) -> bool:
    if now is then:
        return False
    if isinstance(then, dict) and isinstance(now, dict):
        same = all(map(operator.is_, now.values(), then.values())) and now.keys() == then.keys()
        known = len(now) == len(then)
        return not same and (not known or any(_is_another(now.get(name, now), each) for name, each in then.items()))
    if isinstance(then, tuple | list) and isinstance(now, tuple | list):
        return len(now) != len(then) or any(map(_is_another, now, then))
    if isinstance(then, np.ndarray):
        return not (isinstance(now, np.ndarray) and now.dtype == then.dtype and _is_same_array(now, then))
    if isinstance(then, set):
        return bool(now != then)
    return repr(now) != repr(then)


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor; of one that is expanded, to which nobody can write as a whole, the part with each element once."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    expanded = [
        n for n, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if size > 1 > stride
    ]
    for dim in expanded:
        tensor = tensor.detach().narrow(dim, 0, 1)
    return tensor


def _is_same_array(now: np.ndarray[Any, Any], then: np.ndarray[Any, Any]) -> bool:
    if now.shape != then.shape:
        return False
    return bool(np.all((now == then) | ((now != now) & (then != then))))  # noqa: PLR0124 - NaN


def _counting(values: Any, made: Sequence[str], ignoring: str) -> Any:
    """Those that `has_changed` compares: not what is made anew, nor what it ignores; None stands for a tensor then."""
    if not isinstance(values, dict | tuple | list):
        return values
    named = values if isinstance(values, dict) else dict(enumerate(values))
    if ignoring == "tensors":
        named = {name: None if isinstance(each, torch.Tensor) else each for name, each in named.items()}
    elif ignoring == "values":
        named = {name: each for name, each in named.items() if type(each) not in ATOMS}
    named = {name: each for name, each in named.items() if name not in made}
    return named if isinstance(values, dict) else [*named.values()]


def _is_another(now: Any, then: Any) -> bool:
    """An item is no more the object that it was; numbers, and what consists of them, are told by their values."""
    if now is then:
        return False
    is_plain = type(then) in ATOMS or (isinstance(then, tuple) and all(type(each) in ATOMS for each in then))
    return not is_plain or repr(now) != repr(then)


def _exchanged(values: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """Tensors in a dict, a list or a tuple, and in tuples within it; the same object where nothing is exchanged."""

    def other(value: Any) -> Any:
        return _exchanged(value, others) if isinstance(value, tuple) else others.get(id(value), value)

    if isinstance(values, dict):
        made = {name: other(value) for name, value in values.items()}
        return values if all(map(operator.is_, made.values(), values.values())) else made
    if isinstance(values, tuple | list):
        items = [*map(other, values)]
        if not all(map(operator.is_, items, values)):
            return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)
    return values


def _put_hooks(kept: Iterable[_Hooks]) -> None:
    for held, then in kept:
        if (held or then) and [*held] != [*(then or ())]:
            held.clear()
            held.update(then or {})


def _put(kept: Iterable[_Kept]) -> None:
    for keeper, held, values, _ in kept:
        keeper.put(held, values)


def _made_anew(held: Any) -> list[str]:
    """The attributes of a module that torch's hooks make anew of parameters before each forward."""
    if not isinstance(held, nn.Module) or not held._forward_pre_hooks:
        return []
    hooks = held._forward_pre_hooks.values()
    named = [each.name for each in hooks if isinstance(each, WeightNorm)]
    return named + [each._tensor_name for each in hooks if isinstance(each, BasePruningMethod)]


@functools.cache
def keepers(kind: type) -> tuple[Keeper, ...]:
    """Of what can change in an object of some type; none: nothing that Python could change."""
    contents = keeper_of(kind, CONTENTS)
    if contents is not None:
        return (contents,)
    entries, slots = keeper_of(kind, _ENTRIES), SLOTS if slot_names(kind) else None
    return tuple(each for each in (entries, slots) if each is not None)


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

Entry = tuple[Any, Any, Any]
"""A dict and a key; or a class, a Python module or another object and the name of an attribute; and what is there."""


@contextlib.contextmanager
def placed(entries: Iterable[Entry]) -> Iterator[None]:
    """These stand in their places while the block runs, and what was there before behind it."""
    every = [*entries]
    before = found_at(every)
    try:
        put(every)
        yield
    finally:
        put(before)


def found_at(entries: Iterable[Entry]) -> list[Entry]:
    """What is there now in the places of some, to `put` it back."""
    return [
        (holder, key, (holder if isinstance(holder, dict) else vars(holder)).get(key, ABSENT))
        for holder, key, _ in entries
    ]


def put(entries: Iterable[Entry]) -> None:
    """Have it there; ABSENT: nothing."""
    for holder, key, value in entries:
        if isinstance(holder, dict):
            if value is ABSENT:
                holder.pop(key, None)
            else:
                holder[key] = value
        elif value is not ABSENT:
            setattr(holder, key, value)
        elif key in vars(holder):
            delattr(holder, key)
