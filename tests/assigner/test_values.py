"""Values of every kind between partitions of one worker: the result is the plain model's."""

from __future__ import annotations

import pytest
from odd_values import CASES
from workloads import Reference, graph_of, make_plan

from assigner import Pipeline

EXACT = 1e-10


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_any_value_between_partitions(name, remat):
    """Loss, gradients and weights are those of the plain model, for whole and ragged batches."""
    made = CASES[name]()
    reference = Reference(made)
    with Pipeline(made, make_plan(made), remat=remat, graph=graph_of(made)) as pipeline:
        for n, rows in enumerate((8, 5)):
            batch = made.make_batch(rows, n)
            assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
        assert reference.distance(pipeline.named_parameters()) < EXACT
