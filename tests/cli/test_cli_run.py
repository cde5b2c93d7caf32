"""What `assigner run` says at its end."""

from dataclasses import replace
from hashlib import sha256

import pytest

from assigner.formats.plan import ProfileReference, save_plan
from assigner.formats.profile import save_profile
from assigner.launch.steptimes import StepTimes


@pytest.mark.parametrize("busy", [False, True])
def test_a_profile_of_a_busy_machine_is_told(assigner, folder, profile, solved, monkeypatch, busy):
    """Below the line of the step: it is the prediction that others' programs have made too high, not the run."""
    if busy:
        profile = replace(profile, measurements=tuple(replace(each, starved=0.4) for each in profile.measurements))
    save_profile(profile, folder / "profile.json", force=True)
    reference = ProfileReference("profile.json", sha256((folder / "profile.json").read_bytes()).hexdigest())
    save_plan(replace(solved, profile=reference), folder / "solved.json", force=True)
    monkeypatch.setattr("assigner.launch.ranks.launch", lambda *_, **__: StepTimes(solved, "plan", (0.01,) * 3))
    result = assigner("run", "solved.json", "--", "true")
    assert result.exit_code == 0, result.output
    told = (
        "warning: the profile was measured on a busy machine: other programs had up to 40 % of the time of worker:0,"
        " worker:1; on a quiet one the prediction would be lower"
    )
    assert (told in result.stderr.splitlines()) == busy
    assert "predicted" in result.stderr
