"""A training loop on a pipeline gives what the same loop gives in plain PyTorch: several stages in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from training_cases import CASES
from workloads import graph_of, make_plan

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.model.workload import Workload

EXACT = 1e-10


def three_stages(made: Workload) -> Plan:
    """On one worker, with a partition that rematerialises."""
    names = [piece.name for piece in graph_of(made).pieces]
    stages = [(0, names[:1]), (0, names[1:2]), (0, names[2:])]
    return make_plan(made, stages, schedule="interleaved", remat=names[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_plain_loop(case):
    """Losses, gradients, weights, norms, scales and learning rates are the plain loop's."""
    found = CASES[case](three_stages)
    assert found
    assert {key: value for key, value in found.items() if not value < EXACT} == {}
