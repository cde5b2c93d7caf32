"""What the ranks tell each other while they measure: JSON through the job's store, checked on reading."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from assigner.launch.limitedstore import LimitedStore
from assigner.launch.seal import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")


class Exchange:
    """The ranks' common table.

    Args:
        store: The job's store.
        rank: This rank.
        ranks: How many there are.
        timeout_s: A wait for another rank that takes longer fails; so does a call that the store does not answer.
    """

    def __init__(self, store: Store, rank: int, ranks: int, *, timeout_s: float) -> None:
        self.store, self.rank, self.ranks, self.timeout_s = LimitedStore(store), rank, ranks, timeout_s

    def close(self) -> None:
        """Exchange no more; whoever waits for something is told that the store is silent."""
        self.store.close()

    def to_first(self, name: str, value: T, kind: type[T]) -> list[T]:
        """Every rank's `value`, in their order, on rank 0; empty elsewhere."""
        self.tell(f"{name}/{self.rank}", value)
        return self._collect(name, kind) if self.rank == 0 else []

    def to_all(self, name: str, value: T, kind: type[T]) -> list[T]:
        """Every rank's `value`, in their order, on every rank."""
        self.tell(f"{name}/{self.rank}", value)
        if self.rank == 0:
            self.tell(f"{name}/all", self._collect(name, kind))
        together: Any = tuple[kind, ...]  # type: ignore[valid-type]
        return list(self._get(f"{name}/all", together))

    def tell(self, name: str, value: Any) -> None:
        """Write a value under a name, for whoever looks."""
        self.store.set(f"assigner/{name}", seal(f"assigner/{name}", value))

    def told(self, names: Sequence[str], kind: type[T]) -> list[T]:
        """What stands under some names, without a wait; nothing before all of it does."""
        keys = [f"assigner/{name}" for name in names]
        found = self.store.multi_get(keys) if keys and self.store.check(keys) else []
        return [unseal(kind, key, each) for key, each in zip(keys, found, strict=False)]

    def _collect(self, name: str, kind: type[T]) -> list[T]:
        deadline = time.monotonic() + self.timeout_s
        return [self._get(f"{name}/{rank}", kind, deadline - time.monotonic()) for rank in range(self.ranks)]

    def _get(self, name: str, kind: type[T], wait_s: float | None = None) -> T:
        left = timedelta(seconds=max(1.0, self.timeout_s if wait_s is None else wait_s))
        self.store.wait([f"assigner/{name}"], left)
        return unseal(kind, f"assigner/{name}", self.store.get(f"assigner/{name}"))
