"""Random models under random plans: what a plan changes is speed and memory, never the result."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from drawn_combinations import MODELS_EVERY, differences, drawn_combination
from drawn_models import drawn_model
from workloads import Reference

from assigner.model.marking import partition_graph

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks


def equal(forked: ForkedRanks, first: int, behind: int, *flags: str, ranks: int) -> int:
    """How many combinations of these seeds were equal, none being refused."""
    before = f"drawn_combinations:capture_all {first} {behind}"
    ends = forked.run("combinations.py", "--seeds", str(first), str(behind), *flags, ranks=ranks, before=before)
    counted = re.search(r"(\d+) equal, 0 not \[\], 0 refused", ends[0].output)
    assert counted is not None, ends[0].output
    return int(counted[1])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("first", "behind"), [(0, 24), pytest.param(24, 200, marks=pytest.mark.long)], ids=["some", "the others"]
)
def test_combinations_on_three_ranks(forked, first, behind):
    """Loss, gradients and weights are the plain model's to 1e-9; no model is one that cannot be cut."""
    assert equal(forked, first, behind, ranks=3) == behind - first


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("first", "behind", "ranks"),
    [
        (0, 16, 3),
        (24, 32, 2),
        pytest.param(16, 24, 3, marks=pytest.mark.long),
        pytest.param(32, 72, 3, marks=pytest.mark.long),
        pytest.param(112, 140, 4, marks=pytest.mark.long),
        pytest.param(168, 200, 2, marks=pytest.mark.long),
    ],
)
def test_any_order_that_can_run_is_exact(forked, first, behind, ranks):
    """Several stages a worker, some of them shared, in orders drawn from all that can run."""
    assert equal(forked, first, behind, "--orders", ranks=ranks) == behind - first


def test_combinations_in_one_process(forked):
    """The same with all partitions on one worker, without a launcher."""
    assert equal(forked, 200, 216, ranks=0) == 16


def test_a_wrong_result_is_found(monkeypatch):
    """A loss that is off by a millionth shows, and so does its gradient."""
    made = drawn_model(200 // MODELS_EVERY).workload
    graph = partition_graph(made)
    plain_loss = Reference.loss
    monkeypatch.setattr(Reference, "loss", lambda self, batch: plain_loss(self, batch) * (1 + 1e-6))
    found = list(differences(made, graph, drawn_combination(made, graph, 200, workers=1)))
    assert any(line.startswith("step 0: loss") for line in found)
    assert any(re.fullmatch(r"step 0: gradient of .* is .* off", line) for line in found)
