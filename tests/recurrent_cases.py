"""Models that hand state from batch to batch, and the plain loops beside them, for one process and for ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from kept import kept
from torch import nn
from torch.utils import _pytree as pytree
from workloads import TOKENS, WIDTH, Reference, captured, sgd, workload

from assigner.model.workload import call_arguments

if TYPE_CHECKING:
    from assigner import Pipeline
    from assigner.model.workload import Workload

LAYERS = 2
ROWS = 7  # two micro-batches have 4 and 3, four have 2 2 2 1


class Words(nn.Module):
    """The LSTM of pytorch/examples' word_language_model, with tied weights; its state is (layers, rows, width)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS, dropout=dropout)
        self.decoder = nn.Linear(WIDTH, TOKENS)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids: torch.Tensor, hidden: Any) -> Any:
        output, hidden = self.rnn(self.drop(self.encoder(ids.t())), hidden)
        return self.decoder(self.drop(output)).transpose(0, 1), hidden


class Feedback(nn.Module):
    """The first partition reads what the last one made; by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.middle = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outlet = nn.Linear(WIDTH, WIDTH + 1)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> dict[str, Any]:
        made = self.outlet(torch.tanh(self.middle(torch.tanh(self.inlet(torch.cat([x, memory], 1))))))
        return {"scores": made[:, :1], "memory": torch.tanh(made[:, 1:]), "nothing": None}


def words_batch(rows: int, generator: torch.Generator) -> Any:
    ids = torch.randint(TOKENS, (rows, 5), generator=generator)
    hidden = torch.zeros(LAYERS, rows, WIDTH, dtype=torch.float64)
    return (ids, (hidden, hidden.clone())), (ids + 1) % TOKENS


def without_state(rows: int, generator: torch.Generator) -> Any:
    (ids, _), targets = words_batch(rows, generator)
    return (ids, None), targets


def feedback_batch(rows: int, generator: torch.Generator) -> Any:
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "memory": torch.full_like(x, 0.5)}, x.sum(1, keepdim=True)


@kept
def words(*, dropout: float = 0.0, none: bool = False) -> Workload:
    """Partitions encoder, rnn and decoder."""
    return replace(
        workload(
            lambda: Words(dropout), "encoder", "rnn", "decoder", batch=without_state if none else words_batch,
            loss=lambda made, wanted: F.cross_entropy(made[0].flatten(0, 1), wanted.flatten()), rows=ROWS,
        ),
        carried={1: 1}, optimizer=functools.partial(torch.optim.SGD, lr=0.5),
    )  # fmt: skip


@kept
def feedback() -> Workload:
    """Partitions inlet, middle and outlet."""
    made = workload(
        Feedback, "inlet", "middle", "outlet", batch=feedback_batch,
        loss=lambda made, wanted: F.mse_loss(made["scores"], wanted), optimizer=sgd, rows=ROWS,
    )  # fmt: skip
    return replace(made, carried={"memory": "memory"})


def capture_all() -> None:
    """The graphs that several ranks need."""
    for made in (feedback(), words()):
        captured(made)


class PlainLoop(Reference):
    """A loop that hands the state on by itself."""

    def __init__(self, made: Workload) -> None:
        super().__init__(made)
        self.state: Any = None

    def loss(self, batch: Any) -> torch.Tensor:
        ((given, place),) = self.made.carried.items()
        args, kwargs = call_arguments(batch[0])
        if self.state is not None and isinstance(given, str):
            kwargs = {**kwargs, given: self.state}
        elif self.state is not None:
            args = (*args[:given], self.state, *args[given + 1 :])
        output = self.model(*args, **kwargs)
        self.state = pytree.tree_map(torch.detach, output[place])
        return self.made.loss(output, batch[1])

    def evaluate(self, batches: list[Any]) -> list[float]:
        """Losses in eval mode, from the beginning; the state of training stays."""
        kept, self.state = self.state, None
        self.model.eval()
        with torch.no_grad():
            found = [self.loss(batch).item() for batch in batches]
        self.model.train()
        self.state = kept
        return found


def batches_of(made: Workload, count: int, first: int = 0, rows: int = ROWS) -> list[Any]:
    return [made.make_batch(rows, 10 + first + n) for n in range(count)]


def train(pipeline: Pipeline, plain: PlainLoop, first: int = 0) -> float:
    """Two steps, an evaluation of two batches from the beginning, two batches for one update; the largest difference.

    Args:
        pipeline: One side.
        plain: The other.
        first: Tells the batches of one call from those of another.
    """
    made, found = plain.made, []
    two, others, parts = (batches_of(made, 2, first + 2 * n) for n in range(3))
    found += [abs(pipeline.step(batch) - plain.step(batch)) for batch in two]
    pipeline.reset_carried(training=False)
    evaluated = [pipeline.evaluate(batch) for batch in others]
    found += [abs(mine - loss) for mine, loss in zip(evaluated, plain.evaluate(others), strict=True)]
    plain.optimizer.zero_grad()
    for n, batch in enumerate(parts):
        loss = plain.loss(batch)
        (loss / 2).backward()
        found.append(abs(pipeline.step(batch, update=bool(n), scale=0.5) - loss.item()))
    plain.optimizer.step()
    return max([*found, plain.distance(pipeline.named_parameters())])
