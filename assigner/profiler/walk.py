"""One forward through the whole model, a chunk of partitions at a time: the real inputs of every kind of partition.

The model never has to fit. Partitions of one kind do the same work on inputs of the same shape, so one of each kind
is measured, and only its inputs are kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from assigner.marking import PartitionGraph, Piece, Value
from assigner.runtime.microbatch import MicroBatch, split_batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.workload import Workload


@dataclass(frozen=True)
class KindInputs:
    """What one partition read in a forward of the model.

    Args:
        micro_batch: The micro-batch, targets too.
        reads: The values that it read.
        sizes: The numbers that it needed.
    """

    micro_batch: MicroBatch
    reads: tuple[torch.Tensor, ...]
    sizes: tuple[Any, ...]


def representatives(graph: PartitionGraph) -> dict[str, str]:
    """For each kind the first partition of it."""
    found: dict[str, str] = {}
    for piece in graph.pieces:
        found.setdefault(piece.kind, piece.name)
    return found


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
    workload: Workload, graph: PartitionGraph, rows: int, device: torch.device, budget_bytes: float
) -> dict[str, KindInputs]:
    """Run the model's forward once on one micro-batch, and keep what the representatives read.

    Args:
        workload: Its batch maker gives the inputs.
        graph: Its partitions.
        rows: Rows of the micro-batch.
        device: Where the partitions run.
        budget_bytes: How much of the model may be there at once.

    Returns:
        By partition name, for one partition of each kind.
    """
    (cut,) = split_batch(workload.make_batch(rows, workload.seed), rows, reduction=workload.reduction)
    wanted = set(representatives(graph).values())
    readers = Counter(value for piece in graph.pieces for value in piece.reads)
    values: dict[Value, torch.Tensor] = {}
    found: dict[str, KindInputs] = {}
    for chunk in chunks(graph, [piece.name for piece in graph.pieces], budget_bytes):
        modules = graph.build(chunk, device)
        for name in chunk:
            piece = graph.piece[name]
            reads = tuple(_read(value, cut, values, device) for value in piece.reads)
            sizes = tuple(size.evaluate(cut.inputs) for size in piece.sizes)
            if name in wanted:
                found[name] = KindInputs(cut, tuple(value.clone() for value in reads), sizes)
            if piece is not graph.last:
                with torch.no_grad():
                    outputs = modules[name](*reads, *sizes)
                values.update({Value(name, n): output for n, output in enumerate(outputs)})
            _drop_read(piece, readers, values)
    return found


def _read(value: Value, cut: MicroBatch, values: dict[Value, torch.Tensor], device: torch.device) -> torch.Tensor:
    if value.partition:
        return values[value]
    made: torch.Tensor = cut.inputs[value.index]
    return made.to(device)


def _drop_read(piece: Piece, readers: Counter[Value], values: dict[Value, torch.Tensor]) -> None:
    for value in piece.reads:
        readers[value] -= 1
        if not readers[value]:
            values.pop(value, None)
