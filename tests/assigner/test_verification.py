"""The check of a cut model against the plain one: what it lets pass, and what it finds."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from foreign import written
from kept import kept
from torch import nn
from workloads import WIDTH, diamond, graph_of, language, normalised, numbers, skips, towers, workload
from wrong_models import WRONG, History, Noisy, Spectral, simple

from assigner.errors import MarkingError, UsageError
from assigner.model.marking import partition_graph
from assigner.model.workload import Workload
from assigner.verification import check_model
from assigner.verification.comparing import Difference, Moment, align, difference
from assigner.verification.observing import Item
from assigner.verification.turns import Turns


def checked(made):
    return check_model(made, graph_of(made))


@pytest.mark.parametrize(
    "make", [language, skips, towers, diamond, lambda: workload(normalised, "*"), lambda: language(dropout=0.4)]
)
def test_a_sound_model_passes(make):
    """Tied weights, skips, several inputs, BatchNorm, dropout: equal, without a caution."""
    made = make()
    found = check_model(made, graph_of(made))
    assert (found.result, found.way, found.rows, found.micro_batches) == ("equal", "whole", 5, 2)
    assert found.partitions == len(graph_of(made).pieces)
    assert found.cautions == ()


def test_an_optimizer_that_needs_a_closure():
    """LBFGS cannot run on partitions apart: they are compared with plain descent, and it is said where it trains."""
    found = checked(replace(skips(), optimizer=torch.optim.LBFGS))
    assert (found.result, found.trained) == ("equal", True)
    assert [text.startswith("LBFGS.step needs a closure") for text in found.cautions] == [True]
    assert "solve --max-workers 1" in found.cautions[0]


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_would_train_something_else_is_refused(name):
    """Whatever carries the difference: objects, counters, generators, recomputes, the optimizer."""
    with pytest.raises(MarkingError) as refused:  # at capture, or by the check
        checked(WRONG[name]())
    assert refused.value.hint


class Doubling(nn.Linear):
    """Scales by an attribute."""

    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


def test_the_refusal_names_the_module_and_its_line():
    """The first step, the loss, and the innermost module in which it begins, with the line of its forward."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Doubling(WIDTH, 1)), "*")
    graph = partition_graph(made)
    graph.deferred.model[1].factor = 1.01
    said = r"in step 1 of 2, the loss .* in partition '1', in '1' \(Doubling, at .*test_verification.py:\d+\)"
    with pytest.raises(MarkingError, match=said):
        check_model(made, graph)


def test_an_optimizer_that_looks_at_all_parameters_is_found():
    """Gradients are equal, and parameters after the update are not."""
    with pytest.raises(MarkingError, match=r"in step 1 of 2, 0.weight of partition '0'") as refused:
        checked(WRONG["clipping optimizer"]())
    assert "max_norm" in refused.value.hint


def mutated(graph, name, change):
    """The graph with one partition's forward changed by `change(fx graph)`."""
    piece = graph.piece[name]
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(piece.graph, {}))
    change(copy)
    pieces = tuple(replace(piece, graph=copy) if each is piece else each for each in graph.pieces)
    return replace(graph, pieces=pieces, recuts={True: [], False: []})


