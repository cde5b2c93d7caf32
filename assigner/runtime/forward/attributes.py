"""Attributes that forwards have changed on a partition's modules: counters, lists, a tensor kept for the next time.

A partition that moves is built anew, on its own worker too, as the builder made it; what has changed since goes along:

    self.count += 1               numbers, texts, tensors, lists and dicts of these     go to any worker
    self.clock = Clock()          another object                                        stays on its worker
    del self.scale, self.act = nn.ReLU(), self.handle.remove(), self.forward = self.late      are refused

Modules are copies of the builder's, and what they hold is told from that by its value, as deep copies are.
"""

from __future__ import annotations

import functools
import operator
import pickle
import types
import weakref
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assigner.errors import UsageError
from assigner.model.deferred.contents import ATOMS, CONTENTS, filling_of, keeper_of
from assigner.model.deferred.ownership import (
    HOOKS,
    OPEN,
    STANDARD,
    WITH_CODE,
    attributes_of,
    given_attributes,
    is_users,
    slots_of,
)
from assigner.model.deferred.reach import reach
from assigner.model.marking.partitionmodule import PartitionModule, copied_module
from assigner.model.plainvalues import to_json
from assigner.runtime.forward.heldtensors import has_values_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from assigner.model.deferred import DeferredModel


def changed_attributes(module: nn.Module, deferred: DeferredModel) -> dict[str, Any]:
    """The attributes of a partition's modules that are not what the builder made them, by their names in the model."""
    found: dict[str, Any] = {}
    likeness = _Likeness(module, deferred)
    for path, each, built in _copies(module, deferred):
        then = built.__dict__
        for name, value in each.__dict__.items():
            is_pipelines = name == "forward" and str(getattr(value, "__module__", "")).startswith("assigner.")
            if name in STANDARD or is_pipelines:  # of a BatchNorm (`batchnorm`)
                continue
            if name in then and not deferred.vocabulary.has_attribute(type(each), name):
                continue  # the script may have set the builder's
            if name in then and likeness.is_same(value, then[name]):
                continue
            if name not in then or _can_go(value) or not likeness.is_same(value, then[name], by_values=True):
                found[f"{path}.{name}"] = value
    return found


def _can_go(value: Any) -> bool:
    try:
        return isinstance(value, torch.Tensor) or to_json(value, "") is not None
    except UsageError:
        return False


def check_rebuilt(module: PartitionModule, called: Sequence[str], deferred: DeferredModel) -> None:
    """Refuse what forwards have changed on a partition's modules where one that is built anew could not get it.

    An attribute is gone, submodules or hooks are others, or a function leads to modules themselves. `called` are the
    names of those of its modules that its code calls.
    """
    for change in _unlike(module, called, deferred):
        raise UsageError(
            f"forward has {change}: under the new plan the module is built anew as the builder made it, without that",
            hint="have forward keep a number or a flag, and decide by it; or go on without a move",
        )


def _unlike(module: PartitionModule, called: Sequence[str], deferred: DeferredModel) -> Iterator[str]:
    likeness, modules = _Likeness(module, deferred), {id(each) for each in module.modules()}
    for path, each, built in _copies(module, deferred):
        seen = deferred.vocabulary.copier(each)
        gone = set() if seen is None else seen(built).keys() - each.__dict__.keys()
        if gone and not _copies_all(type(each)):
            gone &= _copied_anew(path, called, deferred).__dict__.keys()
        if gone:
            yield f"deleted {path}.{min(gone)}"
        now, then = each._modules, built._modules
        for name in {**then, **now}:
            if now.get(name).__class__ is not then.get(name).__class__ or (name in now) != (name in then):
                yield f"put another module in the place of {path}.{name}, or removed or added it"
        if [*now] != [*then]:
            yield f"changed the order of the modules in {path}"
        for hooks in HOOKS:
            held = ([*of.__dict__[hooks].values()] for of in (each, built))
            if not likeness.is_same(*held, by_values=True):
                yield f"registered, removed or changed a hook of {path}"
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    for name, value in changed_attributes(module, deferred).items():
        if callable(value) and any(id(each) in modules for _, each in reach({name: value})):
            yield f"set {name} to a {type(value).__name__} that leads to the partition's own modules"
        elif any(id(each) in own for _, each in reach({name: value}, parameters=True)):
            yield f"set {name} to a {type(value).__name__} with the partition's own weights or buffers"


def _copied_anew(path: str, called: Sequence[str], deferred: DeferredModel) -> nn.Module:
    """A module of a partition as a copy of the builder's has it; what it belongs to is copied as a whole."""
    whole = next(each for each in called if f"{path}.".startswith(f"{each}."))
    return copied_module(deferred, whole, {}).get_submodule(path[len(whole) + 1 :])


def _copies_all(kind: type[nn.Module]) -> bool:
    """Copies of a module have what it has, for it has no way of its own to be copied, as `torch.compile`'s have."""
    ways = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    return all(getattr(kind, way, None) is getattr(nn.Module, way, None) for way in ways)


def _copies(module: nn.Module, deferred: DeferredModel) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The modules of a partition that are copies of the builder's: name, copy, the builder's."""
    built = dict(deferred.model.named_modules(remove_duplicate=False))
    for path, each in module.named_modules():
        if path in built and not isinstance(each, PartitionModule) and type(each) is not nn.Module:
            yield path, each, built[path]


def put_attributes(module: nn.Module, values: Mapping[str, Any], device: torch.device) -> None:
    """Give a partition's modules the attributes that `changed_attributes` found elsewhere."""
    for where, value in values.items():
        path, _, name = where.rpartition(".")
        setattr(module.get_submodule(path), name, value.to(device) if isinstance(value, torch.Tensor) else value)


def check_portable(values: Mapping[str, Any]) -> None:
    """Refuse attributes that cannot go to another worker: no tensor or plain value, or two that are one object."""
    names: dict[int, str] = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            other = names.setdefault(id(value), name)
            if other != name and type(value) not in ATOMS:
                raise UsageError(
                    f"{name} and {other} are one {type(value).__name__} that forward has changed, and would be two on"
                    " another worker",
                    hint="have one module hold it, or let the partition stay",
                )
            try:
                to_json(value, name)
            except UsageError as error:
                raise UsageError(
                    f"{name}, a {type(value).__name__} that forward has changed, cannot go to another worker",
                    hint="make it a buffer, a number, text, or lists and dicts of these; or let the partition stay",
                ) from error


_PARTS: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__code__", "__closure__", "__defaults__", "__kwdefaults__", "__dict__"),
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinMethodType: ("__name__", "__self__"),
    types.MethodWrapperType: ("__name__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    functools._lru_cache_wrapper: ("__wrapped__",),
}
"""Of what can be called: what says whether one does the same as another."""
_SINGLE = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme, torch.device)
"""Values of torch's that have no parts."""


class _Likeness:
    """Tells what has changed of a partition since the builder made it, as far as Python shows."""

    def __init__(self, module: nn.Module, deferred: DeferredModel) -> None:
        own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        tensors = deferred.tensors()
        self._outside = deferred.outside.keys()  # each stands for itself
        self._same: Set[tuple[int, int]] = {(id(each), id(tensors[name])) for name, each in own if name in tensors}
        # own tensors, as an LSTM lists them once more, with the builder's of these names
        self._names = defaultdict[int, set[str]](set)  # of modules
        for model in (module, deferred.model):
            for name, each in model.named_modules(remove_duplicate=False):
                self._names[id(each)].add(name)

    def is_same(self, value: Any, built: Any, *, by_values: bool = False) -> bool:
        """Nothing has changed in a value: now, and then.

        With `by_values` a tensor is the same where it has the values of the builder's, as in a partial: one that could
        go to another worker takes its tensors along.
        """
        self._compared, self._by_values = dict[tuple[int, int], Any](), by_values
        return self._is_same(value, built)

    def _is_same(self, value: Any, built: Any) -> bool:
        pair = id(value), id(built)
        if value is built or pair in self._same or pair in self._compared:
            return True
        if value.__class__ is not built.__class__ or isinstance(value, torch.Tensor) or id(value) in self._outside:
            return self._by_values and _is_as_built(value, built)  # of tensors what the builder's says it is
        self._compared[pair] = value, built  # kept, so that no other object gets its id
        if (keeper := keeper_of(type(value), CONTENTS)) is not None:
            return pickle.dumps(keeper.copy(value)) == pickle.dumps(keeper.copy(built))
        if isinstance(value, nn.Module):
            now, then = self._names.get(id(value)), self._names.get(id(built))
            return now is None or then is None or not now.isdisjoint(then)
        parts = _PARTS.get(type(value))
        if isinstance(value, types.FunctionType) and not is_users(value.__globals__.get("__name__")):
            parts = ("__code__",)  # torch's, around what torch.compile compiles, closes over what that has kept
        if parts is not None:
            return self._are_same(*([getattr(each, part) for part in parts] for each in (value, built)))
        return self._has_same_parts(value, built)

    def _are_same(self, values: Sequence[Any], built: Sequence[Any]) -> bool:
        return len(values) == len(built) and all(map(self._is_same, values, built))

    def _has_same_parts(self, value: Any, built: Any) -> bool:
        is_torchs = type(value).__module__.partition(".")[0] in ("torch", "assigner") and not isinstance(value, OPEN)
        given = given_attributes if isinstance(value, WITH_CODE) else lambda each: getattr(each, "__dict__", {})
        spaces = [{**given(each), **slots_of(each)} for each in (value, built)]
        if isinstance(value, weakref.ref):
            return self._is_same(value(), built())
        if isinstance(value, types.CellType):
            return self._are_same(filling_of(value), filling_of(built))
        if isinstance(value, dict):
            if not self._has_same_items(value, built):
                return False
        elif isinstance(value, list | tuple | deque):
            if not self._are_same(value, built):
                return False
        elif isinstance(value, (set, frozenset, *_SINGLE)) or not (is_torchs or any(spaces)):
            return _is_equal(value, built) or self._is_made_alike(value, built)
        return is_torchs or self._has_same_items(*spaces)  # a hook of torch's changes by what it is called with

    def _has_same_items(self, values: dict[Any, Any], built: dict[Any, Any]) -> bool:
        return [*values] == [*built] and self._are_same([*dict.values(values)], [*dict.values(built)])

    def _is_made_alike(self, value: Any, built: Any) -> bool:
        """As Python would copy it, where it does not say what is equal."""
        if vars(object)["__eq__"] is not type(value).__eq__:
            return False
        try:
            made = value.__reduce_ex__(4), built.__reduce_ex__(4)
        except TypeError:
            return False
        return made[0] == made[1] if isinstance(made[0], str) else self._are_same(made[0][:3], made[1][:3])


def _is_as_built(value: Any, built: Any) -> bool:
    if not (isinstance(value, torch.Tensor) and isinstance(built, torch.Tensor)):
        return False
    kinds = ((each.layout, each.dtype, each.requires_grad) for each in (value, built))
    return value.layout is torch.strided and operator.eq(*kinds) and has_values_of(value, built)


def _is_equal(value: Any, built: Any) -> bool:
    """By its own word; what is no number is not equal to itself."""
    try:
        return bool(value == built or value != value)  # noqa: PLR0124 - NaN
    except Exception:  # noqa: BLE001 - whatever a class's own comparison raises
        return False


def let_go(modules: Iterable[nn.Module]) -> None:
    """Have no tensor that forward has set as an attribute hold a graph, and with it the memory of what led to it."""
    for module in modules:
        for name, value in attributes_of(module).items():
            if isinstance(value, list | dict):
                kind: Any = list if isinstance(value, list) else dict
                for key, each in enumerate(value) if isinstance(value, list) else [*dict.items(value)]:
                    if _has_graph(each):
                        kind.__setitem__(
                            value, key, _without_graph(each)
                        )  # without what a class of the user's does then
            elif _has_graph(value):
                module.__dict__[name] = _without_graph(value)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Who asks for the gradient that a tensor was to retain is told that it is not there: as of a leaf."""
    return tensor.detach().requires_grad_(tensor.retains_grad)


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
