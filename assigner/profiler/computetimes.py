"""This rank's partitions under measurement: a few at a time in turn, and kept as soon as they are done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from assigner import formatting as fmt
from assigner.errors import MeasurementError
from assigner.formats.profile import Measurement
from assigner.formats.profilewarnings import launch_bound
from assigner.machine.starvation import REFUSED, StarvationWatch
from assigner.model.marking import PartitionGraph, PartitionModule
from assigner.model.workload import Workload
from assigner.profiler.host import allocator_share
from assigner.profiler.journal import Note, OptimizerSize
from assigner.profiler.memory import grown_bytes, memory_errors, peak_bytes
from assigner.profiler.partitionbench import Workbench
from assigner.profiler.rankprogress import Forecast
from assigner.profiler.sampling import least_disturbed, measure_interleaved
from assigner.profiler.stagegroups import StageBench, alone, in_turn, measured_stages, stage_partitions
from assigner.profiler.tasks import Point
from assigner.profiler.update import UpdateBench, trained
from assigner.profiler.walk import KindInputs, chunks, collect_inputs
from assigner.runtime.recording.memory import free_bytes
from assigner.samples import Samples

if TYPE_CHECKING:
    from assigner.profiler.partitionbench import PartitionBench, PartitionBytes

_SAFE = 0.9  # of the free memory: what a measurement may be expected to take
_LAUNCH_BOUND = 0.9
_RUNTIME_BYTES = 6 << 20  # graphs, records and oneDNN's kernels of a CPU worker (four models on two ranks: 5 to 8 MiB)
_SETTLING_RUNS = 3  # of a stage, after which its heap hardly grows; one of them rematerialises
_COMPANY_SHARE = 0.25  # of what the measured ones may take
_WALK_S, _POINT_S, _UPDATE_S = 0.5, 1.7, 1.5  # a forward of the model, a point, an update: until one is measured

Found = Measurement | OptimizerSize | Note


@dataclass(frozen=True)
class _Timing:
    """Of one point; `holes_bytes` is what the heap takes beside the tensors of its stage.

    `starved` is the share of the processor time that other programs had.
    """

    forward: Samples
    backward: Samples
    launch_share: float
    holes_bytes: int
    starved: float


@dataclass(frozen=True)
class _PartitionUpdate:
    """Of one partition."""

    samples: Samples
    workspace_bytes: int
    state_bytes: int
    starved: float = 0.0


@dataclass
class ComputeMeasurement:
    """What this rank measures of the partitions."""

    workload: Workload  # its optimizer, loss and batches
    graph: PartitionGraph  # its partitions
    device: torch.device
    worker: str
    budget_bytes: float  # parameters and buffers that may be there at once
    state_share: float  # bytes of optimizer state for a byte of parameters
    forecast: Forecast  # hears of the progress
    tell: Callable[[str], None]  # called with what is measured now
    sharing: int = 1  # ranks that share the device
    force_busy: bool = False  # take what a busy machine gives
    split_backward: bool = False  # time the parts of backwards too
    _latest: Sequence[StageBench] = ()

    def plan(self, run: Sequence[Point]) -> float:
        """Tell the forecast how much there is to do; returns the seconds that it will take as far as is known now."""
        walks, updates = len({point.micro_batch for point in run}), len({point.partition for point in run})
        self.forecast.plan("walk", 1, _WALK_S * walks)
        self.forecast.plan("point", len(run), _POINT_S)
        self.forecast.plan("update", updates, _UPDATE_S)
        return _WALK_S * walks + _POINT_S * len(run) + _UPDATE_S * updates

    def measure(self, run: Sequence[Point], keep: Callable[[Found], None]) -> None:
        """Measure some points; `keep` is called with each as soon as it is done."""
        sizes: dict[str, list[int]] = {}
        for point in run:
            sizes.setdefault(point.partition, []).append(point.micro_batch)
        groups = [
            (chunk, stage_partitions(self.graph, chunk, _COMPANY_SHARE * self.budget_bytes))
            for chunk in chunks(self.graph, list(sizes), self.budget_bytes)
        ]
        inputs = self._inputs(run, [name for _, beside in groups for name in beside])
        for chunk, beside in groups:
            self._latest = ()  # and with them the modules of the chunk before
            modules = self.graph.build([*chunk, *beside], self.device)
            bench = Workbench(
                self.workload, self.graph, self.device, modules, inputs, state_share=self.state_share, room=self._room,
                in_parts=self.split_backward,
            )  # fmt: skip
            for few in in_turn([Point(name, size) for name in chunk for size in sizes[name]]):
                self._measure_few(few, bench, keep)

    def go_on(self) -> bool:
        """Run what was measured last once more, for the company of workers that still measure; False: there is none."""
        for stage in self._latest:
            stage.run()
        return bool(self._latest)

    def forget(self) -> None:
        """Give back what `go_on` has needed."""
        for stage in self._latest:
            stage.leave()
        self._latest = ()

    def _inputs(self, run: Sequence[Point], beside: Sequence[str]) -> dict[int, dict[str, KindInputs]]:
        """What the points read, and their company of other kinds, unless that leaves no memory for a point's own."""
        sizes, names = sorted({point.micro_batch for point in run}), list(dict.fromkeys(each.partition for each in run))
        kinds = {self.graph.piece[name].kind for name in names}
        strange = [name for name in beside if self.graph.piece[name].kind not in kinds]
        inputs = self._walk(sizes, [*names, *strange])
        if strange and any(point.partition not in inputs[point.micro_batch] for point in run):
            inputs = self._walk(sizes, names)
        return inputs

    def _walk(self, sizes: Sequence[int], wanted: Collection[str]) -> dict[int, dict[str, KindInputs]]:
        def at(name: str, share: float) -> None:
            self.forecast.work("walk", share)
            self.tell(f"the model's forward, partition {name!r}")

        return collect_inputs(
            self.workload, self.graph, sizes, self.device,
            budget_bytes=self.budget_bytes, wanted=wanted, on_partition=at,
            inputs_bytes=self.budget_bytes, room=self._room,
        )  # fmt: skip

    def _measure_few(self, few: Sequence[Point], workbench: Workbench, keep: Callable[[Found], None]) -> None:
        """Measure some points in turn, then the updates of their partitions; no memory for one is kept as that."""
        self.forecast.begin("point")
        benches: dict[Point, PartitionBench] = {}
        for point in few:
            self.tell(f"partition {point.partition!r} at micro-batch {point.micro_batch}")
            try:
                benches[point] = workbench.measured(point)
            except MemoryError as error:
                keep(self._infeasible(point, error))
        timings = self._timings(few, benches, workbench, keep)
        for name in dict.fromkeys(point.partition for point in few):
            mine = {point: timing for point, timing in timings.items() if point.partition == name}
            try:
                update = self._update(name, workbench.modules[name], is_wanted=bool(mine))
            except MemoryError as error:
                for point in mine:
                    keep(self._infeasible(point, error))
                continue
            if mine:
                keep(OptimizerSize(self.graph.piece[name].kind, update.state_bytes))
            for point, timing in mine.items():
                if self.device.type == "cuda" and (share := timing.launch_share) > _LAUNCH_BOUND:
                    # a GPU that waits for its host is as fast as the host
                    keep(Note(launch_bound(point.partition, self.worker, point.micro_batch, share), point))
                keep(self._measurement(point, benches[point], timing, workbench.held[point], update))
        for bench in benches.values():
            bench.leave()

    def _timings(
        self, few: Sequence[Point], benches: dict[Point, PartitionBench], workbench: Workbench,
        keep: Callable[[Found], None],
    ) -> dict[Point, _Timing]:  # fmt: skip
        """Seconds of the points; where memory does not last for them together, of each of them alone."""
        together = measured_stages(benches, workbench)
        before, timings = self.forecast.done("point"), dict[Point, _Timing]()
        try:
            timings = self._sampled(together, before, len(few))
            fits = True
        except MemoryError:
            fits = False
        if not fits:  # outside of the handler: what the error holds is free by now
            for stage in together:
                stage.leave()
            for n, (point, bench) in enumerate(benches.items()):
                single = alone(point, bench, workbench, depth=1)
                try:
                    with memory_errors():
                        bench.join(workbench.held[point])
                    timings |= self._sampled([single], before + n, 1)
                except MemoryError as error:
                    keep(self._infeasible(point, error))
                single.leave()
        self.forecast.work("point", before + len(few))
        for stage in together:  # the company makes room for the optimizer's state
            stage.leave(but=[*benches.values()])
        return timings

    def _sampled(self, some: Sequence[StageBench], before: float, count: int) -> dict[Point, _Timing]:
        if not some:
            return {}
        names = list(dict.fromkeys(point.partition for stage in some for point in stage.measured))

        def at(share: float) -> None:
            self.forecast.work("point", before + share * count)
            self.tell(f"compute of {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")

        patience = count / (2 * max(1, len(some)))  # a stage of many points is worth more than one of two
        with memory_errors():
            samples, starved = self._undisturbed(
                lambda: measure_interleaved([stage.run for stage in some], at, patience=patience), names
            )
            holes = [_holes_bytes(stage, self.device) for stage in some]
        self._latest = some
        return {
            point: _Timing(parts[2 * n], parts[2 * n + 1], stage.watch.launch_share, beside, starved)
            for stage, parts, beside in zip(some, samples, holes, strict=True)
            for n, point in enumerate(stage.measured)
        }

    def _undisturbed(
        self, measure: Callable[[], list[tuple[Samples, ...]]], names: Sequence[str]
    ) -> tuple[list[tuple[Samples, ...]], float]:
        """What was measured, and the share of this process's processor time that others had.

        Raises:
            MeasurementError: they had most of it, both times.
        """

        def watched() -> tuple[list[tuple[Samples, ...]], float]:
            watch = StarvationWatch(torch.get_num_threads())
            return measure(), watch.share()

        samples, starved = least_disturbed(watched, itemgetter(1), once=self.force_busy)
        if starved >= REFUSED and not self.force_busy:
            raise MeasurementError(
                f"other programs have {100 * starved:.0f} % of the processor time that is {self.worker}'s share, while"
                f" it measures {fmt.ranges(names)}: such figures say nothing of it",
                hint="wait for a quiet machine (uptime, top) and go on with --resume, or take them with --force-busy",
            )
        return samples, starved

    def _update(self, name: str, module: PartitionModule, *, is_wanted: bool) -> _PartitionUpdate:
        """A partition's update; its optimizer's state is gone before the next one is made."""
        before = self.forecast.done("update")
        self.forecast.begin("update")
        self.tell(f"the update of partition {name!r}")
        found = _PartitionUpdate(Samples((0.0,)), 0, 0)
        try:
            if is_wanted and trained(module):
                with memory_errors():
                    held = {self.graph.canonical[n]: module.get_parameter(n) for n in self.graph.piece[name].parameters}
                    bench = UpdateBench(self.workload, self.graph, held, self.device, room=self._room())
                    (((samples,),), starved) = self._undisturbed(
                        lambda: measure_interleaved(
                            [bench.run], lambda share: self.forecast.work("update", before + share)
                        ),
                        [name],
                    )
                    found = _PartitionUpdate(samples, bench.workspace_bytes(), bench.state_bytes(), starved)
        finally:
            self.forecast.work("update", before + 1)
            self.forecast.begin("point")
        return found

    def _measurement(
        self, point: Point, bench: PartitionBench, timing: _Timing, took: PartitionBytes, update: _PartitionUpdate
    ) -> Measurement:
        forward, backward = timing.forward, timing.backward
        # at an update no micro-batch is in flight, so what one keeps may hold it
        workspace = timing.holes_bytes + max(took.workspace_bytes, update.workspace_bytes - took.activation_bytes)
        parts = bench.parts(backward.median_s, took.activation_bytes)
        return Measurement(
            point.partition, self.worker, point.micro_batch, forward.median_s, backward.median_s,
            update.samples.median_s, took.activation_bytes, workspace, len(forward.seconds),
            max(forward.spread, backward.spread),
            update_spread=update.samples.spread, recompute_s=bench.recompute_s(forward.median_s, backward.median_s),
            starved=min(1.0, max(timing.starved, update.starved)),
            backward_input_s=parts[0], backward_weight_s=parts[1], waiting_bytes=parts[2],
        )  # fmt: skip

    def _infeasible(self, point: Point, error: MemoryError) -> Measurement:
        why = f"out of memory when measured ({str(error).splitlines()[0][:120]})"
        return Measurement(point.partition, self.worker, point.micro_batch, infeasible=why)

    def _room(self) -> float:
        """Bytes that a measurement may take now."""
        return _SAFE * free_bytes(self.device, sharing=self.sharing)


def _holes_bytes(stage: StageBench, device: torch.device) -> int:
    """What a worker's memory has beside a stage's tensors and the allocator's share of them, which a price has anyway.

    On a CPU that is the runtime's own, and the heap's holes.

    The stage runs by itself, some times: a heap that serves micro-batches of several sizes in turn keeps the holes of
    them all, and training has one size (measured on a GPT with 0.9 MB of parameters: 56 MB at 4, 16 and 64 rows alike
    where their stages took turns; alone 5, 17 and 26 MB).
    """
    grown = grown_bytes(lambda: [stage.run() for _ in range(_SETTLING_RUNS)], device)
    peak = peak_bytes(stage.run, device)
    own = _RUNTIME_BYTES if device.type == "cpu" else 0
    return own + max(0, int(grown / (1 + allocator_share(device.type))) - peak)
