"""Partitions whose forward needs values: what they give is learnt from batches with values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from assigner import MarkingError, UsageError, Workload
from assigner.model.marking import PartitionGraph, Value, partition_graph, realforward
from assigner.model.marking.cut import recut
from assigner.model.marking.domain import input_key
from assigner.model.workload import call_arguments

WIDTH = 8


class Narrow(nn.Linear):
    """Columns that NumPy counts, and twice as many rows less one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        columns = 1 + int(np.abs(x.detach().numpy()).sum() * 100) % 3
        return torch.cat([made, made])[1:, :columns]


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.middle(x).mean()
        return self.last(x) + y


def workload(make: type[nn.Linear]) -> Workload:
    return Workload(
        model=lambda: Net(make(WIDTH, WIDTH)),
        batch=lambda rows, generator: (torch.randn(rows, WIDTH, generator=generator), torch.zeros(rows, 1)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
        marks=("first", "middle", "last"),
    )


def run(graph: PartitionGraph, x: torch.Tensor) -> torch.Tensor:
    """The model's output, partition by partition."""
    modules = graph.build(graph.piece)
    values = {Value("", 0): x}
    for piece in graph.pieces:
        made = modules[piece.name](*(values[each] for each in piece.reads), *(s.evaluate([x]) for s in piece.sizes))
        values.update({Value(piece.name, n): each for n, each in enumerate(made)})
    return values[Value(graph.last.name, 0)]


@pytest.mark.long
def test_a_forward_that_needs_values():
    """It is captured for any number of rows, in both modes and as often as asked alike, and leaves generators alone."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    made = workload(Narrow)
    graph = partition_graph(made)
    assert torch.equal(torch.get_rng_state(), before)
    assert graph.fingerprint == partition_graph(made).fingerprint
    torch.manual_seed(made.seed)
    plain = made.model()
    for rows in (5, 9):
        x = torch.randn(rows, WIDTH)
        assert torch.equal(run(graph, x), plain(x))
        again = recut(graph, graph.domain.example.structure, [x], training=False)
        assert torch.equal(run(again, x), plain(x))
    assert all(tensor.is_meta for tensor in graph.deferred.tensors().values())


class Windows(nn.Linear):
    """Takes the number of rows for a plain number, as Swin's windows do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(int(x.shape[0] * 2 / 2), *x.shape[1:])


def test_what_fixes_the_rows_is_looked_for_once(monkeypatch):
    """The first try ends there, the last says where; with all modules of that class learnt the third goes through.

    In eval mode only other inputs than the example's have symbols for their lengths, which cost the most.
    """
    tries = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **words: tries.append(1) or export(*args, **words))
    made = dataclasses.replace(
        workload(Windows),
        model=lambda: nn.Sequential(*(Windows(WIDTH, WIDTH) for _ in range(3))),
        batch=lambda rows, generator: (torch.randn(rows, 3, WIDTH, generator=generator), None),
        marks=("*",),
    )
    graph = partition_graph(made)
    assert len(tries) == 3
    x, longer = torch.randn(5, 3, WIDTH), torch.randn(5, 4, WIDTH)
    structure = pytree.tree_structure(call_arguments(x))
    assert graph.domain.admits(input_key(structure, [x]))
    torch.manual_seed(made.seed)
    assert run(graph, x).equal(made.model()(x))
    fixed = [(0, "size", 1) in recut(graph, structure, [each], training=False).domain.fixed for each in (x, longer)]
    assert fixed == [True, False]


@pytest.mark.long
def test_one_partition_in_memory_at_a_time(monkeypatch):
    """Where all weights are much for this host, each partition's are made for its call alone; too large is refused."""
    free = 2 * 4 * (WIDTH * WIDTH + WIDTH)
    monkeypatch.setattr(realforward, "free_memory", lambda: free)
    graph = partition_graph(workload(Narrow))
    monkeypatch.undo()
    assert graph.fingerprint == partition_graph(workload(Narrow)).fingerprint
    monkeypatch.setattr(realforward, "free_memory", lambda: free - 1)
    with pytest.raises(MarkingError, match="'first' must run once to find out what it returns"):
        partition_graph(workload(Narrow))


