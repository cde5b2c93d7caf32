"""The check of a cut model against the plain one: what it lets pass, and what it finds."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from foreign import written
from torch import nn
from workloads import WIDTH, diamond, graph_of, language, normalised, skips, towers, workload
from wrong_models import WRONG, History, Noisy, Spectral, simple

from assigner.errors import MarkingError, UsageError
from assigner.model.marking import partition_graph
from assigner.model.workload import Workload
from assigner.verification.checking import check_model


def checked(made):
    return check_model(made, graph_of(made))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [language, skips, towers, diamond, lambda: workload(normalised, "*"), lambda: language(dropout=0.4)]
)
def test_a_sound_model_passes(make):
    """Tied weights, skips, several inputs, BatchNorm, dropout: equal, without a caution."""
    made = make()
    found = check_model(made, graph_of(made))
    assert (found.result, found.way, found.rows, found.micro_batches) == ("equal", "whole", 7, 3)
    assert found.partitions == len(graph_of(made).pieces)
    assert found.cautions == ()


def test_an_optimizer_that_needs_a_closure():
    """LBFGS cannot run on partitions apart: they are compared with plain descent, and it is said where it trains."""
    found = checked(replace(skips(), optimizer=torch.optim.LBFGS))
    assert (found.result, found.trained) == ("equal", True)
    assert [text.startswith("LBFGS.step needs a closure") for text in found.cautions] == [True]
    assert "solve --max-workers 1" in found.cautions[0]


@pytest.mark.slow
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


@pytest.mark.long
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


@pytest.mark.long
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


class ByName(Noisy):
    """Calls the forwards of its marked modules by that name."""

    def forward(self, x):
        return self.last.forward(self.first.forward(x))


def test_forwards_that_are_called_by_name_are_compared(monkeypatch):
    """The plain model's draws are those of its modules there, too, and without room they have their weights."""
    found = checked(workload(ByName, "*"))
    assert found.result == "equal"
    assert "draw from Python's or NumPy's generator" in found.cautions[0]
    monkeypatch.setattr("assigner.verification.checking.free_memory", lambda: 0)
    monkeypatch.setattr(random, "random", lambda: 0.5)
    assert checked(workload(ByName, "*")).result == "equal"


@pytest.mark.long
def test_a_model_that_differs_from_itself_cannot_be_compared():
    """Nothing is refused for that, and nothing is claimed."""

    class Restless(nn.Linear):
        def forward(self, x):
            return super().forward(x) + time.perf_counter()

    made = workload(lambda: nn.Sequential(Restless(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "*")
    found = checked(made)
    assert found.result == "uncertain"
    assert "differs from itself in two equal runs" in found.cautions[0]


class Balanced(nn.Linear):
    """Adds in training what balances its activations over all rows, as a mixture of experts does."""

    def forward(self, x):
        made = F.dropout(super().forward(x), 0.3, self.training)
        return made + made.sigmoid().mean(0).square().sum() if self.training else made


class ByNorm(torch.autograd.Function):
    """Hands on a gradient of norm 1."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, gradient):
        return gradient / gradient.norm()


class Normed(nn.Linear):
    """As that Function has it."""

    def forward(self, x):
        return ByNorm.apply(super().forward(x))


class Words(nn.Module):
    """An embedding whose gradient is divided by how often a word stands in what it is given."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, WIDTH, scale_grad_by_freq=True)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.words(x.abs().long().clamp(max=4)).mean(1))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: nn.Sequential(Balanced(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "the loss of a batch, "),
        (
            lambda: nn.Sequential(Normed(WIDTH, WIDTH), nn.Linear(WIDTH, 1)),
            "the gradient of 0.weight over a batch is off",
        ),
        (Words, "the gradient of words.weight over a batch is off"),
    ],
)
def test_rows_that_are_mixed_in_training_alone_are_told(model, said):
    """Under `self.training`, beside dropout, or in a backward: a loss in eval mode knows nothing of it."""
    found = checked(workload(model, "*"))
    assert found.result == "equal"
    assert [text.startswith(said) for text in found.cautions] == [True]
    assert [" mixes rows" in text for text in found.per_micro_batch] == [True]


