"""time_sequence_prediction of pytorch/examples: LSTM cells over sine waves, LBFGS with a closure, one batch.

After each step the model goes on from the test waves by itself, into the future: there a cell is fed with what the last
layer made, which no pipeline can do, so the plain model does it. A checkpoint has no place for the history of LBFGS:
it is forgotten where the script is stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn

from assigner import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, STEPS, WIDTH, LENGTH, FUTURE, ROWS = 0, 4, 5, 12, 6, 6
MICRO_BATCHES, STOP_AT, WORKERS = 2, 8, 1


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, waves: torch.Tensor, future: int = 0) -> torch.Tensor:
        outputs = []
        h1, c1, h2, c2 = (torch.zeros(waves.size(0), WIDTH, dtype=waves.dtype) for _ in range(4))
        for wave in waves.split(1, dim=1):
            h1, c1 = self.lstm1(wave, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            output = self.linear(h2)
            outputs.append(output)
        for _ in range(future):
            h1, c1 = self.lstm1(output, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            output = self.linear(h2)
            outputs.append(output)
        return torch.cat(outputs, dim=1)


def waves(rows: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(-20, 20, (rows, 1), generator=generator)
    return torch.sin((starts + torch.arange(LENGTH + 1)).double() / 3)


DATA = waves(ROWS + 3, torch.Generator().manual_seed(2))
INPUT, TARGET = DATA[3:, :-1], DATA[3:, 1:]
TEST_INPUT, TEST_TARGET = DATA[:3, :-1], DATA[:3, 1:]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.8, max_iter=3)


def plain(log: Log, *, forgetting: int | None = None) -> nn.Module:
    torch.manual_seed(SEED)
    model = Sequence().double()
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        if step == forgetting:
            optimizer.state.clear()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            out = model(INPUT)
            loss = F.mse_loss(out, TARGET)
            log(loss=loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            pred = model(TEST_INPUT, future=FUTURE)
            loss = F.mse_loss(pred[:, :-FUTURE], TEST_TARGET)
            log(test_loss=loss.item(), last=pred[:, -1].sum())
    return model


def stopped(log: Log) -> nn.Module:
    """The plain script, if it were stopped and resumed at the line where the other one is."""
    return plain(log, forgetting=2)


def workload() -> Workload:
    def batch(rows: int, generator: torch.Generator) -> Any:
        made = waves(rows, generator)
        return made[:, :-1], made[:, 1:]

    return Workload(
        model=lambda: Sequence().double(),
        batch=batch,
        loss=F.mse_loss,
        optimizer=make_optimizer,
        batch_size=ROWS,
        seed=SEED,
        marks=("lstm1", "lstm2", "linear"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    if (folder / "last").exists():
        pipeline.load(folder / "last")
    model = Sequence().double()
    for _ in range(pipeline.steps, STEPS):

        def closure() -> float:
            pipeline.optimizer.zero_grad()
            loss = pipeline.step((INPUT, TARGET), update=False)
            log(loss=loss)
            return loss

        pipeline.optimizer.step(closure)
        with torch.no_grad():
            model.load_state_dict(pipeline.full_state_dict(to=None))
            pred = model(TEST_INPUT, future=FUTURE)
            loss = F.mse_loss(pred[:, :-FUTURE], TEST_TARGET)
            log(test_loss=loss.item(), last=pred[:, -1].sum())
        if pipeline.stop_requested():
            pipeline.optimizer.state.clear()
            pipeline.save(folder / "last")
            return


def used(model: nn.Module) -> list[float]:
    """The waves to come."""
    with torch.no_grad():
        return model(TEST_INPUT, future=2)[:, -1].tolist()
