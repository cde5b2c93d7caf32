"""The name where ranks meet: what does not resolve is said with its source, and pods wait for theirs."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from assigner.errors import UsageError
from assigner.launch import shutdown
from assigner.launch.shutdown import wait_for_name
from assigner.machine.launchedrank import Launched
from assigner.runtime.messages.rendezvous import job_store


class Clock:
    """A clock that a pause moves on, and a name that is known from some time on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known_s: float) -> None:
        self.now_s, self.known_s = 0.0, known_s
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self.pause)
        monkeypatch.setattr(socket, "getaddrinfo", self.look)
        monkeypatch.setattr(shutdown, "_POD", "TEST_POD")

    def pause(self, seconds: float) -> None:
        self.now_s += seconds

    def look(self, *_: Any) -> list[Any]:
        if self.now_s < self.known_s:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []


def test_a_wrong_name_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what has named it; a name server has a moment to answer."""
    clock = Clock(monkeypatch, known_s=1000.0)
    with pytest.raises(UsageError, match=r"host 'barn', where the ranks meet, is unknown on .*; SLURM_X=barn names it"):
        wait_for_name("barn", source="SLURM_X=barn", limit_s=300.0)
    assert clock.now_s <= 6.0
    slow = Clock(monkeypatch, known_s=2.0)
    wait_for_name("barn", source="SLURM_X=barn", limit_s=300.0)
    assert slow.now_s == 2.0


def test_a_pod_waits_for_another_one_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name appears when it is started."""
    clock = Clock(monkeypatch, known_s=100.0)
    monkeypatch.setenv("TEST_POD", "10.0.0.1")
    wait_for_name("trainer-0.trainer", source="MASTER_ADDR", limit_s=300.0)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "'trainer-0.trainer'" in said[0]
    assert "MASTER_ADDR names it" in said[0]
    clock.known_s, clock.now_s = 1000.0, 0.0
    with pytest.raises(UsageError, match="trainer-0"):
        wait_for_name("trainer-0.trainer", source="MASTER_ADDR", limit_s=300.0)


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        ({"MASTER_ADDR": "nowhere.invalid"}, "MASTER_ADDR names it"),
        ({"SLURM_STEP_NODELIST": "nowhere[01-02].invalid"}, r"SLURM_STEP_NODELIST=nowhere\[01-02\].invalid names it"),
    ],
)
def test_ranks_say_who_has_named_the_host(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], source: str
) -> None:
    """The run's store is not asked for."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Clock(monkeypatch, known_s=1000.0)
    with pytest.raises(UsageError, match=source):
        job_store(Launched("srun", "SLURM_PROCID", 1, 2, local_ranks=1), 60.0)
