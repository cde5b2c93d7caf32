"""How the check compares two tensors, and lets its two sides take turns."""

from __future__ import annotations

import math

import pytest
import torch

from assigner.verification.comparing import Difference, Item, Moment, align, difference
from assigner.verification.workers import Turns


def test_turns_end_where_everybody_waits():
    """Two that wait for each other are an error, not a hang; so is one that fails."""
    turns = Turns()
    with pytest.raises(RuntimeError, match="waits for a message"):
        turns.run([lambda: turns.take("a message")] * 2)
    with pytest.raises(ZeroDivisionError):
        turns.run([lambda: turns.take("a message"), lambda: 1 / 0])
    assert turns.run([lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_difference_is_told_with_its_scale(dtype):
    """Also beside infinities and what is no number; where only one side has these it is infinite."""
    one = torch.tensor([1.0, -8.0, 2.0], dtype=dtype)
    two = torch.tensor([1.0, -8.0, 4.0], dtype=dtype)
    odd = torch.tensor([math.inf, math.nan], dtype=dtype)
    moment, item = Moment("step"), Item("gradient", "a", "a.weight")
    assert difference(moment, item, one, one.clone()) is None
    assert difference(moment, item, None, None) is None
    assert difference(moment, item, odd, odd.clone()) is None
    for left, right in ((one, two), (torch.cat([one, odd]), torch.cat([two, odd]))):
        found = difference(moment, item, left, right)
        assert (found.largest, found.scale, found.counts(), found.counts(1.0)) == (2.0, 8.0, True, False)
    assert difference(moment, item, one, None).largest == 8.0
    assert difference(moment, item, one, one[:2]).largest == math.inf
    assert difference(moment, item, one, torch.tensor([1.0, math.nan, 2.0], dtype=dtype)).largest == math.inf
    assert difference(moment, item, one.long(), two.long() + 1).largest == math.inf
    assert str(item) == "the gradient of a.weight"


@pytest.mark.parametrize("value", [1e-3, math.nan, math.inf])
def test_a_difference_is_found_wherever_it_lies(value):
    """Tensors are compared in parts; the last part is a short one."""
    one = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0)).T
    moment, item = Moment("step"), Item("gradient", "a", "a.weight")
    for row, column in ((0, 0), (40_000, 1), (70_000, 2)):
        two = one.clone()
        two[row, column] += value
        found = difference(moment, item, one, two)
        expected = float((one - two).abs().amax()) if math.isfinite(value) else math.inf
        assert (found.largest, found.counts()) == (expected, True)


def test_gradients_that_differ_by_rounding_are_applied_as_equal_ones():
    """AdamW would make two learning rates of 1e-12 beside -1e-12; what differs by more stays as it is."""

    class Held:
        def __init__(self, *values):
            self.values = torch.tensor(values)

        def look(self, _):
            return self.values

    item = Item("gradient", "a", "a.weight")
    for tiny, same in ((-1e-12, True), (-1e-3, False)):
        plain, other = Held(1.0, 1e-12), Held(1.0, tiny)
        found = difference(Moment("step"), item, plain.values, other.values)
        assert isinstance(found, Difference)
        align(plain, other, [found])
        assert torch.equal(plain.values, other.values) == same
