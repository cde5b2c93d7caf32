"""One partition at work: forward, recompute and backward of a micro-batch, as an autograd island.

What a partition reads are leaves of its own little graph; their gradients add up over all its readers on this worker,
and go to the partition that made the value. A rematerialised micro-batch keeps no graph, only what it read, and runs
its forward again right before its backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from assigner.marking import Piece
from assigner.marking.casting import casting
from assigner.marking.writing import position
from assigner.runtime.batchnorm import DeferredStatistics
from assigner.runtime.compiling import Forward
from assigner.runtime.randomness import partition_seed, seed_device


class Place(NamedTuple):
    """Which forward this is: the randomness and the micro-batch belong to it.

    Args:
        seed: The workload's seed.
        step: The batch's number in training.
        micro_batch: The micro-batch's number.
        last: It is the step's last one.
    """

    seed: int
    step: int
    micro_batch: int
    last: bool = False


@dataclass
class PartitionRunner:
    """Runs one partition.

    Args:
        piece: What it reads and makes.
        module: Its forward with its weights.
        device: Where it runs.
        rematerialise: Keep no graph, run the forward again before the backward.
        gradients: Which of its outputs get a gradient back.
        finish: Applied to what the module returned: the last partition's loss, as a tuple of one tensor.
        run: What runs its forward in the place of the module: the module, compiled.
        keep_last: The step's last micro-batch keeps its graph all the same.
        statistics: Of its BatchNorm modules, where they are deferred.
    """

    piece: Piece
    module: fx.GraphModule
    device: torch.device
    rematerialise: bool
    gradients: tuple[bool, ...]
    finish: Callable[[Sequence[torch.Tensor], int], tuple[torch.Tensor, ...]] | None = None
    run: Forward | None = None
    keep_last: bool = False
    statistics: DeferredStatistics | None = None
    _graphs: dict[int, list[GradientEdge | None]] = field(default_factory=dict)
    _buffers: list[torch.Tensor] | None = None
    _changing: set[int] = field(default_factory=set)

    def recomputes(self, place: Place) -> bool:
        """The forward runs again before this backward, and needs what it read."""
        return self.rematerialise and not (self.keep_last and place.last)

    def forward(self, place: Place, reads: Sequence[torch.Tensor], sizes: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Run the forward of one micro-batch.

        Args:
            place: Which micro-batch.
            reads: The values of `piece.reads`: leaves, which get their gradients in `.grad`.
            sizes: The numbers of `piece.sizes`.

        Returns:
            The outputs, without graph.
        """
        if self.recomputes(place):
            with torch.no_grad(), self._watched_buffers():
                outputs = self._run(place, reads, sizes)
        else:
            outputs = self._run(place, reads, sizes)
            self._graphs[place.micro_batch] = self._roots(outputs)
        return tuple(output.detach() for output in outputs)

    def backward(
        self,
        place: Place,
        reads: Sequence[torch.Tensor],
        sizes: Sequence[Any],
        output_gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Run the backward of one micro-batch; gradients land in the parameters and in the leaves that were read.

        Args:
            place: As in the forward.
            reads: As in the forward; only one that recomputes looks at them.
            sizes: Likewise.
            output_gradients: For each output its gradient; None: nobody used it (the loss has none and needs none).
        """
        if self.recomputes(place):
            if self.finish is None and all(gradient is None for gradient in output_gradients):
                return  # nothing in it, or behind it, is trained
            with self._kept_buffers():
                roots = self._roots(self._run(place, reads, sizes))
        else:
            roots = self._graphs.pop(place.micro_batch)
        pairs = [
            (root, gradient)
            for root, gradient in zip(roots, output_gradients, strict=True)
            if root is not None and (gradient is not None or self.finish is not None)
        ]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])

    def forget(self) -> None:
        """Drop the graphs of a step that was not finished."""
        self._graphs.clear()

    def _run(self, place: Place, reads: Sequence[torch.Tensor], sizes: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        seed_device(partition_seed(place.seed, place.step, self.piece.name, place.micro_batch), self.device)
        if self.statistics is not None:
            self.statistics.begin(self.piece.name, place.micro_batch)
        position.first = place.micro_batch == 0
        if self.piece.autocast is None:  # even an empty context is a tenth of a small partition's time
            return self._made(place, reads, sizes)
        with casting(self.piece.autocast, self.device.type):
            return self._made(place, reads, sizes)

    def _made(self, place: Place, reads: Sequence[torch.Tensor], sizes: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        outputs = (self.run or self.module)(*reads, *sizes)
        return outputs if self.finish is None else self.finish(outputs, place.micro_batch)

    def _roots(self, outputs: Sequence[torch.Tensor]) -> list[GradientEdge | None]:
        """Where backward starts, without the outputs' own memory: that is free once they are sent."""
        return [
            get_gradient_edge(output) if wanted and output.requires_grad else None
            for output, wanted in zip(outputs, self.gradients, strict=True)
        ]

    @contextlib.contextmanager
    def _watched_buffers(self) -> Iterator[None]:
        """Learn which buffers the forward changes; most are constants, as masks are.

        torch counts the changes of a tensor, but not those through `.data`: in the first forward values are compared.
        """
        first, before = self._buffers is None, []
        if self._buffers is None:
            self._buffers = list(self.module.buffers())
            before = [buffer.clone() for buffer in self._buffers]
        versions = [buffer._version for buffer in self._buffers]
        yield
        self._changing.update(n for n, buffer in enumerate(self._buffers) if buffer._version != versions[n])
        if first:
            pairs = zip(self._buffers, before, strict=True)
            self._changing.update(n for n, pair in enumerate(pairs) if not _equal(*pair))

    @contextlib.contextmanager
    def _kept_buffers(self) -> Iterator[None]:
        """What a forward counts in buffers it counts once for a micro-batch: a recompute leaves them as they were."""
        assert self._buffers is not None
        buffers = [self._buffers[n] for n in sorted(self._changing)]
        kept = [buffer.clone() for buffer in buffers]
        yield
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.data.copy_(value)  # through .data: not a change that backward would object to


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.layout is torch.strided and torch.equal(one, other)
