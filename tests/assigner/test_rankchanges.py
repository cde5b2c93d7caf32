"""Weights and gradients that a script has changed by a number of each rank's own part, on made ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from made_ranks import Change, Ranks
from torch import nn
from torch.profiler import profile

from assigner.errors import UsageError
from assigner.runtime.update.rankchanges import RankChanges
from assigner.runtime.update.rankfactor import RankFactor, is_written

PAIRS = "x.weight x.bias y.weight y.bias"
Held = Sequence[nn.Parameter]


def norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.detach().norm() for each in tensors]).norm()


def gradients(held: Held) -> list[torch.Tensor]:
    return [each.grad for each in held if each.grad is not None]


def climb(_: int, held: Held) -> None:
    """Sharpness-aware minimisation's first half, and its gradients dropped."""
    by = 0.05 / norm(gradients(held))
    for each, gradient in zip(held, gradients(held), strict=True):
        each.add_(gradient * by)
        each.grad = None


def descend(_: int, held: Held) -> None:
    by = 0.1 / norm(gradients(held))
    for each, gradient in zip(held, gradients(held), strict=True):
        each.sub_(by * gradient)


def scale_weights(_: int, held: Held) -> None:
    by = 2 / norm(held)
    for each in held:
        each.mul_(by)


def shrink_and_descend(_: int, held: Held) -> None:
    by = 0.01 * norm(held)
    for each, gradient in zip(held, gradients(held), strict=True):
        each.mul_(0.999).sub_(by * gradient)


def clip_and_decay(_: int, held: Held) -> None:
    nn.utils.clip_grad_norm_(held, 1.0)
    for each, gradient in zip(held, gradients(held), strict=True):
        gradient.add_(each, alpha=0.01)


def clip_and_decay_some(_: int, held: Held) -> None:
    nn.utils.clip_grad_norm_(held, 1.0)
    for each, gradient in zip(held[::2], gradients(held)[::2], strict=True):
        gradient.add_(each, alpha=0.01)


def decay_by_the_norm(_: int, held: Held) -> None:
    by = 0.01 * norm(held)
    for each, gradient in zip(held, gradients(held), strict=True):
        gradient.add_(by * each)


def clip_twice(_: int, held: Held) -> None:
    nn.utils.clip_grad_norm_(held, 3.0)
    nn.utils.clip_grad_value_(held, 0.3)


def cut_at_a_quantile(_: int, held: Held) -> None:
    limit = torch.cat([each.abs().flatten() for each in gradients(held)]).float().quantile(0.8)
    for each in gradients(held):
        each.clamp_(-limit, limit)


def climb_of_some(_: int, held: Held) -> None:
    """That of the weights, without biases."""
    climb(_, held[::2])


def climb_by_both_norms(_: int, held: Held) -> None:
    by = 0.05 * norm(held) / norm(gradients(held))
    for each, gradient in zip(held, gradients(held), strict=True):
        each.add_(gradient * by)


def decay_weights_by_the_norm(_: int, held: Held) -> None:
    by = 0.01 * norm(held)
    for each in held:
        each.mul_(1 - by)


