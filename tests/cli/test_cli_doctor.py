import json

import pytest
from assigner_cli import machine


@pytest.fixture
def no_torch_process(monkeypatch):
    """Doctor's question to torch answered at once."""
    answer = {"backends": ["gloo"], "cuda": None, "devices": []}
    monkeypatch.setattr(machine, "_ask_torch", lambda: answer)
    monkeypatch.setattr(machine, "_nvidia_smi", list)
    return answer


def test_everything_here(assigner, no_torch_process):
    """The machine that runs the tests has what is needed, and doctor says so."""
    result = assigner("doctor")
    assert result.exit_code == 0
    for text in ("python", "torch", "PuLP", "HiGHS", "core", "GiB", "gloo", "ready"):
        assert text in result.stdout


def test_json(assigner, no_torch_process):
    """--json has one finding each, with its value."""
    data = json.loads(assigner("doctor", "--json").stdout)
    found = {each["what"]: each for each in data["findings"]}
    assert data["ready"] is True
    assert found["processor"]["value"]["cores"] >= 1
    assert found["memory"]["value"]["total_bytes"] > 1e8


def test_missing_package_says_how_to_get_it(assigner, no_torch_process, monkeypatch):
    """What is missing comes with the command that gets it."""
    real = machine._version
    monkeypatch.setattr(machine, "_version", lambda name: None if name == "highspy" else real(name))
    out = assigner("doctor").stdout
    assert "HiGHS: pip install highspy" in out
    assert "missing: HiGHS" in out


def test_accelerator_that_torch_does_not_see(no_torch_process, monkeypatch):
    """A driver that lists a device which torch lacks is worth a note and a remedy."""
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: ["NVIDIA H200"])
    finding = next(each for each in machine.examine() if each.what == "accelerators")
    assert finding.state == "note"
    assert "CUDA" in finding.remedy


def test_the_lab_is_worth_a_note_where_it_cannot_work(no_torch_process, monkeypatch):
    """Nothing else needs it, so its lack is no reason to call a machine not ready."""
    from assigner import lab
    from assigner.lab import Lack

    found = {}
    for feature in ("latency", "all"):
        lack = Lack("a thing", "get it", feature)
        monkeypatch.setattr(lab, "lacks", lambda lack=lack: (lack,))
        found[feature] = next(each for each in machine.examine() if each.what == "lab")
    assert (found["latency"].state, found["latency"].remedy) == ("ok", "")
    assert (found["all"].state, found["all"].remedy) == ("note", "get it")
    assert "a thing" in found["all"].detail


def test_control_group_limits_are_read(monkeypatch):
    """What a control group allows stands beside what the machine has."""
    monkeypatch.setattr(machine, "memory_limit", lambda: 2**30)
    monkeypatch.setattr(machine, "core_limit", lambda: 0.5)
    assert machine._memory().value["limit_bytes"] == 2**30
    assert machine._cores().value["limit"] == 0.5
