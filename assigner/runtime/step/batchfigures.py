"""What BatchNorm modules have seen of micro-batches: merged, and moved into the running values.

    N = sum n_m      mean = sum n_m mean_m / N      M2 = sum (n_m - 1) var_m + n_m (mean_m - mean)^2
    running_mean <- (1 - a) running_mean + a mean        running_var <- (1 - a) running_var + a M2 / (N - 1)

Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class BatchFigures:
    """What one call saw of one micro-batch: mean and unbiased variance of each channel, and values in a channel."""

    mean: torch.Tensor
    variance: torch.Tensor
    count: int = 0


def merged(parts: Sequence[Sequence[BatchFigures]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Mean and unbiased variance of all values, from those of parts, of several modules that have as many parts.

    They are computed as one: an operation takes longer than the figures of a module are worth.
    """
    columns = [*zip(*parts, strict=True)]
    means = torch.stack([torch.cat([each.mean for each in column]) for column in columns]).double()
    variances = torch.stack([torch.cat([each.variance for each in column]) for column in columns]).double()
    sizes = [len(each[0].mean) for each in parts]
    counts = means.new_tensor([[each.count for each in column] for column in columns])
    counts = counts.repeat_interleave(counts.new_tensor(sizes, dtype=torch.long), dim=1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    squares = ((counts - 1) * variances + counts * (means - mean).square()).sum(0)
    return [*zip(torch.split(mean, sizes), torch.split(squares / (total - 1), sizes), strict=True)]


Move = tuple[_BatchNorm, torch.Tensor, torch.Tensor]
"""A module, and the mean and variance of a batch."""


@torch.no_grad()
def move(moves: Sequence[Move], momentum: float | None) -> None:
    """Have the running values of modules, no tensor of which is another's, moved as torch's forward does."""
    tracked = [each.num_batches_tracked for each, *_ in moves if each.num_batches_tracked is not None]
    if tracked:
        torch._foreach_add_(tracked, 1)
    if momentum is None:  # the mean of all batches: each module has its own number of them
        for module, mean, variance in moves:
            number = module.num_batches_tracked
            _move_by(0.0 if number is None else 1.0 / float(number), [(module, mean, variance)])
    else:
        _move_by(momentum, moves)


def _move_by(share: float, moves: Sequence[Move]) -> None:
    pairs = [
        (running, new)
        for module, mean, variance in moves
        for running, new in ((module.running_mean, mean), (module.running_var, variance))
        if running is not None
    ]
    running = [each for each, _ in pairs]
    torch._foreach_mul_(running, 1 - share)
    torch._foreach_add_(running, [new.to(each.dtype) for each, new in pairs], alpha=share)
