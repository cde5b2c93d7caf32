"""Batches with their rows in Python containers, or where they cannot be cut: cut right, or refused in words."""

from __future__ import annotations

import random
from collections import UserList, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from workloads import WIDTH, Reference, graph_of, make_plan, numbers, pipeline_of, recurrent, steps_and_rows, workload

from assigner.errors import MarkingError, UsageError
from assigner.formats.fineness import micro_batch_count
from assigner.model.workload import Workload
from assigner.profiler.walk import collect_inputs
from assigner.runtime.batch.microbatch import Cutting

if TYPE_CHECKING:
    from collections.abc import Callable


def cutting(targets: Callable[[int], Any], inputs: Callable[[int], Any] = torch.arange, **options: Any) -> Cutting:
    """Of a workload whose batches are made of these."""
    return Cutting(Workload(nn.Identity, lambda rows, _: (inputs(rows), targets(rows)), batch_size=8, **options))


def cut(targets: Callable[[int], Any], rows: int = 5, count: int = 2, **options: Any) -> list[Any]:
    """The targets of each micro-batch."""
    found = cutting(targets, **options).split((torch.arange(rows), targets(rows)), count)
    assert [each.rows for each in found] == [each.inputs[0].numel() for each in found]
    return [each.targets for each in found]


class Pair(NamedTuple):
    """Targets by name."""

    a: Any
    b: Any


class Boxes:
    """Boxes of several images, with slices of its own kind or not."""

    def __init__(self, boxes: list[int], *, slices: bool = True) -> None:
        self.boxes, self.slices = boxes, slices

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, which: Any) -> Any:
        return Boxes(self.boxes[which]) if self.slices else self.boxes[which]


def boxes_of(rows: int) -> list[dict[str, torch.Tensor]]:
    """One dict for each image, with as many boxes as its number."""
    return [{"boxes": torch.full((n, 4), n), "labels": torch.arange(n)} for n in range(rows)]


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: list(range(rows)), lambda rows: tuple(range(rows)), range, lambda rows: UserList(range(rows)),
        lambda rows: deque(range(rows)), np.arange, lambda rows: Boxes(list(range(rows))),
        lambda rows: [str(n) for n in range(rows)], lambda rows: [[n] * n for n in range(rows)], boxes_of,
    ],
    ids=["list", "tuple", "range", "UserList", "deque", "array", "object", "text", "lists", "boxes"],
)  # fmt: skip
@pytest.mark.parametrize("rows", [4, 5, 8])
def test_a_sequence_with_an_entry_for_each_row_is_cut(make, rows):
    """Every micro-batch gets the entries of its own rows, in a sequence of the same kind."""
    parts = cut(make, rows, 3)
    assert all(type(part) is type(make(rows)) for part in parts)
    entries = [each for part in parts for each in (part.boxes if isinstance(part, Boxes) else part)]
    whole = make(rows)
    assert str(entries) == str(list(whole.boxes if isinstance(whole, Boxes) else whole))
    assert [len(part) for part in parts] == [len(each) for each in np.array_split(range(rows), 3)]


def test_what_stands_in_between_is_gone_through():
    """Dicts and tuples of lists are cut inside; settings of any length, shared objects and padded masks go whole."""
    shared, draws = object(), random.Random(0)

    def make(rows: int) -> Any:
        return {
            "pair": Pair(list(range(rows)), torch.arange(rows)), "names": ["a", "b", "c", "d"], "size": (4, 5),
            "mask": torch.ones(rows + 3, rows + 3), "padded": torch.ones(rows, rows + 3), "object": shared,
            "length": rows + 3, "drawn": draws.randrange(1000), "step": 1,
        }  # fmt: skip

    first, second = cut(make, 4)
    assert isinstance(first["pair"], Pair)
    assert (first["pair"].a, second["pair"].a) == ([0, 1], [2, 3])
    assert second["pair"].b.tolist() == [2, 3]
    assert (first["names"], first["size"], first["mask"].shape) == (["a", "b", "c", "d"], (4, 5), (7, 7))
    assert first["object"] is shared
    assert (first["length"], first["drawn"], first["step"]) == (7, second["drawn"], 1)


def test_a_list_is_as_good_as_a_tuple():
    """A DataLoader's default collation makes lists of tuples; what the maker's tuple tells holds for them."""
    made = cutting(lambda rows: (torch.arange(rows), [0.5, 0.5]))
    first, second = made.split((torch.arange(2), [torch.arange(2), [0.1, 0.9]]), 2)
    assert (first.targets[0].tolist(), second.targets[0].tolist()) == ([0], [1])
    assert first.targets[1] == [0.1, 0.9]


