"""AmoebaNet-D as torchgpipe's benchmark cuts it: 24 layers in a line, each handing on its output and its input.

    stem (3 layers), 6 normal cells, reduction, 6 normal cells, reduction, 6 normal cells, classifier

Cell k reads what cells k - 1 and k - 2 made; in a line the older value travels through the cell between.

Source: Real et al., Regularized Evolution for Image Classifier Architecture Search, AAAI 2019, figure 5 and section 4;
widths, stem and what a normal cell joins as in the TPU code that GPipe and torchgpipe (arXiv 2004.09910, table 3)
measured: (18, 256) is 18 normal cells and 256 filters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

import assigner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STAGES = 3
"""Runs of normal cells, with a reduction between two of them."""


class Step(NamedTuple):
    """One step of a cell: two of its earlier values, each through an operation, and their sum.

    Values 0 and 1 are the cell's inputs, the newer first; step n makes value n + 2.
    """

    left: str
    of_left: int
    right: str
    of_right: int


class Genotype(NamedTuple):
    """What kind of cell: its steps, and the values that it joins as its output."""

    steps: tuple[Step, ...]
    joined: tuple[int, ...]


NORMAL = Genotype(
    (
        Step("1x1", 1, "max 3x3", 1),
        Step("none", 1, "1x7 7x1", 0),
        Step("1x1", 0, "1x7 7x1", 0),
        Step("max 3x3", 2, "none", 2),
        Step("average 3x3", 1, "1x1", 5),
    ),
    (0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        Step("max 2x2", 0, "max 3x3", 0),
        Step("none", 2, "3x3", 1),
        Step("1x7 7x1", 2, "max 3x3", 2),
        Step("none", 3, "max 2x2", 1),
        Step("average 3x3", 2, "1x1", 3),
    ),
    (4, 5, 6),
)


def convolution(
    source: int, target: int, *, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Module:
    """Rectifier, convolution, norm: (rows, source, h, w) -> (rows, target, h / stride, w / stride)."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(source, target, kernel, stride=stride, padding=padding, bias=False),
        nn.BatchNorm2d(target),
    )


class HalvedShift(nn.Module):
    """Half the size without a loss: the even pixels make one half of the channels, the odd ones the other.

    (rows, source, h, w) -> (rows, target, h / 2, w / 2).
    """

    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(source, target // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(source, target // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(target)

    def forward(self, x: Tensor) -> Tensor:
        """Both halves, side by side."""
        x = torch.relu(x)
        shifted = nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat((self.even(x), self.odd(shifted)), dim=1))


def bottleneck(width: int, kernels: Sequence[tuple[int, int]], strides: Sequence[tuple[int, int]]) -> nn.Module:
    """A quarter of the channels, convolutions on these, and all channels again."""
    inner = width // 4
    steps = [
        convolution(inner, inner, kernel=kernel, stride=stride) for kernel, stride in zip(kernels, strides, strict=True)
    ]
    return nn.Sequential(convolution(width, inner), *steps, convolution(inner, width))


OPERATIONS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "none": lambda width, stride: nn.Identity() if stride == 1 else HalvedShift(width, width),
    "1x1": lambda width, stride: convolution(width, width, stride=(stride, stride)),
    "3x3": lambda width, stride: bottleneck(width, [(3, 3)], [(stride, stride)]),
    "1x7 7x1": lambda width, stride: bottleneck(width, [(1, 7), (7, 1)], [(1, stride), (stride, 1)]),
    "max 2x2": lambda _, stride: nn.MaxPool2d(2, stride=stride),
    "max 3x3": lambda _, stride: nn.MaxPool2d(3, stride=stride, padding=1),
    "average 3x3": lambda _, stride: nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False),
}
"""A cell's operations by name, built for (channels, stride); stride 2 halves the size."""


class Cell(nn.Module):
    """A cell: the outputs of the two layers before -> its own output, and the newer of the two for the next cell.

    Args:
        genotype: Its steps.
        newer: Channels of the newer input.
        older: Channels of the older one.
        width: Channels inside.
        halve_older: The older input is twice as high and wide as the newer.
    """

    def __init__(self, genotype: Genotype, newer: int, older: int, width: int, *, halve_older: bool) -> None:
        super().__init__()
        self.genotype = genotype
        self.fit_newer = convolution(newer, width)
        if halve_older:
            self.fit_older: nn.Module = HalvedShift(older, width)
        else:
            self.fit_older = nn.Identity() if older == width else convolution(older, width)

        def made(name: str, of: int) -> nn.Module:
            return OPERATIONS[name](width, 2 if genotype is REDUCTION and of < 2 else 1)

        self.left = nn.ModuleList(made(step.left, step.of_left) for step in genotype.steps)
        self.right = nn.ModuleList(made(step.right, step.of_right) for step in genotype.steps)

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The cell's output and its newer input."""
        newer, older = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        values = [self.fit_newer(newer), self.fit_older(older)]
        for step, left, right in zip(self.genotype.steps, self.left, self.right, strict=True):
            values.append(left(values[step.of_left]) + right(values[step.of_right]))
        return torch.cat([values[n] for n in self.genotype.joined], dim=1), newer


class Classifier(nn.Module):
    """The last cell's output (rows, channels, h, w) -> scores (rows, classes)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Mean over the pixels, then a linear layer."""
        return self.linear(inputs[0].mean(dim=(2, 3)))


def amoebanet_d(*, cells: int, filters: int, classes: int = 1000) -> nn.Sequential:
    """The layers in a line: images (rows, 3, size, size) -> scores (rows, classes).

    Args:
        cells: Normal cells in all, a multiple of 3.
        filters: Channels that the first run's cells join; `filters / 4` inside the stem.
        classes: To tell apart.
    """
    width = filters // 4
    layers: list[nn.Module] = [
        nn.Sequential(nn.ReLU(), nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width))
    ]
    newer = older = width
    halved = False
    runs = [REDUCTION, REDUCTION, *([NORMAL] * (cells // STAGES) + [REDUCTION]) * STAGES][:-1]
    for genotype in runs:
        width *= 2 if genotype is REDUCTION else 1
        layers.append(Cell(genotype, newer, older, width, halve_older=halved))
        newer, older = width * len(genotype.joined), newer
        halved = genotype is REDUCTION
    return nn.Sequential(*layers, Classifier(newer, classes))


def workload(
    *, cells: int = 18, filters: int = 256, size: int = 224, batch_size: int = 32, classes: int = 1000
) -> assigner.Workload:
    """Random images and labels, as torchgpipe's speed benchmark trains on.

    Args:
        cells: As `amoebanet_d`.
        filters: As `amoebanet_d`.
        size: Of the images, in pixels, a multiple of 32.
        batch_size: Images in a step.
        classes: As `amoebanet_d`.
    """

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.rand(rows, 3, size, size, generator=generator)
        return images, torch.randint(classes, (rows,), generator=generator)

    return assigner.Workload(
        model=lambda: amoebanet_d(cells=cells, filters=filters, classes=classes),
        batch=batch,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=batch_size,
        marks=("*",),
        name=f"amoebanet-d-{cells}-{filters}",
    )
