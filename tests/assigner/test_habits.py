"""What users' code does beside tensors, on two ranks: as in plain torch, or refused in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

pytestmark = pytest.mark.distributed

CASES = [
    "autocast", "checkpoint, one", "renormalised", "pasted", "pasted, remat", "counted",
    "read", "in eval mode", "slots", "namespace", "namespace, shared",
    "global loss", "slotted loss", "slotted loss, moved", "counting optimizer",
    "weight norm, shared", "pruned, shared", "weight norm, remat", "modes of an optimizer",
    "slow optimizer", "slow optimizer, moved", "held group, moved",
    "set on the optimizer, moved", "set on the optimizer, shared", "set on one optimizer", "read of the optimizer",
    "group taken out, moved", "noted by the optimizer, moved",
    "loss with parameters", "groups", "clipped weights",
    "world", "world, remat", "world, shared", "world of a loss", "world of an optimizer",
    "read by a loss", "read by a loss, shared", "read by a loss, moved", "read by a loss, on one",
    "tensor of a loss, moved", "moved tensor of a loss, moved",
    "loss of a trainer, shared", "loss of a trainer, moved",
    "drawn loss, shared", "trained loss", "trained loss, moved", "trained loss, shared",
    "hook", "hook, remat", "hook, shared", "hook object", "hook object, remat",
    "hook of a backward", "hook of a backward, remat",
    "function in a dict", "module in an object", "function in a dict, shared",
    "hook, moved", "outside, moved", "outside by the script, moved", "slots, moved",
    "inference mode", "inference mode, remat",
    "adaptive", "adaptive, one", "adaptive, remat", "drawn by rank", "order drawn by rank", "mask drawn by rank",
    "fraction drawn by rank", "fractions drawn by rank", "made before", "made in turn", "texts in turn",
    "operations in turn", "tables by address",
    "seeded by rank", "seeded alike", "unread head", "unread head, memory",
    "loss of a host", "lambda of a host", "helper of a host", "partial of a host", "forward of a host",
    "comment of a host", "weight of a host", "loss by name", "module by name", "default of a rank",
    "function for a rank", "function without a file",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_done_beside_tensors(case: str, forked: ForkedRanks) -> None:
    """A count in an object with slots, a loss that remembers at the top of its file, a norm of one group's part, ..."""
    forked.run("habits.py", case, ranks=2)
