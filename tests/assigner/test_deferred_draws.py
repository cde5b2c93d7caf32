"""A deferred model's draws are the plain model's: seeds, generators, and draws whose values say how much they take."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from test_deferred_builders import check, holding
from torch import nn

from assigner.errors import UsageError
from assigner.machine.generators import kept_python
from assigner.model.deferred import DeferredModel, origins

randn = torch.randn


def forked() -> nn.Module:
    first = randn(4)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        inside = randn(4)
    return holding(first=first, inside=inside, after=randn(4))


def seeded_as_before() -> nn.Module:
    """The seed that the model starts with, once more."""
    first = randn(4)
    torch.manual_seed(0)
    return holding(first=first, second=randn(4))


def seeded_twice() -> nn.Module:
    torch.manual_seed(7)
    first = randn(4)
    torch.manual_seed(7)
    return holding(first=first, second=randn(4), third=randn(3))


def set_back() -> nn.Module:
    first = randn(4)
    state = torch.get_rng_state()
    second, third = randn(4), randn(2)
    torch.set_rng_state(state)
    return holding(first=first, second=second, third=third, again=randn(4), after=randn(4))


def own_generator() -> nn.Module:
    own, other = torch.Generator().manual_seed(3), torch.Generator()
    first = randn(4, generator=own)
    other.set_state(own.get_state())
    tensors = {
        "taken_over": randn(4, generator=other),
        "second": randn(4, generator=own),
        "default": randn(3, generator=torch.default_generator),
        "normal": nn.init.normal_(torch.empty(4), generator=own),
        "cut": nn.init.trunc_normal_(torch.empty(50), generator=own),
        "uniform": torch.empty(4).uniform_(generator=own),
    }
    return holding(first=first, **tensors, after=nn.Parameter(randn(5)))


# Draws that take as much as their arguments' values say, or that refuse values which are no probabilities.
BY_VALUES = {
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.3)),
    "bernoulli in place": lambda: torch.empty(50).bernoulli_(torch.full((50,), 0.3)),
    "multinomial": lambda: torch.multinomial(torch.ones(10), 3),
    "normal": lambda: torch.normal(torch.zeros(40), torch.full((40,), 2.0)),
    "poisson": lambda: torch.poisson(torch.full((40,), 3.0)),
    "poisson of draws": lambda: torch.poisson(torch.rand(40)),
    "gamma": lambda: torch._standard_gamma(torch.full((5,), 2.0)),
    "binomial": lambda: torch.binomial(torch.full((30,), 10.0), torch.full((30,), 0.3)),
    "beta": lambda: torch.distributions.Beta(torch.tensor(2.0), torch.tensor(3.0)).sample((4,)),
    "dropout": lambda: nn.functional.dropout(torch.ones(50), 0.5),
    "rrelu": lambda: nn.functional.rrelu(randn(30), training=True),
    "permuted": lambda: randn(10, 3)[torch.randperm(10)],
    "like": lambda: torch.rand_like(randn(4)),
    "exponential": lambda: torch.empty(5).exponential_(),
    "geometric": lambda: torch.empty(5).geometric_(0.3),
    "integers": lambda: torch.empty(5, dtype=torch.long).random_(0, 5),
    "complex": lambda: randn(5, dtype=torch.cfloat),
    "strided": lambda: nn.init.uniform_(torch.empty(40, 30).t()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_VALUES)
def test_what_comes_after_a_draw(name):
    """A draw has the plain model's values, and so has what is drawn after it, on whichever part it is."""
    check(lambda: holding(before=nn.Linear(2, 2), drawn=BY_VALUES[name](), after=nn.Parameter(randn(5))))


@pytest.mark.slow
@pytest.mark.parametrize("builder", [forked, seeded_as_before, seeded_twice, set_back, own_generator])
def test_seeds_and_generators(builder):
    """Seeds used before, states that are set again, forks and own generators give the plain model's draws."""
    check(builder)


