"""This process as the only rank of a run, and of a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from free_ports import free_ports

from assigner.profiler import computetimes, sampling, stagegroups

if TYPE_CHECKING:
    import pytest


def be_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what a launcher would set, with a port that is free now."""
    (port,) = free_ports(1)
    words = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    for name, value in {**words, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))


def measure_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have its profiles take a few short samples of each point."""
    for name, seconds in (("WARM_UP_S", 0.0), ("SAMPLE_S", 0.001), ("LIMIT_S", 0.05)):
        monkeypatch.setattr(sampling, name, seconds)
    for module, name in ((sampling, "WARM_UP_RUNS"), (stagegroups, "WARM_UP_RUNS"), (computetimes, "_SETTLING_RUNS")):
        monkeypatch.setattr(module, name, 1)
