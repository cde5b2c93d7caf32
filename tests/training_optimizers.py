"""Optimizers and schedulers as training scripts build them: torch's own, and groups by name, shape and place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable


class Counting(torch.optim.SGD):
    """Its rate goes by a count, which is in its state dict alone, and without which it cannot load one."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: each for key, each in state_dict.items() if key != "count"})


class Orthogonal(torch.optim.Optimizer):
    """As Muon: matrices by a Newton-Schulz step of their momentum, the rest by plain descent; numbers in its state."""

    def __init__(self, groups: Any, lr: float = 0.02) -> None:
        super().__init__(groups, {"lr": lr, "matrices": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["momentum"] = state.get("momentum", torch.zeros_like(parameter)) * 0.9 + parameter.grad
                move = state["momentum"]
                if group["matrices"]:
                    move = move / (move.norm() + 1e-9)
                    move = 1.5 * move - 0.5 * move @ move.T @ move
                parameter.sub_(group["lr"] * move)


class ByTheMean(torch.optim.SGD):
    """It divides all gradients, in place, by their mean norm, which it notes in its group: of none there is no mean."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        gradients = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        mean = torch.stack([each.norm() for each in gradients]).mean()
        for each in gradients:
            each.div_(mean)
        self.param_groups[0]["mean"] = float(mean)
        return super().step(closure)


class ClippingEach(torch.optim.SGD):
    """It clips each gradient by its own norm, in place, and drops those of vectors when they are applied."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        every = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        for each in every:
            each.grad.mul_(0.01 / (each.grad.norm() + 0.01))
        found = super().step(closure)
        for each in every:
            if each.dim() == 1:
                each.grad = None
        return found


def muon_like(named_parameters: Any) -> torch.optim.Optimizer:
    """Matrices of the blocks in one group, all the rest in another."""
    matrices = [each for name, each in named_parameters if each.dim() == 2 and name.startswith("blocks")]
    rest = [each for name, each in named_parameters if not (each.dim() == 2 and name.startswith("blocks"))]
    return Orthogonal([{"params": matrices, "matrices": True}, {"params": rest}])


def no_decay_by_name(named_parameters: Any) -> torch.optim.Optimizer:
    """No weight decay for biases and norms, told by their names; a group of its own for the head."""
    plain = [each for name, each in named_parameters if name.endswith("bias") or "norm" in name]
    decayed = [each for name, each in named_parameters if not (name.endswith("bias") or "norm" in name)]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": plain, "lr": 0.02}], lr=0.01)


def no_decay_by_shape(parameters: Any) -> torch.optim.Optimizer:
    """No weight decay for what has one dimension, from plain parameters; an empty group is left out."""
    every = list(parameters)
    groups = [([p for p in every if p.dim() > 1], 0.3), ([p for p in every if p.dim() == 1], 0.0)]
    groups += [([p for p in every if p.dim() > 7], 0.5)]
    return torch.optim.AdamW([{"params": held, "weight_decay": decay} for held, decay in groups if held], lr=0.01)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW with a tensor for its rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW of named pairs": lambda named_parameters: torch.optim.AdamW(named_parameters, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "matrices apart": muon_like,
    "groups by name": no_decay_by_name,
    "groups by shape": no_decay_by_shape,
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.02], total_steps=12),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5]),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.05),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
}
