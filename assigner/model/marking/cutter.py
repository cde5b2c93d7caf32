"""Cut a captured forward into partitions, the nodes of each copied into a graph of its own."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError, UsageError
from assigner.model.deferred.mutation import tensor_leaves
from assigner.model.deferred.origins import without_addresses
from assigner.model.marking.blocks import Unjoinable, unjoinable
from assigner.model.marking.changedarguments import Arguments, Changed, Slot, fill, split
from assigner.model.marking.checks import is_check
from assigner.model.marking.domain import Size, Symbols
from assigner.model.marking.glue import Ownership, is_size
from assigner.model.marking.gradients import values_behind, with_gradients
from assigner.model.marking.graph import LEAF, ModelOutput, OutputTensor, PartitionGraph, Piece, Value, ValueShape
from assigner.model.marking.nodes import STATE, call_of, given_to, is_item, reached
from assigner.model.marking.opaque import OpaqueCall, is_call
from assigner.model.marking.rows import EXAMPLE_ROWS, BatchRows
from assigner.model.marking.statereads import StateReads
from assigner.model.marking.writing import ONCE
from assigner.model.members import named_buffers, named_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
        *,
        rows: BatchRows,
        base: PartitionGraph | None = None,
        order: Sequence[str] = (),
    ) -> None:
        self.deferred, self.marked, self.captured = deferred, marked, captured
        self.group = rows.group
        self.base, self.training = base, captured.training
        self.symbols = Symbols(captured)
        called = {mark.name or name: name for name, mark in marked.items()}
        homes = None if base is None else {part: called[name] for part, name in base.homes.items()}
        self.ownership = Ownership(
            captured, list(marked), lambda node: sum(map(self.symbols.bytes, tensor_leaves(node.meta.get("val")))),
            homes=homes, same_tensor=_same_tensor(deferred), lends=base is not None and not self.training,
            wished=[called[name] for name in order],
        )  # fmt: skip
        self.state_reads = StateReads(self.ownership)
        self.names = [marked[name].name or name for name in self.ownership.order]
        (output,) = [node for node in captured.graph.nodes if node.op == "output"]
        self.outputs: list[Any] = list(output.args[0])  # the leaves of the model's, as nodes or constants
        self.crossing = self._crossing()

    @property
    def last(self) -> int:
        """The partition that makes the model's output: the last one, with whatever the output needs from others."""
        return len(self.names) - 1

    def _crossing(self) -> dict[fx.Node, Value]:
        """Every node whose value another partition reads, numbered within its own in the order of the graph."""
        owner = self.ownership.owner
        outputs = [each for each in self.outputs if isinstance(each, fx.Node)]
        wanted = {
            each
            for place, read in [*((place, node.all_input_nodes) for node, place in owner.items()), (self.last, outputs)]
            for each in reached(read, lambda one: () if one in owner or is_size(one) else one.all_input_nodes)
            if owner.get(each, place) != place
        }
        count: dict[int, int] = defaultdict(int)
        found = {}
        for node in self.captured.graph.nodes:
            if node in wanted:
                found[node] = Value(self.names[owner[node]], count[owner[node]])
                count[owner[node]] += 1
        return found

    def cut(self) -> PartitionGraph:
        """All pieces, and what is known of the values between them."""
        pieces = tuple(PieceBuilder(self, place).build() for place in range(len(self.names)))
        shapes = {value: self._shape(node, value) for node, value in self.crossing.items()}
        values = with_gradients(self, shapes, pieces)
        pieces = tuple(replace(piece, kind=_kind(piece, values, is_last=piece is pieces[-1])) for piece in pieces)
        return PartitionGraph(
            self.deferred, pieces, values, self.output(), tuple(self.marked), self.captured.domain,
            flags=self.captured.flags, writes=self.captured.writes,
            changed=frozenset(name for call in self.captured.calls for name in call.effects.changed),
        )  # fmt: skip

    def output(self) -> ModelOutput:
        """What is known of the model's output."""
        leaves = tuple(LEAF if isinstance(each, fx.Node) else each for each in self.outputs)
        made = [each.meta["val"] if isinstance(each, fx.Node) else each for each in self.outputs]
        spec, known = self.captured.program.call_spec.out_spec, bool(self.symbols.rows)
        _check_rebuilt(spec, made)
        tensors, behind = self._output_tensors(), values_behind(self)
        if not known and self.base is not None:  # sizes tell less than the plan's graph
            base = self.base.output
            if base.rows_known and (base.structure, len(base.leaves)) == (spec, len(leaves)):
                return ModelOutput(spec, leaves, base.rows, True, tensors, base.unjoinable, behind)
        reasons = tuple(unjoinable(self.captured, self.outputs, self.symbols))
        rows = tuple(
            self._rows(each) if isinstance(each, torch.Tensor) and reason is not Unjoinable.BLOCKS else None
            for each, reason in zip(made, reasons, strict=True)
        )
        return ModelOutput(spec, leaves, rows, known, tensors, reasons, behind)

    def _rows(self, tensor: torch.Tensor) -> int | None:
        """The one dimension that has rows; None: none has, or several have."""
        dims = self.symbols.dimensions(tensor.shape)
        return dims[0] if len(dims) == 1 else None

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
            one, two = (self.symbols.bytes(tensor, rows * self.group) for rows in (1, 2))
        except ZeroDivisionError:  # a size like rows // (rows // 2)
            n = EXAMPLE_ROWS
            few, many = (self.symbols.bytes(tensor, rows * self.group) for rows in (n, 2 * n))
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

    def _sizes(self, tensor: torch.Tensor) -> tuple[int | Size, ...] | None:
        """A value's shape as the ranks work it out; None: it depends on data."""
        if self.symbols.depends_on_data(tensor.shape):
            return None
        return tuple(
            self.symbols.describe(size) if isinstance(size, torch.SymInt) else int(size) for size in tensor.shape
        )


