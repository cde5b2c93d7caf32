"""A gradient that is not there is told from every one that is."""

from __future__ import annotations

import pytest
import torch

from assigner.runtime.messages.transport import is_missing, missing_gradient

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (3, 1, 2)])
def test_the_message_keeps_shape_and_type(shape, dtype):
    """It fits the buffer that waits for a gradient, and is recognised there."""
    like = torch.zeros(shape, dtype=dtype)
    message = missing_gradient(like)
    assert (message.shape, message.dtype) == (like.shape, like.dtype)
    assert is_missing(torch.empty_like(like).copy_(message))
    assert torch.isnan(message).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -5.0, float("inf"), float("nan"), -float("nan")])
def test_a_gradient_is_no_absence(number, dtype):
    """Zeros, infinities and NaN of either sign are gradients."""
    assert not is_missing(torch.full((2, 3), number, dtype=dtype))
    assert not is_missing(-torch.full((2, 3), number, dtype=dtype))


def test_nothing_in_a_message_without_elements():
    """A gradient of no elements is there."""
    assert not is_missing(missing_gradient(torch.zeros(0, 3)))
