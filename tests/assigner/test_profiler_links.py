"""Links between two ranks of this host, measured over the runtime's own transport."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from assigner.formats.profile import LinkPoint
from assigner.profiler import links
from assigner.profiler.host import HostFacts
from assigner.profiler.links import SweepOptions, message_sizes

if TYPE_CHECKING:
    from pathlib import Path

    from forked_ranks import ForkedRanks


def test_sweeps_reach_the_largest_message() -> None:
    """Sizes grow by four from 1 KiB until they cover what a plan could send, 256 MiB at most."""
    assert message_sizes(1) == [1024]
    assert message_sizes(5000) == [1024, 4096, 16384]
    assert message_sizes(10**12)[-1] == 256 << 20


@pytest.mark.parametrize(("node", "offset"), [(0, 0.0), (1, 5.0)])
def test_ranks_of_one_host_read_one_clock(monkeypatch: pytest.MonkeyPatch, node: int, offset: float) -> None:
    """The compared offset is applied between hosts alone: on one it is an error of the comparison."""
    offsets: list[float] = []

    def sweep(_lane: object, _target: int, _sizes: object, offset: float) -> list[LinkPoint]:
        offsets.append(offset)
        return [LinkPoint(1024, 1e-4, 9, 0.0)]

    monkeypatch.setattr(links, "compare_clock", lambda _: SimpleNamespace(ahead_s=5.0))
    monkeypatch.setattr(links, "_sweep", sweep)
    monkeypatch.setattr(links, "send_busy", lambda *_: [(0.1, 0.2), (0.1, 0.2)])
    fleet = [HostFacts("shed", each, "cpu", "CPU", 1 << 30, 1) for each in (0, node)]
    one_clock = links._same_host(fleet, 0, 1)
    lane: Any = SimpleNamespace(
        rank=0, names=["worker:0/cpu", "worker:1/cpu"], tell=lambda *_: None, ask=lambda _: 0.0,
        carrier_to=lambda _: "gloo",
    )  # fmt: skip
    options = SweepOptions(largest=1024, typical=1024, force_busy=True)
    links._measure_pair(lane, 1, options, one_clock=one_clock)
    assert offsets == [offset]


@pytest.mark.long
@pytest.mark.parametrize("way", [(), ("--ordered",)])
@pytest.mark.distributed
def test_both_directions_are_measured(forked: ForkedRanks, tmp_path: Path, way: tuple[str, ...]) -> None:
    """Each rank has the link that starts at it: growing sizes, positive times, shares from 0 to 1; all know the wires.

    gloo's threads have been told to let computing go on.
    """
    forked.run("links.py", tmp_path / "links", *way, ranks=2)
    both = [json.loads((tmp_path / f"links.{rank}").read_text()) for rank in range(2)]
    assert both[0]["wires"] == both[1]["wires"]
    assert all(made["policies"] and set(made["policies"]) == {os.SCHED_BATCH} for made in both)
    for rank, made in enumerate(both):
        (link,) = made["links"]
        assert (link["source"], link["target"]) == (f"worker:{rank}/cpu", f"worker:{1 - rank}/cpu")
        assert [point["bytes"] for point in link["points"]] == message_sizes(100_000)
        assert all(point["seconds"] > 0 for point in link["points"])
        assert all(point["samples"] >= 3 for point in link["points"])
        assert 0 <= link["sender_busy"] <= 1
        assert 0 <= link["receiver_busy"] <= 1
        assert min(link["sender_s"], link["receiver_s"]) >= 0


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_message_that_pins_memory_does_not_count(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """The first one of a size between a GPU and another worker takes longer than all that follow."""
    monkeypatch.setattr(links, "_FEWEST", 1)
    monkeypatch.setattr(links, "_BUDGET_S", 0.0)
    sent: list[int] = []
    taken: list[float] = []

    def ask(_: int) -> float:
        if len(taken) == len(sent):
            return 0.0  # the buffer is ready
        taken.append(time.perf_counter() + (9.0 if len(sent) == 1 else 0.0))
        return taken[-1]

    lane: Any = SimpleNamespace(
        rank=0, device=torch.device("cpu"), buffer=lambda size: size, reaches_gpu=lambda _: on_gpu,
        tell=lambda *_: None, send=lambda _, size: sent.append(size), ask=ask,
    )  # fmt: skip
    (point,) = links._sweep(lane, 1, [1024], 0.0)
    assert (point.seconds > 5) is not on_gpu
    assert point.samples == 1
