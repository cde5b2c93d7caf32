"""Decisions on values inside of partitions: few are explored where a forward waits for a value, all are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from workloads import WIDTH, Reference, make_plan, pipeline_of, workload

from assigner.model.marking import decisions, partition_graph

if TYPE_CHECKING:
    from collections.abc import Callable


class Halting(nn.Module):
    """Goes on until each row has come far enough, as adaptive computation times do."""

    def __init__(self, truth: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.step, self.p, self.truth = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), truth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halt = torch.zeros_like(x[:, :1])
        while self.truth((halt < 0.9).any()):
            going = halt < 0.9
            halt = halt + torch.sigmoid(self.p(x)) * going
            x = x + self.step(x).tanh() * going
        return x * halt


class Experts(nn.Module):
    """Runs each expert where rows want it; they are more than a line waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(decisions._PATIENCE + 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted, made = x.abs().argmax(-1, keepdim=True), torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            if (wanted == n).any():
                made = made + expert(x) * (wanted == n)
        return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a capture asks for, and the answers."""
    found: list[Any] = []
    answer = decisions._Decider.answer

    def noted(self: Any, *args: Any) -> Any:
        found.append(answer(self, *args))
        return found[-1]

    monkeypatch.setattr(decisions._Decider, "answer", noted)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "middle",
    [lambda: Halting(lambda each: each), lambda: Halting(torch.Tensor.byte), Experts],
    ids=["waits for a truth", "waits for a number", "many experts"],
)
def test_many_decisions(middle: Callable[[], nn.Module], asked: list[Any]):
    """Each way comes to an end soon; a step is the plain model's."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), middle(), nn.Linear(WIDTH, 1)), "0", "1", "2")
    partition_graph(made)
    assert 0 < len(asked) <= 8 * (decisions._PATIENCE + 4)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        batch = made.make_batch(8, 0)
        assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=1e-10)
        assert reference.distance(pipeline.named_parameters()) < 1e-10


def test_many_decisions_of_a_for_loop_need_no_values(asked: list[Any]):
    """None is left without an answer."""
    graph = partition_graph(workload(lambda: nn.Sequential(Experts(), nn.Linear(WIDTH, 1)), "0", "1"))
    assert [piece.name for piece in graph.pieces] == ["0", "1"]
    assert asked
    assert None not in asked
