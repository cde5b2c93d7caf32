"""Builders that save, load, pickle and trace: what is read from a file has its values, and first weights have none."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch as safe
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.utils import prune

from assigner.errors import UsageError
from assigner.model.deferred import DeferredModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Two(nn.Module):
    """Two layers, of which something is done in `__init__`."""

    def __init__(self, then: Callable[[Two], object]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        then(self)


def saved(net: Two, **words: bool) -> None:
    """Through memory, as a copy is made by some."""
    file = io.BytesIO()
    torch.save(net.one.state_dict(), file, **words)
    file.seek(0)
    net.two.load_state_dict(torch.load(file))


def pruned(net: Two) -> None:
    prune.global_unstructured([(net.one, "weight"), (net.two, "weight")], prune.L1Unstructured, amount=0.3)


def hidden(net: Two) -> None:
    try:
        float(net.one.weight.sum())
    except Exception as error:
        raise ValueError("other words") from error


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (saved, "saves the values of tensors at .*test_builder_files.py"),
        (lambda net: saved(net, _use_new_zipfile_serialization=False), "saves the values of tensors"),
        (lambda net: pickle.dumps(net.one.state_dict()), "saves the values of tensors"),
        (lambda net: net.one.weight.untyped_storage().tolist(), "saves the values of tensors"),
        (lambda net: safe.save(net.one.state_dict()), "saves the values of tensors"),
        (lambda _: np.copyto(torch.zeros(3, 3).numpy(), 1.0), r"writes to the array that tensor.numpy\(\) has given"),
        (lambda _: np.asarray(torch.arange(3)).fill(1), r"writes to the array that tensor.numpy\(\) has given"),
        (lambda net: torch.jit.trace(net.one, torch.ones(2, 3)), "reads a random tensor's value at .*test_builder"),
        (pruned, "reads a random tensor's value"),
        (hidden, "reads a random tensor's value"),
        (lambda net: setattr(net, "one", torch.jit.script(net.one)), "one is a scripted or traced module"),
        (
            lambda net: setattr(net, "one", torch.jit.trace(net.one, torch.ones(2, 3), check_trace=False)),
            "one is a scripted or traced module",
        ),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning"
)
def test_first_weights_have_no_values_to_be_saved(then: Callable[[Two], object], words: str) -> None:
    """It is said in this program's words, at the builder's line; no rank is told to draw numbers of its own."""
    with pytest.raises(UsageError, match=words) as caught:
        DeferredModel(lambda: Two(then), seed=5)
    assert "random)" not in (caught.value.hint or "")


@pytest.mark.parametrize("way", ["load", "old form", "pickle", "whole module", "scaled"])
def test_what_was_saved_before_can_be_loaded(way: str, tmp_path: Path) -> None:
    """To the last bit, in each of torch's ways, also where the builder computes with it."""
    file, layer = tmp_path / "saved", nn.Linear(3, 3)
    if way == "pickle":
        file.write_bytes(pickle.dumps(layer.state_dict()))
    else:
        what = layer if way == "whole module" else layer.state_dict()
        torch.save(what, file, _use_new_zipfile_serialization=way != "old form")
    factor = 2 if way == "scaled" else 1

    def then(net: Two) -> None:
        if way == "whole module":
            net.two = torch.load(file, weights_only=False)
            return
        state = pickle.loads(file.read_bytes()) if way == "pickle" else torch.load(file)
        net.two.load_state_dict({name: each * factor for name, each in state.items()})

    torch.manual_seed(5)
    plain = Two(then).state_dict()
    found = DeferredModel(lambda: Two(then), seed=5).materialise(plain)
    assert all(torch.equal(each, found[name]) for name, each in plain.items())


def opened(net: Two, file: Path) -> None:
    with safe_open(file, "pt") as found, torch.no_grad():
        net.two.bias.copy_(found.get_tensor("bias") * 2)
        net.two.weight[1:].copy_(found.get_slice("weight")[1:])


