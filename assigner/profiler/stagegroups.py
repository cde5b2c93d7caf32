"""Partitions run as a stage of a step: what each takes beside the others, with caches and memory as in training.

Between two micro-batches of a partition a worker runs the rest of its stage, which takes the partition's weights out of
the caches. A partition that is run again and again by itself finds them there (measured on one CPU core: blocks of a
GPT took up to 14 % less, layers of a small MLP 20 to 40 % less than in the model), and so promises too short a step.

    one run, depth 2     F: a0 b0 c0  a1 b1 c1    B: c1 b1 a1  c0 b0 a0       each timed by itself

Those that follow each other are joined to one graph where training joins them, for which a backward takes less: what
it hands on is still in the caches (measured on one CPU core, a worker with all of a model: 3 % for a GPT).

Which points are measured together, and who runs beside them, is said here too. Where memory is short nobody does, and
where it is shorter each point runs alone.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from assigner.machine.heap import return_free_pages
from assigner.model.marking import Value
from assigner.model.singleprocess import as_single_process
from assigner.profiler.sampling import WARM_UP_RUNS, Stopwatch
from assigner.profiler.tasks import Point
from assigner.runtime.step.graphs import ForwardPlace
from assigner.runtime.step.joined import island

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

    from assigner.model.marking import PartitionGraph
    from assigner.profiler.partitionbench import PartitionBench, Workbench

_ALIKE, _STAGE = 6, 6  # partitions of one kind in a stage that is measured, and partitions of any
_IN_TURN = 12  # points that are measured in turn: about 20 s, which is what an interruption costs at most
_ROOM_SHARE = 0.5  # of the memory that is free: what a stage may take
_AGAIN_EVERY = 3  # runs; the others are for the forward and the backward alone, or for a backward in parts


def in_turn(points: Sequence[Point]) -> list[list[Point]]:
    """Points in groups that are measured in turn: even ones, of twelve at most, the sizes of a partition together."""
    by_name: dict[str, list[Point]] = {}
    for point in points:
        by_name.setdefault(point.partition, []).append(point)
    groups = max(1, math.ceil(len(points) / _IN_TURN))
    found: list[list[Point]] = []
    for alike in by_name.values():
        begun = sum(len(each) for each in found)
        if not found or (len(found) < groups and begun >= len(found) * len(points) / groups):
            found.append([])
        found[-1] += alike
    return found


def stage_partitions(graph: PartitionGraph, names: Sequence[str], budget_bytes: float = math.inf) -> list[str]:
    """Partitions to run beside some, as in a stage: others of their kinds, and where those are few their neighbours.

    Parameters and buffers of the company take no more than the budget.
    """
    order, tensors = [piece.name for piece in graph.pieces], graph.deferred.tensors()
    alike = Counter(graph.piece[name].kind for name in names)
    near = sorted(set(order) - set(names), key=lambda name: (abs(order.index(name) - order.index(names[0])), name))
    found: list[str] = []
    for name in sorted(near, key=lambda name: graph.piece[name].kind not in alike):  # the like ones first
        kind, size = graph.piece[name].kind, sum(tensors[each].nbytes for each in graph.piece[name].state)
        wanted = alike[kind] < _ALIKE if kind in alike else len(names) + len(found) < _STAGE
        if wanted and size <= budget_bytes:
            found.append(name)
            budget_bytes -= size
            if kind in alike:
                alike[kind] += 1
    return found


def measured_stages(benches: Mapping[Point, PartitionBench], workbench: Workbench) -> list[StageBench]:
    """Points of each size as one stage, with others beside them; where memory is short each of them alone."""
    return [
        stage
        for size in dict.fromkeys(point.micro_batch for point in benches)
        for stage in _of_size({each: benches[each] for each in benches if each.micro_batch == size}, size, workbench)
    ]


def alone(point: Point, bench: PartitionBench, workbench: Workbench, *, depth: int) -> StageBench:
    """A point as a stage of its own, where memory is short."""
    return StageBench(
        [AloneBench(bench)], {point: [bench]}, depth=depth, is_crowded=True, device=workbench.device,
        in_parts=workbench.in_parts,
    )  # fmt: skip


def _of_size(mine: Mapping[Point, PartitionBench], size: int, workbench: Workbench) -> list[StageBench]:
    beside: dict[Point, PartitionBench] = {}
    for name in stage_partitions(workbench.graph, [point.partition for point in mine]):
        if name in workbench.modules:
            try:
                beside[Point(name, size)] = workbench.companion(Point(name, size))
            except MemoryError:
                break  # the others are measured without it
    for others in (beside, {}):
        stage = _together(mine, others, workbench)
        if stage is not None:
            return [stage]
        for bench in beside.values():
            bench.leave()
    return [alone(point, bench, workbench, depth=bench.depth) for point, bench in mine.items()]


def _together(
    mine: Mapping[Point, PartitionBench], others: Mapping[Point, PartitionBench], workbench: Workbench
) -> StageBench | None:
    """A stage of these and those, with as many micro-batches in flight as fit; None: not even one does."""
    benches, room = {**mine, **others}, _ROOM_SHARE * workbench.room()
    deepest = min(bench.depth for bench in mine.values())
    needed = {
        depth: sum(workbench.held[each].needed(depth=depth) for each in benches) for depth in range(1, 1 + deepest)
    }
    depth = max((each for each in needed if needed[each] <= room), default=None)
    if depth is None:
        return None
    place = {piece.name: n for n, piece in enumerate(workbench.graph.pieces)}
    alike = {
        point: [benches[each] for each in benches if workbench.kind(each) == workbench.kind(point)] for point in mine
    }
    ordered = [benches[point] for point in sorted(benches, key=lambda each: place[each.partition])]
    return StageBench(
        joined_benches(ordered), alike, depth=depth, is_crowded=2 * needed[depth] > room,
        device=workbench.device, in_parts=workbench.in_parts,
    )  # fmt: skip


class AloneBench(NamedTuple):
    """A partition of a stage that has a graph of its own; `again`: it runs as one that rematerialises."""

    bench: PartitionBench
    again: bool = False

    @property
    def benches(self) -> Sequence[PartitionBench]:
        """It."""
        return (self.bench,)

    def forward(self, micro_batch: int, watch: Stopwatch) -> None:
        """Run a forward and note its time."""
        self.bench.forward(micro_batch, again=self.again)
        watch.mark("forward", self.bench.name)

    def backward(self, micro_batch: int, watch: Stopwatch) -> None:
        """Likewise a backward."""
        self.bench.backward(micro_batch, again=self.again)
        watch.mark("backward", self.bench.name)


class JoinedBenches:
    """Partitions of a stage with one graph, as in training; the time of each ends where that of the next begins."""

    def __init__(self, benches: Sequence[PartitionBench]) -> None:
        self.benches = benches
        for each in benches:
            each.runner.graphs = benches[0].runner.graphs
        self._watch: Stopwatch | None = None
        self._part = self._under_way = ""
        self.island = island([each.runner for each in benches], joins=True, entered=self._enter)

    def forward(self, micro_batch: int, watch: Stopwatch) -> None:
        """Run all forwards, and note the time of each."""
        found = {
            value: read
            for each in reversed(self.benches)
            for value, read in zip(each.runner.piece.reads, each.reads[micro_batch], strict=True)
        }
        reads, sizes = [found[value] for value in self.island.reads], [n for each in self.benches for n in each.sizes]
        self._part, self._watch, self._under_way = "forward", watch, ""
        with as_single_process():
            self.island.runner.forward(ForwardPlace(0, 0, micro_batch), reads, sizes)
        self._enter("")

    def backward(self, micro_batch: int, watch: Stopwatch) -> None:
        """Likewise the backward; what nobody else reads gets its gradients here."""
        for each in self.benches:
            each.begin_backward(micro_batch)
        made = {Value(each.name, n): gradient for each in self.benches for n, gradient in enumerate(each.gradients)}
        gradients = [made[each.value] for each in self.island.outputs]
        for each in self.benches:
            if each.runner.finish is not None:
                gradients += each.gradients
        self._part, self._watch, self._under_way = "backward", watch, ""
        self.island.runner.backward(ForwardPlace(0, 0, micro_batch), gradients)
        self._enter("")

    def _enter(self, name: str) -> None:
        """A forward or a backward has come to this partition; empty: to its end."""
        if name != self._under_way and self._watch is not None and self._under_way:
            self._watch.mark(self._part, self._under_way)
        self._under_way = name


def joined_benches(benches: Sequence[PartitionBench]) -> list[AloneBench | JoinedBenches]:
    """Those of a stage joined that may be, each reading what one in front makes; in the model's order, all run once."""
    found: list[list[PartitionBench]] = []
    for bench in benches:
        before = {each.name for each in found[-1]} if found and found[-1][-1].joins() and bench.joins() else set()
        read = zip(bench.runner.piece.reads, bench.needs_gradient, strict=True)
        if any(differentiable and value.partition in before for value, differentiable in read):
            found[-1].append(bench)
        else:
            found.append([bench])
    return [JoinedBenches(some) if len(some) > 1 else AloneBench(some[0]) for some in found]


