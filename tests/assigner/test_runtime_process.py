"""A process joins its run, or leaves nothing behind."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch.distributed as dist
from builders import make_plan, make_profile
from single_rank import be_only_rank

from assigner.errors import UsageError
from assigner.runtime.ranks.membership import Membership
from assigner.runtime.ranks.process import join_run


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan, math.inf, 1e12, None])
def test_a_time_out_that_is_none_is_refused(timeout_s: float) -> None:
    """Every wait has an end; what the libraries below cannot count would be an error of theirs, or no wait at all."""
    plan = make_plan(make_profile(work=[1e-3], slowness=[1.0]), [(0, ["p0"])])
    with pytest.raises(UsageError, match=r"timeout_s=.*: expected seconds, more than 0"):
        join_run(plan, timeout_s)


def test_a_run_of_too_few_ranks_leaves_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how many there are; the group that was made to find out is gone."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0, 1.0])
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"])])
    be_only_rank(monkeypatch)
    with pytest.raises(UsageError, match="needs 2 ranks, and the run has 1"):
        Membership(plan, timeout_s=30.0)
    assert not dist.is_initialized()
    alone = replace(plan, stages=(replace(plan.stages[0], partitions=("p0", "p1")),))
    be_only_rank(monkeypatch)
    member = Membership(alone, timeout_s=30.0)
    assert dist.is_initialized()
    member.close()
    assert not dist.is_initialized()
