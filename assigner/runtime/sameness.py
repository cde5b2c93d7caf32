"""Do all ranks train on the same batch? A sampler that is seeded differently on each rank teaches the model nothing.

Compared are shapes, types and a sample of the values, in the first step and when the number of rows has changed; all
other steps pay for one comparison of two integers.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError
from assigner.runtime.microbatch import row_count

if TYPE_CHECKING:
    from assigner.runtime.membership import Membership
    from assigner.workload import Batch

_SAMPLE = 1024
_PLAIN = (bool, int, float, str, type(None))


class SameBatch:
    """Compares the batches of all ranks.

    Args:
        member: This rank's part in the run.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._rows: int | None = None

    def check(self, batch: Batch) -> None:
        """Every rank calls this before a step, in a guarded block.

        Raises:
            UsageError: another rank has another batch, in the first step or in one with another number of rows.
        """
        rows = row_count(batch)
        if rows == self._rows:
            return
        self._member.at = "the comparison of the ranks' batches"
        found = self._member.numbers(float(checksum(batch)))
        other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
        if other is not None:
            raise UsageError(
                f"worker:{other} trains on another batch than worker:0 (this is worker:{self._member.rank})",
                hint="every rank needs the same batch: seed the sampler alike on all ranks, and shard no data",
            )
        self._rows = rows


def checksum(batch: Any) -> int:
    """Of shapes, types and some thousand values of every tensor in a tree, and of its plain values."""
    found = 0
    for leaf in torch.utils._pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            found = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), found)
            if leaf.layout is torch.strided and leaf.numel():
                values = leaf.detach().reshape(-1)
                sample = values[:: -(-len(values) // _SAMPLE)].cpu().contiguous()
                found = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), found)
        elif isinstance(leaf, _PLAIN):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found
