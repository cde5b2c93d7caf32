"""A call or a batch that is another one on some rank is noticed before anything is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.runtime.sameness import SameCall, checksum, described


class Own(torch.Tensor):
    """A tensor of a class of its own."""


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


class Boxes:
    """An object that keeps tensors its own way."""

    def __init__(self, *values: float) -> None:
        self.values, self.me = torch.tensor(values), self


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(3), np.arange(3) + 1), (np.array(["a", None]), np.array(["b", None])), (["cat"], ["dog"]),
        ([{"boxes": torch.ones(2, 4)}], [{"boxes": torch.zeros(2, 4)}]), (b"a", b"b"), (Boxes(1.0), Boxes(2.0)),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
         torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)),
        (pack_sequence([torch.ones(2)]), pack_sequence([torch.zeros(2)])),
        (torch.ones(2).as_subclass(Own), torch.zeros(2).as_subclass(Own)),
    ],
    ids=["array", "array of objects", "text", "dicts", "bytes", "object", "nested", "packed", "subclass"],
)  # fmt: skip
def test_what_is_no_tensor_counts(one, other):
    """Arrays, lists, objects and tensors of other classes differ where their values do, and are equal to themselves."""
    assert checksum(one) != checksum(other)
    assert checksum(one) == checksum(one)
    assert describe(one)


def describe(batch: Any) -> list[str]:
    return [described(leaf) for leaf in pytree.tree_leaves(batch)]


def test_a_long_batch_is_told_shortly():
    """The message names some leaves of a list of a thousand, and that there are more."""
    ranks = Ranks(0.0, rank=1)
    with pytest.raises(UsageError, match=r"'0', '1', .*'7', \.\.\."):
        SameCall(ranks).check("evaluate", [str(n) for n in range(1000)])


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
