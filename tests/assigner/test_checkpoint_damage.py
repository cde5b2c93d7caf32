"""Damaged checkpoints: every one is refused with its file and the reason, and nothing has changed."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from workloads import graph_of, make_plan, workload

from assigner import Pipeline, load_weights
from assigner.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL, OPTIMIZER, FACTS = "model.safetensors.index.json", "optimizer.safetensors.index.json", "training.json"
WEIGHTS, MOMENTS = "model-00000.safetensors", "optimizer-00000.safetensors"
DEEP = "[" * 100_000 + "]" * 100_000


def deep() -> int:
    """So deep that JSON is still read, but not what calls itself for each depth; a library may have raised the limit.

    Up to Python 3.11 JSON has this limit, too, and comprehensions are calls.
    """
    limit = sys.getrecursionlimit()
    return limit * 9 // 10 if sys.version_info < (3, 12) else limit + 10


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def adam(named: Any) -> torch.optim.Optimizer:
    every = list(named)
    return torch.optim.AdamW([{"params": every[:2]}, {"params": every[2:], "weight_decay": 0.1}], lr=1e-3)


MADE = workload(three_layers, optimizer=adam)


def said(work: Callable[[], Any]) -> str | None:
    """The message of the error that some work ends with, one that can be printed; None: it succeeds."""
    message = None
    try:
        work()
    except (FormatError, UsageError) as error:
        message = error.message
    assert message is None or (len(message) < 1000 and message.isprintable())
    return message


class Subject:
    """A pipeline that has trained, and a checkpoint of an earlier moment to be damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._whole = folder / "at", folder / "whole"
        self.pipeline = Pipeline(
            MADE, make_plan(MADE), scaler=torch.amp.GradScaler("cpu", init_scale=8.0), graph=graph_of(MADE)
        )
        self._step()
        self.pipeline.save(self._whole, state={"seen": [1, 2], "best": float("inf")})
        self._step()

    def _step(self) -> None:
        self.pipeline.step(MADE.make_batch(8, self.pipeline.steps))

    def damage(self, change: Callable[[Path], Any]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self._whole, self.folder)
        change(self.folder)

    def state(self) -> str:
        """All that a checkpoint can change, to the last bit."""
        pipeline = self.pipeline
        parts = (pipeline.state_dict(), pipeline.optimizer.state_dict(), pipeline.scaler.state_dict(), pipeline.steps)
        return json.dumps(parts, default=lambda each: [str(each.dtype), each.tolist()])

    def refused(self) -> str | None:
        """What `load` says, after which nothing has changed; None: it was loaded, and training goes on."""
        before = self.state()
        message = said(lambda: self.pipeline.load(self.folder))
        if message is None:
            self._step()
        else:
            assert self.state() == before
        return message


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    made = Subject(tmp_path_factory.mktemp("damage"))
    with made.pipeline:
        yield made


