"""Control groups against folder trees that look like the kernel's: v1, v2, and machines that have some of each."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from assigner.errors import UsageError
from assigner.lab.cgroups import HostGroup, Mount, Mounts, group_members, labs_with_groups, quota_us, remove_groups

LAB = "assigner-lab-1-2"


class Tree:
    """A made-up /proc/self and /sys/fs/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys = folder / "proc", folder / "cgroup"
        self.proc.mkdir()
        self._mounts: list[str] = ["20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]
        self._own: list[str] = []

    def v1(self, controllers: str, *, own: str = "/", root: str = "/") -> Path:
        where = self.sys / controllers
        where.mkdir(parents=True)
        self._mounts.append(f"31 20 0:28 {root} {where} rw,relatime - cgroup cgroup rw,{controllers}")
        self._own.append(f"{len(self._own) + 1}:{controllers}:{own}")
        return where

    def v2(self, where: Path, controllers: str, *, own: str = "/", root: str = "/", on: str = "") -> Path:
        where.mkdir(parents=True, exist_ok=True)
        (where / "cgroup.controllers").write_text(f"{controllers}\n")
        (where / "cgroup.subtree_control").write_text(on)
        (where / "cgroup.procs").write_text("")
        self._mounts.append(f"41 20 0:38 {root} {where} rw - cgroup2 cgroup2 rw,nsdelegate")
        self._own.append(f"0::{own}")
        return where

    def mounts(self) -> Mounts:
        (self.proc / "mountinfo").write_text("\n".join(self._mounts) + "\n")
        (self.proc / "cgroup").write_text("\n".join(self._own) + "\n")
        return Mounts.here(self.proc)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def read(folder: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in folder.iterdir() if each.is_file()}


def test_v1_limits_go_into_a_folder_of_each_controller(tree):
    """cpu and memory have a folder each; period before quota, and memory with swap only where the kernel counts it."""
    cpu, memory = tree.v1("cpu,cpuacct"), tree.v1("memory")
    (memory / LAB / "0").mkdir(parents=True)
    (memory / LAB / "0" / "memory.memsw.limit_in_bytes").write_text("9223372036854771712")
    group = HostGroup(tree.mounts(), LAB, 0, cpu=0.4, memory_bytes=1 << 30)
    group.make()
    assert read(cpu / LAB / "0") == {"cpu.cfs_period_us": "5000", "cpu.cfs_quota_us": "2000"}
    assert read(memory / LAB / "0") == {
        "memory.limit_in_bytes": "1073741824", "memory.memsw.limit_in_bytes": "1073741824"
    }  # fmt: skip
    assert read(cpu / LAB) == {"cpu.shares": "102400"}
    assert group.entries == [str(cpu / LAB / "0" / "cgroup.procs"), str(memory / LAB / "0" / "cgroup.procs")]


def test_v1_counts_kills_in_oom_control(tree):
    """The kernel's own count tells that a process was killed for the limit."""
    memory = tree.v1("memory")
    group = HostGroup(tree.mounts(), LAB, 0, memory_bytes=1 << 20)
    group.make()
    assert group.memory_kills() == 0
    (memory / LAB / "0" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert group.memory_kills() == 3


def test_v2_limits_go_into_one_folder(tree):
    """Controllers are passed on by the root and by the lab's group; swap is off where there is a file for it."""
    root = tree.v2(tree.sys, "cpuset cpu io memory pids", own="/user.slice/x")
    (root / LAB / "2").mkdir(parents=True)
    (root / LAB / "2" / "memory.swap.max").write_text("max")
    group = HostGroup(tree.mounts(), LAB, 2, cpu=0.8, memory_bytes=1 << 29)
    group.make()
    folder = root / LAB / "2"
    assert read(folder) == {"cpu.max": "4000 5000", "memory.max": "536870912", "memory.swap.max": "0"}
    assert (root / "cgroup.subtree_control").read_text() == "+memory"  # the last of +cpu and +memory
    assert read(root / LAB) == {"cpu.weight": "10000", "cgroup.subtree_control": "+memory"}
    assert group.entries == [str(folder / "cgroup.procs")]


def test_v2_leaves_controllers_alone_that_are_passed_on_already(tree):
    """A root that systemd has set up is not written to."""
    root = tree.v2(tree.sys, "cpu memory", on="cpu io memory pids")
    HostGroup(tree.mounts(), LAB, 0, cpu=0.5).make()
    assert (root / "cgroup.subtree_control").read_text() == "cpu io memory pids"
    assert (root / LAB / "cgroup.subtree_control").read_text() == "+cpu"


def test_v2_counts_kills_in_memory_events(tree):
    """`oom_kill` counts, `oom` does not: it also counts allocations that merely failed."""
    root = tree.v2(tree.sys, "cpu memory", on="cpu memory")
    group = HostGroup(tree.mounts(), LAB, 0, memory_bytes=1 << 20)
    group.make()
    events = root / LAB / "0" / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 12\noom 4\noom_kill 0\n")
    assert group.memory_kills() == 0
    events.write_text("low 0\nhigh 0\nmax 12\noom 4\noom_kill 1\noom_group_kill 0\n")
    assert group.memory_kills() == 1


def test_v1_without_a_limit_on_swap_does_not_swap(tree):
    """Without swapaccount=1 there is no limit of memory and swap, and a host would swap instead of being killed."""
    memory = tree.v1("memory")
    folder = memory / LAB / "0"
    folder.mkdir(parents=True)
    (folder / "memory.swappiness").write_text("60")
    HostGroup(tree.mounts(), LAB, 0, memory_bytes=1 << 30).make()
    assert read(folder) == {"memory.swappiness": "0", "memory.limit_in_bytes": "1073741824"}


@pytest.mark.parametrize("kind", ["", "memsw."])
def test_v1_tells_a_host_at_its_limit_by_the_most_it_used(tree, kind):
    """A host that was killed below its limit fell to the machine's want; what is refused at most is a huge page."""
    memory = tree.v1("memory")
    group = HostGroup(tree.mounts(), LAB, 0, memory_bytes=80 << 20)
    group.make()
    assert not group.reached_limit()
    peak = memory / LAB / "0" / f"memory.{kind}max_usage_in_bytes"
    peak.write_text(f"{50 << 20}\n")
    assert not group.reached_limit()
    peak.write_text(f"{79 << 20}\n")
    assert group.reached_limit()


def test_v2_tells_a_host_at_its_limit_by_what_was_refused(tree):
    """`oom` counts what the host's own limit refused; the machine's want leaves it at 0."""
    root = tree.v2(tree.sys, "cpu memory", on="cpu memory")
    group = HostGroup(tree.mounts(), LAB, 0, memory_bytes=1 << 20)
    group.make()
    events = root / LAB / "0" / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 12\noom 0\noom_kill 1\n")
    assert not group.reached_limit()
    events.write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\n")
    assert group.reached_limit()


def test_hybrid_takes_each_controller_where_it_is(tree):
    """memory bound to v1 and cpu left to v2: one host has a folder in both."""
    memory = tree.v1("memory")
    unified = tree.v2(tree.sys / "unified", "cpu io", on="cpu")
    group = HostGroup(tree.mounts(), LAB, 0, cpu=0.5, memory_bytes=1 << 20)
    group.make()
    assert read(unified / LAB / "0") == {"cpu.max": "2500 5000"}
    assert read(memory / LAB / "0") == {"memory.limit_in_bytes": "1048576"}
    assert len(group.entries) == 2


def test_hosts_without_limits_have_no_groups(tree):
    """Nothing is made for a host that has neither share nor limit."""
    cpu = tree.v1("cpu")
    group = HostGroup(tree.mounts(), LAB, 0)
    group.make()
    assert group.entries == []
    assert list(cpu.iterdir()) == []
    assert group.memory_kills() == 0


def test_small_shares_get_a_longer_period():
    """The kernel refuses a quota under 1 ms: a tenth of a core is 1 ms of 10."""
    assert quota_us(0.8) == (4000, 5000)
    assert quota_us(0.2) == (1000, 5000)
    assert quota_us(0.1) == (1000, 10_000)
    assert quota_us(0.01) == (1000, 100_000)
    assert quota_us(2.5) == (12_500, 5000)


def test_members_and_names_of_labs(tree):
    """Who is in a lab's groups, and which labs there are, in every hierarchy."""
    cpu, memory = tree.v1("cpu"), tree.v1("memory")
    for folder, members in ((cpu / LAB / "0", "12\n13\n"), (cpu / LAB / "1", "14\n"), (memory / LAB / "0", "12\n")):
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text(members)
    (memory / "assigner-lab-9-9").mkdir()
    (memory / "system.slice").mkdir()
    assert group_members(tree.mounts(), LAB) == {12, 13, 14}
    assert labs_with_groups(tree.mounts(), "assigner-lab-") == {LAB, "assigner-lab-9-9"}


def test_members_of_groups_within_a_hosts_group_count(tree):
    """What runs on a host may make groups of its own, and is the host's still."""
    inner = tree.v1("memory") / LAB / "0" / "job"
    inner.mkdir(parents=True)
    (inner / "cgroup.procs").write_text("15\n")
    assert group_members(tree.mounts(), LAB) == {15}


def test_a_group_that_stays_keeps_no_other(tree):
    """All are tried, the innermost first; the first that stays is told."""
    cpu, memory = tree.v1("cpu"), tree.v1("memory")
    for folder in (cpu / LAB / "0", cpu / LAB / "1" / "job", memory / LAB / "0"):
        folder.mkdir(parents=True)
    (cpu / LAB / "0" / "kept").touch()  # in place of a process: a folder that is not empty stays too
    with pytest.raises(UsageError, match=rf"cpu/{LAB}/0 cannot be removed: Directory not empty"):
        remove_groups(tree.mounts(), LAB)
    assert [each.name for each in (cpu / LAB).iterdir()] == ["0"]
    assert not (memory / LAB).exists()
    (cpu / LAB / "0" / "kept").unlink()
    remove_groups(tree.mounts(), LAB)
    assert not (cpu / LAB).exists()
    remove_groups(tree.mounts(), LAB)  # what is not there is no error


def test_a_container_that_holds_processes_says_how_to_go_on(tree):
    """In v2 a group that is not the real root cannot pass controllers on while processes are in it."""
    root = tree.v2(tree.sys, "cpu memory")
    mount = tree.mounts().mount("cpu")
    assert mount is not None
    assert mount.obstacle("cpu") is None  # the real root has no cgroup.type
    (root / "cgroup.type").write_text("domain\n")
    assert mount.obstacle("cpu") is None  # nobody in it
    (root / "cgroup.procs").write_text("1\n77\n")
    reason, remedy = mount.obstacle("cpu") or ("", "")
    assert "holds processes" in reason
    assert f"mkdir {root}/init" in remedy
    (root / "cgroup.subtree_control").write_text("cpu\n")
    assert mount.obstacle("cpu") is None


def test_a_refusal_of_the_kernel_keeps_its_reason(tree, monkeypatch):
    """EBUSY on subtree_control becomes a usage error with the folder, the reason and the way out."""
    root = tree.v2(tree.sys, "cpu")
    (root / "cgroup.type").write_text("domain\n")
    (root / "cgroup.procs").write_text("1\n")
    real = Path.write_text

    def refuse(self, *args, **kwargs):
        if self.name == "cgroup.subtree_control":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(UsageError, match="Device or resource busy") as caught:
        HostGroup(tree.mounts(), LAB, 0, cpu=0.5).make()
    assert "mkdir" in (caught.value.hint or "")


def test_a_controller_that_is_nowhere_is_refused(tree):
    """No silent run without its limit."""
    tree.v1("cpu")
    with pytest.raises(UsageError, match="no cgroup controller memory"):
        HostGroup(tree.mounts(), LAB, 0, memory_bytes=1).make()


def test_bound_to_v1_counts_before_v2(tmp_path):
    """Both list a controller only while it moves; v1, where it is bound, is taken."""
    old = Mount(tmp_path / "1", 1, frozenset({"cpu"}))
    new = Mount(tmp_path / "2", 2, frozenset({"cpu", "memory"}))
    mounts = Mounts([new, old])
    assert mounts.mount("cpu") is old
    assert mounts.mount("memory") is new
    assert mounts.mount("io") is None