class Glued(nn.Module):
    """Three linear layers with code between them."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for part in self.parts:
            x = torch.relu(part(x)) * 1.5
        return self.last(x)


def drop(graph):
    node = next(node for node in graph.nodes if "relu" in str(node.target))
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def detach(graph):
    node = next(node for node in graph.nodes if "relu" in str(node.target))
    node.target = torch.ops.aten.relu.default
    with graph.inserting_before(node):
        node.args = (graph.call_function(torch.ops.aten.detach.default, (node.args[0],)),)


def other_constant(graph):
    node = next(node for node in graph.nodes if "mul" in str(node.target))
    node.args = (node.args[0], 1.5 + 3e-5)


@kept
def glued(dtype):
    def batch(rows, generator):
        return tuple(each.to(dtype) for each in numbers(rows, generator))

    return replace(workload(Glued, "parts.*", "last"), model=lambda: Glued().to(dtype), batch=batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_capture_that_is_not_broken_passes(dtype):
    """What the next test breaks is equal as it is."""
    assert check_model(glued(dtype), graph_of(glued(dtype))).result == "equal"


@pytest.mark.parametrize(
    ("partition", "change", "said"),
    [
        ("parts.0", drop, "it begins in partition 'parts.0' or 'parts.1', before 'parts.1' is called"),
        pytest.param(
            "parts.2", drop, "it begins in partition 'parts.2', before 'last' is called", marks=pytest.mark.long
        ),
        ("parts.1", other_constant, "it begins in partition 'parts.1' or 'parts.2', before 'parts.2' is called"),
        ("parts.1", detach, "it begins in the backward of partition 'parts.1'"),
    ],
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.long), torch.float32])
def test_a_broken_capture_is_found_where_it_is_broken(partition, change, said, dtype):
    """A lost operation, a constant that is off by 3e-5, a gradient that goes no further."""
    with pytest.raises(MarkingError, match=said):
        check_model(glued(dtype), mutated(graph_of(glued(dtype)), partition, change))


def test_a_model_that_multiplies_errors_raises_no_alarm():
    """Rounding decides what it trains; the sums of a tied weight's gradient come in another order."""

    class Chaotic(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.parts[2].weight = self.parts[0].weight
            self.last = nn.Linear(WIDTH, 1)

        def forward(self, x):
            for part in self.parts:
                x = torch.sin(20 * part(x))
            return self.last(x)

    made = replace(workload(Chaotic, "parts.*", "last"), batch=singles, model=Chaotic)
    assert checked(made).result == "equal"


def singles(rows, generator):
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, x.sum(1, keepdim=True)


def test_draws_of_pythons_generator_inside_of_modules_are_a_caution():
    """A run draws others than a plain loop; what else differs would still be found."""
    found = checked(workload(Noisy, "*"))
    assert found.result == "equal"
    assert "draw from Python's or NumPy's generator" in found.cautions[0]


def test_a_model_that_differs_from_itself_cannot_be_compared():
    """Nothing is refused for that, and nothing is claimed."""
    clock = iter(range(10**6))

    class Restless(nn.Linear):
        def forward(self, x):
            return super().forward(x) + next(clock)

    made = workload(lambda: nn.Sequential(Restless(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "*")
    found = checked(made)
    assert found.result == "uncertain"
    assert "differs from itself in two equal runs" in found.cautions[0]


def test_a_loss_that_mixes_rows_is_told_once():
    """Micro-batches change such a loss, whatever runs them."""

    def contrastive(made, wanted):
        return F.cross_entropy(made @ made.T, torch.arange(len(made)))

    found = checked(workload(simple, "*", loss=contrastive))
    assert found.result == "equal"
    (said,) = found.cautions
    assert "the loss mixes rows" in said


def test_a_buffer_that_moves_with_every_micro_batch_is_told():
    """A counter of forwards counts micro-batches; BatchNorm's moves once a step, and is not meant."""

    class Counter(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.seen.add_(1)
            return super().forward(x)

    found = checked(workload(lambda: nn.Sequential(Counter(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "*"))
    assert found.result == "equal"
    assert "buffer '0.seen' moves with every micro-batch" in found.cautions[0]


class Steps(nn.Module):
    """Counts its training forwards in a buffer, beside its modules."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.steps.add_(1)
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize(
    ("model", "marks", "name"),
    [
        (Steps, ("*",), "'steps'"),
        (written.Momentum, ("student", "teacher", "last"), "'teacher.0.bias' and 1 more"),
        (written.MomentumData, ("student", "teacher", "last"), "'teacher.0.bias' and 1 more"),
        (written.ClampedScale, ("first", "second", "last"), "'logit_scale'"),
    ],
)
def test_what_a_step_stores_once_is_compared_in_one_micro_batch(model, marks, name):
    """A run stores it as a whole batch does; a plain loop over micro-batches would at each of them."""
    found = checked(workload(model, *marks))
    assert (found.result, found.rows, found.micro_batches) == ("equal", 5, 1)
    (said,) = found.cautions
    assert said.startswith(f"the forward writes to {name}, ")


def test_draws_in_evaluations_are_no_mixing_of_rows():
    """A variational autoencoder draws noise in eval mode too: its whole and its parts differ by that alone."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x):
            mean = self.encoder(x)
            return self.decoder(mean + torch.randn_like(mean))

    def loss(made, wanted):
        return (made**2).sum() + 0.0 * wanted.sum()

    found = checked(workload(Noisy, "encoder", "decoder", loss=loss, reduction="sum"))
    assert found.result == "equal"
    assert not found.cautions


def test_a_loss_that_is_no_sum_is_told_as_that():
    """Under reduction "sum" the words are about sums, and name no weight."""

    def mean(made, wanted):
        return made.square().mean() + 0.0 * wanted.sum()

    (said,) = checked(workload(simple, "*", loss=mean, reduction="sum")).cautions
    assert "is not the sum of its micro-batches' losses" in said
    assert "weight" not in said


def test_a_loss_that_mixes_rows_is_told_beside_a_clamped_scale():
    """The comparison in one micro-batch does not hide what micro-batches change."""

    def contrastive(made, wanted):
        return F.cross_entropy(made @ made.T, torch.arange(len(made)))

    found = checked(workload(written.ClampedScale, "first", "second", "last", loss=contrastive))
    assert found.result == "equal"
    assert "the loss mixes rows" in found.cautions[1]


def test_a_model_for_one_size_of_batches_is_checked_with_that():
    """Rows in fours; five are not."""

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x):
            return self.last(self.first(x).view(-1, 4, WIDTH).flip(1).view(-1, WIDTH))

    found = checked(workload(Fixed, "*"))
    assert (found.result, found.rows, found.micro_batches) == ("equal", 8, 2)


def test_a_workload_that_fails_by_itself_is_told_with_its_own_line():
    """It is no failure of the partitions."""

    def failing(made, wanted):
        raise ValueError("no such luck")

    with pytest.raises(UsageError, match=r"Workload.loss failed at .*test_verification.py:\d+.*no such luck"):
        checked(workload(simple, "*", loss=failing))


def test_a_model_without_loss_is_checked_for_its_outputs():
    """There is nothing to train."""
    found = checked(replace(workload(simple, "*"), loss=None, optimizer=None))
    assert (found.result, found.trained) == ("equal", False)


def test_autocast_is_applied_to_both_sides():
    """Values are rounded alike."""
    made = replace(workload(simple, "*"), model=simple, batch=singles, autocast="bfloat16")
    assert checked(made).result == "equal"


def test_the_generators_are_left_as_they_were():
    """Python's, NumPy's and torch's; so are torch's threads."""
    made = workload(Noisy, "*")
    graph = graph_of(made)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), torch.get_num_threads()
    check_model(made, graph)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), torch.get_num_threads()
    assert states[:2] == after[:2]
    assert torch.equal(states[2], after[2])
    assert states[3] == after[3]


def test_turns_end_where_everybody_waits():
    """Two that wait for each other are an error, not a hang; so is one that fails."""
    turns = Turns()
    with pytest.raises(RuntimeError, match="waits for a message"):
        turns.run([lambda: turns.wait_until(lambda: False)] * 2)
    with pytest.raises(ZeroDivisionError):
        turns.run([lambda: turns.wait_until(lambda: False), lambda: 1 / 0])
    assert turns.run([lambda: 1, lambda: 2]) == [1, 2]


def test_a_recompute_that_moves_state_passes():
    """Spectral normalisation and a counter: the recompute sees what the first forward did."""
    assert checked(workload(Spectral, "first", "last")).result == "equal"
    assert checked(workload(History, "*")).result == "equal"


def test_a_loss_over_the_batch_is_compared_as_such():
    """The outputs of the micro-batches are joined before it, on both sides; then rows may be mixed."""

    def contrastive(made, wanted):
        return F.cross_entropy(made @ made.T, torch.arange(len(made)))

    found = checked(replace(workload(simple, "*", loss=contrastive), loss_over="batch"))
    assert (found.result, found.cautions) == ("equal", ())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.filterwarnings("ignore")
def test_a_language_model_of_transformers_passes(kind, monkeypatch):
    """With labels among the inputs, tied weights and dropout; in float32, and without a look at the noise."""
    monkeypatch.setattr("assigner.verification.checking._Check._explained", lambda *_: pytest.fail("above the floor"))
    transformers = pytest.importorskip("transformers")

    def build():
        if kind == "gpt2":
            sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=99, use_cache=False, **sizes))
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=99, **sizes))

    def batch(rows, generator):
        ids = torch.randint(99, (rows, 12), generator=generator)
        return {"input_ids": ids, "labels": ids}, ids

    marks = {
        "gpt2": ("transformer.wte", "transformer.h.*", "lm_head"),
        "bert": ("bert.embeddings", "bert.encoder.layer.*", "cls"),
    }
    made = Workload(
        build, batch, lambda output, _: output.loss, lambda p: torch.optim.AdamW(p, lr=1e-3), 8, marks=marks[kind]
    )
    assert checked(made).result == "equal"