def _check_rebuilt(spec: pytree.TreeSpec, made: Sequence[Any]) -> None:
    """A class may flatten what its constructor does not take: a `ModelOutput` to which items were added.

    Raises:
        MarkingError: the output cannot be made again of what the last partition returns.
    """
    try:
        pytree.tree_unflatten(made, spec)
    except TypeError as error:
        raise MarkingError(
            f"the model's output ({getattr(spec.type, '__name__', spec.type)}) cannot be put together of its parts:"
            f" {error}",
            hint="return a class that has a field for each of them, or a dict or a tuple",
        ) from error


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


def as_learnt(call: OpaqueCall) -> Callable[[Any], list[torch.Tensor]]:
    """`tensor_leaves` for a module whose results were learnt from some calls: the next one must be like those."""

    def learnt_leaves(result: Any) -> list[torch.Tensor]:
        found = split(result)[0]
        if repr(found) != repr(call.effects.results):
            raise UsageError(
                f"{call.label} returns something else than in the calls that it was captured by: {found} and not"
                f" {call.effects.results}",
                hint="return the same tensors and plain values each time; a shape may depend on values",
            )
        return tensor_leaves(result)

    return learnt_leaves


def suspend_gradients() -> bool:
    """Do not record for autograd from here on; gives what it was before."""
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    return enabled


def resume_gradients(enabled: bool) -> None:
    """Record as before."""
    torch._C._set_grad_enabled(enabled)


def arguments_of(call: OpaqueCall) -> Callable[..., Arguments]:
    """What an opaque call is given, as a function of its tensors and sizes alone."""
    leaves = pytree.tree_leaves(call.arguments)
    count = sum(isinstance(leaf, Slot) and leaf.kind == "tensor" for leaf in leaves)

    def arguments(*values: Any) -> Arguments:
        return Arguments(*fill(call.arguments, tensor=values[:count], size=values[count:]))

    in_order = pytree.tree_map(lambda leaf: sorted(leaf, key=repr) if isinstance(leaf, _SETS) else leaf, call.arguments)
    shown = without_addresses(repr(in_order))  # partitions that give other ones are not of one kind
    arguments.__name__ = f"arguments_{hashlib.sha256(shown.encode()).hexdigest()[:12]}"
    return arguments


def on_tensors(call: OpaqueCall) -> Callable[..., list[torch.Tensor]]:
    """What an opaque call that is no module calls, as a function of its tensors and sizes alone."""
    function, arguments = call.function, arguments_of(call)
    assert function is not None

    def run(*values: Any) -> list[torch.Tensor]:
        own = arguments(*values)
        return tensor_leaves(own.beside(function(*own.args, **own.kwargs)))

    run.__name__ = run.__qualname__ = function.__name__
    return run


def _is_spelled(arguments: Any) -> bool:
    """Whether the code of a graph can have these containers: Python's own, with keys that are plain values."""
    if type(arguments) is dict:
        return all(type(key) in (str, int) for key in arguments) and all(map(_is_spelled, arguments.values()))
    if type(arguments) in (tuple, list):
        return all(map(_is_spelled, arguments))
    is_met = isinstance(arguments, Slot) and arguments.is_container
    return pytree.tree_is_leaf(arguments) and not (is_met or isinstance(arguments, _SETS))


_SETS = (set, frozenset)
"""What each process goes through in an order of its own."""


