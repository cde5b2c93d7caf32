"""Cut a captured forward into partitions."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError, UsageError
from assigner.model.deferred import DeferredModel
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.originals import keep_left
from assigner.model.deferred.origins import digest
from assigner.model.deferred.vocabulary import vocabulary_of
from assigner.model.marking.capture import Capture, capture, opened_in_vain
from assigner.model.marking.domain import input_key
from assigner.model.marking.glue import Ownership, is_size, value_bytes
from assigner.model.marking.gradients import asked, requiring, with_gradients
from assigner.model.marking.graph import LEAF, ModelOutput, OutputTensor, PartitionGraph, Piece, Size, Value, ValueShape
from assigner.model.marking.isolation import CrossingError
from assigner.model.marking.leftovers import check_apart, check_followed, check_loss, left_by_module
from assigner.model.marking.marks import Mark, find_marks
from assigner.model.marking.modules import modules_inside, modules_outside, opaque_modules
from assigner.model.marking.piece import PieceBuilder
from assigner.model.marking.realforward import Maker, example_inputs, learn
from assigner.model.marking.rows import EXAMPLE_ROWS, BatchRows, batch_rows, find_carriers
from assigner.model.marking.tables import CapturedTables, FoundTables, neighbours
from assigner.model.members import named_parameters
from assigner.model.workload import call_arguments

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import nn
    from torch.utils._pytree import TreeSpec

    from assigner.model.marking.domain import InputKey
    from assigner.model.marking.fakeforward import Named
    from assigner.model.marking.leftovers import Notes
    from assigner.model.marking.observation import LearntCall
    from assigner.model.marking.rows import RowLeaves
    from assigner.model.workload import Workload

_MOST_RECUTS = 64


def partition_graph(workload: Workload, marks: Sequence[str] | None = None) -> PartitionGraph:
    """Cut a workload's model at its marks.

    Args:
        workload: Whose model; its builder is called once, without memory behind the tensors.
        marks: Name patterns in place of the workload's own; None: those; empty: none. Marks in code stay.

    Raises:
        MarkingError: nothing is marked, or the forward cannot be cut there; the message has the line. Or the loss
            reads what a forward leaves on the model.
        UsageError: the model is to be trained, and its builder gives it in eval mode.
    """
    deferred = DeferredModel(workload.model, seed=workload.seed)
    check_mode(workload, deferred)
    check_names(workload, deferred)
    _ = deferred.origins  # before a forward runs, which may note the time in a list
    marked = find_marks(deferred.model, workload.marks if marks is None else tuple(marks))
    example = workload.make_batch(EXAMPLE_ROWS, workload.seed)
    rows = batch_rows(workload, example)

    def maker(rows: int) -> Any:
        return workload.make_batch(rows, workload.seed)[0]

    captured = _captured(deferred, marked, example[0], maker, rows.inputs, autocast=workload.autocast)
    check_loss(workload.loss, deferred.model, captured.left)
    read = _read_by(deferred.model, modules_outside(deferred.model, captured.opaque))
    cut = Cutter(deferred, marked, captured, workload.autocast, rows=rows).cut()
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for call in captured.calls:
        calls[call.label].append(call.effects.order)
    order = {label: _together(each) for label, each in calls.items()}
    return replace(
        cut, read=read, read_elsewhere=captured.read_elsewhere, left=captured.left, order=order,
        notes=[captured.notes], opened=captured.opened, tables=[_tables_of(captured, training=True)],
        rows=rows, maker=maker, learnt=any(call.learnt for call in captured.calls),
    )  # fmt: skip


def _read_by(model: nn.Module, outside: Named) -> Memento:
    """The Python values that the code of some of a model's modules can read, as they are."""
    own, modules = {id(each) for _, each in outside}, [*model.modules()]
    vocabulary = vocabulary_of((each for _, each in outside), (each for each in modules if id(each) not in own))
    return Memento(outside, beside=modules, top="read", vocabulary=vocabulary)


