"""Losses over the batch, and rows in lists, on two ranks."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed


@pytest.mark.long
def test_two_ranks_are_the_plain_loop(forked, tmp_path):
    """Losses, gradients and weights to 1e-10, with and without rematerialisation, full and ragged batches."""
    for found in forked.found("rows.py", tmp_path, ranks=2, before="loss_cases:capture_all"):
        assert len(found) == 8
        assert {case: each for case, each in found.items() if not max(each.values()) < 1e-10} == {}
