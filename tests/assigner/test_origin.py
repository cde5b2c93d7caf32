"""The profile behind a plan."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from assigner.errors import FormatError, UsageError
from assigner.formats.plan import Plan, ProfileReference, profile_path
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Stage


def _plan(path: str, data: bytes) -> Plan:
    return Plan(
        workload=WorkloadReference(name="w", entry="", fingerprint="", batch_size=2, dtype="float32", optimizer="SGD"),
        micro_batches=1,
        micro_batch_size=2,
        stages=(Stage("worker:0/cpu", ("a",)),),
        profile=ProfileReference(path, hashlib.sha256(data).hexdigest()),
    )


def test_it_is_found_beside_the_plan_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan names its profile as it was typed; it is found there, and beside the plan when both have moved."""
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "p.json").write_bytes(b"{}")
    plan = _plan("long/gone/p.json", b"{}")
    assert profile_path(plan, tmp_path / "moved" / "plan.json") == tmp_path / "moved" / "p.json"
    monkeypatch.chdir(tmp_path / "moved")
    assert profile_path(_plan("p.json", b"{}"), Path("plan.json")) == Path("p.json")


def test_a_changed_profile_is_refused_by_name(tmp_path: Path) -> None:
    """Prices from other measurements than the plan's are not given as the plan's."""
    (tmp_path / "p.json").write_bytes(b"{ }")
    with pytest.raises(FormatError, match="has changed since"):
        profile_path(_plan("p.json", b"{}"), tmp_path / "plan.json")
    assert profile_path(_plan("p.json", b"{}"), tmp_path / "plan.json", tmp_path / "p.json") == tmp_path / "p.json"


def test_a_missing_profile_is_asked_for(tmp_path: Path) -> None:
    """Without the file, or without a name of it, the error asks for --profile."""
    with pytest.raises(UsageError, match="not there"):
        profile_path(_plan("p.json", b"{}"), tmp_path / "plan.json")
    with pytest.raises(UsageError, match="does not say"):
        profile_path(replace(_plan("p.json", b"{}"), profile=None), tmp_path / "plan.json")