class PieceBuilder:
    """Copies the nodes of one partition into a graph of its own."""

    def __init__(self, cutter: Cutter, place: int) -> None:
        self.cutter, self.place = cutter, place
        self.ownership, self.state_reads = cutter.ownership, cutter.state_reads
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}
        self.reads: dict[Value, fx.Node] = {}
        self.sizes: dict[Any, tuple[Size, fx.Node]] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.direct: dict[str, fx.Node] = {}

    def build(self) -> Piece:
        """The piece: its nodes in the order of the model's forward."""
        in_turn = set(self.state_reads.in_turn.get(self.place, ()))
        for node in self.ownership.nodes:
            if node in in_turn or self.ownership.owner.get(node) == self.place:
                self.copy(node)
        name = self.cutter.names[self.place]
        if self.place == self.cutter.last:
            made = [self.copy(node) for node in self.cutter.outputs if isinstance(node, fx.Node)]
        else:
            made = [self._leaving(node) for node, value in self.cutter.crossing.items() if value.partition == name]
        self.graph.output(tuple(made))
        self._order_placeholders()
        self.graph.lint()
        parameters, buffers = self._state()
        kind = _structure(self, parameters, buffers)
        return Piece(
            name, self.cutter.marked[self.ownership.order[self.place]], self.graph, tuple(self.reads),
            tuple(size for size, _ in self.sizes.values()), self.constants, parameters, buffers, kind,
            self.cutter.captured.autocast,
        )  # fmt: skip

    def _leaving(self, node: fx.Node) -> fx.Node:
        """The copy of a value that others read, in the captured type: autocast has other rules on other devices."""
        made: fx.Node = self.copies[node]
        if self.cutter.captured.autocast is not None and node.meta["val"].is_floating_point():
            made = self.graph.call_function(torch.ops.aten.to.dtype, (made, node.meta["val"].dtype))
        return made

    def _order_placeholders(self) -> None:
        """Reads first, then sizes, as `Piece` promises; they were made as the nodes needed them."""
        for node in reversed([*self.reads.values(), *(node for _, node in self.sizes.values())]):
            first = next(iter(self.graph.nodes))
            if first is not node:
                first.prepend(node)

    def copy(self, node: fx.Node) -> Any:
        """The copy of a node in this piece; foreign values and numbers become placeholders."""
        if node not in self.copies or node in self.state_reads.replaced:
            self.copies[node] = self._copy(node)
        return self.copies[node]

    def _copy(self, node: fx.Node) -> Any:
        if is_size(node):
            return self._size(node.meta["val"])
        if node.op == "placeholder":
            return self._placeholder(node)
        owner = self.ownership.owner.get(node, self.place)
        if owner != self.place:
            return self._read(self.cutter.crossing[node], node)
        if is_call(node) or is_check(node):
            return self._call(node) if is_call(node) else self._check(node)
        if is_item(node) and isinstance(whole := self.copy(node.args[0]), list):  # type: ignore[arg-type]
            return whole[0]
        made = self.graph.node_copy(node, self._value)
        if node.target in ONCE:
            made.args = (*made.args, self.cutter.names[self.place])
        return made

    def _value(self, node: fx.Node) -> Any:
        copied = self.copy(node)
        return copied[0] if isinstance(copied, list) else copied

    def _read(self, value: Value, node: fx.Node) -> fx.Node:
        if value not in self.reads:
            self.reads[value] = self._begun("placeholder", f"value_{len(self.reads)}", node)
        return self.reads[value]

    def _begun(self, op: str, name: str, node: fx.Node) -> fx.Node:
        """A node without inputs, with the value of another one."""
        made = self.graph.create_node(op, name)
        made.meta["val"] = node.meta.get("val")
        return made

    def _size(self, value: Any) -> Any:
        size = self.cutter.symbols.describe(value)
        if not size.expression.free_symbols:
            return int(size.expression)
        if size.expression not in self.sizes:
            self.sizes[size.expression] = size, self.graph.placeholder(f"size_{len(self.sizes)}")
        return self.sizes[size.expression][1]

    def _placeholder(self, node: fx.Node) -> Any:
        kind, target = self.ownership.placeholders[node]
        if kind is InputKind.USER_INPUT:
            if not isinstance(node.meta.get("val"), torch.Tensor):
                return node.meta.get("val")
            return self._read(Value("", self.cutter.captured.users.index(node.name)), node)
        if kind in STATE:
            if target not in self.direct or node in self.state_reads.replaced:
                self.direct[target] = self._begun("get_attr", target, node)
            return self.direct[target]
        name = f"constant_{len(self.constants)}"
        self.constants[name] = self.cutter.captured.program.constants[target]
        return self._begun("get_attr", name, node)

    def _call(self, node: fx.Node) -> Any:
        """A call of the module or function itself, with its arguments in their own structure."""
        call, numbers = call_of(node), cast("list[Any]", node.args[2])
        tensors = [self.copy(each) for each in given_to(node)]
        sizes = [self.copy(each) if isinstance(each, fx.Node) else each for each in numbers]
        if not node.meta.get("without_gradient"):
            return self._called(call, tensors, sizes, node)
        enabled = self.graph.call_function(suspend_gradients)
        made = self._called(call, tensors, sizes, node)
        self.graph.call_function(resume_gradients, (enabled,))
        return made

    def _check(self, node: fx.Node) -> fx.Node:
        """What raises where a value is not as it must be."""
        number, found, _ = cast("tuple[int, fx.Node, bool]", node.args)
        return self.graph.call_function(self.cutter.captured.checks[number].enforced(), (self._value(found),))

    def _called(self, call: OpaqueCall, tensors: list[Any], sizes: list[Any], node: fx.Node) -> Any:
        """The node that has the call's tensors; where it returns just one, that one's in a list."""
        if call.function is not None:
            made = self.graph.call_function(on_tensors(call), (*tensors, *sizes))
            made.meta["val"] = node.meta["val"]
            return made
        args, kwargs = fill(call.arguments, tensor=tensors, size=sizes)
        changes = isinstance(call.effects.results, Changed)
        if changes or not _is_spelled(call.arguments):
            own = self.graph.call_function(arguments_of(call), (*tensors, *sizes))
            args = [self.graph.call_function(Arguments.at, (own, n)) for n in range(len(args))]
            kwargs = {name: self.graph.call_function(Arguments.at, (own, name)) for name in kwargs}
        made = self.graph.create_node("call_module", call.module, tuple(args), dict(kwargs))
        made.meta["val"] = node.meta["val"]
        if changes:
            made = self.graph.call_function(Arguments.beside, (own, made))
        if isinstance(call.effects.results, Slot) and not call.learnt:
            return [made]
        leaves = as_learnt(call) if call.learnt or changes else tensor_leaves
        return self.graph.call_function(leaves, (made,))

    def _state(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        model = self.cutter.deferred.model
        parameters: dict[str, None] = {}
        buffers: dict[str, None] = {}
        known = dict(named_parameters(model, remove_duplicate=False))
        for module in dict.fromkeys(str(node.target) for node in self.graph.nodes if node.op == "call_module"):
            held = model.get_submodule(module)
            parameters.update(dict.fromkeys(f"{module}.{n}" for n, _ in named_parameters(held, remove_duplicate=False)))
            buffers.update(dict.fromkeys(f"{module}.{n}" for n, _ in named_buffers(held, remove_duplicate=False)))
        for name in self.direct:
            (parameters if name in known else buffers)[name] = None
        return tuple(parameters), tuple(buffers)


def _structure(builder: PieceBuilder, parameters: Sequence[str], buffers: Sequence[str]) -> str:
    """A short hash of a piece's structure and shapes, blind to names."""
    model = builder.cutter.deferred.model
    tensors = builder.cutter.deferred.tensors()
    number = {node: n for n, node in enumerate(builder.graph.nodes)}
    rows = []
    for node in builder.graph.nodes:
        target = str(node.target) if isinstance(node.target, str | torch._ops.OpOverload) else node.target.__name__
        if node.op == "call_module":
            module = model.get_submodule(target)
            target = f"{type(module).__qualname__} {_settings(module)}"
        elif node.op in ("get_attr", "placeholder"):
            target = ""
        shapes = [
            f"{leaf.dtype}{builder.cutter.symbols.names(leaf.shape)}" for leaf in tensor_leaves(node.meta.get("val"))
        ]
        args: Any = fx.map_arg((node.args, node.kwargs), lambda each: f"%{number[each]}")
        rows.append((node.op, without_addresses(target), without_addresses(repr(args)), shapes))
    state = [
        (str(tensors[name].dtype), tuple(tensors[name].shape), tensors[name].requires_grad)
        for name in (*parameters, *buffers)
    ]
    autocast = filter(None, [builder.cutter.captured.autocast])
    return hashlib.sha256(repr((rows, state, *autocast)).encode()).hexdigest()[:12]


def _settings(module: nn.Module) -> str:
    """A module as it shows itself; one whose text reads values, which there are none of, as its parts' classes."""
    try:
        return repr(module)
    except Exception:  # noqa: BLE001 - whatever the user's own text raises
        return repr([(name, type(each).__qualname__) for name, each in module.named_modules()])
