"""Cut a captured forward into partitions."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.model.marking.blocks import Unjoinable, unjoinable
from assigner.model.marking.glue import Ownership, is_size, value_bytes
from assigner.model.marking.gradients import asked, requiring, with_gradients
from assigner.model.marking.graph import LEAF, ModelOutput, OutputTensor, PartitionGraph, Piece, Size, Value, ValueShape
from assigner.model.marking.piece import PieceBuilder
from assigner.model.marking.roworder import Symbols
from assigner.model.marking.rows import EXAMPLE_ROWS, BatchRows

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from assigner.model.deferred import DeferredModel
    from assigner.model.marking.capture import Capture
    from assigner.model.marking.marks import Mark


class Cutter:
    """Cuts one capture into pieces."""

    def __init__(
        self,
        deferred: DeferredModel,
        marked: Mapping[str, Mark],
        captured: Capture,
        autocast: str | None,
        *,
        rows: BatchRows,
        base: PartitionGraph | None = None,
        training: bool = True,
    ) -> None:
        self.deferred, self.marked, self.captured, self.autocast = deferred, marked, captured, autocast
        self.group = rows.group
        self.base, self.training = base, training
        self.symbols = Symbols(captured)
        called = {mark.name or name: name for name, mark in marked.items()}
        homes = {} if base is None else {part: called[name] for part, name in base.homes.items()}
        self.ownership = Ownership(
            captured, list(marked), lambda node: value_bytes(node, self.symbols.number),
            homes=homes, same_tensor=_same_tensor(deferred), all_called=base is None,
            lends=base is not None and not training,
        )  # fmt: skip
        self.names = [marked[name].name or name for name in self.ownership.order]
        (output,) = [node for node in captured.graph.nodes if node.op == "output"]
        self.outputs: list[Any] = list(output.args[0])  # the leaves of the model's, as nodes or constants
        reads = [self._needed(place) for place in range(len(self.names))]
        self.crossing = self._crossing({node for each in reads for node in each})
        self.requiring = requiring(captured, self.ownership, deferred.tensors(), training=training)
        self.asked = asked(captured, self.ownership, reads)

    @property
    def last(self) -> int:
        """The partition that makes the model's output: the last one, with whatever the output needs from others."""
        return len(self.names) - 1

    def _foreign(self, place: int, node: fx.Node, found: dict[fx.Node, None]) -> None:
        """The nodes of other partitions that `node` needs, looking through free ones."""
        owner = self.ownership.owner.get(node)
        if owner is not None and owner != place:
            found[node] = None
        elif owner is None and not is_size(node):
            for each in node.all_input_nodes:
                self._foreign(place, each, found)

    def _needed(self, place: int) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        for node, owner in self.ownership.owner.items():
            if owner == place:
                for each in node.all_input_nodes:
                    self._foreign(place, each, found)
        if place == self.last:
            for each in self.outputs:
                if isinstance(each, fx.Node):
                    self._foreign(place, each, found)
        return list(found)

    def _crossing(self, wanted: Collection[fx.Node]) -> dict[fx.Node, Value]:
        """Every node whose value leaves its partition, numbered within it in the order of the graph."""
        count: dict[int, int] = defaultdict(int)
        found = {}
        for node in self.captured.graph.nodes:
            if node in wanted:
                owner = self.ownership.owner[node]
                found[node] = Value(self.names[owner], count[owner])
                count[owner] += 1
        return found

    def cut(self) -> PartitionGraph:
        """All pieces, and what is known of the values between them."""
        pieces = tuple(PieceBuilder(self, place).build() for place in range(len(self.names)))
        shapes = {value: self._shape(node, value) for node, value in self.crossing.items()}
        requires = {value for node, value in self.crossing.items() if node in self.requiring}
        asked_for = {value for node, value in self.crossing.items() if node in self.asked}
        values = with_gradients(shapes, pieces, self.deferred.tensors(), requires, asked_for, training=self.training)
        pieces = tuple(replace(piece, kind=_kind(piece, values, is_last=piece is pieces[-1])) for piece in pieces)
        return PartitionGraph(
            self.deferred, pieces, values, self.output(), tuple(self.marked), self.captured.domain,
            flags=self.captured.flags,
            changed=frozenset(name for call in self.captured.calls for name in call.effects.changed),
        )  # fmt: skip

    def output(self) -> ModelOutput:
        """What is known of the model's output."""
        leaves = tuple(LEAF if isinstance(each, fx.Node) else each for each in self.outputs)
        made = [each.meta["val"] if isinstance(each, fx.Node) else None for each in self.outputs]
        reasons = tuple(unjoinable(self.captured, self.outputs, self.symbols))
        rows = tuple(
            self.symbols.rows_dimension(each.shape)
            if isinstance(each, torch.Tensor) and reason is not Unjoinable.BLOCKS
            else None
            for each, reason in zip(made, reasons, strict=True)
        )
        spec, known = self.captured.program.call_spec.out_spec, bool(self.symbols.rows)
        self._check_rebuilt(spec)
        tensors = self._output_tensors()
        if not known and self.base is not None:  # sizes tell less than the plan's graph
            base = self.base.output
            if base.rows_known and (base.structure, len(base.leaves)) == (spec, len(leaves)):
                return ModelOutput(spec, leaves, base.rows, True, tensors, base.unjoinable)
        return ModelOutput(spec, leaves, rows, known, tensors, reasons)

    def _check_rebuilt(self, spec: pytree.TreeSpec) -> None:
        """A class may flatten what its constructor does not take: a `ModelOutput` to which items were added.

        Raises:
            MarkingError: the output cannot be made again of what the last partition returns.
        """
        try:
            pytree.tree_unflatten(
                [each.meta["val"] if isinstance(each, fx.Node) else each for each in self.outputs], spec
            )
        except TypeError as error:
            raise MarkingError(
                f"the model's output ({getattr(spec.type, '__name__', spec.type)}) cannot be put together of its parts:"
                f" {error}",
                hint="return a class that has a field for each of them, or a dict or a tuple",
            ) from error

    def _output_tensors(self) -> tuple[OutputTensor | None, ...]:
        made = [each for each in self.outputs if isinstance(each, fx.Node)]
        of_last = {node: Value(self.names[self.last], index) for index, node in reversed(list(enumerate(made)))}
        tensors = {
            node: OutputTensor(self.crossing.get(node, source), self._sizes(node.meta["val"]), node.meta["val"].dtype)
            for node, source in of_last.items()
            if isinstance(node.meta["val"], torch.Tensor)
        }
        return tuple(tensors.get(each) if isinstance(each, fx.Node) else None for each in self.outputs)

    def _shape(self, node: fx.Node, value: Value) -> ValueShape:
        tensor = node.meta["val"]
        if not isinstance(tensor, torch.Tensor):
            raise MarkingError(f"output {value.index} of {value.partition!r} is no tensor", hint="mark a larger module")
        try:
            one, two = (self._bytes(tensor, rows) for rows in (1, 2))
        except ZeroDivisionError:  # a size like rows // (rows // 2)
            n = EXAMPLE_ROWS
            few, many = (self._bytes(tensor, rows) for rows in (n, 2 * n))
            one, two = few - (many - few) * (n - 1) // n, few - (many - few) * (n - 2) // n
        gradient = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        order = self._order(tensor)
        return ValueShape(two - one, 2 * one - two, tensor.dtype, gradient, self._sizes(tensor), order)

    def _order(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """The dimensions by their strides, where the tensor is dense and not contiguous."""
        sizes, strides = [[self.symbols.number(each) for each in of] for of in (tensor.shape, tensor.stride())]
        order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], dim))
        expected = [math.prod(sizes[each] for each in order[place + 1 :]) for place in range(len(order))]
        dense = all(strides[dim] == stride or sizes[dim] == 1 for dim, stride in zip(order, expected, strict=True))
        return tuple(order) if dense and order != sorted(order) else None

    def _bytes(self, tensor: torch.Tensor, rows: int) -> int:
        """Of so many rows, as the workload's batch maker counts them."""
        return math.prod(self.symbols.number(size, rows * self.group) for size in tensor.shape) * tensor.element_size()

    def _sizes(self, tensor: torch.Tensor) -> tuple[int | Size, ...] | None:
        """A value's shape as the ranks work it out; None: it depends on data."""
        if self.symbols.depends_on_data(tensor.shape):
            return None
        return tuple(
            self.symbols.describe(size) if isinstance(size, torch.SymInt) else int(size) for size in tensor.shape
        )


def _same_tensor(deferred: DeferredModel) -> dict[str, tuple[str, ...]]:
    """For each parameter and buffer all of its names."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in deferred.tensors().items():
        names[id(tensor)].append(name)
    return {name: tuple(every) for every in names.values() for name in every}


def _kind(piece: Piece, values: Mapping[Value, ValueShape], *, is_last: bool) -> str:
    """Partitions of one kind take equally long: the backward depends on who wants a gradient, the last has the loss."""
    read = [value in values and values[value].gradient for value in piece.reads]
    made = [shape.gradient for value, shape in values.items() if value.partition == piece.name]
    return hashlib.sha256(repr((piece.kind, read, made, is_last)).encode()).hexdigest()[:12]
