"""An image classifier from begin to end: train, validate, keep the best, stop and go on, test, classify.

assigner profile examples/image_classifier.py:workload -o profile.json --workers 2
assigner solve profile.json -o plan.json
assigner run plan.json -- examples/image_classifier.py

Images are made only on the workers that read them. Ctrl-C, or a scheduler's signal, ends the training early: it is
saved, and the same command goes on where it was, in the middle of an epoch. The model is `ResNet` of resnet.py, which
knows nothing of all this.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from resnet import CLASSES, ResNet, draw
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

import assigner

if TYPE_CHECKING:
    from collections.abc import Sequence

SPLITS = {"train": (0, 1024), "validation": (1024, 128), "test": (2048, 128)}
"""The seed of the first image of each split, and how many it has."""


def workload(
    *,
    width: int = 16,
    blocks_per_group: int = 1,
    size: int = 32,
    batch_size: int = 32,
    learning_rate: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
) -> assigner.Workload:
    """The model and how it learns: every setting stands here, and what is changed stands in the plan.

    Args:
        width: Channels of the first group of blocks.
        blocks_per_group: 3 makes a ResNet-20.
        size: Of the images, in pixels.
        batch_size: Images in a step.
        learning_rate: Of the first epoch.
        momentum: Of SGD.
        weight_decay: Of SGD.
    """

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(len(CLASSES), (rows,), generator=generator)
        return draw(labels, size, generator), labels

    return assigner.Workload(
        model=lambda: ResNet(width=width, blocks_per_group=blocks_per_group, classes=len(CLASSES)),
        batch=batch,
        loss=nn.functional.cross_entropy,
        metrics={
            "top1": lambda scores, labels: hits(scores, labels, 1),
            "top3": lambda scores, labels: hits(scores, labels, 3),
        },
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=learning_rate, momentum=momentum, weight_decay=weight_decay
        ),
        batch_size=batch_size,
        name="image classifier",
        marks=("stem", "blocks.*", "head"),
    )


def hits(scores: Tensor, labels: Tensor, k: int) -> tuple[Tensor, int]:
    """How often the class is among the k most likely, and of how many."""
    return (scores.topk(k).indices == labels[:, None]).any(1).sum(), len(labels)


class Pictures(Dataset[tuple[Tensor, int]]):
    """Images of a split, each made from its own seed, and their classes; without `images` the classes alone.

    Args:
        split: One of SPLITS.
        size: Of an image, in pixels.
        images: Whether this rank reads them.
    """

    def __init__(self, split: str, size: int, *, images: bool) -> None:
        self.first, self.count = SPLITS[split]
        self.size, self.images = size, images

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = (7 * index) % len(CLASSES)
        if not self.images:
            return torch.empty(0), label
        generator = torch.Generator().manual_seed(self.first + index)
        return draw(torch.tensor([label]), self.size, generator)[0], label


def batches(
    pipeline: assigner.Pipeline, split: str, order: Sequence[int] | None = None
) -> DataLoader[tuple[Tensor, Tensor]]:
    """The batches of a split: all of it, or its images in this order."""
    data = Pictures(split, pipeline.workload.settings["size"], images=pipeline.needs_inputs)
    return DataLoader(data if order is None else Subset(data, order), pipeline.plan.workload.batch_size)


def score(pipeline: assigner.Pipeline, split: str) -> assigner.StepResult:
    """Loss and metrics over a split, the same on every rank."""
    return assigner.StepResult.over(
        pipeline.evaluate((images if pipeline.needs_inputs else None, labels))
        for images, labels in batches(pipeline, split)
    )


def train(pipeline: assigner.Pipeline, folder: Path, epochs: int) -> None:
    """Train for so many epochs, or until a signal; the best weights are in `folder / "best"` then."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(pipeline.optimizer, epochs)
    first, position, best = 0, 0, -1.0
    if (folder / "last").exists():
        state = pipeline.load(folder / "last")
        scheduler.load_state_dict(state["scheduler"])
        first, position, best = state["epoch"], state["position"], state["best"]

    def save(epoch: int, position: int) -> None:
        state = {"scheduler": scheduler.state_dict(), "epoch": epoch, "position": position, "best": best}
        pipeline.save(folder / "last", state, force=True)

    for epoch in range(first, epochs):
        order = torch.randperm(SPLITS["train"][1], generator=torch.Generator().manual_seed(epoch)).tolist()
        for images, labels in batches(pipeline, "train", order[position:]):
            result = pipeline.step((images if pipeline.needs_inputs else None, labels))
            position += len(labels)
            say(pipeline, f"epoch {epoch}, {position} images: loss {result:.4f}, top1 {result.metrics['top1']:.2%}")
            if pipeline.stop_requested():
                save(epoch, position)
                return
        position = 0
        scheduler.step()
        found = score(pipeline, "validation")
        say(pipeline, f"epoch {epoch}: validation {words(found)}")
        if found.metrics["top1"] > best:
            best = found.metrics["top1"]
            pipeline.save(folder / "best", force=True)
        save(epoch + 1, 0)


def words(found: assigner.StepResult) -> str:
    """Figures in a line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in {"loss": found, **found.metrics}.items())


def say(pipeline: assigner.Pipeline, line: str) -> None:
    """From one rank: all have the same figures."""
    if pipeline.rank == 0:
        print(line, flush=True)


def main() -> None:
    """Train, test the best weights, and classify with them in plain PyTorch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("image-classifier"), help="of the checkpoints")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    plan = assigner.load_plan()
    workload = assigner.load_workload(plan.workload.entry)
    with assigner.Pipeline(workload, plan) as pipeline:
        options.folder.mkdir(parents=True, exist_ok=True)
        train(pipeline, options.folder, options.epochs)
        if (options.folder / "best").exists():
            pipeline.load(options.folder / "best")
        say(pipeline, f"test {words(score(pipeline, 'test'))}")
        weights = pipeline.full_state_dict(to=0)
    if weights is not None:
        model = workload.model()
        model.load_state_dict(weights)
        model.eval()
        images, labels = workload.make_batch(4, seed=1)
        found = model(images).argmax(1)
        print("\n".join(f"{CLASSES[label]}: {CLASSES[guess]}" for label, guess in zip(labels, found, strict=True)))


if __name__ == "__main__":
    try:
        main()
    except assigner.AssignerError as error:
        sys.exit(assigner.tell(error))
