"""Copy the nodes of one partition into a graph of its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.marking.glue import is_getitem, is_in_place, is_size
from assigner.marking.graph import Piece, Size, Value
from assigner.marking.opaque import Slot, is_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.marking.cut import Cutter


def tensor_leaves(result: Any) -> list[torch.Tensor]:
    """The tensors of what a module returned, in order."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class _Single:
    """The copy of a call whose one tensor is the result itself: item 0 of it is the node."""

    node: fx.Node


class PieceBuilder:
    """Copies the nodes of one partition into a graph of its own."""

    def __init__(self, cutter: Cutter, place: int) -> None:
        self.cutter, self.place = cutter, place
        self.ownership = cutter.ownership
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}
        self.reads: dict[Value, fx.Node] = {}
        self.sizes: dict[Any, tuple[Size, fx.Node]] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.direct: dict[str, fx.Node] = {}
        self.modules: dict[str, None] = {}
        users = [
            spec.arg.name
            for spec in cutter.captured.program.graph_signature.input_specs
            if spec.kind is InputKind.USER_INPUT
        ]
        self.input_index = {name: n for n, name in enumerate(users)}

    def build(self) -> Piece:
        """The piece: its nodes in the order of the model's forward."""
        for node, owner in self.ownership.owner.items():
            if owner == self.place:
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
            self.cutter.autocast,
        )  # fmt: skip

    def _leaving(self, node: fx.Node) -> fx.Node:
        """The copy of a value that others read, in the captured type: autocast has other rules on other devices."""
        made: fx.Node = self.copies[node]
        if self.cutter.autocast is None or not node.meta["val"].is_floating_point():
            return made
        return self.graph.call_function(torch.ops.aten.to.dtype, (made, node.meta["val"].dtype))

    def _order_placeholders(self) -> None:
        """Reads first, then sizes, as `Piece` promises; they were made as the nodes needed them."""
        for node in reversed([*self.reads.values(), *(node for _, node in self.sizes.values())]):
            first = next(iter(self.graph.nodes))
            if first is not node:
                first.prepend(node)

    def copy(self, node: fx.Node) -> Any:
        """The copy of a node in this piece; foreign values and numbers become placeholders."""
        if node not in self.copies:
            self.copies[node] = self._copy(node)
        return self.copies[node]

    def _copy(self, node: fx.Node) -> Any:  # noqa: PLR0911 - one line a kind of node
        if is_size(node):
            return self._size(node.meta["val"])
        if node.op == "placeholder":
            return self._placeholder(node)
        owner = self.ownership.owner.get(node, self.place)
        if owner != self.place:
            return self._read(self.cutter.crossing[node], node)
        if is_call(node):
            return self._call(node)
        if is_getitem(node) and isinstance(whole := self.copy(node.args[0]), _Single):  # type: ignore[arg-type]
            return whole.node
        if is_in_place(node):
            return self._in_place(node)
        return self.graph.node_copy(node, self.copy)

    def _read(self, value: Value, node: fx.Node) -> fx.Node:
        if value not in self.reads:
            self.reads[value] = self._new_placeholder(f"value_{len(self.reads)}", node)
        return self.reads[value]

    def _new_placeholder(self, name: str, node: fx.Node | None) -> fx.Node:
        made = self.graph.placeholder(name)
        if node is not None:
            made.meta["val"] = node.meta.get("val")
        return made

    def _size(self, value: Any) -> Any:
        size = self.cutter.symbols.describe(value)
        if not size.expression.free_symbols:
            return int(size.expression)
        if size.expression not in self.sizes:
            self.sizes[size.expression] = size, self._new_placeholder(f"size_{len(self.sizes)}", None)
        return self.sizes[size.expression][1]

    def _placeholder(self, node: fx.Node) -> Any:
        kind, target = self.ownership.placeholders[node]
        if kind is InputKind.USER_INPUT:
            if not isinstance(node.meta.get("val"), torch.Tensor):
                return node.meta.get("val")
            return self._read(Value("", self.input_index[node.name]), node)
        if kind in (InputKind.PARAMETER, InputKind.BUFFER):
            if target not in self.direct:
                self.direct[target] = self._attribute(target, node)
            return self.direct[target]
        name = f"constant_{len(self.constants)}"
        self.constants[name] = self.cutter.captured.program.constants[target]
        return self._attribute(name, node)

    def _attribute(self, name: str, node: fx.Node) -> fx.Node:
        made = self.graph.create_node("get_attr", name)
        made.meta["val"] = node.meta.get("val")
        return made

    def _call(self, node: fx.Node) -> Any:
        """A call of the module itself, with its arguments in their own structure; gives its tensors as a list."""
        position, given, numbers = cast("tuple[int, list[fx.Node], list[Any]]", node.args)
        call = self.cutter.captured.calls[position]
        tensors = [self.copy(each) for each in given]
        sizes = [self.copy(each) if isinstance(each, fx.Node) else each for each in numbers]
        for number in call.written:  # on a copy: what a partition reads stays as it is, for others and for a recompute
            self._check_last_use(given[number], node)
            tensors[number] = self.graph.call_function(torch.ops.aten.clone.default, (tensors[number],))
        slots = {"tensor": tensors, "size": sizes}
        args, kwargs = pytree.tree_map(
            lambda leaf: slots[leaf.kind][leaf.index] if isinstance(leaf, Slot) else leaf, call.arguments
        )
        self.modules[call.module] = None
        made = self.graph.create_node("call_module", call.module, tuple(args), dict(kwargs))
        made.meta["val"] = node.meta["val"]
        if isinstance(call.results, Slot):
            return _Single(made)
        return self.graph.call_function(tensor_leaves, (made,))

    def _check_last_use(self, value: fx.Node, writer: fx.Node) -> None:
        """The writer works on a copy: nobody may read the value, or a view of it, afterwards and expect the change."""
        order = {node: n for n, node in enumerate(self.ownership.nodes)}
        while _is_view(value):
            value = cast("fx.Node", value.args[0])
        family = [value]
        for each in family:
            family += [user for user in each.users if _is_view(user)]
        readers = [user for each in family for user in each.users if not is_size(user)]
        late = [reader for reader in readers if order[reader] > order[writer]]
        if late:
            raise MarkingError(
                f"{writer.name} changes a value in place ({_line(writer)}) that {late[0].name} reads afterwards"
                f" ({_line(late[0])})",
                hint="make the operation out of place (inplace=False), or mark a larger module with both lines",
            )

    def _in_place(self, node: fx.Node) -> fx.Node:
        """Glue that changes a value in place runs out of place; the exported graph reads its result from then on."""
        assert isinstance(node.target, torch._ops.OpOverload)
        first = node.args[0]
        if isinstance(first, fx.Node) and first.op == "placeholder":
            kind, _ = self.ownership.placeholders[first]
            if kind is InputKind.BUFFER:
                return self.graph.node_copy(node, self.copy)  # the change is meant
        name = node.target._schema.name.split("::")[1]
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        overload = getattr(packet, node.target._overloadname, None) if name.endswith("_") else None
        if overload is None or (isinstance(first, fx.Node) and _is_view(first)):
            raise MarkingError(
                f"the glue between partitions changes part of a value in place ({node.name}: {_line(node)})",
                hint="write it out of place, or mark a larger module that contains the line",
            )
        if isinstance(first, fx.Node):
            self._check_last_use(first, node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.copy)
        made = self.graph.call_function(overload, args, kwargs)
        made.meta["val"] = node.meta.get("val")
        return made

    def _state(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        model = self.cutter.deferred.model
        parameters: dict[str, None] = {}
        buffers: dict[str, None] = {}
        known = dict(model.named_parameters(remove_duplicate=False))
        for module in self.modules:
            held = model.get_submodule(module)
            parameters.update(dict.fromkeys(f"{module}.{n}" for n, _ in held.named_parameters(remove_duplicate=False)))
            buffers.update(dict.fromkeys(f"{module}.{n}" for n, _ in held.named_buffers(remove_duplicate=False)))
        for name in self.direct:
            (parameters if name in known else buffers)[name] = None
        return tuple(parameters), tuple(buffers)


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(result.alias_info is not None for result in node.target._schema.returns) and not is_in_place(node)


def _line(node: fx.Node) -> str:
    trace = (node.stack_trace or "").strip().splitlines()
    return trace[-1].strip() if trace else "unknown line"


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
            target = f"{type(module).__qualname__} {module!r}"
        elif node.op in ("get_attr", "placeholder"):
            target = ""
        shapes = [
            f"{leaf.dtype}{builder.cutter.symbols.names(leaf.shape)}"
            for leaf in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(leaf, torch.Tensor)
        ]
        args: Any = fx.map_arg((node.args, node.kwargs), lambda each: f"%{number[each]}")
        rows.append((node.op, target, repr(args), shapes))
    state = [
        (str(tensors[name].dtype), tuple(tensors[name].shape), tensors[name].requires_grad)
        for name in (*parameters, *buffers)
    ]
    autocast = () if builder.cutter.autocast is None else (builder.cutter.autocast,)
    return hashlib.sha256(repr((rows, state, *autocast)).encode()).hexdigest()[:12]
