"""What builders do to their tensors, one kind each: a deferred model has the values of the plain one."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from assigner.errors import UsageError
from assigner.model.deferred import DeferredModel

randn = torch.randn


def holding(**tensors) -> nn.Module:
    """A module with these tensors and modules."""
    model = nn.Module()
    for name, value in tensors.items():
        if isinstance(value, nn.Module):
            model.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            model.register_parameter(name, value)
        else:
            model.register_buffer(name, value)
    return model


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def check(builder) -> None:
    """All tensors together and each alone, twice: values, types and strides are the plain model's."""
    torch.manual_seed(0)
    expected = everything(builder())
    deferred = DeferredModel(builder, seed=0)
    assert set(deferred.tensors()) == set(expected)
    for names in [list(expected), *([name] for name in expected)] * 2:
        made = deferred.materialise(names)
        for name in names:
            assert made[name].dtype == expected[name].dtype, name
            assert made[name].stride() == expected[name].stride(), name
            assert torch.equal(made[name], expected[name]), name


def written(tensor: torch.Tensor, index, value) -> torch.Tensor:
    tensor[index] = value
    return tensor


def masked(tensor: torch.Tensor) -> torch.Tensor:
    return written(tensor, tensor > 1, 1.0)


def summed(tensor: torch.Tensor) -> torch.Tensor:
    return written(tensor, (slice(None), 0), tensor[:, 0] + 3)


# Numbers, rows, masks, lists and tensors that are written into a tensor.
WRITES = {
    "a row": lambda: written(randn(5, 2), 3, 0.0),
    "a row of ones": lambda: written(torch.ones(5, 2), 3, 0.0),
    "an element": lambda: written(torch.ones(5, 2), (3, 1), 7.0),
    "an integer": lambda: written(torch.zeros(3, dtype=torch.long), 0, 3),
    "a mask": lambda: masked(randn(5, 2)),
    "a tensor": lambda: written(randn(5, 2), 0, torch.arange(2.0)),
    "a tensor without dimensions": lambda: written(randn(4, 2), 0, torch.tensor(3.0)),
    "a list of rows": lambda: written(randn(5, 2), [0, 1], 5.0),
    "lists of places": lambda: written(randn(5, 5), ([0, 2], [1, 3]), 7.0),
    "lists in a list": lambda: written(randn(5, 5), ([[0], [1]], [[2, 3]]), 7.0),
    "a list beside a slice": lambda: written(randn(5, 5), (slice(None), [1]), 2.0),
    "a range": lambda: written(randn(5, 5), range(2), 2.0),
    "rows read by a list": lambda: randn(5, 5)[[3, 4]],
    "a slice": lambda: written(randn(5, 2), slice(0, 2), 5.0),
    "sines": lambda: written(
        torch.zeros(5, 2), (slice(None), slice(0, None, 2)), torch.sin(torch.arange(5.0))[:, None]
    ),
    "into data": lambda: written(nn.Linear(2, 2).weight.data, slice(None), 0.5),
    "forget gates": lambda: written(nn.LSTM(2, 2).bias_ih_l0.data, slice(2, 4), 1.0),
    "a sum of columns": lambda: summed(torch.ones(4, 2)),
    "a constant itself": lambda: torch.tensor([1.0, 2.0]).mul_(3),
    "an element of a constant": lambda: written(torch.tensor([1.0, 2.0]), 0, 5.0),
    "a constant": lambda: randn(2).copy_(torch.tensor([1.0, 2.0])),
    "an output": lambda: torch.add(randn(3), randn(3), out=torch.empty(3)),
    "a drawn output": lambda: randn(4, out=torch.empty(4)),
    "scattered": lambda: torch.zeros(4, 4).scatter_(1, torch.tensor([[0], [1], [2], [3]]), 1.0),
    "masked": lambda: randn(4, 4).masked_fill_(torch.rand(4, 4) < 0.5, 0),
    "a mask's source": lambda: torch.ones(16).masked_scatter_(randn(16) > 0, randn(16)),
    "a diagonal": lambda: randn(4, 4).fill_diagonal_(1.0),
    "another's memory": lambda: randn(4).set_(randn(3)),
    "sparse": lambda: nn.init.sparse_(torch.empty(6, 4), 0.5),
    "dirac": lambda: nn.init.dirac_(torch.empty(4, 4, 3)),
    "eye": lambda: nn.init.eye_(torch.empty(3, 3)),
}


def covariance() -> torch.Tensor:
    drawn = randn(4, 4)
    return drawn @ drawn.mT + torch.eye(4)


