"""The benchmark of infeasible instances: some of its own."""

from __future__ import annotations

import pytest

from benchmarks.solver.infeasible import instance, verdict


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 8, 5, 1, 2, 6, 7, 3])
def test_an_instance_is_refused_with_a_way_out_that_helps_as_much_as_it_says(seed: int) -> None:
    """One for each thing that is tightened."""
    wrong, ways = verdict(instance(seed)[1], all_rows=False)
    assert not wrong
    assert ways
