"""Backward code, hooks, checkpoints, optimizers and loops of others, against plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from foreign.judged import check_on_one_worker, usual_cases

if TYPE_CHECKING:
    from foreign.case import Case


@pytest.mark.parametrize("each", usual_cases("training"))
def test_one_worker_trains_as_plain_torch(each: Case):
    """Losses, gradients, weights and evaluations, step by step."""
    check_on_one_worker(each)
