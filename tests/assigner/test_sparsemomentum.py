"""Momentum of sparse gradients: saved as a dense tensor, and trained on as torch trains on."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoint_cases import trained
from torch import nn
from workloads import make_plan, next_token, tokens, workload

from assigner.errors import UsageError
from assigner.runtime.update.sparsemomentum import fit_momentum

if TYPE_CHECKING:
    from pathlib import Path

    from assigner.model.workload import Workload

MOMENTUM = "momentum_buffer"


def lookup() -> nn.Module:
    return nn.Sequential(nn.Embedding(17, 4, sparse=True), nn.Linear(4, 17))


def looked_up(optimizer: Any) -> Workload:
    return workload(lookup, "*", batch=tokens, loss=next_token, optimizer=optimizer)


PLAIN = looked_up(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


class KeepsSparse(torch.optim.Optimizer):
    """Of the user's own: its state is its last gradient, sparse or not."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, *_: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["last"] = parameter.grad.clone()
                    parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_training_goes_on_from_a_file(tmp_path: Path, nesterov: bool):
    """To the last bit; the file has a plain tensor."""
    made = looked_up(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=nesterov))
    with trained(made, like=PLAIN) as pipeline:
        state = pipeline.optimizer.state_dict()["state"]["0.weight"]
        assert state[MOMENTUM].is_sparse
        pipeline.save(tmp_path / "at")
        expected = [pipeline.step(made.make_batch(8, n)) for n in range(3, 7)]
    with trained(made, steps=0, like=PLAIN) as pipeline:
        pipeline.load(tmp_path / "at")
        assert [pipeline.step(made.make_batch(8, n)) for n in range(3, 7)] == expected


@pytest.mark.parametrize("settings", [{}, {"nesterov": True}, {"dampening": 0.3}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_was_dense_on_its_way_trains_as_what_has_stayed(dtype: torch.dtype, settings: dict[str, Any]):
    """Of gradients that have each place once, as the pipeline's."""
    torch.manual_seed(2)
    stays = nn.Embedding(50, 8, sparse=True, dtype=dtype)
    goes = copy.deepcopy(stays)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9, **settings) for each in (stays, goes)]
    for n in range(20):
        ids = torch.randint(50, (12,))
        for table, optimizer in zip((stays, goes), optimizers, strict=True):
            optimizer.zero_grad()
            table(ids).square().sum().backward()
            table.weight.grad = table.weight.grad.coalesce()
            fit_momentum(optimizer)
            optimizer.step()
        assert torch.equal(stays.weight, goes.weight)
        if n % 6 == 4:
            state = optimizers[1].state[goes.weight]
            state[MOMENTUM] = state[MOMENTUM].to_dense()


def test_a_dense_gradient_comes_to_a_dense_momentum():
    """As where several workers have added theirs up: torch adds none to a sparse one."""
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    table(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    before = optimizer.state[table.weight][MOMENTUM].to_dense()
    table.weight.grad = torch.ones(5, 2)
    fit_momentum(optimizer)
    optimizer.step()
    assert torch.equal(optimizer.state[table.weight][MOMENTUM], 0.9 * before + 1)


def test_another_sparse_state_is_refused_before_anything_has_changed(tmp_path: Path):
    """What the user's own optimizer would make of a dense one is not known."""
    made = looked_up(KeepsSparse)
    words = r"state 'last' of '0.weight' is of layout sparse_coo: only dense ones are saved, or moved"
    with trained(made, like=PLAIN) as pipeline:
        plan = pipeline.plan
        with pytest.raises(UsageError, match=words):
            pipeline.save(tmp_path / "at")
        with pytest.raises(UsageError, match=words):
            pipeline.move(make_plan(PLAIN, micro_batches=4))
        assert pipeline.plan is plan
        assert not (tmp_path / "at").exists()
        pipeline.step(made.make_batch(8, 3))
