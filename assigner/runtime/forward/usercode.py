"""Whether code of the user's runs in a partition, which may draw, keep values, and do anything else that Python can."""

from __future__ import annotations

from torch import fx, nn

from assigner.model.deferred.ownership import is_users
from assigner.model.deferred.reach import reach


def changeable_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a partition whose Python values its forwards may change, by name."""
    if not has_user_code(module):
        return []
    return [(name, each) for name, each in module.named_modules() if not isinstance(each, fx.GraphModule)]


def has_user_code(module: nn.Module) -> bool:
    """True if a class, a hook or a function runs in a module that is not torch's own: a layer may be given one."""
    layers = [(name, each) for name, each in module.named_modules() if not isinstance(each, fx.GraphModule)]
    return any(
        not type(each).__module__.startswith("torch.")
        or each._forward_pre_hooks
        or each._forward_hooks
        or each._backward_pre_hooks
        or each._backward_hooks
        or "forward" in each.__dict__
        for each in module.modules()
    ) or any(
        callable(each) and isinstance(of := getattr(each, "__module__", None), str) and is_users(of)
        for _, each in reach({}, layers)
    )
