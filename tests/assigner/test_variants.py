"""Batches that the plan's own graph does not hold for: another one is captured, once, around the same weights."""

from __future__ import annotations

import random
import re
from collections import UserDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from cutting import of
from drawn_orders import with_drawn_order
from sweeps import sweep
from torch import nn
from torch.utils import _pytree as pytree
from workloads import WIDTH, Reference, graph_of, language, make_plan, numbers, pipeline_of, workload

from assigner import Pipeline
from assigner.errors import MarkingError, UsageError
from assigner.model.marking import partition_graph
from assigner.model.marking.domain import input_key
from assigner.model.workload import call_arguments
from assigner.runtime.batch import variants

EXACT = 1e-10


def admits(graph: Any, inputs: Any) -> bool:
    leaves, structure = pytree.tree_flatten(call_arguments(inputs))
    return graph.domain.admits(input_key(structure, leaves))


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (ids(2, 6), True), (ids(9, 2), True), (ids(9, 7), False), (ids(1, 5), False), (ids(3, 1), False),
        (ids(3, 5).int(), False), (ids(3, 5)[:, None], False), ({"ids": ids(3, 5)}, False),
        (torch.zeros(5, 3, dtype=torch.long).t(), True),
    ],
    ids=["shortest", "short", "more than positions", "one row", "one token", "dtype", "dims", "keyword", "transposed"],
)  # fmt: skip
def test_what_a_capture_holds_for(inputs, expected):
    """Any rows and lengths from 2 on up to the number of positions, of the type and in the structure captured."""
    assert admits(graph_of(language()), inputs) is expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "rows"),
    [
        (lambda s, x: s.c(s.b(s.a(x) * 2 if x.shape[0] > 3 else s.a(x))), {4, 6, 8}),
        (lambda s, x: s.c(s.b(s.a(x).view(-1, 2, WIDTH).flatten(0, 1) + (0 if x.shape[0] % 2 else 1))), {4, 6, 8}),
        (lambda s, x: s.c(s.b(s.a(x)) + torch.ones(4, x.shape[0]).double().mean(0)[:, None]), {2, 3, 4, 6, 8}),
    ],
    ids=["a range", "divisible", "any"],
)
def test_decisions_on_sizes(forward, rows):
    """A size that decides what runs holds where the decision is the same."""
    graph = partition_graph(of(forward))
    found = {n for n in (1, 2, 3, 4, 6, 8) if admits(graph, torch.zeros(n, WIDTH, dtype=torch.float64))}
    assert found == rows


