"""What only a process of its own shows: what is imported, encodings, pipes that close, colours."""

import os
import subprocess
import sys

import pytest


def run(*args, code=None, **env):
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "assigner_cli", *args]
    return subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, **env}, check=False)


HEAVY = "torch", "numpy", "pulp", "highspy", "transformers"
SEARCH = (
    "assigner.solver.search",
    "assigner.solver.problem",
    "assigner.runtime",
    "assigner.profiler",
    "assigner.marking",
)
LIBRARY = "assigner.plan", "assigner.profile", "assigner.report", "assigner.cost", "assigner.simulate"


@pytest.mark.parametrize(
    ("line", "never"),
    [
        ("--help", (*HEAVY, *SEARCH, *LIBRARY, "pydantic", "rich.progress", "rich.markdown")),
        ("solve --help", (*HEAVY, *SEARCH, *LIBRARY, "pydantic", "rich.progress", "rich.markdown")),
        ("--version", (*HEAVY, *SEARCH, *LIBRARY, "pydantic", "rich.console")),
        ("schema plan", (*HEAVY, *SEARCH, "assigner.report")),
        ("show profile.json", (*HEAVY, *SEARCH, "pydantic", "rich.progress")),
        ("show solved.json", (*HEAVY, *SEARCH, "pydantic", "rich.progress")),
        ("compare equal.json solved.json", (*HEAVY, *SEARCH, "pydantic", "rich.progress")),
        ("simulate solved.json --profile profile.json", (*HEAVY, *SEARCH)),
        ("report solved.json --profile profile.json -o r.html", HEAVY),
        ("export solved.json --profile profile.json --to dot", HEAVY),
        ("lab --from profile.json --here profile.json", (*HEAVY, *SEARCH)),
        ("solve profile.json -o new.json --baseline equal", ("torch", "transformers", "assigner.runtime")),
        ("solve profile.json -o new.json --micro-batches 4 --schedule gpipe", ("torch", "assigner.runtime")),
    ],
)
def test_a_command_imports_only_what_it_needs(folder, line, never):
    """Each command's own list of what it leaves alone: start-up time is imports."""
    code = (
        "import sys\nfrom assigner_cli import main\n"
        f"sys.argv = ['assigner', *{line.split()!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"found = set({never!r}) & set(sys.modules)\nassert not found, found\n"
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


def test_help_is_named_after_the_program(folder):
    """However it is started: the script, or `python -m assigner_cli`."""
    assert b"Usage: assigner show" in run("show", "--help").stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")  # noqa: PTH110
@pytest.mark.parametrize("line", ["show solved.json", "show profile.json --json", "--help", "schema plan"])
def test_a_full_disk_is_an_error(folder, line):
    """What could not be written is not a success: exit code 2, with the reason and a next step."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        command = [sys.executable, "-m", "assigner_cli", *line.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: cannot write the result: No space left on device",
        "hint: make room, or write to another place",
    ]


@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0)])
def test_a_closed_stream_is_like_a_null_device(folder, closed, code):
    """Whoever closes stdout or stderr wants none of it."""
    line = f"{sys.executable} -m assigner_cli show solved.json {closed}"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_device_is_never_replaced(folder):
    """-o /dev/null --force would put a file in its place."""
    done = run("solve", "profile.json", "-o", "/dev/null", "--force", "--baseline", "equal")
    assert done.returncode == 2
    assert b"/dev/null is no regular file" in done.stderr


def test_progress_is_no_noise_in_a_pipe_with_forced_colours(folder):
    """FORCE_COLOR colours what is printed, and makes no terminal of a pipe."""
    done = run("solve", "profile.json", "-o", "x.json", "--time-limit", "5", FORCE_COLOR="1")
    assert done.returncode == 0
    assert b"left" not in done.stderr
