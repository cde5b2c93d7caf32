"""Values of every kind, other graphs and eval on two ranks: what tests/runs/values.py found."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import pytest
from forked_ranks import cases_of
from odd_values import CASES

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

pytestmark = pytest.mark.distributed

EXACT = 1e-9


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank of tests/runs/values.py found, of the cases that this run of the tests has."""
    cases = cases_of(request, "case")
    before = f"odd_values:capture_all {shlex.join(cases)}"
    return forked.found("values.py", tmp_path_factory.mktemp("values"), *cases, ranks=2, before=before)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, "other shapes"])
def test_equal_to_the_plain_model(ranks, case):
    """Loss, gradients and outputs of every rank are the plain model's, in training and in eval between the steps."""
    for found in ranks:
        assert found[case]
        assert max(found[case].values()) < EXACT


def test_training_does_not_notice_evaluations(ranks):
    """With dropout, losses are to the last bit the same with evaluations between the steps."""
    assert [found["dropout after eval"] for found in ranks] == [{"loss": 0.0}] * 2


def test_inference_alone(ranks):
    """The rank that asks gets the output, wherever it is made; no rank holds a parameter that wants a gradient."""
    for found in ranks:
        assert max(found["inference"].values()) < EXACT
