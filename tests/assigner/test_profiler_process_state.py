"""Profiling changes nothing: not the model, not the generators, not torch's settings."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from brief import measure_briefly
from single_rank import be_only_rank
from torch import nn

from assigner.model.workload import Workload
from assigner.profiler.options import ProfileDestination, ProfileOptions
from assigner.profiler.session import process_state_kept, profile_workload

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 8


class Model(nn.Module):
    """Partitions with all that a run could change: weights, running statistics, dropout, frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
        self.last[0].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def batch(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch whose maker draws from every generator there is."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return torch.randn(rows, WIDTH, generator=generator) + noise, torch.zeros(rows, 1)


def state() -> dict[str, Any]:
    """All that a process has set and that a run could change."""
    return {
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


def contents(model: nn.Module) -> dict[str, Any]:
    """Every tensor of a model, its gradients, what needs one, and the training flags."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {name: tensor.detach().clone() for name, tensor in named.items()},
        "gradients": {name: tensor.grad is None or tensor.grad.clone() for name, tensor in named.items()},
        "wanted": {name: tensor.requires_grad for name, tensor in named.items()},
        "training": {name: module.training for name, module in model.named_modules()},
        "objects": {name: id(tensor) for name, tensor in named.items()},
        "forwards": {name: module.forward.__qualname__ for name, module in model.named_modules()},
    }


@pytest.mark.long
def test_a_model_that_is_kept_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder hands out one and the same trained model; profiling reads it and writes nothing to it."""
    be_only_rank(monkeypatch)
    measure_briefly(monkeypatch.setattr)
    kept = Model()
    kept(torch.randn(4, WIDTH)).sum().backward()
    kept.first[2].eval()
    before, settings = contents(kept), state()
    workload = Workload(
        model=lambda: kept,
        batch=batch,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=100.0),
        batch_size=4,
        marks=("first", "last"),
    )
    profile = profile_workload(
        workload,
        "kept.py:workload",
        ProfileOptions(micro_batches=(2,), force_busy=True),
        output=ProfileDestination(tmp_path / "profile.json"),
    )
    assert profile is not None
    assert {each.partition for each in profile.measurements} == {"first", "last"}
    assert state() == settings
    after = contents(kept)
    for what in ("values", "gradients"):
        torch.testing.assert_close(after.pop(what), before.pop(what), rtol=0, atol=0)
    assert after == before
    assert [each.name for each in tmp_path.iterdir()] == ["profile.json"]  # and no journal is left


def test_settings_are_put_back_after_an_error() -> None:
    """What the user's own code sets before it fails does not stay."""
    before = state()

    def fail() -> None:
        with process_state_kept():
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            torch.manual_seed(1)
            random.seed(1)
            np.random.seed(1)
            raise ValueError("in the user's code")

    with pytest.raises(ValueError, match="user's code"):
        fail()
    assert state() == before
