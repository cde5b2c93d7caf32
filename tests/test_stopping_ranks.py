"""Signals that ask a run to stop: all ranks leave their loops at the same step, evaluate, save, and end well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from workloads import make_plan, skips

from assigner import load_weights, save_plan

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed

RUN = "run"
TORCHRUN = "torchrun"


class Started:
    """A run in a session of its own, as a terminal has it; by another python, without an import of torch for each."""

    def __init__(
        self, root: Path, folder: Path, launcher: str, number: int, *words: str, python: str | Path = sys.executable
    ) -> None:
        script = [str(root / "tests" / "runs" / "stopping.py"), str(folder), *words]
        if launcher == RUN:
            made = skips()
            save_plan(make_plan(made, [(0, ["parts.0", "parts.1"]), (1, ["parts.2", "last"])]), folder / "plan.json")
            command = ["-m", "assigner_cli", "run", str(folder / "plan.json"), "--", *script]
        else:
            name = signal.Signals(number).name
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["--signals-to-handle", name, "--shutdown-timeout", "600", *script]
        self.folder = folder
        self.process = subprocess.Popen(
            [python, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(python)}, start_new_session=True,
        )  # fmt: skip

    def wait_for_ranks(self) -> list[int]:
        """Process ids, once both ranks have asked."""
        files = [self.folder / "0", self.folder / "1"]
        until = time.monotonic() + 600
        while not all(file.exists() and file.read_text() for file in files):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.05)
        return [int(file.read_text()) for file in files]

    def end(self) -> tuple[int, str]:
        """Exit code, and what was said."""
        try:
            _, said = self.process.communicate(timeout=600)
        finally:
            self.process.kill()
        return self.process.returncode, said

    def found(self) -> list[dict[str, Any]]:
        """What the ranks wrote at the end."""
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGINT, "the group"),
        pytest.param(signal.SIGTERM, "the launcher", marks=pytest.mark.sweep),
        pytest.param(signal.SIGUSR1, "a rank", marks=pytest.mark.sweep),
    ],
)
def test_a_signal_ends_training_in_order(root: Path, programs: Path, tmp_path: Path, number: int, to: str) -> None:
    """Both ranks leave at the same step, evaluate alike and save; the launcher waits, says so, and ends with 0."""
    run = Started(
        root, tmp_path, RUN, number, python=sys.executable if to == "the group" else programs / "python"
    )  # of a forked run the group has other processes
    ranks = run.wait_for_ranks()
    if to == "the group":
        os.killpg(run.process.pid, number)
    else:
        os.kill(run.process.pid if to == "the launcher" else ranks[1], number)
    code, said = run.end()
    assert code == 0, said
    name = signal.Signals(number).name
    assert (f"{name}: the ranks are asked to stop, and have 600 s to end; once more ends them" in said) is (
        to != "a rank"
    )
    assert "Traceback" not in said
    one, other = run.found()
    assert one == other
    assert one["steps"] >= 3
    assert load_weights(tmp_path / "at the end")


@pytest.mark.long
@pytest.mark.parametrize("how", ["unasked", "stays"])
def test_ranks_that_do_not_end_in_order_are_ended(root: Path, programs: Path, tmp_path: Path, how: str) -> None:
    """A script that does not ask ends as it always did; one that takes too long is ended, and the launcher says why."""
    run = Started(root, tmp_path, RUN, signal.SIGTERM, how, python=programs / "python")
    run.wait_for_ranks()
    run.process.terminate()
    code, said = run.end()
    if how == "unasked":
        assert code == 128 + signal.SIGTERM
        assert "asked to stop" not in said
        assert said.splitlines()[-1] == "error: ended by SIGTERM, and what it had started with it"
    else:
        assert code == 7
        assert "error: the ranks had 2 s to end after SIGTERM, and took longer: ended" in said
    assert not (tmp_path / "0.json").exists()


@pytest.mark.long
def test_under_torchrun(root: Path, programs: Path, tmp_path: Path) -> None:
    """It passes on the signals that it is told to, and waits as long as it is told; its own exit code is not 0."""
    run = Started(root, tmp_path, TORCHRUN, signal.SIGUSR1, python=programs / "python")
    run.wait_for_ranks()
    os.kill(run.process.pid, signal.SIGUSR1)
    code, said = run.end()
    assert code != 0
    assert "SIGUSR1: training is asked to stop; once more ends it at once" in said
    one, other = run.found()
    assert one == other
    assert load_weights(tmp_path / "at the end")
