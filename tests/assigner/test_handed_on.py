"""A partition that returns a tensor which its own forwards write: others read it as it was for their micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from workloads import WIDTH, make_plan, pipeline_of, workload

from assigner.errors import UsageError

PARTS = ("first", "second", "last")
SPLIT = [(0, PARTS[:1]), (0, PARTS[1:])]


class Running(nn.Linear):
    """Hands on its running mean, from some step on another one each time."""

    begins = 0
    in_eval = False

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.count = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.count += self.training
        if self.count > self.begins if self.training else self.in_eval:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x), self.handed_on()

    def handed_on(self) -> torch.Tensor:
        return self.mean


class View(Running):
    """Hands on a part of it."""

    def handed_on(self) -> torch.Tensor:
        return self.mean.view(1, -1)[:, :1]


class InEval(Running):
    """Moves it in eval mode, too."""

    in_eval = True


class ByData(InEval):
    """Moves it past torch's count of changes."""

    def forward(self, x: torch.Tensor) -> Any:
        self.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return nn.Linear.forward(self, x), self.mean


class ByNorm(InEval):
    """A norm over the batch in eval mode, whose writes torch counts nowhere either."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        x = nn.functional.batch_norm(x, self.mean, self.var, training=True)
        return nn.Linear.forward(self, x), self.mean


class Late(Running):
    """Begins in the third step of two micro-batches."""

    begins = 4


class Clamped(Running):
    """Hands on its weight, which trains and which it clamps in place."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.weight.mul_(1.01 + 0.01 * x.mean()).clamp_(-1, 1)
        return nn.functional.linear(x, self.weight), self.weight


class Counted(Running):
    """Hands on how often it was called, and is called on no value of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def handed_on(self) -> torch.Tensor:
        self.calls += self.training
        return self.calls


class NoBuffer(InEval):
    """The same of a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.mean = torch.ones(WIDTH, dtype=torch.float64)


class Reader(nn.Linear):
    """Saves it for its backward."""

    def forward(self, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * mean.double().mean()


class HandsOn(nn.Module):
    """Three parts, of which two read what the first hands on."""

    def __init__(self, kind: type[Running]) -> None:
        super().__init__()
        self.first, self.second, self.last = kind(), Reader(WIDTH, WIDTH), Reader(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, mean = self.first(x)
        return self.last(self.second(y, mean), mean)


def plain_steps(made: Any, steps: int, micro_batches: int) -> list[float]:
    """As a plain loop that adds up gradients over the micro-batches."""
    torch.manual_seed(made.seed)
    model = made.model()
    optimizer, found = made.make_optimizer(model.named_parameters()), []
    for seed in range(steps):
        optimizer.zero_grad()
        inputs, targets = made.make_batch(8, seed)
        total = 0.0
        for x, t in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            loss = made.loss(model(x), t) / micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        found.append(total)
    return found


def steps_of(made: Any, steps: int, stages: Any = (), **settings: Any) -> list[float]:
    with pipeline_of(made, make_plan(made, stages, **settings)) as pipeline:
        return [float(pipeline.step(made.make_batch(8, seed))) for seed in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("remat", [(), ("first",), ("second",), PARTS])
@pytest.mark.parametrize("kind", [Running, View, Counted, NoBuffer])
def test_each_micro_batch_reads_it_as_its_own_forward_left_it(kind, remat):
    """Whoever of writer and readers runs again."""
    made = workload(lambda: HandsOn(kind), *PARTS)
    wanted = plain_steps(made, 3, 4)
    assert steps_of(made, 3, micro_batches=4, remat=remat) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
@pytest.mark.parametrize("kind", [Running, View, NoBuffer])
def test_stages_of_one_worker_read_it_so_too(kind, schedule):
    """The second stage's forwards may come behind all of the first's."""
    made = workload(lambda: HandsOn(kind), *PARTS)
    found = steps_of(made, 3, SPLIT, micro_batches=4, schedule=schedule)
    assert found == pytest.approx(plain_steps(made, 3, 4), rel=1e-12)


def test_a_weight_that_is_written_and_handed_on_keeps_its_gradient():
    """What comes back for it goes on to the weight."""
    made = workload(lambda: HandsOn(Clamped), *PARTS)
    assert steps_of(made, 3, micro_batches=1) == pytest.approx(plain_steps(made, 3, 1), rel=1e-12)
    found = steps_of(made, 3, micro_batches=2, remat=("second",))
    assert found == pytest.approx(steps_of(made, 3, SPLIT, micro_batches=2, schedule="interleaved"), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "micro_batches"), [(ByData, 4), (ByNorm, 2), (NoBuffer, 4), (InEval, 2), (InEval, 4)])
def test_forwards_in_eval_mode_that_write_it_hand_on_copies(kind, micro_batches):
    """All of the first stage's come before those of the second."""
    made = workload(lambda: HandsOn(kind), *PARTS)
    inputs, targets = made.make_batch(8, 0)
    torch.manual_seed(made.seed)
    model = made.model().eval()
    with torch.no_grad():
        pairs = zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
        wanted = sum(made.loss(model(x), t).item() for x, t in pairs) / micro_batches
    with pipeline_of(made, make_plan(made, SPLIT, micro_batches=micro_batches)) as pipeline:
        assert float(pipeline.evaluate((inputs, targets))) == pytest.approx(wanted, rel=1e-12)


def test_a_write_that_begins_while_others_still_read_it_is_refused():
    """It found no copy to write to, and the first micro-batch's reader would find the second's."""

    class Between(Late):
        """Begins between two micro-batches of one step."""

        begins = 5

    made = workload(lambda: HandsOn(Between), *PARTS)
    with pytest.raises(UsageError, match=r"'first' begins to write first.mean in place while the backwards of earlier"):
        steps_of(made, 4, SPLIT, micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(), SPLIT])
def test_a_write_that_begins_with_a_step_is_carried(stages):
    """Nobody reads what was before."""
    made = workload(lambda: HandsOn(Late), *PARTS)
    assert steps_of(made, 4, stages, micro_batches=2) == pytest.approx(plain_steps(made, 4, 2), rel=1e-12)
