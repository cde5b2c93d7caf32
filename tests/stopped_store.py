"""The store of a run whose process is stopped."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from torch.distributed import HashStore

if TYPE_CHECKING:
    from collections.abc import Iterator


class StoppedStore(HashStore):
    """It answers once it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.goes_on.wait()
        return super().check(keys)

    def add(self, key: str, amount: int) -> int:
        self.goes_on.wait()
        return super().add(key, amount)


@contextlib.contextmanager
def stopped_store() -> Iterator[StoppedStore]:
    """One that goes on when the block ends: no thread waits for it afterwards."""
    found = StoppedStore()
    try:
        yield found
    finally:
        found.goes_on.set()
