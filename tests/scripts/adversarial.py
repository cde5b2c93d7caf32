"""dcgan of pytorch/examples: generator and discriminator, each with its loss and its optimizer, and BatchNorm.

The discriminator learns from real images and from made ones; then the generator learns from what the discriminator,
after its update, says of the same made ones. Images of a fixed noise are kept as the training goes on.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn
from torch.utils.data import DataLoader

from assigner import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, EPOCHS, ROWS, NOISE, RATE, BETAS = 7, 2, 4, 3, 0.01, (0.5, 0.999)
REAL, FAKE = 1.0, 0.0
MICRO_BATCHES, STOP_AT = 1, 4


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 6, 2, bias=False), nn.BatchNorm2d(6), nn.ReLU(True),
            nn.ConvTranspose2d(6, 4, 2, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
            nn.ConvTranspose2d(4, 1, 2, 2, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 4, 2, 2, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(4, 6, 2, 2, bias=False), nn.BatchNorm2d(6), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(6, 1, 2, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.main(images).view(-1)


def weights_init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.2)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def pictures(rows: int, generator: torch.Generator) -> torch.Tensor:
    """A bright row in the dark."""
    made = torch.full((rows, 1, 8, 8), -0.8, dtype=torch.float64)
    made[torch.arange(rows), 0, torch.randint(8, (rows,), generator=generator)] = 0.8
    return made


def loader(epoch: int) -> DataLoader[Any]:
    images = pictures(12, torch.Generator().manual_seed(0))
    return DataLoader(images, ROWS, shuffle=True, generator=torch.Generator().manual_seed(epoch))  # type: ignore[arg-type]


def draw(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, NOISE, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = Gan().double()
    net_g, net_d = model.generator, model.discriminator
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=RATE, betas=BETAS)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=RATE, betas=BETAS)
    for epoch in range(EPOCHS):
        for n, data in enumerate(loader(epoch)):
            net_d.zero_grad()
            output = net_d(data)
            err_d_real = F.binary_cross_entropy(output, torch.full_like(output, REAL))
            err_d_real.backward()
            d_x = output.mean().item()
            fake = net_g(draw(len(data), 100 * epoch + n))
            output = net_d(fake.detach())
            err_d_fake = F.binary_cross_entropy(output, torch.full_like(output, FAKE))
            err_d_fake.backward()
            d_g_z1 = output.mean().item()
            optimizer_d.step()
            net_g.zero_grad()
            output = net_d(fake)
            err_g = F.binary_cross_entropy(output, torch.full_like(output, REAL))
            err_g.backward()
            d_g_z2 = output.mean().item()
            optimizer_g.step()
            log(loss_d=(err_d_real + err_d_fake).item(), loss_g=err_g.item(), d_x=d_x, d_g_z1=d_g_z1, d_g_z2=d_g_z2)
    return model


class Gan(nn.Module):
    """Both of them; it is the discriminator's turn where there are images to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()
        self.generator.apply(weights_init)
        self.discriminator.apply(weights_init)

    def forward(self, noise: torch.Tensor, images: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        fake = self.generator(noise)
        if images is None:
            return {"fake": self.discriminator(fake)}
        return {"real": self.discriminator(images), "fake": self.discriminator(fake.detach())}


def loss(outputs: dict[str, torch.Tensor], _: Any) -> torch.Tensor:
    fake = outputs["fake"]
    if "real" not in outputs:
        return F.binary_cross_entropy(fake, torch.full_like(fake, REAL))
    real = F.binary_cross_entropy(outputs["real"], torch.full_like(fake, REAL))
    return real + F.binary_cross_entropy(fake, torch.full_like(fake, FAKE))


def workload() -> Workload:
    def batch(rows: int, generator: torch.Generator) -> Any:
        noise = torch.randn(rows, NOISE, 1, 1, dtype=torch.float64, generator=generator)
        return (noise, pictures(rows, generator)), None

    return Workload(
        model=lambda: Gan().double(),
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=RATE, betas=BETAS),
        metrics={
            "real": lambda outputs, _: outputs.get("real", outputs["fake"]).mean(),
            "fake": lambda outputs, _: outputs["fake"].mean(),
        },
        batch_size=ROWS,
        max_micro_batches=1,
        seed=SEED,
        marks=("generator", "discriminator"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    def train_only(part: str) -> None:
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(name.startswith(part))

    first = position = 0
    if (folder / "last").exists():
        first, position = pipeline.load(folder / "last")
    for epoch in range(first, EPOCHS):
        for n, data in itertools.islice(enumerate(loader(epoch)), position, None):
            noise = draw(len(data), 100 * epoch + n)
            train_only("discriminator")
            with pipeline.kept_buffers("generator.**"):
                loss_d = pipeline.step(((noise, data), None))
            train_only("generator")
            loss_g = pipeline.step(((noise,), None))
            d_x, d_g_z1 = loss_d.metrics["real"], loss_d.metrics["fake"]
            log(loss_d=loss_d, loss_g=loss_g, d_x=d_x, d_g_z1=d_g_z1, d_g_z2=loss_g.metrics["fake"])
            if pipeline.stop_requested():
                pipeline.save(folder / "last", (epoch, n + 1))
                return
        position = 0


def used(model: nn.Module) -> list[float]:
    """Images of the fixed noise, with the running statistics."""
    model.eval()
    with torch.no_grad():
        return model.generator(draw(2, 9)).flatten().tolist()
