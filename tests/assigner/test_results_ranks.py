"""Metrics and outputs on three ranks: what tests/runs/results.py found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from forked_ranks import cases_of

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank of tests/runs/results.py found, of the cases that this run of the tests has."""
    words = tmp_path_factory.mktemp("results"), *cases_of(request, "case")
    return forked.found("results.py", *words, ranks=3, before="metric_cases:capture_all")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpipe", "1f1b", "interleaved", "own loss", "constants", "constants, shared"])
def test_results_are_the_plain_models(ranks, case):
    """Losses, metrics, weights and outputs on every rank that gets them, under every schedule, traced and not."""
    for found in ranks:
        assert max(found[case].values()) < 1e-10


def test_outputs_of_two_ranks(ranks):
    """Metrics of micro-batches whose outputs are made on different ranks are those of the batch on all."""
    for found in ranks:
        assert found["several makers"]["metrics"] < 1e-10
        assert found["several makers"]["in training"] < 1e-10
        assert "another structure for some micro-batches" in found["several makers"]["refused"]
