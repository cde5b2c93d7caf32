"""Two networks against each other: as one workload with two phases, and as a plain script has them.

After pytorch/examples' dcgan: two optimizers, two losses, a discriminator that is used three times a batch,
BatchNorm in both. The discriminator is updated before the generator's loss is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from assigner import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner import Pipeline

LATENT, WIDTH = 4, 6
RATES = {"discriminator": 2e-2, "generator": 1e-2}


def generator() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(LATENT, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU()),
        nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh()),
    )


def discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.LeakyReLU(0.2)),
        nn.Sequential(nn.Linear(8, 1)),
    )


class Adversaries(nn.Module):
    """Both, with the phase told by what there is to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = generator(), discriminator()

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None) -> Any:
        if real is None:
            return self.discriminator(self.generator(noise))
        with torch.no_grad():
            fake = self.generator(noise)
        return self.discriminator(real), self.discriminator(fake)


def judged(logits: torch.Tensor, label: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def loss(outputs: Any, _: Any) -> torch.Tensor:
    if isinstance(outputs, tuple):
        return judged(outputs[0], 1.0) + judged(outputs[1], 0.0)
    return judged(outputs, 1.0)


def adams(named_parameters: Any) -> torch.optim.Optimizer:
    """A group for each network, with a rate of its own."""
    pairs = list(named_parameters)
    groups = [{"params": [p for name, p in pairs if name.startswith(part)], "lr": lr} for part, lr in RATES.items()]
    return torch.optim.Adam(groups, betas=(0.5, 0.999))


def workload(phase: str = "generator", rows: int = 8) -> Workload:
    def batch(rows: int, generator: torch.Generator) -> Any:
        noise = torch.randn(rows, LATENT, generator=generator, dtype=torch.float64)
        if phase == "generator":
            return {"noise": noise}, None
        return {"noise": noise, "real": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)}, None

    return Workload(
        lambda: Adversaries().double(), batch, loss, adams, rows, "gan", marks=("generator.*", "discriminator.*")
    )


def batches(count: int, rows: int = 8) -> list[dict[str, torch.Tensor]]:
    return [workload("discriminator").make_batch(rows, seed)[0] for seed in range(count)]


def trained(pipeline: Pipeline, given: Sequence[dict[str, torch.Tensor]]) -> list[tuple[float, float]]:
    """Both losses of each batch, by the form that docs/training.md has."""

    def train_only(part: str) -> None:
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(name.startswith(part))

    found = []
    for batch in given:
        train_only("discriminator")
        with pipeline.kept_buffers("generator.**"):
            first = pipeline.step((batch, None))
        train_only("generator")
        found.append((first, pipeline.step(({"noise": batch["noise"]}, None))))
    return found


def plain(
    given: Sequence[dict[str, torch.Tensor]], micro_batches: int = 1
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """The same as plain scripts have it, over micro-batches; losses and state."""
    torch.manual_seed(0)
    model = Adversaries().double()
    net_g, net_d = model.generator, model.discriminator
    adam_d = torch.optim.Adam(net_d.parameters(), lr=RATES["discriminator"], betas=(0.5, 0.999))
    adam_g = torch.optim.Adam(net_g.parameters(), lr=RATES["generator"], betas=(0.5, 0.999))
    losses = []
    for batch in given:
        net_d.zero_grad()
        fakes, total = [], 0.0
        for real, noise in zip(batch["real"].chunk(micro_batches), batch["noise"].chunk(micro_batches), strict=True):
            error_real = judged(net_d(real), 1.0) / micro_batches
            error_real.backward()
            fakes.append(net_g(noise))
            error_fake = judged(net_d(fakes[-1].detach()), 0.0) / micro_batches
            error_fake.backward()
            total += error_real.item() + error_fake.item()
        adam_d.step()
        net_g.zero_grad()
        total_g = 0.0
        for fake in fakes:
            error_g = judged(net_d(fake), 1.0) / micro_batches
            error_g.backward()
            total_g += error_g.item()
        adam_g.step()
        losses.append((total, total_g))
    return losses, dict(model.state_dict())
