"""Which of a model's modules a capture calls as a whole, which it follows, and which look at a whole micro-batch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from assigner import formatting as fmt

if TYPE_CHECKING:
    from collections.abc import Sequence

TOO_FEW_VALUES = "more than 1 value per channel"
"""What torch says where a batch leaves BatchNorm or InstanceNorm nothing to normalise by."""


def opaque_modules(model: nn.Module, marked: Sequence[str]) -> list[str]:
    """The modules whose forward becomes one call: the marked ones, and the largest ones that hold no mark."""
    found: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in module.named_children():
            name = f"{prefix}{child_name}"
            inside = any(mark.startswith(name + ".") for mark in marked)
            has_forward = inspect.getattr_static(type(child), "forward") is not nn.Module.forward
            if name in marked or (has_forward and not inside):
                found.append(name)
            else:
                visit(child, name + ".")

    visit(model, "")
    return found


def modules_outside(model: nn.Module, opaque: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """A model's modules by name, without opaque ones and what is in them."""
    inner = tuple(f"{name}." for name in opaque)
    return [
        (name, module) for name, module in model.named_modules() if name not in opaque and not name.startswith(inner)
    ]


def modules_around(model: nn.Module, marked: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules whose own code a capture follows: the model itself, and those that hold marked ones."""
    return modules_outside(model, opaque_modules(model, marked))


def modules_inside(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """A module and those in it, by their names in the model."""
    return [(f"{name}.{inner}".rstrip("."), each) for inner, each in model.get_submodule(name).named_modules()]


def batch_norms(model: nn.Module) -> str | None:
    """The BatchNorm modules of a model that are in training mode, in words; None: there are none."""
    found = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    return f"BatchNorm ({fmt.first_of(found)}) normalises each by itself" if found else None
