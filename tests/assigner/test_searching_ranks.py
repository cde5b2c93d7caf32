"""Two networks against each other and optimizers with closures, on two ranks: what tests/runs/searching.py found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

pytestmark = pytest.mark.distributed

EXACT = 1e-9


@pytest.fixture(scope="module")
def ranks(forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of tests/runs/searching.py found."""
    return forked.found("searching.py", tmp_path_factory.mktemp("searching"), ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("case", ["across", "apart, remat", "micro-batches", "a plan for the other phase"])
def test_adversaries_are_those_of_the_plain_script(ranks, case):
    """Losses, weights and running statistics after four batches: two optimizers there, one with two groups here."""
    for found in ranks:
        assert max(found[case].values()) < EXACT


@pytest.mark.parametrize("rank", [0, 1])
def test_lbfgs_where_one_rank_has_all_parameters(ranks, rank):
    """Losses on both ranks and the weights are those of torch's own LBFGS, by step and by a closure of the script."""
    for found in ranks:
        search = found[f"search on rank {rank}"]
        assert max(search["loss"], search["weights"]) < EXACT
        assert search["updates"] == 3


def test_closures_where_two_ranks_have_parameters(ranks):
    """An optimizer of torch's own calls one once, on both; LBFGS is refused with the way out."""
    for found in ranks:
        assert (found["closures"]["given"], found["closures"]["moved"]) == ("True", "True")
        assert "LBFGS.step needs a closure" in found["closures"]["refused"]
        assert "solve --max-workers 1" in found["closures"]["hint"]
