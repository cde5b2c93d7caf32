"""This rank's partitions under measurement: a few at a time in turn, and kept as soon as they are done."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from assigner.marking import PartitionGraph
from assigner.profile import Measurement
from assigner.profiler.agreement import Point
from assigner.profiler.compute import PartitionBench, PartitionBytes, TooLargeError, UpdateBench, optimizer_share
from assigner.profiler.forecast import Forecast
from assigner.profiler.host import free_bytes
from assigner.profiler.journal import Note, OptimizerState
from assigner.profiler.memory import return_free_pages
from assigner.profiler.sampling import LIMIT_S, Sample, measure_interleaved
from assigner.profiler.stage import StageBench
from assigner.profiler.walk import KindInputs, chunks, collect_inputs
from assigner.runtime.partition import PartitionRunner
from assigner.workload import Workload

_DEPTH = 4
_SAFE = 0.9  # of the free memory: what a measurement may be expected to take
_LAUNCH_BOUND = 0.9
_ALIKE, _STAGE = 6, 6  # partitions of one kind in a stage that is measured, and partitions of any
_COMPANY_SHARE = 0.25  # of what the measured ones may take
_IN_TURN = 12  # points that are measured in turn: about 20 s, which is what an interruption costs at most
_WALK_S, _POINT_S, _UPDATE_S = 0.5, 1.7, 1.5  # a forward of the model, a point, an update: until one is measured

Modules = Mapping[str, fx.GraphModule]
Inputs = Mapping[int, Mapping[str, KindInputs]]


@dataclass(frozen=True)
class _Stage:
    """The points that a stage's bench measures, in the order of its parts."""

    points: tuple[Point, ...]
    bench: StageBench


