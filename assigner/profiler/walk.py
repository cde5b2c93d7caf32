"""One forward through the whole model, a chunk of partitions at a time: the real inputs of every kind of partition.

The model never has to fit. Partitions of one kind do the same work on inputs of the same shape, so one of each kind
is measured, and only its inputs are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from assigner.errors import UsageError
from assigner.model.marking import PartitionGraph, PartitionModule, Piece, Value
from assigner.model.marking.casting import casting
from assigner.model.marking.rows import EXAMPLE_ROWS
from assigner.profiler.memory import peak_bytes
from assigner.runtime.batch.microbatch import Cutting, MicroBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from assigner.model.workload import Workload


@dataclass(frozen=True)
class KindInputs:
    """What one partition read in a forward of the model: values, and numbers; with the micro-batch, targets too."""

    micro_batch: MicroBatch
    reads: tuple[torch.Tensor, ...]
    sizes: tuple[Any, ...]


def representatives(graph: PartitionGraph) -> dict[str, list[str]]:
    """The first partition of each kind, which stands for it, with all partitions of that kind."""
    found: dict[str, list[str]] = {}
    for piece in graph.pieces:
        found.setdefault(piece.kind, []).append(piece.name)
    return {names[0]: names for names in found.values()}


def chunks(graph: PartitionGraph, names: Sequence[str], budget_bytes: float) -> Iterator[list[str]]:
    """`names` in runs whose parameters and buffers fit into `budget_bytes`; a larger one alone."""
    tensors = graph.deferred.tensors()
    chunk: list[str] = []
    held = 0
    for name in names:
        size = sum(tensors[each].nbytes for each in graph.piece[name].state)
        if chunk and held + size > budget_bytes:
            yield chunk
            chunk, held = [], 0
        chunk.append(name)
        held += size
    if chunk:
        yield chunk


def collect_inputs(
    workload: Workload,
    graph: PartitionGraph,
    sizes: Sequence[int],
    device: torch.device,
    *,
    budget_bytes: float,
    wanted: Collection[str],
    on_partition: Callable[[str, float], None] = lambda _name, _share: None,
    inputs_bytes: float = math.inf,
    room: Callable[[], float] = lambda: math.inf,
) -> dict[int, dict[str, KindInputs]]:
    """Run the model's forward once on a micro-batch of each size, and keep what some partitions read.

    A part of the model is built once for all sizes: its initial values cost the draws of the whole model. Where a
    larger micro-batch would not fit into the memory, a partition's outputs are those of the smallest one, repeated;
    where even its inputs would be too many, it is left out from there on.

    `budget_bytes` of the model may be there at once, and `inputs_bytes` of inputs may be kept; those of the smallest
    size always are. The walk ends behind the last partition that is wanted; `on_partition` is called before each with
    its name and the share of the walk that is done.

    Returns:
        By micro-batch size, then by partition name; without those that were left out.
    """
    cutting = Cutting(workload)
    passes = {rows: _Pass(workload, graph, rows, device, cutting=cutting) for rows in sizes}
    names = [piece.name for piece in graph.pieces]
    names = names[: 1 + max((n for n, name in enumerate(names) if name in wanted), default=-1)]
    found: dict[int, dict[str, KindInputs]] = {rows: {} for rows in sizes}
    smallest, peaks, kept = min(passes, default=1), dict[str, int](), 0
    for chunk in chunks(graph, names, budget_bytes):
        modules = graph.build(chunk, device)
        for name in chunk:
            on_partition(name, names.index(name) / len(names))
            piece = graph.piece[name]
            for rows, each in sorted(passes.items()):
                inputs = each.inputs(piece)
                if name in wanted:
                    size = sum(read.nbytes for read in inputs.reads)
                    if rows > smallest and kept + size > inputs_bytes:
                        del passes[rows]
                        continue
                    kept += size
                    copies = tuple(value.clone() for value in inputs.reads)  # what comes later may write in place
                    found[rows][name] = replace(inputs, reads=copies)
                if name == names[-1]:
                    continue
                if rows == smallest and len(passes) > 1 and piece.kind not in peaks:
                    peaks[piece.kind] = peak_bytes(partial(each.run, piece, modules[name], inputs), device)
                elif rows == smallest or peaks[piece.kind] * rows / smallest <= room():
                    each.run(piece, modules[name], inputs)
                else:
                    each.imitate(piece, passes[smallest], graph)
    return found


class _Pass:
    """One forward of the model on one micro-batch, partition by partition."""

    def __init__(
        self, workload: Workload, graph: PartitionGraph, rows: int, device: torch.device, *, cutting: Cutting
    ) -> None:
        (self.cut,) = cutting.split(workload.make_batch(rows, workload.seed), 1, weighed=False)
        if self.cut.structure != graph.domain.example.structure:
            raise UsageError(
                f"the model's inputs for {rows} rows have another structure than for {EXAMPLE_ROWS}, as lists have"
                " with an entry for each row: a profile has one graph for all sizes",
                hint="have Workload.batch give tensors whose first dimension is the rows; pad or stack what is listed",
            )
        self.device = device
        self.readers = Counter(value for piece in graph.pieces for value in piece.reads)
        self.values: dict[Value, torch.Tensor] = {}

    def inputs(self, piece: Piece) -> KindInputs:
        """What the next partition reads."""
        reads = tuple(self._read(value) for value in piece.reads)
        return KindInputs(self.cut, reads, tuple(size.evaluate(self.cut.inputs) for size in piece.sizes))

    def run(self, piece: Piece, module: PartitionModule, inputs: KindInputs) -> None:
        """Run it, keep what it makes, and drop what nobody reads any more."""
        with torch.no_grad(), casting(piece.autocast, self.device.type):
            outputs = module(*inputs.reads, *inputs.sizes)
        self._keep(piece, {Value(piece.name, n): output for n, output in enumerate(outputs)})

    def imitate(self, piece: Piece, other: _Pass, graph: PartitionGraph) -> None:
        """As `run`, with what the partition made of another micro-batch, repeated to this one's shapes."""
        made = {value: tensor for value, tensor in other.values.items() if value.partition == piece.name}
        shapes = {value: graph.values[value].sizes(self.cut.inputs) for value in made}
        self._keep(piece, {value: _repeated(tensor, shapes[value] or tensor.shape) for value, tensor in made.items()})

    def _keep(self, piece: Piece, made: Mapping[Value, torch.Tensor]) -> None:
        self.values.update(made)
        for value in piece.reads:
            self.readers[value] -= 1
            if not self.readers[value]:
                self.values.pop(value, None)

    def _read(self, value: Value) -> torch.Tensor:
        if value.partition:
            return self.values[value]
        made: torch.Tensor = self.cut.inputs[value.index]
        return made.to(self.device)


def _repeated(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor's values over and over, up to a shape of as many dimensions."""
    for dim, size in enumerate(shape):
        if size != tensor.size(dim):
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.size(dim))
    return tensor
