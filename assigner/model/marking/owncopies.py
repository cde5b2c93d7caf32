"""Copies of modules, with what `copy.deepcopy` takes for atoms: functions, bound methods of C's, weak references.

    self.lin.register_forward_hook(count)      count closes over self: a deep copy's hook would count on in the original
    self.note = self.seen.append               the original's list
    self.lin.parent = weakref.ref(self)        the original itself

    self.part = self.table[1:3]                two arrays with one memory: deep copies have one each

Where such an atom leads to something that is copied, a new one takes its place that leads to the copy. All others stay
the objects that they are. `deepcopy` looks into its memo before it looks at an object's type: this memo makes the copy
of an atom when it is asked for it, so atoms in cycles find what has been copied of these so far.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
import weakref
from collections import defaultdict, deque
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from assigner.errors import UsageError
from assigner.model.deferred.contents import ATOMS, memory_of
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.ownership import STANDARD, is_users
from assigner.model.deferred.reach import MODULE, Names, Place, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from assigner.model.deferred.vocabulary import Vocabulary

_LEAVES = (*ATOMS, type, types.ModuleType, enum.Enum, Names)
_FROZEN = (tuple, frozenset)
_HOOKS = [name for name in STANDARD if "hook" in name]
_OF_C = (types.BuiltinMethodType, types.MethodWrapperType)
_UNCOPIED = (TypeError, PicklingError, RecursionError)

_Found = tuple[Place, Any]


def own_copy(model: nn.Module, name: str, known: Mapping[int, Any]) -> nn.Module:
    """A deep copy of a model, or of a part of it.

    Args:
        model: The model.
        name: Of the part; empty: the model itself.
        known: What stands for some objects in the copy, by their ids.

    Raises:
        UsageError: Python copies no object of a kind that it holds; or a function that it holds leads to another part
            of the model, or to the original, for what holds it has a way of its own to be copied.
    """
    module, place = model.get_submodule(name), Place(MODULE, name or type(model).__name__)
    atoms = _Atoms(place, module, model, known)
    copies = OwnCopies(known, atoms.chosen)
    try:
        with Memento(module.named_modules()).put_back():  # torch's LSTM sets itself up anew when it is copied
            made = copy.deepcopy(module, copies)
            for each in module.modules():
                if isinstance(other := copies.get(id(each)), nn.Module):
                    _give_hooks(each, other, copies)
    except _UNCOPIED as error:
        if (uncopied := _uncopied(name, module, known, atoms.chosen)) is None:
            raise
        raise UsageError(
            f"{uncopied} cannot be copied, and each partition has its own copy of its modules: {error}",
            hint="make it in forward, or keep it outside of the module, or give its class a __deepcopy__",
        ) from error
    for inner, value in _walk([(place, made)], set(), known):
        if id(value) in atoms.chosen:
            raise UsageError(
                f"{inner} ({type(value).__name__}) cannot be copied, and each partition has its own copy of its"
                " modules: the copy's would lead to the builder's objects",
                hint="make it a method of the module, or give it what it needs as arguments",
            )
    return made


def _give_hooks(module: nn.Module, other: nn.Module, copies: OwnCopies) -> None:
    """Have a module's copy the hooks that it has: a class with a way of its own to be copied may leave them out.

    So do graphs of torch.fx.
    """
    for name in _HOOKS:
        held, own = vars(module).get(name), vars(other).get(name)
        if isinstance(held, dict) and isinstance(own, dict) and len(own) != len(held):
            own.clear()
            own.update(copy.deepcopy(held, copies))
        elif own is None and held is not None:
            vars(other)[name] = copy.deepcopy(held, copies)


def copied_values(
    modules: Mapping[str, nn.Module], known: Mapping[int, Any], vocabulary: Vocabulary
) -> Iterator[tuple[Place, Any]]:
    """What deep copies of modules have copies of, each object once; also what torch keeps on a module.

    Args:
        modules: By name.
        known: What stands for some objects in the copies, by their ids.
        vocabulary: The names by which forwards read attributes: what has none of them is left out.
    """
    started = [(Place(MODULE, name or type(each).__name__), each) for name, each in modules.items()]
    for place, value in _walk(started, set(), known, vocabulary, stops=_is_own_copy):
        yield place, value
        if isinstance(value, nn.Module):
            for key in STANDARD:
                if isinstance(held := value.__dict__[key], dict):
                    yield place.hooks() if "hook" in key else place.attribute(key), held


def _is_own_copy(value: Any) -> bool:
    """Whether its class has a `__deepcopy__` that gives the object itself: all copies share it."""
    copier = getattr(type(value), "__deepcopy__", None)
    if copier is None or isinstance(value, nn.Module) or not is_users(type(value).__module__):
        return False
    try:
        return copier(value, {}) is value
    except _UNCOPIED:
        return False  # the partition that has it is refused when it is built


def _uncopied(name: str, module: nn.Module, known: Mapping[int, Any], atoms: Mapping[int, Any]) -> str | None:
    """The first attribute of a module's own, or of one within it, that cannot be copied, and its type, in words."""
    modules = {id(each): each for each in module.modules()}
    for inner, each in module.named_modules(prefix=name):
        for key, value in vars(each).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, OwnCopies({**known, **modules}, atoms))
            except _UNCOPIED:
                return f"attribute {key!r} of module {inner!r} ({type(value).__name__})"
    return None


