import json
import shutil
from pathlib import Path

import pytest
from assigner_cli.app import app
from typer.testing import CliRunner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def solved_unet(root, tmp_path_factory):
    """A folder with the U-Net's profile and a plan of it that has one worker a stage and one stage a worker."""
    made = tmp_path_factory.mktemp("unet")
    shutil.copy(root / "profiles" / "cpu2-unet" / "profile.json", made)
    asked = ["--schedule", "one-stage", "--max-replicas", "1", "--no-what-if"]
    solved = CliRunner().invoke(app, ["solve", str(made / "profile.json"), "-o", str(made / "plan.json"), *asked])
    assert solved.exit_code == 0, solved.stderr
    return made


@pytest.fixture
def unet(solved_unet, folder, monkeypatch):
    """That plan, in the current folder, with its profile beside it."""
    monkeypatch.chdir(solved_unet)
    return "plan.json"


@pytest.mark.parametrize("to", ["device-map", "pipelining-schedule", "pipelining-modules", "torchgpipe"])
def test_a_shared_stage_is_refused_with_what_to_ask_for(assigner, folder, root, monkeypatch, to):
    """The sample plan of the U-Net has both workers on one stage: what solve has to be asked for is in the hint."""
    monkeypatch.chdir(root / "profiles" / "cpu2-unet")
    refused = assigner("export", "plan.json", "--to", to)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "several workers, worker:0/cpu, worker:1/cpu" in refused.stderr
    assert "assigner solve --schedule one-stage --max-replicas 1" in refused.stderr


@pytest.mark.parametrize("to", ["device-map", "pipelining-schedule", "pipelining-modules", "dot"])
def test_stdout_has_the_export_and_nothing_else(assigner, unet, to):
    """Notes go to stderr, so that the output can be piped; the profile is found by the plan's hash of it."""
    result = assigner("export", unet, "--to", to)
    assert result.exit_code == 0
    assert result.stdout.endswith("\n")
    assert "note: " not in result.stdout
    if to in ("device-map", "pipelining-modules"):
        assert json.loads(result.stdout)
        assert "note: " in result.stderr


def test_a_file_is_written_and_not_replaced(assigner, unet, tmp_path):
    """-o writes the same text; --force replaces it."""
    out = str(tmp_path / "schedule.csv")
    assert assigner("export", unet, "--to", "pipelining-schedule", "-o", out).stdout == ""
    assert Path(out).read_text() == assigner("export", unet, "--to", "pipelining-schedule").stdout
    again = assigner("export", unet, "--to", "pipelining-schedule", "-o", out)
    assert (again.exit_code, again.stdout) == (2, "")
    assert "--force replaces it" in again.stderr
    assert assigner("export", unet, "--to", "pipelining-schedule", "-o", out, "--force").exit_code == 0


def test_json_holds_content_and_notes(assigner, unet):
    """One object, whichever the format."""
    data = json.loads(assigner("export", unet, "--to", "pipelining-schedule", "--json").stdout)
    assert (data["kind"], data["to"]) == ("export", "pipelining-schedule")
    assert data["content"].startswith("0F0,")
    assert "worker:1/cpu, worker:0/cpu" in data["notes"][0]


def test_quiet_leaves_the_notes_out(assigner, unet):
    """-q: results and errors."""
    assert assigner("-q", "export", unet, "--to", "device-map").stderr == ""


@pytest.mark.long
def test_the_workload_gives_exact_names_and_what_it_prints_is_no_result(assigner, unet, tmp_path):
    """With the model at hand no entry stands for the rest, since everything is in a partition.

    With --json stdout is one object, whatever the user's file says as it is loaded and built.
    """
    noisy = tmp_path / "noisy.py"
    noisy.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "from dataclasses import replace\n"
        "import unet\n"
        "print('import')\n"
        "def workload():\n"
        "    made = unet.workload()\n"
        "    return replace(made, model=lambda: print('built') or made.model())\n"
    )
    result = assigner("export", unet, "--to", "device-map", "--workload", f"{noisy}:workload", "--json")
    made = json.loads(result.stdout)
    assert made["kind"] == "export"
    names = ["down.0", "down.1", "down.2", "bottom", "up.0", "up.1", "up.2", "head"]
    assert list(made["content"]) == names
    assert {"import", "built"} <= set(result.stderr.split())


@pytest.mark.parametrize(
    ("code", "line", "words"),
    [
        (2, "export solved.json", "--to"),
        (2, "export solved.json --to weather", "'weather'"),
        (2, "export solved.json --to dot", "does not say which profile"),
        (2, "export solved.json --to dot --profile nowhere.json", "nowhere.json"),
        (2, "export solved.json --to dot --profile profile.json --workload x.py:f", "--workload means nothing for dot"),
        (2, "export solved.json --to torchgpipe --profile profile.json --all", "--all means nothing for torchgpipe"),
        (2, "export solved.json --to device-map --profile profile.json --workload x.py:f", "x.py: no such file"),
        (2, "export solved.json --to dot --profile profile.json -o no/where.dot", "no"),
        (5, "export profile.json --to dot", "expected 'plan'"),
        (2, "export solved.json --to torchgpipe --profile profile.json", "are on 2: host0, host1"),
        (2, "export solved.json --to device-map --profile profile.json", "are on 2: host0, host1"),
    ],
)
def test_wrong_uses(assigner, folder, code, line, words):
    """Each gives its exit code, an error of at most three lines, and nothing on stdout."""
    result = assigner(*line.split())
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) <= 3
    assert "hint: " in result.stderr
