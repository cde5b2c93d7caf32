"""Which process a rank ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from assigner.launch import launcherwatch
from assigner.launch.failurereport import VARIABLE
from assigner.launch.launcherwatch import began, end_with, end_with_launcher, is_left_behind, launcher_of, own_mark

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The processes that are watched; no thread is started for them."""
    found: set[int] = set()
    monkeypatch.setattr(launcherwatch, "_watched", set())
    monkeypatch.setattr(launcherwatch.threading.Thread, "start", lambda thread: found.add(thread._args[0]))
    return found


def test_ranks_of_this_program_have_the_launcher_that_is_named() -> None:
    """Whatever other variables there are."""
    assert launcher_of({VARIABLE: "77 /tmp/x", "RANK": "0", "WORLD_SIZE": "2"}) == 77


def test_torchruns_ranks_have_the_nearest_process_without_a_rank() -> None:
    """Pods set RANK for torchrun itself, too: what counts is a variable of its own."""
    words = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    nearest = os.getppid() if os.getppid() > 1 else None
    assert launcher_of({**words, "TORCHELASTIC_RUN_ID": "x"}) == nearest


def test_ranks_that_were_started_by_hand_have_none() -> None:
    """A shell may end before what it has started."""
    assert launcher_of({"RANK": "0", "WORLD_SIZE": "2"}) is None
    assert launcher_of({}) is None
    assert launcher_of({"RANK": "many", "TORCHELASTIC_RUN_ID": "x"}) is None


def test_what_a_rank_starts_may_outlive_the_run(monkeypatch: pytest.MonkeyPatch, watched: set[int]) -> None:
    """It inherits the launcher's variable; the launcher's own children are ranks, and whoever joins the run is."""
    above = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    monkeypatch.setenv(VARIABLE, f"{above} /tmp/x")
    end_with_launcher(joins=False)
    assert watched == set()
    end_with_launcher(joins=True)
    assert watched == ({above} if above else set())
    monkeypatch.setenv(VARIABLE, f"{os.getppid()} /tmp/x")
    end_with_launcher(joins=False)
    assert os.getppid() in watched


def test_a_process_that_is_not_above_is_not_watched(watched: set[int]) -> None:
    """In a container the launcher's number may be that of any other process."""
    with subprocess.Popen(["sleep", "60"]) as other:
        end_with(other.pid)
        other.kill()
    end_with(1 << 22)
    assert watched == set()


def test_a_process_is_known_by_its_number_and_its_beginning() -> None:
    """Numbers come again; one that nobody has buried is gone."""
    assert began(os.getpid()) == began(os.getpid()) != ""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert began(process.pid) == ""
        assert is_left_behind(f"{process.pid}-1")
    assert [is_left_behind(mark) for mark in (own_mark(), f"{os.getpid()}-1", "kept")] == [False, True, False]
