"""Gradients that a script has multiplied by a number of each rank's own part, on made ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from made_ranks import Change, Ranks
from torch import nn

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def clipped(limit: float, norm_type: float = 2.0) -> Change:
    """As torch clips what one rank has."""
    return lambda _, held: nn.utils.clip_grad_norm_(held, limit, norm_type)


def multiplied(*by: float) -> Change:
    """Each rank's by a number of its own."""

    def change(rank: int, held: Sequence[nn.Parameter]) -> None:
        for each in held:
            assert each.grad is not None
            each.grad.mul_(by[rank])

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(clipped(1.0), id="by the norm"),
        pytest.param(clipped(0.37, float("inf")), id="by the largest"),
        pytest.param(clipped(2.0, 1.0), id="by the sum"),
        pytest.param(clipped(12.0), id="one is below the limit"),
    ],
)
def test_a_norm_of_each_rank_is_refused(change: Change) -> None:
    """Whichever norm it is, and where some ranks' gradients are below the limit."""
    with pytest.raises(UsageError, match="has multiplied all gradients of worker:"):
        Ranks(3, change).check()


def by_own(number: Callable[[float], float]) -> Change:
    """Each rank's by what is made of its norm, 6, 22 and 37 here or so."""

    def change(_: int, held: Sequence[nn.Parameter]) -> None:
        norm = torch.stack([each.grad.norm() for each in held if each.grad is not None]).norm()
        for each in held:
            assert each.grad is not None
            each.grad.mul_(number(float(norm)))

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(clipped(40.0), r"of worker:2 by 0\.\d+ and none of worker:0, worker:1,", id="one is above"),
        pytest.param(by_own(lambda norm: 1 / (1 + norm)), r"worker:0 by 0\.\d+, worker:1 by 0\.\d+,", id="soft"),
        pytest.param(by_own(lambda norm: norm**0.5), r"of worker:0 by \d\.\d+, worker:1 by \d\.\d+,", id="made larger"),
        pytest.param(
            multiplied(1.0, 0.7 / 0.897, 1.0), r"of worker:1 by 0\.78 and none of worker:0, worker:2,", id="any"
        ),
    ],
)
def test_a_number_of_one_ranks_own_is_refused_at_once(change: Change, words: str, dtype: torch.dtype) -> None:
    """Without a norm that ranks have in common; those are named whose gradients are as they were."""
    with pytest.raises(UsageError, match=words):
        Ranks(3, change, dtype).check()


def test_what_is_done_to_some_of_one_ranks_is_not() -> None:
    """A factor for one layer, zeros, noise, beside ranks whose gradients are as they were."""

    def one_layer(rank: int, held: Sequence[nn.Parameter]) -> None:
        for each in held[:2] if rank == 1 else ():
            assert each.grad is not None
            each.grad.mul_(0.7 / 0.897)

    def zeros(rank: int, held: Sequence[nn.Parameter]) -> None:
        for each in held if rank == 1 else held[:1] if rank == 2 else ():
            assert each.grad is not None
            each.grad.zero_()

    def noise(rank: int, held: Sequence[nn.Parameter]) -> None:
        for each in held if rank == 1 else ():
            assert each.grad is not None
            each.grad.add_(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)))

    for change in (one_layer, zeros, noise):
        Ranks(3, change, names=PAIRS).check()


