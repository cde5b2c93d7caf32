"""The device of each rank, what is free on it, and its clock."""

from __future__ import annotations

import os
import time

import pytest
import torch
from workloads import skips

from assigner.errors import UsageError
from assigner.model.marking import partition_graph
from assigner.profiler import host, sampling
from assigner.profiler.host import (
    VisibleGpus,
    device_place,
    host_facts,
    own_gpu,
    rank_device,
    start_up,
    visible_gpus,
)
from assigner.profiler.sampling import Stopwatch
from assigner.runtime.recording.memory import free_bytes

CPU = torch.device("cpu")
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def ranks_of(*gpus: tuple[str, ...], host: str = "a") -> list[VisibleGpus]:
    """The ranks of a host, each with what it sees."""
    return [VisibleGpus(host, each) for each in gpus]


BOTH = ("GPU-1", "GPU-2")


def test_ranks_have_gpus_while_there_are_some() -> None:
    """The first ranks of each host have a GPU each, those behind them the CPU."""
    seen = [*ranks_of(BOTH, BOTH, BOTH), *ranks_of(("GPU-3",), ("GPU-3",), host="b")]
    found = [str(rank_device((), seen, rank)) for rank in range(5)]
    assert found == ["cuda:0", "cuda:1", "cpu", "cuda:0", "cpu"]


def test_a_launcher_that_shows_each_rank_its_own_gpu() -> None:
    """Each has it, under the only name that it has there; nobody else has it, and all of its memory is that rank's."""
    seen = ranks_of(("GPU-1",), ("GPU-2",), ())
    for devices in ((), ("cuda:0", "cuda", "cpu")):
        found = [rank_device(devices, seen, rank) for rank in range(3)]
        assert [str(each) for each in found] == ["cuda:0", "cuda:0", "cpu"]
        assert len({device_place(each, mine) for each, mine in zip(found, seen, strict=True)}) == 3


def test_ranks_that_see_other_parts_of_a_host() -> None:
    """What a rank before it has taken is left to that one, whatever its number is here."""
    assert [own_gpu([BOTH, BOTH[::-1], BOTH], local) for local in range(3)] == [0, 0, None]


def test_devices_can_be_named() -> None:
    """A worker may be the host's CPU beside its GPUs, in any order."""
    found = [str(rank_device(["cpu", "cuda", "cuda:1"], ranks_of(BOTH, BOTH, BOTH), rank)) for rank in range(3)]
    assert found == ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu"], "1 devices, and this host has 3 ranks"),
        (["cuda:2"] * 3, "'cuda:2' is no"),
        (["gpu"] * 3, "'gpu' is no"),
    ],
)
def test_devices_that_are_not_there(devices: list[str], message: str) -> None:
    """A list of another length, a GPU that the host lacks and a word that is no device are refused."""
    with pytest.raises(UsageError, match=message):
        rank_device(devices, ranks_of(BOTH, BOTH, BOTH), 0)


def test_a_cpu_has_one_name() -> None:
    """`cpu:0` is the CPU, as in workers' names."""
    assert str(rank_device(["cpu:0", "cuda", "cuda:1"], ranks_of(BOTH, BOTH, BOTH), 0)) == "cpu"


def test_ranks_share_the_memory_of_what_they_have() -> None:
    """A GPU's belongs to its ranks, however it was named; a host's to those that compute on its CPU."""
    devices, seen = ["cuda", "cuda:0", "cuda:1", "cpu"], ranks_of(BOTH, BOTH, BOTH, BOTH)
    places = [device_place(rank_device(devices, seen, rank), seen[rank]) for rank in range(4)]
    assert [places.count(each) for each in places] == [2, 2, 1, 1]


def test_what_is_free_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of what nobody has, and what this process keeps there unused."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    for name, held in (("memory_reserved", 70), ("memory_allocated", 50)):
        monkeypatch.setattr(torch.cuda, name, lambda _, held=held: held)
    assert free_bytes(torch.device("cuda", 0)) == 1020
    assert free_bytes(torch.device("cuda", 0), sharing=2) == 520


def test_cuda_has_its_queues_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for GPUs may start it."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    found: list[str | None] = []
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: bool(found.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))
    )
    assert visible_gpus().gpus == ()
    assert found == ["32"]


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
    watch, nothings = Stopwatch(CPU), []
    for _ in range(5):
        watch.mark()
        time.sleep(0.002)
        watch.mark()
        watch.mark()
        slept, nothing = watch.seconds()
        assert slept >= 0.002
        nothings.append(nothing)
    assert min(nothings) < 0.002


def test_a_share_of_a_core_is_timed_by_its_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided by the share, wherever a quota stops it; what has waited, and several threads, have the clock."""
    monkeypatch.setattr(sampling, "allowed_share", lambda _: 0.25)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    # Clock, processor time, waits: stopped by the quota for 50 of 60 ms; then asleep for 50 ms; then neither.
    dates = iter([(1.0, 0.01, 3), (1.06, 0.02, 3), (1.11, 0.02, 4), (1.12, 0.03, 4)])
    with monkeypatch.context() as made:
        made.setattr(sampling._ThreadTime, "now", lambda: sampling._ThreadTime(*next(dates)))
        watch = Stopwatch(CPU)
        for _ in range(4):
            watch.mark()
        assert watch.seconds() == pytest.approx([0.04, 0.05, 0.04])
    watch = Stopwatch(CPU)
    watch.mark()
    time.sleep(0.05)
    watch.mark()
    assert watch.seconds()[0] >= 0.05  # a thread that sleeps is known by its waits
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    watch = Stopwatch(CPU)
    watch.mark()
    time.sleep(0.002)
    watch.mark()
    assert watch.seconds()[0] >= 0.002


@pytest.mark.gpu
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
    assert free_bytes(device) > 0
