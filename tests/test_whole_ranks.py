"""The whole model's state and shared values on three ranks, one of them without a stage: one launch for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from whole_models import MODELS

if TYPE_CHECKING:
    from forked_ranks import ForkedRanks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of tests/runs/whole.py found."""
    return forked.found("whole.py", tmp_path_factory.mktemp("whole"), ranks=3, before="whole_models:capture_all")


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_the_state_is_whole_wherever_it_is_wanted(ranks: list[dict[str, Any]], name: str) -> None:
    """The plain model's on the named rank alone or on all, before and after a move; and taken over from any rank."""
    for found in ranks:
        assert [what for what, holds in found[name].items() if not holds] == []


def test_what_ranks_share_and_refuse_is_the_same_on_all(ranks: list[dict[str, Any]]) -> None:
    """Values of every rank arrive as they were; what is refused on one is refused on all, and the run goes on."""
    for rank, found in enumerate(ranks):
        decisions = found["decisions"]
        assert "value is a set; only plain values and tensors go to other ranks" in decisions.pop("refused")
        assert decisions.pop("they differ").startswith("ranks 0 and 1 have given state_dicts that differ in '")
        assert decisions.pop("none") == "no rank has given a state_dict"
        missing = decisions.pop("one misses a key")
        assert missing.startswith("" if rank == 2 else "worker:2: ")
        assert "Missing key(s)" in missing
        assert [what for what, holds in decisions.items() if holds is not True] == []
