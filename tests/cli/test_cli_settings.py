"""Settings of every command that has them: the line, then a variable, then a file; errors name where a value stands."""

from __future__ import annotations

import re

import pytest
from assigner_cli.app import app
from assigner_cli.configuration import OF_RUNS, TABLES, of_flags
from typer.main import get_command

from assigner.launch import ranks as launch

COMMANDS = get_command(app).commands


@pytest.fixture
def started(folder, monkeypatch):
    """Layout and environment of what `assigner run` would start."""
    calls = []
    monkeypatch.setattr(launch, "launch", lambda _, *given, **__: calls.append(given))
    (folder / "s.py").write_text("")
    return calls


def test_the_tables_are_the_commands_that_take_settings():
    """A command has --config and a table, or neither."""
    takers = {name for name, each in COMMANDS.items() if any("--config" in param.opts for param in each.params)}
    assert takers == set(TABLES)


def test_line_variable_and_file_count_in_that_order(assigner, folder, started, monkeypatch):
    """Of one flag: what is on the line, else the variable, else --config or pyproject.toml, else the default."""

    def threads(*flags):
        assert assigner("run", "solved.json", *flags, "--", "s.py").exit_code == 0
        return started[-1][1]["OMP_NUM_THREADS"]

    assert threads() == "1"
    (folder / "pyproject.toml").write_text("[tool.assigner.run]\nthreads = 2\n")
    assert threads() == "2"
    (folder / "other.toml").write_text("[run]\nthreads = 3\n")
    assert threads("--config", "other.toml") == "3"
    monkeypatch.setenv("ASSIGNER_CONFIG", "other.toml")
    assert threads() == "3"
    monkeypatch.setenv("ASSIGNER_RUN_THREADS", "4")
    assert threads() == "4"
    assert threads("--threads", "5") == "5"


def test_one_file_serves_several_commands(assigner, folder, started):
    """A table of another command is left alone; a pyproject.toml that is named is read as the folder's own is."""
    (folder / "all.toml").write_text('[solve]\nsolver = "cbc"\n[run]\nmaster-port = 1234\n')
    assert assigner("run", "solved.json", "--config", "all.toml", "--", "s.py").exit_code == 0
    assert started[-1][0].port == 1234
    (folder / "here.toml").write_text("[project]\nname = 'x'\n[tool.assigner.run]\nmaster-port = 1235\n")
    assert assigner("run", "solved.json", "--config", "here.toml", "--", "s.py").exit_code == 0
    assert started[-1][0].port == 1235