def text(file: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_text(content)


def edit(file: str, *path: str, to: Any) -> Callable[[Path], Any]:
    """Have a value in a JSON file be another, or what a function makes of it."""

    def change(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        inner = found
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = to(inner.get(path[-1])) if callable(to) else to
        (folder / file).write_text(json.dumps(found))

    return change


def drop(file: str, *path: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        inner = found
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        (folder / file).write_text(json.dumps(found))

    return change


def tensor(file: str, key: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], Any]:
    """Have a tensor of a shard be another; None: it is not there."""

    def damage(folder: Path) -> None:
        found = load_file(folder / file)
        made = change(found.pop(key))
        save_file(found if made is None else {**found, key: made}, folder / file)

    return damage


def every(*changes: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda folder: [change(folder) for change in changes]


def nan_in(each: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(each.numel()).view_as(each) == 1, float("nan"), each)


def another_state(folder: Path) -> None:
    """The state of an SGD with momentum, whole, in an AdamW's place."""
    names = [key.removesuffix("/exp_avg") for key in load_file(folder / MOMENTS) if key.endswith("/exp_avg")]
    made = {f"{name}/momentum_buffer": load_file(folder / MOMENTS)[f"{name}/exp_avg"] for name in names}
    save_file(made, folder / MOMENTS)
    edit(OPTIMIZER, "weight_map", to=dict.fromkeys(made, MOMENTS))(folder)
    kinds = {key: f"float64 {list(each.shape)}" for key, each in made.items()}
    edit(OPTIMIZER, "state", to={name: {"momentum_buffer": kinds[f"{name}/momentum_buffer"]} for name in names})(folder)


def lost_state(folder: Path) -> None:
    """No state of any parameter, neither in the shard nor in the index."""
    (folder / MOMENTS).unlink()
    edit(OPTIMIZER, "weight_map", to={})(folder)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "settings that are a list": (edit(OPTIMIZER, "settings", to=[]), f"{OPTIMIZER}: settings: "),
    "settings of one that are a list": (edit(OPTIMIZER, "settings", "0.bias", to=[1]), 'settings: "0.bias": '),
    "settings of one that are missing": (drop(OPTIMIZER, "settings", "2.bias"), 'settings: "2.bias": null'),
    "an lr in words": (edit(OPTIMIZER, "settings", "0.weight", "lr", to="fast"), '"0.weight": "lr": "fast"'),
    "an lr that is NaN": (edit(OPTIMIZER, "settings", "0.weight", "lr", to=float("nan")), '"lr": NaN'),
    "an lr that is infinite": (edit(OPTIMIZER, "settings", "0.weight", "lr", to=float("inf")), '"lr": Infinity'),
    "an lr of many digits": (edit(OPTIMIZER, "settings", "0.weight", "lr", to=10**400), "a finite number"),
    "an lr that is true": (edit(OPTIMIZER, "settings", "0.weight", "lr", to=True), "a finite number"),
    "an lr that is missing": (drop(OPTIMIZER, "settings", "0.weight", "lr"), '"0.weight": lr is missing'),
    "a negative lr": (
        every(*(edit(OPTIMIZER, "settings", f"0.{each}", "lr", to=-1) for each in ("weight", "bias"))),
        "AdamW refuses them: Invalid learning rate",
    ),
    "an lr of one parameter of a group": (edit(OPTIMIZER, "settings", "0.bias", "lr", to=0.5), "and differ"),
    "a rate for schedulers in words": (
        edit(OPTIMIZER, "settings", "0.weight", "initial_lr", to="fast"), '"initial_lr": "fast"'
    ),
    "betas that are one number": (edit(OPTIMIZER, "settings", "0.weight", "betas", to=0.9), "a list of 2"),
    "betas with NaN": (edit(OPTIMIZER, "settings", "0.weight", "betas", to=[0.9, float("nan")]), '"betas": [0.9, NaN]'),
    "a flag that is a number": (edit(OPTIMIZER, "settings", "0.weight", "amsgrad", to=3), "true or false"),
    "settings of a state that is not there": (
        every(*(edit(OPTIMIZER, "settings", f"0.{each}", "amsgrad", to=True) for each in ("weight", "bias"))),
        '"0.weight/max_exp_avg_sq" is missing',
    ),
    "a shard's name that is a number": (edit(MODEL, "weight_map", "0.weight", to=7), 'weight_map: "0.weight": 7'),
    "a shard's name that is a list": (edit(OPTIMIZER, "weight_map", "0.bias/step", to=[]), '"0.bias/step": []'),
    "other names that are a list": (edit(MODEL, "shared", to=[]), f"{MODEL}: shared: [] is not allowed"),
    "another name of nothing": (edit(MODEL, "shared", "head", to="tail"), 'shared: "head": "tail"'),
    "a shard elsewhere": (edit(MODEL, "weight_map", "0.weight", to="../whole/model-00000.safetensors"), "../whole"),
    "an index of lists": (text(MODEL, "[]"), "expected an object"),
    "deep nesting in an index": (text(OPTIMIZER, DEEP), f"{OPTIMIZER}: cannot be read: nested too deeply"),
    "deep nesting in the facts": (text(FACTS, DEEP), f"{FACTS}: cannot be read: nested too deeply"),
    "deep nesting in the state": (
        edit(FACTS, "state", to=lambda _: json.loads('["list", ' * deep() + "1" + "]" * deep())), "nested too deeply"
    ),
    "a state of text": (edit(FACTS, "state", to=["dict", "ab"]), "broken dict"),
    "a state without a kind": (edit(FACTS, "state", to=[1]), "without its kind"),
    "no index of the optimizer": (lambda folder: (folder / OPTIMIZER).unlink(), f"{OPTIMIZER}: there is no such file"),
    "a folder for a shard": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()), f"{WEIGHTS}: cannot be read"
    ),
    "negative steps": (edit(FACTS, "steps", to=-1), "steps: -1"),
    "half a step": (edit(FACTS, "steps", to=1.5), "steps: 1.5"),
    "true steps": (edit(FACTS, "batches", to=True), "batches: true"),
    "steps beyond a seed": (edit(FACTS, "batches", to=2**64), "batches: 18446744073709551616"),
    "a scale of nothing": (edit(FACTS, "scaler", "scale", to=0), "scaler.scale: 0"),
    "a scale in words": (edit(FACTS, "scaler", "scale", to="large"), 'scaler.scale: "large"'),
    "a scaler without its interval": (drop(FACTS, "scaler", "growth_interval"), "scaler.growth_interval: null"),
    "a weight of int8": (tensor(WEIGHTS, "0.weight", lambda each: each.to(torch.int8)), "'0.weight' has type int8"),
    "a weight of half precision": (tensor(WEIGHTS, "0.weight", lambda each: each.half()), "has type float16"),
    "a weight of another shape": (tensor(WEIGHTS, "0.weight", lambda each: each.T.contiguous()), "has shape (8, 4)"),
    "a weight with NaN": (tensor(WEIGHTS, "0.weight", nan_in), f'{WEIGHTS}: "0.weight" holds 1 NaN; 0 when it was'),
    "a buffer with NaN": (tensor(WEIGHTS, "1.running_mean", nan_in), f'{WEIGHTS}: "1.running_mean" holds 1 NaN'),
    "a weight that is missing": (tensor(WEIGHTS, "0.weight", lambda _: None), f'{WEIGHTS}: "0.weight" is missing'),
    "a weight that no index names": (drop(MODEL, "weight_map", "0.bias"), f'{WEIGHTS}: "0.bias" is not in {MODEL}'),
    "a weight that is nowhere": (
        every(drop(MODEL, "weight_map", "0.bias"), tensor(WEIGHTS, "0.bias", lambda _: None)), "'0.bias' is missing"
    ),
    "a moment of another shape": (
        tensor(MOMENTS, "0.weight/exp_avg", lambda each: each[:1]), '"0.weight/exp_avg" is float64 [1, 8]; '
    ),
    "a moment of another type": (
        tensor(MOMENTS, "0.weight/exp_avg", lambda each: each.half()), '"0.weight/exp_avg" is float16 [4, 8]; '
    ),
    "a moment of another shape, written down too": (
        every(
            tensor(MOMENTS, "0.weight/exp_avg", lambda each: each[:1]),
            edit(OPTIMIZER, "state", "0.weight", "exp_avg", to="float64 [1, 8]"),
        ),
        '"0.weight/exp_avg" is float64 [1, 8]; AdamW keeps float64 [4, 8]',
    ),
    "a moment with NaN": (tensor(MOMENTS, "0.weight/exp_avg", nan_in), '"0.weight/exp_avg" holds 1 NaN'),
    "a moment that is missing": (
        every(drop(OPTIMIZER, "weight_map", "0.bias/exp_avg"), tensor(MOMENTS, "0.bias/exp_avg", lambda _: None)),
        '"0.bias/exp_avg" is missing; "float64 [4]" was saved',
    ),
    "a moment that is missing, and not written down": (
        every(
            drop(OPTIMIZER, "weight_map", "0.bias/exp_avg"),
            tensor(MOMENTS, "0.bias/exp_avg", lambda _: None),
            drop(OPTIMIZER, "state", "0.bias", "exp_avg"),
        ),
        '"0.bias/exp_avg" is missing; AdamW keeps float64 [4]',
    ),
    "all state in no index": (edit(OPTIMIZER, "weight_map", to={}), f"is not in {OPTIMIZER}"),
    "no state at all": (lost_state, "is missing; "),
    "nothing written down of the state": (drop(OPTIMIZER, "state"), f"{OPTIMIZER}: state is missing"),
    "a state of another optimizer": (another_state, "is missing; AdamW keeps"),
    "negative steps of the optimizer": (tensor(MOMENTS, "0.bias/step", lambda each: -each), '"0.bias/step": -1.0'),
    "infinite steps of the optimizer": (
        tensor(MOMENTS, "0.bias/step", lambda each: each + float("inf")), '"0.bias/step": Infinity'
    ),
    "a plain state of lists": (edit(OPTIMIZER, "plain", to={"0.bias/count": [1]}), 'plain: "0.bias/count": [1]'),
}  # fmt: skip


