"""What users' code keeps beside tensors, on two ranks: as in plain torch, or refused in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

pytestmark = pytest.mark.distributed

CASES = [
    "autocast", "checkpoint", "checkpoint, one", "renormalised", "slots", "namespace", "namespace, shared",
    "global loss", "slotted loss", "slotted loss, moved", "counting optimizer", "loss with parameters", "groups",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_beside_tensors(case: str, forked: ForkedRanks) -> None:
    """A count in an object with slots, a loss that remembers at the top of its file, a norm of one group's part, ..."""
    forked.run("remembering.py", case, ranks=2)
