"""A workload under autocast: the pipeline computes what the plain model computes under it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mixed_precision import Mixed, make_workload, plain_step
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from workloads import WIDTH, Skips, graph_of, make_plan, pipeline_of, workload

from assigner import Pipeline
from assigner.errors import MarkingError, UsageError
from assigner.model.marking import partition_graph
from assigner.profiler.walk import collect_inputs

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("model", [Mixed, Skips])
def test_one_micro_batch_is_bit_equal(model: Any, remat: bool) -> None:
    """Loss and every gradient over three steps are those of the plain model under autocast."""
    made = make_workload(model)
    torch.manual_seed(made.seed)
    plain = made.model()
    optimizer = made.optimizer(plain.parameters())
    with Pipeline(made, make_plan(made, micro_batches=1), remat=remat, graph=graph_of(made)) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == plain_step(made, plain, batch)
            gradients = pipeline.gradients()
            assert all(torch.equal(gradients[name], each.grad) for name, each in plain.named_parameters())
            optimizer.step()


@pytest.mark.parametrize("stages", [[(0, ["blocks.0"]), (0, ["blocks.1", "head"])], []])
def test_micro_batches_are_bit_equal(stages: Any) -> None:
    """Gradients of four micro-batches are those of the plain model on the same four parts, in one stage or two."""
    made = make_workload()
    torch.manual_seed(made.seed)
    plain = made.model()
    with Pipeline(made, make_plan(made, stages, micro_batches=4), graph=graph_of(made)) as pipeline:
        batch = made.make_batch(8, 0)
        assert pipeline.step(batch) == pytest.approx(plain_step(made, plain, batch, micro_batches=4), rel=1e-6)
        gradients = pipeline.gradients()
        assert all(torch.equal(gradients[name], each.grad) for name, each in plain.named_parameters())


def test_values_have_the_type_that_flows() -> None:
    """The residual stream crosses in float32, its product in bfloat16; captured bytes and real values agree."""
    made = make_workload()
    graph = partition_graph(made)
    assert {shape.dtype for shape in graph.values.values()} == {torch.float32, torch.bfloat16}
    found = collect_inputs(made, graph, [2], torch.device("cpu"), budget_bytes=1e9, wanted=set(graph.piece))
    size = {(edge.source, edge.output): edge.bytes_per_sample for edge in graph.edges}
    for piece in graph.pieces[1:]:
        for value, read in zip(piece.reads, found[2][piece.name].reads, strict=True):
            assert read.dtype is graph.values[value].dtype
            assert read.nbytes == 2 * size[value.partition, value.index]


@pytest.mark.long
@pytest.mark.distributed
def test_two_ranks_are_bit_equal(forked: ForkedRanks) -> None:
    """Values in bfloat16 travel between ranks, and gradients come back, as they are."""
    forked.run("casts.py", ranks=2)


def test_autocast_is_part_of_what_a_plan_is_for() -> None:
    """The same model with and without autocast has other kinds and another fingerprint."""
    with_it, without = (partition_graph(make_workload(autocast=name)) for name in ("bfloat16", None))
    assert with_it.fingerprint != without.fingerprint
    assert not {piece.kind for piece in with_it.pieces} & {piece.kind for piece in without.pieces}
    assert [piece.autocast for piece in without.pieces] == [None] * 3


def test_other_types_are_refused() -> None:
    """What autocast cannot compute in is refused by name."""
    with pytest.raises(UsageError, match="autocast: 'int8'"):
        replace(make_workload(), autocast="int8")


class Rounding(TorchFunctionMode):
    """What linear layers give, to 1/64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.mul(64).round().div(64) if func is nn.functional.linear else made


@pytest.mark.parametrize(("context", "named"), [
    (parametrize.cached, r"parametrize\.cached\(\) is on"), (Rounding, "Rounding, a TorchFunctionMode, is on"),
    (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "torch.autocast is on"),
])  # fmt: skip
def test_what_is_on_around_a_call(context: Any, named: str) -> None:
    """Is refused where forwards of partitions would not have it as the whole model's; behind it all goes on."""
    made = workload(lambda: nn.Sequential(symmetric(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1)), "0", "1")
    batch = made.make_batch(4, 0)
    with pipeline_of(made, make_plan(made)) as pipeline, torch.device("cpu"):
        for call in (pipeline.step, pipeline.evaluate, lambda each: pipeline.forward(each[0])):
            with context(), pytest.raises(UsageError, match=named):
                call(batch)
            call(batch)


def symmetric(layer: nn.Linear) -> nn.Linear:
    """Its weight is made of a parameter, and torch may keep it from one use to the next."""
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Symmetric(nn.Module):
    """Of the upper half of a matrix."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def test_a_forward_under_autocast_of_its_own() -> None:
    """As decorated at the root: what to write in its place is said."""

    class Casting(nn.Sequential):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    made = workload(lambda: Casting(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "*")
    with pytest.raises(MarkingError, match="cannot be cut") as caught:
        partition_graph(made)
    assert "Workload(autocast=...)" in (caught.value.hint or "")
