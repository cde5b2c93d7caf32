"""Has a script multiplied each rank's gradients by another number? So it does where it clips by a norm over one rank's.

    for n, p in pipeline.named_parameters(): ...         rank 0: norm of its gradients 4, clipped to 1: times 0.25
    torch.nn.utils.clip_grad_norm_(those, 1.0)           rank 1: norm of its gradients 2, clipped to 1: times 0.5

The whole model's norm is neither. No loss shows it, so it is looked for: some values of the gradients as the backward
left them, beside the same when they are to be applied. What a script does to each parameter by itself has several
factors on a rank, or one on all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from assigner.runtime.membership import Membership

_MOST = 64  # parameters that are looked at
_AMONG = 256  # values of each, of which the largest is taken
_ROUNDING = 1e-2  # relative; bfloat16 rounds by 2 ** -9
_NONE, _SEVERAL = math.nan, math.inf


class RankFactor:
    """By what one number a script multiplies all gradients of this rank between a step and their update.

    Args:
        parameters: This rank's by name.
        member: Tells it to the other ranks.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], member: Membership) -> None:
        self._parameters, self._member = list(parameters.values())[:_MOST], member
        self._seen: list[tuple[nn.Parameter, int, float]] = []

    def note(self) -> None:
        """The gradients are as a step's backwards have left them, or as the pipeline itself has changed them."""
        self._seen = []
        if self._member.transport is None:
            return
        for parameter in self._parameters:
            if (values := _values(parameter)) is not None:
                at = int(values.abs().argmax())
                if float(values[at]):
                    self._seen.append((parameter, at, float(values[at])))

    def check(self) -> None:
        """The gradients are about to be applied. All ranks call it together.

        Raises:
            UsageError: all of each rank's were multiplied by one number, and by another one than on other ranks.
        """
        factors = self._member.numbers(self._factor())
        self._seen = []
        known = {rank: factor for rank, factor in enumerate(factors) if not math.isnan(factor)}
        if not known or _SEVERAL in known.values():
            return
        low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        if known[high] - known[low] > _ROUNDING * abs(known[high]):
            raise UsageError(
                f"the script has multiplied all gradients of worker:{low} by {known[low]:.3g} and all of worker:{high}"
                f" by {known[high]:.3g} before the update, as torch.nn.utils.clip_grad_norm_ over"
                " pipeline.named_parameters() does: its norm is that of one rank's part of the model",
                hint="clip by pipeline.clip_grad_norm_ or step(batch, max_norm=...); what shall change the gradients of"
                " some parameters alone can be a learning rate of theirs",
            )

    def _factor(self) -> float:
        """NaN: nobody can say; infinite: there are several."""
        found = []
        for parameter, at, before in self._seen:
            if (values := _values(parameter)) is not None and at < len(values):
                found.append(float(values[at]) / before)
        if not found or not all(map(math.isfinite, found)):
            return _NONE
        middle = sorted(found)[len(found) // 2]
        return middle if all(abs(each - middle) <= _ROUNDING * abs(middle) for each in found) else _SEVERAL


def _values(parameter: nn.Parameter) -> torch.Tensor | None:
    """Some of a gradient's values; None: there are none on the CPU, where nothing has to be waited for."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or gradient.device.type != "cpu":
        return None
    flat = gradient.detach().reshape(-1)
    values = flat[:: max(1, len(flat) // _AMONG)]
    return values if len(values) and values.is_floating_point() else None
