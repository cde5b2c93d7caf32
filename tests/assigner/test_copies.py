"""A pipeline's modules are its own; what the training script holds too stays the script's object."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kept import kept
from torch import nn
from workloads import WIDTH, Reference, make_plan, pipeline_of, workload

from assigner import Pipeline
from assigner.model.marking import partition_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner import Workload

EXACT = 1e-10


class Config:
    """Settings."""

    def __init__(self) -> None:
        self.temperature = 1.0


SETTINGS = {"scale": 1.0}


class Tempered(nn.Module):
    """Divides by a config's temperature, and counts in a list and an object of its own."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inner, self.config, self.settings = nn.Linear(WIDTH, WIDTH), config, SETTINGS
        self.seen: list[int] = []
        self.own = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        self.own.temperature += 1
        made = self.inner(x) / self.config.temperature * self.settings["scale"]
        return made * (len(self.seen) + self.own.temperature) / 20


def tempered(config: Config) -> Any:
    return workload(lambda: nn.Sequential(Tempered(config), Tempered(config), nn.Linear(WIDTH, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_what_the_loop_changes_reaches_the_partitions(remat, monkeypatch):
    """A config that the script holds is the same object in every partition; a dict at the top of a file is, too."""
    config = Config()
    made = tempered(config)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1), remat=remat) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            config.temperature *= 0.9
            monkeypatch.setitem(SETTINGS, "scale", 1.1**n)
        assert reference.distance(pipeline.named_parameters()) < EXACT


@pytest.mark.long
def test_what_the_builder_made_is_the_pipelines_own():
    """Two pipelines of one graph share no weights, no lists and no objects that the builder made."""
    made = tempered(Config())
    graph = partition_graph(made)
    found = []
    for _ in range(2):
        with Pipeline(made, make_plan(made, micro_batches=1), graph=graph) as pipeline:
            found.append([pipeline.step(made.make_batch(8, n)) for n in range(2)])
    assert found[0] == found[1]


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def old_spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Remembering(nn.Linear):
    """Has a computed tensor as an attribute from the start."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scaled = [self.weight * 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@kept
def keeping(kind: Callable[[], nn.Module]) -> Workload:
    """One object for each kind, so that it is captured once."""
    return workload(lambda: nn.Sequential(kind(), nn.Linear(WIDTH, 1)))


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("kind", [old_weight_norm, old_spectral_norm, Remembering])
def test_a_module_may_keep_a_computed_tensor(kind: Callable[[], nn.Module], remat):
    """torch's old weight_norm and spectral_norm keep the computed weight on the module."""
    made = keeping(kind)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1), remat=remat) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert set(pipeline.state_dict()) == set(reference.model.state_dict())
        assert reference.distance(pipeline.state_dict().items()) < EXACT
