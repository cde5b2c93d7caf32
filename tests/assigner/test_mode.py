"""Training and eval mode are those that the model's own `train()` and `eval()` leave, whatever they do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kept import kept
from torch import nn
from workloads import WIDTH, Reference, graph_of, make_plan, pipeline_of, workload

from assigner.errors import UsageError
from assigner.model.deferred import DeferredModel
from assigner.model.deferred.modes import left_in_eval
from assigner.verification.checking import check_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner import Workload

EXACT = 1e-10


class Block(nn.Module):
    """A layer with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.inner(x)))


class FrozenBlock(Block):
    """Its BatchNorm never trains."""

    def train(self, mode: bool = True) -> FrozenBlock:
        super().train(mode)
        self.norm.eval()
        return self


class AlwaysTraining(Block):
    """Its BatchNorm always does."""

    def eval(self) -> AlwaysTraining:
        return self

    def train(self, mode: bool = True) -> AlwaysTraining:
        super().train(mode)
        self.norm.train()
        return self


class Adapted(nn.Linear):
    """A low-rank addition that is merged into the weight in eval mode."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.low = nn.Parameter(torch.randn(WIDTH, 1) / 3)
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode == self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * self.low @ self.low.T
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        return made if self.merged else made + x @ self.low @ self.low.T


class LookedUp(nn.Linear):
    """What its `train` makes of its weight for all evaluations, and takes back (LeViT)."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    @torch.no_grad()
    def train(self, mode: bool = True) -> LookedUp:
        super().train(mode)
        if mode and hasattr(self, "table"):
            del self.table
        else:
            self.table = self.weight.flip(0)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.flip(0) if self.training else self.table)


class FrozenByRoot(nn.Module):
    """The root keeps a partition's BatchNorm in eval mode, and builds it in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def train(self, mode: bool = True) -> FrozenByRoot:
        super().train(mode)
        self.blocks[0].norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PartlyFrozen(nn.Module):
    """A `train` of its own, which does nothing to the part that its builder leaves in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), FrozenBlock()]), nn.Linear(WIDTH, 1)

    def train(self, mode: bool = True) -> PartlyFrozen:
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)))


def flags_of(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_parts_left_in_eval_mode_stay_so():
    """What a root's own `train` does not ask for, it does not do; what its parts' do, they do."""

    def build() -> nn.Module:
        model = PartlyFrozen().train()
        model.blocks[0].eval()
        return model

    made = flags_of(DeferredModel(build, seed=0).model)
    assert made == flags_of(build())
    assert [name for name, flag in made.items() if not flag] == [
        "blocks.0", "blocks.0.inner", "blocks.0.norm", "blocks.1.norm"
    ]  # fmt: skip


class Scaled(nn.Linear):
    """A number that follows its mode."""

    scale = 1.0

    def train(self, mode: bool = True) -> Scaled:
        super().train(mode)
        self.scale = 2.0 if mode else 0.5
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class LeftInEval(nn.Module):
    """A script leaves a part in eval mode, which trains all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(Scaled(WIDTH, WIDTH)), Scaled(WIDTH, 1)

    def begin(self) -> LeftInEval:
        """As it does before it trains."""
        self.train()
        self.body.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class SetByRoot(LeftInEval):
    """The root sets the numbers of its parts; those that their own `train` sets, too."""

    def train(self, mode: bool = True) -> SetByRoot:
        super().train(mode)
        self.body.scale = self.body[0].scale = 1.0 if mode else 0.25
        if not mode:
            self.head.temperature = 3.0
        elif "temperature" in vars(self.head):
            del self.head.temperature
        return self

    def begin(self) -> SetByRoot:
        return self.train()


@pytest.mark.parametrize("kind", [LeftInEval, SetByRoot])
def test_numbers_that_a_mode_sets(kind):
    """On partitions they are in training, in evaluations, and behind these what the model's own modes set."""
    made = workload(lambda: kind().begin(), "body", "head")
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            reference.model.begin()
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            expected = made.loss(reference.output(batch[0]), batch[1])
            assert pipeline.evaluate(batch) == pytest.approx(expected.item(), abs=EXACT)
        (held,) = {
            id(each): each for each in pipeline._installed.share.modules["head"].modules() if isinstance(each, Scaled)
        }.values()
        assert "temperature" not in vars(held)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda part, _: setattr(part, "seen", []), r"body\.seen"),
        (lambda part, mode: setattr(part.others[0], "p", 0.5 if mode else 0.1), r"body\.others\[0\]\.p"),
    ],
)
def test_what_the_roots_eval_sets_beside_numbers(change, name):
    """Is refused by its name: no copy of a part can have it."""

    class Setting(LeftInEval):
        def __init__(self):
            super().__init__()
            self.body.others = [nn.Dropout(0.5)]

        def train(self, mode=True):
            super().train(mode)
            change(self.body, mode)
            return self

    made = workload(Setting, "body", "head")
    with pytest.raises(UsageError, match=rf"eval\(\) of Setting, the model, changes {name}, of which"):
        pipeline_of(made, make_plan(made))