@dataclass
class Labels:
    """Targets in a class that nobody knows how to cut."""

    values: torch.Tensor


class Own(torch.Tensor):
    """A tensor of a class of its own."""


def marked(rows: int) -> torch.Tensor:
    tensor = torch.ones(rows)
    tensor.mask = torch.ones(rows)
    return tensor


_LABELS = random.Random(1)


def labels_that_count(rows: int) -> torch.Tensor:
    """Most of them, as of a mask that ignores some."""
    return torch.tensor(sum(_LABELS.random() < 0.8 for _ in range(rows)))


REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "object": (lambda rows: Labels(torch.arange(rows)), r"targets cannot be cut .* it is a Labels"),
    "packed": (lambda rows: pack_sequence([torch.ones(3)] * rows), r"targets cannot be cut .* it is a PackedSequence"),
    "nested": (
        lambda rows: torch.nested.nested_tensor([torch.ones(3)] * rows, layout=torch.jagged),
        r"targets cannot be cut .* it is nested",
    ),
    "all boxes": (lambda rows: torch.ones(rows * (rows + 1), 6), r"a tensor with 20 entries for 4 rows, and 72 for 8"),
    "all labels": (lambda rows: list(range(3 * rows)), r"12 long for 4 rows, and 24 for 8"),
    "flattened": (lambda rows: torch.ones(5 * rows), r"a tensor with 20 entries for 4 rows, and 40 for 8"),
    "square": (torch.eye, r"a tensor with the rows in dimensions 0 and 1"),
    "by image": (lambda rows: dict.fromkeys(range(rows), 1), "a mapping with other keys for other rows"),
    "number": (lambda rows: {"rows": rows}, r"targets\['rows'\] cannot be cut .* the number of the batch's rows"),
    "tensor of the number": (torch.tensor, "the number of the batch's rows"),
    "tokens": (lambda rows: 16 * rows, "a number that grows with the rows, 64 for 4 and 128 for 8"),
    "tensor of tokens": (lambda rows: torch.tensor([9.0 * rows - 7]), "a number that grows with the rows, 29 for 4"),
    "pairs": (lambda rows: rows * (rows - 1), "a number that grows with the rows, 12 for 4 and 56 for 8"),
    "labels that count": (labels_that_count, "a number that grows with the rows"),
    "weights": (lambda rows: 0.5 * rows, "a number that grows with the rows, 2 for 4 and 4 for 8"),
    "slices": (lambda rows: Boxes(list(range(rows)), slices=False), r"targets, a Boxes, .* cannot be sliced"),
    "sparse": (lambda rows: torch.ones(rows, 3).to_sparse(), r"layout torch.sparse_coo, which cannot be cut"),
    "subclass": (lambda rows: torch.ones(rows).as_subclass(Own), "targets is a Own"),
    "attribute": (marked, "an attribute 'mask' hung on it"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_cut_is_refused(make, message):
    """In words and with a way out, where there are several micro-batches; with one of them it stays whole."""
    with pytest.raises(UsageError, match=message) as caught:
        cut(make)
    assert caught.value.hint
    (whole,) = cut(make, count=1)
    assert type(whole) is type(make(5))


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (torch.zeros(1), torch.rand(5)),
        (torch.ones(1, 3), torch.ones(5, 3)),
        (torch.ones(3, 1), torch.ones(3, 5)),
        (torch.ones(10), torch.rand(5)),
        (torch.ones(10, 3), torch.rand(5, 3)),
        (torch.tensor(0.0), torch.rand(5)),
        (0.0, torch.rand(5)),
        (0.0, [0.0] * 5),
        ("a", deque("abcde")),
        ([0.0], [0.0] * 5),
        ([0.0, 0.0], (0.0,) * 5),
        ([0.0, 0.0], torch.rand(5)),
        (np.zeros(1), np.zeros(5)),
        (torch.zeros(1), [0.0] * 5),
        (0.0, np.zeros(5)),
    ],
)
def test_rows_where_the_maker_broadcasts_are_refused(made, given):
    """Micro-batches of one row would be computed with all rows' entries. A batch that stays whole has its own."""
    cuts = cutting(lambda rows: (torch.arange(rows), made))
    for count in (2, 5):
        with pytest.raises(UsageError, match=r"targets\[1\] of shape .* might be cut, or go whole"):
            cuts.split((torch.arange(5), (torch.arange(5), given)), count)
    cuts.split((torch.arange(5), (torch.arange(5), given)), 1)
    for rows in (4, 6):
        cuts.split((torch.arange(rows), (torch.arange(rows), given)), 2)


