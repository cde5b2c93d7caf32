"""Profiles and traces of tests measure briefly: tests look at what they have, not at how steady its times are."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

START = Path(__file__).resolve().parent / "start"
LIMITS: dict[str, dict[str, float]] = {
    "assigner.profiler.sampling": {"WARM_UP_S": 0.02, "SAMPLE_S": 0.01, "LIMIT_S": 0.05},
    "assigner.profiler.links": {"_BUDGET_S": 0.02},
    "assigner.profiler.contention": {"_LARGEST_BYTES": 1 << 20},
    "assigner.profiler.busy": {"_ALONE_S": 0.002, "_STREAM_S": 0.05},
    "assigner.profiler.collectives": {"_STREAM_S": 0.02, "_BUDGET_S": 0.02, "_WATCH_S": 0.02},
    "assigner.runtime.recording.reference": {"_COMPUTE_S": 0.01, "_MEMORY_S": 0.01, "_MESSAGE_S": 0.01},
}
"""By module: how long it measures, and with how much, at most. Of memory a profile has as much as ever."""
COUNTS: dict[str, dict[str, float]] = {
    "assigner.profiler.sampling": {"WARM_UP_RUNS": 1, "MINIMUM_SAMPLES": 3},
    "assigner.profiler.stagegroups": {"WARM_UP_RUNS": 1},
    "assigner.profiler.computetimes": {"_SETTLING_RUNS": 1},
}
"""By module: few runs of each partition, one of them to settle memory."""


def measuring_briefly(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables under which Python runs `start/sitecustomize.py` when it begins: `LIMITS` hold there."""
    paths = [str(START), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def measure_briefly(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have this process, and what is forked from it, measure briefly, and run partitions a few times."""
    for figures in (LIMITS, COUNTS):
        for name, named in figures.items():
            module = importlib.import_module(name)
            for each, figure in named.items():
                assert hasattr(module, each), f"{name}.{each}"
                change(module, each, figure)
