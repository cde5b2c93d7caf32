"""GPT-2 and BERT of transformers under plans: cut by name patterns, and trained as in one piece."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from example_plans import ROOT, cut, make_plan
from workloads import Reference

import assigner
from assigner.formats.plan import save_plan
from assigner.model.deferred import DeferredModel
from assigner.model.workload import load_workload

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")

if TYPE_CHECKING:
    from pathlib import Path

    from forked_ranks import ForkedRanks

TINY = {
    "gpt2": "blocks=2,width=16,heads=2,context=12,batch_size=8,learning_rate=1e-2",
    "bert": "layers=2,width=16,heads=2,context=12,batch_size=8,learning_rate=1e-2",
}
HELD = {
    "gpt2": ["transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"],
    "bert": ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls"],
}


def tiny(function: str, arguments: str = "") -> str:
    return f"{ROOT}/examples/hugging_face.py:{function}({TINY[function]},{arguments})"


def exact(function: str, attention: str) -> str:
    return tiny(function, f"dropout=0.0,double=True,attention='{attention}'")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("function", TINY)
def test_a_chain_with_one_tie(function: str) -> None:
    """Embedding, blocks and head are a chain; masks and position ids are made anew, not sent; one matrix is shared."""
    graph = cut(tiny(function))
    names = [piece.name for piece in graph.pieces]
    assert names == HELD[function]
    assert [(edge.source, edge.target) for edge in graph.edges] == list(pairwise(names))
    (tie,) = graph.ties
    assert tie.partitions == (names[0], names[-1])


@pytest.mark.parametrize("function", TINY)
def test_initial_weights_are_those_of_the_plain_model(function: str) -> None:
    """What transformers draws in `post_init` is drawn again, to the last bit, all at once and one partition alone."""
    torch.manual_seed(0)
    state = load_workload(tiny(function)).model().state_dict()
    graph = cut(tiny(function))
    for names in ([piece.name for piece in graph.pieces], HELD[function][2:3]):
        held = {name for each in names for name in graph.piece[each].state}
        values = graph.deferred.materialise(held)
        assert all(torch.equal(values[name], state[name]) for name in held & state.keys())
        assert any(values[name].std() > 0 for name in held if name.endswith("weight"))


def test_pretrained_weights_and_a_new_head(tmp_path: Path) -> None:
    """A builder may load a checkpoint: what it has is read, and what it lacks is drawn as transformers draws it."""
    transformers.utils.logging.disable_progress_bar()
    load_workload(tiny("gpt2")).model().save_pretrained(tmp_path)

    def builder() -> torch.nn.Module:
        made: torch.nn.Module = transformers.GPT2ForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
        return made

    torch.manual_seed(5)
    expected = builder().state_dict()
    values = DeferredModel(builder, seed=5).materialise(expected)
    assert all(torch.equal(values[name], wanted) for name, wanted in expected.items())
    assert values["score.weight"].std() > 0


def test_a_bert_batch_is_padded_and_masked() -> None:
    """Texts differ in length; only text is masked, and only what is masked has a target."""
    inputs, targets = load_workload(tiny("bert")).make_batch(64, 1)
    ids, is_text = inputs["input_ids"], inputs["attention_mask"].bool()
    assert set(is_text.sum(1).tolist()) > {3, 12}
    assert (ids[~is_text] == 256).all()
    chosen = targets != -100
    assert (chosen <= is_text).all()
    assert 0.10 < chosen.sum() / is_text.sum() < 0.20
    assert 0.6 < (ids[chosen] == 257).float().mean() < 0.95
    assert (ids == targets)[chosen & (ids < 256)].any()


@pytest.mark.long
def test_dropout_is_the_same_wherever_it_happens() -> None:
    """With dropout the losses are those of any other plan, and not those without dropout."""
    entry = tiny("gpt2", "dropout=0.3,double=True")
    workload, losses = load_workload(entry), []
    for stages in ([(0, 4)], [(0, 1), (0, 2), (0, 1)]):
        with assigner.Pipeline(workload, make_plan(entry, stages), graph=cut(entry)) as pipeline:
            losses.append([pipeline.step(workload.make_batch(8, step)) for step in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-12)
    without = Reference(load_workload(exact("gpt2", "sdpa"))).step(workload.make_batch(8, 0))
    assert abs(losses[0][0] - without) > 1e-6


@pytest.mark.long
def test_the_output_is_transformers_own() -> None:
    """`forward` gives the model's own ModelOutput for the whole batch, in eval mode."""
    entry = exact("bert", "sdpa")
    workload = load_workload(entry)
    inputs, _ = workload.make_batch(7, 3)
    expected = Reference(workload).output(inputs)
    plan = make_plan(entry, [(0, 4)])
    with assigner.Pipeline(workload, plan, training=False, graph=cut(entry)) as pipeline:
        output = pipeline.forward(inputs)
    assert type(output) is type(expected)
    assert list(output) == ["logits"]
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("function", TINY)
def test_the_loss_falls_in_30_steps(function: str) -> None:
    """Each learns, with dropout: the mean of its last five losses lies clearly below that of the first five."""
    entry = tiny(function)
    workload = load_workload(entry)
    plan = make_plan(entry, [(0, 4)], micro_batches=1)
    with assigner.Pipeline(workload, plan, graph=cut(entry)) as pipeline:
        losses = [pipeline.step(workload.make_batch(16, 1 + step)) for step in range(30)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@dataclass(frozen=True)
class Case:
    """A model under a plan; its first and its last partition, which share a matrix, lie on different ranks."""

    function: str
    attention: str
    stages: tuple[tuple[int, int], ...]
    micro_batches: int

    @property
    def ranks(self) -> int:
        return 1 + max(rank for rank, _ in self.stages)


CASES = (Case("gpt2", "eager", ((1, 2), (0, 2)), 3), Case("bert", "sdpa", ((1, 1), (2, 2), (0, 1)), 4))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function}, {case.ranks} ranks")
def test_ten_steps_equal_the_model_in_one_piece(case: Case, tmp_path: Path, forked: ForkedRanks) -> None:
    """Loss, gradients and weights on every rank are those of plain transformers, to 1e-9 in float64."""
    workload = exact(case.function, case.attention)
    save_plan(make_plan(workload, case.stages, micro_batches=case.micro_batches), tmp_path / "plan.json")
    for end in forked.run("equality.py", workload, tmp_path / "plan.json", tmp_path, ranks=case.ranks):
        assert "[transformers]" not in end.output + end.errors
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(case.ranks)]
    assert {name for each in found for name in each["parameters"]} == set(found[0]["all"])
    for each in found:
        assert max(each["worst"].values()) < 1e-9, each["worst"]
