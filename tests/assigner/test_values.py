"""Values of every kind between partitions of one worker: the result is the plain model's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kept import kept
from odd_values import CASES
from workloads import Reference, make_plan, pipeline_of

if TYPE_CHECKING:
    from assigner import Workload

EXACT = 1e-10


@kept
def made_of(name: str) -> Workload:
    """One object for each name, so that it is captured once."""
    return CASES[name]()


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_any_value_between_partitions(name, remat):
    """Loss, gradients and weights are those of the plain model, for whole and ragged batches."""
    made = made_of(name)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made), remat=remat) as pipeline:
        for n, rows in enumerate((8, 5)):
            batch = made.make_batch(rows, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
        assert reference.distance(pipeline.named_parameters()) < EXACT