@pytest.mark.parametrize(
    "whole",
    [[0.1] * 5, (0.1,) * 5, "abcde", np.zeros(5), torch.zeros(5), None, torch.Size([5] * 5), {"a": [1.0] * 5}],
    ids=str,
)
def test_settings_as_long_as_there_are_rows_go_whole(whole):
    """Where Workload.batch makes as many; a list may stand for its tensor, and a tensor or an array for its list."""
    cuts = cutting(lambda rows: (torch.arange(rows), whole))
    given = [whole, whole.tolist()] if isinstance(whole, torch.Tensor | np.ndarray) else [whole]
    given += [torch.tensor(whole), np.array(whole)] if isinstance(whole, list) else []
    for each in given:
        parts = cuts.split((torch.arange(5), (torch.arange(5), each)), 2)
        assert [str(part.targets[1]) for part in parts] == [str(each)] * 2


def test_a_sum_may_be_divided_by_the_number_of_rows():
    """With reduction "sum" a number of all rows goes whole to every micro-batch, one of tokens to the model."""
    assert cut(lambda rows: {"rows": rows}, reduction="sum") == [{"rows": 5}] * 2
    for options in ({"reduction": "sum"}, {"loss_over": "batch"}):
        cuts = cutting(torch.arange, lambda rows: (torch.arange(rows), 16 * rows), **options)
        assert [part.inputs[1] for part in cuts.split(((torch.arange(5), 77), torch.arange(5)), 2)] == [77] * 2


@pytest.mark.parametrize("given", [list(range(4)), [torch.ones(3)] * 4, torch.arange(4)])
def test_targets_without_a_row_each_are_refused(given):
    """Also where they are no tensors, and with any number of micro-batches."""
    made = cutting(lambda rows: list(range(rows)))
    for count in (1, 2):
        with pytest.raises(UsageError, match="5 rows of inputs, and 4 of targets"):
            made.split((torch.arange(5), given), count)
    with pytest.raises(UsageError, match="targets has none"):
        made.split((torch.arange(5), 3), 2)


def fixed(_: int, __: torch.Generator) -> Any:
    return torch.arange(6), list(range(6))


def test_unknown_sequences_go_by_their_length():
    """What the maker does not show is cut if as long as the batch, or goes whole; what may be either is refused."""
    made = Cutting(Workload(nn.Identity, fixed, batch_size=6))

    def parts(targets: Any, rows: int = 6) -> list[Any]:
        return [each.targets for each in made.split((torch.arange(rows), targets), 2)]

    assert parts(list("abcdef")) == [list("abc"), list("def")]
    assert parts({"a": np.arange(6), "b": [1, 2]})[1]["a"].tolist() == [3, 4, 5]
    assert parts({"b": [1, 2]})[1] == {"b": [1, 2]}
    assert [len(each) for each in parts(boxes_of(6))] == [3, 3]
    for wrong, rows in (((224, 224), 2), ([torch.ones(6, 2)] * 6, 6)):
        with pytest.raises(UsageError, match="it might be cut, or go whole"):
            parts(wrong, rows)
    with pytest.raises(UsageError, match="is a Labels, which cannot be cut"):
        parts([Labels(torch.ones(6)), 3])
    with pytest.raises(UsageError, match="its rows may be the list's entries, or 3"):
        made.split(([[torch.ones(3, 2)] * 6], None), 2)


def test_inputs_in_lists():
    """A list with a tensor for each row is cut, and the batch has as many rows as it has entries."""
    made = cutting(lambda rows: list(range(rows)), inputs=lambda rows: ([torch.ones(3, 4)] * rows,))
    assert made.row_count(([torch.ones(3, 4)] * 5,)) == 5
    first, second = made.split((([torch.ones(3, 4)] * 5,), list(range(5))), 2)
    assert (len(first.inputs), len(second.inputs)) == (3, 2)
    assert second.targets == [3, 4]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("make", "message"), [(marked, "an attribute 'mask'"), (REFUSED["subclass"][0], "is a Own")])
def test_inputs_are_plain_tensors(make, message, count):
    """What a graph would not see is refused, with any number of micro-batches."""
    with pytest.raises(UsageError, match=message):
        cutting(torch.arange, inputs=make).split((make(5), torch.arange(5)), count)


