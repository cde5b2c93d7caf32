"""What a machine is taken to have."""

from __future__ import annotations

from pathlib import Path

from assigner.lab import cluster
from assigner.lab.cgroups import Mounts
from assigner.lab.cluster import Machine
from assigner.machine import cgroup, kernel


def test_this_machine_has_something():
    """Cores, memory and a processor's name are found wherever the tests run."""
    here = Machine.here()
    assert here.cores > 0
    assert here.memory_bytes > 1e6
    assert here.processor


def test_limits_of_control_groups_count(monkeypatch):
    """What a container is allowed is what there is to share out."""
    monkeypatch.setattr(cgroup, "core_limit", lambda: 0.7)
    monkeypatch.setattr(cluster, "free_memory", lambda: 12345)
    assert (Machine.here().cores, Machine.here().memory_bytes) == (0.7, 12345)


def test_other_systems_have_no_proc(monkeypatch, tmp_path):
    """Without /proc there are no control groups, and the processor still has a name."""
    assert Mounts.here(tmp_path).all == ()
    monkeypatch.setattr(kernel, "entry", lambda *_: None)
    assert kernel.processor_model()


def test_values_of_the_kernels_lists(tmp_path):
    """Of words the first line of a name counts; of numbers each line of a name and one number."""
    path = Path(tmp_path, "cpuinfo")
    path.write_text("processor : 0\nmodel name\t: AMD EPYC\nmodel name\t: other\n")
    assert kernel.entry(path, "model name") == "AMD EPYC"
    assert kernel.entry(path, "flags") is None
    path.write_text("oom 4\noom_kill 1\nsome avg10=0.00\n")
    assert kernel.counts(path) == {"oom": 4, "oom_kill": 1}
    assert kernel.counts(tmp_path / "none") == {}