class ActNorm(nn.Module):
    """Glow's: shift and scale are those of the first rows that it sees."""

    def __init__(self):
        super().__init__()
        self.shift, self.is_new = nn.Parameter(torch.zeros(WIDTH)), True
        self.register_buffer("scale", None)

    def forward(self, x):
        if self.is_new:
            self.shift.data.copy_(-x.mean(0))
            self.scale, self.is_new = 1 / x.detach().std(0), False
        return (x + self.shift) * self.scale


class Late(nn.Module):
    """Takes its shift from its first rows, but returns them without."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("is_new", torch.tensor(True))

    def forward(self, x):
        shift = self.shift.clone()
        if self.is_new:
            with torch.no_grad():
                self.shift.copy_(x.mean(0))
                self.is_new.fill_(False)
        return x - shift


@pytest.mark.parametrize("first", [ActNorm, pytest.param(Late, marks=pytest.mark.long)])
def test_initial_values_from_the_first_micro_batch_are_told(first):
    """Both sides of the comparison begin as the model was built; after a step they would have them already."""
    found = checked(workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), first(), nn.Linear(WIDTH, 1)), "*"))
    assert found.result == "equal"
    assert [text.startswith("the loss of the first batch is not that of") for text in found.cautions] == [True]
    assert found.per_micro_batch == ("the model initialises itself from what it sees first",)


@pytest.mark.long
def test_a_loss_that_reads_the_model_built_last_initialises_nothing():
    """It is no difference between a batch and its micro-batches that it reads another model than the first."""
    built = []

    def model():
        built.append(simple())
        return built[-1]

    def loss(made, wanted):
        return F.mse_loss(made, wanted) + sum(each.square().sum() for each in built[-1].parameters())

    assert checked(workload(model, "*", loss=loss)).per_micro_batch == ()


class Packed(nn.Module):
    """A recurrence over rows of unlike lengths; without `total_length` as long as the longest row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Recurrences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packed() for _ in range(2))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, lengths)
        return x


def falling(rows: int, generator: torch.Generator) -> Any:
    """The longest row of the batch fills it; the last micro-batch has none as long."""
    lengths = 9 - torch.arange(rows).clamp(max=7)
    return (torch.randn(rows, 9, WIDTH, generator=generator, dtype=torch.float64), lengths), None


def test_a_size_by_lengths_is_told_with_a_way_out():
    """Another worker works out how large a value is from the inputs' sizes."""
    with pytest.raises(MarkingError, match="it hangs on values, as the longest of some lengths") as caught:
        checked(workload(Recurrences, "layers.*", batch=falling, loss=lambda made, _: made.square().mean()))
    assert "total_length=" in (caught.value.hint or "")


class Attention(nn.Module):
    """Softmax knows nothing of a shift: the gradient of the keys' bias is rounding, another for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.keys, self.last = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        scores = torch.softmax(self.keys(x.unsqueeze(-1)).sum(-1), -1)
        return self.last((scores * x).sum(1, keepdim=True).expand(-1, WIDTH))


class Island(nn.Linear):
    """Computes in a narrower type than the model's own."""

    def forward(self, x):
        return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype) + self.bias


@pytest.mark.long
@pytest.mark.parametrize("model", [Attention, lambda: nn.Sequential(Island(WIDTH, WIDTH), nn.Linear(WIDTH, 1))])
def test_rounding_mixes_no_rows(model):
    """Gradients that cancel, and those of a type that rounds more, are not the same for parts of a batch."""

    def loss(made, wanted):
        return 1e6 * F.mse_loss(made, wanted)

    made = workload(model, "*", loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-9))
    assert checked(made).cautions == ()


def test_a_loss_that_mixes_rows_is_told_once():
    """Micro-batches change such a loss, whatever runs them."""

    def contrastive(made, wanted):
        return F.cross_entropy(made @ made.T, torch.arange(len(made)))

    found = checked(workload(simple, "*", loss=contrastive))
    assert found.result == "equal"
    (said,) = found.cautions
    assert "the loss or the model mixes rows" in said


