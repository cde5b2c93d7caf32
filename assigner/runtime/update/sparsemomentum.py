"""SGD's momentum of sparse gradients: a sum of them, and so as sparse, for as long as all of them are.

    torch            copies the first gradient, and adds later ones: sparse + sparse, dense + dense, dense + sparse
    in a file        dense, as is all that goes to another rank
    in an update     as the gradient is, which is dense once several workers have added theirs up

The values are the same in both forms. torch adds no dense gradient to a sparse momentum, and with Nesterov's no dense
momentum to a sparse gradient; and in 16 bits a dense sum is rounded elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch

from assigner.errors import UsageError

_MOMENTUM = "momentum_buffer"


def check_sparse(optimizer: torch.optim.Optimizer, name: str, key: str, value: torch.Tensor) -> None:
    """Refuse a state that is sparse and would have to stay so: it is written, and goes to other ranks, as a dense one.

    Raises:
        UsageError: it is sparse, and no momentum of SGD's.
    """
    if value.layout is torch.strided or (isinstance(optimizer, torch.optim.SGD) and key == _MOMENTUM):
        return
    layout = str(value.layout).removeprefix("torch.")
    raise UsageError(
        f"the optimizer's state {key!r} of {name!r} is of layout {layout}: only dense ones are saved, or moved",
        hint="have it keep a dense tensor, as Adagrad does; or pipeline.optimizer.state.clear() before that forgets it,"
        " and it begins anew",
    )


@torch.no_grad()
def fit_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Have SGD's momentum be sparse where the gradient that comes to it is, and dense where that is."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            gradient, momentum = parameter.grad, state.get(_MOMENTUM)
            if gradient is None or momentum is None or gradient.is_sparse == momentum.is_sparse:
                continue
            state[_MOMENTUM] = momentum.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else momentum.to_dense()