class Choosy(nn.Module):
    """Its glue depends on rows, on the width of a second input, on plain values and on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None, *, scale: float = 1.0, n: int = 2) -> Any:
        y = self.a(x)
        y = y * 3 if x.shape[0] > 3 else y - 1
        if more is not None:
            y = y + (more.sum(1, keepdim=True) if more.shape[1] > 2 else more.mean(1, keepdim=True))
        for _ in range(n):
            y = torch.tanh(self.norm(self.b(y))) * scale
        return self.c(F.dropout(y, 0.5, training=self.training) if n > 4 else y)


def choosy(rows: int, generator: torch.Generator) -> Any:
    x, y = numbers(rows, generator)
    return {"x": x, "more": x[:, :3], "scale": 0.5, "n": 2}, y


def in_two(reference: Reference, batch: Any) -> float:
    """A step of the plain model that sees the rows in two parts, as its forward depends on how many there are."""
    (inputs, targets), rows = batch, len(batch[1])
    reference.optimizer.zero_grad()
    size, loss = -(-rows // 2), 0.0
    for part in (slice(0, size), slice(size, rows)):
        cut = {name: each[part] if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}
        share = reference.loss((cut, targets[part])) * len(targets[part]) / rows
        share.backward()
        loss += share.item()
    reference.optimizer.step()
    return loss


@pytest.mark.long
def test_each_path_is_captured_once():
    """Rows, widths, plain values and structures that lead elsewhere are exact, and captured once each."""
    made = workload(Choosy, "a", "b", "c", batch=choosy)
    reference = Reference(made)
    changes: list[dict[str, Any]] = [{}, {"width": 2}, {"scale": 0.25}, {"n": 1}, {"more": None}]
    with Pipeline(made, make_plan(made, micro_batches=2), graph=graph_of(made)) as pipeline:
        counts = []
        for n, change in enumerate(2 * changes):
            inputs, targets = made.make_batch((8, 5, 6)[n % 3], n % 3)
            width = change.get("width", 3)
            batch = {**inputs, "more": inputs["x"][:, :width], **change}, targets
            batch[0].pop("width", None)
            assert pipeline.step(batch) == pytest.approx(in_two(reference, batch), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
            counts.append(len(pipeline.graph.recuts[True]))
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert counts[-1] < 2 * len(changes)
        pipeline.step(batch)
        assert len(pipeline.graph.recuts[True]) == counts[-1]


@pytest.mark.long
def test_one_set_of_weights():
    """A graph that was captured again runs the same modules with the same parameters."""
    made = workload(Choosy, "a", "b", "c", batch=choosy)
    with Pipeline(made, make_plan(made, micro_batches=2), graph=partition_graph(made)) as pipeline:
        pipeline.step(made.make_batch(5, 0))
        first, *others = pipeline._installed.training.variants._made[True]
        assert others
        for name, module in others[0].modules.items():
            assert module.get_submodule(name) is first.modules[name].get_submodule(name)
            assert {id(each) for each in module.parameters()} <= {id(each) for each in first.modules[name].parameters()}


@pytest.mark.long
def test_dropout_masks_do_not_depend_on_the_graphs():
    """The micro-batches of a step keep their numbers, though some of them run through another graph."""
    made = language(dropout=0.4)
    graph = graph_of(made)
    losses = []
    for always in (False, True):
        with Pipeline(made, make_plan(made), graph=graph, remat="always" if always else "never") as pipeline:
            losses.append([pipeline.step(made.make_batch(rows, rows)) for rows in (5, 8)])
    assert losses[0] == losses[1]


@pytest.mark.long
def test_running_statistics_across_graphs():
    """BatchNorm's running values move once a step, by the whole batch, though it ran through two graphs."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Rows(), nn.Linear(WIDTH, 1))

    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :, None].squeeze(2) if x.shape[0] > 2 else x[:, None].squeeze(1)

    made = workload(build)
    with Pipeline(made, make_plan(made, micro_batches=2), graph=graph_of(made)) as pipeline:
        x, _ = batch = made.make_batch(5, 0)
        torch.manual_seed(made.seed)
        plain = made.model()
        plain(x)
        pipeline.step(batch)
        assert not pipeline._installed.training.as_planned
        state = pipeline.state_dict()
        assert state["1.num_batches_tracked"] == 1
        torch.testing.assert_close(state["1.running_mean"], plain[1].running_mean, rtol=0, atol=EXACT)
        torch.testing.assert_close(state["1.running_var"], plain[1].running_var, rtol=0, atol=EXACT)


