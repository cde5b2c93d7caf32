"""What carries rows, told from what only has as many entries, from the capture to the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from workloads import WIDTH, Reference, make_plan, numbers, pipeline_of, workload

from assigner.model.marking.rows import Carry, batch_rows


class Scaled(nn.Module):
    """Multiplies by a table of its width that is among the inputs, first or last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.b(
            self.a(x @ table.mT if table.dim() > 1 else x * table[:WIDTH].repeat(WIDTH // len(table[:WIDTH])))
        )


def batch_with(table: torch.Tensor, *, first: bool) -> Any:
    def batch(rows: int, generator: torch.Generator) -> Any:
        x, y = numbers(rows, generator)
        return ({"table": table, "x": x} if first else {"x": x, "table": table}), y

    return batch


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("entries", [WIDTH, 4])
def test_a_table_as_long_as_the_batch(entries, first):
    """Steps, losses without training and outputs are the plain model's, also with as many rows as the capture has."""
    table = torch.arange(1, entries + 1, dtype=torch.float64) / entries
    made = workload(Scaled, "a", "b", batch=batch_with(table, first=first), rows=12)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=4)) as pipeline:
        for rows in (12, entries, 4, 3):
            batch = made.make_batch(rows, rows)
            assert pipeline.evaluate(batch) == pytest.approx(reference.loss(batch).item(), abs=1e-12)
            assert torch.allclose(pipeline.forward(batch[0]), reference.model(**batch[0]))
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=1e-12)
        assert reference.distance(pipeline.named_parameters()) < 1e-12


def _ring(rows):
    return torch.stack((torch.arange(rows), (torch.arange(rows) + 1) % rows), 1)


PAIRS = {
    # for so many rows: two numbers of each
    "edges of a ring": (lambda rows, _: _ring(rows), Carry.VARIES),
    "edges of a chain": (lambda rows, _: _ring(rows).clamp(max=rows - 2) + torch.tensor([0, 1]), Carry.VARIES),
    "edges the other way": (lambda rows, _: _ring(rows).flip(1), Carry.VARIES),
    "triangles": (lambda rows, _: torch.cat((_ring(rows), _ring(rows)[:, :1]), 1), Carry.VARIES),
    "classes": (lambda rows, g: torch.randint(10, (rows, 2), generator=g), Carry.ROWS),
    "a number of the sample, and a class": (
        lambda rows, g: torch.stack((torch.arange(rows), torch.randint(2, (rows,), generator=g)), 1), Carry.ROWS,
    ),
    "spans": (lambda rows, g: torch.randint(128, (rows, 2), generator=g).sort(1).values, Carry.ROWS),
    "bits": (lambda rows, g: torch.randint(2, (rows, 2), generator=g), Carry.ROWS),
    "positions": (lambda rows, _: torch.arange(16).expand(rows, -1), Carry.ROWS),
    "points": (lambda rows, g: torch.rand(rows, 2, generator=g), Carry.ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_edges_with_a_row_each_are_told_from_numbers(name):
    """In a part of the batch they would name nodes that are elsewhere; a class or a span means the same there."""
    make, wanted = PAIRS[name]
    made = workload(Scaled, "a", "b", batch=lambda rows, g: ((numbers(rows, g)[0], make(rows, g)), None))
    known = batch_rows(made).inputs
    assert known is not None
    assert known.children[0].children[1].carry is wanted
