# ruff: noqa: ARG004, ARG005, PLW0108 - all of a table's functions are given two tensors
"""Which outputs of micro-batches are not the batch's behind each other, made between partitions or within a call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from workloads import WIDTH, make_plan, pipeline_of, workload

from assigner.errors import UsageError
from assigner.model.marking import partition_graph
from assigner.model.marking.blocks import Unjoinable

STEPS = 5
BLOCKS, NUMBERS, PAIRS, COUNT = Unjoinable.BLOCKS, Unjoinable.NUMBERS, Unjoinable.PAIRS, Unjoinable.COUNT


def _filled(a, b, one, other):
    made = a.new_empty(2 * len(a), *a.shape[1:])
    made[one(len(a))], made[other(len(a))] = a, b
    return made


def _owners(a):
    return torch.arange(len(a)).repeat_interleave(STEPS)


def _numbers(a, each=0):
    """Three of one kind and two of another in each row."""
    return (torch.arange(STEPS) // 3 * 2).expand(len(a), STEPS) + each * torch.arange(len(a))[:, None]


def _set(a):
    return torch.where(a[..., 0] > 0)


def _experts(a, *, in_place):
    entries = a.flatten(0, 1)
    made = torch.zeros_like(entries)
    for chosen in (entries[:, 0] > 0, entries[:, 0] <= 0):
        places = torch.where(chosen)[0]
        if in_place:
            made[places] = entries[places] * 2
        else:
            made = made.index_add(0, places, entries[places] * 2)
    return made.view_as(a), made


def _numbered(a, b):
    made, places = a.new_zeros(2 * len(a), *a.shape[1:]), torch.arange(len(a))
    made[places], made[places + len(a)] = a, b
    return made


MADE = {
    # of two tensors of (rows, STEPS, WIDTH)
    "views": (lambda a, b: torch.cat((a, b)), BLOCKS),
    "steps first": (lambda a, b: a.transpose(0, 1).flatten(0, 1), BLOCKS),
    "steps first in a loop": (lambda a, b: torch.cat([a[:, n] for n in range(STEPS)]), BLOCKS),
    "written in two halves": (lambda a, b: _filled(a, b, lambda n: slice(n), lambda n: slice(n, None)), BLOCKS),
    "which view it is": (lambda a, b: torch.cat((torch.ones(len(a)), torch.zeros(len(b)))), BLOCKS),
    "every other of views": (lambda a, b: torch.cat((a, b))[::2], BLOCKS),
    "neighbours of views": (lambda a, b: torch.cat((a, b)).view(-1, 2, STEPS, WIDTH).mean(1), BLOCKS),
    "chosen of views": (lambda a, b: torch.cat((a, b))[torch.cat((a, b))[:, 0, 0] > 0], BLOCKS),
    "all but the first": (lambda a, b: a[1:], BLOCKS),
    "every pair as a row": (lambda a, b: (a[:, None] + b).flatten(0, 1), BLOCKS),
    "written in turn": (lambda a, b: _filled(a, b, lambda _: slice(0, None, 2), lambda _: slice(1, None, 2)), None),
    "halves of views": (lambda a, b: torch.cat((a, b)).chunk(2), None),
    "views by their ends": (lambda a, b: (torch.cat((a, b))[: len(a)], torch.cat((a, b))[-len(a) :]), None),
    "views beside each other": (lambda a, b: torch.stack((a, b), 1).flatten(0, 1), None),
    "mean of views": (lambda a, b: torch.cat((a, b)).view(2, -1, STEPS, WIDTH).mean(0), None),
    "steps of a row": (lambda a, b: a.flatten(0, 1), None),
    "windows and back": (lambda a, b: a.transpose(1, 2).reshape(-1, STEPS).view(len(a), WIDTH, STEPS), None),
    "chosen": (lambda a, b: a[a[..., 0] > 0], None),
    "the same for all": (lambda a, b: torch.zeros(2 * len(a), dtype=torch.long), None),
    "a first token": (lambda a, b: torch.cat((torch.zeros(1, 1, WIDTH).expand(len(a), -1, -1), a), 1), None),
    "no rows": (lambda a, b: torch.arange(STEPS) + a.mean(), None),
    "labels": (lambda a, b: torch.arange(len(a)), NUMBERS),
    "labels by a sum": (lambda a, b: torch.ones(len(a)).cumsum(0) - 1, NUMBERS),
    "owners as a column": (lambda a, b: torch.cat((_owners(a)[:, None].to(a), a.flatten(0, 1)), 1), NUMBERS),
    "rows of a mask": (lambda a, b: (a[..., 0] > 0).nonzero(), NUMBERS),
    "row of each in a mask": (lambda a, b: _set(a)[0], NUMBERS),
    "a table by row": (lambda a, b: torch.ones(20, WIDTH)[torch.arange(len(a))], NUMBERS),
    "step of each in a mask": (lambda a, b: _set(a)[1], None),
    "chosen by a mask's rows": (lambda a, b: a[_set(a)], None),
    "the last step": (lambda a, b: a[torch.arange(len(a)), torch.full((len(a),), 2)], None),
    "summed by owner": (lambda a, b: a.new_zeros(len(a), WIDTH).index_add(0, _owners(a), a.flatten(0, 1)), None),
    "experts that add to their entries": (lambda a, b: _experts(a, in_place=False), None),
    "experts that write their entries": (lambda a, b: _experts(a, in_place=True), None),
    "written in two halves by numbers": (lambda a, b: _numbered(a, b), BLOCKS),
    "turned round": (lambda a, b: a.flip(0), BLOCKS),
    "which view each is of": (lambda a, b: torch.arange(2).repeat_interleave(len(a)), BLOCKS),
    "steps of all, time first": (lambda a, b: torch.ones(STEPS, 1, 2).expand(STEPS, len(a), 2).flatten(0, 1), BLOCKS),
    "one-hot of views": (
        lambda a, b: a.new_zeros(2 * len(a), 4).scatter(1, (torch.cat((a, b))[:, :1, 0] > 0).long(), 1.0), BLOCKS,
    ),
    "a bag of each row": (lambda a, b: functional.embedding_bag(_numbers(a), a.new_ones(4, WIDTH)), None),
    "a mask as numbers": (lambda a, b: torch.where(a > 0, 0.0, -1.0), None),
    "as many chosen of each row": (lambda a, b: a[_numbers(a) < 2].reshape(len(a), -1, WIDTH), None),
    "counted in bins of its own": (
        lambda a, b: a.new_zeros(len(a) * 16).index_add(0, _numbers(a, 16).view(-1), a[..., 0].flatten()).view(-1, 16),
        None,
    ),
    "chosen by a mask's rows as columns": (lambda a, b: a[tuple((a > 0).nonzero().t())], None),
    "a mask's steps": (lambda a, b: (a > 0).nonzero()[:, 1:], None),
    "boxes behind their owners": (lambda a, b: torch.cat((_owners(a)[:, None].to(a), a.flatten(0, 1)), 1)[:, 1:], None),
    "summed by whose they are": (
        lambda a, b: (_owners(a)[None] == torch.arange(len(a))[:, None]).to(a) @ a.flatten(0, 1), None,
    ),
    "positions": (lambda a, b: torch.arange(len(a) * STEPS) % STEPS, None),
    "losses of pairs": (
        lambda a, b: functional.cross_entropy(a[:, 0] @ b[:, 0].t(), torch.arange(len(a)), reduction="none"), None,
    ),
    "scores of pairs": (lambda a, b: a[:, 0] @ b[:, 0].t(), PAIRS),
    "which are pairs": (lambda a, b: torch.eye(len(a)), PAIRS),
}  # fmt: skip


def arranged(a, b):
    """All of that."""
    return {name: make(a, b) for name, (make, _) in MADE.items()}


class Arranging(torch.autograd.Function):
    """Runs as one call between partitions."""

    @staticmethod
    def forward(ctx, a, b):
        return torch.cat((a, b))

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(2)


class Two(nn.Module):
    """Two layers, one for each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return self.first(x), self.last(y)