def dropping(*, kind: Any = nn.Sequential) -> nn.Module:
    return kind(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


class KeptInEval(nn.Sequential):
    """That it is in eval mode its own `train` says."""

    def train(self, _: bool = True) -> KeptInEval:
        return super().train(False)


TRAINED_IN_EVAL = {
    "as from_pretrained": (lambda: dropping().eval(), "'0': built in eval mode"),
    "within another part": (lambda: nn.Sequential(dropping().eval()), r"'0\.0': built in eval mode"),
    "in training": (dropping, None),
    "frozen": (lambda: dropping().eval().requires_grad_(False), None),
    "without a mode": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)).eval(), None),
    "one layer": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval()), None),
    "kept": (lambda: dropping(kind=KeptInEval), None),
}


@pytest.mark.parametrize("name", TRAINED_IN_EVAL)
def test_a_part_that_trains_in_eval_mode(name):
    """Is named, where a script's `train()` would switch it and the mode matters; it stays so."""
    build, expected = TRAINED_IN_EVAL[name]
    model = DeferredModel(lambda: nn.Sequential(build(), nn.Linear(WIDTH, 1)), seed=0)
    before, said = flags_of(model.model), left_in_eval(model)
    assert said is None if expected is None else re.match(expected, said)
    assert flags_of(model.model) == before


def test_it_is_said_by_the_pipeline_and_by_the_check():
    """A warning of the one that trains, and a caution."""
    made = in_sequence(lambda: dropping().eval())
    with pytest.warns(UserWarning, match="'0': built in eval mode"):
        pipeline_of(made, make_plan(made)).close()
    pipeline_of(made, make_plan(made), training=False).close()
    assert "'0': built in eval mode" in check_model(made, graph_of(made)).cautions[0]


SETTINGS = {"frozen": False}


class FrozenLater(Block):
    """Its BatchNorm trains until the script says otherwise, which a training loop's `train()` of each epoch sees."""

    def train(self, mode: bool = True) -> FrozenLater:
        super().train(mode)
        self._settle()
        return self

    def _settle(self) -> None:
        if SETTINGS["frozen"]:
            self.norm.eval()


def test_a_train_that_reads_what_the_script_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody calls it again, so the step behind the change is refused."""
    made = workload(lambda: nn.Sequential(FrozenLater(), nn.Linear(WIDTH, 1)), "0", "1")
    with pipeline_of(made, make_plan(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0))
        pipeline.evaluate(made.make_batch(8, 1))
        monkeypatch.setitem(SETTINGS, "frozen", True)
        with pytest.raises(UsageError, match=r"SETTINGS\['frozen'\] has changed .* a train\(\) of a module's own"):
            pipeline.step(made.make_batch(8, 2))


@pytest.mark.parametrize("signature", ["self", "self, data", "self, memory, batch_size=32"])
def test_a_train_that_is_no_switch(signature):
    """A training loop of that name is refused, and not called."""
    train = eval(f"lambda {signature}: called.append(1)", {"called": (called := [])})
    with pytest.raises(UsageError, match=r"Agent \(0\) has a method train"):
        DeferredModel(lambda: nn.Sequential(type("Agent", (nn.Linear,), {"train": train})(WIDTH, 1)), seed=0)
    assert not called


def in_sequence(kind: Callable[[], nn.Module]) -> Any:
    return workload(lambda: nn.Sequential(kind(), nn.Linear(WIDTH, 1)))


MODELS = {
    "frozen by the root": lambda: workload(FrozenByRoot, "blocks.*", "head"),
    "frozen by itself": lambda: in_sequence(FrozenBlock),
    "always training": lambda: in_sequence(AlwaysTraining),
    "merged in eval mode": lambda: in_sequence(Adapted),
    "made anew in eval mode": lambda: in_sequence(LookedUp),
}


@kept
def made_of(name: str) -> Workload:
    """One object for each name, so that it is captured once in each mode."""
    return MODELS[name]()


class Counting(nn.Linear):
    """Counts, in evaluations too; one whose `train` is its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls

    def train(self, mode=True):
        return super().train(mode)


@pytest.mark.long
def test_what_a_forward_counts_in_an_evaluation():
    """Stays, where the module has a `train` of its own, too."""
    made = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting(), nn.Linear(WIDTH, 1)), "*")
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=1)) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            expected = made.loss(reference.output(batch[0]), batch[1])
            assert pipeline.evaluate(batch) == pytest.approx(expected.item(), abs=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("name", MODELS)
def test_the_models_own_modes(name, remat):
    """Losses in training and in eval mode, weights and statistics are the plain model's, with evaluations between."""
    made = made_of(name)
    reference = Reference(made)
    reference.model.train()
    with pipeline_of(made, make_plan(made, micro_batches=1), remat=remat) as pipeline:
        for n in range(3):
            batch = made.make_batch(8, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            kept = {key: each.clone() for key, each in reference.model.named_buffers()}
            expected = made.loss(reference.output(batch[0]), batch[1])
            for key, each in reference.model.named_buffers():
                each.copy_(kept[key])  # an evaluation leaves running statistics as they are
            assert pipeline.evaluate(batch) == pytest.approx(expected.item(), abs=EXACT)
        assert reference.distance(pipeline.state_dict().items()) < EXACT
        flags = {key: module.training for key, module in reference.model.named_modules() if key}
        mine = {
            key: module.training
            for held in pipeline._installed.share.modules.values()
            for key, module in held.named_modules()
        }
        leaves = [key for key, _ in reference.model.named_modules() if key and key in mine]
        assert {key: mine[key] for key in leaves} == {key: flags[key] for key in leaves}
