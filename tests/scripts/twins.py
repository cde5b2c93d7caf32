"""siamese_network of pytorch/examples: one tower for two images, a head over both, hits counted."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from assigner import StepResult, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, EPOCHS, ROWS, RATE, GAMMA = 1, 2, 6, 1.0, 0.7
MICRO_BATCHES, STOP_AT = 2, 3


class SiameseNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(32, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
        self.sigmoid = nn.Sigmoid()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                module.bias.data.fill_(0.01)

    def forward(self, input1: torch.Tensor, input2: torch.Tensor) -> torch.Tensor:
        output = torch.cat((self.tower(input1), self.tower(input2)), 1)
        return self.sigmoid(self.fc(output))


def pairs(rows: int, seed: int) -> TensorDataset:
    """Two images with a bar each; the target says whether it stands at the same place."""
    generator = torch.Generator().manual_seed(seed)
    same = torch.randint(2, (rows,), generator=generator)
    first = torch.randint(8, (rows,), generator=generator)
    second = torch.where(same == 1, first, (first + 3) % 8)
    made = torch.randn(2, rows, 1, 8, 8, generator=generator, dtype=torch.float64) / 4
    for picture, place in zip(made, (first, second), strict=True):
        picture[torch.arange(rows), 0, place] += 1
    return TensorDataset(made[0], made[1], same.double())


def train_loader(epoch: int) -> DataLoader[Any]:
    return DataLoader(pairs(20, 0), ROWS, shuffle=True, generator=torch.Generator().manual_seed(epoch))


def test_loader() -> DataLoader[Any]:
    return DataLoader(pairs(11, 1), ROWS)


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = SiameseNetwork().double()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=RATE)
    scheduler = StepLR(optimizer, step_size=1, gamma=GAMMA)
    for epoch in range(EPOCHS):
        model.train()
        for images_1, images_2, targets in train_loader(epoch):
            optimizer.zero_grad()
            outputs = model(images_1, images_2).squeeze()
            loss = F.binary_cross_entropy(outputs, targets)
            loss.backward()
            optimizer.step()
            log(loss=loss.item())
        model.eval()
        test_loss = correct = rows = 0.0
        with torch.no_grad():
            for images_1, images_2, targets in test_loader():
                outputs = model(images_1, images_2).squeeze()
                test_loss += F.binary_cross_entropy(outputs, targets, reduction="sum").item()
                pred = torch.where(outputs > 0.5, 1, 0)
                correct += pred.eq(targets).sum().item()
                rows += len(targets)
        log(test_loss=test_loss / rows, correct=correct / rows)
        scheduler.step()
    return model


def hits(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs.squeeze(1) > 0.5).eq(targets).sum(), len(targets)


def workload() -> Workload:
    def batch(rows: int, generator: torch.Generator) -> Any:
        *images, targets = pairs(rows, int(torch.randint(1000, (), generator=generator))).tensors
        return tuple(images), targets

    return Workload(
        model=lambda: SiameseNetwork().double(),
        batch=batch,
        loss=lambda outputs, targets: F.binary_cross_entropy(outputs.squeeze(1), targets),
        optimizer=lambda parameters: torch.optim.Adadelta(parameters, lr=RATE),
        metrics={"hits": hits},
        batch_size=ROWS,
        seed=SEED,
        marks=("tower", "fc"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    scheduler = StepLR(pipeline.optimizer, step_size=1, gamma=GAMMA)
    first = position = 0
    if (folder / "last").exists():
        first, position, state = pipeline.load(folder / "last")
        scheduler.load_state_dict(state)
    for epoch in range(first, EPOCHS):
        for images_1, images_2, targets in itertools.islice(train_loader(epoch), position, None):
            loss = pipeline.step(((images_1, images_2), targets))
            log(loss=loss)
            position += 1
            if pipeline.stop_requested():
                pipeline.save(folder / "last", (epoch, position, scheduler.state_dict()))
                return
        position = 0
        result = StepResult.over(pipeline.evaluate(((one, other), targets)) for one, other, targets in test_loader())
        log(test_loss=result, correct=result.metrics["hits"])
        scheduler.step()


def used(model: nn.Module) -> list[float]:
    """How alike two images are."""
    model.eval()
    first, second, _ = pairs(4, 2).tensors
    with torch.no_grad():
        return model(first, second).flatten().tolist()
