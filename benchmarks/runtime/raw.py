"""The reference: a chain of stages by `isend` and `irecv` alone, written for this one case by hand.

    gpipe, M = 3   rank 0: F0 F1 F2          B2 B1 B0      1f1b   rank 0: F0 F1       B0 F2 B1    B2
                   rank 1:    F0 F1 F2 B2 B1 B0                   rank 1:    F0 B0 F1 B1    F2 B2

Receives are posted two messages ahead, sends are waited for at the step's end. No thread, no check, no name.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chain import Chain

_AHEAD = 2


def order(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[tuple[bool, int]]:
    """What a rank does in a step: (is a forward, micro-batch)."""
    depth = micro_batches if schedule == "gpipe" else min(micro_batches, ranks - rank)
    found = [(True, m) for m in range(depth)]
    if schedule == "gpipe":
        return [*found, *((False, m) for m in reversed(range(micro_batches)))]
    for m in range(micro_batches):
        found += [(False, m), (True, m + depth)] if m + depth < micro_batches else [(False, m)]
    return found


class RawLoop:
    """One rank's stage and its loop."""

    def __init__(self, chain: Chain, schedule: str) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.micro_batches = chain.micro_batches
        self.stages = chain.modules([self.rank])
        self.optimizer = chain.workload.optimizer(list(self.stages.parameters()))
        self.loss = chain.workload.loss
        self.inputs, self.targets = chain.batch
        self.order = order(schedule, self.rank, self.ranks, chain.micro_batches)
        self.first, self.last = self.rank == 0, self.rank == self.ranks - 1
        self.received, self.made = _boundaries(chain, self.rank)
        self.posted: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def step(self, *, update: bool = True) -> float | None:
        """One step; the loss, on the last rank."""
        self.optimizer.zero_grad()
        inputs, targets = self.inputs.chunk(self.micro_batches), self.targets.chunk(self.micro_batches)
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        losses, sent = [], []
        posting = self._posting()
        for _ in range(_AHEAD):
            next(posting, None)
        for is_forward, m in self.order:
            if is_forward:
                x = inputs[m] if self.first else self._take(posting).requires_grad_()
                y = self.stages(x)
                if self.last:
                    y = self.loss(y, targets[m]) / self.micro_batches
                    losses.append(y.detach())
                else:
                    sent.append(dist.isend(y.detach(), self.rank + 1, tag=2 * m))
                kept[m] = x, y
            else:
                x, y = kept.pop(m)
                torch.autograd.backward(y, None if self.last else self._take(posting))
                if not self.first:
                    sent.append(dist.isend(x.grad, self.rank - 1, tag=2 * m + 1))
        for work in sent:
            work.wait()
        if update:
            self.optimizer.step()
        return float(sum(losses)) if self.last else None

    def _posting(self) -> Iterator[None]:
        """Post the receives of a step, one at each turn."""
        for is_forward, m in self.order:
            if self.first if is_forward else self.last:
                continue
            buffer = torch.empty(self.received if is_forward else self.made)
            peer, tag = (self.rank - 1, 2 * m) if is_forward else (self.rank + 1, 2 * m + 1)
            self.posted.append((buffer, dist.irecv(buffer, peer, tag=tag)))
            yield

    def _take(self, posting: Iterator[None]) -> torch.Tensor:
        buffer, work = self.posted.popleft()
        work.wait()
        next(posting, None)
        return buffer

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients."""
        return self.stages.gradients()


def _boundaries(chain: Chain, rank: int) -> tuple[Sequence[int], Sequence[int]]:
    """The shapes that a rank's stage takes in and gives out."""
    with torch.no_grad():
        x = chain.batch[0].chunk(chain.micro_batches)[0]
        for each in range(rank):
            x = chain.modules([each])(x)
        return x.shape, chain.modules([rank])(x).shape
