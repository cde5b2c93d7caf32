"""One profiling run: every rank measures its worker and its links, rank 0 puts the profile together."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from assigner.errors import MeasurementError, UsageError
from assigner.marking import PartitionGraph, partition_graph
from assigner.profile import Measurement, Profile
from assigner.profiler.assembly import RankReport, assemble
from assigner.profiler.compute import PartitionBench, UpdateBench
from assigner.profiler.host import host_facts
from assigner.profiler.links import measure_links
from assigner.profiler.sampling import Sample, measure_interleaved
from assigner.profiler.walk import KindInputs, chunks, collect_inputs, representatives
from assigner.runtime.failure import FailureWatch
from assigner.runtime.partition import PartitionRunner
from assigner.runtime.randomness import kept_generators
from assigner.usercode import user_code

if TYPE_CHECKING:
    from assigner.workload import Workload

Progress = Callable[[str, float], None]

_DEPTH = 4


@dataclass(frozen=True)
class ProfileOptions:
    """Settings of a profiling run.

    Args:
        micro_batches: Micro-batch sizes to measure, in rows; empty: those of 16, 8 and 4 micro-batches.
        marks: Name patterns of partitions besides the workload's own.
        max_message: Largest message of the link sweeps, in bytes; None: the largest that a plan could send.
        reserve: Share of a worker's memory that plans leave alone.
        isolated: Workers of one host measure one after another, not at the same time.
        timeout_s: A wait for another rank that takes longer ends the run.
    """

    micro_batches: tuple[int, ...] = ()
    marks: tuple[str, ...] = ()
    max_message: int | None = None
    reserve: float = 0.08
    isolated: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.micro_batches):
            raise UsageError(f"micro-batch sizes {self.micro_batches}: each is 1 or more")
        if not 0 <= self.reserve < 1:
            raise UsageError(f"reserve {self.reserve} is not allowed; expected a share from 0 to below 1")


def default_micro_batches(batch_size: int) -> tuple[int, ...]:
    """The sizes of 16, 8 and 4 micro-batches, as near as the batch size has divisors; two sizes at least."""
    divisors = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    sizes = {min(divisors, key=lambda size: abs(size - batch_size / count)) for count in (16, 8, 4)}
    larger = [size for size in divisors if size > max(sizes)]
    if len(sizes) == 1 and larger:
        sizes.add(larger[0])
    return tuple(sorted(sizes))


def profile_workload(
    workload: Workload,
    entry: str,
    options: ProfileOptions,
    *,
    progress: Progress | None = None,
) -> Profile | None:
    """Measure a workload. Every rank of the run calls this; the process group is made here and left again.

    Args:
        workload: What to measure.
        entry: Where it comes from, for the profile.
        options: Settings.
        progress: Called on every rank with what is going on and the share done.

    Returns:
        The profile on rank 0, None elsewhere.

    Raises:
        MarkingError: the model cannot be cut.
        MeasurementError: a rank was lost.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout_s))
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    own = store.clone()  # type: ignore[attr-defined]  # a connection of its own: calls on one wait for each other
    watch = FailureWatch(own, f"worker:{rank}", exit_code=MeasurementError.exit_code)
    session = None
    try:
        session = _Session(workload, options, progress or (lambda *_: None))
        report = session.measure()
        reports = _gather(store, rank, report, options.timeout_s)
        watch.close()
        if rank:
            return None
        return assemble(workload, session.graph, reports, entry=entry, sizes=session.sizes, reserve=options.reserve)
    except Exception as error:
        at = session.at if session else "the start"
        if "gloo" in str(error):  # torch has no type of its own for a connection that broke
            raise MeasurementError(watch.lost("another rank", at, error).to_error().message) from error
        watch.report(at, error)
        with user_code(f"the measurement of {at}"):
            raise
    finally:
        dist.destroy_process_group()


