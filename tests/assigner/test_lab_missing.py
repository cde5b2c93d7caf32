"""What a machine lacks for a lab: every lack has the way to get it, and only what a cluster needs counts."""

from __future__ import annotations

import pytest

from assigner.errors import UsageError
from assigner.lab import missing
from assigner.lab.cgroups import Mount, Mounts
from assigner.lab.cluster import Cluster, Host, RackLink


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine that has everything; what it is called with is kept."""
    mount = Mount(tmp_path, 1, frozenset({"cpu", "memory"}))
    calls: list[str] = []
    monkeypatch.setattr(missing.sys, "platform", "linux")
    monkeypatch.setattr(missing.os, "geteuid", lambda: 0)
    monkeypatch.setattr(missing, "tool", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(missing, "call", lambda *words: calls.append(" ".join(words)) or "")
    monkeypatch.setattr(missing.Mounts, "here", lambda: Mounts([mount]))
    return calls


def refuse(monkeypatch, word):
    """Let every command with `word` in it fail."""

    def call(*words):
        if word in " ".join(words):
            raise UsageError(f"{word} is unknown")
        return ""

    monkeypatch.setattr(missing, "call", call)


def test_nothing_is_missing(machine):
    """All was tried in a namespace of this process, which is gone afterwards."""
    assert missing.lacks() == ()
    assert machine[0].startswith("ip netns add assigner-lab-")
    assert machine[-1] == machine[0].replace("add", "del")


def test_a_user_without_rights_needs_root_and_tools(machine, monkeypatch):
    """Both are said at once, with sudo and the package; nothing is tried."""
    monkeypatch.setattr(missing.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(missing, "tool", lambda name: None if name == "tc" else "/sbin/ip")
    root, tools = missing.lacks()
    assert "sudo" in root.remedy
    assert tools.what == "tc of iproute2"
    assert "apt-get install iproute2" in tools.remedy
    assert machine == []


def test_other_systems_are_told_so(monkeypatch):
    """Linux comes first, and alone."""
    monkeypatch.setattr(missing.sys, "platform", "darwin")
    (lack,) = missing.lacks()
    assert lack.what.startswith("Linux")


def test_forbidden_namespaces_end_the_questions(machine, monkeypatch):
    """In a container without rights one lack stands for all that follows from it."""
    refuse(monkeypatch, "netns add")
    (lack,) = missing.lacks()
    assert lack.what == "network namespaces"
    assert "docker run --privileged" in lack.remedy


def test_netem_counts_only_for_latency(machine, monkeypatch):
    """A kernel without netem makes every cluster but those with latency."""
    refuse(monkeypatch, "netem")
    (lack,) = missing.lacks()
    assert lack.feature == "latency"
    assert "sch_netem" in lack.remedy
    plain = Cluster((Host("a", cpu=0.5, bandwidth_mbit=100),))
    missing.require(plain)
    with pytest.raises(UsageError, match="netem") as caught:
        missing.require(Cluster((Host("a", latency_ms=1.0),)))
    assert "leave latency_ms out" in (caught.value.hint or "")


def test_controllers_count_only_for_their_limits(machine, monkeypatch, tmp_path):
    """A machine without the memory controller still makes hosts with shares."""
    mount = Mount(tmp_path, 2, frozenset({"cpu"}))
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    monkeypatch.setattr(missing.Mounts, "here", lambda: Mounts([mount]))
    (lack,) = missing.lacks()
    assert lack.feature == "memory"
    assert "cgroup_enable=memory" in lack.remedy
    missing.require(Cluster((Host("a", cpu=0.5),), RackLink(10.0)))
    with pytest.raises(UsageError, match="cgroup controller memory"):
        missing.require(Cluster((Host("a", memory_mib=100),)))


def test_a_tree_that_cannot_be_written_is_said(machine, monkeypatch):
    """Containers often see the control groups and may not make any."""
    monkeypatch.setattr("assigner.lab.cgroups.os.access", lambda *_: False)
    found = missing.lacks()
    assert {lack.feature for lack in found} == {"cpu", "memory"}
    assert all("cannot be written" in lack.what and "--privileged" in lack.remedy for lack in found)


def test_here_every_lack_has_a_remedy():
    """Asked of the real machine, whatever it is."""
    assert all(lack.what and lack.remedy for lack in missing.lacks())