class Moving(nn.Module):
    """Its second half reads a weight of the first part, but for few rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.odd = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y if x.shape[0] > 2 else self.odd(y))


def test_weights_that_the_plan_has_nowhere():
    """A batch for which a partition needs what it does not hold is refused, with the shapes and a way out."""
    made = workload(Moving, "a", "b")
    pipeline = Pipeline(made, make_plan(made, micro_batches=1), graph=graph_of(made))
    with pytest.raises(MarkingError, match=r"for inputs float64\[2, 8\]: partition '.' needs 'odd'") as caught:
        pipeline.step(made.make_batch(2, 0))
    assert caught.value.hint


@pytest.mark.long
def test_strange_inputs():
    """An input that is neither tensor nor plain value is refused in words."""
    made = workload(Choosy, "a", "b", "c", batch=choosy)
    pipeline = Pipeline(made, make_plan(made), graph=graph_of(made))
    inputs, targets = made.make_batch(8, 0)
    with pytest.raises(UsageError, match="inputs hold a set"):
        pipeline.step(({**inputs, "n": {2}}, targets))


@pytest.mark.long
def test_a_mapping_of_another_class_is_given_to_the_model_as_keywords():
    """As a tokenizer's; one deeper in the inputs, and a number of NumPy's, would not be what the model was given."""

    def mapped(rows, generator):
        inputs, targets = choosy(rows, generator)
        return UserDict(inputs), targets

    made = workload(Choosy, "a", "b", "c", batch=mapped)
    inputs, targets = choosy(8, torch.Generator())
    with pipeline_of(made, make_plan(made)) as pipeline:
        assert pipeline.evaluate((UserDict(inputs), targets)) == pipeline.evaluate((inputs, targets))
        assert torch.equal(pipeline.forward(UserDict(inputs)), pipeline.forward(inputs))
        for strange, words, hint in (
            ((UserDict(inputs),), "in a UserDict, into which nobody looks", "dict(x)"),
            ({**inputs, "n": np.int64(2)}, "have a NumPy int64 among them", "int(x)"),
        ):
            with pytest.raises(UsageError, match=words) as caught:
                pipeline.step((strange, targets))
            assert hint in caught.value.hint


class Picking(nn.Module):
    """A batch says which head is its own."""

    def __init__(self):
        super().__init__()
        self.each = nn.ModuleDict({"one": nn.Linear(WIDTH, 1), "other": nn.Linear(WIDTH, 1)})

    def forward(self, x, task):
        return self.each[task](x)


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(WIDTH, WIDTH), Picking()

    def forward(self, x, task):
        return self.heads(self.body(x), task)


class Unpicked(Tasks):
    """Picks itself."""

    def forward(self, x, task):
        return self.heads.each[task](self.body(x))


def tasks(rows, generator):
    x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
    return {"x": x, "task": "one"}, x[:, :1].sin()


@pytest.mark.long
def test_a_batch_picks_a_head():
    """One module with all heads may; of heads that are partitions, or lie in none, one is nowhere: a hint names it."""
    made = workload(Tasks, "body", "heads", batch=tasks)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        for n, task in enumerate(("one", "other", "one")):
            inputs, targets = made.make_batch(8, n)
            batch = {**inputs, "task": task}, targets
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=1e-10)
    made = workload(Unpicked, "body", batch=tasks)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        with pytest.raises(UsageError, match=r"needs 'heads\.each\.other\.") as caught:
            pipeline.step(({**inputs, "task": "other"}, targets))
        assert "picks among the heads in its nn.ModuleDict" in caught.value.hint
    with pytest.raises(MarkingError, match="never calls it") as caught:
        partition_graph(workload(Unpicked, "body", "heads.each.*", batch=tasks))
    assert "one module that holds them all and picks" in caught.value.hint


@pytest.mark.long
def test_inputs_of_another_kind():
    """Inputs that the model cannot take are shown beside the workload's own, in one line, with what is wrong."""
    made = language()
    pipeline = Pipeline(made, make_plan(made), graph=graph_of(made))
    batch, targets = made.make_batch(8, 0)
    own = r": .+; the workload's own are \(int64\[4, 5\]\)"
    with pytest.raises(UsageError, match=r"cannot take inputs \(float32\[2, 5\]\)" + own):
        pipeline.step((batch.float(), targets))
    with pytest.raises(UsageError, match=r"cannot take inputs \(tokens=int64\[2, 5\]\)" + own):
        pipeline.step(({"tokens": batch}, targets))
    with pytest.raises(UsageError, match=r"cannot take inputs \(int64\[2, 5, 1\]\)" + own):
        pipeline.forward(batch[..., None])
    with pytest.raises(MarkingError, match=r"for inputs int64\[2, 9\]: .* cannot be traced"):  # more than its positions
        pipeline.step((torch.zeros(8, 9, dtype=torch.long), torch.zeros(8, 9, dtype=torch.long)))
    for call in (pipeline.step, pipeline.evaluate):
        with pytest.raises(UsageError, match=r"a pair \(inputs, targets\), and int64\[8, 5\] was given"):
            call(batch)
    assert pipeline.step((batch, targets)) > 0


class Remembering(nn.Module):
    """A recurrent layer of torch between two others, rows first."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.a, self.memory = nn.Linear(WIDTH, WIDTH), kind(WIDTH, 5, batch_first=True, **settings)
        self.b = nn.Linear(10 if self.memory.bidirectional else self.memory.proj_size or 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, ends = self.memory(self.a(x))
        last = ends[0] if isinstance(ends, tuple) else ends
        return self.b(made) + last.mean()


def sequences(rows: int, generator: torch.Generator, length: int = 6) -> Any:
    x = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.mean(-1, keepdim=True)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [(nn.LSTM, {"num_layers": 2}), (nn.LSTM, {"bidirectional": True}), (nn.LSTM, {"proj_size": 3}), (nn.GRU, {}),
     (nn.RNN, {"nonlinearity": "relu"})],
)  # fmt: skip
def test_sequences_of_any_length_take_one_graph(kind, settings):
    """A recurrent layer's graph holds for all lengths from 2 on, and computes what the plain model computes."""
    made = workload(lambda: Remembering(kind, **settings), "a", "memory", "b", batch=sequences)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        for length in (6, 9, 2, 3, 17):
            batch = sequences(8, torch.Generator().manual_seed(length), length)
            assert pipeline.evaluate(batch) == pytest.approx(reference.loss(batch).item(), abs=EXACT)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert reference.distance(pipeline.named_parameters()) < EXACT
        variants = pipeline._installed.training.variants
        assert [len(variants._made[training]) for training in (True, False)] == [1, 1]