@pytest.mark.parametrize(
    ("rows", "most", "size", "count"),
    [
        (12, 3, 4, 3), (8, 8, 1, 8), (5, 3, 4, 2), (5, 3, 2, 2), (5, 8, 1, 5), (3, 4, 2, 1), (4, 4, 2, 2), (9, 5, 2, 3),
        (1, 4, 2, 1), (2, 4, 2, 1), (10, 4, 3, 4), (7, 2, 4, 2),
    ],
)  # fmt: skip
def test_micro_batches_of_one_row_are_avoided(rows, most, size, count):
    """By fewer micro-batches, none of them over a row more than planned, unless one row each is the plan."""
    assert micro_batch_count(rows, most, size) == count


def labelled(rows: int, generator: torch.Generator) -> Any:
    """Rows with a list of a dict each: some numbers that it is near to."""
    x, y = numbers(rows, generator)
    return x, [{"near": y[n] + torch.arange(1 + n % 3), "name": f"row {n}"} for n in range(rows)]


def near(outputs: torch.Tensor, targets: list[dict[str, Any]]) -> torch.Tensor:
    """Over the rows' own targets; a zip would not notice that they are another micro-batch's."""
    return torch.stack(
        [(output - each["near"]).square().mean() for output, each in zip(outputs, targets, strict=False)]
    ).mean()


def names(outputs: torch.Tensor, targets: tuple[str, ...]) -> torch.Tensor:
    signs = outputs.new_tensor([[float(len(name))] for name, _ in zip(targets, outputs, strict=False)])
    return (outputs - signs).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        (labelled, near),
        (lambda rows, generator: (numbers(rows, generator)[0], tuple("x" * (n * n) for n in range(rows))), names),
    ],
    ids=["dicts", "text"],
)
def test_a_pipeline_trains_on_lists(batch, loss, remat):
    """Steps and losses are the plain model's, also for a ragged batch and with fewer rows than micro-batches."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), batch=batch, loss=loss)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, [(0, ["0"]), (0, ["1"])], micro_batches=3), remat=remat) as pipeline:
        for rows in (8, 5, 2):
            given = made.make_batch(rows, rows)
            assert pipeline.evaluate(given) == pytest.approx(reference.loss(given).item(), abs=1e-12)
            assert pipeline.step(given) == pytest.approx(reference.step(given), abs=1e-12)
        assert reference.distance(pipeline.named_parameters()) < 1e-12


class Images(nn.Module):
    """Takes a list with a tensor for each row, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        return self.b(self.a(torch.stack([image.mean(0) for image in images])))


def images(rows: int, generator: torch.Generator) -> Any:
    made = [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(rows)]
    return (made,), [{"near": each.sum(), "name": "x" * n} for n, each in enumerate(made)]


@pytest.mark.long
def test_a_pipeline_trains_on_lists_of_images():
    """Micro-batches of other lengths run through graphs of their own; a profile has one graph, and says so."""
    made = workload(Images, "*", batch=images, loss=near)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=3)) as pipeline:
        for rows in (8, 5, 2):
            given = made.make_batch(rows, rows)
            assert pipeline.evaluate(given) == pytest.approx(reference.loss(given).item(), abs=1e-12)
            assert pipeline.step(given) == pytest.approx(reference.step(given), abs=1e-12)
        assert reference.distance(pipeline.named_parameters()) < 1e-12
    with pytest.raises(UsageError, match="for 2 rows have another structure than for 4"):
        collect_inputs(made, graph_of(made), [2], torch.device("cpu"), budget_bytes=1e9, wanted=["a"])


class Recurrent(nn.Module):
    """As torch's own have it: the first dimension is the time, the second one the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.a(x)
        return self.c(made[4] + self.b(made[3]).tanh())


def by_time(rows: int, generator: torch.Generator) -> Any:
    x, y = numbers(5 * rows, generator)
    return x.view(5, rows, WIDTH), y[:rows]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [3, 1])
def test_rows_in_the_second_dimension_are_cut_there(micro_batches):
    """Losses and weights are the plain loop's, also with as many rows as steps of time, and with one row."""
    made = workload(Recurrent, "*", batch=by_time)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches)) as pipeline:
        for rows in (8, 5, 3, 1):
            given = made.make_batch(rows, rows)
            assert pipeline.evaluate(given) == pytest.approx(reference.loss(given).item(), abs=1e-12)
            assert pipeline.step(given) == pytest.approx(reference.step(given), abs=1e-12)
        assert reference.distance(pipeline.named_parameters()) < 1e-12


