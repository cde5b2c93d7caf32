"""What control groups leave to a process, read from made trees of both layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from assigner.machine import cgroup

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups; `own` beside it is what /proc/self/cgroup says."""
    root = tmp_path / "cgroup"
    root.mkdir()
    monkeypatch.setattr(cgroup, "_tree", lambda: root)
    monkeypatch.setattr(cgroup, "_OWN", tmp_path / "own")
    monkeypatch.setattr(cgroup, "_available", lambda: 10**9)
    return root


def fill(folder: Path, **values: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(value + "\n")


def test_the_tightest_group_on_the_way_out_counts(tree: Path) -> None:
    """In v2 `max` is no limit, the root has no files, and page cache is given up when memory is asked for."""
    (tree.parent / "own").write_text("0::/a/b\n")
    fill(tree / "a" / "b", cpu__max="max 100000", memory__max="max")
    fill(
        tree / "a", cpu__max="50000 100000", memory__max="2000", memory__current="700", memory__stat="file 200\nanon 5"
    )
    assert cgroup.core_limit() == 0.5
    assert cgroup.memory_limit() == 2000
    assert cgroup.free_memory() == 1500


def test_a_container_shows_its_part_of_the_tree_only(tree: Path) -> None:
    """v1: the path that the kernel tells begins further up than what is mounted."""
    (tree.parent / "own").write_text("4:cpu,cpuacct:/docker/abc/job\n7:memory:/docker/abc/job\n")
    fill(tree / "cpu" / "job", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    fill(tree / "cpu", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    fill(tree / "memory" / "job", memory__limit_in_bytes="1000", memory__usage_in_bytes="400")
    fill(tree / "memory", memory__limit_in_bytes=str((1 << 63) - 4096), memory__usage_in_bytes="400")
    assert cgroup.core_limit() == 1.5
    assert cgroup.memory_limit() == 1000
    assert cgroup.free_memory() == 600


def test_no_groups_no_limits(tree: Path) -> None:
    """Where nothing is limited the host's free memory is what there is."""
    (tree.parent / "own").write_text("0::/\n")
    assert cgroup.core_limit() is None
    assert cgroup.memory_limit() is None
    assert cgroup.free_memory() == 10**9


def test_shared_memory_is_not_given_up(tree: Path) -> None:
    """The kernel counts tmpfs as page cache, and has nowhere to put it; v2 and v1 name it differently."""
    (tree.parent / "own").write_text("0::/a\n")
    fill(tree / "a", memory__max="2000", memory__current="700", memory__stat="anon 5\nfile 200\nshmem 50")
    assert cgroup.free_memory() == 2000 - (700 - 150)
    (tree.parent / "own").write_text("7:memory:/b\n")
    stat = "cache 1\nshmem 1\ntotal_cache 300\ntotal_shmem 100"
    fill(tree / "memory" / "b", memory__limit_in_bytes="1000", memory__usage_in_bytes="400", memory__stat=stat)
    assert cgroup.free_memory() == 1000 - (400 - 200)


def test_v2_beside_v1_has_a_folder_of_its_own(tree: Path) -> None:
    """A hybrid machine mounts v2 in `unified`, and its limits count too."""
    (tree.parent / "own").write_text("4:cpu,cpuacct:/\n0::/a\n")
    fill(tree / "unified", cgroup__controllers="cpu memory")
    fill(tree / "unified" / "a", cpu__max="50000 100000", memory__max="2000", memory__current="500")
    assert cgroup.core_limit() == 0.5
    assert cgroup.memory_limit() == 2000
    assert cgroup.free_memory() == 1500


def test_the_time_that_quotas_stop_a_process_adds_up(tree: Path) -> None:
    """v2 counts it in microseconds and v1 in nanoseconds; a group without a quota has none."""
    (tree.parent / "own").write_text("0::/a/b\n")
    fill(tree / "a" / "b", cpu__stat="usage_usec 5\nthrottled_usec 1500000")
    fill(tree / "a", cpu__stat="usage_usec 9")
    assert cgroup.throttled_s() == 1.5
    (tree.parent / "own").write_text("4:cpu,cpuacct:/c\n")
    fill(tree / "cpu" / "c", cpu__stat="nr_periods 7\nthrottled_time 250000000")
    assert cgroup.throttled_s() == 0.25


def test_processes_of_one_group_share_a_pool_of_memory(tree: Path) -> None:
    """Those of another group, and any of a system that says nothing of groups, count as apart."""
    assert cgroup.memory_pool() is None
    pools = []
    for group in ("0::/a\n", "0::/b\n", "0::/a\n"):
        (tree.parent / "own").write_text(group)
        pools.append(cgroup.memory_pool())
    assert pools[0] == pools[2] is not None
    assert pools[0] != pools[1]