class KeepsMask(nn.Module):
    """Asks for `len(x)`, and keeps a mask of that size, as pytorch/examples' language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = torch.tril(torch.ones(len(x), len(x))).double()
        return self.b(torch.einsum("ij,jbw->ibw", self.mask, self.a(x)))


def by_time(rows: int, generator: torch.Generator, length: int = 6) -> Any:
    x, y = sequences(rows, generator, length)
    return x.transpose(0, 1).contiguous(), y.transpose(0, 1).contiguous()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_a_mask_of_the_length_takes_one_graph():
    """`len` of a tensor is as good as its shape, and what is kept of a shape follows it; `len` is as before then."""
    made = workload(KeepsMask, "a", "b", batch=by_time)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        for length in (6, 9, 2, 3, 9):
            batch = by_time(8, torch.Generator().manual_seed(length), length)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
        assert len(pipeline._installed.training.variants._made[True]) == 1
    assert "len" not in globals()


@pytest.mark.long
def test_the_graphs_that_were_used_last_are_kept(monkeypatch):
    """One that batches go on using stays, however long ago it was captured."""
    monkeypatch.setattr("assigner.runtime.batch.variants._MOST_VARIANTS", 3)
    made = replace(workload(Choosy, "a", "b", "c", batch=choosy), name="lasting")
    with Pipeline(made, make_plan(made, micro_batches=1), graph=partition_graph(made)) as pipeline:
        variants = pipeline._installed.training.variants
        inputs, targets = made.make_batch(8, 0)
        held = []
        for scale in (0.1, 0.2, 0.1, 0.3, 0.1, 0.4, 0.1):
            pipeline.step(({**inputs, "scale": scale}, targets))
            held.append(variants._made[True][-1])
        assert len({id(each) for each in held[::2]}) == 1


def test_a_number_that_goes_on_changing_is_told_of(monkeypatch):
    """Once, with the way out: as a tensor it has one graph, and computes the same."""
    monkeypatch.setattr("assigner.runtime.batch.variants._MANY", 3)
    made = replace(workload(Choosy, "a", "b", "c", batch=choosy), name="annealed")
    inputs, targets = made.make_batch(8, 0)
    with Pipeline(made, make_plan(made, micro_batches=1), graph=partition_graph(made)) as pipeline:
        pipeline.evaluate(({**inputs, "scale": 0.25}, targets))
        with pytest.warns(UserWarning, match="a plain number that has had 3 values so far") as told:
            numbers = [float(pipeline.evaluate(({**inputs, "scale": each}, targets))) for each in (0.5, 0.75, 0.875)]
        assert len(told) == 1
        scales = torch.tensor([0.5, 0.75, 0.875])
        assert [float(pipeline.evaluate(({**inputs, "scale": each}, targets))) for each in scales] == numbers


@pytest.mark.long
def test_few_keys_and_graphs_are_kept(monkeypatch):
    """Shapes without end do not fill the memory: the oldest graphs go."""
    monkeypatch.setattr("assigner.runtime.batch.variants._MOST_VARIANTS", 2)
    monkeypatch.setattr("assigner.model.marking.cut._MOST_RECUTS", 2)
    made = replace(workload(Choosy, "a", "b", "c", batch=choosy), name="kept")
    reference = Reference(made)
    with Pipeline(made, make_plan(made, micro_batches=1), graph=partition_graph(made)) as pipeline:
        for scale in (0.5, 0.1, 0.2, 0.3, 0.1):
            inputs, targets = made.make_batch(8, 0)
            batch = {**inputs, "scale": scale}, targets
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            assert len(pipeline._installed.training.variants._made[True]) <= 2
            assert len(pipeline.graph.recuts[True]) <= 2
        assert pipeline._installed.training.variants._made[True][0].is_planned


class Scaled(nn.Module):
    """A plain number for each row decides what the glue holds: micro-batches of one batch run through several graphs.

    The last partition gives the loss, or what the loss is made of.
    """

    def __init__(self, *, loss_inside: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.loss_inside = loss_inside

    def forward(self, x: torch.Tensor, y: torch.Tensor, scales: list[int]) -> torch.Tensor:
        hidden = torch.tanh(self.a(x)) * torch.tensor(scales, dtype=x.dtype)[:, None]
        made = self.c(torch.tanh(self.b(hidden)))
        return F.mse_loss(made, y) if self.loss_inside else made - y


def scaled(rows: int, generator: torch.Generator) -> Any:
    x, y = numbers(rows, generator)
    return {"x": x, "y": y, "scales": [1 + 2 * n // rows for n in range(rows)]}, None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("remat", sweep(["never", "except_last", "always"], quick=["always"]))
@pytest.mark.parametrize("loss_inside", [False, True])
@pytest.mark.parametrize("remembers", [False, True], ids=["pure", "counting"])
@pytest.mark.parametrize("stages", [[["a", "b", "c"]], [["a"], ["b"], ["c"]]], ids=["one stage", "three"])
def test_several_graphs_in_one_batch(stages, remembers, loss_inside, remat):
    """Whatever is recomputed: a micro-batch behind those of another graph has its own loss's gradients.

    A loss that keeps something from call to call is computed ahead of the recomputes in every step, another one once.
    """

    def loss(output: torch.Tensor, _: None) -> torch.Tensor:
        if remembers:
            seen.append(output.requires_grad)
        return output if loss_inside else output.square().mean() * (1 + output.detach().abs().mean())

    seen: list[bool] = []
    made = workload(lambda: Scaled(loss_inside=loss_inside), "a", "b", "c", batch=scaled, loss=loss)
    plan = make_plan(made, [(0, names) for names in stages], micro_batches=4)
    reference = Reference(made)
    with pipeline_of(made, plan, remat=remat) as pipeline:
        for n in range(3):
            inputs, _ = made.make_batch(8, n)
            pipeline.step((inputs, None))
            reference.optimizer.zero_grad()
            for k in range(0, 8, 2):
                part = {name: each[k : k + 2] for name, each in inputs.items()}
                (reference.loss((part, None)) / 4).backward()
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
            reference.optimizer.step()
        assert reference.distance(pipeline.named_parameters()) < EXACT


class Beside(nn.Module):
    """A part at the front, and one in the middle, that batches may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.body, self.side, self.head = (nn.Linear(WIDTH, each) for each in (WIDTH, WIDTH, WIDTH, 1))

    def forward(self, x: torch.Tensor, e: torch.Tensor | None = None, f: torch.Tensor | None = None) -> torch.Tensor:
        y = self.body(x if f is None else x + self.front(f).tanh()).tanh()
        return self.head(y if e is None else y + self.side(e))