class Between(nn.Module):
    """Arranges two partitions' results between these."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        a, b = self.first(x), self.last(y)
        return {**arranged(a, b), "a Function": Arranging.apply(a, b), "a number": len(x)}


class Arranged(Two):
    """Arranges them in one module."""

    def forward(self, x, y):
        return arranged(*super().forward(x, y))


class Within(nn.Module):
    """Does so within of a partition."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), Arranged()

    def forward(self, x, y):
        return self.last(self.first(x), y)


def two(rows, generator):
    """Two inputs, and nothing to compare with."""
    return tuple(torch.randn(rows, STEPS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)), None


@pytest.mark.parametrize("model", [Between, Within])
def test_what_cannot_be_joined_is_known_by_what_made_it(model):
    """Whoever has run the operations: the graph, a module or a Function that is one call of it."""
    output = partition_graph(workload(model, "first", "last", batch=two, loss=_no_loss)).output
    found = pytree.tree_unflatten(list(output.unjoinable), output.structure)
    wanted = {name: reason for name, (_, reason) in MADE.items()}
    if model is Between:
        wanted |= {"a Function": BLOCKS, "a number": COUNT}
    assert {name: _any(each) for name, each in found.items()} == wanted


@pytest.mark.parametrize("name", ["labels", "which view it is", "which are pairs"])
def test_what_is_the_same_for_each_micro_batch_is_not_the_batchs(name):
    """Labels by row, and what only follows from how many there are: refused where a loss is over the batch."""
    made = workload(_Labelled.of(name), "first", "last", batch=two, loss=_no_loss)
    with (
        pipeline_of(replace(made, loss_over="batch"), make_plan(made, micro_batches=4)) as pipeline,
        pytest.raises(UsageError, match=r"output\[2\].*cannot be put together.*" + MADE[name][1].split(",")[0][:20]),
    ):
        pipeline.step(made.make_batch(8, 1))


