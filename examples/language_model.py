"""A language model from begin to end: train, validate, keep the best, stop and go on, test, write text.

assigner profile examples/language_model.py:workload -o profile.json --workers 2
assigner solve profile.json -o plan.json
assigner run plan.json -- examples/language_model.py

Ctrl-C, or a scheduler's signal, ends the training early: it is saved, and the same command goes on where it was, at
the same place in the data. The model is `GPT` of gpt.py, which knows nothing of all this.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpt import BYTES, GPT, read_text
from torch import Tensor, nn

import assigner

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
"""Which part of the text each split is."""
EVALUATED = 8
"""Batches in a validation or test."""


def workload(
    *,
    blocks: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 64,
    batch_size: int = 16,
    learning_rate: float = 2e-3,
    weight_decay: float = 0.05,
) -> assigner.Workload:
    """The model and how it learns: every setting stands here, and what is changed stands in the plan.

    Args:
        blocks: Transformer blocks.
        width: Of the residual stream.
        heads: Of the attention.
        context: Bytes that the model sees.
        batch_size: Windows in a step.
        learning_rate: The highest, after the warm-up.
        weight_decay: Of matrices; vectors have none.
    """

    def model() -> nn.Module:
        return GPT(vocabulary=BYTES, context=context, width=width, heads=heads, blocks=blocks, tied=True, dropout=0.0)

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        text = split("train")
        return cut(text, torch.randint(len(text) - context, (rows,), generator=generator), context)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices, vectors = ([each for each in parameters if (each.dim() > 1) == is_matrix] for is_matrix in (1, 0))
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate)

    return assigner.Workload(
        model=model,
        batch=batch,
        loss=lambda scores, targets: nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()),
        metrics={"accuracy": lambda scores, targets: (scores.argmax(-1) == targets).float().mean()},
        optimizer=optimizer,
        batch_size=batch_size,
        name="language model",
    )


def split(name: str) -> Tensor:
    """A part of the text: bytes."""
    text = read_text("")
    start, end = PARTS[name]
    return text[int(start * len(text)) : int(end * len(text))]


def cut(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Windows of the text, and the same windows a byte later: (rows, context) each."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def stream(rows: int, context: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training batches without an end, from number `first` on; each epoch has an order of its own.

    So the position in the data is a number, the same as that of the steps that were made.
    """
    text = split("train")
    starts = torch.arange(0, len(text) - context, context)
    count = math.ceil(len(starts) / rows)
    for epoch in itertools.count(first // count):
        order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(epoch))
        for chosen in starts[order].split(rows)[first % count :]:
            yield cut(text, chosen, context)
        first = 0


def score(pipeline: assigner.Pipeline, name: str) -> assigner.StepResult:
    """Loss and accuracy over the first batches of a split, the same on every rank."""
    text, rows, context = split(name), pipeline.plan.workload.batch_size, pipeline.workload.settings["context"]
    starts = torch.arange(0, len(text) - context, context)[: EVALUATED * rows]
    return assigner.StepResult.over(pipeline.evaluate(cut(text, chosen, context)) for chosen in starts.split(rows))


def train(pipeline: assigner.Pipeline, folder: Path, *, steps: int, every: int) -> None:
    """Train up to a number of steps, or until a signal; the best weights are in `folder / "best"` then."""
    rows, context = pipeline.plan.workload.batch_size, pipeline.workload.settings["context"]

    def rate(step: int) -> float:
        """Up in a line, then down in half a cosine wave."""
        warm_up = steps // 10 + 1
        return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(pipeline.optimizer, rate)
    best = math.inf
    if (folder / "last").exists():
        state = pipeline.load(folder / "last")
        scheduler.load_state_dict(state["scheduler"])
        best = state["best"]
    for batch in stream(rows, context, first=pipeline.steps):
        stopping = pipeline.stop_requested() or pipeline.steps >= steps
        if stopping or pipeline.steps % every == 0:
            found = score(pipeline, "validation")
            say(pipeline, f"step {pipeline.steps}: validation {words(found)}")
            if found < best:
                best = found
                pipeline.save(folder / "best", force=True)
        if stopping:
            break
        loss = pipeline.step(batch, max_norm=1.0)
        scheduler.step()
        say(pipeline, f"step {pipeline.steps}: loss {loss:.4f}, rate {scheduler.get_last_lr()[0]:.2e}")
    pipeline.save(folder / "last", {"scheduler": scheduler.state_dict(), "best": best}, force=True)


@torch.no_grad()
def write(model: nn.Module, start: str, count: int, context: int) -> str:
    """Let a plain model go on from a text, byte by byte."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(start.encode())])
    for _ in range(count):
        chances = model(tokens[:, -context:])[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def words(found: assigner.StepResult) -> str:
    """Figures in a line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in {"loss": found, **found.metrics}.items())


def say(pipeline: assigner.Pipeline, line: str) -> None:
    """From one rank: all have the same figures."""
    if pipeline.rank == 0:
        print(line, flush=True)


def main() -> None:
    """Train, test the best weights, and write with them in plain PyTorch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("language-model"), help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps between validations")
    options = parser.parse_args()
    plan = assigner.load_plan()
    workload = assigner.load_workload(plan.workload.entry)
    with assigner.Pipeline(workload, plan) as pipeline:
        options.folder.mkdir(parents=True, exist_ok=True)
        train(pipeline, options.folder, steps=options.steps, every=options.every)
        pipeline.load(options.folder / "best")
        say(pipeline, f"test {words(score(pipeline, 'test'))}")
        weights = pipeline.full_state_dict(to=0)
    if weights is not None:
        model = workload.model()
        model.load_state_dict(weights)
        print(write(model, "The ", 100, workload.settings["context"]))


if __name__ == "__main__":
    try:
        main()
    except assigner.AssignerError as error:
        sys.exit(assigner.tell(error))
