"""vae of pytorch/examples: a loss of two summed terms over three outputs, averages over the epoch.

The noise of the reparameterisation is an input here, so that the plain loop and the ported one can draw the same.
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

SEED, EPOCHS, ROWS, PIXELS, LATENT, TRAIN_ROWS, TEST_ROWS = 1, 2, 6, 25, 3, 21, 10
MICRO_BATCHES, STOP_AT = 3, 2


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(PIXELS, 12), nn.Linear(12, LATENT), nn.Linear(12, LATENT)
        self.fc3, self.fc4 = nn.Linear(LATENT, 12), nn.Linear(12, PIXELS)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.fc1(x.view(-1, PIXELS)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        return self.decode(mu + noise * torch.exp(0.5 * logvar)), mu, logvar


def images(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of pixels, bright on one side of a place."""
    places = torch.rand(rows, 1, 1, 1, generator=generator, dtype=torch.float64)
    return (torch.arange(5).double() / 5 < places).double().expand(rows, 1, 5, 5) * 0.9


TRAIN = images(TRAIN_ROWS, torch.Generator().manual_seed(0))
TEST = images(TEST_ROWS, torch.Generator().manual_seed(1))


def train_loader(epoch: int) -> DataLoader[Any]:
    return DataLoader(TRAIN, ROWS, shuffle=True, generator=torch.Generator().manual_seed(epoch))


def draw(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, LATENT, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_function(outputs: Any, x: torch.Tensor) -> torch.Tensor:
    recon_x, mu, logvar = outputs
    bce = F.binary_cross_entropy(recon_x, x.view(-1, PIXELS), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = VAE().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        model.train()
        train_loss = 0.0
        for n, data in enumerate(train_loader(epoch)):
            optimizer.zero_grad()
            outputs = model(data, draw(len(data), n))
            loss = loss_function(outputs, data)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            log(loss=loss.item() / len(data))
        log(train_loss=train_loss / TRAIN_ROWS)
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for n, data in enumerate(DataLoader(TEST, ROWS)):
                outputs = model(data, draw(len(data), n))
                test_loss += loss_function(outputs, data).item()
                if n == 0:
                    recon = outputs[0]
        log(test_loss=test_loss / TEST_ROWS, picture=recon.square().sum())
    return model


def workload() -> Workload:
    def batch(rows: int, generator: torch.Generator) -> Any:
        x = images(rows, generator)
        return (x, torch.randn(rows, LATENT, generator=generator, dtype=torch.float64)), x

    return Workload(
        model=lambda: VAE().double(),
        batch=batch,
        loss=loss_function,
        reduction="sum",
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        batch_size=ROWS,
        seed=SEED,
        marks=("*",),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    first, position, train_loss = 0, 0, 0.0
    if (folder / "last").exists():
        first, position, train_loss = pipeline.load(folder / "last")
    for epoch in range(first, EPOCHS):
        for n, data in itertools.islice(enumerate(train_loader(epoch)), position, None):
            loss = pipeline.step(((data, draw(len(data), n)), data))
            train_loss += loss
            log(loss=loss / len(data))
            if pipeline.stop_requested():
                pipeline.save(folder / "last", (epoch, n + 1, train_loss))
                return
        log(train_loss=train_loss / TRAIN_ROWS)
        position, train_loss = 0, 0.0
        test_loss = 0.0
        for n, data in enumerate(DataLoader(TEST, ROWS)):
            result = pipeline.evaluate(((data, draw(len(data), n)), data), outputs_to="all")
            test_loss += result
            if n == 0:
                recon = result.outputs[0]
        log(test_loss=test_loss / TEST_ROWS, picture=recon.square().sum())


def used(model: nn.Module) -> list[float]:
    """Images from noise: the decoder alone."""
    assert isinstance(model, VAE)
    with torch.no_grad():
        return model.decode(draw(2, 9)).flatten().tolist()
