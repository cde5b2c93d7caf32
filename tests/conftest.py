"""What several tests need: the lab, where this machine has it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from assigner.lab import lacks

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that start ranks or hosts come first: they wait a lot, and beside them (-n 2) the quick ones fill up."""
    slow = {item.path for item in items if item.get_closest_marker("distributed") or item.get_closest_marker("lab")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def busy_machine() -> Iterator[None]:
    """What the tests run beside each other takes nothing from their profiles: none is measured twice, none refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSIGNER_PROFILE_FORCE_BUSY", "1")
        yield


@pytest.fixture(scope="session")
def lab() -> Path:
    """The folder of the cluster files; skips where the lab cannot work."""
    missing = [lack.what for lack in lacks() if lack.feature != "latency"]
    if missing:
        pytest.skip(f"assigner lab cannot work here: {'; '.join(missing)}")
    return ROOT / "examples" / "clusters"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT
