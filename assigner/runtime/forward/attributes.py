"""Attributes that forwards have changed on a partition's modules: counters, lists, a tensor kept for the next time.

A partition that moves to another worker is built anew there, as the builder made it; what has changed since goes along.
"""

from __future__ import annotations

import pickle
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from assigner.errors import UsageError
from assigner.model.deferred.contents import ATOMS, contents_of
from assigner.model.deferred.reach import STANDARD, slots_of
from assigner.model.plainvalues import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from assigner.model.deferred import DeferredModel


def changed_attributes(module: nn.Module, deferred: DeferredModel) -> dict[str, Any]:
    """The attributes of a partition's modules that are not what the builder made them, by their names in the model.

    Args:
        module: The partition.
        deferred: The model as the builder made it.
    """
    found: dict[str, Any] = {}
    own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    tensors = deferred.tensors()
    same = deferred.outside.keys() | {(id(each), id(tensors[name])) for name, each in own if name in tensors}
    for path, each in module.named_modules():
        if isinstance(each, fx.GraphModule) or type(each) is nn.Module:
            continue
        built = deferred.model.get_submodule(path).__dict__
        for name, value in each.__dict__.items():
            if name not in STANDARD and not _same(value, built.get(name, built), same):
                found[f"{path}.{name}"] = value
    return found


def put_attributes(module: nn.Module, values: Mapping[str, Any], device: torch.device) -> None:
    """Give a partition's modules the attributes that `changed_attributes` found elsewhere."""
    for where, value in values.items():
        path, _, name = where.rpartition(".")
        setattr(module.get_submodule(path), name, value.to(device) if isinstance(value, torch.Tensor) else value)


def check_portable(values: Mapping[str, Any]) -> None:
    """Refuse attributes that cannot go to another worker.

    Raises:
        UsageError: one is neither a tensor nor a plain value, or two are one object, which would be two there.
    """
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


def _same(value: Any, built: Any, same: Set[Any]) -> bool:
    """Nothing has changed in a value since the builder made it, as far as Python shows.

    Args:
        value: Now.
        built: Then.
        same: Ids of objects that stand for themselves, and pairs of ids: of the module's own tensors, as an LSTM lists
            them once more, and of those that the builder made by these names.
    """
    if value is built or not same.isdisjoint((id(value), (id(value), id(built)))):
        return True
    if isinstance(value, types.FunctionType | types.MethodType):
        return True
    if type(value) is not type(built) or isinstance(value, torch.Tensor):
        return False
    if (contents := contents_of(value)) is not None:
        return pickle.dumps(contents) == pickle.dumps(contents_of(built))
    return _same_parts(value, built, same)


def _same_parts(value: Any, built: Any, same: Set[Any]) -> bool:
    if type(value) in ATOMS or isinstance(value, set | frozenset | bytearray):
        return bool(value == built or value != value)  # noqa: PLR0124 - NaN
    if isinstance(value, dict):
        if [*value] != [*built] or not all(_same(each, built[key], same) for key, each in value.items()):
            return False
    elif isinstance(value, list | tuple | deque) and (
        len(value) != len(built) or not all(map(_same, value, built, [same] * len(value)))
    ):
        return False
    if isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] in ("torch", "builtins", "assigner"):
        return True
    spaces = getattr(value, "__dict__", None), getattr(built, "__dict__", None)
    return _same(spaces[0], spaces[1], same) and _same(slots_of(value), slots_of(built), same)
