"""Completion: what is offered, and that bash, zsh and fish put it on the line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from assigner_cli import completion
from assigner_cli.app import app
from typer.main import get_command

GROUP = get_command(app)
WORKERS = ["worker:0/cpu", "worker:1/cpu"]


def offered(*words):
    return [value for value, _ in completion.candidates(GROUP, list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["sol"], ["solve"]),
        (["-q", "sch"], ["schedule", "schema"]),
        (["solve", "profile.json", "--pi"], ["--pin"]),
        (["solve", "profile.json", "--pin", "p"], [f"p{n}=" for n in range(6)]),
        (["solve", "profile.json", "--pin", "p0="], [f"p0={name}" for name in WORKERS]),
        (["solve", "profile.json", "--pin", "p0=worker:0", "--pin", "p1=worker:1"], ["p1=worker:1/cpu"]),
        (["solve", "profile.json", "--pin=p5"], ["--pin=p5="]),
        (["solve", "profile.json", "--together", "p1,p"], ["p1,p0", "p1,p2", "p1,p3", "p1,p4", "p1,p5"]),
        (["solve", "profile.json", "--only", ""], WORKERS),
        (["solve", "profile.json", "--reserve", "worker:1"], ["worker:1/cpu="]),
        (["solve", "profile.json", "--solver", ""], ["highs", "cbc"]),
        (["solve", "profile.json", "--never-remat", "p3"], ["p3"]),
        (["schema", ""], ["profile", "plan", "trace"]),
        (["show", "profile.json", "--qu"], ["--quiet"]),
        (["solve", "-q", "profile.json", "--only", ""], WORKERS),
        (["solve", "profile.json", "--pin", "--verbose", "p0="], [f"p0={name}" for name in WORKERS]),
        (["solve", "profile.json", "--no-color", "--pin=p0="], [f"--pin=p0={name}" for name in WORKERS]),
        (["--show-completion", ""], ["bash", "zsh", "fish"]),
        (["--install-completion", "f"], ["fish"]),
    ],
)
def test_names_and_flags_are_offered(folder, words, found):
    """Commands, flags, choices, partitions and workers of the profile on the line."""
    assert offered(*words) == found


@pytest.mark.parametrize(
    "words",
    [
        ["show", ""],
        ["solve", "prof"],
        ["solve", "profile.json", "-o", "p"],
        ["solve", "nowhere.json", "--pin", ""],
        ["solve", "profile.json", "--gap", ""],
        ["run", "solved.json", "--", "tr"],
        ["nothing", ""],
    ],
)
def test_files_are_left_to_the_shell(folder, words):
    """Nothing is offered where a file is meant, or where nothing is known; a file that is missing is no error."""
    assert offered(*words) == []


def test_functions_of_a_workload_are_offered(folder):
    """Behind FILE.py: its functions, without running it."""
    Path("w.py").write_text("raise SystemExit\ndef workload(): ...\ndef _inner(): ...\nclass Model: ...\n")
    assert offered("profile", "w.py:") == ["w.py:workload"]


@pytest.fixture
def home(folder, monkeypatch):
    """A home without settings, and `assigner` on the path."""
    home = folder / "home"
    home.mkdir()
    (home / "bin").mkdir()
    script = home / "bin" / "assigner"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m assigner_cli "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    return home


def shell(*command, text=""):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=600, check=False)


BASH = """
source ~/.bashrc
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}
_assigner assigner 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("assigner sol", ["solve"]),
        ("assigner solve profile.json --pin p0=", WORKERS),
        ("assigner solve profile.json --pin p0=worker:1", ["1/cpu"]),
        ("assigner solve 'profile.json' --only worker:", ["0/cpu", "1/cpu"]),
        ("assigner show ", [""]),
    ],
)
def test_bash_completes_behind_equals_and_colon(assigner, home, line, found):
    """The installed function, in bash: it replaces what follows the last `=` or `:` alone."""
    assert assigner("--install-completion", "bash").exit_code == 0
    done = shell("bash", "--norc", "-c", BASH.format(line=line))
    assert done.stdout.splitlines() == found, done.stderr


def test_fish_completes_with_descriptions(assigner, home):
    """fish finds the file in its own folder and shows what each flag does; files where nothing is offered."""
    assert assigner("--install-completion", "fish").exit_code == 0
    ask = (
        "complete --do-complete 'assigner solve profile.json --pin p0=worker:1'; complete --do-complete 'assigner sol'"
    )
    done = shell("fish", "-c", ask)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["p0=worker:1/cpu", "solve"], done.stderr
    assert "Place the partitions" in done.stdout
    assert "profile.json" in shell("fish", "-c", "complete --do-complete 'assigner show prof'").stdout


def test_zsh_completes(assigner, home):
    """zsh, driven through its own terminal module: the line is completed as by a TAB."""
    assert assigner("--install-completion", "zsh").exit_code == 0
    drive = (
        "zmodload zsh/zpty; zpty z zsh -f -i; zpty -w z 'PS1=; autoload -Uz compinit; compinit -u; source ~/.zshrc'; "
        "zpty -w -n z $'assigner solve profile.json --pin p0=worker:1\\t'; "
        "zpty -r -m z line '*worker:1/cpu*'; print -r -- $line; zpty -d z"
    )
    done = shell("zsh", "-f", "-c", drive)
    assert "worker:1/cpu" in done.stdout, done.stdout + done.stderr


def test_installing_twice_changes_nothing_more(assigner, home):
    """One line in .bashrc, behind what stood there; the files are named."""
    (home / ".bashrc").write_text("alias ll='ls -l'")
    first = assigner("--install-completion", "bash")
    text = (home / ".bashrc").read_text()
    assert text.startswith("alias ll='ls -l'\nsource ")
    assert first.stdout == ""
    assert "completion.bash" in first.stderr
    assert assigner("--install-completion", "bash").exit_code == 0
    assert (home / ".bashrc").read_text() == text


@pytest.mark.parametrize("name", completion.SCRIPTS)
def test_show_completion_prints_the_script_and_nothing_else(assigner, name):
    """So that it can be put elsewhere."""
    result = assigner("--show-completion", name)
    assert (result.stdout, result.stderr) == (completion.SCRIPTS[name], "")


def test_the_shell_is_found_or_asked_for(assigner, monkeypatch):
    """Without a name the running shell counts; an unknown one is a usage error that lists those it knows."""
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("zsh", "/bin/zsh"))
    assert assigner("--show-completion").stdout == completion.SCRIPTS["zsh"]
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("tcsh", "/bin/tcsh"))
    result = assigner("--show-completion")
    assert result.exit_code == 2
    assert "bash | zsh | fish" in result.stderr