OWN = [
    pytest.param(climb, "weights", id="SAM"),
    pytest.param(climb_of_some, "weights", id="SAM of some"),
    pytest.param(climb_by_both_norms, "weights", id="SAM by two norms"),
    pytest.param(decay_weights_by_the_norm, "weights", id="decay by the norm of all weights"),
    pytest.param(descend, "weights", id="an update without an optimizer"),
    pytest.param(scale_weights, "weights", id="weights to one norm"),
    pytest.param(shrink_and_descend, "weights", id="decay, and a rate by the norm of the weights"),
    pytest.param(clip_and_decay, "gradients", id="clipped, and decay"),
    pytest.param(clip_and_decay_some, "gradients", id="clipped, and decay of some"),
    pytest.param(decay_by_the_norm, "gradients", id="a regulariser of the norm of all weights"),
    pytest.param(clip_twice, "gradients", id="clipped by the norm, and by values"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("change", "subject"), OWN)
def test_a_number_of_each_ranks_own_is_refused(change: Change, subject: str, dtype: torch.dtype) -> None:
    """Where it adds to weights, or to gradients what is no multiple of them."""
    with pytest.raises(UsageError, match=rf"the script has changed {subject} by a number of each rank's own \(.* on w"):
        Ranks(3, change, dtype, PAIRS, (9, 7)).check()


@pytest.mark.parametrize("change", [climb, descend, decay_weights_by_the_norm, clip_and_decay])
def test_two_numbers_are_refused_when_they_are_alike_again(change: Change) -> None:
    """Two may be alike by chance, by one of many norms, once."""
    ranks = Ranks(2, change, names=PAIRS, size=(9, 7))
    ranks.check()
    ranks.step(change)
    with pytest.raises(UsageError, match="by a number of each rank's own"):
        ranks.check()


def of_each(change: Change) -> Change:
    """Each parameter by itself."""

    def changed(rank: int, held: Held) -> None:
        for each in held:
            change(rank, [each])

    return changed


def rows(_: int, held: Held) -> None:
    for each in held:
        each.copy_(each.renorm(2, 0, 0.5))


def centralise(_: int, held: Held) -> None:
    for gradient in gradients(held):
        gradient.sub_(gradient.mean(1, keepdim=True))


def rates(rate: float, *by: float) -> Change:
    """Plain descent, at a rate of each rank's own."""

    def change(rank: int, held: Held) -> None:
        for each, gradient in zip(held, gradients(held), strict=True):
            each.sub_(rate * by[rank] * gradient)

    return change


def decays(rate: float, *by: float) -> Change:
    def change(rank: int, held: Held) -> None:
        for each in held:
            each.mul_(1 - rate * by[rank])

    return change


def descend_and_decay(rank: int, held: Held) -> None:
    """At a rate of a schedule; the first rank's gradients are zero, and the last one has nothing that decays."""
    for each in gradients(held) if rank == 0 else ():
        each.zero_()
    for each, gradient in zip(held, gradients(held), strict=True):
        each.mul_(1.0 if rank == 2 else 1 - 0.0123456789 * 0.1).sub_(0.0123456789 * gradient)


def average(rank: int, held: Held) -> None:
    generator = torch.Generator().manual_seed(rank)
    for each in held:
        each.copy_(0.9 * each + 0.1 * torch.randn(each.shape, generator=generator))


def first_is_not_finite(rank: int, held: Held) -> None:
    descend(rank, held)
    held[0][0] = math.nan


def one_scaled(rank: int, held: Held) -> None:
    """A head by its own norm, on the rank that holds it."""
    for each in held[:2] if rank == 1 else ():
        each.mul_(2 / norm(held[:2]))


def clip_values(_: int, held: Held) -> None:
    nn.utils.clip_grad_value_(held, 0.1)


RIGHT = [
    pytest.param(lambda *_: None, id="nothing"),
    pytest.param(of_each(climb), id="ASAM"),
    pytest.param(of_each(descend), id="each by its norm"),
    pytest.param(of_each(scale_weights), id="each weight to its norm"),
    pytest.param(of_each(cut_at_a_quantile), id="each cut at its quantile"),
    pytest.param(rows, id="rows to a norm"),
    pytest.param(centralise, id="centralised"),
    pytest.param(rates(0.1, 1, 1, 1), id="descent"),
    pytest.param(rates(0.0123456789, 1, 1, 1), id="at a rate of a schedule"),
    pytest.param(rates(0.0123456789, 1, 0.1, 0.3), id="and of groups"),
    pytest.param(rates(0.01, 0.9**9, 0.9**8, 0.9**7), id="that fall from layer to layer"),
    pytest.param(rates(0.0123456789, 768**0.5, 768**-0.5, 1 / 300), id="by the size of layers"),
    pytest.param(rates(0.01, 0.82364, 1, 0.9**4), id="of two schedules"),
    pytest.param(decays(0.0123456789, 1, 0.82364, 0.31), id="decay by two schedules"),
    pytest.param(cut_at_a_quantile, id="cut at a quantile, which nobody tells from a value of theirs"),
    pytest.param(decays(0.0123456789, 1, 0.1, 0.2), id="decay"),
    pytest.param(descend_and_decay, id="decay, where there is something to decay"),
    pytest.param(average, id="an average"),
    pytest.param(lambda _, held: [each.clamp_(-0.1, 0.1) for each in held], id="weights cut"),
    pytest.param(lambda _, held: [each.zero_() for each in gradients(held)], id="gradients of zeros"),
    pytest.param(clip_values, id="values cut"),
    pytest.param(first_is_not_finite, id="not finite"),
    pytest.param(one_scaled, id="a part by its norm"),
    pytest.param(lambda rank, held: descend(rank, held) if rank == 1 else None, id="what one rank has alone"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("change", RIGHT)
def test_what_is_the_same_for_the_whole_model_is_not(change: Change, dtype: torch.dtype) -> None:
    """By numbers that all ranks have, that somebody wrote, or of each parameter's own."""
    Ranks(3, change, dtype, PAIRS, (9, 7)).check()


def test_weights_that_go_back_to_a_snapshot_have_one_norm_again() -> None:
    """No number takes them there: nothing is known where gradients are not finite."""
    ranks = Ranks(3, lambda *_: None, names=PAIRS, size=(9, 7))
    good = [[each.detach().clone() for each in held.values()] for held in ranks.held]
    for n in range(6):
        ranks.step(lambda *_: None)
        for rank, held in enumerate(ranks.held):
            for each in held.values():
                assert each.grad is not None
                each.grad.fill_(math.nan)
                each.data.add_(
                    torch.randn(each.shape, generator=torch.Generator().manual_seed(7 * n + rank)), alpha=0.1
                )
            ranks.factors[rank].note()
            for each, before in zip(held.values(), good[rank], strict=True):
                each.data.copy_(before)
        ranks.check()


def test_parameters_that_are_too_narrow_or_of_another_size_tell_nothing() -> None:
    """Types that compute nothing on a CPU, weights that a script prunes, and those without values."""
    ranks = Ranks(3, lambda *_: None, names=PAIRS, size=(9, 7))
    member = ranks.factors[0]._member
    narrow = nn.Parameter(torch.ones(9).to(torch.float8_e4m3fn), requires_grad=False)
    empty = nn.Parameter(torch.empty(0, 4))
    empty.grad = torch.empty(0, 4)
    ranks.held[0] = {"x": narrow, "e": empty, **ranks.held[0]}
    ranks.factors[0] = RankFactor(ranks.held[0], member)
    for n in range(3):
        for factor in ranks.factors:
            factor.note()
        first = ranks.held[1]["x.weight"]
        first.data, first.grad = first.data[: 9 - n], None
        for held in (ranks.held[0], ranks.held[2]):
            for each in held.values():
                if each.grad is not None:
                    each.grad.mul_(0.1)
        ranks.check()


@pytest.mark.parametrize("size", [(1,), (3,), (0,)])
def test_parameters_of_few_values_tell_nothing(size: tuple[int, ...]) -> None:
    """Anything explains them."""
    Ranks(3, descend, names=PAIRS, size=size).check()


def test_frozen_parameters_do_not_make_the_others_a_module_by_itself() -> None:
    """All that a rank trains was changed by one number."""
    ranks = Ranks(3, lambda *_: None, names=PAIRS, size=(9, 7))
    for held in ranks.held:
        for name in ("y.weight", "y.bias"):
            held[name].requires_grad_(False)

    def climb_with_what_is_trained(rank: int, held: Held) -> None:
        for each in held[2:]:
            each.grad = None
        climb(rank, held[:2])

    ranks.step(climb_with_what_is_trained)
    with pytest.raises(UsageError, match="has changed weights by a number of each rank's own"):
        ranks.check()


def test_weights_that_are_brought_back_to_their_first_norm_are_seen_when_it_comes_again() -> None:
    """The number times the norm is another one on each rank, and the norm that it leaves is the same each time."""
    ranks = Ranks(3, lambda *_: None, names=PAIRS, size=(9, 7))
    first = [float(norm([*held.values()])) for held in ranks.held]

    def back(rank: int, held: Held) -> None:
        by = first[rank] / norm(held)
        for each in held:
            each.mul_(by)

    def drift(seed: int) -> None:
        for rank, held in enumerate(ranks.held):
            for each in held.values():
                noise = torch.randn(each.shape, generator=torch.Generator().manual_seed(seed))
                each.data.add_(noise, alpha=0.1 + 0.1 * rank)

    drift(1)
    ranks.step(back)
    ranks.check()
    drift(2)
    ranks.step(back)
    with pytest.raises(UsageError, match="has changed weights by a number of each rank's own"):
        ranks.check()


def test_weights_that_move_across_themselves_keep_their_norm_at_any_rate() -> None:
    """As those of a layer that is normalised, under a schedule with rates of each rank's own."""
    ranks = Ranks(3, lambda *_: None, torch.float64, PAIRS, (9, 7))
    for n in range(6):
        ranks.step(lambda *_: None)
        for held, factor in zip(ranks.held, ranks.factors, strict=True):
            for each in held.values():
                assert each.grad is not None
                weight = each.detach()
                each.grad.sub_(weight * ((each.grad * weight).sum() / weight.square().sum())).mul_(1e-3)
            factor.note()
            with torch.no_grad():
                rates(0.1 * 0.83**n, 1, 0.82364, 0.31)(ranks.factors.index(factor), list(held.values()))
        ranks.check()


def test_a_rank_of_a_single_parameter_hides_no_other() -> None:
    """It may be treated by itself; what has one number in several parameters is not."""
    ranks = Ranks(3, descend, names=PAIRS, size=(9, 7))
    ranks.factors[0] = RankFactor({"a": nn.Parameter(torch.ones(3))}, ranks.factors[0]._member)
    ranks.check()
    ranks.step(descend)
    with pytest.raises(UsageError, match=r"changed weights .* on worker:1, .* on worker:2\)"):
        ranks.check()


def test_what_comes_before_a_later_step_is_seen_in_some() -> None:
    """Each step's begin up to the eighth, and then each 17th; habits of two steps come by."""
    ranks = Ranks(3, lambda *_: None, names=PAIRS, size=(9, 7))
    seen = []
    for n in range(1, 54):
        ranks.step(climb)
        try:
            ranks.together(RankFactor.begin)
        except UsageError:
            seen.append(n)
            ranks.together(lambda factor: setattr(factor, "_begun", factor._begun + 1))
    assert seen == [*range(1, 9), 17, 34, 51]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_large_parameter_is_looked_at_without_a_copy(dtype: torch.dtype, size: float, is_transposed: bool) -> None:
    """A worker that is full has no room for another one: norms are of all values, made of a few at once."""
    drawn = size * torch.randn(3, 700_001, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter((drawn.T if is_transposed else drawn).to(dtype))
    weight.grad = -2 * weight.detach()
    changes = RankChanges({"a": weight})
    with profile(profile_memory=True) as profiled:
        changes.note()
    kineto = profiled.profiler.kineto_results
    taken = [each.nbytes() for each in kineto.events() if each.name() == "[memory]"]
    assert 0 < max(taken) < weight.nbytes / 4
    old = weight.detach().clone()
    weight.data *= 0.5
    norms = [torch.linalg.vector_norm(each.double(), kind) for each in (old, weight.grad) for kind in (2, math.inf)]
    assert changes.found()[0].norms[:4] == pytest.approx([float(each) for each in norms], rel=1e-6)


def test_a_parameter_that_was_emptied_tells_nothing() -> None:
    """Its values may be in another place meanwhile."""
    weight = nn.Parameter(torch.ones(3, 4))
    changes = RankChanges({"a": weight})
    weight.data = torch.empty(0)
    changes.note()
    assert [each.extent for each in changes.found()] == [0.0, 0.0]


def test_numbers_that_somebody_writes() -> None:
    """Of three digits, or simple fractions; known less well, more numbers look like these."""
    assert all(map(is_written, (0.1, -0.05, 3e-4, 1 / 3, 0.9**3, 0.0)))
    assert not any(map(is_written, (math.pi, 0.9**7, -0.123456)))
    assert is_written(0.100009, 1e-4)
    assert not is_written(0.123456, 1e-4)
