"""The clock of one device: events in its own queue on a GPU, `perf_counter` on a CPU."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch


class Stopwatch:
    """Marks along some work, and the seconds between them.

    Args:
        device: Where the work runs. On a GPU the marks are events, which the device itself dates.

    Attributes:
        launch_share: Of the last work's time, the share that the host took to hand it over. Near 1: the device waits
            for the host, and its time says little about it (always 1 on a CPU).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launch_share = 1.0
        self._marks: list[Any] = []
        self._begin_s = 0.0

    def mark(self) -> None:
        """Note the present point; the first mark waits until the device has nothing left to do."""
        if not self._marks:
            self._wait()
            self._begin_s = time.perf_counter()
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between the marks, which are then forgotten."""
        marks, self._marks = self._marks, []
        if self.device.type != "cuda":
            return [end - begin for begin, end in itertools.pairwise(marks)]
        launched_s = time.perf_counter() - self._begin_s
        self._wait()
        self.launch_share = launched_s / max(launched_s, time.perf_counter() - self._begin_s)
        return [begin.elapsed_time(end) / 1000 for begin, end in itertools.pairwise(marks)]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
