"""Do all ranks make the same call with the same batch? If not, they wait for each other, or their losses mean nothing.

Before every step, evaluation and forward, and before leaving, rank 0 tells a hash of the call and of the batch: its
structure, shapes, types, plain values, and a sample of the values that lie on the CPU (others would have to be waited
for). Each rank compares it with its own. So a sampler that is seeded differently on one rank is noticed, and so is a
rank that makes a step less.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError

if TYPE_CHECKING:
    from assigner.runtime.membership import Membership

LEAVING = "close()"
"""The call with which a rank leaves."""

_SAMPLE = 1024
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_MOST_WORDS = 8
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
            UsageError: rank 0 makes another call, or has another batch, or this rank or rank 0 leaves alone.
        """
        if self._member.transport is None:
            return
        leaves, structure = pytree.tree_flatten(batch)
        words = [described(leaf) for leaf in leaves]
        text = f"{call} {structure} {words} {checksum(leaves)}"
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> (64 - _BITS)
        mine = digest & ~1 | (call == LEAVING)  # the last bit: whether it is the end
        self._member.at = "the comparison of the ranks' batches"
        first = int(self._member.number_from(0, float(mine)))
        if first != mine:
            if (first ^ mine) & 1:
                self._refuse_to_part(call)
            told = ", ".join(words[:_MOST_WORDS]) + (", ..." if len(words) > _MOST_WORDS else "")
            raise UsageError(
                f"worker:{self._member.rank} and worker:0 differ in what they call or in its batch;"
                f" worker:{self._member.rank} calls {call} with {told or 'nothing'}",
                hint="every rank makes the same calls with the same batches: seed the sampler alike, and shard no data",
            )

    def _refuse_to_part(self, call: str) -> NoReturn:
        """This rank or rank 0 leaves the run, and the other one does not: tell it of the one that leaves."""
        me = self._member.rank
        leaver, other, what = (me, 0, "another call") if call == LEAVING else (0, me, call)
        error = UsageError(
            f"its pipeline was closed, or its script came to an end, while worker:{other} went on with {what}",
            hint="every rank makes the same calls with the same batches: as many steps, then close()",
        )
        self._member.blame(leaver, error)
        raise error


def described(leaf: Any) -> str:
    """A leaf of a batch in a word: a tensor's type and shape, a plain value itself."""
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return "a nested tensor"
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    if isinstance(leaf, np.ndarray):
        return f"array {leaf.dtype}{list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__


def checksum(batch: Any) -> int:
    """Of shapes, types and some thousand values of every tensor on the CPU in a tree, and of its plain values.

    Arrays count like tensors, an object of another class by its attributes.
    """
    return _added(0, batch, inside=False)


def _added(found: int, tree: Any, *, inside: bool) -> int:
    """A checksum with a tree's added to it; `inside` an object no other is looked into, for they may be in circles."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            found = _added(found, list(leaf.unbind()), inside=inside)
        elif isinstance(leaf, torch.Tensor):
            found = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), found)
            own = type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # else its values are elsewhere
            if own and leaf.device.type == "cpu" and leaf.layout is torch.strided and leaf.numel():
                values = leaf.detach().as_subclass(torch.Tensor).reshape(-1)
                sample = values[:: -(-len(values) // _SAMPLE)].contiguous()
                found = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), found)
        elif isinstance(leaf, np.ndarray):
            flat = leaf.reshape(-1)
            sampled = flat[:: max(1, -(-flat.size // _SAMPLE))]
            values_of = sampled.tolist() if leaf.dtype.hasobject else sampled.tobytes()
            found = zlib.crc32(f"{leaf.shape} {leaf.dtype} {values_of!r}".encode(), found)
        elif isinstance(leaf, _PLAIN):
            found = zlib.crc32(repr(leaf).encode(), found)
        elif not inside and hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            found = _added(found, dict(vars(leaf)), inside=True)
    return found