def test_a_model_that_mixes_rows_under_a_loss_over_the_batch_is_told_no_way_that_it_has():
    """The loss sees all rows there."""

    class Centred(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            return made - made.mean(0)

    made = workload(lambda: nn.Sequential(Centred(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), "*")
    (said,) = checked(replace(made, loss_over="batch")).cautions
    assert "the model mixes rows" in said
    assert "loss_over" not in said


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.slow
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
    assert (found.result, found.rows, found.micro_batches) == ("equal", 7, 1)
    (said,) = found.cautions
    assert said.startswith(f"the forward writes to {name}, ")


@pytest.mark.long
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


@pytest.mark.long
def test_a_loss_that_mixes_rows_a_little_is_told_under_autocast_too():
    """Mean over unlike weights; the rounding of bfloat16 is larger than what that makes."""
    weights = torch.tensor([1.0, 2.0, 0.5, 1.5])

    def build():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))

    def batch(rows, generator):
        return torch.randn(rows, WIDTH, generator=generator), torch.randint(4, (rows,), generator=generator)

    given = Workload(
        build,
        batch,
        nn.CrossEntropyLoss(weight=weights),
        lambda p: torch.optim.SGD(p, lr=0.1),
        8,
        autocast="bfloat16",
        marks=("*",),
    )
    assert "Workload.weight" in checked(given).cautions[0]
    assert not checked(replace(given, weight=lambda _, wanted: weights[wanted].sum())).cautions


def test_a_loss_that_mixes_rows_is_told_beside_a_clamped_scale():
    """The comparison in one micro-batch does not hide what micro-batches change."""

    def contrastive(made, wanted):
        return F.cross_entropy(made @ made.T, torch.arange(len(made)))

    found = checked(workload(written.ClampedScale, "first", "second", "last", loss=contrastive))
    assert found.result == "equal"
    assert "the loss or the model mixes rows" in found.cautions[1]


@pytest.mark.long
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


def test_a_loss_of_several_numbers_is_told_as_that():
    """In the words of training, and not in those of its backward."""
    with pytest.raises(UsageError, match=r"Workload.loss gave a tensor of shape \(\d+, \d+\)") as caught:
        checked(workload(simple, "*", loss=lambda made, wanted: (made - wanted).square()))
    assert "the mean over the rows" in caught.value.hint


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


def test_what_an_optimizer_draws_is_put_back():
    """One that adds noise in its step leaves torch's generator as it was."""

    class Drawing(torch.optim.SGD):
        def step(self, closure=None):
            torch.rand(1)
            return super().step(closure)

    state = torch.get_rng_state()
    checked(replace(workload(simple, "*"), optimizer=lambda parameters: Drawing(parameters, lr=0.1)))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.long
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
@pytest.mark.slow
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("make", [language, diamond, lambda: workload(normalised, "*"), lambda: language(dropout=0.4)])
def test_a_model_without_room_is_checked_in_its_forwards(make, monkeypatch):
    """One partition at a time; the caution says what is not known then."""
    monkeypatch.setattr("assigner.verification.checking.free_memory", lambda: 0)
    found = checked(make())
    assert (found.result, found.way, found.trained) == ("equal", "pieces", False)
    assert "nothing is known of gradients" in found.cautions[0]


@pytest.mark.long
def test_a_train_of_a_modules_own_is_called_as_a_script_does():
    """A BatchNorm that it keeps in eval mode is in eval mode on both sides."""

    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(mode and not self.track_running_stats)

    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Frozen(WIDTH), nn.Linear(WIDTH, 1)), "*")
    assert checked(made).result == "equal"


@pytest.mark.long
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


class _EvalAlone(nn.Module):
    """Evaluations use a drawn parameter that training does not; `in_front`: statistics of the last partition, too."""

    def __init__(self, *, in_front: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.in_front, self.scale = in_front, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        if not self.training and self.in_front:
            x = x + self.last.running_mean
        x = self.first(x)
        return self.last(x if self.training else x * self.scale).mean(1, keepdim=True)


def test_evaluations_that_read_what_others_hold():
    """What training does not use has its drawn values wherever it is read; what a later partition holds has not."""
    alone, in_front = (
        workload(lambda where=each: _EvalAlone(in_front=where), "first", "last") for each in (False, True)
    )
    found = check_model(alone, partition_graph(alone))
    assert found.result == "equal"
    assert not any("cannot be evaluated" in each for each in found.cautions)
    found = check_model(in_front, partition_graph(in_front))
    assert any("cannot be evaluated: on workers of their own, partition 'first'" in each for each in found.cautions)
