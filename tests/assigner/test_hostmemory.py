"""Large messages between neighbours pass through memory that both have mapped, and are what was sent."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from assigner.runtime.messages import hostmemory
from assigner.runtime.messages.hostmemory import (
    SWITCH,
    Arena,
    HostMemory,
    is_elsewhere,
    openable,
    own_place,
    unannounced,
)
from assigner.runtime.messages.transport import is_missing, missing_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forked_ranks import ForkedRanks

    from assigner.runtime.messages.hostmemory import ProcessPlace

RUNS = Path(__file__).resolve().parent.parent / "runs"
CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")


@pytest.fixture
def place() -> Iterator[ProcessPlace]:
    """This process's place."""
    with own_place(CPU) as found:
        assert found is not None
        yield found


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    """A rank that is its own neighbour, number 1."""
    made = HostMemory({1: os.getpid()}, {1})
    yield made
    made.close()


def test_neighbours_are_those_whose_memory_opens(place: ProcessPlace) -> None:
    """Another system, another network, another process of that number and one that is not there are no neighbours."""
    others = [
        place,
        replace(place, host=f"another system {place.host.split()[1]}"),
        replace(place, host=f"{place.host.split()[0]} net:[1]"),
        replace(place, word="x" * 32),
        replace(place, process=1 << 22),
        replace(place, file=10**6),
        None,
    ]
    assert openable(place, 99, others) == (0,)
    assert openable(place, 0, others) == ()
    assert openable(None, 99, others) == ()


def test_a_network_of_its_own_is_another_host(place: ProcessPlace) -> None:
    """The lab's hosts are on one system; what tells them apart is the network that a process is in."""
    network = Path("/proc/self/ns/net").readlink()
    assert place.host.split(" ", 1) == [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), str(network)]