@pytest.mark.long
def test_a_forward_that_fails_with_values_too():
    """Both reasons are told, each with its line."""

    class Strict(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = x.detach().numpy()
            assert kept.shape[0] == 5, "five rows"
            return super().forward(x)

    with pytest.raises(
        MarkingError, match=r"cannot be traced at .*numpy.*; on a few rows with values it fails at .*five rows"
    ):
        partition_graph(workload(Strict))


def test_a_module_of_torchs_says_what_it_was_given():
    """Where no line of the user's has called it, as in an nn.Sequential, and inputs have another width."""
    made = dataclasses.replace(
        workload(nn.Linear), model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 1)), marks=()
    )
    with pytest.raises(
        MarkingError,
        match=r"the forward of '0' cannot be traced in Linear\(in_features=6, out_features=16, bias=True\),"
        rf" given float32\[\w+, {WIDTH}\]: \S",
    ) as caught:
        partition_graph(made)
    assert "does the model take such inputs?" in (caught.value.hint or "")


def test_other_arguments_than_learnt():
    """What a capture gives to a module must be what it was given with values."""

    class Hidden(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(self.middle(x, None if type(x) is torch.Tensor else x.sum()))

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            x.detach().numpy()
            return super().forward(x if mask is None else x + mask)

    made = dataclasses.replace(workload(Counting), model=lambda: Hidden(Counting(WIDTH, WIDTH)))
    with pytest.raises(
        MarkingError, match=r"decides what 'middle' is given: tensors of \[2\] dim.* and of \[2, 0\] in"
    ):
        partition_graph(made)


@pytest.mark.long
def test_other_results_than_learnt():
    """A partition that returns another structure than in the calls that it was captured by is refused when it does."""

    class Late(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
            made = super().forward(x)
            return (made, made) if float(x.detach().numpy().max()) > 100 else made

    graph = partition_graph(workload(Late))
    module = graph.build(["middle"])["middle"]
    x = torch.ones(4, WIDTH)
    module(x)
    with pytest.raises(UsageError, match="'middle' returns something else than in the calls"):
        module(x * 1e6)


def test_the_same_batches_for_all():
    """Batches are Workload.batch's, cut or repeated to the sizes that are asked for."""
    leaves = [torch.zeros(5, 4, dtype=torch.int64), "text"]
    assert call_arguments(tuple(leaves)) == (tuple(leaves), {})
    made = realforward.example_inputs(lambda rows: (torch.arange(rows * 3).view(rows, 3),), leaves[:1], [0])
    found = list(made)
    assert [each.shape for (each,) in found] == [(4, 4), (8, 4), (12, 4)]
    assert found[0][0].tolist()[1] == [3, 4, 5, 3]


def test_examples_that_are_cut_stay_within_their_lengths():
    """Lengths of sequences, and places in them, are still such when the sequences are cut; ids of words stay."""
    words, lengths, places = torch.arange(12).repeat(4, 1), torch.tensor([12, 3, 9, 5]), torch.tensor([11, 3, 9, 5])
    asked = [torch.zeros(4, 7, dtype=torch.int64), *(torch.zeros(4, dtype=torch.int64),) * 2, torch.zeros(4)]
    made = words, lengths, places, lengths / 2
    found = next(realforward.example_inputs(lambda rows: tuple(each[:rows] for each in made), asked, [0, 0, 0, 0]))
    assert [each.tolist() for each in found] == [[[*range(7)]] * 4, [7, 3, 7, 5], [6, 3, 6, 5], [6, 1.5, 4.5, 2.5]]


def test_examples_of_two_sequences_that_are_cut():
    """Lengths that may be of either are within both."""
    source, target = torch.zeros(4, 10, dtype=torch.int64), torch.zeros(4, 20, dtype=torch.int64)
    lengths = torch.tensor([8, 3, 7, 5])
    made = source, target, lengths
    asked = [torch.zeros(4, 9, dtype=torch.int64), torch.zeros(4, 5, dtype=torch.int64), lengths]
    found = next(realforward.example_inputs(lambda rows: tuple(each[:rows] for each in made), asked, [0, 0, 0]))
    assert found[2].tolist() == [4, 3, 4, 4]