def three(rows: int, generator: torch.Generator) -> Any:
    """All of the inputs."""
    x, e, f = torch.randn(3, rows, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "e": e, "f": f}, x.sum(1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("left", ["xf", "xe", "x"])
def test_listed_orders_lose_the_stages_that_a_batch_leaves_out(left, seed):
    """The other stages keep their order, under numbers of their own."""
    made = workload(Beside, "front", "body", "side", "head", batch=three)
    graph, reference = graph_of(made), Reference(made)
    apart = make_plan(made, [(0, [piece.name]) for piece in graph.pieces], micro_batches=2, remat=["body"])
    plan = with_drawn_order(apart, graph.edges, random.Random(seed), halves=True)
    with pipeline_of(made, plan) as pipeline:
        for n in range(3):
            inputs, targets = made.make_batch(8, n)
            batch = {key: each for key, each in inputs.items() if n == 1 or key in left}, targets
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), rel=1e-10)
            assert pipeline.evaluate(batch) == pytest.approx(reference.loss(batch).item(), rel=1e-10)


@pytest.mark.parametrize(("hint", "words"), [(None, "profile again"), ("mark it", "profile again; .*: mark it")])
def test_what_a_model_cannot_take_is_said_with_the_way_out_that_there_is(hint, words):
    """A refusal may have none of its own."""
    example = graph_of(language()).domain.example
    leaves, structure = pytree.tree_flatten(call_arguments({"ids": ids(3, 5)}))
    given = input_key(structure, leaves)
    with pytest.raises(UsageError) as caught:
        variants._check_inputs(given, example, MarkingError("no", hint=hint))
    assert re.fullmatch(f".*{words}", caught.value.hint)
