"""Checkpoints on one rank: complete or absent, checked before anything changes, the optimizer as it was."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoint_cases import cut_short, trained, two_layers, weights
from torch import nn
from workloads import graph_of, language, make_plan, skips, workload

from assigner import Pipeline, load_weights
from assigner.errors import FormatError, MarkingError, UsageError
from assigner.runtime.checkpoints.optimizerstate import OptimizerState
from assigner.verification.checking import check_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from assigner.model.workload import Workload


class Counting(torch.optim.SGD):
    """Keeps a plain number, a text and None for each parameter, as optimizers outside torch do."""

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.update(count=state.get("count", 0) + 1, half=0.5, mood="calm", nothing=None)
        return done


def counting(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    return Counting(
        [{"params": every[:1], "lr": 0.1}, {"params": every[1:], "lr": 0.2, "nesterov": True}], momentum=0.9
    )


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path):
    """Weights, buffers, optimizer state, dropout and counts: the losses after a load are those without it."""
    made = language(dropout=0.3)
    with trained(made) as pipeline:
        pipeline.save(tmp_path / "at 3")
        saved = weights(pipeline)
        expected = [pipeline.step(made.make_batch(8, n)) for n in range(3, 6)]
    with trained(made, steps=1) as pipeline:
        pipeline.load(tmp_path / "at 3")
        assert pipeline.steps == 3
        assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(pipeline).items())
        assert [pipeline.step(made.make_batch(8, n)) for n in range(3, 6)] == expected


def test_without_training_weights_alone_are_read(tmp_path: Path):
    """The optimizer's state stays in the checkpoint, and settings are not taken over."""
    made = workload(two_layers, optimizer=counting)
    with trained(made) as pipeline:
        pipeline.save(tmp_path / "saved")
        saved = weights(pipeline)
    with Pipeline(made, make_plan(made), graph=graph_of(made), training=False) as pipeline:
        pipeline.load(tmp_path / "saved")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(pipeline).items())
        assert not pipeline.optimizer.state
        assert [group["lr"] for group in pipeline.optimizer.param_groups] == [0.0]


@pytest.mark.parametrize(
    ("settings", "step"),
    [({}, "cpu"), ({"fused": None}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")],
)
def test_the_device_of_the_state(settings, step):
    """State goes to its parameter's device; a count of steps only where kernels of that device read it."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = SimpleNamespace(param_groups=[{"params": [parameter], **settings}], state=defaultdict(dict))
    held = {"w/step": torch.tensor(3.0), "w/exp_avg": torch.zeros(3), "w/eta": torch.tensor(0.1)}
    OptimizerState(held, {"w/count": 2}, {}).add({"w": parameter}, optimizer)
    found = {
        key: each if isinstance(each, int) else each.device.type for key, each in optimizer.state[parameter].items()
    }
    assert found == {"step": step, "exp_avg": "meta", "eta": "meta", "count": 2}


def test_the_weights_are_the_models(tmp_path: Path):
    """load_weights gives what the plain model's load_state_dict takes."""
    made = workload(two_layers)
    with trained(made) as pipeline:
        pipeline.save(tmp_path / "saved")
        model = made.model()
        model.load_state_dict(load_weights(tmp_path / "saved"))
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights(pipeline).items())


def test_optimizer_state_and_settings_come_back_as_they_were(tmp_path: Path):
    """Numbers stay numbers, tensors tensors; learning rates changed in training come back, for each group its own."""
    made = workload(two_layers, optimizer=counting)
    with trained(made) as pipeline:
        for group in pipeline.optimizer.param_groups:
            group["lr"] *= 0.5
        pipeline.save(tmp_path / "saved")
        expected = pipeline.optimizer.state_dict()
    with trained(made, steps=1) as pipeline:
        pipeline.load(tmp_path / "saved")
        found = pipeline.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert [group["lr"] for group in found["param_groups"]] == [0.05, 0.1]
    for number, state in expected["state"].items():
        assert torch.equal(found["state"][number].pop("momentum_buffer"), state.pop("momentum_buffer"))
        assert found["state"][number] == state
        assert type(found["state"][number]["count"]) is int


def test_an_optimizer_of_fewer_parameters_is_refused(tmp_path: Path):
    """As plain torch does where groups have other sizes; one without state too, and nothing has changed."""
    made = workload(two_layers)
    with trained(made) as pipeline:
        pipeline.save(tmp_path / "trained")
    with trained(made, steps=0) as pipeline:
        pipeline.save(tmp_path / "new")
    head = replace(made, optimizer=lambda parameters: torch.optim.SGD([*parameters][4:], lr=0.1, momentum=0.9))
    with trained(head, like=made) as pipeline:
        before = weights(pipeline)
        for name in ("trained", "new"):
            with pytest.raises(FormatError, match=r'"0.weight" and 3 more had a param group when it was saved'):
                pipeline.load(tmp_path / name)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(pipeline).items())
        pipeline.save(tmp_path / "head")
        pipeline.load(tmp_path / "head")
    with trained(made) as pipeline, pytest.raises(FormatError, match=r"settings: .*\w is missing"):
        pipeline.load(tmp_path / "head")


