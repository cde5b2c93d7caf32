"""Training and eval mode are those that the model's own `train()` and `eval()` leave, whatever they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kept import kept
from torch import nn
from workloads import WIDTH, Reference, make_plan, pipeline_of, workload

from assigner.model.deferred import DeferredModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner import Workload

EXACT = 1e-10


class Block(nn.Module):
    """A layer with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.inner(x)))


class FrozenBlock(Block):
    """Its BatchNorm never trains."""

    def train(self, mode: bool = True) -> FrozenBlock:
        super().train(mode)
        self.norm.eval()
        return self


class AlwaysTraining(Block):
    """Its BatchNorm always does."""

    def eval(self) -> AlwaysTraining:
        return self

    def train(self, mode: bool = True) -> AlwaysTraining:
        super().train(mode)
        self.norm.train()
        return self


class Adapted(nn.Linear):
    """A low-rank addition that is merged into the weight in eval mode."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.low = nn.Parameter(torch.randn(WIDTH, 1) / 3)
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * self.low @ self.low.T
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        return made if self.merged else made + x @ self.low @ self.low.T


class FrozenByRoot(nn.Module):
    """The root keeps a partition's BatchNorm in eval mode, and builds it in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def train(self, mode: bool = True) -> FrozenByRoot:
        super().train(mode)
        self.blocks[0].norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PartlyFrozen(nn.Module):
    """A `train` of its own, which does nothing to the part that its builder leaves in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), FrozenBlock()]), nn.Linear(WIDTH, 1)

    def train(self, mode: bool = True) -> PartlyFrozen:
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)))


def test_parts_left_in_eval_mode_stay_so():
    """What a root's own `train` does not ask for, it does not do; what its parts' do, they do."""

    def build() -> nn.Module:
        model = PartlyFrozen().train()
        model.blocks[0].eval()
        return model

    made, expected = DeferredModel(build, seed=0).flags(training=True), build()
    assert made == {name: module.training for name, module in expected.named_modules()}
    assert [name for name, flag in made.items() if not flag] == [
        "blocks.0", "blocks.0.inner", "blocks.0.norm", "blocks.1.norm"
    ]  # fmt: skip


def in_sequence(kind: Callable[[], nn.Module]) -> Any:
    return workload(lambda: nn.Sequential(kind(), nn.Linear(WIDTH, 1)))


MODELS = {
    "frozen by the root": lambda: workload(FrozenByRoot, "blocks.*", "head"),
    "frozen by itself": lambda: in_sequence(FrozenBlock),
    "always training": lambda: in_sequence(AlwaysTraining),
    "merged in eval mode": lambda: in_sequence(Adapted),
}


@kept
def made_of(name: str) -> Workload:
    """One object for each name, so that it is captured once in each mode."""
    return MODELS[name]()


class Counting(nn.Linear):
    """Counts, in evaluations too; one whose `train` is its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls

    def train(self, mode=True):
        return super().train(mode)


@pytest.mark.long
def test_what_a_forward_counts_in_an_evaluation():
    """Stays, where the module has a `train` of its own, too."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting(), nn.Linear(WIDTH, 1)), "*")
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            expected = made.loss(reference.output(batch[0]), batch[1])
            assert pipeline.evaluate(batch) == pytest.approx(expected.item(), abs=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("name", MODELS)
def test_the_models_own_modes(name, remat):
    """Losses in training and in eval mode, weights and statistics are the plain model's, with evaluations between."""
    made = made_of(name)
    reference = Reference(made)
    reference.model.train()
    with pipeline_of(made, make_plan(made, micro_batches=1), remat=remat) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            kept = {key: each.clone() for key, each in reference.model.named_buffers()}
            expected = made.loss(reference.output(batch[0]), batch[1])
            for key, each in reference.model.named_buffers():
                each.copy_(kept[key])  # an evaluation leaves running statistics as they are
            assert pipeline.evaluate(batch) == pytest.approx(expected.item(), abs=EXACT)
        assert reference.distance(pipeline.state_dict().items()) < EXACT
        flags = {key: module.training for key, module in reference.model.named_modules() if key}
        mine = {
            key: module.training
            for held in pipeline._installed.share.modules.values()
            for key, module in held.named_modules()
        }
        leaves = [key for key, _ in reference.model.named_modules() if key and key in mine]
        assert {key: mine[key] for key in leaves} == {key: flags[key] for key in leaves}