class _Labelled(Two):
    """Gives labels along."""

    def __init__(self, name) -> None:
        super().__init__()
        self.name = name

    @classmethod
    def of(cls, name):
        return lambda: cls(name)

    def forward(self, x, y):
        a, b = super().forward(x, y)
        return a, b, MADE[self.name][0](a, b)


def _any(each):
    return next((reason for reason in pytree.tree_leaves(each, is_leaf=lambda leaf: leaf is None) if reason), None)


def _no_loss(made, _):
    return sum(each.float().mean() for each in pytree.tree_leaves(made))


class Listed(nn.Module):
    """Is given a list with an entry for each row; of its outputs some have as many entries as a micro-batch rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.two, self.four = (nn.Parameter(torch.ones(n, WIDTH)) for n in (2, 4))

    def forward(self, entries):
        made = self.last(self.first(torch.stack(entries)))
        return {"made": made, "two": self.two * 2, "four": self.four * 2, "columns": made.t()}


def listed(rows, generator):
    """A list, and nothing to compare with."""
    return ([torch.randn(WIDTH, generator=generator, dtype=torch.float64) for _ in range(rows)],), None


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_rows_of_a_list_are_told_from_others_by_a_second_number_of_them(micro_batches):
    """Two or four prototypes are none of as many rows."""
    made = workload(Listed, "first", "last", batch=listed, loss=lambda made, _: _no_loss(list(made.values())))
    with pipeline_of(made, make_plan(made, micro_batches=micro_batches)) as pipeline:
        found = pipeline.forward(made.make_batch(8, 1)[0], to=0)
    shapes = {name: tuple(each.shape) for name, each in found.items()}
    assert shapes == {"made": (8, 1), "two": (2, WIDTH), "four": (4, WIDTH), "columns": (1, 8)}
