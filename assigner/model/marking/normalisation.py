"""Modules that normalise a micro-batch by statistics of its own rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _BatchNorm

from assigner import formatting as fmt

if TYPE_CHECKING:
    from torch import nn


TOO_FEW_VALUES = "more than 1 value per channel"
"""What torch says where a batch leaves BatchNorm or InstanceNorm nothing to normalise by."""


def batch_norms(model: nn.Module) -> str | None:
    """The BatchNorm modules of a model that are in training mode, in words; None: there are none."""
    found = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    return f"BatchNorm ({fmt.first_of(found)}) normalises each by itself" if found else None
