"""What only a process of its own shows: what is imported, encodings, pipes that close, colours."""

import os
import subprocess
import sys

import pytest


def run(*args, code=None, **env):
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "assigner_cli", *args]
    return subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, **env}, check=False)


@pytest.mark.parametrize(
    "line", ["--help", "solve --help", "show profile.json", "show solved.json", "compare equal.json solved.json",
             "simulate solved.json --profile profile.json", "schema plan"],
)  # fmt: skip
def test_light_commands_import_nothing_heavy(folder, line):
    """Help and the readers start without torch, PuLP and numpy."""
    code = (
        "import sys\nfrom assigner_cli import main\n"
        f"sys.argv = ['assigner', *{line.split()!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'pulp', 'numpy', 'highspy'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = run(code=code)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout


def test_solve_imports_no_torch(folder):
    """Solving needs no torch."""
    code = (
        "import sys\nfrom assigner_cli import main\n"
        "sys.argv = ['assigner', 'solve', 'profile.json', '-o', 'new.json']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = run(code=code)
    assert done.returncode == 0, done.stderr.decode()


def test_importing_the_package_is_cheap(folder):
    """`import assigner_cli` alone loads neither typer nor rich."""
    done = run(code="import sys, assigner_cli; assert not {'typer', 'rich', 'assigner.plan'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("file", ["profile.json", "solved.json"])
def test_plain_encoding_gets_plain_characters(folder, file):
    """Where stdout cannot hold our signs, bars and lines are drawn with ASCII, and columns stay aligned."""
    done = run("show", file, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode("ascii")
    assert "?" not in text
    assert "#" in text
    rows = [line for line in text.splitlines() if "|worker:" in line]
    assert len({line.index("|worker:") for line in rows}) == 1


def test_no_colour_without_a_terminal(folder):
    """A pipe gets no escape codes, and NO_COLOR none of the colours even when they are forced."""
    assert b"\x1b[" not in run("show", "solved.json").stdout
    forced = run("compare", "equal.json", "solved.json", FORCE_COLOR="1").stdout
    assert b"\x1b[" in forced
    assert b"\x1b[33m" not in run("--no-color", "show", "solved.json", FORCE_COLOR="1").stdout


def test_reader_that_leaves_is_no_error_to_print(folder):
    """A pipe that closes early ends the command without a word."""
    command = [sys.executable, "-m", "assigner_cli", "schema", "plan"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_version(folder):
    """--version prints the name and the version, on stdout."""
    assert run("--version").stdout.split()[0] == b"assigner"
