"""Random models under random plans: what a plan changes is speed and memory, never the result."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from drawn_combinations import MODELS_EVERY, differences, drawn_combination
from drawn_models import drawn_model
from sweeps import sweep
from workloads import Reference

from assigner.model.marking import partition_graph

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks


def equal(forked: ForkedRanks, first: int, behind: int, orders: str, *, ranks: int) -> int:
    """How many combinations of these seeds were equal, none being refused."""
    before = f"drawn_combinations:capture_all {first} {behind}"
    words = ("--seeds", str(first), str(behind), "--orders", orders)
    ends = forked.run("combinations.py", *words, ranks=ranks, before=before)
    counted = re.search(r"(\d+) equal, 0 not \[\], 0 refused", ends[0].output)
    assert counted is not None, ends[0].output
    return int(counted[1])


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("first", "behind"), sweep([(0, 3), (3, 9), *((n, n + 11) for n in range(9, 75, 11))], quick=1)
)
def test_combinations_on_three_ranks(forked, first, behind):
    """Loss, gradients and weights are the plain model's to 1e-9; no model is one that cannot be cut.

    Each seed is run in the order of a schedule, and once more in one drawn from all that can run: several stages a
    worker, some of them shared.
    """
    assert equal(forked, first, behind, "too", ranks=3) == 2 * (behind - first)


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(("first", "behind", "ranks"), [(9, 12, 2), pytest.param(42, 54, 4, marks=pytest.mark.sweep)])
def test_any_order_that_can_run_is_exact(forked, first, behind, ranks):
    """On other numbers of ranks, too."""
    assert equal(forked, first, behind, "only", ranks=ranks) == behind - first


@pytest.mark.long
def test_combinations_in_one_process(forked):
    """The same with all partitions on one worker, without a launcher."""
    assert equal(forked, 75, 81, "none", ranks=0) == 6


def test_a_wrong_result_is_found(monkeypatch):
    """A loss that is off by a millionth shows, and so does its gradient."""
    made = drawn_model(75 // MODELS_EVERY).workload
    graph = partition_graph(made)
    plain_loss = Reference.loss
    monkeypatch.setattr(Reference, "loss", lambda self, batch: plain_loss(self, batch) * (1 + 1e-6))
    found = list(differences(made, graph, drawn_combination(made, graph, 75, workers=1)))
    assert any(line.startswith("step 0: loss") for line in found)
    assert any(re.fullmatch(r"step 0: gradient of .* is .* off", line) for line in found)