def test_a_rank_of_zeros_hides_no_other() -> None:
    """Nobody can say by what a script has multiplied them."""

    def change(rank: int, held: Sequence[nn.Parameter]) -> None:
        for each in held:
            assert each.grad is not None
            each.grad.mul_((0.0, 0.7 / 0.897, 1.0)[rank])

    with pytest.raises(UsageError, match=r"of worker:1 by 0\.78 and none of worker:2,"):
        Ranks(3, change).check()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _, __: None, id="nothing"),
        pytest.param(multiplied(0.1 / 3, 1 / 7, 1.0), id="parts by fractions"),
        pytest.param(multiplied(0.5, 0.5, 0.5), id="all alike"),
        pytest.param(multiplied(0.1, 1.0, 1.0), id="a part of the model by a number"),
        pytest.param(multiplied(0.1, 0.5, 1.0), id="parts by numbers"),
        pytest.param(multiplied(0.0, 1.0, 1.0), id="a part by zero"),
        pytest.param(multiplied(-1.0, 1.0, 1.0), id="a part turned round"),
        pytest.param(multiplied(2.0, 3.0, 1.0), id="by more than one"),
        pytest.param(multiplied(0.65**5, 0.65**4, 0.65**3), id="less from layer to layer"),
        pytest.param(lambda _, held: [clipped(0.1)(0, [each]) for each in held], id="each parameter by its own norm"),
        pytest.param(lambda _, held: nn.utils.clip_grad_value_(held, 0.01), id="values"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_done_to_parameters_by_themselves_is_not(change: Change, dtype: torch.dtype) -> None:
    """By numbers, by their own norms, by values."""
    Ranks(3, change, dtype).check()


@pytest.mark.slow
@pytest.mark.parametrize("by", [0.5, 0.3, 1.5])
def test_a_part_of_the_model_by_one_number_is_none(by: float) -> None:
    """In many updates, whatever norm is left."""
    ranks = Ranks(3, lambda *_: None)
    for _ in range(120):
        ranks.step(multiplied(by, 1.0, 1.0))
        ranks.check()


def test_a_part_by_numbers_that_change_is_none() -> None:
    """As a rate of its own that is warmed up."""
    ranks = Ranks(3, lambda *_: None)
    for n in range(120):
        ranks.step(multiplied(1.0, 0.9 - 0.005 * n, 1.0))
        ranks.check()


def test_norms_that_are_made_larger() -> None:
    """Gradients that each rank has normalised by its own."""

    def change(_: int, held: Sequence[nn.Parameter]) -> None:
        norm = torch.stack([each.grad.norm() for each in held if each.grad is not None]).norm()
        for each in held:
            assert each.grad is not None
            each.grad.mul_(100 / norm)

    with pytest.raises(UsageError, match="has multiplied all gradients of worker:0 by"):
        Ranks(3, change).check()


def test_one_parameter_a_rank_may_be_clipped_by_itself() -> None:
    """It leaves the norm of the rank, and is right."""
    ranks = Ranks(3, lambda _, held: clipped(0.1)(0, held[:1]))
    for held in ranks.held:
        held["b"].grad = None
    ranks.check()


def test_ranks_without_gradients_have_no_say() -> None:
    """One that holds nothing, or nothing that is trained, hides nothing."""

    def change(rank: int, held: Sequence[nn.Parameter]) -> None:
        for each in held if rank == 0 else ():
            each.grad = None
        clipped(1.0)(rank, held)

    with pytest.raises(UsageError, match="of worker:1 by"):
        Ranks(3, change).check()


PAIRS = "x.weight x.bias y.weight y.bias"


def weights(_: int, held: Sequence[nn.Parameter]) -> None:
    """All weights by each rank's norm of them."""
    nn.utils.clip_grad_norm_(held[::2], 1.0)


def layers(_: int, held: Sequence[nn.Parameter]) -> None:
    """The first layer of each rank by its own norm, as scripts that clip each layer do where others are below."""
    nn.utils.clip_grad_norm_(held[:2], 1.0)


def test_a_norm_of_some_parameters_of_each_rank_is_refused() -> None:
    """Weights alone; also where one rank's are below the limit."""
    with pytest.raises(UsageError, match="has multiplied some gradients of worker:0 by"):
        Ranks(3, weights, names=PAIRS).check()
    with pytest.raises(UsageError, match=r"has multiplied some gradients of worker:1 by .* and none of worker:0,"):
        Ranks(3, lambda rank, held: weights(rank, held) if rank else None, names=PAIRS).check()


def test_a_layer_may_be_clipped_by_itself() -> None:
    """All of its parameters and no others."""
    Ranks(3, layers, names=PAIRS).check()


def all_but_the_last(rank: int, held: Sequence[nn.Parameter]) -> None:
    """All of a model but the last layer of its last rank, by each rank's norm of them."""
    nn.utils.clip_grad_norm_(held if rank == 0 else held[:2], 1.0)


def test_a_norm_of_all_but_a_layer_is_refused() -> None:
    """What is left of the last rank's parameters are one layer's; the other ranks' are of several."""
    with pytest.raises(UsageError, match="has multiplied some gradients of worker:0 by"):
        Ranks(2, all_but_the_last, names=PAIRS).check()


@pytest.mark.parametrize("limit", [45.0, 47.328125])
def test_the_norm_of_one_rank_alone_is_known_when_it_comes_again(limit: float) -> None:
    """Of its weights, by another factor in three updates in a row, also where updates without it lie between."""

    def one_above(_: int, held: Sequence[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(held[::2], limit)

    ranks = Ranks(3, lambda *_: None, names=PAIRS)
    ranks.check()
    for clips in (True, False, True):
        ranks.step(one_above if clips else lambda *_: None)
        ranks.check()
    ranks.step(one_above)
    with pytest.raises(UsageError, match=r"some gradients of worker:2 by 0.* and none of worker:0, worker:1,"):
        ranks.check()


@pytest.mark.parametrize("parts", [slice(None), slice(1)])
def test_what_the_pipeline_has_clipped_is_no_number_of_the_scripts(parts: slice) -> None:
    """By the norm of all, or of a part of the model; what the script multiplies by behind it is told as it stands."""
    ranks = Ranks(2, lambda *_: None)
    for factor, held, by in zip(ranks.factors, ranks.held, (0.1, 1.0), strict=True):
        clipped = [*held.values()][parts]
        for each in held.values():
            assert each.grad is not None
            each.grad.mul_(0.3731 if any(each is one for one in clipped) else 1.0).mul_(by)
        factor.multiplied(0.3731, clipped)
        change = factor._changes.found()[1]
        assert change.extent == (0 if by == 1 else 2)
        assert change.own == pytest.approx(by - 1 if by != 1 else 0.0, abs=1e-6)
        factor._changes.note()
    ranks.check()
