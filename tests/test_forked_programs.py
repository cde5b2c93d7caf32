"""Programs forked from a process that has torch end as real ones do, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_ranks import reached, shared_server

import assigner

UP = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(600)
"""


def ended(python: Path | str, *words: str, text: str = "") -> tuple[int, str, str]:
    """How a program ends, what it says, and the last line of its errors."""
    done = subprocess.run([python, *words], input=text, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout, done.stderr.rpartition("\n")[0].rpartition("\n")[2]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print(sys.argv[1:], sys.stdin.read(), __name__)", "raise SystemExit(3)",
        "import sys; sys.exit('words')", "raise ValueError('words')", "import os; os.kill(os.getpid(), 9)",
        "import atexit; atexit.register(print, 'at the end'); print('before', end=' ')",
        "import assigner_cli.nothing",
    ],
)  # fmt: skip
def test_a_program_ends_as_a_real_one(programs: Path, code: str) -> None:
    """Its exit code or signal, its output, and the words of its error."""
    assert ended(programs / "python", "-c", code, "a", "b c", text="in") == ended(
        sys.executable, "-c", code, "a", "b c", text="in"
    )


def test_a_script_and_a_module_find_what_stands_beside_them(programs: Path, tmp_path: Path) -> None:
    """A script's own folder comes first, and it is the main module; `-m` takes the name from the path."""
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "script.py").write_text("import sys, beside\nprint(beside.WORD, __name__, sys.argv[1:])\n")
    assert ended(programs / "python", str(tmp_path / "script.py"), "x") == (0, "beside __main__ ['x']\n", "")
    assert ended(programs / "python", "-m", "assigner", "--version") == ended(
        sys.executable, "-m", "assigner", "--version"
    )


def test_importing_assigner_does_what_the_package_itself_does(programs: Path) -> None:
    """torch and all of assigner's modules are loaded; what a rank's variables ask for is done when it is imported."""
    code = """
import sys
loaded = all(name in sys.modules for name in ("torch", "assigner.runtime.pipeline", "assigner_cli.app"))
print(loaded, "assigner" in sys.modules, sys.excepthook is sys.__excepthook__)
import assigner, assigner.errors
print(sys.modules["assigner"] is assigner, assigner.UsageError is assigner.errors.UsageError, assigner.__spec__.origin)
print(sys.excepthook is sys.__excepthook__)
"""
    environment = {**os.environ, "ASSIGNER_CAUSES": "nowhere"}
    for variables, plain in ((os.environ, True), (environment, False)):
        done = subprocess.run(
            [programs / "python", "-c", code], env=variables, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.stdout == f"True False True\nTrue True {assigner.__file__}\n{plain}\n", done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_reaches_the_program(programs: Path, number: int, code: int) -> None:
    """It is passed on; one that cannot be, because it kills at once, ends the program too."""
    with subprocess.Popen([programs / "python", "-c", UP], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        program = Path("/proc") / started.stdout.readline().strip()
        assert program.is_dir()
        started.send_signal(number)
        assert started.wait(600) == code
    until = time.monotonic() + 600
    while program.is_dir():
        assert time.monotonic() < until
        time.sleep(0.01)


SERVER = """
import os, select, sys
from pathlib import Path
if os.fork():
    os._exit(0)
sys.path.append({tests!r})
from forked_ranks import deserted, is_up
folder = Path(sys.argv[2])
(folder / f"began {{os.getpid()}}").touch()
is_up()
while select.select([0], [], []) and not deserted(folder):
    pass
(folder / f"ended {{os.getpid()}}").touch()
"""


def test_a_server_is_there_as_long_as_somebody_wants_it(tmp_path: Path) -> None:
    """The first one starts it, the second finds it; it ends behind the last one, and is then started anew.

    However long the name of the folder is that it has.
    """
    script, folder = tmp_path / "server.py", tmp_path / ("long" * 30)
    script.write_text(SERVER.format(tests=str(Path(__file__).parent)))

    def seen(began: int, ended: int) -> bool:
        until = time.monotonic() + 600
        while (len([*folder.glob("began *")]), len([*folder.glob("ended *")])) != (began, ended):
            assert time.monotonic() < until
            time.sleep(0.01)
        return True

    for n in range(2):
        first, second = (shared_server(folder, str(script), dict(os.environ)) for _ in range(2))
        first.__enter__()
        second.__enter__()
        with socket.socket(socket.AF_UNIX) as one, reached(folder) as address:
            one.connect(address)
        assert seen(n + 1, n)
        first.__exit__(None, None, None)
        with shared_server(folder, str(script), dict(os.environ)):
            assert seen(n + 1, n)
        second.__exit__(None, None, None)
        assert seen(n + 1, n + 1)


def test_a_server_that_ends_at_its_start_is_told_with_its_words(tmp_path: Path) -> None:
    """Whoever wants it fails, not what comes to ask it later; the next one starts it anew."""
    script = tmp_path / "server.py"
    script.write_text("import os\nif os.fork():\n    os._exit(0)\nraise LookupError('what is this?')\n")
    for _ in range(2):
        with (
            pytest.raises(AssertionError, match=r"(?s)server.py ended before it was up: .*LookupError: what is this\?"),
            shared_server(tmp_path, str(script), dict(os.environ)),
        ):
            pass