@dataclass
class ComputeShare:
    """What this rank measures of the partitions.

    Args:
        workload: Its optimizer, loss and batches.
        graph: Its partitions.
        device: Where they run.
        worker: This rank's worker.
        budget_bytes: Parameters and buffers that may be there at once.
        forecast: Hears of the progress.
        tell: Called with what is measured now.
    """

    workload: Workload
    graph: PartitionGraph
    device: torch.device
    worker: str
    budget_bytes: float
    forecast: Forecast
    tell: Callable[[str], None]

    @cached_property
    def state_share(self) -> float:
        """Bytes of optimizer state for a byte of parameters."""
        return optimizer_share(self.workload, self.device)

    def plan(self, run: Sequence[Point]) -> float:
        """Tell the forecast how much there is to do; returns the seconds that it will take as far as is known now."""
        walks, updates = len({point.micro_batch for point in run}), len({point.partition for point in run})
        self.forecast.plan("walk", 1, _WALK_S * walks)
        self.forecast.plan("point", len(run), _POINT_S)
        self.forecast.plan("update", updates, _UPDATE_S)
        return _WALK_S * walks + _POINT_S * len(run) + _UPDATE_S * updates

    def measure(self, run: Sequence[Point], keep: Callable[[Measurement | OptimizerState | Note], None]) -> None:
        """Measure some points; `keep` is called with each as soon as it is done."""
        sizes: dict[str, list[int]] = {}
        for point in run:
            sizes.setdefault(point.partition, []).append(point.micro_batch)
        groups = [
            (chunk, company(self.graph, chunk, _COMPANY_SHARE * self.budget_bytes))
            for chunk in chunks(self.graph, list(sizes), self.budget_bytes)
        ]
        kinds = {self.graph.piece[name].kind for name in sizes}
        strange = [name for _, beside in groups for name in beside if self.graph.piece[name].kind not in kinds]
        inputs = self._walk(sorted({point.micro_batch for point in run}), [*sizes, *strange])
        for chunk, beside in groups:
            modules = self.graph.build([*chunk, *beside], self.device)
            for few in in_turn([Point(name, size) for name in chunk for size in sizes[name]]):
                for found in self._measure_few(few, modules, inputs):
                    keep(found)

    def _walk(self, sizes: Sequence[int], wanted: Collection[str]) -> dict[int, dict[str, KindInputs]]:
        def at(name: str, share: float) -> None:
            self.forecast.work("walk", share)
            self.tell(f"the model's forward, partition {name!r}")

        return collect_inputs(
            self.workload, self.graph, sizes, self.device,
            budget_bytes=self.budget_bytes, wanted=wanted, on_partition=at,
            inputs_bytes=self.budget_bytes, room=self._room,
        )  # fmt: skip

    def _measure_few(
        self, few: Sequence[Point], modules: Modules, inputs: Inputs
    ) -> Iterator[Measurement | OptimizerState | Note]:
        """Measure some points in turn, then the updates of their partitions; no memory for one is kept as that."""
        self.forecast.begin("point")
        benches: dict[Point, PartitionBench] = {}
        held: dict[Point, PartitionBytes] = {}
        for point in few:
            self.tell(f"partition {point.partition!r} at micro-batch {point.micro_batch}")
            smaller = max((each for each in held if each.partition == point.partition), key=_rows, default=point)
            try:
                bench = self._bench(point, modules, inputs)
                held[point] = bench.prepare(held.get(smaller), scale=point.micro_batch / smaller.micro_batch)
                benches[point] = bench
            except (torch.OutOfMemoryError, MemoryError) as error:
                why = f"out of memory when measured ({str(error).splitlines()[0][:120]})"
                yield Measurement(point.partition, self.worker, point.micro_batch, infeasible=why)
        names = list(dict.fromkeys(point.partition for point in few))
        stages = [stage for size in dict.fromkeys(map(_rows, benches)) for stage in self._stages(
            {point: bench for point, bench in benches.items() if point.micro_batch == size}, held, modules, inputs
        )]  # fmt: skip
        before = self.forecast.done("point")

        def at(share: float) -> None:
            self.forecast.work("point", before + share * len(few))
            self.tell(f"compute of {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")

        limit_s = max(LIMIT_S, len(few) / max(1, len(stages)))
        samples = measure_interleaved([stage.bench.run for stage in stages], at, limit_s=limit_s)
        self.forecast.work("point", before + len(few))
        updates = {}
        for name in names:
            updates[name] = yield from self._update(name, modules[name])
        self.forecast.begin("point")
        for stage, parts in zip(stages, samples, strict=True):
            for n, point in enumerate(stage.points):
                yield from self._launches(point, stage.bench.watch.launch_share)
                forward, backward = parts[2 * n : 2 * n + 2]
                took, (update, at_update) = held[point], updates[point.partition]
                # at an update no micro-batch is in flight, so what one keeps may hold it
                workspace = max(took.workspace_bytes, at_update - took.activation_bytes)
                yield Measurement(
                    point.partition, self.worker, point.micro_batch, forward.median, backward.median, update.median,
                    took.activation_bytes, workspace, forward.count, max(forward.spread, backward.spread),
                    update_spread=update.spread,
                    recompute_s=benches[point].recompute_s(forward.median + backward.median),
                )  # fmt: skip

    def _stages(
        self, mine: dict[Point, PartitionBench], held: dict[Point, PartitionBytes], modules: Modules, inputs: Inputs
    ) -> list[_Stage]:
        """Points of one size as one stage, with others beside them; where memory is short each of them alone."""
        beside: dict[Point, PartitionBench] = {}
        size = next(iter(mine)).micro_batch
        for name in company(self.graph, [point.partition for point in mine]):
            if name in modules:
                point = Point(name, size)
                try:
                    bench = self._bench(point, modules, inputs)
                    held[point] = bench.prepare()
                    beside[point] = bench
                except (torch.OutOfMemoryError, MemoryError):
                    break  # the others are measured without it
        for others in (beside, {}):
            benches = {**mine, **others}
            needed = {each: sum(held[point].needed(depth=each) for point in benches) for each in range(1, _DEPTH + 1)}
            depth = min(bench.depth for bench in mine.values())
            while depth > 1 and needed[depth] > self._room() / 2:
                depth -= 1
            if needed[depth] <= self._room() / 2:
                return [self._stage(list(mine), benches, depth=depth, is_crowded=2 * needed[depth] > self._room() / 2)]
        return [
            self._stage([point], {point: bench}, depth=bench.depth, is_crowded=True) for point, bench in mine.items()
        ]

    def _stage(
        self, points: Sequence[Point], benches: dict[Point, PartitionBench], *, depth: int, is_crowded: bool
    ) -> _Stage:
        order = {piece.name: n for n, piece in enumerate(self.graph.pieces)}
        kind = {point: self.graph.piece[point.partition].kind for point in benches}
        bench = StageBench(
            [benches[point] for point in sorted(benches, key=lambda each: order[each.partition])],
            [[benches[each] for each in benches if kind[each] == kind[point]] for point in points],
            depth=depth, is_crowded=is_crowded, device=self.device,
        )  # fmt: skip
        return _Stage(tuple(points), bench)

    def _launches(self, point: Point, share: float) -> Iterator[Note]:
        """A GPU that waits for its host is as fast as the host: say so."""
        if self.device.type == "cuda" and share > _LAUNCH_BOUND:
            yield Note(
                f"{point.partition} on {self.worker} at micro-batch {point.micro_batch} is launch-bound: the host takes"
                f" {share:.0%} of its time to hand it over"
            )

    def _update(self, name: str, module: fx.GraphModule) -> Generator[OptimizerState, None, tuple[Sample, int]]:
        """Seconds and workspace of a partition's update; its optimizer's state is gone before the next one is made."""
        before = self.forecast.done("update")
        self.forecast.begin("update")
        self.tell(f"the update of partition {name!r}")
        update = UpdateBench(self.workload, module, self.device)
        ((sample,),) = measure_interleaved([update.run], lambda share: self.forecast.work("update", before + share))
        yield OptimizerState(self.graph.piece[name].kind, update.state_bytes())
        return sample, update.workspace_bytes()

    def _room(self) -> float:
        """Bytes that a measurement may take now."""
        return_free_pages()
        return _SAFE * free_bytes(self.device)

    def _depth(self, size: int) -> int:
        """Micro-batches in flight while a size is measured: those of a step, a few at most."""
        return max(1, min(_DEPTH, self.workload.batch_size // size))

    def _bench(self, point: Point, modules: Modules, inputs: Inputs) -> PartitionBench:
        """A partition with the inputs of the one that stands for its kind."""
        piece, module = self.graph.piece[point.partition], modules[point.partition]
        known = inputs[point.micro_batch]
        given = next((known[name] for name in known if self.graph.piece[name].kind == piece.kind), None)
        if given is None:
            raise TooLargeError(f"inputs of more than {self.budget_bytes / 1e6:,.1f} MB are not kept")
        runner = PartitionRunner(
            piece,
            module,
            self.device,
            rematerialise=False,
            gradients=self.graph.output_gradients(piece),
            finish=self._loss(given) if piece is self.graph.last else None,
        )
        needs = [bool(value.partition) and self.graph.values[value].gradient for value in piece.reads]
        return PartitionBench(
            runner, given.reads, needs, given.sizes, device=self.device, depth=self._depth(point.micro_batch),
            optimizer_bytes=self.state_share * sum(each.nbytes for each in module.parameters()),
            room=self._room,
        )  # fmt: skip

    def _loss(self, given: KindInputs) -> Callable[[Sequence[torch.Tensor], int], tuple[torch.Tensor, ...]]:
        targets = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(self.device), given.micro_batch.targets
        )
        return lambda outputs, _: (self.workload.loss(self.graph.rebuild_output(outputs), targets),)


def _rows(point: Point) -> int:
    return point.micro_batch


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


def company(graph: PartitionGraph, names: Sequence[str], budget_bytes: float = math.inf) -> list[str]:
    """Partitions to run beside some, as in a stage: others of their kinds, and where those are few their neighbours.

    Args:
        graph: The model's partitions.
        names: Those that are measured.
        budget_bytes: What parameters and buffers of the company may take.
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