# Values that are worked out from others, and constants.
VALUES = {
    "vander": lambda: torch.vander(torch.tensor([1.0, 2.0, 3.0])),
    "where": lambda: torch.where(randn(4, 4) > 0, randn(4, 4), 0.0),
    "causal": lambda: torch.full((4, 4), -math.inf).triu(1),
    "one hot": lambda: functional.one_hot(torch.arange(4), 5),
    "rope": lambda: torch.outer(torch.arange(4.0), 1 / 10000 ** (torch.arange(0, 8, 2).float() / 8)).cos(),
    "new tensor": lambda: randn(2).new_tensor([1.0, 2.0]) * 2,
    "new tensor of a type": lambda: randn(2).new_tensor([1, 2], dtype=torch.long),
    "new tensor takes the type": lambda: randn(2).new_tensor([1, 2]),
    "new full": lambda: randn(2).new_full((3,), 2.0),
    "old style": lambda: torch.FloatTensor([1, 2]) * nn.init.normal_(nn.Parameter(torch.Tensor(2))).detach(),
    "concatenated": lambda: torch.cat([torch.tensor([1.0, 2.0]), randn(2)]),
    "betas": lambda: torch.cumprod(1 - torch.linspace(1e-4, 0.02, 10), 0),
    "of an item": lambda: randn(3) * torch.linspace(0, 1, 5)[3].item(),
    "an if": lambda: randn(3) if torch.ones(3).sum() > 2 else torch.zeros(3),
    "numpy": lambda: torch.from_numpy(torch.arange(4.0).numpy()) + randn(4),
    "unique": lambda: torch.unique(torch.tensor([1, 1, 2])),
    "a decomposition": lambda: torch.linalg.qr(randn(4, 4))[0],
    "a reflection": lambda: torch.linalg.householder_product(*torch.geqrf(randn(6, 4))),
    "least squares": lambda: torch.linalg.lstsq(randn(3, 6, 4), randn(3, 6, 2), driver="gelsd").solution.sum(0),
    "singular values": lambda: torch.linalg.svdvals(randn(6, 4)),
    "a weight over its largest singular value": lambda: (w := randn(6, 4)) / torch.linalg.matrix_norm(w, 2),
    "a condition": lambda: torch.linalg.cond(randn(4, 4)),
    "a nuclear norm": lambda: torch.norm(randn(6, 4), p="nuc"),
    "singular values of what a backward wants": lambda: torch.linalg.svdvals(randn(6, 4).requires_grad_()).detach(),
    "an eigenbasis": lambda: torch.linalg.eigh(covariance())[1],
    "eigenvalues": lambda: torch.linalg.eigvalsh(covariance()),
    "an inverse": lambda: torch.linalg.inv(covariance()) @ randn(4, 4),
    "a pseudoinverse": lambda: torch.linalg.pinv(randn(6, 4)),
    "a Cholesky factor": lambda: torch.linalg.cholesky(covariance()),
    "a rotation": lambda: torch.matrix_exp((a := randn(4, 4)) - a.mT),
    "a determinant": lambda: torch.linalg.slogdet(covariance())[1],
    "factors of a rotation": lambda: torch.linalg.lu(torch.linalg.qr(randn(4, 4))[0])[2],
    "expanded": lambda: randn(1, 4).expand(3, 4),
    "the seed": lambda: randn(4) * torch.initial_seed(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    """What a builder writes into a tensor is there, and the layer that comes after it has its own values."""
    check(lambda: holding(tensor=WRITES[name](), after=nn.Linear(2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    """Values of values are the plain model's, and so is the layer that comes after them."""
    check(lambda: holding(tensor=VALUES[name](), after=nn.Linear(2, 2)))


def test_least_squares_by_default():
    """What torch itself gives by other last bits each time is alike for all that are made, and near to torch's."""
    deferred = DeferredModel(
        lambda: holding(tensor=torch.linalg.lstsq(randn(8, 30, 20), randn(8, 30, 5)).solution), seed=0
    )
    made = [deferred.materialise(["tensor"])["tensor"] for _ in range(3)]
    torch.manual_seed(0)
    plain = torch.linalg.lstsq(randn(8, 30, 20), randn(8, 30, 5)).solution
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert torch.allclose(made[0], plain, rtol=1e-3, atol=1e-4)


NONE = {
    "an inverse": (lambda: torch.linalg.inv(randn(4, 4) * 0), r"the model's builder: linalg\.inv: .* singular"),
    "a factor": (lambda: torch.linalg.cholesky(-covariance()), "linalg.cholesky: .* not positive-definite"),
    "residuals": (
        lambda: torch.linalg.lstsq(randn(6, 1).expand(6, 3), randn(6, 2), driver="gelsd").residuals,
        r"linalg_lstsq.default gives \[0\] for its values, and not \[2\] as for others",
    ),
}


@pytest.mark.parametrize("name", NONE)
def test_values_that_do_not_exist(name):
    """What a matrix has not, by values that are drawn, is refused where the tensors are made."""
    make, words = NONE[name]
    with pytest.raises(UsageError, match=words):
        DeferredModel(lambda: holding(tensor=make()), seed=0).materialise(["tensor"])


def test_a_decomposition_into_given_tensors():
    """What torch cannot write without values is refused, with a drawn matrix and with a constant one."""
    for make in (randn, torch.ones):
        with pytest.raises(
            UsageError, match=r"has geqrf\.a write its result into a tensor.* at .*builders\.py"
        ) as caught:
            DeferredModel(lambda: torch.geqrf(make(4, 4), out=(torch.empty(4, 4), torch.empty(4))), seed=0)  # noqa: B023
        assert "leave out=" in caught.value.hint


LOADED = torch.arange(9.0).reshape(3, 3)[1:]


def test_parts_of_a_loaded_tensor():
    """Slices and transposes of a tensor that is a view itself; it is left as it was."""
    before = LOADED.clone()

    def builder() -> nn.Module:
        layer = nn.Linear(3, 2)
        layer.weight.data.copy_(LOADED)
        return holding(
            row=LOADED[1:] * 2, column=LOADED[:, 1], turned=LOADED.t(), halved=LOADED[1:].mul(0.5), layer=layer
        )

    check(builder)
    assert torch.equal(LOADED, before)


def test_a_copy_of_a_model_that_was_there_before():
    """Running statistics and other buffers too, with the shapes and the values that they have there."""
    template = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    template(torch.randn(5, 3))
    check(lambda: nn.Sequential(copy.deepcopy(template), nn.Linear(4, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_another_default_type(default):
    """Tensors made under another default type have it, also where it only shows in what is worked out."""

    def builder() -> nn.Module:
        kept = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            tensors = {"zeros": torch.zeros(3), "drawn": randn(4), "steps": torch.arange(0, 1, 0.25)}
            return holding(layer=nn.Linear(3, 4), thirds=torch.arange(4) / 3, list=torch.tensor([1.0]), **tensors)
        finally:
            torch.set_default_dtype(kept)

    check(builder)
    assert torch.get_default_dtype() == torch.float32


def test_training_of_running_statistics():
    """A batch that the builder sends through a batch norm moves its running statistics."""

    def builder() -> nn.Module:
        norm = nn.BatchNorm1d(3)
        norm(randn(4, 3))
        return holding(norm=norm, after=nn.Linear(2, 2))

    check(builder)


def test_lazy_modules():
    """Those whose sizes the builder settles by a forward are like any other; without one the hint tells to."""

    def builder() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2))

    def settled() -> nn.Module:
        model = builder()
        model(randn(4, 5))
        return model

    check(settled)
    with pytest.raises(UsageError, match=r"'0\.weight' has no size before the model's first forward") as caught:
        DeferredModel(builder, seed=0)
    assert "have the builder call the model once" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block", "default"])
def test_asking_for_the_meta_device(name):
    """What the builder has put on the meta device itself draws nothing, and has values once it gives it some."""

    def builder() -> nn.Module:
        if name == "block":
            with torch.device("meta"):
                layer, powers = nn.Linear(3, 3), torch.vander(torch.zeros(3))
        else:
            torch.set_default_device("meta")
            try:
                layer, powers = nn.Linear(3, 3), torch.vander(torch.zeros(3))
            finally:
                torch.set_default_device(None)
        nn.init.trunc_normal_(nn.init.uniform_(layer.weight))
        assert layer.weight.is_meta
        assert powers.is_meta
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        return holding(layer=layer, after=randn(3))

    check(builder)


def test_values_that_torch_keeps_to_itself():
    """A tensor that comes without its values is refused where a part needs it, by line or name; the rest is made."""

    def builder() -> nn.Module:
        return holding(
            product=randn(2).new([1.0, 2.0]) * 2,
            bare=randn(2).new([1.0, 2.0]),
            layer=nn.Linear(2, 2),
        )

    deferred = DeferredModel(builder, seed=0)
    with pytest.raises(
        UsageError, match=r"uses at .*test_deferred_builders\.py:\d+ \(product=.* are not known"
    ) as caught:
        deferred.materialise(["product"])
    assert "torch.tensor" in caught.value.hint
    with pytest.raises(UsageError, match=r"uses (as bare|at .*\(bare=.*) are not known"):  # torch 2.15 tells the line
        deferred.materialise(["bare"])
    torch.manual_seed(0)
    assert torch.equal(deferred.materialise(["layer.weight"])["layer.weight"], builder().layer.weight)


def test_autocast_in_a_builder():
    """Autocast would not reach tensors without memory, so a product under it is refused; a layer's making is not."""

    def builder(products: bool) -> nn.Module:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer = nn.Linear(4, 4)
            return holding(layer=layer, product=randn(4, 4) @ randn(4, 4) if products else randn(4, 4))

    check(lambda: builder(False))
    with pytest.raises(UsageError, match=r"builder calls mm under torch.autocast at .*test_deferred_builders\.py"):
        DeferredModel(lambda: builder(True), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("orthogonal_map", ["cayley", "matrix_exp"])
def test_an_orthogonal_parametrization(orthogonal_map):
    """It reads random values, which is refused; what the hint tells helps."""

    def builder(**options) -> nn.Module:
        return nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map=orthogonal_map, **options)

    with pytest.raises(UsageError, match="reads a random tensor's value at") as caught:
        DeferredModel(builder, seed=0)
    assert "orthogonal_map='cayley' (or 'matrix_exp') and use_trivialization=False" in caught.value.hint
    check(lambda: builder(use_trivialization=False))
