"""Wrong uses: each gives the right exit code, an error of at most three lines, and nothing on stdout."""

import json

import pytest


@pytest.fixture
def broken(folder):
    """Files that are wrong in one way each."""
    text = (folder / "profile.json").read_text()
    (folder / "cut.json").write_text(text[: len(text) // 2])
    (folder / "nan.json").write_text(text.replace('"forward_s": 0.008', '"forward_s": NaN', 1))
    (folder / "version.json").write_text(text.replace('"format_version": "1.0"', '"format_version": "7.0"'))
    (folder / "text.json").write_bytes(b"\xff\xfe\x00")
    (folder / "trace.json").write_text('{"kind": "trace"}')
    document = json.loads(text)
    document["edges"].append({**document["edges"][0], "source": "p3", "target": "p0", "output": 9})
    (folder / "cycle.json").write_text(json.dumps(document))
    plan = json.loads((folder / "solved.json").read_text())
    plan["stages"][0]["partitions"][0] = "nobody"
    (folder / "strange.json").write_text(json.dumps(plan))
    return folder


CASES = [
    (2, "frobnicate", "frobnicate"),
    (2, "show", "FILE"),
    (2, "show nowhere.json", "nowhere.json"),
    (2, "show .", "directory"),
    (5, "show cut.json", "cut.json: not JSON"),
    (5, "show nan.json", "measurements[1].forward_s: NaN"),
    (5, "show version.json", "format_version: 7.0"),
    (5, "show cycle.json", "cycle: p0 -> p1 -> p2 -> p3 -> p0"),
    (5, "show text.json", "UTF-8"),
    (5, "show trace.json", "trace"),
    (2, "show profile.json --json=yes", "--json"),
    (2, "show profile.json extra", "extra"),
    (2, "compare", "PLAN"),
    (2, "compare equal.json", "equal.json"),
    (2, "compare equal.json nowhere.json", "nowhere.json"),
    (5, "compare equal.json profile.json", "profile"),
    (2, "compare equal.json solved.json --json --md", "--md"),
    (5, "compare equal.json strange.json", "'nobody'"),
    (2, "simulate solved.json", "--profile"),
    (5, "simulate profile.json --profile profile.json", "expected 'plan'"),
    (5, "simulate solved.json --profile solved.json", "expected 'profile'"),
    (5, "simulate strange.json --profile profile.json", "nobody"),
    (2, "schema", "KIND"),
    (2, "schema weather", "'weather'"),
    (2, "doctor now", "now"),
    (2, "solve", "PROFILE"),
    (2, "solve profile.json", "output"),
    (2, "solve nowhere.json -o x.json", "nowhere.json"),
    (5, "solve solved.json -o x.json", "expected 'profile'"),
    (5, "solve cut.json -o x.json", "cut.json"),
    (5, "solve nan.json -o x.json", "NaN"),
    (5, "solve cycle.json -o x.json", "cycle"),
    (2, "solve profile.json -o equal.json", "equal.json exists"),
    (2, "solve profile.json -o .", "folder"),
    (2, "solve profile.json -o no/where.json", "no"),
    (2, "solve profile.json -o x.json --micro-batches some", "'some'"),
    (2, "solve profile.json -o x.json --micro-batches 3", "3 does not divide"),
    (2, "solve profile.json -o x.json --micro-batches 0", "'0'"),
    (2, "solve profile.json -o x.json --remat sometimes", "'sometimes'"),
    (2, "solve profile.json -o x.json --schedule 1f2b", "'1f2b'"),
    (2, "solve profile.json -o x.json --solver gurobi", "'gurobi'"),
    (2, "solve profile.json -o x.json --gap wide", "'wide'"),
    (2, "solve profile.json -o x.json --gap 2", "gap"),
    (2, "solve profile.json -o x.json --time-limit 0", "--time-limit: 0.0"),
    (2, "solve profile.json -o x.json --seed -1", "seed"),
    (2, "solve profile.json -o x.json --pin p0", "'p0'"),
    (2, "solve profile.json -o x.json --pin p0=worker:9", "worker:9"),
    (2, "solve profile.json -o x.json --pin nobody=worker:0", "'nobody'"),
    (2, "solve profile.json -o x.json --pin p0=worker:0 --pin p0=worker:1", "worker:1"),
    (2, "solve profile.json -o x.json --bogus", "--bogus"),
]


@pytest.mark.parametrize(("code", "line", "words"), CASES, ids=[line for _, line, _ in CASES])
def test_wrong_use(assigner, broken, code, line, words):
    """The error names what is wrong in one to three lines, the exit code its class; no file is touched."""
    before = {path.name: path.read_bytes() for path in broken.iterdir()}
    result = assigner(*line.split())
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert 1 <= len(result.stderr.splitlines()) <= 3
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == before


def test_verbose_shows_where(assigner):
    """-v adds the traceback, in front of the command or behind it."""
    for line in ("-v show nowhere.json", "show nowhere.json -v"):
        result = assigner(*line.split())
        assert result.exit_code == 2
        assert "Traceback" in result.stderr
        assert result.stdout == ""


def test_bug_is_one_line_and_a_hint(assigner, monkeypatch):
    """An exception that nobody expected is called a bug: exit code 1, no traceback without -v."""

    def explode(_):
        raise RuntimeError("boom")

    monkeypatch.setattr("assigner.plan.load_plan", explode)
    result = assigner("show", "solved.json")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "error: a bug in assigner: RuntimeError: boom"
    assert len(result.stderr.splitlines()) == 2


def test_interrupt_is_130(assigner, monkeypatch):
    """Ctrl-C ends with exit code 130 and a line."""

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("assigner.plan.load_plan", interrupt)
    result = assigner("show", "solved.json")
    assert result.exit_code == 130
    assert result.stderr == "error: interrupted\n"


def test_bad_environment_variable_is_a_usage_error(assigner, monkeypatch):
    """An ASSIGNER_ variable is checked as its flag is, and the message names it."""
    monkeypatch.setenv("ASSIGNER_GAP", "wide")
    result = assigner("solve", "profile.json", "-o", "x.json")
    assert result.exit_code == 2
    assert "'wide'" in result.stderr
