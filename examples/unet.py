"""A U-Net that finds shapes in noisy images; its skips cross the whole depth, the longest from first to last."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

import assigner

CLASSES = ("background", "disc", "rectangle")


class Convolutions(nn.Sequential):
    """Two convolutions with norms: (rows, source, s, s) -> (rows, target, s, s)."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__(
            nn.Conv2d(source, target, 3, padding=1, bias=False),
            nn.GroupNorm(4, target),
            nn.ReLU(),
            nn.Conv2d(target, target, 3, padding=1, bias=False),
            nn.GroupNorm(4, target),
            nn.ReLU(),
        )


class Up(nn.Module):
    """One step back up: (rows, source, s, s) and the skip (rows, target, 2s, 2s) -> (rows, target, 2s, 2s)."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(source, target, 2, stride=2)
        self.convolutions = Convolutions(2 * target, target)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Enlarge, join with the skip, convolve."""
        return self.convolutions(torch.cat((self.enlarge(x), skip), dim=1))


class UNet(nn.Module):
    """Images (rows, 1, size, size) -> scores of each pixel (rows, classes, size, size).

    The skips need no word to assigner: it finds them in `forward`. A skip goes straight from the worker that makes it
    to the one that reads it, past those between.
    """

    def __init__(self, *, width: int, depth: int, classes: int) -> None:
        super().__init__()
        steps = list(itertools.pairwise([1, *(width * 2**n for n in range(depth + 1))]))
        self.down = nn.ModuleList(assigner.partition(Convolutions(*step)) for step in steps[:-1])
        self.bottom = assigner.partition(Convolutions(*steps[-1]))
        self.up = nn.ModuleList(assigner.partition(Up(source, target)) for target, source in reversed(steps[1:]))
        self.head = assigner.partition(nn.Conv2d(width, classes, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Down, bottom, and up again with the skips."""
        x = images
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(x, skip)
        return self.head(x)


def draw(rows: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images (rows, 1, size, size) of a disc and a rectangle, and the class of each pixel (rows, size, size)."""

    def random(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, 1, 1, generator=generator)

    line = torch.linspace(-1, 1, size)
    x, y = line[None, None, :], line[None, :, None]
    disc = (x - random(-0.6, 0.6)) ** 2 + (y - random(-0.6, 0.6)) ** 2 < random(0.25, 0.5) ** 2
    inside_x = (x - random(-0.6, 0.6)).abs() < random(0.2, 0.5)
    rectangle = inside_x & ((y - random(-0.6, 0.6)).abs() < random(0.2, 0.5))
    classes = torch.where(disc, 1, torch.where(rectangle, 2, 0))
    shade = torch.where(disc, random(0.5, 1.0), torch.where(rectangle, -random(0.5, 1.0), torch.zeros(())))
    slope = random(-0.3, 0.3) * x + random(-0.3, 0.3) * y
    noise = torch.randn(rows, size, size, generator=generator)
    return (shade + slope + 0.4 * noise)[:, None], classes


def workload(
    *,
    width: int = 16,
    depth: int = 3,
    size: int = 64,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    double: bool = False,
) -> assigner.Workload:
    """The model with its data, loss and optimizer.

    Args:
        width: Channels at the full size, a multiple of 4; twice as many after each halving.
        depth: How often the image is halved; the model has `2 * depth + 2` partitions.
        size: Of the images, in pixels, a multiple of `2 ** depth`.
        batch_size: Images in a step.
        learning_rate: Of AdamW.
        double: In float64.
    """
    dtype = torch.float64 if double else torch.float32

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images, classes = draw(rows, size, generator)
        return images.to(dtype), classes

    return assigner.Workload(
        model=lambda: UNet(width=width, depth=depth, classes=len(CLASSES)).to(dtype),
        batch=batch,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        batch_size=batch_size,
        name="unet",
    )
