"""State from batch to batch over two ranks: kept where it is made, sent to where it is read, as in a plain loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

pytestmark = pytest.mark.distributed

EXACT = 1e-9


@pytest.fixture(scope="module")
def ranks(forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of tests/runs/recurrence.py found."""
    made = tmp_path_factory.mktemp("recurrence")
    return forked.found("recurrence.py", made, ranks=2, before="recurrent_cases:capture_all")


@pytest.mark.long
def test_as_a_plain_loop(ranks):
    """Under GPipe and 1F1B, all recomputed, moved, saved and loaded: losses and weights are the plain loop's."""
    for found in ranks:
        assert {case: each for case, each in found["differences"].items() if not each < EXACT} == {}
        assert len(found["differences"]) == 7


def test_only_what_another_rank_reads_is_sent(ranks):
    """A state that is made and read on one worker stays there; another goes from its maker to its reader alone."""
    first, second = (found["sent"] for found in ranks)
    case = "made on the last, read on the first"
    assert (set(second.pop(case)), first.pop(case)) == ({"worker:0/cpu"}, [])
    assert set(map(tuple, (*first.values(), *second.values()))) == {()}


def test_a_reset_on_one_rank_alone(ranks):
    """It is refused on both: one would begin anew, and the other go on."""
    assert any("reset_carried" in found["reset on one rank"] for found in ranks)