class _Session:
    """This rank's share of a run.

    Attributes:
        at: What is being measured; for errors.
    """

    def __init__(self, workload: Workload, options: ProfileOptions, progress: Progress) -> None:
        self.workload, self.options, self.progress = workload, options, progress
        self.at = "tracing the model"
        progress(self.at, 0.0)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = _device()
        self.worker = f"worker:{self.rank}/{self.device}"
        self.graph: PartitionGraph = partition_graph(workload, options.marks)
        self.facts = host_facts(self.device)  # behind the trace, which loads much of torch: training does so too
        self.sizes = tuple(sorted(set(options.micro_batches or default_micro_batches(workload.batch_size))))
        self.budget = self.facts.memory_bytes / 4
        self.measurements: list[Measurement] = []
        self.optimizer_bytes: dict[str, int] = {}

    def measure(self) -> RankReport:
        """Compute first, then links."""
        turns = self.world if self.options.isolated else 1
        for turn in range(turns):
            dist.barrier()
            if turns == 1 or turn == self.rank:
                with kept_generators(self.device):
                    self._measure_compute()
        dist.barrier()
        self.at = "links"
        largest = self.options.max_message or largest_message(self.graph, self.workload.batch_size)
        sweeps = measure_links(
            self.rank, self.world, largest, lambda done, all_: self.progress("links", 0.8 + 0.2 * done / all_)
        )
        return RankReport(self.facts, tuple(self.measurements), dict(self.optimizer_bytes), tuple(sweeps))

    def _measure_compute(self) -> None:
        inputs: dict[int, dict[str, KindInputs]] = {}
        for size in self.sizes:
            self.at = f"the forward of the model at micro-batch {size}"
            self.progress(self.at, 0.05)
            inputs[size] = collect_inputs(self.workload, self.graph, size, self.device, self.budget)
        names = list(representatives(self.graph).values())
        done = 0
        for chunk in chunks(self.graph, names, self.budget):
            self._measure_chunk(chunk, inputs, done / len(names), len(chunk) / len(names))
            done += len(chunk)

    def _measure_chunk(
        self, chunk: Sequence[str], inputs: dict[int, dict[str, KindInputs]], before: float, share: float
    ) -> None:
        """Build some partitions and measure them in turn, at every size; what runs out of memory is kept as that."""
        modules = self.graph.build(chunk, self.device)
        benches: dict[tuple[str, int], PartitionBench] = {}
        for name in chunk:
            for size in self.sizes:
                self.at = f"partition {name!r} at micro-batch {size}"
                self.progress(self.at, 0.05 + 0.75 * before)
                bench = self._bench(name, modules[name], inputs[size][name], self._depth(size))
                try:
                    bench.prepare()
                    benches[name, size] = bench
                except (torch.OutOfMemoryError, MemoryError) as error:
                    self._infeasible(name, size, error)
        samples = measure_interleaved(
            [bench.run for bench in benches.values()],
            lambda steady, all_: self.progress(
                f"compute of {', '.join(chunk[:3])}{' ...' if len(chunk) > 3 else ''}",
                0.05 + 0.75 * (before + share * steady / all_),
            ),
        )
        updates: dict[str, Sample] = {}
        for name in chunk:
            self.at = f"the update of partition {name!r}"
            update = UpdateBench(self.workload, modules[name], self.device)
            ((updates[name],),) = measure_interleaved([update.run])
            self.optimizer_bytes[self.graph.piece[name].kind] = update.state_bytes()
        for ((name, size), bench), (forward, backward) in zip(benches.items(), samples, strict=True):
            held = bench.bytes()
            self.measurements.append(
                Measurement(
                    name, self.worker, size, forward.median, backward.median, updates[name].median,
                    held.activation_bytes, held.workspace_bytes, forward.count, max(forward.spread, backward.spread),
                )
            )  # fmt: skip

    def _infeasible(self, name: str, size: int, error: BaseException) -> None:
        why = f"out of memory when measured ({str(error).splitlines()[0][:120]})"
        self.measurements.append(Measurement(name, self.worker, size, infeasible=why))

    def _depth(self, size: int) -> int:
        """Micro-batches in flight while a size is measured: those of a step, a few at most."""
        return max(1, min(_DEPTH, self.workload.batch_size // size))

    def _bench(self, name: str, module: Any, given: KindInputs, depth: int) -> PartitionBench:
        piece = self.graph.piece[name]
        runner = PartitionRunner(
            piece,
            module,
            self.device,
            rematerialise=False,
            gradients=self.graph.output_gradients(piece),
            finish=self._loss(given) if piece is self.graph.last else None,
        )
        needs = [bool(value.partition) and self.graph.values[value].gradient for value in piece.reads]
        return PartitionBench(runner, given.reads, needs, given.sizes, device=self.device, depth=depth)

    def _loss(self, given: KindInputs) -> Callable[[Sequence[torch.Tensor], int], tuple[torch.Tensor, ...]]:
        targets = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(self.device), given.micro_batch.targets
        )
        return lambda outputs, _: (self.workload.loss(self.graph.rebuild_output(outputs), targets),)


def largest_message(graph: PartitionGraph, batch_size: int) -> int:
    """Bytes of the largest message that any plan could send."""
    values = (shape.bytes_per_sample * batch_size + shape.fixed_bytes for shape in graph.values.values())
    return int(max(values, default=0)) or 1 << 20


def _device() -> torch.device:
    """The device of this rank: a GPU of its own where the host has one for it, else the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and local < torch.cuda.device_count():
        return torch.device("cuda", local)
    return torch.device("cpu")


def _gather(store: Any, rank: int, report: RankReport, timeout_s: float) -> list[RankReport]:
    """All ranks' reports on rank 0, through the job's store."""
    store.set(f"assigner/report/{rank}", json.dumps(asdict(report)))
    if rank:
        dist.barrier()
        return []
    found: list[RankReport] = []
    deadline = time.monotonic() + timeout_s
    for each in range(dist.get_world_size()):
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store.wait([f"assigner/report/{each}"], left)
        found.append(RankReport.from_json(json.loads(store.get(f"assigner/report/{each}"))))
    dist.barrier()
    return found
