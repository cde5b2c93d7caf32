"""Do all ranks make the same call with the same batch? If not, they wait for each other, or their losses mean nothing.

Before every step, evaluation and forward, and before leaving, rank 0 tells a hash of the call and of the batch: its
structure, shapes, types, plain values, and a sample of the values that lie on the CPU (others would have to be waited
for). Each rank compares it with its own. So a sampler that is seeded differently on one rank is noticed, and so is a
rank that makes a step less.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError

if TYPE_CHECKING:
    from assigner.runtime.membership import Membership

_SAMPLE = 1024
_PLAIN = (bool, int, float, str, type(None))
_BITS = 52  # a float64 holds such a number to the last bit


class SameCall:
    """Compares the calls of all ranks, and their batches.

    Args:
        member: This rank's part in the run.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member

    def check(self, call: str, batch: Any) -> None:
        """Every rank calls this before anything else that it does for a call, in a guarded block.

        Args:
            call: What is called, with its arguments but the batch.
            batch: Of any structure.

        Raises:
            UsageError: rank 0 makes another call, or has another batch.
        """
        if self._member.transport is None:
            return
        leaves, structure = pytree.tree_flatten(batch)
        words = [described(leaf) for leaf in leaves]
        text = f"{call} {structure} {words} {checksum(leaves)}"
        mine = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> (64 - _BITS)
        self._member.at = "the comparison of the ranks' batches"
        if self._member.number_from(0, float(mine)) != mine:
            raise UsageError(
                f"worker:{self._member.rank} and worker:0 differ in what they call or in its batch;"
                f" worker:{self._member.rank} calls {call} with {', '.join(words) or 'nothing'}",
                hint="every rank makes the same calls with the same batches: seed the sampler alike, and shard no data",
            )


def described(leaf: Any) -> str:
    """A leaf of a batch in a word: a tensor's type and shape, a plain value itself."""
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__


def checksum(batch: Any) -> int:
    """Of shapes, types and some thousand values of every tensor on the CPU in a tree, and of its plain values."""
    found = 0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            found = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), found)
            if leaf.device.type == "cpu" and leaf.layout is torch.strided and leaf.numel():
                values = leaf.detach().reshape(-1)
                sample = values[:: -(-len(values) // _SAMPLE)].contiguous()
                found = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), found)
        elif isinstance(leaf, _PLAIN):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found
