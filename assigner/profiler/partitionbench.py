"""Partitions on this worker with the inputs of their kinds, ready to run, and the memory that they take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.model.deferred.mutation import storage_of
from assigner.model.marking import PartitionGraph, PartitionModule
from assigner.model.marking.fakeforward import is_same_view
from assigner.model.singleprocess import as_single_process
from assigner.model.workload import Workload
from assigner.profiler.memory import allocated_bytes, grown_bytes, memory_errors, peak_bytes, saved_bytes, storage_bytes
from assigner.profiler.tasks import Point
from assigner.profiler.walk import KindInputs
from assigner.runtime.forward.compiling import compiled
from assigner.runtime.forward.state import PartitionState
from assigner.runtime.step.graphs import ForwardPlace
from assigner.runtime.step.lossgradients import LossGraph, Origin
from assigner.runtime.step.partition import Finish, PartitionRunner

if TYPE_CHECKING:
    from assigner.model.marking import Piece

_GROUPS = 7
_DEAREST = 1.25  # forwards: the dearest recompute that was seen, of an embedding whose dropout is drawn again
_MARGIN = 1.4  # the heap's holes: 1.7 to 2.5 times the tensors' bytes in runs of the same partition (glibc 2.36)
_MOST_HEAP = 4.0
_NOISE_BYTES = 4 << 20  # that a process grows by for other reasons


@dataclass(frozen=True)
class PartitionBytes:
    """Bytes of one partition at one micro-batch size."""

    activation_bytes: int  # kept from the forward to the backward, outputs left out
    workspace_bytes: int  # needed besides while it runs
    output_bytes: int  # of its outputs
    heap: float = 1.0  # how many times the bytes of its tensors the process grew while they came and went: 1 or more

    def needed(self, *, depth: int = 1, scale: float = 1.0) -> float:
        """Bytes at the peak with some micro-batches in flight, at `scale` times the rows."""
        return self.heap * scale * (depth * (self.activation_bytes + 2 * self.output_bytes) + self.workspace_bytes)


def counted_elsewhere(
    runner: PartitionRunner, reads: Sequence[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """What is there anyway, beside what a forward keeps: parameters, buffers, and what other partitions made.

    So is the batch on a CPU. A GPU gets a copy of what a partition reads of it, for each micro-batch: what a forward
    keeps of that counts as its own.
    """
    there = [value for value, read in zip(reads, runner.piece.reads, strict=True)
             if read.partition or device.type != "cuda"]  # fmt: skip
    return [*runner.module.parameters(), *runner.module.buffers(), *there]


class PartitionBench:
    """One partition with its inputs, ready to be run again and again.

    It is run as in a step under GPipe (stagegroups.py): some micro-batches forward, then these backward. So each
    forward finds memory that is new to it and not what the last one has just freed (measured on a GPT on two CPU ranks:
    one micro-batch at a time promises steps that are 14 % too short). The gradients of its parameters stay allocated,
    as they are for every micro-batch but the first of a step.

    The runner is the runtime's own, not rematerialising. It reads real values, from the partitions before it;
    `optimizer_bytes` is what the optimizer will keep for its parameters, and `room` the bytes that are free now. Where
    as many micro-batches do not fit in flight, `depth` is less.
    """

    def __init__(
        self,
        runner: PartitionRunner,
        reads: Sequence[torch.Tensor],
        needs_gradient: Sequence[bool],
        sizes: Sequence[Any],
        *,
        device: torch.device,
        depth: int,
        optimizer_bytes: float = 0.0,
        room: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.runner, self.sizes, self.device, self.depth = runner, sizes, device, depth
        self.needs_gradient = needs_gradient
        self.again = replace(runner, rematerialise=True, graphs={})
        self.optimizer_bytes, self.room = optimizer_bytes, room
        # seconds of a forward and a backward, as they are and rematerialised, right after each other
        self.compared = list[tuple[float, float]]()
        # seconds of a backward, and of the input and the weight part of one right after it
        self.compared_parts = list[tuple[float, float, float]]()
        values = [value.detach().to(device) for value in reads]
        self.reads = [
            [value.detach().requires_grad_(wanted) for value, wanted in zip(values, needs_gradient, strict=True)]
            for _ in range(depth)
        ]
        self.gradients: list[torch.Tensor | None] = []

    def prepare(self, smaller: PartitionBytes | None = None, *, scale: float = 1.0) -> PartitionBytes:
        """First forward and backward of one micro-batch: allocates the gradients, and says how many more will fit.

        A process that takes more than its host or its cgroup has is killed, so what would not fit is not tried:
        `smaller` is what the partition takes at a micro-batch of `scale` times fewer rows.

        Raises:
            MemoryError: it does not fit.
        """
        state = self._begin(smaller, scale)
        room = self.room()
        self._first()

        def both() -> None:
            self.forward(0)
            self.backward(0)

        grown = grown_bytes(both, self.device)
        held = self.bytes()
        heap = (grown - _NOISE_BYTES) / max(1.0, held.needed())
        held = replace(held, heap=min(_MOST_HEAP, max(1.0, heap)))
        if state + held.needed() > room:
            raise MemoryError(f"one micro-batch took {held.needed() / 1e6:,.1f} MB of {room / 1e6:,.1f} MB")
        free = self.room() - self.optimizer_bytes
        while self.depth > 1 and _MARGIN * held.needed(depth=self.depth) > free:
            self.depth -= 1
        return held

    def join(self, alike: PartitionBytes) -> None:
        """First forward and backward beside others, of a partition of which it is known what its like takes.

        Raises:
            MemoryError: it does not fit.
        """
        self._begin(alike, 1.0)
        self._first()

    def leave(self) -> None:
        """Give back the gradients, and what runs that broke off have left."""
        for runner in (self.runner, self.again):
            runner.forget()
        for tensor in (*self.runner.module.parameters(), *(value for reads in self.reads for value in reads)):
            tensor.grad = None

    def _begin(self, like: PartitionBytes | None, scale: float) -> float:
        """Look whether it fits; bytes of the gradients and the optimizer's state that are not there yet."""
        waiting = [each for each in self.runner.module.parameters() if each.requires_grad and each.grad is None]
        state = self.optimizer_bytes + sum(each.nbytes for each in waiting)
        self._check(state, "gradients and optimizer state")
        if like is not None:
            self._check(state + _MARGIN * like.needed(scale=scale), "one micro-batch")
        return state

    def _first(self) -> None:
        outputs = self.forward(0)
        self.gradients = [
            (torch.ones_like(output) if self.runner.finish is not None else torch.randn_like(output))
            if wanted
            else None
            for output, wanted in zip(outputs, self.runner.gradients, strict=True)
        ]
        del outputs
        self.backward(0)

    def _check(self, needed: float, what: str) -> None:
        free = self.room()
        if needed > free:
            raise MemoryError(f"{what} would take {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free")

    @property
    def name(self) -> str:
        """The partition's."""
        return self.runner.piece.name

    def joins(self) -> bool:
        """Whether its graph may be one with its neighbours' in training; it has run once."""
        return self.runner.joins(ForwardPlace(0, 0, 0))

    def forward(self, micro_batch: int, *, again: bool = False) -> tuple[torch.Tensor, ...]:
        """Run the forward of one micro-batch; `again`: as one that rematerialises."""
        with as_single_process():
            outputs = self._runner(again).forward(ForwardPlace(0, 0, micro_batch), self.reads[micro_batch], self.sizes)
        return tuple(output.detach() for output in outputs)

    def backward(self, micro_batch: int, *, again: bool = False, split: bool = False) -> None:
        """Run the backward of one micro-batch, whose forward has run in the same way; `split`: its input part alone."""
        self.begin_backward(micro_batch)
        place = ForwardPlace(0, 0, micro_batch)
        self._runner(again).backward(place, self.gradients, self.reads[micro_batch], self.sizes, split=split)

    def begin_backward(self, micro_batch: int) -> None:
        """In a step each micro-batch has leaves of its own."""
        for value in self.reads[micro_batch]:
            value.grad = None

    def backward_weight(self, micro_batch: int) -> None:
        """Run the weight part; the input part has run."""
        self.runner.backward_weight(ForwardPlace(0, 0, micro_batch))

    def _runner(self, again: bool) -> PartitionRunner:
        return self.again if again else self.runner

    def recompute_s(self, forward_s: float, backward_s: float) -> float | None:
        """How much longer a micro-batch takes where the partition rematerialises; None: it was never run so.

        Each such run is compared with the one just before it: what disturbs the machine disturbs both. The median is
        that of a few means, as of other runs (sampling.py). It is no more than a forward and a little: what goes beyond
        is the noise of a backward that takes far longer than its forward. `forward_s` and `backward_s` are its seconds
        where it does not.
        """
        if not self.compared:
            return None
        longer_s = (forward_s + backward_s) * (_usual_share(self.compared, 1) - 1)
        return min(max(0.0, longer_s), _DEAREST * forward_s)

    def parts(self, backward_s: float, activation_bytes: float) -> tuple[float, float, float] | tuple[None, None, None]:
        """Seconds of the input and the weight part of a backward of `backward_s`, and the bytes that wait between them.

        Compared as by `recompute_s`; a graph keeps `activation_bytes`. All None: no backward was run so.
        """
        if not self.compared_parts:
            return None, None, None
        input_share, weight_share = _usual_share(self.compared_parts, 1), _usual_share(self.compared_parts, 2)
        return input_share * backward_s, weight_share * backward_s, self.waiting_bytes(activation_bytes)

    def waiting_bytes(self, activation_bytes: float) -> float:
        """What waits between the parts of a backward, what was read left out; a graph keeps `activation_bytes`."""
        self.forward(0)
        self.backward(0, split=True)
        tensors, is_whole = self.runner.waiting(ForwardPlace(0, 0, 0))
        known = counted_elsewhere(self.runner, self.reads[0], self.device)
        waiting = storage_bytes(tensors, without=known) + (activation_bytes if is_whole else 0)
        self.backward_weight(0)
        return waiting

    def bytes(self) -> PartitionBytes:
        """What it keeps between forward and backward, and what it needs besides while it runs."""
        known = counted_elsewhere(self.runner, self.reads[0], self.device)
        made: list[torch.Tensor] = []
        before = allocated_bytes(self.device)

        def forward() -> Sequence[torch.Tensor]:
            made.extend(self.forward(0))
            return made

        kept = saved_bytes(forward, known)
        outputs = 0 if self.runner.finish is not None else storage_bytes(made)
        kept = max(kept, allocated_bytes(self.device) - before - outputs)  # what hooks inside it have hidden
        self.backward(0)
        made.clear()
        for value in self.reads[0]:
            value.grad = None  # what was there before must not be freed while the peak is taken

        def both() -> None:
            outputs = self.forward(0)
            self.backward(0)
            del outputs

        return PartitionBytes(kept, max(0, peak_bytes(both, self.device) - kept - outputs), outputs)


