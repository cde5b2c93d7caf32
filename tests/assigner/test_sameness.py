"""A batch that is another one on some rank is noticed before the first step."""

from __future__ import annotations

import pytest
import torch

from assigner.errors import UsageError
from assigner.runtime.sameness import SameBatch, checksum


class Ranks:
    """A member of a run of three ranks; the others' numbers are given."""

    def __init__(self, *others: float) -> None:
        self.others, self.rank, self.at, self.asked = others, 0, "", 0

    def numbers(self, mine: float) -> list[float]:
        self.asked += 1
        return [mine, *(other or mine for other in self.others)]


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5000, generator=generator), torch.zeros(rows, dtype=torch.bool)


@pytest.mark.parametrize(
    "other",
    [
        batch(8, seed=1),
        (batch(8)[0], torch.ones(8, dtype=torch.bool)),
        (batch(8)[0].double(), batch(8)[1]),
        (batch(8)[0].reshape(8, 50, 100), batch(8)[1]),
        (batch(8)[0], batch(8)[1], 3),
    ],
)
def test_values_shapes_types_and_plain_values_count(other):
    """What differs in any of them has another sum; what is equal has the same, contiguous or not."""
    assert checksum(other) != checksum(batch(8))
    assert checksum((batch(8)[0].t().contiguous().t(), batch(8)[1])) == checksum(batch(8))


def test_any_type_and_an_empty_tensor_have_a_sum():
    """bfloat16 and complex numbers have no numpy type of their own, or another size."""
    kinds = (torch.bfloat16, torch.complex64, torch.uint8, torch.int64)
    assert len({checksum(torch.ones(3, dtype=kind)) for kind in kinds}) == len(kinds)
    assert checksum(torch.empty(0, 4)) != checksum(torch.empty(0, 5))


def test_the_first_rank_that_differs_is_named():
    """The message says who, and the hint what to do."""
    with pytest.raises(UsageError, match="worker:2 trains on another batch than worker:0") as caught:
        SameBatch(Ranks(0, 1.0)).check(batch(8))
    assert "seed the sampler" in (caught.value.hint or "")


def test_only_a_new_number_of_rows_is_compared():
    """Steps with as many rows as the last one ask nobody."""
    ranks = Ranks(0, 0)
    same = SameBatch(ranks)
    for rows in (8, 8, 8, 3, 3, 8):
        same.check(batch(rows))
    assert ranks.asked == 3
