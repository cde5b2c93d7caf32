"""Initial values that are made once: each partition alone would replay the draws of the whole model before its own.

They are kept while sides are built, and made again for later ones: beside sides that train they would be in the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.model.deferred import DeferredModel
from assigner.model.deferred.recorder import is_meta

if TYPE_CHECKING:
    from assigner.model.deferred.replay import ReplayedMemory


class ReplayedModel(DeferredModel):
    """A model without memory beside its initial values, of which every materialised tensor is a copy.

    Args:
        deferred: The model; it stays as it is.
    """

    def __init__(self, deferred: DeferredModel) -> None:
        vars(self).update(vars(deferred))
        self._deferred = deferred
        self._values: dict[int, ReplayedMemory] = {}

    def replayed(self, storages: set[int]) -> dict[int, ReplayedMemory]:
        """Copies of the memory behind some storages."""
        if not self._values:
            every = {tensor.untyped_storage()._cdata for tensor in self.tensors().values() if is_meta(tensor)}
            self._values = self._deferred.replayed(every)
        return {storage: self._values[storage].copy() for storage in storages}

    def forget(self) -> None:
        """Do not keep the values any longer."""
        self._values = {}
