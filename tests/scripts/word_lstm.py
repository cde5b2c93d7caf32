"""word_language_model of pytorch/examples, as an LSTM with tied weights: its state goes on from batch to batch.

Truncated back-propagation: the state is taken over without its graph. An evaluation starts from its own zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from scripts.word_transformer import BPTT, CLIP, RATE, TEST, TRAIN, VALIDATION, WIDTH, WORDS, criterion, get_batch
from torch import nn

from assigner import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, EPOCHS, STREAMS = 5, 2, 4
MICRO_BATCHES, STOP_AT = 2, 2

Hidden = tuple[torch.Tensor, torch.Tensor]


class RNNModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2)
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.5, 0.5)

    def forward(self, words: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        output, hidden = self.rnn(self.encoder(words), hidden)
        return F.log_softmax(self.decoder(output), dim=-1), hidden

    @staticmethod
    def init_hidden(rows: int) -> Hidden:
        return torch.zeros(2, rows, WIDTH, dtype=torch.float64), torch.zeros(2, rows, WIDTH, dtype=torch.float64)


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = RNNModel().double()
    rate, best_val_loss, best = RATE, math.inf, {}

    def repackage_hidden(hidden: Hidden) -> Hidden:
        return hidden[0].detach(), hidden[1].detach()

    def evaluate(source: torch.Tensor) -> float:
        model.eval()
        total, hidden = 0.0, model.init_hidden(STREAMS)
        with torch.no_grad():
            for start in range(0, len(source) - 1, BPTT):
                data, targets = get_batch(source, start)
                output, hidden = model(data, hidden)
                hidden = repackage_hidden(hidden)
                total += len(data) * criterion(output, targets).item()
        return total / (len(source) - 1)

    for _ in range(EPOCHS):
        model.train()
        hidden = model.init_hidden(STREAMS)
        for start in range(0, len(TRAIN) - 1, BPTT):
            data, targets = get_batch(TRAIN, start)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
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
        return (words[:-1], RNNModel.init_hidden(rows)), words[1:]

    return Workload(
        model=lambda: RNNModel().double(),
        batch=batch,
        loss=lambda outputs, targets: criterion(outputs[0], targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        carried={1: 1},
        batch_size=STREAMS,
        seed=SEED,
        marks=("encoder", "rnn", "decoder"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    first, position, best_val_loss = 0, 0, math.inf
    hidden = RNNModel.init_hidden(STREAMS)

    def evaluate(source: torch.Tensor) -> float:
        total = 0.0
        pipeline.reset_carried(training=False)
        for start in range(0, len(source) - 1, BPTT):
            data, targets = get_batch(source, start)
            total += len(data) * pipeline.evaluate(((data, hidden), targets))
        return total / (len(source) - 1)

    if (folder / "last").exists():
        first, position, best_val_loss = pipeline.load(folder / "last")
    for epoch in range(first, EPOCHS):
        if position == 0:
            pipeline.reset_carried(evaluation=False)
        for start in range(position, len(TRAIN) - 1, BPTT):
            data, targets = get_batch(TRAIN, start)
            loss = pipeline.step(((data, hidden), targets), max_norm=CLIP)
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
    """The most likely words, one after another, the state carried along."""
    assert isinstance(model, RNNModel)
    model.eval()
    words, hidden = [1], model.init_hidden(1)
    with torch.no_grad():
        for _ in range(4):
            output, hidden = model(torch.tensor([words[-1:]]), hidden)
            words.append(int(output[-1].argmax()))
    return [float(word) for word in words]
