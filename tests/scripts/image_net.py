"""imagenet of pytorch/examples: a ResNet with BatchNorm, top-1 and top-2 in training and validation, the best kept.

Images are read and decoded only where they are needed.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from assigner import StepResult, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, EPOCHS, ROWS, CLASSES = 3, 3, 6, 4
RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-4
MICRO_BATCHES, STOP_AT = 1, 5


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.layer1, self.layer2 = nn.Sequential(BasicBlock(4, 4, 1)), nn.Sequential(BasicBlock(4, 6, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class Pictures(Dataset[Any]):
    """Stripes in a direction of each class; decoding one is counted."""

    decoded = 0

    def __init__(self, count: int, seed: int, *, decode: bool = True) -> None:
        self.count, self.seed, self.decode = count, seed, decode

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        kind = (7 * index + self.seed) % CLASSES
        if not self.decode:
            return 0, kind
        Pictures.decoded += 1
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        slope = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]])[kind]
        place = torch.arange(8)
        stripes = torch.sin(slope[0] * place[:, None] + slope[1] * place[None, :])
        return (stripes + torch.randn(3, 8, 8, generator=generator) / 4).double(), kind


def train_loader(epoch: int, *, decode: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(epoch)
    return DataLoader(Pictures(18, 0, decode=decode), ROWS, shuffle=True, generator=generator)


def val_loader(*, decode: bool = True) -> DataLoader[Any]:
    return DataLoader(Pictures(9, 1, decode=decode), ROWS)


def accuracy(output: torch.Tensor, target: torch.Tensor, k: int) -> torch.Tensor:
    """The share of rows whose class is among the k most likely, in per cent."""
    return output.topk(k, dim=1).indices.eq(target[:, None]).any(dim=1).double().mean() * 100


class AverageMeter:
    def __init__(self) -> None:
        self.sum = self.count = 0.0

    def update(self, value: float, rows: int) -> None:
        self.sum, self.count = self.sum + value * rows, self.count + rows

    @property
    def average(self) -> float:
        return self.sum / self.count


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = ResNet().double()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    best_acc1, best = -1.0, {}
    for epoch in range(EPOCHS):
        model.train()
        for images, target in train_loader(epoch):
            output = model(images)
            loss = F.cross_entropy(output, target)
            acc1, acc2 = accuracy(output, target, 1), accuracy(output, target, 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss=loss.item(), acc1=acc1.item(), acc2=acc2.item())
        losses, top1 = AverageMeter(), AverageMeter()
        model.eval()
        with torch.no_grad():
            for images, target in val_loader():
                output = model(images)
                loss = F.cross_entropy(output, target)
                losses.update(loss.item(), len(target))
                top1.update(accuracy(output, target, 1).item(), len(target))
        log(val_loss=losses.average, acc1=top1.average)
        scheduler.step()
        if top1.average > best_acc1:
            best_acc1 = top1.average
            best = {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(best)
    return model


def workload() -> Workload:
    def batch(rows: int, generator: torch.Generator) -> Any:
        pictures = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
        return pictures, torch.randint(CLASSES, (rows,), generator=generator)

    return Workload(
        model=lambda: ResNet().double(),
        batch=batch,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        metrics={
            "acc1": lambda output, target: accuracy(output, target, 1),
            "acc2": lambda output, target: accuracy(output, target, 2),
        },
        batch_size=ROWS,
        seed=SEED,
        marks=("conv1", "bn1", "layer1", "layer2", "fc"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    scheduler = StepLR(pipeline.optimizer, step_size=2, gamma=0.1)
    first, position, best_acc1 = 0, 0, -1.0
    if (folder / "last").exists():
        state = pipeline.load(folder / "last")
        first, position, best_acc1 = state["epoch"], state["position"], state["best_acc1"]
        scheduler.load_state_dict(state["scheduler"])
    decode = pipeline.needs_inputs
    for epoch in range(first, EPOCHS):
        for images, target in itertools.islice(train_loader(epoch, decode=decode), position, None):
            result = pipeline.step((images if decode else None, target))
            log(loss=result, acc1=result.metrics["acc1"], acc2=result.metrics["acc2"])
            position += 1
            if pipeline.stop_requested():
                state = {"epoch": epoch, "position": position, "best_acc1": best_acc1}
                pipeline.save(folder / "last", {**state, "scheduler": scheduler.state_dict()})
                return
        position = 0
        result = StepResult.over(
            pipeline.evaluate((images if decode else None, target)) for images, target in val_loader(decode=decode)
        )
        log(val_loss=result, acc1=result.metrics["acc1"])
        scheduler.step()
        if result.metrics["acc1"] > best_acc1:
            best_acc1 = result.metrics["acc1"]
            pipeline.save(folder / "best", force=True)
    pipeline.load(folder / "best")


def used(model: nn.Module) -> list[float]:
    """The hits of `--evaluate`."""
    model.eval()
    with torch.no_grad():
        return [accuracy(model(images), target, 1).item() for images, target in val_loader()]