def test_groups_that_the_script_has_taken_out_are_saved_as_it_has_them(tmp_path: Path):
    """What is saved without a group is loaded where there is none, and where there is one it is refused."""
    made = workload(two_layers, optimizer=counting)
    with trained(made) as pipeline:
        pipeline.save(tmp_path / "both")
        del pipeline.optimizer.param_groups[1]
        pipeline.save(tmp_path / "one")
        pipeline.load(tmp_path / "one")
        with pytest.raises(FormatError, match="had a param group when it was saved"):
            pipeline.load(tmp_path / "both")
    with trained(made) as pipeline:
        with pytest.raises(FormatError, match=r"settings: .*\w is missing"):
            pipeline.load(tmp_path / "one")
        pipeline.load(tmp_path / "both")


def test_an_existing_folder_is_kept(tmp_path: Path):
    """Nothing is overwritten; and training can go on."""
    made = skips()
    (tmp_path / "here").mkdir()
    with trained(made) as pipeline:
        with pytest.raises(UsageError, match="here exists"):
            pipeline.save(tmp_path / "here")
        assert pipeline.step(made.make_batch(8, 0)) > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "here"]


def test_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A save that breaks off leaves no folder of that name, and the next one succeeds."""
    with trained(skips()) as pipeline:
        with monkeypatch.context() as patch:
            patch.setattr("assigner.runtime.checkpoints.saving.write_index", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pipeline.save(tmp_path / "new")
        assert not (tmp_path / "new").exists()
        pipeline.save(tmp_path / "new")
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pipeline, Path]]:
    """A pipeline that has trained on since its checkpoint, and that."""
    made, folder = language(), tmp_path_factory.mktemp("saved") / "at"
    with trained(made) as pipeline:
        pipeline.save(folder)
        pipeline.step(made.make_batch(8, 9))
        yield pipeline, folder


def without(section: str) -> Any:
    def change(path: Path) -> None:
        found = json.loads(path.read_text())
        del found[section]
        path.write_text(json.dumps(found))

    return change


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model-00000.safetensors", cut_short, r"model-00000\.safetensors: cannot be read"),
        ("optimizer-00000.safetensors", cut_short, r"optimizer-00000\.safetensors: cannot be read"),
        ("optimizer-00000.safetensors", lambda path: path.unlink(), "cannot be read"),
        ("model.safetensors.index.json", cut_short, r"index\.json: cannot be read"),
        ("model.safetensors.index.json", without("weight_map"), "weight_map is missing"),
        ("optimizer.safetensors.index.json", without("settings"), "settings is missing"),
        ("training.json", without("fingerprint"), "training.json: fingerprint: null is not allowed; expected text"),
        ("training.json", lambda path: path.write_text("[]"), "expected an object"),
        ("training.json", without("batches"), "batches: null is not allowed; expected a whole number"),
    ],
)
def test_a_damaged_checkpoint_changes_nothing(saved: tuple[Pipeline, Path], tmp_path: Path, file, damage, message):
    """The error names the file, and weights and optimizer are as before."""
    pipeline, whole = saved
    shutil.copytree(whole, tmp_path / "saved")
    damage(tmp_path / "saved" / file)
    before, state = weights(pipeline), str(pipeline.optimizer.state_dict())
    with pytest.raises(FormatError, match=message):
        pipeline.load(tmp_path / "saved")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(pipeline).items())
    assert str(pipeline.optimizer.state_dict()) == state


class Tied(nn.Module):
    """A weight under two names, tensors that no forward reads, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.last.weight = self.first.weight
        self.unread, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(torch.tanh(self.first(x))))


