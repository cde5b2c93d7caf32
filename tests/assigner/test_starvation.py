"""What others take of a process's processor time, from made readings: a busy machine, a quota, waits, too little."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from assigner.machine import cgroup, starvation
from assigner.machine.starvation import ProcessorTime, RanksWatch, allowed_share, processor_time, starved_share

if TYPE_CHECKING:
    from collections.abc import Mapping

START = ProcessorTime(100.0, {1: (5.0, 1.0)}, 3.0)


def after(wall_s: float, threads: Mapping[int, tuple[float, float]], throttled_s: float = 0.0) -> ProcessorTime:
    """A reading after START, by what has come to it since."""
    whole = {n: (computed + (5.0 if n == 1 else 0), queued + (1.0 if n == 1 else 0))
             for n, (computed, queued) in threads.items()}  # fmt: skip
    return ProcessorTime(100.0 + wall_s, whole, 3.0 + throttled_s)


@pytest.mark.parametrize(
    ("reading", "allowed", "starved"),
    [
        pytest.param(after(1.0, {1: (1.0, 0.0)}), 1.0, 0.0, id="it had the core to itself"),
        pytest.param(after(1.0, {1: (0.4, 0.6)}), 1.0, 0.6, id="it was queued behind others"),
        pytest.param(after(1.0, {1: (0.3, 0.0)}), 1.0, 0.0, id="it waited for messages and was not queued"),
        pytest.param(after(1.0, {1: (0.4, 0.6)}, 0.6), 0.4, 0.0, id="a quota stops it, and that is its worker"),
        pytest.param(after(1.0, {1: (0.4, 0.0)}, 0.6), 0.4, 0.0, id="a kernel that does not count that as queued"),
        pytest.param(after(1.0, {1: (0.2, 0.8)}, 0.4), 0.4, 0.5, id="others take half of what its quota leaves"),
        pytest.param(after(1.0, {1: (0.2, 0.0)}, 0.8), 1.0, 0.8, id="others in its group use up a larger quota"),
        pytest.param(after(1.0, {1: (0.5, 0.5)}), 0.5, 0.0, id="two ranks share one core"),
        pytest.param(after(1.0, {1: (0.5, 0.5), 7: (0.5, 0.0)}), 1.0, 1 / 3, id="a thread that is new counts whole"),
        pytest.param(after(1.0, {1: (0.9, 0.1), 7: (0.02, 0.6)}), 1.0, 0.1, id="its messages queue behind it"),
        pytest.param(after(1.0, {1: (0.2, 0.8), 7: (0.2, 0.8)}, 0.8), 0.4, 0.0, id="a quota stops its messages too"),
        pytest.param(after(1.0, {1: (0.1, 0.9), 7: (0.1, 0.9)}, 0.4), 0.4, 0.6875, id="and others take more than that"),
        pytest.param(after(1.0, {1: (0.01, 0.03)}), 1.0, 0.0, id="too little tells nothing"),
        pytest.param(ProcessorTime(101.0, {}, 3.0), 1.0, 0.0, id="nobody tells"),
    ],
)
def test_starvation_is_what_others_had_of_its_share(reading: ProcessorTime, allowed: float, starved: float) -> None:
    """Being queued counts, waiting does not, and what a quota takes is not taken by others."""
    assert starved_share(START, reading, allowed=allowed) == pytest.approx(starved)


def test_a_share_is_what_quota_and_ranks_leave_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """One core at most; less where a quota, or the ranks and threads of this host, leave less."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(cgroup, "core_limit", lambda: None)
    assert allowed_share(1, ranks=1) == 1.0
    assert allowed_share(1, ranks=4) == allowed_share(2, ranks=2) == 0.5
    monkeypatch.setattr(cgroup, "core_limit", lambda: 0.4)
    assert allowed_share(1, ranks=1) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("cores", "share"),
    [([[0], [1]], 1.0), ([[0, 1], [0, 1]], 0.75), ([[0, 1], [0, 1], [0, 1]], 0.5), ([[0], [0, 1], [1]], 0.5)],
)
def test_ranks_that_a_launcher_has_bound_have_their_own_cores(
    cores: list[list[int]], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the launcher's number of ranks says: those that share a core with this one count, and a quota."""
    monkeypatch.setattr(starvation, "_sharing", [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*cores[0]}, raising=False)
    monkeypatch.setattr(cgroup, "core_limit", lambda: 1.5)
    starvation.cores_shared(cores[0], cores[1:])
    assert allowed_share(1) == pytest.approx(share)
    assert starvation.slower_together(1, cores[0], cores[1:]) == pytest.approx(1 / share)


def test_the_system_tells_of_this_process_and_of_none_that_is_gone() -> None:
    """Each thread of this process has computed something, where the kernel tells; nothing is known of no process."""
    assert all(computed >= 0 and queued >= 0 for computed, queued in processor_time().threads.values())
    assert not processor_time(2**22 + 1).threads


def test_the_rank_that_lost_the_most_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes come and go: each is judged by its first and its last reading."""
    readings = {10: [(0.5, 0.0), (2.0, 0.5)], 11: [(0.5, 0.5), (1.0, 3.0)]}
    monkeypatch.setattr(starvation, "processor_time", lambda n: ProcessorTime(1.0, {n: readings[n].pop(0)}))
    watch = RanksWatch(ranks=1, threads=1)
    watch.allowed = 1.0
    for there in ([10], [10, 11], [11]):
        monkeypatch.setattr(starvation, "_children", lambda there=there: there)
        watch.look()
    assert watch.share() == pytest.approx(0.75)


def test_processes_that_this_one_starts_are_seen() -> None:
    """Where the kernel lists them, a child is among them while it is there."""
    with subprocess.Popen(["sleep", "60"]) as child:
        found = starvation._children()
        child.kill()
    assert not found or child.pid in found
