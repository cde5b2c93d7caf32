"""A tensor in the likeness of another one: with its class, and with what the builder has hung on it.

An optimizer's groups may ask for attributes and subclasses (`p.is_bias`, `isinstance(p, Scale)`), and a hook on a
parameter changes its gradient: the tensors that take a builder's tensors' places must have them too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assigner.errors import UsageError
from assigner.model.deferred.originals import plain_class
from assigner.model.deferred.reach import reach
from assigner.model.deferred.recorder import SPARSE, is_meta

if TYPE_CHECKING:
    from collections.abc import Mapping


def in_likeness(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """These values as a tensor of another one's class, with its attributes, its hooks and its `requires_grad`."""
    if isinstance(tensor, nn.Parameter):
        kind = plain_class(tensor) if nn.Parameter in type(tensor).__mro__ else nn.Parameter
        made: torch.Tensor = torch.Tensor._make_subclass(kind, value.detach(), tensor.requires_grad)
    else:
        made = value
    made.__dict__.update(tensor.__dict__)
    if tensor._backward_hooks:
        made._backward_hooks = OrderedDict(tensor._backward_hooks)
    return made


def check_hung(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what cannot follow parameters and buffers: what an attribute or a hook holds has no values."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise UsageError(f"{name} is a sparse tensor", hint=SPARSE)
        for key, value in tensor.__dict__.items():
            if _holds_model(value):
                raise UsageError(
                    f"the attribute {key!r} of {name} holds a tensor or a module, which has no values yet",
                    hint="register the tensor as a buffer of its module; attributes of parameters are plain values",
                )
        check_no_late_hooks(name, tensor)
        for hook in (tensor._backward_hooks or {}).values():
            if _holds_model(hook):
                raise UsageError(
                    f"a hook on {name} holds a tensor or a module of the model's builder, which has no values yet",
                    hint="give the hook plain values alone; to mask a gradient, multiply the weight by a buffer",
                )


def check_no_late_hooks(name: str, parameter: torch.Tensor) -> None:
    """Refuse hooks that see a gradient when it has been added: a micro-batch's, not the step's."""
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UsageError(
            f"{name} has a hook from register_post_accumulate_grad_hook, which would run for every micro-batch",
            hint="change gradients with register_hook, which runs once on a step's whole gradient; update in"
            " Workload.optimizer",
        )


def _holds_model(value: Any) -> bool:
    """True if a value leads to a tensor without memory or to a module, as an optimizer of the builder's does."""
    return any(
        isinstance(each, nn.Module | torch.optim.Optimizer) or (isinstance(each, torch.Tensor) and is_meta(each))
        for _, each in reach({"value": value}, top="whole")
    )