@pytest.mark.long
def test_a_plain_model_takes_all_weights_strictly(tmp_path: Path):
    """Every name of its state_dict is there, a shared weight under both of its names, and it computes the same."""
    made = workload(Tied, "first", "last", "head")
    with trained(made) as pipeline:
        pipeline.save(tmp_path / "at")
        batch = made.make_batch(8, 5)
        expected = pipeline.forward(batch[0])
        pipeline.load(tmp_path / "at")
    (tmp_path / "at" / "training.json").unlink()  # the model's shards and their index are enough
    found = load_weights(str(tmp_path / "at"))
    torch.manual_seed(1)
    model = made.model()
    assert found.keys() == model.state_dict().keys()
    assert torch.equal(found["last.weight"], found["first.weight"])
    model.load_state_dict(found)
    assert model.last.weight is model.first.weight
    torch.testing.assert_close(model(batch[0]), expected, rtol=0, atol=1e-12)


PLAIN = workload(two_layers)
OPTIMIZERS = {
    "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {"foreach": True},
    "Adamax": {}, "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_is_as_it_was(tmp_path: Path, name: str):
    """The checks know what each of them keeps: a good checkpoint is loaded, into one that has made no step."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, **OPTIMIZERS[name])

    made = workload(two_layers, optimizer=make)
    with trained(made, like=PLAIN) as pipeline:
        pipeline.save(tmp_path / "at")
        expected = [pipeline.step(made.make_batch(8, n)) for n in (3, 4)]
    with trained(made, steps=0, like=PLAIN) as pipeline:
        pipeline.load(tmp_path / "at")
        assert [pipeline.step(made.make_batch(8, n)) for n in (3, 4)] == expected


def test_another_models_checkpoint(tmp_path: Path):
    """A checkpoint of another model, and a folder that is none, are refused."""
    with trained(skips()) as pipeline:
        pipeline.save(tmp_path / "skips")
    with trained(language()) as pipeline:
        with pytest.raises(FormatError, match="another model"):
            pipeline.load(tmp_path / "skips")
        with pytest.raises(UsageError, match="is no checkpoint"):
            pipeline.load(tmp_path / "nowhere")


def test_a_model_of_which_another_part_is_trained(tmp_path: Path):
    """It is another model; the error says how its weights are taken all the same, and so they are."""

    def of(trains: bool) -> Workload:
        def model() -> nn.Module:
            made = two_layers()
            made[0].requires_grad_(trains)
            return made

        return workload(model)

    with trained(of(trains=False)) as pipeline:
        pipeline.save(tmp_path / "saved")
        saved = weights(pipeline)
    with trained(of(trains=True), steps=1) as pipeline:
        with pytest.raises(FormatError, match="another model") as refused:
            pipeline.load(tmp_path / "saved")
        assert "pipeline.load_state_dict(assigner.load_weights(folder))" in str(refused.value.hint)
        pipeline.load_state_dict(load_weights(tmp_path / "saved"))
        assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(pipeline).items())


class Registering(nn.Linear):
    """Its first forward registers a running mean: as a buffer, or as what nobody trains."""

    def __init__(self, *, parameter: bool = False) -> None:
        super().__init__(8, 8)
        self.parameter = parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        if not hasattr(self, "seen"):
            if self.parameter:
                self.seen = nn.Parameter(mean)
            else:
                self.register_buffer("seen", mean)
        elif not self.parameter:
            self.seen = self.seen * 0.9 + mean * 0.1
        return super().forward(x - self.seen)


def check_comes_back(made, folder: Path) -> None:
    """A model whose forwards have not run yet goes on as the one that was saved."""
    with trained(made) as pipeline:
        pipeline.save(folder)
        expected = pipeline.step(made.make_batch(8, 3))
    with trained(made, steps=0) as pipeline:
        pipeline.load(folder)
        assert pipeline.step(made.make_batch(8, 3)) == expected


def test_a_buffer_that_a_forward_registers_comes_back(tmp_path: Path):
    """A model whose forwards have not run yet is given it; a name for which it has no place is refused."""
    made = workload(lambda: nn.Sequential(Registering(), nn.Linear(8, 1)))
    check_comes_back(made, tmp_path / "saved")
    for path in (tmp_path / "saved").glob("model*"):
        path.write_bytes(path.read_bytes().replace(b"0.seen", b"9.seen"))
    with trained(made, steps=0) as pipeline, pytest.raises(FormatError, match=r"9\.seen.* has no place in the model"):
        pipeline.load(tmp_path / "saved")


class SetsAside(Registering):
    """What its forwards register is none of its state any more once it is loaded."""

    def get_extra_state(self):
        return {"width": 8}

    def set_extra_state(self, state):
        self.register_buffer("seen", torch.zeros(state["width"]), persistent=False)


def test_a_buffer_that_set_extra_state_takes_out_of_the_state_is_loaded(tmp_path: Path):
    """Places of tensors are those that the checkpoint was read for, not those behind the model's own code."""
    made = workload(lambda: nn.Sequential(SetsAside(), nn.Linear(8, 1)))
    check_comes_back(made, tmp_path / "saved")


def test_a_buffer_that_a_forward_registers_in_the_place_of_an_attribute_is_not_saved(tmp_path: Path):
    """A load could not give it to a module that still has the attribute."""

    class Late(Registering):
        def __init__(self) -> None:
            super().__init__()
            self.seen: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if "seen" in self.__dict__:
                del self.seen
            return super().forward(x)

    with trained(workload(lambda: nn.Sequential(Late(), nn.Linear(8, 1)))) as pipeline:
        with pytest.raises(UsageError, match=r"could not be loaded: .*has no place"):
            pipeline.save(tmp_path / "saved")
        assert not any(tmp_path.iterdir())


def test_a_parameter_that_a_forward_registers_is_not_lost_in_silence(tmp_path: Path):
    """No optimizer has it, and what is saved, gathered or moved would lack it."""
    made = workload(lambda: nn.Sequential(Registering(parameter=True), nn.Linear(8, 1)))
    with trained(made) as pipeline:
        for lose in (
            lambda: pipeline.save(tmp_path / "saved"),
            pipeline.full_state_dict,
            pipeline.state_dict,
            lambda: pipeline.move(pipeline.plan),
        ):
            with pytest.raises(UsageError, match=r"forward has registered the parameter '0\.seen'"):
                lose()
        pipeline.step(made.make_batch(8, 3))
    with pytest.raises(MarkingError, match=r"forward has registered the parameter '0\.seen'"):
        check_model(made, graph_of(made))


@pytest.mark.long
def test_one_buffer_under_two_names(tmp_path: Path):
    """Tensors that share memory are saved under each of their names."""

    class Scaled(nn.Linear):
        def __init__(self, table: torch.Tensor) -> None:
            super().__init__(8, 8)
            self.register_buffer("table", table)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.table

    def model() -> nn.Module:
        table = torch.arange(8.0)
        return nn.Sequential(Scaled(table), Scaled(table), nn.Linear(8, 1))

    with trained(workload(model)) as pipeline:
        pipeline.save(tmp_path / "saved")
        pipeline.load(tmp_path / "saved")
    assert {"0.table", "1.table"} < set(load_weights(tmp_path / "saved"))


def test_what_the_script_keeps_comes_back(tmp_path: Path):
    """A scheduler's state with its types, the data's position, the scaler; and None where nothing was kept."""
    made = skips()
    with trained(made) as pipeline:
        scheduler = torch.optim.lr_scheduler.MultiStepLR(pipeline.optimizer, [1, 2])
        state = {"scheduler": scheduler.state_dict(), "position": (3, "train")}
        pipeline.save(tmp_path / "with", state=state)
        pipeline.save(tmp_path / "without")
    with trained(made, steps=1) as pipeline:
        assert pipeline.load(tmp_path / "with") == state
        assert pipeline.load(tmp_path / "without") is None


def test_the_scalers_state_comes_back(tmp_path: Path):
    """Scale and count of good updates are those of the checkpoint, and gradients of before are gone."""
    made = skips()
    with Pipeline(
        made, make_plan(made), graph=graph_of(made), scaler=torch.amp.GradScaler("cpu", init_scale=8.0)
    ) as pipeline:
        for n in range(3):
            pipeline.step(made.make_batch(8, n))
        pipeline.save(tmp_path / "saved")
        expected = pipeline.scaler.state_dict()
        losses = [pipeline.step(made.make_batch(8, n)) for n in (3, 4)]
    with Pipeline(made, make_plan(made), graph=graph_of(made), scaler=torch.amp.GradScaler("cpu")) as pipeline:
        pipeline.step(made.make_batch(8, 9), update=False)
        pipeline.load(tmp_path / "saved")
        assert pipeline.gradients() == {}
        assert pipeline.scaler.state_dict() == expected
        assert [pipeline.step(made.make_batch(8, n)) for n in (3, 4)] == losses


def test_only_plain_values_are_kept(tmp_path: Path):
    """Another value is refused with its place, nothing is written, and training can go on."""
    with trained(skips()) as pipeline:
        with pytest.raises(UsageError, match=r"state\['rng'\] is a Tensor"):
            pipeline.save(tmp_path / "new", state={"rng": torch.get_rng_state()})
        assert list(tmp_path.iterdir()) == []
        pipeline.save(tmp_path / "new")


def test_checkpoints_of_old_load(tmp_path: Path):
    """One with nothing but counts in its facts gives no state and leaves the scaler as it is."""
    made = skips()
    with trained(made) as pipeline:
        pipeline.save(tmp_path / "saved", state=[1])
        path = tmp_path / "saved" / "training.json"
        facts = json.loads(path.read_text())
        path.write_text(json.dumps({key: facts[key] for key in ("fingerprint", "steps", "batches")}))
        assert pipeline.load(tmp_path / "saved") is None
        assert pipeline.steps == 3


def test_a_checkpoint_is_replaced_only_where_it_is_asked_for(tmp_path):
    """`force=True` puts the new one in the old one's place; a folder that is no checkpoint is never removed."""
    made = language()
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        pipeline.save(tmp_path / "at")
        pipeline.step(made.make_batch(8, 0))
        with pytest.raises(UsageError, match="exists") as refused:
            pipeline.save(tmp_path / "at")
        assert "force=True" in refused.value.hint
        pipeline.save(tmp_path / "at", force=True)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("all of it")
        with pytest.raises(UsageError, match="no checkpoint"):
            pipeline.save(tmp_path / "mine", force=True)
        assert (tmp_path / "mine" / "thesis.txt").exists()
        assert pipeline.load(tmp_path / "at") is None
        assert pipeline.steps == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["at", "mine"]