@pytest.mark.parametrize("case", ["switched off", "a GPU", "not allowed"])
def test_a_rank_that_shares_nothing(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Its place is none, and the others use gloo with it."""

    def refuse(*_: object) -> int:
        raise PermissionError("memfd_create")

    if case == "switched off":
        monkeypatch.setenv(SWITCH, "0")
    if case == "not allowed":
        monkeypatch.setattr(os, "memfd_create", refuse)
    with own_place(torch.device("cuda:0" if case == "a GPU" else "cpu")) as found:
        assert found is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5), torch.tensor(4.0), torch.randn(7, dtype=torch.bfloat16), torch.tensor([True, False]),
        torch.tensor([1 + 2j]), torch.arange(9, dtype=torch.int8), torch.zeros(4, dtype=torch.float8_e4m3fn),
    ],
)  # fmt: skip
def test_what_is_taken_is_what_was_put(memory: HostMemory, tensor: torch.Tensor) -> None:
    """Bit for bit, and of any type; what comes later does not change it."""
    announcement = memory.put(1, tensor)
    got = memory.take(1, announcement, tuple(tensor.shape), tensor.dtype)
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert torch.equal(got.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    memory.put(1, torch.zeros(4096, dtype=torch.uint8))
    assert torch.equal(got.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_an_absent_gradient_stays_absent(memory: HostMemory) -> None:
    """Its bit pattern is a NaN's."""
    like = torch.ones(5, dtype=torch.float16)
    assert is_missing(memory.take(1, memory.put(1, missing_gradient(like)), (5,), torch.float16))


def test_places_are_free_again(memory: HostMemory) -> None:
    """A message that was taken makes room, the first gap first; one that was not is never written over."""
    data = [torch.full((PAGE,), n, dtype=torch.uint8) for n in range(6)]
    told = [memory.put(1, each) for each in data[:3]]
    assert [int(each[0]) for each in told] == [0, 2 * PAGE, 4 * PAGE]
    assert torch.equal(memory.take(1, told[1], (PAGE,), torch.uint8), data[1])
    too_long, again = memory.put(1, data[3].repeat(2)), memory.put(1, data[4])
    assert int(too_long[0]) == 6 * PAGE
    assert int(again[0]) == 2 * PAGE
    for announcement, expected in ((told[0], data[0]), (told[2], data[2]), (again, data[4])):
        assert torch.equal(memory.take(1, announcement, (PAGE,), torch.uint8), expected)


def test_a_place_is_kept_for_whatever_refers_to_it(memory: HostMemory) -> None:
    """A part of a message in a graph that another thread lets go of, say."""
    got = memory.take(1, memory.put(1, torch.arange(8.0)), (8,), torch.float32)
    part = got[2:4].detach().requires_grad_()
    held = [(part * part).sum()]
    del got, part
    assert int(memory.put(1, torch.zeros(1))[0]) == 2 * PAGE
    held[0].backward()
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    dropping.join()
    assert int(memory.put(1, torch.zeros(1))[0]) == 0


def test_a_receiver_leaves_room(monkeypatch: pytest.MonkeyPatch, memory: HostMemory) -> None:
    """It uses a third of an arena in place, whatever it keeps, and copies the rest: those places are free at once."""
    monkeypatch.setattr(hostmemory, "_ARENA_BYTES", 12 * PAGE)
    data = [torch.full((2 * PAGE,), n, dtype=torch.uint8) for n in range(8)]
    kept, places = [], []
    for each in data:
        announcement = memory.put(1, each)
        places.append(int(announcement[0]))
        kept.append(memory.take(1, announcement, (2 * PAGE,), torch.uint8))
    assert places == [0, 3 * PAGE] + [6 * PAGE] * 6
    assert all(torch.equal(got, sent) for got, sent in zip(kept, data, strict=True))


def test_what_was_taken_outlives_the_run(memory: HostMemory) -> None:
    """A model's output may be kept when all is closed."""
    got = memory.take(1, memory.put(1, torch.arange(8.0)), (8,), torch.float32)
    memory.close()
    assert torch.equal(got, torch.arange(8.0))


def test_a_full_arena_says_so(monkeypatch: pytest.MonkeyPatch, memory: HostMemory) -> None:
    """The sender does not wait, and what an arena takes has an end; three of the largest messages always fit."""
    monkeypatch.setattr(hostmemory, "_ARENA_BYTES", 4 * PAGE)
    small, large = torch.ones(PAGE, dtype=torch.uint8), torch.ones(9 * PAGE, dtype=torch.uint8)
    assert [is_elsewhere(memory.put(1, small)) for _ in range(4)] == [False, False, False, True]
    told = [memory.put(1, large) for _ in range(3)]
    assert [is_elsewhere(each) for each in told] == [False, False, True]  # the small ones are in the way
    assert torch.equal(memory.take(1, told[1], (9 * PAGE,), torch.uint8), large)
    assert not is_elsewhere(memory.put(1, large))


@pytest.mark.parametrize("case", ["little is free", "none is given"])
def test_no_memory_for_an_arena(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """It does not take what the host lacks: the message goes through gloo."""

    def refuse(*_: int) -> None:
        raise OSError("no space")

    if case == "little is free":
        monkeypatch.setattr(hostmemory, "free_memory", lambda: 4 * PAGE)
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    arena = Arena()
    assert is_elsewhere(arena.put(torch.ones(PAGE, dtype=torch.uint8)))
    arena.close()


def test_only_large_messages_between_neighbours(memory: HostMemory) -> None:
    """Both ends decide by the size alone."""
    least = hostmemory.SHARED_FROM_BYTES
    assert [memory.carries(1, least - less, sent=sent) for less in (0, 1) for sent in (True, False)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert not memory.carries(2, least, sent=True)
    assert not memory.carries(2, least, sent=False)


def test_nothing_is_known_before_the_announcement() -> None:
    """Memory in which one may still arrive says nothing."""
    assert not is_elsewhere(unannounced())


def test_a_sender_that_is_gone() -> None:
    """Whose announcement came, and whose memory does not open any more."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    memory = HostMemory({1: gone.pid}, set())
    with pytest.raises(ProcessLookupError, match="is gone"):
        memory.take(1, torch.tensor([0, PAGE, 5]), (1,), torch.uint8)


def test_nothing_stays_open(memory: HostMemory) -> None:
    """Files and mappings end with `close`."""
    before = sorted(Path("/proc/self/fd").iterdir())
    tensor = torch.zeros(PAGE)
    memory.take(1, memory.put(1, tensor), (PAGE,), torch.float32)
    assert sorted(Path("/proc/self/fd").iterdir()) != before
    memory.close()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert "assigner-messages" not in Path("/proc/self/maps").read_text()


@pytest.fixture(scope="module")
def ranks(forked: ForkedRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of tests/runs/neighbours.py found."""
    return forked.found("neighbours.py", tmp_path_factory.mktemp("neighbours"), ranks=3)


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["two of three", "three", "little room"])
def test_messages_of_all_sizes_at_once(ranks: list[dict[str, Any]], case: str) -> None:
    """Between all ranks both ways, taken late and in another order: what arrives is what was sent."""
    for found in ranks:
        assert found[case]["same"] == found[case]["messages"] == 48
        assert found[case]["ended"] == [True, True]
        assert found[case]["moved"] == [True, True]


@pytest.mark.distributed
def test_the_way_that_messages_take(ranks: list[dict[str, Any]]) -> None:
    """A rank that does not share is sent nothing in memory; with little room some announced messages follow."""
    one, all_ways, little = ([found[case] for found in ranks] for case in ("two of three", "three", "little room"))
    assert [each["in memory"] for each in one] == [each["announced"] for each in one]
    assert [2 * each["announced"] for each in one] == [each["announced"] for each in all_ways[:2]] + [0]
    assert all(each["in memory"] == each["announced"] > 0 for each in all_ways)
    assert all(0 < each["in memory"] < each["announced"] for each in little)


@pytest.mark.distributed
def test_training_through_memory(ranks: list[dict[str, Any]]) -> None:
    """Every value and gradient, the shapes of which may differ, as in the plain model."""
    for found in ranks:
        training = dict(found["training"])
        assert training.pop("in memory") > 0
        assert max(max(each.values()) for each in training.values()) < 1e-10


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_with_messages_in_memory(forked: ForkedRanks, tmp_path: Path, victim: int) -> None:
    """The others end by themselves with its name, and nothing of it stays in /dev/shm."""
    case = f"killed rank {victim}"
    forked.run("through_memory.py", RUNS / "failures.py", tmp_path, case)
    found = json.loads((tmp_path / "found.json").read_text())[case]
    assert found["codes"] == [-9 if each == victim else 7 for each in range(3)]
    assert all(f"worker:{victim}" in text and "its process is gone" in text for text in found["stderr"] if text)
    assert not list(Path("/dev/shm").glob("*assigner*"))
