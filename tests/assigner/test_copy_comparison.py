"""Copies of a weight on several workers: what they round in unlike ways is no difference, what a script does is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from assigner.errors import UsageError
from assigner.runtime.stages.copies import _GroupCopies


class Beside:
    """A group of two in one process: what both have begun is compared when one waits."""

    workers, direct, device = ("worker:0/gpu", "worker:1/cpu"), False, torch.device("cpu")

    def __init__(self) -> None:
        self.other: Beside = self
        self.given = torch.empty(0)
        self.handed_out: dict[int, torch.Tensor] = {}

    def begin_largest(self, given: torch.Tensor) -> Beside:
        self.given = given
        return self

    def wait(self) -> torch.Tensor:
        return torch.maximum(self.given, self.other.given)

    def hand_out(self, given: torch.Tensor, source: str) -> Any:
        """The first one of the pair is asked first."""
        assert source == self.workers[0]
        self.handed_out[len(self.handed_out)] = given
        return SimpleNamespace(wait=lambda: self.other.handed_out.get(len(self.handed_out) - 1, given))


class Pair:
    """Two copies under AdamW, of which the second one rounds in its own way."""

    def __init__(self, dtype: torch.dtype, *, is_divided: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.eps = torch.finfo(dtype).eps
        start = 0.05 * torch.randn(32, 32, dtype=dtype, generator=self.generator)
        self.start, self.copies = start, [nn.Parameter(start.clone()) for _ in range(2)]
        groups: list[Any] = [Beside(), Beside()]
        groups[0].other, groups[1].other = groups[1], groups[0]
        pairs = zip(groups, self.copies, strict=True)
        self.compared = [_GroupCopies(group, {"weight": each}, is_divided=is_divided) for group, each in pairs]
        self.optimizers = [torch.optim.AdamW([each], lr=1e-3) for each in self.copies]
        self.means = [each.detach().clone() for each in self.copies]

    def step(self, *, alike: bool = False) -> None:
        gradient = torch.randn(self.start.shape, dtype=self.start.dtype, generator=self.generator)
        for copy, compared, optimizer in zip(self.copies, self.compared, self.optimizers, strict=True):
            copy.grad = gradient.clone()
            compared.note_gradients()
            optimizer.step()
        if not alike:
            self._round(self.copies[1].detach())
        self._round(self.optimizers[1].state[self.copies[1]]["exp_avg"])
        for copy, mean in zip(self.copies, self.means, strict=True):
            mean.mul_(0.99).add_(copy.detach(), alpha=0.01)

    def _round(self, tensor: torch.Tensor) -> None:
        sides = torch.randint(-1, 2, tensor.shape, generator=self.generator)
        tensor.add_((tensor.abs() * self.eps / 2 * sides).to(tensor.dtype))

    def compare(self) -> None:
        for each in self.compared:
            each.begin()
        for each in self.compared:
            each.end()

    def put(self, values: list[torch.Tensor]) -> None:
        for copy, value in zip(self.copies, values, strict=True):
            copy.detach().copy_(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_allowed_for(dtype):
    """Over hundreds of steps, where their means are evaluated in between, and where a checkpoint comes back."""
    pair, differed = Pair(dtype), False
    for n in range(300):
        pair.step()
        differed |= not torch.equal(*pair.copies)
        if n % 7 == 0:
            kept = [each.detach().clone() for each in pair.copies]
            pair.put(pair.means)
            pair.compare()
            pair.put(kept)
        if n == 200:
            pair.put([pair.start, pair.start])
        pair.compare()
    assert differed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_drifts_by_rounding_is_set_to_the_first_ones(dtype):
    """Rounding that goes one way alone takes copies no further apart than a few dozen times the type's resolution."""
    pair, widest = Pair(dtype), 0.0
    for _ in range(400):
        pair.step(alike=True)
        pair.copies[1].detach().mul_(1 + pair.eps)
        pair.compare()
        largest = float(pair.copies[0].detach().abs().max())
        widest = max(widest, float((pair.copies[0] - pair.copies[1]).detach().abs().max()) / largest)
    assert sum(len(each.group.handed_out) for each in pair.compared) >= 4  # type: ignore[attr-defined]
    assert widest <= 1.5 * max(min(64 * pair.eps, 1 / 64), 4 * pair.eps)


@pytest.mark.parametrize("what", ["weight", "gradient", "state"])
def test_what_one_has_changed_is_found(what):
    """A weight and a gradient at once, an optimizer's state by the update behind it."""
    pair = Pair(torch.float32)
    for _ in range(20):
        pair.step()
        pair.compare()
    if what == "weight":
        pair.copies[0].detach().mul_(0.99)
    elif what == "gradient":
        assert pair.copies[0].grad is not None
        pair.copies[0].grad.mul_(0.99)
        for each in pair.compared:
            each.note_gradients()
    else:
        pair.optimizers[0].state.clear()
        pair.step()
    with pytest.raises(UsageError, match="have come apart, by"):
        pair.compare()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_finite_number_is_compared(odd):
    """Where all copies have it they are alike, and its neighbours are compared; on one of them it is found."""
    pair = Pair(torch.float32)
    for copy in pair.copies:
        copy.detach()[0, 0] = odd
    pair.compare()
    pair.copies[0].detach()[:, 0].mul_(0.99)
    with pytest.raises(UsageError, match=r"have come apart, by \d"):
        pair.compare()
    pair = Pair(torch.float32)
    pair.copies[1].detach()[0, 0] = odd
    with pytest.raises(UsageError, match="hold copies of weight, and these have come apart, by inf"):
        pair.compare()
    pair = Pair(torch.float32)
    pair.step()
    assert pair.copies[0].grad is not None
    pair.copies[0].grad[0, 0] = odd
    pair.compared[0].note_gradients()
    with pytest.raises(UsageError, match="copies of the gradient of weight, and these have come apart, by inf"):
        pair.compare()


@pytest.mark.parametrize("is_divided", [False, True])
def test_all_want_gradients_or_none_does(is_divided):
    """The micro-batches of one that wants none would be missing in the sum; the hint tells of divided groups."""
    pair = Pair(torch.float32, is_divided=is_divided)
    for copy in pair.copies:
        copy.requires_grad_(False)
    pair.compare()
    pair.copies[0].requires_grad_(True)
    with pytest.raises(
        UsageError, match="copies of weight, and its requires_grad is True on one of them and False on another"
    ) as caught:
        pair.compare()
    assert ("go by pipeline.named_parameters()" in (caught.value.hint or "")) is is_divided
