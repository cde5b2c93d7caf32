"""Which of a model's modules a capture calls as a whole, which it follows, and which look at a whole micro-batch."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from assigner import formatting as fmt
from assigner.errors import MarkingError
from assigner.model.deferred.ownership import STANDARD
from assigner.model.deferred.reach import reach
from assigner.model.members import named_buffers, parameters

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

TOO_FEW_VALUES = "more than 1 value per channel"
"""What torch says where a batch leaves BatchNorm or InstanceNorm nothing to normalise by."""


def opaque_modules(model: nn.Module, marked: Sequence[str], opened: Container[str] = ()) -> list[str]:
    """The modules whose forward becomes one call: the marked ones, and the largest ones that hold no mark.

    Args:
        model: Whose.
        marked: The marked ones.
        opened: Unmarked ones whose own code is followed.
    """
    found: list[str] = []
    kept = {id(model.get_submodule(name)) for name in marked}

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            inside = any(id(each) in kept for each in child.modules() if each is not child)  # by whatever name
            has_forward = inspect.getattr_static(type(child), "forward") is not nn.Module.forward
            if name in marked or (has_forward and not inside and name not in opened):
                found.append(name)
            else:
                visit(child, name + ".")

    visit(model, "")
    return found


def modules_outside(model: nn.Module, opaque: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules whose own code a capture follows: a model's by name, without opaque ones and what is in them."""
    inner = tuple(f"{name}." for name in opaque)
    return [
        (name, module) for name, module in model.named_modules() if name not in opaque and not name.startswith(inner)
    ]


def modules_inside(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """A module and those in it, by their names in the model."""
    return [(f"{name}.{inner}".rstrip("."), each) for inner, each in model.get_submodule(name).named_modules()]


def batch_norms(model: nn.Module) -> str | None:
    """The BatchNorm modules of a model that are in training mode, in words; None: there are none."""
    found = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    return f"BatchNorm ({fmt.first_of(found)}) normalises each by itself" if found else None


@contextlib.contextmanager
def unregistered_named(model: nn.Module) -> Iterator[None]:
    """Where the block fails over a module that nobody gives weights, as it is not registered, say so.

    Args:
        model: On the meta device.

    Raises:
        MarkingError: naming the attribute that holds it; else the block's own.
    """
    try:
        yield
    except MarkingError as error:
        found = _unregistered(model) if "meta" in error.message else None
        if found is None:
            raise
        raise found from error


def _unregistered(model: nn.Module) -> MarkingError | None:
    """Of the first attribute of a module that holds weights, or a part of them, which it does not register."""
    registered = {id(each) for each in model.modules()} | {id(each) for each in parameters(model)}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in STANDARD:
                continue
            place = f"{path}.{name}".lstrip(".")
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            for each in items:
                has_weights = isinstance(each, nn.Module) and any(True for _ in parameters(each))
                if id(each) not in registered and (has_weights or isinstance(each, nn.Parameter)):
                    return MarkingError(
                        f"a {type(each).__name__} in {place}, a {type(value).__name__} of Python's, is not registered:"
                        " no optimizer trains it, and no partition has its weights",
                        hint="keep modules in an nn.ModuleList or nn.ModuleDict, or each as an attribute of its own,"
                        " and parameters likewise",
                    )
    named = {name for name, _ in named_buffers(model, remove_duplicate=False)}
    for where, each in reach({}, model.named_modules()):
        if not isinstance(each, torch.Tensor) or id(each) in registered or str(where) in named:
            continue
        if each.is_meta and each.grad_fn is None:
            return MarkingError(
                f"a tensor in the attribute {where} trains, or has the memory of a parameter or a buffer, and"
                " is not registered by that name: partitions have what is registered alone",
                hint="read the parameter or the buffer itself; what trains is to be an nn.Parameter",
            )
    return None


def check_hooks(model: nn.Module, opaque: Sequence[str]) -> None:
    """Backward hooks of modules that are not one call have no node to hang on.

    Raises:
        MarkingError: there are some.
    """
    for name, module in modules_outside(model, opaque):
        if module._backward_hooks or module._backward_pre_hooks:
            raise MarkingError(
                f"{name or type(model).__name__!r} has a backward hook, and partitions inside it",
                hint="register it on a module that is marked, or inside one that is",
            )
    if module_hooks._global_backward_hooks or module_hooks._global_backward_pre_hooks:
        raise MarkingError(
            "a backward hook is registered for all modules (register_module_full_backward_hook)",
            hint="register it on the modules that it is meant for",
        )
