"""One rank's share of a profiling run: it agrees with the others on what is measured, and measures its part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.errors import FormatError
from assigner.formats.profile import Measurement
from assigner.location import Location
from assigner.machine.heap import keep_freed_memory
from assigner.machine.kernel import core_numbers
from assigner.machine.starvation import cores_shared, slower_together
from assigner.model.marking import PartitionGraph, partition_graph
from assigner.profiler.assembly import RankReport, main_dtype, optimizer_name
from assigner.profiler.collectives import SIZES, measure_collectives
from assigner.profiler.computetimes import ComputeMeasurement
from assigner.profiler.host import VisibleGpus, device_place, host_facts, rank_device, start_up, visible_gpus
from assigner.profiler.journal import FoundWires, Head, Journal, Note, OptimizerSize, journal_path
from assigner.profiler.links import SweepOptions, measure_links
from assigner.profiler.options import LINKS, Selection
from assigner.profiler.partitionbench import state_bytes
from assigner.profiler.rankprogress import OTHERS, Forecast, RanksProgress
from assigner.profiler.tasks import Point, RankState, Start, assign_tasks, check_states
from assigner.profiler.walk import representatives
from assigner.runtime.forward.randomness import kept_generators
from assigner.runtime.recording.reference import measure_reference
from assigner.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from assigner.model.workload import Workload
    from assigner.profiler.options import Links, ProfileDestination, ProfileOptions
    from assigner.profiler.rankprogress import Exchange, RankProgress

_ROUND_S = 5.0  # a round of links, until one is measured
_REDUCES_S = 2.0  # a round of all-reduces


class RankSession:
    """This rank's share of a run; `show` is called on rank 0 with the progress."""

    def __init__(
        self,
        workload: Workload,
        entry: str,
        options: ProfileOptions,
        table: Exchange,
        show: Callable[[RankProgress], None],
    ) -> None:
        self.workload, self.entry, self.options, self.table = workload, entry, options, table
        self.rank = table.rank
        seen = table.to_all("visible GPUs", visible_gpus(), VisibleGpus)
        self.device = rank_device(options.devices, seen, self.rank)
        self.worker = str(Location(self.rank, str(self.device)))
        if self.device.type == "cpu":
            keep_freed_memory()
        self.forecast = Forecast()
        self.progress = RanksProgress(table, self.worker, show)
        self.tell("tracing the model")
        self.graph: PartitionGraph = partition_graph(workload, options.marks or None)
        self.kinds = representatives(self.graph)
        with kept_generators(self.device):
            self.state_share = start_up(workload, self.graph, self.device)
        self.meet()
        places = table.to_all("devices", device_place(self.device, seen[self.rank]), str)
        self.sharing = places.count(places[self.rank])
        cores = table.to_all("cores", core_numbers(), tuple[int, ...])
        beside = [rank for rank, each in enumerate(seen) if each.host == seen[self.rank].host and rank != self.rank]
        cores_shared(cores[self.rank], [cores[rank] for rank in beside])
        computing = [cores[rank] for rank in beside if places[rank] == places[self.rank]]
        slower = slower_together(torch.get_num_threads(), cores[self.rank], computing)
        self.facts = host_facts(  # with all that training has loaded too, on every rank of the host
            self.device, sharing=self.sharing, slower=slower if self.device.type == "cpu" else 1.0
        )
        self.meet()

    def tell(self, what: str) -> None:
        """Note what is measured now."""
        self.table.begin(what, OTHERS if self.progress.together else "")
        self.progress.tell(what, self.forecast)

    def meet(self) -> None:
        """Wait until every rank is here."""
        with self.table.waiting(f"the wait for all ranks after {self.table.at}"):
            dist.barrier()

    def agree(self, start: Start, output: ProfileDestination | None) -> None:
        """Learn what the other ranks have, and what is to be measured: what rank 0 says.

        Without an output, which the journal lies beside, no journal is kept.

        Raises:
            RefusedError: the run cannot become one profile; all ranks raise it.
        """
        self.table.begin("the agreement of the ranks")
        self.start = start = self.table.to_all("settings", start, Start)[0]
        self.sizes, self.selection = start.micro_batches, Selection(start.only)
        self.journal = Journal(None if output is None else self._journal_path(output), self._head(start))
        refused = self._load_journal() if output is not None and output.resume else None
        mine = RankState(
            self.facts, self.graph.fingerprint, tuple(self.journal.points), tuple(self.journal.links),
            tuple(self.journal.collectives), refused,
        )  # fmt: skip
        self.offers = self.table.to_all("offers", mine, RankState)
        self.meet()  # whoever refuses leaves, and may take the store with it
        check_states(start, self.offers)
        if output is not None:
            self._begin_journal(output)
        self.task = assign_tasks(
            self.offers, self.rank, kinds=self.kinds, sizes=self.sizes, selection=self.selection,
            isolated=start.isolated, links=start.links,
        )  # fmt: skip

    def measure(self) -> RankReport:
        """Compute first, then links, then all-reduces."""
        compute = ComputeMeasurement(
            self.workload, self.graph, self.device, self.worker, self.facts.memory_bytes / 4, self.state_share,
            self.forecast, self.tell, self.sharing,
            force_busy=self.options.force_busy, split_backward=self.options.split_backward,
        )  # fmt: skip
        planned_s = compute.plan(self.task.run)
        self.forecast.plan("links", self.table.ranks - 1 if self.task.links else 0, _ROUND_S)
        self.forecast.plan("all-reduces", len(self.task.collectives), _REDUCES_S)
        turns = self.table.ranks if self.start.isolated else 1
        self.meet()
        reference = measure_reference(self.device)
        self.forecast.plan("turns of other workers", turns - 1, planned_s)
        for turn in range(turns):
            self.meet()
            if turns > 1 and turn != self.rank:
                self.forecast.begin("turns of other workers")
            elif self.task.run:
                with kept_generators(self.device):
                    compute.measure(self.task.run, self._keep)
            with kept_generators(self.device):
                self.progress.finish_phase(compute.go_on if turns == 1 else lambda: False)
            self.forecast.work("turns of other workers", turn + (turn < self.rank))
        compute.forget()
        self.meet()
        if self.task.links:
            self._measure_links()
        if self.task.collectives:
            self._measure_collectives()
        self.meet()
        reference = reference.together(measure_reference(self.device))
        by_the_clock = self.start.isolated and self.facts.threads > 1  # one thread's processor time is shared out
        return RankReport(
            replace(self.facts, slower=1.0) if by_the_clock else self.facts,
            tuple(self.journal.points.values()),
            dict(self.journal.optimizer_bytes),
            tuple(self.journal.links.values()),
            tuple(self.journal.notes),
            reference,
            tuple(self.journal.collectives.values()),
            self.journal.wires,
        )

    def _keep(self, found: Measurement | OptimizerSize | Note) -> None:
        """Into the journal, unless it was run for the company of another worker alone."""
        if isinstance(found, Measurement):
            point: Point | None = Point(found.partition, found.micro_batch)
        else:
            point = found.point if isinstance(found, Note) else None
        if point is None or point in self.task.keep:
            self.journal.add(found)

    def _rounds(self, kind: str) -> Callable[[int, int], None]:
        """From here on all ranks measure this kind of work together; what is called before each of its rounds."""

        def at(done: int, rounds: int) -> None:
            self.forecast.works[kind].pieces = rounds
            self.forecast.work(kind, done)
            self.tell(f"{kind}, round {done + 1} of {rounds}")

        self.forecast.begin(kind)
        self.progress.together = True
        self.tell(kind)
        return at

    def _measure_links(self) -> None:
        wires = measure_links(
            [offer.facts for offer in self.offers], self._link_options(), self.device,
            wanted=lambda source, target: (source, target) in self.task.links, done=self.journal.add,
            progress=self._rounds("links"),
        )  # fmt: skip
        if self.rank == 0:
            self.journal.add(FoundWires(tuple(wires)))

    def _measure_collectives(self) -> None:
        """No tensor is larger than all gradients of the model, or than what links may carry."""
        tensors = self.graph.deferred.tensors()
        gradients = sum(state_bytes(piece, tensors)[1] for piece in self.graph.pieces)
        options = self._sweep_options(min(self.options.max_message or SIZES[-1], max(SIZES[0], gradients)))
        measure_collectives(
            [offer.facts for offer in self.offers], self.task.collectives, options, self.device,
            done=self.journal.add, progress=self._rounds("all-reduces"),
        )  # fmt: skip

    def _link_options(self) -> SweepOptions:
        named = self.selection.words and LINKS not in self.selection.words
        return self._sweep_options(
            self._largest_message(),
            typical=largest_message(self.graph, self.sizes[len(self.sizes) // 2]),
            pairs="all" if named and self.start.links == "auto" else self.start.links,
        )

    def _sweep_options(self, largest: int, *, typical: int = 1, pairs: Links = "auto") -> SweepOptions:
        return SweepOptions(
            largest, typical, pairs, main_dtype(self.graph.deferred.tensors()), timeout_s=self.options.timeout_s,
            force_busy=self.options.force_busy, backend=self.options.backend,
        )  # fmt: skip

    def _largest_message(self) -> int:
        return self.options.max_message or largest_message(self.graph, self.workload.batch_size)

    def _journal_path(self, output: ProfileDestination) -> Path | None:
        """None where the profile's folder is not there: hosts need not share one."""
        if not output.path.parent.is_dir():
            output.notice(
                f"worker:{self.rank} keeps no journal: there is no folder {output.path.parent} on its host; after an"
                " interruption it starts over"
            )
            return None
        return journal_path(output.path, self.rank)

    def _head(self, start: Start) -> Head:
        return Head(
            entry=self.entry,
            fingerprint=self.graph.fingerprint,
            batch_size=self.workload.batch_size,
            optimizer=optimizer_name(self.workload, self.graph),
            micro_batches=start.micro_batches,
            largest_message=self._largest_message(),
            isolated=start.isolated,
            only=self.selection.words,
            updates=start.updates,
            worker=self.worker,
            device=self.facts.kind,
            threads=self.facts.threads,
            ranks=self.table.ranks,
            tool_version=__version__,
            torch=torch.__version__,
            backend=self.options.backend or "",
            split_backward=self.options.split_backward,
        )

    def _load_journal(self) -> str | None:
        """Take over the journal; returns why it cannot be taken over."""
        try:
            self.journal.load()
        except FormatError as error:
            return f"{error.message}; {error.hint}"
        unknown = next((each.partition for each in self.journal.points if each.partition not in self.kinds), None)
        return None if unknown is None else f"{self.journal.path}: {unknown!r} is no partition that is measured"

    def _begin_journal(self, output: ProfileDestination) -> None:
        """Where there is nothing to go on with, or nobody asked for it, a new one."""
        if self.rank == 0:
            left = self.journal.path is not None and self.journal.path.exists()
            if left and not output.resume:
                output.notice(
                    f"{self.journal.path} was left by an interrupted run and is replaced; --resume goes on with it"
                )
            if output.resume and not any(offer.points or offer.targets or offer.collectives for offer in self.offers):
                output.notice("nothing to go on with: measuring from the start")
        if not output.resume:
            self.journal.remove()


def largest_message(graph: PartitionGraph, batch_size: int) -> int:
    """Bytes of the largest value that crosses between partitions, for so many rows."""
    values = (shape.bytes_per_sample * batch_size + shape.fixed_bytes for shape in graph.values.values())
    return int(max(values, default=0)) or 1 << 20
