"""word_language_model of pytorch/examples, as a Transformer.

One long text in a few streams; plain SGD by hand after clipping, its rate divided by four whenever the validation does
not get better; Ctrl-C ends training early; the best weights are loaded back and tested. A mask is kept from call to
call. Time comes first, so that a row of the batch, a stream, is a column of its tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn

from assigner import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, EPOCHS, BPTT, WIDTH, WORDS, CLIP, RATE = 11, 3, 5, 8, 13, 0.25, 2.0
MICRO_BATCHES, STOP_AT = 2, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_emb = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)
        self.layers = nn.ModuleList(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) for _ in range(2))
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.register_buffer("positions", torch.arange(BPTT)[:, None] / torch.arange(1, WIDTH + 1) % 1)
        self.src_mask: torch.Tensor | None = None

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        if self.src_mask is None or self.src_mask.size(0) != src.size(0):
            length = src.size(0)
            self.src_mask = torch.log(torch.tril(torch.ones(length, length, dtype=torch.float64, device=src.device)))
        x = self.input_emb(src) * math.sqrt(WIDTH) + self.positions[: src.size(0), None]
        for layer in self.layers:
            x = layer(x, mask=self.src_mask)
        return F.log_softmax(self.decoder(x), dim=-1)


def text(seed: int, length: int) -> torch.Tensor:
    """(length, streams): each word follows from the one before, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    steps = 1 + (torch.rand(length, 4, generator=generator) < 0.2).long()
    return steps.cumsum(0) * 3 % WORDS


TRAIN, VALIDATION, TEST = text(0, 19), text(1, 11), text(2, 14)


def get_batch(source: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last one is shorter."""
    end = min(start + BPTT, len(source) - 1)
    return source[start:end], source[start + 1 : end + 1]


def criterion(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(output.reshape(-1, WORDS), targets.reshape(-1))


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = Model().double()
    rate, best_val_loss, best = RATE, math.inf, {}

    def evaluate(source: torch.Tensor) -> float:
        model.eval()
        total = 0.0
        with torch.no_grad():
            for start in range(0, len(source) - 1, BPTT):
                data, targets = get_batch(source, start)
                output = model(data)
                total += len(data) * criterion(output, targets).item()
        return total / (len(source) - 1)

    for _ in range(EPOCHS):
        model.train()
        for start in range(0, len(TRAIN) - 1, BPTT):
            data, targets = get_batch(TRAIN, start)
            model.zero_grad()
            output = model(data)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-rate)
            log(loss=loss.item())
        val_loss = evaluate(VALIDATION)
        log(val_loss=val_loss, ppl=math.exp(val_loss))
        if val_loss < best_val_loss:
            best = {name: each.clone() for name, each in model.state_dict().items()}
            best_val_loss = val_loss
        else:
            rate /= 4.0
    model.load_state_dict(best)
    log(test_loss=evaluate(TEST))
    return model


def workload() -> Workload:
    def batch(rows: int, generator: torch.Generator) -> Any:
        words = torch.randint(WORDS, (BPTT + 1, rows), generator=generator)
        return words[:-1], words[1:]

    return Workload(
        model=lambda: Model().double(),
        batch=batch,
        loss=criterion,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        batch_size=4,
        seed=SEED,
        marks=("input_emb", "layers.*", "decoder"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    first, position, best_val_loss = 0, 0, math.inf

    def evaluate(source: torch.Tensor) -> float:
        total = 0.0
        for start in range(0, len(source) - 1, BPTT):
            data, targets = get_batch(source, start)
            total += len(data) * pipeline.evaluate((data, targets))
        return total / (len(source) - 1)

    if (folder / "last").exists():
        first, position, best_val_loss = pipeline.load(folder / "last")
    for epoch in range(first, EPOCHS):
        for start in range(position, len(TRAIN) - 1, BPTT):
            data, targets = get_batch(TRAIN, start)
            loss = pipeline.step((data, targets), max_norm=CLIP)
            log(loss=loss)
            if pipeline.stop_requested():
                pipeline.save(folder / "last", (epoch, start + BPTT, best_val_loss))
                return
        position = 0
        val_loss = evaluate(VALIDATION)
        log(val_loss=val_loss, ppl=math.exp(val_loss))
        if val_loss < best_val_loss:
            pipeline.save(folder / "best", force=True)
            best_val_loss = val_loss
        else:
            for group in pipeline.optimizer.param_groups:
                group["lr"] /= 4.0
    pipeline.load(folder / "best")
    log(test_loss=evaluate(TEST))


def used(model: nn.Module) -> list[float]:
    """The most likely words, one after another."""
    model.eval()
    words = torch.tensor([[1]])
    with torch.no_grad():
        for _ in range(4):
            words = torch.cat([words, model(words)[-1:].argmax(-1)])
    return words[:, 0].tolist()
