"""A gradient that is not there, as a message: the receiver waits for one, and zeros would be another thing.

AdamW moves a parameter whose gradient is zero by its weight decay, and leaves one without a gradient alone. So an
absent gradient travels as a bit pattern that no computation makes: every 16 bits are 0xFFFB, in each floating-point
type a NaN whose payload no processor and no GPU writes.
"""

from __future__ import annotations

import torch

_PATTERN = -5  # 0xFFFB as int16


def missing_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The message in place of the gradient of `tensor`; of its shape, type and device."""
    lanes = tensor.numel() * tensor.element_size() // 2
    return torch.full((lanes,), _PATTERN, dtype=torch.int16, device=tensor.device).view(tensor.dtype).view(tensor.shape)


def is_missing(message: torch.Tensor) -> bool:
    """Whether a message says that there is no gradient; one without elements never does."""
    return message.numel() > 0 and bool((message.flatten()[:1].view(torch.int16) == _PATTERN).all())