def test_generators_are_left_as_they_were():
    """The caller's generators, the default one and his own, have the same state after the build and after a part."""
    own = torch.Generator().manual_seed(3)
    before = own.get_state(), torch.get_rng_state()
    deferred = DeferredModel(lambda: holding(drawn=randn(4, generator=own), other=randn(4)), seed=0)
    deferred.materialise(["drawn", "other"])
    assert torch.equal(own.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_generator_is_left_as_it_was_after_an_error():
    """So it is when the builder fails."""
    own = torch.Generator().manual_seed(3)
    before = own.get_state()

    def failing() -> nn.Module:
        randn(4, generator=own)
        raise ValueError("no model")

    with pytest.raises(UsageError, match="no model"):
        DeferredModel(failing, seed=0)
    assert torch.equal(own.get_state(), before)


def test_only_the_draws_of_the_same_generator_are_replayed():
    """A layer of 10^13 weights before the wanted one is not drawn if a seed stands between them."""

    def builder() -> nn.Module:
        huge = nn.Bilinear(10**5, 10**5, 10**3)
        torch.manual_seed(5)
        return holding(huge=huge, small=nn.Linear(2, 2))

    made = DeferredModel(builder, seed=0).materialise(["small.weight"])["small.weight"]
    torch.manual_seed(5)
    assert torch.equal(made, nn.Linear(2, 2).weight)


def seeds_itself() -> nn.Module:
    random.seed(42)
    np.random.seed(42)
    return drawing()


def drawing() -> nn.Module:
    return nn.Linear(2, 2 + round(random.random() + np.random.rand()))


def draws_before_its_seed() -> nn.Module:
    random.seed(random.random())
    return seeds_itself()


def lends_the_state() -> nn.Module:
    state = random.getstate()
    made = seeds_itself()
    random.setstate(state)
    return made


@pytest.mark.parametrize(
    ("builder", "are_alike"),
    [(seeds_itself, True), (lends_the_state, True), (draws_before_its_seed, False), (drawing, False)],
)
def test_draws_of_python_and_numpy_come_from_the_last_seed(builder, are_alike):
    """What the script's own generators were at is told where the builder has drawn from that, and there alone."""
    found = []
    with kept_python():
        for seed in (1, 2):
            random.seed(seed)
            np.random.seed(seed)
            found.append(DeferredModel(builder, seed=0).origins)
    assert all(each.python and each.numpy for each in found)
    assert (found[0].numbers == found[1].numbers) is are_alike


def scaled_by_a_norm(norm) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with torch.no_grad():
        model[1].weight.mul_(norm(model[0].weight))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "builder",
    [
        lambda: holding(weight=nn.init.trunc_normal_(torch.empty(6, 6), std=0.02)),
        lambda: scaled_by_a_norm(torch.Tensor.norm),
        lambda: scaled_by_a_norm(torch.norm),
        lambda: scaled_by_a_norm(torch.linalg.norm),
        lambda: scaled_by_a_norm(torch.linalg.svdvals),
        lambda: scaled_by_a_norm(lambda weight: weight.norm(dim=1, keepdim=True).argsort(0)),
        lambda: holding(places=torch.tensor([3, 0, 2]).nonzero()),
        lambda: holding(found=torch.linalg.lstsq(randn(4, 3), randn(4, 2)).solution),
    ],
)
def test_no_origin_hangs_on_where_python_has_put_a_function(builder, monkeypatch):
    """What goes into a digest is what another process has too: there, functions of Python's lie elsewhere."""
    told = list[str]()

    def noting(parts):
        kept = [*parts]
        told.extend(each for each in kept if isinstance(each, str))
        return digest(kept)

    digest = origins.digest
    monkeypatch.setattr(origins, "digest", noting)
    assert DeferredModel(builder, seed=0).origins.values
    assert not [each for each in told if "0x" in each]


def test_what_memory_held_before_is_no_origin():
    """A scratch tensor in an attribute has no values of the model's; what is made of numbers has."""

    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scratch, self.table, self.steps = torch.empty(64), torch.arange(4.0) * 3, 1 << 2000

        def forward(self, x):
            return x[: len(self.scratch)] * self.table * (self.steps & 1)

    found = []
    for fills in (False, True):
        torch.use_deterministic_algorithms(fills)  # torch.empty gives NaN then
        found.append(DeferredModel(Scratch, seed=0).origins)
    torch.use_deterministic_algorithms(False)
    assert found[0] == found[1]
    assert {"Scratch.scratch", "Scratch.table"} <= set(found[0].values)


class Slotted(nn.Module):
    """Its forward looks up a number, in a dict or in an attribute."""

    def __init__(self, slots: dict, *, apart: bool) -> None:
        super().__init__()
        self.slots = {} if apart else slots
        vars(self).update(slots if apart else {})

    def forward(self, x):
        return x[:, (self.slots or vars(self))["cls"]]


@pytest.mark.parametrize("apart", [False, True])
def test_a_few_names_that_a_set_has_numbered_are_told_from_a_place(apart):
    """As the slot of a token, and as a row and a column of the ranks, or settings in whatever turn."""

    def texts(**slots: int) -> tuple[int, int]:
        return DeferredModel(lambda: nn.Sequential(Slotted(slots, apart=apart)), seed=0).origins.texts[where]

    where = "0" if apart else "0.slots"
    (kind, order), (same, other) = texts(cls=0, sep=1), texts(sep=0, cls=1)
    assert kind == same
    assert order != other
    assert texts(cls=0, sep=1)[0] != texts(cls=1, sep=0)[0]
    assert texts(cls=4, sep=4) == texts(sep=4, cls=4)
