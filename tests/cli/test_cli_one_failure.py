"""A run that fails says why, once: the cause, its worker, its line, and the exit code of the contract."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

START = "import assigner, os, signal, sys, time\nrank = int(os.environ['RANK'])\n"


def call(*command):
    """Run it to its end."""
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def run(folder, programs):
    """Called with a script and flags: `assigner run` of it on two ranks, none of which has to import torch."""

    def start(script, *flags):
        (folder / "s.py").write_text(START + script)
        return call(programs / "assigner", *flags, "run", "solved.json", "--", "s.py")

    return start


@pytest.mark.long
def test_a_rank_that_raises_is_told_once(folder):
    """The frames of the script, then the worker, the error and its line, and where the whole traceback is kept.

    In processes that nobody has forked.
    """
    (folder / "s.py").write_text(f"{START}if rank == 1:\n    raise ValueError('no such data')\ntime.sleep(600)\n")
    done = call(sys.executable, "-m", "assigner_cli", "run", "solved.json", "--", "s.py")
    assert (done.returncode, done.stdout) == (7, "")
    *shown, error, hint = done.stderr.splitlines()
    assert [line.strip() for line in shown] == [
        "Traceback (most recent call last):", f'File "{folder / "s.py"}", line 4, in <module>',
        "raise ValueError('no such data')", "ValueError: no such data",
    ]  # fmt: skip
    assert error == "error: worker:1: ValueError: no such data (s.py:4)"
    kept = re.fullmatch(r"hint: (\S+) has the traceback; -v shows it", hint)
    assert kept is not None
    assert "raise ValueError" in Path(kept[1]).read_text()
    shutil.rmtree(Path(kept[1]).parent)


@pytest.mark.long
def test_verbose_shows_the_traceback_of_the_rank(run):
    """-v prints it above the error, once."""
    done = run("if rank == 1:\n    raise ValueError('no such data')\ntime.sleep(600)\n", "-v")
    assert done.returncode == 7
    assert done.stderr.count("Traceback") == 1
    shutil.rmtree(Path(done.stderr.rpartition("hint: ")[2].split()[0]).parent)
    assert "raise ValueError('no such data')" in done.stderr


def test_what_every_rank_says_is_said_once(run):
    """A use that is wrong on all ranks keeps its exit code, 2, and its hint."""
    done = run("raise assigner.UsageError('the batch has 7 rows', hint='make it 8')\n")
    assert (done.returncode, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert re.fullmatch(r"error: worker:[01]: the batch has 7 rows", error)
    assert hint == "hint: make it 8"


def test_a_rank_that_is_killed_is_named_with_its_signal(run):
    """What other ranks notice of it is a consequence, and not said."""
    done = run("if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)\n")
    assert done.returncode == 7
    assert done.stderr.splitlines()[0] == "error: worker:1 was killed by SIGKILL"
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.long
def test_interrupting_a_run_is_130(folder):
    """Ctrl-C ends the ranks, with a line and no traceback."""
    (folder / "s.py").write_text(START + "open(f'up{rank}', 'w').close()\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "assigner_cli", "run", "solved.json", "--", "s.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        end = time.monotonic() + 600
        while not all((folder / f"up{rank}").exists() for rank in range(2)) and time.monotonic() < end:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(timeout=600) == 130
    assert said.splitlines()[-1] == "error: interrupted"
    assert "KeyboardInterrupt" not in said


def test_a_rank_that_ends_before_it_joins_is_named(run):
    """Exit code 0 is no success of a rank for which another waits."""
    join = (
        "from assigner.machine.launchedrank import launched\n"
        "from assigner.runtime.messages.rendezvous import join_group\n"
        "if rank == 1:\n    sys.exit(0)\n"
        "try:\n    join_group(launched(), 600.0)\nexcept assigner.AssignerError as error:\n"
        "    sys.exit(assigner.tell(error))\n"
    )
    done = run(join)
    assert done.returncode == 7, done.stderr
    error, hint = done.stderr.splitlines()
    assert re.fullmatch(rf"error: worker:1:?( it)? {LEFT}.*", error)
    assert hint.startswith("hint: every rank ")


LEFT = "ended with exit code 0 while others waited for it"
CLOSED = r"its pipeline was closed, or its script came to an end, at \S+leaving\.py:\d+, while worker:"


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "way", "code", "message"),
    [
        (0, "normally", 2, CLOSED),
        pytest.param(1, "abruptly", 7, LEFT, marks=pytest.mark.sweep),
        pytest.param(0, "before", 7, LEFT, marks=pytest.mark.sweep),
        pytest.param(1, "normally", 2, CLOSED, marks=pytest.mark.sweep),
        pytest.param(0, "early", 2, CLOSED, marks=pytest.mark.sweep),
    ],
)
def test_a_rank_that_leaves_is_named(folder, programs, root, rank, way, code, message):
    """Whichever it is, and however it leaves without an error: before it joins, in the middle, or a step too soon."""
    script = [str(root / "tests" / "runs" / "leaving.py"), str(folder), str(rank), way]
    done = call(programs / "assigner", "run", "solved.json", "--", *script)
    error, hint = done.stderr.splitlines()
    assert done.returncode == code
    assert re.fullmatch(rf"error: worker:{rank}:?( it)? {message}.*", error)
    assert hint.startswith("hint: every rank ")


@pytest.mark.long
def test_a_fork_of_a_rank_has_no_part_in_the_run(folder, programs, root):
    """Its calls are refused, and the run goes on when it ends within the pipeline's block."""
    script = [str(root / "tests" / "runs" / "leaving.py"), str(folder), "1", "by a fork"]
    done = call(programs / "assigner", "run", "solved.json", "--", *script)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr


def test_a_run_on_one_host_listens_to_that_host_alone(run, root):
    """The store and what the ranks open to each other: nothing of it can be reached from another host."""
    listen = (
        "from assigner.machine.launchedrank import launched\n"
        "from assigner.runtime.messages.rendezvous import join_group\n"
        f"sys.path.append({str(root / 'tests')!r})\nfrom listening import listening\n"
        "join_group(launched(), 60.0)\nfound = listening() + listening(int(os.environ['MASTER_PORT']))\n"
        "os.write(1, f'{sorted(set(found))}\\n'.encode())\nos.environ['ASSIGNER_SECRET']\n"  # whole: ranks share a pipe
    )
    done = run(listen)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['127.0.0.1']"] * 2
