"""A partition as a module on a device."""

from __future__ import annotations

import contextlib
import enum
import keyword
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx.graph_module import _assign_attr, _forward_from_src
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from assigner.model.deferred import slot_of
from assigner.model.deferred.memento import Memento, placed
from assigner.model.marking.owncopies import own_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from assigner.model.deferred import DeferredModel
    from assigner.model.marking.graph import Piece


class PartitionModule(nn.Module):
    """A part of a model under the model's own names, with the code of a graph as its forward.

    Unlike an `fx.GraphModule` it has no attributes of its own beside a module's: the model may call its own modules and
    tensors `graph`, `code` and `meta`.

    Args:
        root: The modules and tensors that the graph has, by their names there.
        graph: Of operations; its outputs are what a call returns.
    """

    def __init__(self, root: Mapping[str, Any], graph: fx.Graph) -> None:
        super().__init__()
        # in the graph's order, so that ranks go through them in the same one
        names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module"))
        for name in sorted(names, key=lambda each: each.count(".")):
            _assign_attr(root[name], self, name)
        held: dict[str, Any] = {}
        for node in graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), partial(_as_code, held))
        with any_names():
            code = graph.python_code("self")
        self.__run: Callable[..., Any] = _forward_from_src(code.src, {**code.globals, **held})

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The graph's code, on this module; it is bound anew each time, for a method that is kept would be a cycle."""
        return MethodType(self.__run, self)


class _Held:
    """Stands in a graph for an object whose text is no code for it: this code gives it."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __repr__(self) -> str:
        return self.code


def _as_code(held: dict[str, Any], leaf: Any) -> Any:
    """A constant that code has as a text; others, as a number of NumPy's or a member of an enumeration, are `held`."""
    if type(leaf) in _TEXTS or not isinstance(leaf, (*_TEXTS, enum.Enum, set, frozenset, np.generic)):
        return leaf
    name = f"_held_{len(held)}"
    held[name] = frozenset(leaf) if isinstance(leaf, set) else leaf
    return _Held(f"set({name})" if isinstance(leaf, set) else name)  # one of its own for each call, which may change it


_TEXTS = (bool, int, float, complex, str, bytes)


def build_module(
    deferred: DeferredModel, piece: Piece, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> PartitionModule:
    """A piece as a module that holds just its own part of the model, under the model's own names.

    Its parameters and buffers are `tensors`, which lie on the device; so do the tensors that its glue makes.
    """
    root: dict[str, Any] = {name: constant.to(device) for name, constant in piece.constants.items()}
    root.update({name: tensors[name] for name in piece.state})
    for name in piece.called:
        root[name] = module = copied_module(deferred, name, tensors, device)
        for each in module.modules() if device.type == "cuda" else ():
            if isinstance(each, nn.RNNBase):  # in one piece of memory, as by `Module.to`: else each forward copies it
                each.flatten_parameters()
    for name in piece.state:
        owner = next((each for each in root if name.startswith(each + ".")), None)
        if owner is not None:
            space, key = slot_of(root[owner], name.removeprefix(owner + "."))
            space[key] = tensors[name]
    return _assemble(root, piece, device)


def copied_module(
    deferred: DeferredModel, name: str, tensors: Mapping[str, torch.Tensor], device: torch.device | None = None
) -> nn.Module:
    """A submodule of the pipeline's own, with the objects of the script's that it holds.

    Tensors that the builder has made for a GPU, and keeps as attributes, come to `device`.

    A tensor that was computed and is kept as an attribute, as old weight_norm's `weight`, is made anew in forward:
    torch copies none that has a graph.

    Raises:
        UsageError: Python copies no object of a kind that it holds, or it leads to other parts of the model.
    """
    modules = deferred.model.get_submodule(name).named_modules()
    computed = [each for each in Memento(modules).tensors if each.grad_fn is not None]
    built = deferred.tensors()
    known = {**deferred.outside, **{id(each): each.detach() for each in computed}}
    known |= {id(built[each]): tensor for each, tensor in tensors.items()}
    if device is not None:
        known |= {id(each): each.to(device, copy=True) for each in deferred.for_gpus}
    return own_copy(deferred.model, name, known)


def around_module(
    module: PartitionModule,
    piece: Piece,
    device: torch.device,
    beside: Mapping[str, torch.Tensor],
    lenders: Mapping[str, PartitionModule],
) -> PartitionModule:
    """A piece of another capture as a module around the parts of `module`: the same objects, no second copy.

    That one holds what this piece holds, or more, but for the tensors in `beside`, by name, and those that other
    partitions here have, their `lenders` by name.
    """
    root: dict[str, Any] = {name: constant.to(device) for name, constant in piece.constants.items()}
    root.update({name: module.get_submodule(name) for name in piece.called})
    root.update({name: beside[name] for name in piece.state if name in beside})
    holders: dict[str, nn.Module] = {}
    for node in piece.graph.nodes:
        if node.op == "get_attr" and node.target not in root:
            path, _, leaf = str(node.target).rpartition(".")
            holders[path] = lenders.get(str(node.target), module).get_submodule(path)
            root[str(node.target)] = getattr(holders[path], leaf)
    made = _assemble(root, piece, device)
    for path in sorted(holders.keys() - {""} - {name.rpartition(".")[0] for name in beside}):
        made.set_submodule(path, holders[path])  # its forward may put another tensor in a buffer's place
    return made


def _assemble(root: dict[str, Any], piece: Piece, device: torch.device) -> PartitionModule:
    """The capture ran on the CPU: what glue makes there belongs on the worker's device.

    Kernels there may leave other strides, under which a `contiguous()` that was idle in the capture was not: so a view
    is a copy where it has to be.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(piece.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
            node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda _: device, (node.args, node.kwargs))
    return PartitionModule(root, graph)


@contextlib.contextmanager
def any_names() -> Iterator[None]:
    """Graphs that become code while the block runs may have modules and tensors of any name, as "in" and "µ".

    torch writes `self.in` of the one, which is no Python, and `self.µ` of the other, whose letter Python reads as "μ".
    """

    def spelled(base: str, target: str) -> str:
        for name in target.split("."):
            is_plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
            base = f"{base}.{name}" if is_plain else f"getattr({base}, {name!r})"
        return base

    with placed([(torch.fx.graph, "_format_target", spelled)]):
        yield
