"""Partitions under `torch.compile`: the same training, names and random choices; the compiler's errors say where."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn
from workloads import WIDTH, Reference, language, make_plan, pipeline_of, skips, workload

from assigner import Pipeline, Workload
from assigner.errors import UsageError

EXACT = 1e-10
EAGER = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(counts: list[int]):
    """A backend that counts the graphs which it is given."""

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        counts.append(len(inputs))
        return graph.forward

    return backend


@pytest.mark.long
@pytest.mark.parametrize("make", [skips, pytest.param(language, marks=pytest.mark.sweep)])
def test_training_is_the_plain_models(make):
    """Loss, gradients and weights, with remat and ragged batches, under the model's own names."""
    made = replace(make(), compile=EAGER)
    reference = Reference(made)
    with pipeline_of(made, make_plan(make(), micro_batches=3), remat="except_last") as pipeline:
        for n, rows in enumerate((8, 5, 8)):
            batch = made.make_batch(rows, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert set(pipeline.state_dict()) <= set(made.model().state_dict())


@pytest.mark.long
def test_ragged_batches_do_not_compile_for_ever():
    """Other numbers of rows compile again at first; a few batches later none does."""
    counts: list[int] = []
    made = workload(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    made = replace(made, compile={"backend": counting(counts)})
    with Pipeline(made, make_plan(workload(made.model), micro_batches=2)) as pipeline:
        known = []
        for n, rows in enumerate((8, 7, 13, 10, 9, 6, 12, 11)):
            pipeline.step(made.make_batch(rows, n))
            known.append(len(counts))
    assert known[2] == known[-1] <= 3 * 3


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own imports
@pytest.mark.parametrize(
    "given", [pytest.param(EAGER, id="aot_eager"), pytest.param(True, id="inductor", marks=pytest.mark.sweep)]
)
def test_dropout_is_that_of_the_eager_model(given):
    """A compiled partition draws the masks of one that is not, and a recompute those of its first forward."""
    if given is True and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler, and there is no g++ here")

    def model() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.4)), nn.Linear(WIDTH, 1))

    base, found = workload(model), []
    for options, remat in ((None, "never"), (given, "never"), (given, "always")):
        made: Workload = replace(base, compile=options)
        with pipeline_of(made, make_plan(base, micro_batches=2), remat=remat) as pipeline:
            found.append([pipeline.step(made.make_batch(rows, rows)) for rows in (8, 7, 8)])
    assert found[1] == pytest.approx(found[0], abs=EXACT)
    assert found[2] == pytest.approx(found[1], abs=EXACT)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
def test_running_statistics_are_deferred_too(remat):
    """BatchNorm inside a compiled partition, at any depth: the plain model's running values."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Identity(), nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, 1))

    base = workload(model)
    made = replace(base, compile=EAGER)
    reference = Reference(made)
    with pipeline_of(made, make_plan(base, micro_batches=3), remat=remat) as pipeline:
        for n, rows in enumerate((8, 6, 8)):
            batch = made.make_batch(rows, n)
            pipeline.step(batch, update=False)
            reference.loss(batch)
        buffers = {name: each for name, each in pipeline.state_dict().items() if "running" in name}
        assert len(buffers) == 2
        assert reference.distance(buffers.items()) < EXACT
        assert int(pipeline.state_dict()["0.1.num_batches_tracked"]) == 3


def test_the_compilers_errors_name_the_partition():
    """An unknown backend is refused at once; a backend that fails says for which partition."""
    made, plan = skips(), make_plan(skips())
    with pytest.raises(UsageError, match=r"Workload\.compile: .*no such backend"):
        Pipeline(replace(made, compile={"backend": "no such backend"}), plan)
    with pytest.raises(UsageError, match="CUDA graphs keep the outputs of one micro-batch"):
        Pipeline(replace(made, compile={"mode": "reduce-overhead"}), plan)
    with pytest.raises(UsageError, match=r"Workload\.compile: 'fast' is not allowed"):
        replace(made, compile="fast")

    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        raise ArithmeticError("no code for this")

    pipeline = pipeline_of(replace(made, compile={"backend": broken}), plan)
    with pytest.raises(UsageError, match=r"torch\.compile of partition 'parts\.0' failed.*no code for this"):
        pipeline.step(made.make_batch(8, 0))
    pipeline.close()
