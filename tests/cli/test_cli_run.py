"""What `assigner run` says at its end."""

import os
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import pytest
from workloads import make_plan, skips

from assigner import Pipeline
from assigner.errors import UsageError
from assigner.formats.plan import ProfileReference, save_plan
from assigner.formats.profile import save_profile
from assigner.launch.failurereport import VARIABLE, has_mark, leave_mark
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


@pytest.mark.distributed
@pytest.mark.parametrize("makes", [False, True])
def test_a_plan_that_no_rank_has_used_is_told(folder, programs, makes):
    """The script's own exit code stays: it may have wanted that. A process that a rank has started counts, too."""
    mark = "from assigner.launch.failurereport import leave_mark; leave_mark()"
    (folder / "s.py").write_text(
        f"import subprocess, sys\n{makes} and subprocess.run([sys.executable, '-c', {mark!r}])\n"
    )
    command = [programs / "assigner", "run", "solved.json", "--ranks", "3", "--", "s.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    unused = [
        "warning: no rank made a Pipeline: the plan was not used, and every rank ran s.py by itself",
        "hint: train with assigner.Pipeline(workload, plan): docs/porting.md goes through a script",
    ]
    first, *others = done.stderr.splitlines()
    assert first == "warning: the plan has nothing to do for worker:2: idle"
    assert [line for line in others if line in unused] == ([] if makes else unused)


def test_a_pipeline_leaves_its_mark(tmp_path, monkeypatch):
    """In the folder of the run's launcher, whoever has started the process; without one nothing is left."""
    leave_mark()
    assert not has_mark(tmp_path)
    monkeypatch.setenv(VARIABLE, f"1 {tmp_path}")
    made = skips()
    with Pipeline(made, make_plan(made)):
        assert has_mark(tmp_path)


def test_torch_is_quietened_before_it_is_loaded(assigner, monkeypatch):
    """By what the layout needs, at the earliest: later it goes on to print frames of C++ where host 0 is gone."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    found = []

    def layout(*_, **__):
        found.append(os.environ.get("TORCH_CPP_LOG_LEVEL"))
        raise UsageError("enough")

    monkeypatch.setattr("assigner_cli.run.layout", layout)
    assert assigner("run", "solved.json", "--", sys.executable).exit_code == UsageError.exit_code
    assert found == ["ERROR"]
