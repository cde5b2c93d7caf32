"""A deferred model has, to the last bit, the values that the plain builder gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from assigner.errors import UsageError
from assigner.model.deferred import DeferredModel


class Everything(nn.Module):
    """Initialisers of many kinds, tied weights, buffers, views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        nn.init.orthogonal_(self.linear.weight)
        self.cut = nn.Linear(5, 5)
        nn.init.trunc_normal_(self.cut.weight, std=0.02)
        self.kaiming = nn.Conv2d(3, 4, 3)
        nn.init.kaiming_normal_(self.kaiming.weight, mode="fan_out")
        nn.init.dirac_(nn.Conv2d(2, 2, 3).weight)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.batch = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.LSTM(3, 4)
        self.register_buffer("steps", torch.linspace(0, 1, 5) ** 2)
        self.register_buffer("mask", torch.ones(3, 3).triu(1).bool(), persistent=False)
        self.register_buffer("empty", None)
        with torch.no_grad():
            self.linear.bias[2:4].fill_(7.0)
            self.cut.weight.data = self.cut.weight.data.t().clone() * math.sqrt(2)
        self.scaled = nn.Parameter(torch.randn(3) * torch.arange(3.0), requires_grad=False)


def plain(builder, seed=3):
    torch.manual_seed(seed)
    model = builder()
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def seeded() -> nn.Module:
    first = nn.Linear(3, 3)
    torch.manual_seed(99)
    return nn.Sequential(first, nn.Linear(3, 3), nn.Dropout(0.1))


def counted() -> nn.Module:
    rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
    return nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate)) for rate in rates])


class OnlyWhereReal(nn.Linear):
    """Gives values to what lies on a real device only, as transformers does; hands values to Python on the way."""

    def __init__(self) -> None:
        assert torch.tensor([]).device == torch.get_default_device() == torch.device("cpu")
        ends = torch.tensor([2, 1]).cumsum(0).tolist()
        super().__init__(*ends)
        if self.weight.device.type != "meta" and not self.weight.is_meta:
            nn.init.normal_(self.weight)
        positions = torch.arange(4, device=self.weight.device)
        assert torch.equal(positions[1:], positions[:-1] + 1)
        assert torch.allclose(positions.float(), positions.double().float())
        assert f"{positions[3]:.1f}" == "3.0"
        self.register_buffer("odd", (positions % 2 == 1).nonzero().flatten().mul_(10))
        self.register_buffer("chosen", positions[positions > 1] + int(positions.numpy().sum()))


def moved_from_meta() -> nn.Module:
    """The library's way to load a model: made without memory, nothing drawn, then given memory and values."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        assert torch.tensor([]).device.type == "meta"
    assert model[0].weight.is_meta
    assert torch.empty_like(model[0].weight).device.type == "meta"
    model.to_empty(device="cpu")
    assert not model[0].weight.is_meta
    for layer in model:
        layer.reset_parameters()
    return model


BUILDERS = {
    "made on meta": moved_from_meta,
    "values and devices": OnlyWhereReal,
    "everything": Everything,
    "double": lambda: Everything().double(),
    "half of it": lambda: nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3)),
    "channels last": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)).to(
        memory_format=torch.channels_last
    ),
    "a seed inside": seeded,
    "numbers of tensors": counted,
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_equal_to_the_plain_builder(name):
    """All at once and each tensor alone: same values, type, strides and `requires_grad`."""
    expected = plain(BUILDERS[name])
    deferred = DeferredModel(BUILDERS[name], seed=3)
    assert all(tensor.device.type == "meta" for tensor in deferred.tensors().values())
    assert set(deferred.tensors()) == set(expected)
    whole = deferred.materialise(expected)
    for key, wanted in expected.items():
        for made in (whole[key], deferred.materialise([key])[key]):
            assert torch.equal(made, wanted)
            assert (made.dtype, made.stride(), made.requires_grad) == (
                wanted.dtype,
                wanted.stride(),
                wanted.requires_grad,
            )
            assert isinstance(made, nn.Parameter) == isinstance(wanted, nn.Parameter)


def test_shared_tensors_stay_shared():
    """Two names of one tensor give one tensor, and each of them alone the same values."""
    deferred = DeferredModel(Everything, seed=3)
    both = deferred.materialise(["embedding.weight", "head.weight"])
    assert both["embedding.weight"] is both["head.weight"]
    assert torch.equal(deferred.materialise(["head.weight"])["head.weight"], both["head.weight"])


@pytest.mark.long
def test_the_seed_matters():
    """Another seed gives other values; the same seed the same."""
    one, again, other = (DeferredModel(Everything, seed=seed).materialise(["linear.weight"]) for seed in (1, 1, 2))
    assert torch.equal(one["linear.weight"], again["linear.weight"])
    assert not torch.equal(one["linear.weight"], other["linear.weight"])


def test_the_callers_generator_is_left_alone():
    """Neither recording nor materialising moves the caller's random state."""
    torch.manual_seed(8)
    before = torch.get_rng_state()
    DeferredModel(seeded, seed=3).materialise(["1.weight"])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_value_that_does_not_exist_yet():
    """A builder that looks at random numbers is told at which line, and what to do."""

    def peeking() -> nn.Module:
        width = int(torch.randint(2, 5, (1,)).item())
        return nn.Linear(width, width)

    with pytest.raises(UsageError, match=r"random tensor's value at .*test_deferred\.py:\d+ \(width = int") as caught:
        DeferredModel(peeking, seed=0)
    assert "plain Python" in caught.value.hint


