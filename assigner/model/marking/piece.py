"""Copy the nodes of one partition into a graph of its own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.model.deferred.mutation import tensor_leaves
from assigner.model.deferred.origins import without_addresses
from assigner.model.marking.checks import is_check
from assigner.model.marking.glue import is_size
from assigner.model.marking.graph import Piece, Size, Value
from assigner.model.marking.nodes import is_item, opaque_arguments
from assigner.model.marking.opaque import OpaqueCall, Slot, fill, is_call, split
from assigner.model.marking.writing import ONCE
from assigner.model.members import named_buffers, named_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.model.marking.cutter import Cutter


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


def on_tensors(call: OpaqueCall) -> Callable[..., list[torch.Tensor]]:
    """What an opaque call that is no module calls, as a function of its tensors and sizes alone."""
    function, leaves = call.function, pytree.tree_leaves(call.arguments)
    count = sum(isinstance(leaf, Slot) and leaf.kind == "tensor" for leaf in leaves)
    assert function is not None

    def run(*values: Any) -> list[torch.Tensor]:
        args, kwargs = fill(call.arguments, tensor=values[:count], size=values[count:])
        return tensor_leaves(function(*args, **kwargs))

    run.__name__ = run.__qualname__ = function.__name__
    return run


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
        self.input_index = {name: n for n, name in enumerate(cutter.captured.users)}

    def build(self) -> Piece:
        """The piece: its nodes in the order of the model's forward."""
        in_turn = set(self.ownership.in_turn.get(self.place, ()))
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
            self.cutter.autocast,
        )  # fmt: skip

    def _leaving(self, node: fx.Node) -> fx.Node:
        """The copy of a value that others read, in the captured type: autocast has other rules on other devices."""
        made: fx.Node = self.copies[node]
        if self.cutter.autocast is not None and node.meta["val"].is_floating_point():
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
        if node not in self.copies or node in self.ownership.replaced:
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
        if is_item(node) and isinstance(whole := self.copy(node.args[0]), _Single):  # type: ignore[arg-type]
            return whole.node
        made = self.graph.node_copy(node, self._value)
        if node.target in ONCE:
            made.args = (*made.args, self.cutter.names[self.place])
        return made

    def _value(self, node: fx.Node) -> Any:
        copied = self.copy(node)
        return copied.node if isinstance(copied, _Single) else copied

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
            if target not in self.direct or node in self.ownership.replaced:
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
        """A call of the module or function itself, with its arguments in their own structure."""
        position, given, numbers = opaque_arguments(node)
        call = self.cutter.captured.calls[position]
        tensors = [self.copy(each) for each in given]
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
        """The call's tensors: as a list, or alone where it returns just one."""
        if call.function is not None:
            made = self.graph.call_function(on_tensors(call), (*tensors, *sizes))
            made.meta["val"] = node.meta["val"]
            return made
        args, kwargs = fill(call.arguments, tensor=tensors, size=sizes)
        self.modules[call.module] = None
        made = self.graph.create_node("call_module", call.module, tuple(args), dict(kwargs))
        made.meta["val"] = node.meta["val"]
        if isinstance(call.effects.results, Slot) and not call.learnt:
            return _Single(made)
        return self.graph.call_function(as_learnt(call) if call.learnt else tensor_leaves, (made,))

    def _state(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        model = self.cutter.deferred.model
        parameters: dict[str, None] = {}
        buffers: dict[str, None] = {}
        known = dict(named_parameters(model, remove_duplicate=False))
        for module in self.modules:
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
    autocast = () if builder.cutter.autocast is None else (builder.cutter.autocast,)
    return hashlib.sha256(repr((rows, state, *autocast)).encode()).hexdigest()[:12]


def _settings(module: nn.Module) -> str:
    """A module as it shows itself; one whose text reads values, which there are none of, as its parts' classes."""
    try:
        return repr(module)
    except Exception:  # noqa: BLE001 - whatever the user's own text raises
        return repr([(name, type(each).__qualname__) for name, each in module.named_modules()])