def _together(orders: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of all calls of one module or function, whichever comes first."""
    kinds, ways = (digest(sorted(map(str, each))) for each in zip(*orders, strict=True))
    return kinds, ways


def check_mode(workload: Workload, deferred: DeferredModel) -> None:
    """Refuse to train a model that its builder has left in eval mode.

    Raises:
        UsageError: the workload has an optimizer, and the model as a whole is in eval mode.
    """
    if workload.optimizer is not None and not deferred.model.training:
        raise UsageError(
            "Workload.model gives the model in eval mode, as from_pretrained does: it would be trained without dropout,"
            " and its BatchNorm with the statistics that it has",
            hint="end the builder with model.train(), which a training loop calls; parts that are to stay in eval mode"
            " behind that: model.backbone.eval()",
        )


def check_names(workload: Workload, deferred: DeferredModel) -> None:
    """Refuse to train a model that tells its optimizer other names than those under which it holds its parameters.

    Raises:
        UsageError: the workload has an optimizer, and the model's own `named_parameters` gives other names.
    """
    if workload.optimizer is None:
        return
    held = dict(named_parameters(deferred.model, remove_duplicate=False))
    for name, parameter in deferred.model.named_parameters():
        if held.get(name) is not parameter:
            true = next((each for each, other in held.items() if other is parameter), "none of its own")
            raise UsageError(
                f"{type(deferred.model).__name__}, the model, has a named_parameters of its own, by which {true!r} is"
                f" called {name!r}: its optimizer, checkpoints and partitions could not agree about it",
                hint="give the model without the wrapper around all of it, and wrap its parts; or leave"
                " named_parameters to nn.Module",
            )


def _captured(
    deferred: DeferredModel,
    marked: Mapping[str, Mark],
    inputs: Any,
    maker: Maker | None,
    row_leaves: RowLeaves | None,
    *,
    autocast: str | None,
    any_rows: bool = True,
    training: bool = True,
    sized: InputKey | None = None,
    opened: Mapping[str, CrossingError] | None = None,
    others: Sequence[CapturedTables] = (),
) -> Capture:
    """A capture for inputs like these, where batches of `maker` tell what modules give whose forward needs values.

    Where they have the sizes of those that `sized` is the key of, but for the rows, it holds for no others: a forward
    that needs values there takes seconds to be followed with symbols for all sizes.
    """
    leaves, structure = pytree.tree_flatten(call_arguments(inputs))
    _, carriers = find_carriers(row_leaves, inputs, leaves)

    def learn_calls(names: Sequence[str], wanted: Mapping[str, Exception | None]) -> Mapping[str, Sequence[LearntCall]]:
        assert maker is not None
        batches = example_inputs(maker, leaves, carriers)
        return learn(deferred, names, batches, structure, wanted=wanted, autocast=autocast, training=training)

    return capture(
        deferred.model, list(marked), inputs, autocast=autocast, any_rows=any_rows, row_leaves=row_leaves,
        training=training, learner=None if maker is None else learn_calls,
        these_sizes=sized is not None and input_key(structure, leaves).differs_in_rows(sized, carriers),
        opened=opened, others=others, originals=_originals(deferred, others),
    )  # fmt: skip


def _originals(deferred: DeferredModel, tables: Sequence[CapturedTables]) -> dict[str, torch.Tensor]:
    """The buffers in whose places tables are, as the builder has made them."""
    names = {place.name for each in tables for place, _ in each.left.values.values()}
    return deferred.materialise(names & {name for name, _ in deferred.model.named_buffers()}) if names else {}


def recut(graph: PartitionGraph, structure: TreeSpec, leaves: Sequence[Any], *, training: bool) -> PartitionGraph:
    """The same model cut again, for other inputs or in the other mode; what can stay where it was stays.

    Args:
        graph: The model as it was cut first; it keeps the last ones that were made of it.
        structure: Of the model's (args, kwargs).
        leaves: A micro-batch's flattened inputs.
        training: The mode that it is cut in: as it was built, or after `model.eval()`.

    Returns:
        Its partitions have the same names; one whose modules are not called is left out.

    Raises:
        MarkingError: the forward cannot be cut for these inputs.
    """
    key, made = input_key(structure, leaves), graph.recuts[training]
    found = next((each for each in made if each.domain.admits(key)), None)
    if found is None:
        args, kwargs = pytree.tree_unflatten([_on_cpu(leaf) for leaf in leaves], structure)
        found = _recut(graph, kwargs or args, training=training)
        made.append(found)
        del made[:-_MOST_RECUTS]
    return found


def _recut(graph: PartitionGraph, inputs: Any, *, training: bool) -> PartitionGraph:
    deferred = graph.deferred
    marked, opened = find_marks(deferred.model, graph.marks), dict(graph.opened)
    left = [each for each in graph.tables if each.left.values]
    while True:
        captured = _captured_again(graph, marked, inputs, training=training, opened=opened, others=left)
        try:
            cutter = Cutter(
                deferred, marked, captured, graph.last.autocast, rows=graph.rows, base=graph, training=training
            )
            cut = cutter.cut()
            if not training:
                _check_called(graph, cut)
            break
        except CrossingError as error:
            if training or not error.module or error.module in captured.opened:
                raise
            names = (name for name, _ in modules_inside(deferred.model, error.module))
            opened = {**captured.opened, **dict.fromkeys(names, error)}
    followed = _followed(graph, captured)
    read_elsewhere = captured.read_elsewhere | captured.notes.reads.of(followed)
    read = _read_by(deferred.model, followed) if followed else cut.read
    _check_notes(graph, captured.notes)
    _check_found(graph, marked, captured, training=training)
    try:
        check_apart(deferred.model, graph.left, read_elsewhere)
        check_followed(followed, read, graph.left)
    except CrossingError as error:
        raise opened_in_vain(error, captured.opened) from error
    check_apart(deferred.model, captured.left, graph.read_elsewhere)
    keep_left(deferred.model, left_by_module(deferred.model, captured.left))
    return replace(cut, read=read, read_elsewhere=read_elsewhere)


def _followed(graph: PartitionGraph, captured: Capture) -> Named:
    """The modules whose own code is followed in a capture, and was one call, or within one, in the first one."""
    model = graph.deferred.model
    known = modules_outside(model, opaque_modules(model, graph.marks, graph.opened))
    names = {name for name, _ in known}
    return [(name, each) for name, each in modules_outside(model, captured.opaque) if name not in names]


def _check_called(graph: PartitionGraph, cut: PartitionGraph) -> None:
    """Partitions call the modules that they have under the plan.

    Raises:
        CrossingError: one calls an unmarked module that another has, or that has no tensors: its code can be followed.
    """
    held = {name for piece in graph.pieces for name in piece.state}
    for piece in cut.pieces:
        for name in piece.called:
            own = {f"{name}.{each}" for each in graph.deferred.model.get_submodule(name).state_dict()}
            if name not in graph.piece[piece.name].called and own <= held:
                error = CrossingError(f"{piece.name!r} calls {name!r}, which it does not have under the plan")
                error.module = name
                raise error


def _captured_again(
    graph: PartitionGraph,
    marked: Mapping[str, Mark],
    inputs: Any,
    *,
    training: bool,
    opened: Mapping[str, CrossingError],
    others: Sequence[CapturedTables],
) -> Capture:
    with graph.deferred.mode(training=training):
        return _captured(
            graph.deferred, marked, inputs, graph.maker, graph.rows.inputs,
            autocast=graph.last.autocast, any_rows=False, training=training,
            sized=graph.domain.example if graph.learnt else None, opened=opened, others=others,
        )  # fmt: skip


def _tables_of(captured: Capture, *, training: bool) -> CapturedTables:
    left = captured.kept or FoundTables(captured.domain.example, {})
    return CapturedTables(training, captured.opened, left)


def _check_found(graph: PartitionGraph, marked: Mapping[str, Mark], captured: Capture, *, training: bool) -> None:
    """Earlier captures must hold where they find the tables that this one leaves, too.

    Raises:
        MarkingError: one does not.
    """
    own = _tables_of(captured, training=training)
    for other in neighbours(graph.tables, own.left.count) if captured.tables else ():
        if not other.left.values or not captured.traced.leaves(captured.tables, other.left):
            inputs, opened = other.left.sizes.inputs(), {**other.opened, **captured.opened}
            _captured_again(graph, marked, inputs, training=other.training, opened=opened, others=[own])
    graph.tables.append(own)
    del graph.tables[1:-_MOST_RECUTS]


def _check_notes(graph: PartitionGraph, notes: Notes) -> None:
    """Each forward was captured as the first one: what others leave, it must not find, or find as it leaves it.

    Args:
        graph: The first capture's, which learns of this one.
        notes: Of another one.

    Raises:
        MarkingError: a forward may find what another one has set, by which its graph was not captured.
    """
    for others in graph.notes:
        if found := notes.found_of(others) or others.found_of(notes):
            raise MarkingError(
                f"the forward of {type(graph.deferred.model).__name__} sets {found} outside its partitions to"
                " another value for these inputs than for those before, or in one mode alone, and may read it: a"
                " captured graph would go on with its own",
                hint="mark a larger module that contains the line, or set it in the model's builder",
            )
    if not any(map(notes.says_as, graph.notes)):
        graph.notes.append(notes)


def _on_cpu(leaf: Any) -> Any:
    """An input to capture with, where captures run: only its shape and type count."""
    if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")
    return leaf


class Symbols:
    """Turns symbolic sizes into numbers and into `Size` descriptions."""

    def __init__(self, captured: Capture) -> None:
        self.places: dict[Any, tuple[int, int]] = {}
        self.example: dict[Any, int] = {}
        nodes = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
        self.rows: set[Any] = set()
        for leaf, name in enumerate(captured.users):
            value = nodes[name].meta.get("val") if name in nodes else None
            if not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    self.places.setdefault(size.node.expr, (leaf, dim))
                    self.example.setdefault(size.node.expr, captured.inputs[leaf].size(dim))
                    if dim == captured.carriers[leaf]:
                        self.rows.add(size.node.expr)
        self.example_rows = captured.rows

    def number(self, size: Any, rows: int | None = None) -> int:
        """A size for the example batch, or for another number of rows; one that depends on data counts as the rows."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        values = dict(self.example)
        if rows is not None:
            values.update(dict.fromkeys(self.rows, rows))
        values.update(dict.fromkeys(free_unbacked_symbols(size), rows or self.example_rows or 1))
        return int(size.node.expr.subs(values))

    def rows_dimension(self, shape: Sequence[Any]) -> int | None:
        """Along which dimension the micro-batches of a value are joined; None: it has no rows.

        A size that depends on data is one of rows too: what was chosen of each micro-batch, in order.
        """
        found = [
            dim
            for dim, size in enumerate(shape)
            if isinstance(size, torch.SymInt)
            and (free_unbacked_symbols(size) or self.rows & size.node.expr.free_symbols)
        ]
        return found[0] if len(found) == 1 else None

    def names(self, shape: Sequence[Any]) -> tuple[str, ...]:
        """A shape in words that do not depend on torch's names for its symbols."""
        words = {symbol: sympy.Symbol(f"input{leaf}_{dim}") for symbol, (leaf, dim) in self.places.items()}
        return tuple(str(size.node.expr.subs(words)) if isinstance(size, torch.SymInt) else str(size) for size in shape)

    def describe(self, value: Any) -> Size:
        """How a rank works a symbolic size out from its inputs' shapes."""
        expression = value.node.expr
        return Size(expression, {symbol: self.places[symbol] for symbol in expression.free_symbols})


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
            self.deferred, pieces, values, self._output(), tuple(self.marked), self.captured.domain,
            flags=self.captured.flags,
        )  # fmt: skip

    def _output(self) -> ModelOutput:
        leaves = tuple(LEAF if isinstance(each, fx.Node) else each for each in self.outputs)
        made = [each.meta["val"] if isinstance(each, fx.Node) else None for each in self.outputs]
        rows = tuple(
            self.symbols.rows_dimension(each.shape) if isinstance(each, torch.Tensor) else None for each in made
        )
        spec, known = self.captured.program.call_spec.out_spec, bool(self.symbols.rows)
        self._check_rebuilt(spec)
        tensors = self._output_tensors()
        carried = any(each is not None for each in self.captured.carriers)
        if not known and carried and self.base is not None:  # sizes tell less than the plan's graph
            base = self.base.output
            if base.rows_known and (base.structure, len(base.leaves)) == (spec, len(leaves)):
                return ModelOutput(spec, leaves, base.rows, True, tensors)
        return ModelOutput(spec, leaves, rows, known, tensors)

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
        if any(free_unbacked_symbols(size) for size in tensor.shape if isinstance(size, torch.SymInt)):
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
