"""This process as the only rank of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from free_ports import free_ports

if TYPE_CHECKING:
    import pytest


def be_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what a launcher would set, with a port that is free now."""
    (port,) = free_ports(1)
    words = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    for name, value in {**words, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
