"""Batches cut into micro-batches."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from assigner.errors import UsageError
from assigner.model.marking import partition_graph
from assigner.model.workload import Workload
from assigner.runtime.batch.microbatch import Cutting, MicroBatch, check_pair, fair_sizes
from assigner.runtime.forward.randomness import generator_states

if TYPE_CHECKING:
    from collections.abc import Callable


def rows(count: int) -> torch.Tensor:
    return torch.arange(count)


def none_made(count: int, _: torch.Generator) -> Any:
    raise AssertionError("a batch is cut, and none is made")


def cutting(batch: Callable[[int, torch.Generator], Any] = none_made, **options: Any) -> Cutting:
    return Cutting(Workload(lambda: torch.nn.Linear(1, 1), batch, batch_size=1, **options))


def cut_up(batch: Any, count: int, **options: Any) -> list[MicroBatch]:
    return cutting(**options).split(batch, count)


def with_tables(count: int, _: torch.Generator) -> Any:
    return {"table": rows(8), "ids": rows(count), "mask": None}, (rows(count), rows(6))


@pytest.mark.parametrize("count", [6, 8, 9])
def test_a_table_with_as_many_entries_goes_whole(count):
    """Among inputs and targets what does not follow the rows is not cut, whatever its size; and comes first or last."""
    batch = with_tables(count, torch.Generator())
    cuts = cutting(with_tables)
    assert cuts.row_count(batch[0]) == count
    found = cuts.split(batch, 4)
    assert [each.rows for each in found] == list(fair_sizes(count, 4))
    assert all(each.inputs[0] is batch[0]["table"] and each.targets[1] is batch[1][1] for each in found)
    assert torch.equal(torch.cat([each.inputs[1] for each in found]), rows(count))
    assert torch.equal(torch.cat([each.targets[0] for each in found]), rows(count))


def test_what_the_maker_does_not_show_is_cut_by_its_size():
    """A tensor where the maker has None, and inputs or targets of another structure; a list is as good as a tuple."""
    (ids, table), targets = (rows(8), rows(8)), rows(8)
    cuts = cutting(with_tables)
    (first, *_) = cuts.split(({"table": table, "ids": ids, "mask": rows(8)}, targets), 2)
    assert [len(each) for each in (*first.inputs, first.targets)] == [8, 4, 4, 4]
    (first, *_) = cuts.split(((ids, table), None), 2)
    assert [len(each) for each in first.inputs] == [4, 4]
    (first, *_) = cutting(lambda count, _: ((rows(count), rows(8)), rows(count))).split(([ids, table], targets), 2)
    assert [len(each) for each in (*first.inputs, first.targets)] == [4, 8, 4]


def test_the_maker_is_asked_once():
    """For two small batches, at the first use."""
    asked = []

    def batch(count: int, _: torch.Generator) -> Any:
        asked.append(count)
        return rows(count), rows(count)

    cuts = cutting(batch)
    assert asked == []
    for count in (3, 5):
        cuts.split((rows(count), rows(count)), 2)
    assert asked == [4, 8]


def test_the_maker_moves_no_generator_of_the_script():
    """The script has not asked for the batches that tell what carries rows: what it draws next is its own."""

    def batch(count: int, _: torch.Generator) -> Any:
        made = rows(count) + int(torch.randint(9, ())) + random.randrange(9) + np.random.randint(9)
        return made, made

    cpu = torch.device("cpu")
    before = generator_states(cpu)
    cutting(batch).split((rows(8), rows(8)), 2)
    partition_graph(Workload(lambda: torch.nn.Sequential(torch.nn.Embedding(99, 2)), batch, batch_size=8, marks=("0",)))
    assert generator_states(cpu) == before


@pytest.mark.parametrize(
    ("count", "cuts", "sizes"), [(8, 2, [4, 4]), (7, 3, [3, 2, 2]), (2, 1, [2]), (3, 3, [1, 1, 1])]
)
def test_sizes_and_weights(count, cuts, sizes):
    """Micro-batches hold all rows in order and weigh their share, one in sum."""
    cut = cut_up((rows(count), rows(count) + 1), cuts, reduction="mean")
    assert [len(each.inputs[0]) for each in cut] == sizes
    assert torch.equal(torch.cat([each.inputs[0] for each in cut]), rows(count))
    assert torch.equal(torch.cat([each.targets for each in cut]), rows(count) + 1)
    assert [each.weight for each in cut] == [mine / count for mine in sizes]


def test_a_sum_counts_in_full():
    """With reduction "sum" every weight is one."""
    assert [each.weight for each in cut_up((rows(3), rows(3)), 2, reduction="sum")] == [1.0, 1.0]


def test_trees():
    """Dicts and tuples keep their form; what has other rows, or is no tensor, goes whole to every micro-batch."""
    table = torch.eye(3)
    inputs = {"ids": rows(4), "table": table, "flag": True, "none": None, "scalar": torch.tensor(2)}
    targets = (rows(4), [rows(4) * 2])
    first, second = cut_up((inputs, targets), 2, reduction="mean")
    ids, whole, flag, none, scalar = second.inputs
    assert ids.tolist() == [2, 3]
    assert whole is table
    assert (flag, none, scalar.item()) == (True, None, 2)
    assert first.targets[1][0].tolist() == [0, 2]
    assert isinstance(first.targets, tuple)


def test_rows_are_those_of_the_first_tensor():
    """A scalar has no rows; nothing with rows at all is an error."""
    assert cutting().row_count((torch.tensor(1), rows(5))) == 5
    with pytest.raises(UsageError, match="no tensor with rows"):
        cutting().row_count(3)


def test_weights_are_shares_of_their_sum():
    """Micro-batches count by what the user's function gives for their inputs and targets, as a number or a tensor."""
    cut = cut_up((rows(5), rows(5)), 2, reduction="mean", weight=lambda inputs, targets: (inputs + targets).sum())
    total = 2 * sum(range(5))
    assert [each.weight for each in cut] == [6 / total, 14 / total]
    assert [each.weight for each in cut_up((rows(3), rows(3)), 2, reduction="mean", weight=lambda *_: 4)] == [
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
        cut_up((rows(3), rows(3)), 2, reduction="mean", weight=weight)


@pytest.mark.parametrize(
    ("batch", "given"),
    [
        (rows(4), r"int64\[4\]"), ((rows(4), rows(4), rows(4)), "a tuple of 3"), ({"ids": rows(4)}, "a dict of 1"),
        (None, "a NoneType"),
    ],
    ids=["inputs alone", "three", "dict", "nothing"],
)  # fmt: skip
def test_a_batch_is_a_pair(batch, given):
    """What came instead of (inputs, targets) is named before anything is captured; a DataLoader's list will do."""
    with pytest.raises(UsageError, match=rf"a pair \(inputs, targets\), and {given} was given"):
        check_pair(batch)
    check_pair([rows(4), rows(4)])


def test_every_row_has_a_target():
    """Targets that carry rows have as many as the inputs; those that never did are left alone."""
    made = cutting(with_tables)
    inputs, targets = with_tables(6, torch.Generator())
    with pytest.raises(UsageError, match=r"6 rows of inputs, and 5 of targets \(int64\[5\]\)"):
        made.split((inputs, (rows(5), rows(6))), 2)
    assert len(made.split((inputs, (targets[0], rows(3))), 2)) == 2


def of_positive(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x - y).square() * (y > 0)).sum() / (y > 0).sum()
