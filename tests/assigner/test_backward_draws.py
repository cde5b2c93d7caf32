# ruff: noqa: ARG004 - what a Function is given and does not read
"""Code that draws in a backward draws the same under every plan with the same micro-batches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import WIDTH, make_plan, pipeline_of, workload

from assigner.runtime.step import partition

PARTS = ("parts.0", "parts.1", "parts.2", "last")
PLANS: dict[str, tuple[Any, Any, str]] = {
    "one of them again": ((), PARTS[1:2], "gpipe"),
    "all again": ((), PARTS, "gpipe"),
    "two stages": ([(0, PARTS[:2]), (0, PARTS[2:])], (), "gpipe"),
    "interleaved": ([(0, PARTS[:1]), (0, PARTS[1:3]), (0, PARTS[3:])], PARTS[2:3], "interleaved"),
}


class Noise(torch.autograd.Function):
    """Adds noise to gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient + 0.1 * torch.randn_like(gradient)


class PythonNoise(Noise):
    """The same from Python's generator and NumPy's."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * random.random() + 0.1 * float(np.random.rand())


class ByFunction(nn.Linear):
    """A Function of the user's, between torch's own nodes."""

    noise: Any = Noise

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise.apply(super().forward(self.noise.apply(x))).tanh()


class ByPythonFunction(ByFunction):
    """Draws elsewhere."""

    noise = PythonNoise


class AtOutput(ByFunction):
    """The output's own node draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise.apply(nn.Linear.forward(self, x))


class ByHook(ByFunction):
    """A hook on a tensor that is also what it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear.forward(self, x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + 0.1 * torch.rand_like(gradient))
        return y


class BySecondFunction(ByFunction):
    """One that every other forward skips, the first among them."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = nn.Linear.forward(self, x).tanh()
        return self.noise.apply(y) if self.calls % 2 == 0 else y


class ByLaterFunction(ByFunction):
    """One that begins in the second step, or the third."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 2 else nn.Linear.forward(self, x)


class ByModuleHook(ByFunction):
    """Full backward hooks, registered once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.register_full_backward_hook(lambda *each: (each[1][0] + torch.rand_like(each[1][0]),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(nn.Linear.forward(self, x)).tanh()


class ByCheckpoint(ByFunction):
    """A checkpoint, whose recompute draws what its forward drew, and a draw in its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class ByParameterHook(ByFunction):
    """A hook on a weight, which draws from Python's generator; it is called once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.register_hook(lambda gradient: gradient * random.random())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self, x).tanh()


class Chain(nn.Module):
    """Three parts that draw; the last also reads what the first made."""

    def __init__(self, kind: type[ByFunction]) -> None:
        super().__init__()
        self.parts, self.last = nn.ModuleList([kind() for _ in range(3)]), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.parts[0](x)
        return self.last(self.parts[2](self.parts[1](first)) + first)


class Pairs(nn.Linear):
    """Makes two values, of which one is made by a Function that draws, and one by a later one that does, too."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x + beside)
        return Noise.apply(y), Noise.apply(y * 2)


class InPairs(nn.Module):
    """Values that skip a part, and parts with several nodes at which a backward comes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.last = nn.ModuleList([Pairs() for _ in range(3)]), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.parts[0](x, x)
        c, d = self.parts[1](b, a)
        e, f = self.parts[2](c, b)
        return self.last(d + e + f + a)


def trained(made: Any, plan: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps, and the weights behind them; the generators are at other places each time."""
    with pipeline_of(made, plan) as pipeline:
        losses = [float(pipeline.step(made.make_batch(8, seed))) for seed in range(4)]
        return losses, {name: each.detach().clone() for name, each in pipeline.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 1])
@pytest.mark.parametrize(
    "kind",
    [
        ByFunction,
        ByHook,
        AtOutput,
        ByPythonFunction,
        ByModuleHook,
        ByCheckpoint,
        ByParameterHook,
        BySecondFunction,
        ByLaterFunction,
        None,
    ],
)
def test_a_backward_draws_the_same_under_every_plan(kind, micro_batches):
    """Whichever partitions have one graph, run again, or come in another order."""
    made = workload(InPairs if kind is None else lambda: Chain(kind), "parts.*", "last")
    losses, weights = trained(made, make_plan(made, micro_batches=micro_batches))
    for stages, remat, schedule in PLANS.values():
        plan = make_plan(made, stages, micro_batches=micro_batches, remat=remat, schedule=schedule)
        found = trained(made, plan)
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert all(torch.allclose(found[1][name], each, rtol=1e-9) for name, each in weights.items())


class NoisyLoss:
    """Its backward draws; one that counts its calls is called behind the first forward, wherever that runs again."""

    def __init__(self, *, counts: bool) -> None:
        self.calls, self.counts = 0, counts

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        return ((PythonNoise.apply(Noise.apply(outputs)) - targets.mean()) ** 2).mean() * (1 + self.calls % 2)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("counts", [True, False])
def test_a_loss_draws_the_same_under_every_plan(counts):
    """And so does the last partition, whose backward follows in the same generators or in a later recompute."""

    def made() -> Any:
        model = workload(lambda: nn.Sequential(ByFunction(), ByPythonFunction()), "0", "1")
        return replace(model, loss=NoisyLoss(counts=counts))

    losses, weights = trained(made(), make_plan(made(), micro_batches=2))
    stages = [(0, ["0"]), (0, ["1"])]
    for remat, schedule in (["1"], "gpipe"), (["0", "1"], "gpipe"), (["1"], "interleaved"):
        plan = make_plan(made(), stages, micro_batches=2, remat=remat, schedule=schedule)
        found = trained(made(), plan)
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert all(torch.allclose(found[1][name], each, rtol=1e-9) for name, each in weights.items())


def test_steps_micro_batches_and_partitions_draw_different_numbers(monkeypatch):
    """Each has a seed of its own; a backward of torch's alone has none."""
    seeds = list[int]()
    plain = partition.backward_seed

    def noted(*key: Any) -> int:
        seeds.append(plain(*key))
        return seeds[-1]

    monkeypatch.setattr(partition, "backward_seed", noted)
    made = workload(lambda: Chain(ByFunction), "parts.*", "last")
    trained(made, make_plan(made, micro_batches=2, remat=PARTS[:1]))
    assert len(seeds) == len(set(seeds)) >= 4 * 2 * 3
    seeds.clear()
    made = workload(lambda: nn.Sequential(*(nn.Linear(WIDTH, each) for each in (WIDTH, WIDTH, 1))), "0", "1", "2")
    trained(made, make_plan(made, micro_batches=2, remat=["1"]))
    assert not seeds


def test_the_scripts_generators_are_left_alone():
    """As by forwards."""
    made = workload(lambda: Chain(ByPythonFunction), "parts.*", "last")
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
    assert before[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(before[2], torch.get_rng_state())
