"""Fine-tuning as in Hugging Face's example scripts without a trainer: padded batches and a linear warm-up.

Batches are padded to their longest text, so their lengths change. Biases and norms have no weight decay, by name; the
gradients of two batches make an update, of the last one alone where the epoch has an odd number; predictions are
gathered for an F1 score of the whole evaluation.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from assigner import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, EPOCHS, ROWS, WORDS, WIDTH, CLASSES, PADDING = 42, 2, 4, 20, 8, 3, 0
RATE, WEIGHT_DECAY, ACCUMULATION, WARM_UP, MAX_NORM = 5e-2, 0.1, 2, 2, 1.0
MICRO_BATCHES, STOP_AT = 2, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.LayerNorm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(hidden, hidden, hidden, key_padding_mask=padded, need_weights=False)
        return self.LayerNorm(hidden + F.gelu(self.output(mixed)))


class Classifier(nn.Module):
    """Texts to classes: the mean over what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embeddings(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask == 0)
        share = attention_mask[:, :, None] / attention_mask.sum(dim=1)[:, None, None]
        return {"logits": self.classifier((hidden * share).sum(dim=1))}


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of 3 to 6 words; words of its class come more often."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        label = int(torch.randint(CLASSES, (), generator=generator))
        length = int(torch.randint(3, 7, (), generator=generator))
        words = 1 + torch.randint(6, (length,), generator=generator) * CLASSES + label
        found.append({"input_ids": words, "label": label})
    return found


def collate(examples: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([each["input_ids"] for each in examples], True, PADDING)
    labels = torch.tensor([each["label"] for each in examples])
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long()}, labels


def train_loader(epoch: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(epoch)
    return DataLoader(texts(18, 0), ROWS, shuffle=True, generator=generator, collate_fn=collate)  # type: ignore[arg-type]


def eval_loader() -> DataLoader[Any]:
    return DataLoader(texts(9, 1), ROWS, collate_fn=collate)  # type: ignore[arg-type]


def make_optimizer(named_parameters: Any) -> torch.optim.Optimizer:
    named = list(named_parameters)
    spared = [name for name, _ in named if "bias" in name or "LayerNorm" in name]
    groups = [
        {"params": [each for name, each in named if name not in spared], "weight_decay": WEIGHT_DECAY},
        {"params": [each for name, each in named if name in spared], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE)


def warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Up in a line, then down in a line."""
    updates = EPOCHS * 3
    return LambdaLR(optimizer, lambda n: min((n + 1) / WARM_UP, (updates - n) / (updates - WARM_UP + 1)))


def f1(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean over the classes."""
    made = []
    for kind in range(CLASSES):
        hits = ((predictions == kind) & (labels == kind)).sum().item()
        made.append(2 * hits / max(1, ((predictions == kind).sum() + (labels == kind).sum()).item()))
    return sum(made) / CLASSES


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = Classifier().double()
    optimizer = make_optimizer(model.named_parameters())
    scheduler = warm_up(optimizer)
    for epoch in range(EPOCHS):
        model.train()
        loader = train_loader(epoch)
        for n, (inputs, labels) in enumerate(loader):
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs["logits"], labels)
            (loss / ACCUMULATION).backward()
            if (n + 1) % ACCUMULATION == 0 or n + 1 == len(loader):
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                log(loss=loss.item(), norm=norm.item(), rate=scheduler.get_last_lr()[0])
        model.eval()
        predictions, references = [], []
        for inputs, labels in eval_loader():
            with torch.no_grad():
                outputs = model(**inputs)
            predictions.append(outputs["logits"].argmax(dim=-1))
            references.append(labels)
        log(f1=f1(torch.cat(predictions), torch.cat(references)))
    return model


def workload() -> Workload:
    return Workload(
        model=lambda: Classifier().double(),
        batch=lambda rows, generator: collate(texts(rows, int(torch.randint(1000, (), generator=generator)))),
        loss=lambda outputs, labels: F.cross_entropy(outputs["logits"], labels),
        optimizer=make_optimizer,
        batch_size=ROWS,
        seed=SEED,
        marks=("embeddings", "layers.*", "classifier"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    scheduler = warm_up(pipeline.optimizer)
    first = position = 0
    if (folder / "last").exists():
        first, position, state = pipeline.load(folder / "last")
        scheduler.load_state_dict(state)
    for epoch in range(first, EPOCHS):
        loader = train_loader(epoch)
        for n, (inputs, labels) in itertools.islice(enumerate(loader), position, None):
            loss = pipeline.step((inputs, labels), update=False, scale=1 / ACCUMULATION)
            if (n + 1) % ACCUMULATION == 0 or n + 1 == len(loader):
                norm = pipeline.clip_grad_norm_(MAX_NORM)
                pipeline.optimizer.step()
                scheduler.step()
                pipeline.optimizer.zero_grad()
                log(loss=loss, norm=norm, rate=scheduler.get_last_lr()[0])
                if pipeline.stop_requested():
                    pipeline.save(folder / "last", (epoch, n + 1, scheduler.state_dict()))
                    return
        position = 0
        predictions, references = [], []
        for inputs, labels in eval_loader():
            outputs = pipeline.evaluate((inputs, labels), outputs_to="all").outputs
            predictions.append(outputs["logits"].argmax(dim=-1))
            references.append(labels)
        log(f1=f1(torch.cat(predictions), torch.cat(references)))


def used(model: nn.Module) -> list[float]:
    """What the classes of new texts are taken for."""
    model.eval()
    inputs, _ = collate(texts(4, 2))
    with torch.no_grad():
        return model(**inputs)["logits"].flatten().tolist()