@pytest.mark.parametrize("steps", [lambda rows: rows + 9, lambda rows: 3 * rows])
def test_a_number_of_steps_that_follows_the_draws_is_no_rows(steps):
    """As the longest of 4 and of 8 drawn sequences: cut is the second dimension, and positions go whole."""

    def by_steps(rows: int) -> Any:
        return torch.ones(steps(rows), rows)

    cuts = cutting(by_steps, lambda rows: (by_steps(rows), torch.ones(steps(rows))))
    for n in (7, 6):  # also as many as there are rows
        batch = (torch.ones(n, 6), torch.ones(n)), torch.ones(n, 6)
        assert cuts.row_count(batch[0]) == 6
        for part in cuts.split(batch, 2):
            assert [each.shape for each in (*part.inputs, part.targets)] == [(n, 3), (n,), (n, 3)]


def test_parts_along_another_dimension_lie_as_the_batch_does():
    """Contiguous, so that they take the path that was captured; where the rows are the model says, not the sizes."""
    x, y = torch.arange(40).view(5, 8), torch.arange(24).view(3, 8)
    parts = cutting(lambda rows: y[:, :rows], inputs=lambda rows: x.repeat(1, 2)[:, :rows]).split((x, y), 3)
    assert [part.rows for part in parts] == [3, 3, 2]
    assert torch.equal(torch.cat([part.inputs[0] for part in parts], 1), x)
    assert torch.equal(torch.cat([part.targets for part in parts], 1), y)
    assert all(part.inputs[0].is_contiguous() and part.targets.is_contiguous() for part in parts)


@pytest.mark.long
@pytest.mark.parametrize("loss_over", ["micro_batch", "batch"])
def test_outputs_by_time_are_joined_along_the_rows(loss_over):
    """Whatever sizes coincide: rows and time, one row, one step; and of new lengths the graph is captured once."""
    made = replace(recurrent(), loss_over=loss_over)
    reference = Reference(made)
    sizes = [(8, 6), (7, 6), (6, 6), (3, 3), (2, 2), (8, 1), (1, 4), (1, 1), (5, 9), (4, 7), (9, 3)]
    with pipeline_of(made, make_plan(made, micro_batches=3)) as pipeline:
        for rows, length in sizes:
            given = steps_and_rows(rows, torch.Generator().manual_seed(rows), length)
            assert torch.allclose(pipeline.forward(given[0]), reference.output(given[0]), atol=1e-12)
            assert pipeline.evaluate(given) == pytest.approx(reference.loss(given).item(), abs=1e-12)
            assert pipeline.step(given) == pytest.approx(reference.step(given), abs=1e-12)
        assert reference.distance(pipeline.named_parameters()) < 1e-12


class Triplets(nn.Module):
    """Adds to each row the mean of its three."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        mean = x.view(-1, 3, WIDTH).mean(1, keepdim=True)
        return self.last(x + mean.expand(-1, 3, -1).reshape(-1, WIDTH))


def test_rows_that_belong_together_are_cut_between_groups():
    """A batch of so many triplets is; one of so many rows is refused, with the way out."""

    def triplets(rows: int, generator: torch.Generator) -> Any:
        return numbers(3 * rows, generator)

    single = workload(Triplets, "first", "last")
    with pytest.raises(MarkingError, match="is invalid for input of size") as caught:
        graph_of(single)
    assert "make as many groups" in caught.value.hint
    grouped = replace(single, batch=triplets)
    with pipeline_of(grouped, make_plan(grouped, [(0, ["first", "last"])], micro_batches=2)) as pipeline:
        reference = Reference(grouped)
        for seed in range(3):
            batch = grouped.make_batch(5, seed=seed)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=1e-12)
        assert pipeline.evaluate(batch) == pytest.approx(reference.loss(batch).item(), rel=1e-12)


def test_groups_are_counted_as_the_rows_of_a_plan():
    """A profile and a plan count groups, and so a value's bytes are a group's; the last part has what is left."""
    grouped = workload(Triplets, "first", "last", batch=lambda rows, generator: numbers(3 * rows, generator))
    (edge,) = graph_of(grouped).edges
    assert edge.bytes_per_sample == 3 * WIDTH * 8
    cut = Cutting(grouped)
    assert cut.row_count(grouped.make_batch(8, seed=1)[0]) == 8
    assert [part.rows for part in cut.split(grouped.make_batch(8, seed=1), 3)] == [9, 9, 6]
    assert [part.rows for part in cut.split(numbers(25, torch.Generator()), 4)] == [9, 6, 6, 4]
    assert [part.rows for part in cut.split(numbers(25, torch.Generator()), 1)] == [25]
