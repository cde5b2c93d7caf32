"""Partitions run as a stage of a step: what each takes beside the others, with caches and memory as in training.

Between two micro-batches of a partition a worker runs the rest of its stage, which takes the partition's weights out of
the caches. A partition that is run again and again by itself finds them there (measured on one CPU core: blocks of a
GPT took up to 14 % less, layers of a small MLP 20 to 40 % less than in the model), and so promises too short a step.

    one run, depth 2     F: a0 b0 c0  a1 b1 c1    B: c1 b1 a1  c0 b0 a0       each timed by itself
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.profiler.memory import return_free_pages
from assigner.profiler.sampling import WARM_UP_RUNS
from assigner.profiler.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from assigner.profiler.partitionbench import PartitionBench

_AGAIN_EVERY = 3  # runs; the others are for the forward and the backward alone, or for a backward in parts


class StageBench:
    """Partitions that are ready to run, in the model's order.

    Every few runs they also run as rematerialised ones: whose first forward keeps nothing and so finds memory that is
    still in the caches, and whose recompute seeds the generators and restores the buffers (measured on one CPU core: a
    block of a GPT takes 11 % less than two forwards and a backward, one of a ResNet up to 20 % less, small partitions 1
    to 4 % more).

    Args:
        benches: All partitions of the stage.
        measured: Those that are asked for, each with others like it in the stage; their times are its own too.
        depth: Micro-batches in flight.
        is_crowded: Memory is short: what a run has freed is given back before the next one.
        device: Where they run.
        in_parts: Every few runs their backwards also run in two parts: the input parts of a micro-batch, then the
            weight parts.
    """

    def __init__(
        self,
        benches: Sequence[PartitionBench],
        measured: Sequence[Sequence[PartitionBench]],
        *,
        depth: int,
        is_crowded: bool,
        device: torch.device,
        in_parts: bool = False,
    ) -> None:
        self.benches, self.measured, self.depth, self.is_crowded = benches, measured, depth, is_crowded
        self.in_parts = in_parts
        self.watch = Stopwatch(device)
        self.runs = 0

    def run(self) -> tuple[float, ...]:
        """Seconds of a forward, then of a backward, of each measured partition: means over micro-batches and alike."""
        if self.is_crowded:
            return_free_pages()
        forward, backward = self._timed(again=False)
        if not self.runs % _AGAIN_EVERY and self.runs >= WARM_UP_RUNS:
            forward_again, backward_again = self._timed(again=True)
            for n, bench in enumerate(self.benches):
                bench.compared.append((forward[n] + backward[n], forward_again[n] + backward_again[n]))
        if self.in_parts and self.runs % _AGAIN_EVERY == 1 and self.runs >= WARM_UP_RUNS:
            for n, (bench, parts) in enumerate(zip(self.benches, self._timed_parts(), strict=True)):
                bench.compared_parts.append((backward[n], *parts))
        self.runs += 1
        number = {id(bench): n for n, bench in enumerate(self.benches)}
        return tuple(
            sum(times[number[id(bench)]] for bench in alike) / len(alike)
            for alike in self.measured
            for times in (forward, backward)
        )

    def _timed(self, *, again: bool) -> tuple[list[float], list[float]]:
        """Each partition's forward and backward, in seconds of a micro-batch."""
        count = len(self.benches)
        self.watch.mark()
        for micro_batch in range(self.depth):
            for bench in self.benches:
                bench.forward(micro_batch, again=again)
                self.watch.mark()
        for micro_batch in reversed(range(self.depth)):
            for bench in reversed(self.benches):
                bench.backward(micro_batch, again=again)
                self.watch.mark()
        laps = self.watch.seconds()
        forwards, backwards = laps[: count * self.depth], laps[count * self.depth :]
        forward = [sum(forwards[n::count]) / self.depth for n in range(count)]
        backward = [sum(backwards[count - 1 - n :: count]) / self.depth for n in range(count)]
        return forward, backward

    def _timed_parts(self) -> list[tuple[float, float]]:
        """Each partition's input and weight part, in seconds of a micro-batch."""
        count = len(self.benches)
        for micro_batch in range(self.depth):
            for bench in self.benches:
                bench.forward(micro_batch, again=False)
        self.watch.mark()
        for micro_batch in reversed(range(self.depth)):
            for bench in reversed(self.benches):
                bench.backward_input(micro_batch)
                self.watch.mark()
            for bench in reversed(self.benches):
                bench.backward_weight(micro_batch)
                self.watch.mark()
        laps = self.watch.seconds()
        return [
            (sum(laps[count - 1 - n :: 2 * count]) / self.depth, sum(laps[2 * count - 1 - n :: 2 * count]) / self.depth)
            for n in range(count)
        ]