@pytest.mark.parametrize("make", [language, diamond, lambda: workload(normalised, "*"), lambda: language(dropout=0.4)])
def test_a_model_without_room_is_checked_in_its_forwards(make, monkeypatch):
    """One partition at a time; the caution says what is not known then."""
    monkeypatch.setattr("assigner.verification.checking.free_memory", lambda: 0)
    found = checked(make())
    assert (found.result, found.way, found.trained) == ("equal", "pieces", False)
    assert "nothing is known of gradients" in found.cautions[0]


def test_a_broken_forward_is_found_without_room(monkeypatch):
    """The code between modules runs on both sides."""
    monkeypatch.setattr("assigner.verification.checking.free_memory", lambda: 0)
    made = workload(Glued, "parts.*", "last")
    with pytest.raises(MarkingError, match=r"the model's output .* differs by"):
        check_model(made, mutated(partition_graph(made), "parts.1", other_constant))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_difference_is_told_with_its_scale(dtype):
    """Also beside infinities and what is no number; where only one side has these it is infinite."""
    one = torch.tensor([1.0, -8.0, 2.0], dtype=dtype)
    two = torch.tensor([1.0, -8.0, 4.0], dtype=dtype)
    odd = torch.tensor([math.inf, math.nan], dtype=dtype)
    moment, item = Moment("step"), Item("gradient", "a", "a.weight")
    assert difference(moment, item, one, one.clone()) is None
    assert difference(moment, item, None, None) is None
    assert difference(moment, item, odd, odd.clone()) is None
    for left, right in ((one, two), (torch.cat([one, odd]), torch.cat([two, odd]))):
        found = difference(moment, item, left, right)
        assert (found.largest, found.scale, found.counts(), found.counts(1.0)) == (2.0, 8.0, True, False)
    assert difference(moment, item, one, None).largest == 8.0
    assert difference(moment, item, one, one[:2]).largest == math.inf
    assert difference(moment, item, one, torch.tensor([1.0, math.nan, 2.0], dtype=dtype)).largest == math.inf
    assert difference(moment, item, one.long(), two.long() + 1).largest == math.inf
    assert str(item) == "the gradient of a.weight"


