"""The device of each rank, what is free on it, and its clock."""

from __future__ import annotations

import time

import pytest
import torch
from workloads import skips

from assigner.errors import UsageError
from assigner.model.marking import partition_graph
from assigner.profiler import host
from assigner.profiler.host import host_facts, rank_device, ranks_on, share_of_free, start_up
from assigner.profiler.stopwatch import Stopwatch

CPU = torch.device("cpu")
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host of three ranks that says it has two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_ranks_have_gpus_while_there_are_some(two_gpus: pytest.MonkeyPatch) -> None:
    """The first ranks of a host have a GPU each, those behind them the CPU."""
    found = []
    for rank in range(3):
        two_gpus.setenv("LOCAL_RANK", str(rank))
        found.append(str(rank_device()))
    assert found == ["cuda:0", "cuda:1", "cpu"]


def test_devices_can_be_named(two_gpus: pytest.MonkeyPatch) -> None:
    """A worker may be the host's CPU beside its GPUs, in any order."""
    found = []
    for rank in range(3):
        two_gpus.setenv("LOCAL_RANK", str(rank))
        found.append(str(rank_device(["cpu", "cuda", "cuda:1"])))
    assert found == ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu"], "1 devices, and this host has 3 ranks"),
        (["cuda:2"] * 3, "'cuda:2' is no"),
        (["gpu"] * 3, "'gpu' is no"),
    ],
)
def test_devices_that_are_not_there(two_gpus: pytest.MonkeyPatch, devices: list[str], message: str) -> None:
    """A list of another length, a GPU that the host lacks and a word that is no device are refused."""
    two_gpus.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError, match=message):
        rank_device(devices)


def test_a_cpu_has_one_name(two_gpus: pytest.MonkeyPatch) -> None:
    """`cpu:0` is the CPU, as in workers' names."""
    two_gpus.setenv("LOCAL_RANK", "0")
    assert str(rank_device(["cpu:0", "cuda", "cuda:1"])) == "cpu"


def test_ranks_of_one_gpu_share_its_memory(two_gpus: pytest.MonkeyPatch) -> None:
    """Each may take its part of what is free there, however the GPU was named."""
    gpu, devices = torch.device("cuda", 0), ["cuda", "cuda:0", "cuda:1"]
    assert ranks_on(gpu, devices) == 2
    assert ranks_on(torch.device("cuda", 1), devices) == 1
    assert ranks_on(gpu, ()) == 1
    two_gpus.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    for name, held in (("memory_reserved", 70), ("memory_allocated", 50)):
        two_gpus.setattr(torch.cuda, name, lambda _, held=held: held)
    assert share_of_free(gpu) == 1020
    assert share_of_free(gpu, sharing=ranks_on(gpu, devices)) == 520


def test_start_up_leaves_only_what_is_loaded() -> None:
    """A step of small parameters with the user's own optimizer; the random numbers that follow are as they were."""
    made = skips()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    start_up(made, partition_graph(made), CPU)
    assert torch.equal(torch.rand(3), expected)


def test_the_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that gloo was told of; else the one with the address of the host's name."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert host_facts(CPU).interface == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(host.socket, "gethostbyname", lambda _: "127.0.0.1")
    assert host_facts(CPU).interface == "lo"
    monkeypatch.setattr(host.socket, "gethostbyname", lambda _: "203.0.113.9")
    assert host_facts(CPU).interface == ""


def test_a_cpu_is_timed_by_the_clock() -> None:
    """Marks are dated when they are made, and forgotten when they are read."""
    watch = Stopwatch(CPU)
    for _ in range(2):
        watch.mark()
        time.sleep(0.002)
        watch.mark()
        watch.mark()
        slept, nothing = watch.seconds()
        assert slept >= 0.002 > nothing


@ON_GPU
def test_a_gpu_is_timed_by_events() -> None:
    """The device's own time of a product is above zero, and launching many small ones is most of their time."""
    device = torch.device("cuda", 0)
    watch, left = Stopwatch(device), torch.ones(64, 64, device=device)
    torch.mm(left, left)
    watch.mark()
    for _ in range(200):
        torch.mm(left, left)
    watch.mark()
    assert watch.seconds()[0] > 0
    assert 0 < watch.launch_share <= 1
    assert share_of_free(device) > 0
