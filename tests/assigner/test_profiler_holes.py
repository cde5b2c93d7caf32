"""What a heap takes beside the tensors is measured of each micro-batch size by itself, as training has one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from assigner.profiler import computetimes
from assigner.profiler.computetimes import ComputeMeasurement
from assigner.profiler.host import allocator_share
from assigner.profiler.rankprogress import Forecast
from assigner.profiler.tasks import Point
from assigner.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.profiler.stagegroups import StageBench

MB = 10**6


class Heap:
    """A heap that keeps holes of every micro-batch size that has run since a call of `grown` began."""

    def __init__(self, holes: dict[int, int], tensors: dict[int, int]) -> None:
        self.holes, self.tensors, self.ran = holes, tensors, set[int]()

    def stage(self, size: int) -> StageBench:
        """A stage of one partition at a micro-batch size."""

        def run() -> tuple[float, float]:
            self.ran.add(size)
            return 1.0, 2.0

        watch = SimpleNamespace(launch_share=0.0)
        return cast("StageBench", SimpleNamespace(measured={Point("head", size): []}, run=run, watch=watch))

    def grown(self, run: Callable[[], object], _device: torch.device) -> int:
        """As `memory.grown_bytes`: pages of the largest run's tensors, the allocator's share of them, and holes."""
        self.ran.clear()
        run()
        share = 1 + allocator_share("cpu")
        return round(share * (max(map(self.tensors.get, self.ran)) + sum(map(self.holes.get, self.ran))))  # type: ignore[arg-type,type-var]

    def peak(self, run: Callable[[], object], _device: torch.device) -> int:
        """As `memory.peak_bytes`."""
        self.ran.clear()
        run()
        return max(self.tensors[size] for size in self.ran)


def test_the_holes_of_large_micro_batches_are_not_added_to_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's workspace at 4 rows was that of stages of 64 rows which took turns with it: 120 MB for 178 KiB."""
    heap = Heap(holes={4: 3 * MB, 64: 26 * MB}, tensors={4: 18 * MB, 64: 77 * MB})
    monkeypatch.setattr(computetimes, "grown_bytes", heap.grown)
    monkeypatch.setattr(computetimes, "peak_bytes", heap.peak)

    def interleaved(runs: list[Callable[[], tuple[float, ...]]], *_: object, **__: object) -> list[tuple[Samples, ...]]:
        for run in runs:
            run()
        return [(Samples((1.0,)), Samples((2.0,)))] * len(runs)

    monkeypatch.setattr(computetimes, "measure_interleaved", interleaved)
    share = ComputeMeasurement(
        cast("computetimes.Workload", None), cast("computetimes.PartitionGraph", None), torch.device("cpu"),
        "worker:0/cpu", 1e9, 0.0, Forecast(), lambda _: None, force_busy=True,
    )  # fmt: skip
    found = share._sampled([heap.stage(4), heap.stage(64)], 0, 2)
    beside = {point.micro_batch: timing.holes_bytes for point, timing in found.items()}
    own = computetimes._RUNTIME_BYTES
    assert beside == pytest.approx({4: own + 3 * MB, 64: own + 26 * MB}, abs=1)