@pytest.mark.parametrize(
    ("name", "value", "line", "said"),
    [
        ("ASSIGNER_GAP", "wide", "solve profile.json -o x.json", "invalid value for ASSIGNER_GAP"),
        ("ASSIGNER_GAP", "7", "solve profile.json -o x.json", "error: ASSIGNER_GAP: 7.0 is not allowed"),
        ("ASSIGNER_MAX_STEP", "-1", "solve profile.json -o x.json", "error: ASSIGNER_MAX_STEP: -1.0 is not allowed"),
        ("ASSIGNER_MICRO_BATCHES", "no", "solve profile.json -o x.json", "error: ASSIGNER_MICRO_BATCHES: 'no'"),
        ("ASSIGNER_PROFILE_WORKERS", "0", "profile w.py:f -o x.json", "invalid value for ASSIGNER_PROFILE_WORKERS"),
        ("ASSIGNER_RUN_RANKS", "1", "run solved.json -- s.py", "error: ASSIGNER_RUN_RANKS 1: the plan needs 2 ranks"),
        ("ASSIGNER_LAB_GRACE", "-1", "lab c.toml -- true", "invalid value for ASSIGNER_LAB_GRACE"),
    ],
)
def test_a_wrong_variable_is_named(assigner, started, monkeypatch, name, value, line, said):
    """The message names the variable, not a flag that nobody wrote."""
    monkeypatch.setenv(name, value)
    result = assigner(*line.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert "'--" not in result.stderr.splitlines()[0]


def test_a_flag_on_the_line_is_named_as_a_flag(assigner, monkeypatch):
    """A variable that does not count is not blamed."""
    monkeypatch.setenv("ASSIGNER_GAP", "0.5")
    result = assigner("solve", "profile.json", "-o", "x.json", "--gap", "7")
    assert "ASSIGNER_GAP" not in result.stderr


@pytest.mark.parametrize(
    ("text", "code", "said", "hint"),
    [
        ("[tool.assigner.slove]\ngap = 1\n", 5, "pyproject.toml: tool.assigner.slove", "did you mean solve?"),
        ("tool = 3\n", 5, "pyproject.toml: tool: 3 is no table", "write [tool.assigner.solve]"),
        ("[tool]\nassigner = 3\n", 5, "pyproject.toml: tool.assigner: 3 is no table", "write [tool.assigner.solve]"),
        (
            "[tool.assigner.solve]\nmicro_batches = 8\nmicro-batches = 4\n",
            5,
            "tool.assigner.solve.micro-batches: micro_batches stands there too",
            "keep one",
        ),
        ("[tool.assigner]\ngap = 1\n", 5, "pyproject.toml: tool.assigner.gap", "tables: "),
        ("[tool.assigner.solve]\ngap = 'wide'\n", 2, "pyproject.toml: tool.assigner.solve.gap", "solve --help"),
        ("[tool.assigner.solve]\ntime_limit = 0\n", 2, "pyproject.toml: tool.assigner.solve.time_limit: 0", "--help"),
        ("[tool.assigner.solve]\nseed = true\n", 5, "tool.assigner.solve.seed: true is not allowed", "as the flag"),
        ("[tool.assigner.solve]\nrobust = 1\n", 5, "tool.assigner.solve.robust: 1 is not allowed", "true or false"),
        (
            "[tool.assigner.solve]\ngap = {a = 1}\n",
            5,
            "tool.assigner.solve.gap: {'a': 1} is not allowed",
            "as the flag",
        ),
        ("[tool.assigner.solve]\npin = [[1979-05-27]]\n", 2, "1979-05-27", "embed=worker:0"),
        ("[tool.assigner.solve]\npin = {p0 = true}\n", 5, "tool.assigner.solve.pin.p0: true is not allowed", "as the"),
    ],
)
def test_a_wrong_setting_is_named_with_file_and_key(assigner, folder, text, code, said, hint):
    """Table, key, type and value: each error says where it stands, and what to do."""
    (folder / "pyproject.toml").write_text(text)
    result = assigner("solve", "profile.json", "-o", "x.json")
    assert result.exit_code == code, result.stderr
    assert said in result.stderr.splitlines()[0]
    assert hint in result.stderr.splitlines()[1]


def test_a_file_that_is_named_is_checked_too(assigner, folder):
    """`tool` as a number is an error of the file, not of this program."""
    for text in ("tool = 3\n", "[tool]\nassigner = 3\n"):
        (folder / "c.toml").write_text(text)
        result = assigner("solve", "profile.json", "-o", "x.json", "--config", "c.toml")
        assert result.exit_code == 5
        assert "3 is no table" in result.stderr


def test_other_tools_tables_are_nobodys_business(assigner, folder):
    """A pyproject.toml without settings of ours changes nothing."""
    (folder / "pyproject.toml").write_text("[project]\nname = 'x'\n[tool.ruff]\nline-length = 1\n")
    assert assigner("solve", "profile.json", "-o", "x.json", "--baseline", "equal").exit_code == 0


def test_what_is_not_this_commands_is_told_and_stops_it_not(assigner, folder, started):
    """A table of a command that reads no file, one that is like another's, a key of another's: a line for each."""
    text = "[tool.assigner]\ngap = 1\n[tool.assigner.report]\ntitle = 'x'\n[tool.assigner.slove]\nseed = 1\n"
    (folder / "pyproject.toml").write_text(text)
    result = assigner("run", "solved.json", "--", "s.py")
    assert result.exit_code == 0
    told = [line for line in result.stderr.splitlines() if line.startswith("warning: pyproject.toml: tool.assigner.")]
    names = [line.split(":")[2].strip().removeprefix("tool.assigner.") for line in told]
    assert names == ["gap", "report", "slove"]
    assert "did you mean solve?" in told[2]
    assert "warning" not in assigner("-q", "run", "solved.json", "--", "s.py").stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ASSIGNER_GPA", "ASSIGNER_GPA (did you mean ASSIGNER_GAP?)"),
        ("ASSIGNER_SOLVE_GAP", "ASSIGNER_SOLVE_GAP (did you mean ASSIGNER_GAP?)"),
        ("ASSIGNER_PIN", "ASSIGNER_PIN (--pin of solve has none)"),
        ("ASSIGNER_SHOW_AS_JSON", "ASSIGNER_SHOW_AS_JSON (--json of show has none)"),
        ("ASSIGNER_0", "ASSIGNER_0"),
    ],
)
def test_a_variable_that_nobody_reads_is_told(assigner, monkeypatch, name, told):
    """Once, on stderr, with what may have been meant; it stops nothing, and -q leaves it out."""
    monkeypatch.setenv(name, "x")
    result = assigner("show", "profile.json")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [f"warning: assigner reads no variable of this name: {told}"]
    assert assigner("-q", "show", "profile.json").stderr == ""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert assigner("show", "profile.json").stderr == ""


def test_every_variable_that_the_program_reads_is_known(assigner, root, monkeypatch):
    """Those that its sources name, and those that stand for flags, are none that nobody reads."""
    sources = [*(root / "assigner").rglob("*.py"), *(root / "cli").glob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    flags = {variable for _, _, variable in of_flags(get_command(app)) if variable}
    names = {*re.findall(r"\bASSIGNER_[A-Z_]*[A-Z]", text), *flags} - {"ASSIGNER_CAUSES"}
    assert {f"ASSIGNER_{name}" for name in OF_RUNS} - {"ASSIGNER_CAUSES"} <= names
    for name in names:
        monkeypatch.setenv(name, "")
    assert assigner("show", "profile.json").stderr == ""
