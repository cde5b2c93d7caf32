"""Models and habits that nobody here wrote: each trains as in plain torch, or is refused in words where it may be."""

from __future__ import annotations

import itertools

import pytest
from foreign.case import Case, all_cases
from foreign.harness import Judge, Setting


@pytest.mark.parametrize("each", all_cases(), ids=lambda each: f"{each.group}: {each.name}")
def test_one_worker_trains_as_plain_torch(each: Case):
    """Whole batches and two micro-batches, nothing recomputed and everything, in training and in evaluation."""
    judge = Judge(each)
    for micro_batches, remat in itertools.product((1, 2), ("none", "all")):
        setting = Setting(1, micro_batches, remat)
        verdict = judge.verdict(setting)
        assert each.allows(verdict.kind, verdict.words), f"{setting}: {verdict.kind}: {verdict.words}"
