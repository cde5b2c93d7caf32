import json

import pytest
from assigner_cli import findings
from assigner_cli.findings import Finding, doctor_data, doctor_report, is_ready

from assigner.report.sheet import Line


@pytest.fixture
def no_torch_process(monkeypatch):
    """Doctor's questions to torch and the solvers answered at once."""
    answer = {"backends": ["gloo"], "cuda": None, "devices": [], "threads": 1, "nccl": None}
    answers = {"torch": answer, "pulp": {"HiGHS": "", "CBC": ""}}
    monkeypatch.setattr(findings, "_ask", lambda package, _code: answers[package])
    monkeypatch.setattr(findings, "_nvidia_smi", list)
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
    real = findings.installed
    monkeypatch.setattr(findings, "installed", lambda name: None if name == "highspy" else real(name))
    result = assigner("doctor")
    assert result.exit_code == 2
    assert "HiGHS: pip install 'highspy>=" in result.stdout
    assert "missing: HiGHS" in result.stdout


def test_accelerator_that_torch_does_not_see(no_torch_process, monkeypatch):
    """A driver that lists a device which torch lacks is worth a note and a remedy."""
    monkeypatch.setattr(findings, "_nvidia_smi", lambda: ["NVIDIA H200"])
    finding = next(each for each in findings.examine() if each.what == "accelerators")
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
        found[feature] = next(each for each in findings.examine() if each.what == "lab")
    assert (found["latency"].state, found["latency"].remedy) == ("ok", "")
    assert (found["all"].state, found["all"].remedy) == ("note", "get it")
    assert "a thing" in found["all"].detail


def test_control_group_limits_are_read(monkeypatch):
    """What a control group allows stands beside what the machine has."""
    monkeypatch.setattr(findings, "memory_limit", lambda: 2**30)
    monkeypatch.setattr(findings, "core_limit", lambda: 0.5)
    assert findings._memory().value["limit_bytes"] == 2**30
    assert findings._cores().value["limit"] == 0.5


def test_a_version_that_is_too_old_is_missing(no_torch_process, monkeypatch):
    """The versions that count are those of assigner's own metadata."""
    real = findings.installed
    monkeypatch.setattr(findings, "installed", lambda name: "2.9.1+cpu" if name == "torch" else real(name))
    finding = next(each for each in findings.examine() if each.what == "torch")
    assert finding.state == "missing"
    assert finding.detail.startswith("2.9.1+cpu, where >=2.10")
    assert [findings._within(each, ">=2.10,<2.16") for each in ("2.10.0", "2.15.9+cu128", "2.16.0", "2.9")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_solvers_really_solve():
    """Both find the optimum of a small problem, and one that does not is told with what it said."""
    assert findings._ask("pulp", findings.ASK_SOLVERS) == {"HiGHS": "", "CBC": ""}
    found = {each.what: each for each in findings._programs({}, {"HiGHS": "OSError: no library", "CBC": "it hangs"})}
    assert (found["HiGHS"].state, found["CBC"].state) == ("missing", "note")
    assert "no library" in found["HiGHS"].detail


def test_more_threads_than_cores_are_noted(monkeypatch):
    """In a container torch may see more cores than it is given."""
    monkeypatch.setattr(findings, "allowed_cores", lambda: 1.5)
    finding = findings._threads({"threads": 64})
    assert (finding.state, finding.remedy) == ("note", "export OMP_NUM_THREADS=1")
    assert findings._threads({"threads": 1}).state == "ok"


def test_gpus_have_a_row_each(no_torch_process):
    """With the memory that is free; NCCL is worth a note where it is not there."""
    gpu = {**no_torch_process, "devices": [["NVIDIA H200", 150 * 2**30, 2**30], ["NVIDIA H200", 150 * 2**30, None]]}
    rows = {each.what: each for each in (*findings._accelerators(gpu), *findings._backends(gpu))}
    assert rows["cuda:0"].detail == "NVIDIA H200, 150 GiB, 1.00 GiB free"
    assert rows["cuda:1"].detail.endswith("in use")
    assert rows["NCCL"].state == "note"
    assert [each.state for each in findings._backends({**gpu, "backends": []})] == ["missing", "note"]


def test_what_is_optional_is_absent_and_not_missing(assigner, folder, no_torch_process, monkeypatch):
    """Its lack leaves a machine ready, and the way to get it is said."""
    monkeypatch.setenv("PATH", str(folder / "nothing"))
    real = findings.installed
    monkeypatch.setattr(findings, "installed", lambda name: None if name == "transformers" else real(name))
    result = assigner("doctor")
    assert result.exit_code == 0
    for line in ("transformers: pip install transformers", "Graphviz: apt-get (or brew) install graphviz"):
        assert line in result.stdout


def test_a_screen_of_80_columns_is_enough(assigner, no_torch_process):
    """No line is cut or runs over, and states are in one column through all tables."""
    lines = assigner("doctor", columns=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len({line.index(" ok ") for line in lines if " ok " in line}) == 1


def test_ready_machine():
    """Nothing missing: the last line says what can be done."""
    found = [Finding("python", "ok", "3.12"), Finding("CBC", "note", "not found", "apt install coinor-cbc")]
    assert doctor_report(found)[-1].text.startswith("ready")
    assert doctor_data(found)["ready"] is True


def test_missing_thing_is_marked_with_its_remedy():
    """What is missing is marked, has its remedy on a line, and is named at the end."""
    found = [Finding("python", "ok", "3.12"), Finding("torch", "missing", "not installed", "pip install torch")]
    sheet, remedy, verdict = doctor_report(found)
    assert sheet.marked == {1}
    assert [row[0].rstrip() for row in sheet.rows] == ["python", "torch"]
    assert remedy == Line("torch: pip install torch", "warning")
    assert verdict.text == "missing: torch"
    assert doctor_data(found)["ready"] is False


def test_groups_are_tables_in_one_grid():
    """What is needed, the machine, what is optional; what is absent is no reason to worry, and its remedy is plain."""
    found = [
        Finding("python", "ok", "3.12"),
        Finding("memory", "ok", "8 GiB", group="machine"),
        Finding("transformers", "absent", "Hugging Face models", "pip install transformers", group="optional"),
    ]
    needed, machine, optional, way, verdict = doctor_report(found)
    assert [sheet.title for sheet in (needed, machine, optional)] == ["what assigner needs", "this machine", "optional"]
    assert len({len(sheet.rows[0][0]) for sheet in (needed, machine, optional)}) == 1
    assert way == Line("transformers: pip install transformers")
    assert verdict.text.startswith("ready")
    assert is_ready(found)