class StageBench:
    """Partitions that are ready to run.

    Every few runs they also run as rematerialised ones: whose first forward keeps nothing and so finds memory that is
    still in the caches, and whose recompute seeds the generators and restores the buffers (measured on one CPU core: a
    block of a GPT takes 11 % less than two forwards and a backward, one of a ResNet up to 20 % less, small partitions 1
    to 4 % more). `in_parts`: every few runs their backwards run in two parts, too: the input parts of a micro-batch,
    then the weight parts.

    Those that are measured have with them others like them in the stage, whose times are their own too. `is_crowded`:
    memory is short, and what a run has freed is given back before the next one, which takes its own before it is timed.
    """

    def __init__(
        self,
        stage: Sequence[AloneBench | JoinedBenches],
        measured: Mapping[Point, Sequence[PartitionBench]],
        *,
        depth: int,
        is_crowded: bool,
        device: torch.device,
        in_parts: bool = False,
    ) -> None:
        self.stage, self.measured, self.depth, self.is_crowded = stage, measured, depth, is_crowded
        self.benches = [bench for some in stage for bench in some.benches]
        self.in_parts, self.device = in_parts, device
        self.watch = Stopwatch(device)
        self.runs = 0

    def run(self) -> tuple[float, ...]:
        """Seconds of a forward, then of a backward, of each measured partition: means over micro-batches and alike."""
        if self.is_crowded and self.device.type == "cpu":
            return_free_pages()
            self._timed(again=False)  # it takes its memory anew, as training does in its first step alone
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
            for alike in self.measured.values()
            for times in (forward, backward)
        )

    def leave(self, but: Collection[PartitionBench] = ()) -> None:
        """Have all partitions, or all others, give back what they hold between runs."""
        for bench in self.benches:
            if bench not in but:
                bench.leave()

    def _timed(self, *, again: bool) -> tuple[list[float], list[float]]:
        """Each partition's forward and backward, in seconds of a micro-batch; `again`: each by itself, recomputed."""
        stage = [AloneBench(bench, again=True) for bench in self.benches] if again else self.stage
        self.watch.mark()
        for micro_batch in range(self.depth):
            for some in stage:
                some.forward(micro_batch, self.watch)
        for micro_batch in reversed(range(self.depth)):
            for some in reversed(stage):
                some.backward(micro_batch, self.watch)
        seconds = self.watch.by_owner()
        forward, backward = (
            [seconds[part, bench.name] / self.depth for bench in self.benches] for part in ("forward", "backward")
        )
        return forward, backward

    def _timed_parts(self) -> list[tuple[float, float]]:
        """Each partition's input and weight part, in seconds of a micro-batch."""
        for micro_batch in range(self.depth):
            for bench in self.benches:
                bench.forward(micro_batch, again=False)
        self.watch.mark()
        for micro_batch in reversed(range(self.depth)):
            for bench in reversed(self.benches):
                bench.backward(micro_batch, split=True)
                self.watch.mark("input", bench.name)
            for bench in reversed(self.benches):
                bench.backward_weight(micro_batch)
                self.watch.mark("weight", bench.name)
        seconds = self.watch.by_owner()
        return [
            (seconds["input", bench.name] / self.depth, seconds["weight", bench.name] / self.depth)
            for bench in self.benches
        ]
