"""Batches cut into micro-batches."""

from __future__ import annotations

import pytest
import torch

from assigner.errors import UsageError
from assigner.runtime.microbatch import row_count, split_batch


def rows(count: int) -> torch.Tensor:
    return torch.arange(count)


@pytest.mark.parametrize(
    ("count", "size", "sizes"), [(8, 4, [4, 4]), (7, 3, [3, 3, 1]), (2, 4, [2]), (3, 1, [1, 1, 1])]
)
def test_sizes_and_weights(count, size, sizes):
    """Micro-batches hold all rows in order and weigh their share, one in sum."""
    cut = split_batch((rows(count), rows(count) + 1), size, reduction="mean")
    assert [len(each.inputs[0]) for each in cut] == sizes
    assert torch.equal(torch.cat([each.inputs[0] for each in cut]), rows(count))
    assert torch.equal(torch.cat([each.targets for each in cut]), rows(count) + 1)
    assert [each.weight for each in cut] == [mine / count for mine in sizes]


def test_a_sum_counts_in_full():
    """With reduction "sum" every weight is one."""
    assert [each.weight for each in split_batch((rows(3), rows(3)), 2, reduction="sum")] == [1.0, 1.0]


def test_trees():
    """Dicts and tuples keep their form; what has other rows, or is no tensor, goes whole to every micro-batch."""
    table = torch.eye(3)
    inputs = {"ids": rows(4), "table": table, "flag": True, "none": None, "scalar": torch.tensor(2)}
    targets = (rows(4), [rows(4) * 2])
    first, second = split_batch((inputs, targets), 2, reduction="mean")
    ids, whole, flag, none, scalar = second.inputs
    assert ids.tolist() == [2, 3]
    assert whole is table
    assert (flag, none, scalar.item()) == (True, None, 2)
    assert first.targets[1][0].tolist() == [0, 2]
    assert isinstance(first.targets, tuple)


def test_rows_are_those_of_the_first_tensor():
    """A scalar has no rows; nothing with rows at all is an error."""
    assert row_count(((torch.tensor(1), rows(5)), None)) == 5
    with pytest.raises(UsageError, match="no tensor with rows"):
        row_count((3, rows(5)))


def test_weights_are_shares_of_their_sum():
    """Micro-batches count by what the user's function gives for their inputs and targets, as a number or a tensor."""
    cut = split_batch((rows(5), rows(5)), 2, reduction="mean", weight=lambda inputs, targets: (inputs + targets).sum())
    total = 2 * sum(range(5))
    assert [each.weight for each in cut] == [2 / total, 10 / total, 8 / total]
    assert [each.weight for each in split_batch((rows(3), rows(3)), 2, reduction="mean", weight=lambda *_: 4)] == [
        0.5,
        0.5,
    ]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda *_: 0, "gave 0 for every micro-batch"),
        (lambda *_: -1, "gave -1.0 for a micro-batch"),
        (lambda *_: float("nan"), "gave nan for a micro-batch"),
        (lambda *_: 1 / 0, "Workload.weight failed at"),
    ],
)
def test_weights_that_cannot_be(weight, message):
    """Negative, infinite and all-zero weights, and errors in the function, are refused in words."""
    with pytest.raises(UsageError, match=message):
        split_batch((rows(3), rows(3)), 2, reduction="mean", weight=weight)
