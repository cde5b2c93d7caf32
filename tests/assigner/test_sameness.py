"""A call or a batch that is another one on some rank is noticed before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assigner.errors import UsageError
from assigner.runtime.sameness import SameCall, checksum


class Ranks:
    """A member of a run; what rank 0 tells is given, or what this one has."""

    def __init__(self, first: float | None, *, rank: int = 0, transport: object = "there is one") -> None:
        self.first, self.rank, self.transport, self.at = first, rank, transport, ""
        self.told: list[float] = []

    def number_from(self, rank: int, number: float) -> float:
        assert rank == 0
        self.told.append(number)
        return number if self.first is None else self.first


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


def told(call: str, given: Any) -> float:
    """What rank 0 tells of a call."""
    ranks = Ranks(None)
    SameCall(ranks).check(call, given)
    return ranks.told[0]


@pytest.mark.parametrize(
    ("call", "other"),
    [
        ("evaluate", batch(6)), ("evaluate", (batch(8)[0][:, :4], batch(8)[1])), ("evaluate", list(batch(8))),
        ("evaluate", (batch(8)[0].double(), batch(8)[1])), ("evaluate", (*batch(8), 3)), ("step()", batch(8)),
        ("evaluate", batch(8, seed=1)),
    ],
    ids=["rows", "length", "structure", "dtype", "plain value", "another call", "values"],
)  # fmt: skip
def test_another_call_or_batch_than_that_of_rank_0(call, other):
    """Whatever it differs in, at any time: the message says who, and what this rank has; equal ones pass."""
    same = SameCall(Ranks(told("evaluate", batch(8)), rank=2))
    same.check("evaluate", batch(8))
    with pytest.raises(UsageError, match=r"worker:2 and worker:0 differ .* calls .* with float") as caught:
        same.check(call, other)
    assert "seed the sampler" in (caught.value.hint or "")


def test_one_process_compares_nothing():
    """There is nobody to differ from."""
    ranks = Ranks(None, transport=None)
    SameCall(ranks).check("evaluate", batch(8))
    assert not ranks.told