class OwnCopies(dict[int, Any]):
    """A memo for `copy.deepcopy`: what stands for objects in the copy, by their ids; some atoms are copied for it."""

    def __init__(self, known: Mapping[int, Any], atoms: Mapping[int, Any]) -> None:
        super().__init__(known)
        self.atoms = atoms

    def get(self, key: int, default: Any = None) -> Any:
        """What stands for an object in the copy; of an atom, it is made now."""
        if key not in self and key in self.atoms:
            atom = self.atoms[key]
            made = _MAKERS[type(atom)](self, atom)
            self.setdefault(key, made)  # a function is there already, for what it closes over may lead to it
        return super().get(key, default)

    def _copied(self, value: Any) -> Any:
        return copy.deepcopy(value, self)

    def _function(self, atom: types.FunctionType) -> types.FunctionType:
        cells = atom.__closure__ or ()
        own = tuple(self.setdefault(id(cell), types.CellType()) for cell in cells)
        made = types.FunctionType(atom.__code__, atom.__globals__, closure=own or None)
        functools.update_wrapper(made, atom, updated=())
        del made.__wrapped__  # type: ignore[attr-defined]
        self[id(atom)] = made
        for cell, old in zip(own, cells, strict=True):
            if old != types.CellType() and cell == types.CellType():
                cell.cell_contents = self._copied(old.cell_contents)
        made.__defaults__, made.__kwdefaults__ = self._copied(atom.__defaults__), self._copied(atom.__kwdefaults__)
        made.__dict__.update(self._copied(atom.__dict__))
        return made

    def _method(self, atom: types.MethodType) -> types.MethodType:
        return types.MethodType(self._copied(atom.__func__), self._copied(atom.__self__))

    def _method_of_c(self, atom: types.BuiltinMethodType) -> Any:
        return getattr(self._copied(atom.__self__), atom.__name__)

    def _cached(self, atom: Any) -> Any:
        """An `lru_cache` of its own, empty as one is at first."""
        return functools.lru_cache(**atom.cache_parameters())(self._copied(atom.__wrapped__))

    def _view(self, atom: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """An array in the memory of the copy of another one."""
        whole = memory_of(atom)
        start = atom.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        made = np.ndarray(atom.shape, atom.dtype, self._copied(whole).ravel(order="K"), start, atom.strides)
        made.flags.writeable = atom.flags.writeable
        return made

    def _reference(self, atom: weakref.ref[Any]) -> weakref.ref[Any]:
        return type(atom)(self._copied(atom()), self._copied(atom.__callback__))


_MAKERS: dict[type, Callable[[OwnCopies, Any], Any]] = {
    types.FunctionType: OwnCopies._function,
    types.MethodType: OwnCopies._method,
    types.BuiltinMethodType: OwnCopies._method_of_c,
    functools._lru_cache_wrapper: OwnCopies._cached,
    weakref.ref: OwnCopies._reference,
    np.ndarray: OwnCopies._view,
}


def _is_atom(value: Any) -> bool:
    """Whether `deepcopy` takes it for one; of arrays, those that are views of others."""
    if type(value) is not np.ndarray:
        return type(value) in _MAKERS
    whole = memory_of(value)
    return whole is not value and type(whole) is np.ndarray and not whole.dtype.hasobject


class _Atoms:
    """Finds the atoms to copy.

    Attributes:
        chosen: By id, those that lead to something that is copied, or that is shared with such a one.
    """

    def __init__(self, place: Place, module: nn.Module, model: nn.Module, known: Mapping[int, Any]) -> None:
        self.chosen: dict[int, Any] = {}
        self._known, self._part = known, place
        self._names = {id(each): name for name, each in model.named_modules()}
        self._copied: set[int] = set()
        self._met: list[_Found] = []
        self._add([(place, module)])
        grows = True
        while grows:
            grows = False
            for inner, atom in [each for each in self._met if id(each[1]) not in self.chosen]:
                if self._leads_to_copied(inner, atom):
                    self.chosen[id(atom)] = atom
                    self._add(_parts_of(inner, atom))
                    grows = True

    def _add(self, started: Iterable[_Found]) -> None:
        """What is reached without atoms is copied."""
        for place, value in _walk(started, self._copied, self._known):
            if isinstance(value, np.ndarray) and _is_atom(value):
                self.chosen[id(value)] = value
            elif _is_atom(value):
                self._met.append((place, value))

    def _is_copied(self, value: Any) -> bool:
        if _is_atom(value):
            return id(value) in self.chosen
        is_other = id(value) in self._known and self._known[id(value)] is not value
        return (id(value) in self._copied or is_other) and not isinstance(value, _FROZEN)

    def _leads_to_copied(self, place: Place, atom: Any) -> bool:
        """By itself, or by other atoms.

        Raises:
            UsageError: it leads to another part of the model.
        """
        seen = set[int]()
        waiting, found = deque([(place, atom)]), False
        while waiting:
            inner, value = waiting.popleft()
            target = value() if isinstance(value, weakref.ref) else value  # it holds no copy: what does is met itself
            if isinstance(target, _LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            if self._is_copied(target):
                found = True
            elif isinstance(target, nn.Module) and id(target) in self._names:
                raise UsageError(
                    f"{place} ({type(atom).__name__}) leads to {self._names[id(target)] or 'the whole model'!r}, which"
                    f" is no part of {self._part.key!r}: on another worker it would be another one",
                    hint="give what it reads as an argument of the module's forward, or mark a larger module that"
                    " contains both",
                )
            elif id(value) not in self._known:
                waiting += _parts_of(inner, value)
        return found


def _walk(
    started: Iterable[_Found],
    seen: set[int],
    known: Mapping[int, Any],
    vocabulary: Vocabulary | None = None,
    *,
    stops: Callable[[Any], bool] = lambda _: False,
) -> Iterator[_Found]:
    """What a deep copy meets, each object once; it looks into no atom, and at nothing that has a place in its memo.

    It copies a bound method with its object. That of a module is an atom here: it may be of another part of the model.
    """
    waiting = deque(started)
    while waiting:
        place, value = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen or id(value) in known:
            continue
        seen.add(id(value))
        if stops(value):
            continue
        yield place, value
        is_atom = _is_atom(value)
        if not is_atom or (isinstance(value, types.MethodType) and not isinstance(value.__self__, nn.Module)):
            waiting += _parts_of(place, value, vocabulary)


def _parts_of(place: Place, value: Any, vocabulary: Vocabulary | None = None) -> list[_Found]:
    if isinstance(value, _OF_C):
        return [(place, value.__self__)]
    if isinstance(value, weakref.ref):
        return [(place, value.__callback__)]
    found = [*parts_of(place, value, vocabulary)]
    if isinstance(value, defaultdict):
        found.append((place.attribute("default_factory"), value.default_factory))
    return found
