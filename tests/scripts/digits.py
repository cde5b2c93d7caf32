"""mnist of pytorch/examples: Adadelta, a rate that falls every epoch, a test with its loss summed and hits counted."""

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
MICRO_BATCHES, STOP_AT = 2, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2 = nn.Linear(96, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def images(rows: int, seed: int) -> TensorDataset:
    """Each digit is a bar at a place of its own, in noise."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(10, (rows,), generator=generator)
    pictures = torch.randn(rows, 1, 12, 12, generator=generator, dtype=torch.float64) / 4
    pictures[torch.arange(rows), 0, digits] += 1
    return TensorDataset(pictures, digits)


def train_loader(epoch: int) -> DataLoader[Any]:
    return DataLoader(images(21, 0), ROWS, shuffle=True, generator=torch.Generator().manual_seed(epoch))


def test_loader() -> DataLoader[Any]:
    return DataLoader(images(10, 1), 8)


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = Net().double()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=RATE)
    scheduler = StepLR(optimizer, step_size=1, gamma=GAMMA)
    for epoch in range(EPOCHS):
        model.train()
        for data, target in train_loader(epoch):
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            log(loss=loss.item())
        model.eval()
        test_loss = correct = rows = 0.0
        with torch.no_grad():
            for data, target in test_loader():
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += output.argmax(dim=1).eq(target).sum().item()
                rows += len(data)
        log(test_loss=test_loss / rows, accuracy=correct / rows)
        scheduler.step()
    return model


def workload() -> Workload:
    return Workload(
        model=lambda: Net().double(),
        batch=lambda rows, generator: images(rows, int(torch.randint(1000, (), generator=generator))).tensors,
        loss=F.nll_loss,
        optimizer=lambda parameters: torch.optim.Adadelta(parameters, lr=RATE),
        metrics={"accuracy": lambda output, target: output.argmax(dim=1).eq(target).double().mean()},
        batch_size=ROWS,
        seed=SEED,
        marks=("conv1", "conv2", "fc1", "fc2"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    scheduler = StepLR(pipeline.optimizer, step_size=1, gamma=GAMMA)
    first = position = 0
    if (folder / "last").exists():
        state = pipeline.load(folder / "last")
        scheduler.load_state_dict(state["scheduler"])
        first, position = state["epoch"], state["position"]
    for epoch in range(first, EPOCHS):
        for data, target in itertools.islice(train_loader(epoch), position, None):
            loss = pipeline.step((data, target))
            log(loss=loss)
            position += 1
            if pipeline.stop_requested():
                state = {"scheduler": scheduler.state_dict(), "epoch": epoch, "position": position}
                pipeline.save(folder / "last", state)
                return
        position = 0
        result = StepResult.over(pipeline.evaluate((data, target)) for data, target in test_loader())
        log(test_loss=result, accuracy=result.metrics["accuracy"])
        scheduler.step()


def used(model: nn.Module) -> list[float]:
    """The classes of a few images."""
    model.eval()
    with torch.no_grad():
        return model(images(5, 2).tensors[0]).argmax(1).tolist()
