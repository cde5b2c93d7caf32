"""What a lab that is gone has left: it is found by any of its parts, killed until nobody is left, and then removed."""

from __future__ import annotations

import os

import pytest

from assigner.errors import UsageError
from assigner.lab import hosts, network
from assigner.lab.cgroups import Mounts
from assigner.lab.cluster import Cluster, Host
from assigner.lab.hosts import Hosts, lab_name, remove_lab, remove_left_behind

NOWHERE = Mounts([])
DEAD, OTHER = "assigner-lab-999999998-1", "assigner-lab-999999999-1"  # no process has such a number


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where tables are; there is nothing else of any lab."""
    monkeypatch.setattr(hosts, "TABLES", tmp_path)
    monkeypatch.setattr(network, "NAMESPACES", tmp_path / "netns")
    return tmp_path


@pytest.fixture
def events(folder, monkeypatch):
    """What is done to processes, groups and namespaces, in order."""
    found: list[object] = []
    monkeypatch.setattr(hosts, "_TURN_S", 0.001)
    monkeypatch.setattr(hosts.os, "kill", lambda process, _: found.append(process))
    monkeypatch.setattr(hosts, "network_members", lambda _: set())
    monkeypatch.setattr(hosts, "remove_groups", lambda _, lab: found.append(f"groups of {lab}"))
    monkeypatch.setattr(hosts, "remove_network", lambda lab: found.append(f"network of {lab}"))
    return found


def test_a_child_of_a_killed_process_is_killed_too(events, monkeypatch):
    """Who is there is asked again until nobody is, and groups and namespaces go after that."""
    asked = iter([{0, 5}, {6, os.getpid()}, {7}, set()])
    monkeypatch.setattr(hosts, "group_members", lambda *_: next(asked))
    remove_lab(NOWHERE, DEAD)
    assert events == [5, 6, 7, f"groups of {DEAD}", f"network of {DEAD}"]


def test_a_process_that_does_not_end_is_not_waited_for_for_ever(events, monkeypatch):
    """After some time the rest is tried: the group says then what is wrong."""
    monkeypatch.setattr(hosts, "_KILLING_S", 0.02)
    monkeypatch.setattr(hosts, "group_members", lambda *_: {5})
    remove_lab(NOWHERE, DEAD)
    assert set(events[:-2]) == {5}
    assert events[-2:] == [f"groups of {DEAD}", f"network of {DEAD}"]


def test_what_fails_keeps_nothing_else(events, folder, monkeypatch):
    """Groups that stay are told when the namespaces and the table are gone."""

    def refuse(*_):
        raise UsageError("a group stays")

    monkeypatch.setattr(hosts, "group_members", lambda *_: set())
    monkeypatch.setattr(hosts, "remove_groups", refuse)
    (folder / f"{DEAD}.hosts").touch()
    with pytest.raises(UsageError, match="a group stays"):
        remove_lab(NOWHERE, DEAD)
    assert events == [f"network of {DEAD}"]
    assert list(folder.iterdir()) == []


def test_a_table_alone_is_enough_to_find_a_lab(folder):
    """A lab that was killed before its first namespace; the table of one that runs stays."""
    ours = folder / f"{lab_name()}.hosts"
    for path in (ours, folder / f"{DEAD}.hosts"):
        path.touch()
    warned: list[str] = []
    assert remove_left_behind(NOWHERE, warn=warned.append) == [DEAD]
    assert list(folder.iterdir()) == [ours]
    assert warned == []


def test_what_cannot_be_removed_is_warned_of_and_the_others_go(events, folder, monkeypatch):
    """One leftover that stays does not keep new labs from being made."""

    def refuse(_, lab):
        if lab == DEAD:
            raise UsageError("control group x cannot be removed: Device or resource busy")

    monkeypatch.setattr(hosts, "group_members", lambda *_: set())
    monkeypatch.setattr(hosts, "remove_groups", refuse)
    for lab in (DEAD, OTHER):
        (folder / f"{lab}.hosts").touch()
    warned: list[str] = []
    assert remove_left_behind(NOWHERE, warn=warned.append) == [OTHER]
    (said,) = warned
    assert said.startswith("warning: ")
    assert DEAD in said
    assert "Device or resource busy" in said


def test_a_table_that_cannot_be_written_is_told(folder, monkeypatch):
    """A /run that is not there is an error of the machine, with the file's name."""
    monkeypatch.setattr(hosts, "TABLES", folder / "none")
    with pytest.raises(UsageError, match=r"none/assigner-lab-.*\.hosts: No such file"):
        Hosts(Cluster((Host("a"),)), NOWHERE).build()
