"""The parameters and buffers of a module by the names under which it holds them, whatever it says of itself.

A wrapper may name them otherwise: torch's `CheckpointWrapper` leaves its own part out of `named_parameters`, so that
one that lies in a model gives names that the model does not have. The program reads, cuts and moves tensors by where
they are. What a module says of itself counts in `state_dict` and for the user's own calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch


named_parameters = nn.Module.named_parameters
"""As a module's own method of this name, by the names under which they are held."""
named_buffers = nn.Module.named_buffers
"""Likewise."""


def parameters(module: nn.Module) -> list[nn.Parameter]:
    """All that it and its submodules hold, each once, also those that it leaves out of its own list."""
    return [each for _, each in named_parameters(module)]


def buffers(module: nn.Module) -> list[torch.Tensor]:
    """All that it and its submodules hold, each once."""
    return [each for _, each in named_buffers(module)]