@pytest.mark.parametrize("value", [1e-3, math.nan, math.inf])
def test_a_difference_is_found_wherever_it_lies(value):
    """Tensors are compared in parts; the last part is a short one."""
    one = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0)).T
    moment, item = Moment("step"), Item("gradient", "a", "a.weight")
    for row, column in ((0, 0), (40_000, 1), (70_000, 2)):
        two = one.clone()
        two[row, column] += value
        found = difference(moment, item, one, two)
        expected = float((one - two).abs().amax()) if math.isfinite(value) else math.inf
        assert (found.largest, found.counts()) == (expected, True)


def test_gradients_that_differ_by_rounding_are_applied_as_equal_ones():
    """AdamW would make two learning rates of 1e-12 beside -1e-12; what differs by more stays as it is."""

    class Held:
        def __init__(self, *values):
            self.values = torch.tensor(values)

        def look(self, _):
            return self.values

    item = Item("gradient", "a", "a.weight")
    for tiny, same in ((-1e-12, True), (-1e-3, False)):
        plain, other = Held(1.0, 1e-12), Held(1.0, tiny)
        found = difference(Moment("step"), item, plain.values, other.values)
        assert isinstance(found, Difference)
        align(plain, other, [found])
        assert torch.equal(plain.values, other.values) == same


def test_a_train_of_a_modules_own_is_called_as_a_script_does():
    """A BatchNorm that it keeps in eval mode is in eval mode on both sides."""

    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(mode and not self.track_running_stats)

    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Frozen(WIDTH), nn.Linear(WIDTH, 1)), "*")
    assert checked(made).result == "equal"


def test_micro_batches_that_take_two_paths_are_kept_apart():
    """Three rows run through another graph than two; in eval mode a worker may be a graph ahead of the next one."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.last = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 1)

        def forward(self, x):
            x = self.parts[0](x)
            x = x * 2 if x.shape[0] > 2 else x - 1
            return self.last(self.parts[1](x))

    assert checked(workload(Branching, "parts.*", "last")).result == "equal"
