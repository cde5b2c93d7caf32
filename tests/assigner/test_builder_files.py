"""Builders that save, load, pickle and trace: what is read from a file has its values, and first weights have none."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
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
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
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
