"""A ResNet for 32 x 32 images with BatchNorm; the model knows nothing of assigner, the partitions are name patterns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import assigner

CLASSES = ("disc", "square", "diamond", "ring", "cross", "stripes across", "stripes down", "checkers")


class Stem(nn.Module):
    """The first convolution: (rows, 3, size, size) -> (rows, width, size, size)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Convolution, norm, ReLU."""
        return nn.functional.relu(self.norm(self.conv(x)))


class Block(nn.Module):
    """Two convolutions and a shortcut: (rows, source, s, s) -> (rows, target, s / stride, s / stride)."""

    def __init__(self, source: int, target: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(source, target, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(target)
        self.conv2 = nn.Conv2d(target, target, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(target)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or source != target:
            self.shortcut = nn.Sequential(
                nn.Conv2d(source, target, 1, stride=stride, bias=False), nn.BatchNorm2d(target)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The residual, added to the shortcut."""
        residual = self.norm2(self.conv2(nn.functional.relu(self.norm1(self.conv1(x)))))
        return nn.functional.relu(residual + self.shortcut(x))


class Head(nn.Module):
    """Mean over the image, then the scores: (rows, width, s, s) -> (rows, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Score every class."""
        return self.out(x.mean(dim=(2, 3)))


class ResNet(nn.Module):
    """Images (rows, 3, size, size) -> scores (rows, classes); three groups of blocks, each half as wide an image."""

    def __init__(self, *, width: int, blocks_per_group: int, classes: int) -> None:
        super().__init__()
        self.stem = Stem(width)
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
        self.blocks = nn.ModuleList(
            Block(target if n else source, target, 1 if n else stride)
            for source, target, stride in sizes
            for n in range(blocks_per_group)
        )
        self.head = Head(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Stem, blocks, head."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def draw(labels: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """One image per label, (rows, 3, size, size): its shape at a random place, in random colours, with noise."""
    rows = len(labels)

    def random(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(rows, *shape, generator=generator)

    line = torch.linspace(-1, 1, size)
    scale = random(0.4, 0.8, 1, 1)
    x = (line[None, None, :] - random(-0.3, 0.3, 1, 1)) / scale
    y = (line[None, :, None] - random(-0.3, 0.3, 1, 1)) / scale
    x, y = torch.broadcast_tensors(x, y)
    distance, largest, smallest = (x**2 + y**2).sqrt(), x.abs().maximum(y.abs()), x.abs().minimum(y.abs())
    across, down = torch.sin(8 * y) > 0, torch.sin(8 * x) > 0
    shapes = torch.stack(
        [
            distance < 1, largest < 0.9, x.abs() + y.abs() < 1.1, (distance < 1) & (distance > 0.55),
            (smallest < 0.3) & (largest < 1), across, down, across ^ down,
        ]
    )  # fmt: skip
    mask = shapes[labels, torch.arange(rows)][:, None].float()
    background, colour = random(-1.0, 0.0, 3, 1, 1), random(0.2, 1.0, 3, 1, 1)
    noise = torch.randn(rows, 3, size, size, generator=generator)
    return background + mask * (colour - background) + 0.1 * noise


def workload(
    *,
    width: int = 16,
    blocks_per_group: int = 3,
    size: int = 32,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    double: bool = False,
) -> assigner.Workload:
    """The model with its data, loss and optimizer.

    BatchNorm takes its statistics over each micro-batch, under a plan as in any training with accumulated gradients.

    Args:
        width: Channels of the first group; the others have two and four times as many.
        blocks_per_group: 3 makes a ResNet-20; with stem and head the model has `3 * blocks_per_group + 2` partitions.
        size: Of the images, in pixels.
        batch_size: Images in a step.
        learning_rate: Of AdamW.
        double: In float64.
    """
    dtype = torch.float64 if double else torch.float32

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(len(CLASSES), (rows,), generator=generator)
        return draw(labels, size, generator).to(dtype), labels

    return assigner.Workload(
        model=lambda: ResNet(width=width, blocks_per_group=blocks_per_group, classes=len(CLASSES)).to(dtype),
        batch=batch,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        batch_size=batch_size,
        name="resnet",
        marks=("stem", "blocks.*", "head"),
    )