def _usual_share(runs: Sequence[tuple[float, ...]], part: int) -> float:
    """A part of runs as a share of their first one, in seconds: the median over a few groups of them; 0 of nothing."""
    size = math.ceil(len(runs) / _GROUPS)
    groups = [runs[n : n + size] for n in range(0, len(runs), size)]
    wholes = [sum(run[0] for run in group) for group in groups]
    return statistics.median(
        sum(run[part] for run in group) / whole if whole > 0 else 0.0
        for group, whole in zip(groups, wholes, strict=True)
    )


def state_bytes(piece: Piece, tensors: dict[str, torch.Tensor]) -> tuple[int, int, int]:
    """Bytes of a partition's parameters, of their gradients, and of its buffers; a shared tensor once."""
    held = {id(tensors[name]): tensors[name] for name in piece.parameters}
    parameters = sum(tensor.nbytes for tensor in held.values())
    gradients = sum(tensor.nbytes for tensor in held.values() if tensor.requires_grad)
    buffers = sum({id(tensors[name]): tensors[name].nbytes for name in piece.buffers}.values())
    return parameters, gradients, buffers


_DEPTH = 4


@dataclass
class Workbench:
    """What benches are made of; `inputs` is by micro-batch size, then by partition, one of each kind.

    `state_share` is bytes of optimizer state for a byte of parameters, `room` bytes that a measurement may take now,
    `held` what is known of the bytes of points so far; `in_parts`: backwards are timed in two parts too.
    """

    workload: Workload
    graph: PartitionGraph
    device: torch.device
    modules: Mapping[str, PartitionModule]
    inputs: Mapping[int, Mapping[str, KindInputs]]
    state_share: float
    room: Callable[[], float]
    in_parts: bool = False
    held: dict[Point, PartitionBytes] = field(default_factory=dict)

    def kind(self, point: Point) -> str:
        """The kind of a point's partition."""
        return self.graph.piece[point.partition].kind

    def measured(self, point: Point) -> PartitionBench:
        """A bench that has run once; what it takes is in `held`.

        Raises:
            MemoryError: it does not fit.
        """
        with memory_errors():
            bench = self._bench(point, optimizer=True)
            smaller = self._known(point, [each for each in self.held if each.partition == point.partition])
            scale = point.micro_batch / smaller.micro_batch if smaller else 1.0
            self.held[point] = bench.prepare(self.held[smaller] if smaller else None, scale=scale)
        return bench

    def companion(self, point: Point) -> PartitionBench:
        """A bench that runs beside measured ones, and has run once: it needs memory, but no optimizer.

        Raises:
            MemoryError: it does not fit, or nobody knows and this is not the smallest size.
        """
        alike = self._known(point, [each for each in self.held if self.kind(each) == self.kind(point)])
        with memory_errors():
            bench = self._bench(point, optimizer=False)
            if alike is None and point.micro_batch > min(self.inputs):
                raise MemoryError(f"what {point.partition} takes is not known")
            if alike is not None and alike.micro_batch == point.micro_batch:
                self.held[point] = self.held[alike]
                bench.join(self.held[alike])
            else:
                scale = point.micro_batch / alike.micro_batch if alike else 1.0
                self.held[point] = bench.prepare(self.held[alike] if alike else None, scale=scale)
        return bench

    @staticmethod
    def _known(point: Point, points: Sequence[Point]) -> Point | None:
        """Of some points the largest that is no larger than this one."""
        return max(
            (each for each in points if each.micro_batch <= point.micro_batch),
            key=lambda each: each.micro_batch,
            default=None,
        )

    def _bench(self, point: Point, *, optimizer: bool) -> PartitionBench:
        """A partition with the inputs of the one that stands for its kind."""
        piece, module = self.graph.piece[point.partition], self.modules[point.partition]
        known = self.inputs[point.micro_batch]
        given = next((known[name] for name in known if self.graph.piece[name].kind == piece.kind), None)
        if given is None:
            raise MemoryError(f"its inputs at micro-batch {point.micro_batch} are too many to be kept")
        batch = given.micro_batch.inputs
        needs = [
            self.graph.values[value].gradient if value.partition else batch[value.index].requires_grad
            for value in piece.reads
        ]
        reads = list[list[torch.Tensor]]()
        runner = PartitionRunner(
            self.graph,
            piece,
            module,
            self.device,
            PartitionState(module),
            finish=self._loss(piece, given, reads) if piece is self.graph.last else None,
            run=compiled(module, piece.name, self.workload.compile),
        )
        parameters = sum(each.nbytes for each in module.parameters())
        depth = max(1, min(_DEPTH, self.workload.batch_size // point.micro_batch))  # those of a step, a few at most
        bench = PartitionBench(
            runner, given.reads, needs, given.sizes, device=self.device, depth=depth,
            optimizer_bytes=self.state_share * parameters if optimizer else 0.0, room=self.room,
        )  # fmt: skip
        reads += bench.reads
        return bench

    def _loss(self, piece: Piece, given: KindInputs, reads: Sequence[Sequence[torch.Tensor]]) -> Finish:
        """The loss, which finds among the targets what the partition reads of the batch, where that is the same tensor.

        `reads` is what it reads instead, for each micro-batch.
        """
        batch, (targets, structure) = given.micro_batch.inputs, pytree.tree_flatten(given.micro_batch.targets)
        there = [each.to(self.device) if isinstance(each, torch.Tensor) else each for each in targets]
        read = {
            n: k
            for k, value in enumerate(piece.reads)
            for n, each in enumerate(targets)
            if not value.partition and _is_wanted_as(each, batch[value.index])
        }

        def finish(
            outputs: Sequence[torch.Tensor], returned: Sequence[torch.Tensor], place: int, *_: Any
        ) -> tuple[torch.Tensor]:
            own = LossGraph(Origin(self.graph, returned, tuple), outputs)
            leaves = [reads[place][read[n]] if n in read else each for n, each in enumerate(there)]
            output = self.graph.rebuild_output(outputs)
            return (own.call(self.workload.compute_loss, output, pytree.tree_unflatten(leaves, structure)),)

        return finish


def _is_wanted_as(target: Any, read: torch.Tensor) -> bool:
    """Whether a target is a tensor that is read of the batch, and a loss may take gradients by it."""
    if not isinstance(target, torch.Tensor) or not target.requires_grad or not read.requires_grad:
        return False
    return storage_of(target) == storage_of(read) and is_same_view(target, read)
