"""What only a process of its own shows: what is imported, encodings, pipes that close, colours."""

import os
import subprocess
import sys

import pytest


def run(*args, code=None, **env):
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "assigner_cli", *args]
    return subprocess.run(command, capture_output=True, timeout=600, env={**os.environ, **env}, check=False)


HEAVY = "torch", "numpy", "pulp", "highspy", "transformers"
SEARCH = (
    "assigner.solver.search.search",
    "assigner.solver.problem.problem",
    "assigner.runtime",
    "assigner.profiler.session",
    "assigner.model.marking",
)
LIBRARY = (
    "assigner.formats.plan",
    "assigner.formats.profile",
    "assigner.report",
    "assigner.schedule.cost",
    "assigner.schedule.simulate",
)


QUICK = *HEAVY, *SEARCH, *LIBRARY, "pydantic", "rich.progress", "rich.markdown"
SHOWN = *HEAVY, *SEARCH, "pydantic", "rich.progress"
NEVER = [
    ("--version", (*QUICK, "rich.console")),
    ("--help", QUICK),
    ("solve --help", QUICK),
    ("show profile.json", SHOWN),
    ("show solved.json", SHOWN),
    ("compare equal.json solved.json", SHOWN),
    ("lab --help", (*HEAVY, *SEARCH)),
    ("lab --check", (*HEAVY, *SEARCH)),
    ("lab --from profile.json --here profile.json", (*HEAVY, *SEARCH)),
    ("simulate solved.json --profile profile.json", (*HEAVY, *SEARCH)),
    ("report solved.json --profile profile.json -o r.html", HEAVY),
    ("export solved.json --profile profile.json --to dot", HEAVY),
    ("solve profile.json -o new.json --baseline equal", ("torch", "transformers", "assigner.runtime")),
    ("solve profile.json -o all.json --micro-batches 4 --schedule gpipe", ("torch", "assigner.runtime")),
]
ONE_AFTER_ANOTHER = """
import sys
from assigner_cli import main
for line, never in {never!r}:
    sys.argv = ["assigner", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code or line == "lab --check", (line, end.code)
    found = set(never) & set(sys.modules)
    assert not found, (line, found)
"""


@pytest.mark.long
@pytest.mark.parametrize("never", [NEVER, [("schema plan", (*HEAVY, *SEARCH, "assigner.report"))]])
def test_a_command_imports_only_what_it_needs(folder, never):
    """Each command's own list of what it leaves alone, for start-up time is imports.

    One after another in a process, those that need the least first: a command has what those before it have imported.
    """
    done = run(code=ONE_AFTER_ANOTHER.format(never=never))
    assert done.returncode == 0, done.stderr.decode()


def test_a_profile_begins_without_torch(folder):
    """The process that looks at the workload imports it; the one that started that would only make it wait."""
    code = (
        "import sys; from assigner_cli import main, profile; found = set({heavy!r}); sys.argv[1:] = {words!r}\n"
        "profile._apart = lambda *_, **__: sys.exit(str(found & set(sys.modules)))\nmain()"
    ).format(heavy=HEAVY, words=["profile", "m.py:workload", "-o", "new.json"])
    assert run(code=code).stderr.decode().strip() == "set()"


def test_importing_the_package_is_cheap(folder):
    """`import assigner_cli` alone loads neither typer nor rich."""
    done = run(
        code="import sys, assigner_cli; assert not {'typer', 'rich', 'assigner.formats.plan'} & set(sys.modules)"
    )
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
        assert process.wait(timeout=600) == 1


def test_version(folder):
    """--version prints the name and the version, on stdout."""
    assert run("--version").stdout.split()[0] == b"assigner"


def test_help_is_named_after_the_program(folder):
    """However it is started: the script, or `python -m assigner_cli`."""
    assert b"Usage: assigner show" in run("show", "--help").stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")  # noqa: PTH110
@pytest.mark.parametrize("line", ["show solved.json", "show profile.json --json", "--help"])
def test_a_full_disk_is_an_error(folder, line):
    """What could not be written is not a success: exit code 2, with the reason and a next step."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        command = [sys.executable, "-m", "assigner_cli", *line.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: cannot write the result: No space left on device",
        "hint: make room, or write to another place",
    ]


@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0)])
def test_a_closed_stream_is_like_a_null_device(folder, closed, code):
    """Whoever closes stdout or stderr wants none of it."""
    line = f"{sys.executable} -m assigner_cli show solved.json {closed}"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_device_is_never_replaced(folder):
    """-o /dev/null --force would put a file in its place."""
    done = run("solve", "profile.json", "-o", "/dev/null", "--force", "--baseline", "equal")
    assert done.returncode == 2
    assert b"/dev/null is no regular file" in done.stderr


@pytest.mark.long
def test_progress_is_no_noise_in_a_pipe_with_forced_colours(folder):
    """FORCE_COLOR colours what is printed, and makes no terminal of a pipe."""
    done = run("solve", "profile.json", "-o", "x.json", "--time-limit", "5", FORCE_COLOR="1")
    assert done.returncode == 0
    assert b"left" not in done.stderr


AT_TORCH = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("TORCH_CPP_LOG_LEVEL"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
import assigner_cli
sys.argv[1:] = {words}
assigner_cli.main()
"""


@pytest.mark.parametrize("line", ["run equal.json -- true", pytest.param("bench equal.json", marks=pytest.mark.sweep)])
def test_torch_is_quiet_where_it_is_imported_first(folder, line):
    """It reads its level then: a launcher whose store is lost had a page of C++ frames before its line."""
    done = run(code=AT_TORCH.format(words=line.split()))
    assert (done.returncode, done.stdout) == (0, b"ERROR\n"), done.stderr
