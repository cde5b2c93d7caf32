"""A U-Net as in Pytorch-UNet: cross-entropy and Dice added up, RMSprop, clipping, a rate that waits for a plateau.

The Dice term is over all pixels of the batch, so several micro-batches would be another loss: it asks for the whole
batch. The validation is on Dice alone, in the middle of an epoch.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from assigner import StepResult, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, EPOCHS, ROWS, RATE, EVAL_EVERY = 5, 2, 4, 1e-2, 2
MICRO_BATCHES, STOP_AT = 2, 4


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = block(3, 4), block(4, 6), block(6, 8)
        self.up1, self.up2, self.outc = block(14, 6), block(10, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        y = self.up1(torch.cat([x2, F.interpolate(x3, scale_factor=2.0)], dim=1))
        y = self.up2(torch.cat([x1, F.interpolate(y, scale_factor=2.0)], dim=1))
        return self.outc(y)


def pictures(rows: int, seed: int) -> TensorDataset:
    """Rectangles in noise, and where they are."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.randint(1, 4, (2, rows, 1, 1), generator=generator)
    place = torch.arange(8)
    mask = ((place[:, None] >= low) & (place < 4 + high)).double()
    noise = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64) / 2
    return TensorDataset(noise + mask[:, None], mask)


def train_loader(epoch: int) -> DataLoader[Any]:
    return DataLoader(pictures(14, 0), ROWS, shuffle=True, generator=torch.Generator().manual_seed(epoch))


def val_loader() -> DataLoader[Any]:
    return DataLoader(pictures(6, 1), ROWS)


def dice(probability: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (2 * (probability * mask).sum() + 1e-6) / (probability.sum() + mask.sum() + 1e-6)


def criterion(output: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    loss = F.binary_cross_entropy_with_logits(output.squeeze(1), mask)
    return loss + 1 - dice(torch.sigmoid(output.squeeze(1)), mask)


def dice_score(output: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sum over the images, and how many there are."""
    found = [dice((one > 0).double(), wanted) for one, wanted in zip(output.squeeze(1), mask, strict=True)]
    return torch.stack(found).sum(), len(mask)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=RATE, weight_decay=1e-8, momentum=0.9)


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = UNet().double()
    optimizer = make_optimizer(model.parameters())
    scheduler = ReduceLROnPlateau(optimizer, "max", patience=0)
    step = 0
    for epoch in range(EPOCHS):
        for images, masks in train_loader(epoch):
            output = model(images)
            loss = criterion(output, masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            log(loss=loss.item())
            if step % EVAL_EVERY == 0:
                model.eval()
                score = images_seen = 0.0
                with torch.no_grad():
                    for val_images, val_masks in val_loader():
                        total, count = dice_score(model(val_images), val_masks)
                        score, images_seen = score + total.item(), images_seen + count
                model.train()
                scheduler.step(score / images_seen)
                log(dice=score / images_seen, rate=optimizer.param_groups[0]["lr"])
    return model


def workload() -> Workload:
    return Workload(
        model=lambda: UNet().double(),
        batch=lambda rows, generator: pictures(rows, int(torch.randint(1000, (), generator=generator))).tensors,
        loss=criterion,
        loss_over="batch",
        optimizer=make_optimizer,
        metrics={"dice": dice_score},
        batch_size=ROWS,
        seed=SEED,
        marks=("inc", "down*", "up*", "outc"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    scheduler = ReduceLROnPlateau(pipeline.optimizer, "max", patience=0)
    first = position = 0
    if (folder / "last").exists():
        first, position, state = pipeline.load(folder / "last")
        scheduler.load_state_dict(state)
    for epoch in range(first, EPOCHS):
        for images, masks in itertools.islice(train_loader(epoch), position, None):
            loss = pipeline.step((images, masks), max_norm=1.0)
            position += 1
            log(loss=loss)
            if pipeline.steps % EVAL_EVERY == 0:
                score = StepResult.over(pipeline.evaluate(tuple(batch)) for batch in val_loader()).metrics["dice"]
                scheduler.step(score)
                log(dice=score, rate=pipeline.optimizer.param_groups[0]["lr"])
            if pipeline.stop_requested():
                pipeline.save(folder / "last", (epoch, position, scheduler.state_dict()))
                return
        position = 0


def used(model: nn.Module) -> list[float]:
    """The masks of new images, as the number of their pixels."""
    model.eval()
    with torch.no_grad():
        return (model(pictures(3, 2).tensors[0]) > 0).sum(dim=(1, 2, 3)).tolist()