def test_a_builder_without_a_module():
    """What the builder gives must be a module."""
    with pytest.raises(UsageError, match=r"Workload.model gave dict"):
        DeferredModel(dict, seed=0)


def test_real_memory_is_only_the_wanted_part():
    """A layer of 10^13 weights can be part of a model, as long as nobody wants it or what comes after it."""
    deferred = DeferredModel(lambda: nn.Sequential(nn.Linear(2, 2), nn.Bilinear(10**5, 10**5, 10**3)), seed=0)
    assert deferred.model[1].weight.numel() == 10**13
    torch.manual_seed(0)
    assert torch.equal(deferred.materialise(["0.weight"])["0.weight"], nn.Linear(2, 2).weight)


def test_loaded_weights():
    """A state that was loaded before is copied in; ties and types are those of the plain model."""
    state = {name: tensor.clone() for name, tensor in plain(Everything, seed=8).items() if name != "mask"}

    def builder() -> nn.Module:
        model = Everything().double()
        model.load_state_dict(state)
        return model

    expected, deferred = plain(builder), DeferredModel(builder, seed=3)
    made = deferred.materialise(expected)
    assert all(torch.equal(made[name], wanted) for name, wanted in expected.items())
    assert made["embedding.weight"] is made["head.weight"]


@pytest.mark.parametrize(
    ("change", "word"),
    [(lambda layer: layer.double(), "converts"), (lambda layer: nn.init.normal_(layer.weight), "changes")],
    ids=["converted", "drawn again"],
)
def test_loaded_weights_that_are_changed(change, word):
    """A tensor with memory that the builder changes or converts is refused: the change would be lost, or a tie."""
    loaded = nn.Parameter(torch.ones(3, 3))

    def builder() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer.weight = loaded
        change(layer)
        return layer

    with pytest.raises(UsageError, match=rf"builder {word} a loaded tensor at .*test_deferred\.py:\d+") as caught:
        DeferredModel(builder, seed=0)
    assert "load_state_dict(state)" in caught.value.hint
    assert torch.equal(loaded, torch.ones(3, 3))


class Kept(nn.Module):
    """Tensors in attributes, containers and objects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.drawn = torch.randn(4)
        self.pair = [(self.drawn[1:], torch.arange(3)), {"half": torch.ones(2).half()}]
        self.alias = self.linear.bias.data
        self.trained = torch.zeros(2, requires_grad=True)


def test_unregistered_tensors_have_their_values_at_once():
    """They are no part's own: as the plain builder draws them, views of one memory; others stay unmade."""
    torch.manual_seed(3)
    expected, found = Kept(), DeferredModel(Kept, seed=3).model
    assert torch.equal(found.drawn, expected.drawn)
    assert torch.equal(found.pair[0][0], expected.pair[0][0])
    assert found.pair[0][0].untyped_storage()._cdata == found.drawn.untyped_storage()._cdata
    assert torch.equal(found.pair[0][1], torch.arange(3))
    assert torch.equal(found.pair[1]["half"], torch.ones(2).half())
    assert [found.alias.device.type, found.trained.device.type, found.linear.weight.device.type] == ["meta"] * 3