def written_in_place(net: Two, file: Path) -> None:
    state = safe.load_file(file)
    state["weight"].fill_diagonal_(0)
    net.two.load_state_dict(state)
    state["bias"].zero_()


def read(net: Two, file: Path) -> None:
    state = safe.load_file(file)
    with torch.no_grad():
        net.two.weight.mul_(float(state["weight"].norm()))
        net.two.bias.copy_(torch.tensor(state["bias"].tolist()))
        net.one.bias.add_(float(state["bias"].numpy().sum()))


@pytest.mark.parametrize(
    "then",
    [
        lambda net, file: net.two.load_state_dict(safe.load_file(file)),
        lambda net, file: net.two.load_state_dict(safe.load_file(file), assign=True),
        lambda net, file: net.two.load_state_dict(safe.load(file.read_bytes())),
        lambda net, file: safe.load_model(net.two, file),
        opened,
        written_in_place,
        read,
    ],
)
def test_safetensors_are_read_as_what_torch_saves_is(then: Callable[[Two, Path], object], tmp_path: Path) -> None:
    """To the last bit; and each process has the same origins of it, which follow what is in the file."""
    file, layer, origins = tmp_path / "saved", nn.Linear(3, 3), list[list[float]]()
    for _ in range(2):
        safe.save_file(layer.state_dict(), file)
        torch.manual_seed(5)
        plain = Two(lambda net: then(net, file)).state_dict()
        made = [DeferredModel(lambda: Two(lambda net: then(net, file)), seed=5) for _ in range(2)]
        found = made[0].materialise(plain)
        assert all(torch.equal(each, found[name]) for name, each in plain.items())
        assert made[0].origins == made[1].origins
        origins.append(made[0].origins.numbers)
        nn.init.normal_(layer.weight)
    assert origins[0] != origins[1]


def test_tied_weights_are_known_by_where_they_lie(tmp_path: Path) -> None:
    """As safetensors leaves out one of two names, and asks for it where memory is another one."""

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    def build() -> nn.Module:
        model = tied()
        places = [each.data_ptr() for each in model.state_dict().values()]
        assert len({*places}) == 3
        assert model[0].weight.untyped_storage().data_ptr() == places[0] == model[0].weight[1:].data_ptr() - 12
        safe.load_model(model, tmp_path / "tied")
        return model

    safe.save_model(tied(), str(tmp_path / "tied"))
    made = DeferredModel(build, seed=5)
    assert made.tensors()["0.weight"] is made.tensors()["1.weight"]
    expected = build().state_dict()
    found = made.materialise(expected)
    assert all(torch.equal(each, found[name]) for name, each in expected.items())


def test_places_of_tensors_without_memory_are_as_far_apart_as_if_they_had_some() -> None:
    """What compares them finds what is tied, and nothing else; nobody has memory there."""
    found = list[int]()

    def placed(net: Two) -> None:
        table = torch.zeros(64, 16)
        layers = [nn.Linear(16, 16) for _ in range(16)]
        tensors = [
            *(each.weight for each in layers),
            *table,
            *net.parameters(),
            nn.Embedding.from_pretrained(table).weight,
        ]
        found.extend(each.data_ptr() for each in tensors)

    DeferredModel(lambda: Two(placed), seed=5)
    assert len({*found}) == len(found) - 1
    assert found[-1] == found[16]
    assert [each - found[16] for each in found[16:80]] == [*range(0, 64 * 64, 64)]
    assert min(found) > 1 << 57


def test_what_safetensors_has_loaded_is_not_saved_by_it(tmp_path: Path) -> None:
    """There are values, and no memory to read them from."""
    safe.save_file({"weight": torch.ones(3, 3)}, tmp_path / "one.safetensors")

    def kept(_: Two) -> None:
        halves = {name: each.half() for name, each in safe.load_file(tmp_path / "one.safetensors").items()}
        safe.save_file(halves, tmp_path / "half.safetensors")

    with pytest.raises(UsageError, match="saves the values of tensors"):
        DeferredModel(lambda: Two(kept), seed=5)
    assert not (tmp_path / "half.safetensors").exists()