@pytest.mark.parametrize("other", [[], {}, 3])
def test_a_plain_name_that_is_no_text_is_refused(subject: Subject, other: object):
    """A list or an object where an index has a tensor's name."""
    subject.damage(edit(MODEL, "plain", to={"k": other}))
    with pytest.raises(FormatError, match='plain: "k"'):
        load_weights(subject.folder)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_refused_and_nothing_has_changed(subject: Subject, name: str):
    """Settings, shards, nesting, shapes, types, NaN, counts, a state too few: the message has file, key and reason."""
    change, message = DAMAGES[name]
    subject.damage(change)
    assert message in (subject.refused() or "loaded")


def test_an_undamaged_checkpoint_is_loaded(subject: Subject):
    """The cases above begin from one that is good, also in what JSON writes in its own way."""
    subject.damage(lambda _: None)
    assert subject.refused() is None
    assert subject.pipeline.load(subject.folder) == {"seen": [1, 2], "best": float("inf")}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


VALUES = (
    None,
    True,
    -1,
    0,
    2.5,
    float("nan"),
    float("-inf"),
    10**400,
    "fast",
    "\ud800\x1b[2J",
    [],
    {},
    [[[1]]],
    "x" * 9999,
)


@pytest.mark.long
def test_json_with_another_value_anywhere_is_refused_or_can_be_trained_from(subject: Subject):
    """No foreign exception, at whatever place another kind of value stands, and also in the step after it."""
    draw = random.Random(5)
    whole = {file: json.loads((subject._whole / file).read_text()) for file in (MODEL, OPTIMIZER, FACTS)}
    cases = [(file, path, value) for file in whole for path in places(whole[file]) for value in VALUES]
    for file, path, value in draw.sample(cases, 400):
        found = copy.deepcopy(whole[file])
        inner = found
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        subject.damage(text(file, json.dumps(found)))
        subject.refused()


@pytest.mark.long
def test_files_with_other_bytes_are_refused_or_can_be_trained_from(subject: Subject):
    """Cut, overwritten and repeated bytes in every file; `load_weights` refuses them in the same words."""
    draw = random.Random(7)
    files = sorted(path.name for path in subject._whole.iterdir())
    assert files == sorted([MODEL, OPTIMIZER, FACTS, WEIGHTS, MOMENTS])
    for n in range(300):
        file = files[n % len(files)]

        def change(folder: Path, file: str = file) -> None:
            content = bytearray((folder / file).read_bytes())
            place = draw.randrange(min(len(content), draw.choice([16, 4096])))
            match draw.randrange(4):
                case 0:
                    del content[place:]
                case 1:
                    content[place] = draw.randrange(256)
                case 2:
                    content[place:place] = content[place : place + 40]
                case 3:
                    content[place : place + 8] = draw.randbytes(8)
            (folder / file).write_bytes(content)

        subject.damage(change)
        subject.refused()
        said(lambda: load_weights(subject.folder))
