"""The example workloads: how they are cut, that they learn, and that a plan changes nothing in what they learn."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from example_plans import TINY, cut, entry, make_plan, tiny

import assigner
from assigner.formats.plan import save_plan
from assigner.model.workload import load_workload

if TYPE_CHECKING:
    from pathlib import Path

    from forked_ranks import ForkedRanks

    from assigner.model.marking import PartitionGraph


def graph_of(example: str, arguments: str = "") -> PartitionGraph:
    return cut(entry(example, arguments))


def edges(graph: PartitionGraph) -> set[tuple[str, str]]:
    return {(edge.source, edge.target) for edge in graph.edges}


@pytest.mark.long
def test_gpt_is_a_chain_of_fourteen_partitions_with_one_kind_of_block() -> None:
    """By default a GPT is cut into embedding, 12 equal blocks and head, each reading the one before."""
    graph = graph_of("gpt")
    names = ["embed", *(f"blocks.{n}" for n in range(12)), "head"]
    assert [piece.name for piece in graph.pieces] == names
    assert edges(graph) == set(pairwise(names))
    assert len({graph.piece[f"blocks.{n}"].kind for n in range(12)}) == 1
    assert len({piece.kind for piece in graph.pieces}) == 3
    assert graph.ties == ()


def test_tied_gpt_shares_one_matrix_between_embedding_and_head() -> None:
    """`tied=True` is one tie of embedding and head, and one matrix less in the model."""
    (tie,) = graph_of("gpt", "blocks=2,tied=True").ties
    assert tie.partitions == ("embed", "head")
    assert tie.bytes == 256 * 128 * 4
    plain, tied = (
        sum(p.numel() for p in load_workload(entry("gpt", f"blocks=2,tied={tied}")).model().parameters())
        for tied in (False, True)
    )
    assert plain - tied == 256 * 128


@pytest.mark.long
def test_resnet_blocks_of_one_shape_share_a_kind() -> None:
    """The patterns cut a ResNet-20 into 11 partitions; in each group the blocks after the first are of one kind."""
    graph = graph_of("resnet")
    names = ["stem", *(f"blocks.{n}" for n in range(9)), "head"]
    assert [piece.name for piece in graph.pieces] == names
    assert edges(graph) == set(pairwise(names))
    kinds = [graph.piece[f"blocks.{n}"].kind for n in range(9)]
    assert kinds[0] == kinds[1] == kinds[2]
    assert kinds[4] == kinds[5]
    assert kinds[7] == kinds[8]
    assert len(set(kinds)) == 5
    assert "blocks.0.norm1.running_mean" in graph.piece["blocks.0"].buffers


@pytest.mark.long
def test_unet_skips_are_edges_past_the_partitions_between() -> None:
    """Each level's skip is an edge to the level's way up, beside the chain; the pooled value has a quarter of it."""
    graph = graph_of("unet")
    names = ["down.0", "down.1", "down.2", "bottom", "up.0", "up.1", "up.2", "head"]
    assert [piece.name for piece in graph.pieces] == names
    skips = {("down.0", "up.2"), ("down.1", "up.1"), ("down.2", "up.0")}
    assert edges(graph) == {*pairwise(names), *skips}
    size = {(edge.source, edge.target): edge.bytes_per_sample for edge in graph.edges}
    assert size["down.0", "up.2"] == 16 * 64 * 64 * 4
    assert size["down.0", "down.1"] == size["down.0", "up.2"] / 4


@pytest.mark.long
def test_the_towers_meet_only_in_the_score() -> None:
    """Two branches without an edge between them; the padding mask comes from the batch and is not sent."""
    graph = graph_of("two_tower")
    query, item = ["query.embed", *(f"query.blocks.{n}" for n in range(4))], [f"item.{n}" for n in range(3)]
    assert {piece.name for piece in graph.pieces} == {*query, *item, "score"}
    chains = {*pairwise(query), *pairwise(item)}
    assert edges(graph) == {*chains, ("query.blocks.3", "score"), ("item.2", "score")}
    assert len(graph.edges) == 8
    assert len({graph.piece[f"query.blocks.{n}"].kind for n in range(3)}) == 1
    assert graph.piece["item.1"].kind == graph.piece["item.2"].kind


def test_the_embedding_is_most_of_the_memory_and_its_rows_do_not_travel() -> None:
    """A table of items beside a deep MLP: the first partition holds the bytes, its message is one row a sample."""
    graph = graph_of("clicks")
    assert [piece.name for piece in graph.pieces] == ["history", *(f"layers.{n}" for n in range(12)), "head"]
    tensors = graph.deferred.tensors()
    held = {piece.name: sum(tensors[name].nbytes for name in piece.parameters) for piece in graph.pieces}
    assert held["history"] == 50_000 * 128 * 4 > 3 * sum(held.values()) / 4
    assert {edge.bytes_per_sample for edge in graph.edges} == {128 * 4}


@pytest.mark.parametrize("example", TINY)
def test_a_batch_depends_on_the_generator_alone(example: str) -> None:
    """One seed, one batch, in any process and after any draw; another seed, another batch."""
    workload = load_workload(tiny(example))
    first = torch.utils._pytree.tree_leaves(workload.make_batch(5, 1))
    torch.rand(7)
    again = torch.utils._pytree.tree_leaves(workload.make_batch(5, 1))
    other = torch.utils._pytree.tree_leaves(workload.make_batch(5, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(len(leaf) == 5 for leaf in first)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "arguments", "fall"),
    [
        ("gpt", "width=32,heads=2,blocks=2,context=32,learning_rate=3e-3", 0.75),
        ("resnet", "width=8,blocks_per_group=1,size=16,learning_rate=1e-2", 0.75),
        ("unet", "width=4,depth=2,size=16,learning_rate=1e-2", 0.6),
        ("two_tower", "width=32,query_blocks=1,item_layers=2,length=8,features=16,learning_rate=3e-3", 0.75),
        ("clicks", "items=100,width=32,layers=2,length=4,batch_size=64,learning_rate=1e-2", 0.8),
    ],
)
def test_the_loss_falls_in_30_steps(example: str, arguments: str, fall: float) -> None:
    """Each example learns: the mean of its last five losses lies clearly below that of the first five."""
    named = entry(example, arguments)
    workload, graph = load_workload(named), cut(named)
    with assigner.Pipeline(workload, make_plan(named, [(0, len(graph.pieces))]), graph=graph) as pipeline:
        losses = [pipeline.step(workload.make_batch(workload.batch_size, 1 + step)) for step in range(30)]
    assert sum(losses[-5:]) < fall * sum(losses[:5])


@dataclass(frozen=True)
class Case:
    """An example under a plan; `piece` is what the reference takes at once: None, the whole batch."""

    example: str
    stages: tuple[tuple[int, int], ...]
    arguments: str = ""
    micro_batches: int = 4
    piece: int | None = None

    @property
    def ranks(self) -> int:
        return 1 + max(rank for rank, _ in self.stages)


CASES = {
    "gpt, uneven micro-batches": Case("gpt", ((1, 2), (0, 3)), micro_batches=3),
    "gpt tied, three ranks": Case("gpt", ((1, 1), (2, 3), (0, 1)), "tied=True"),
    "resnet, its micro-batches": Case("resnet", ((1, 2), (0, 3)), piece=4),
    "unet, three ranks": Case("unet", ((2, 2), (0, 2), (1, 2))),
    "two-tower, a rank each": Case("two_tower", ((1, 3), (0, 3))),
    "clicks, the embedding alone": Case("clicks", ((1, 1), (0, 3))),
}


LONG = ("gpt, uneven micro-batches", "clicks, the embedding alone")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.sweep] if name in LONG else []) for name, case in CASES.items()],
)
def test_ten_steps_equal_the_model_in_one_piece(case: Case, tmp_path: Path, forked: ForkedRanks) -> None:
    """Loss, gradients, weights and buffers on every rank are those of plain PyTorch, to 1e-10 in float64.

    BatchNorm's statistics are those of a micro-batch, so the ResNet's reference takes the same micro-batches.
    """
    workload = tiny(case.example, f"double=True,{case.arguments}")
    save_plan(make_plan(workload, case.stages, micro_batches=case.micro_batches), tmp_path / "plan.json")
    piece = () if case.piece is None else ("--reference-rows", str(case.piece))
    words = (workload, tmp_path / "plan.json", tmp_path, *piece)
    forked.run("equality.py", *words, ranks=case.ranks, before=f"example_plans:cut {shlex.quote(workload)}")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(case.ranks)]
    assert {name for each in found for name in each["parameters"]} == set(found[0]["all"])
    assert bool([name for each in found for name in each["buffers"]]) == (case.example == "resnet")
    for each in found:
        assert max(each["worst"].values()) < 1e-10, each["worst"]
