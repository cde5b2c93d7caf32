"""Tables that code between partitions keeps for its next call: what that finds must be what it would make itself.

    if self.table is None or self.table.shape[0] < n:     made by whichever call was the longest so far
        self.table = f(n)
    x = x + self.table[:n]                                f(14)[:8], or f(8)

A captured graph makes such a table anew, from the shapes of its own inputs. Of positions, rotary angles and masks
f(14)[:8] is f(8). Where it is not, as of positions counted from the middle, plain torch's result depends on the sizes
that came before, and on which worker they came. So the forward is captured a second time, where it finds what inputs of
other sizes leave, and must do the same: what follows from shapes is compared by its values, all else by its operations.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from assigner.errors import MarkingError
from assigner.model.deferred.memento import StateChange, placed
from assigner.model.deferred.mutation import is_random, storage_of, tensor_leaves
from assigner.model.deferred.origins import digest
from assigner.model.marking.domain import InputKey
from assigner.model.marking.fakeforward import is_same_view
from assigner.model.marking.interception import in_words, is_hook
from assigner.model.marking.isolation import CrossingError
from assigner.model.marking.leftovers import Attribute, attribute_of
from assigner.model.marking.nodes import call_of, reached, storages
from assigner.model.marking.opaque import is_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.model.marking.capture import Capture

_ULPS = 4
"""By how many units in the last place values may differ: a vectorised function takes another way at a tensor's end."""


@dataclass(frozen=True)
class FoundTables:
    """What one forward leaves, and another one may find.

    Args:
        sizes: The key of its inputs.
        values: The tables, each as what is there `now`, with its value; a buffer's name is that in the model.
        training: The mode that it was captured in.
        opened: The unmarked modules whose code that capture has followed, each with why.
    """

    sizes: InputKey
    values: Mapping[Attribute, StateChange]
    training: bool
    opened: Mapping[str, CrossingError]

    @property
    def count(self) -> int:
        """Of all elements."""
        return sum(each.now.numel() for each in self.values.values())

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        """The tables by name."""
        return {each.name: each.now for each in self.values.values()}

    def are_as(self, others: FoundTables) -> bool:
        """Whether the others are the same tables with the same values."""
        return self.values.keys() == others.values.keys() and all(
            _are_equal(each.now, others.values[key].now) for key, each in self.values.items()
        )

    @contextlib.contextmanager
    def placed(self, model: nn.Module) -> Iterator[None]:
        """The model has them in the block: attributes with their values, buffers on the meta device as all others."""
        spaces = {id(module._buffers) for module in model.modules()}
        entries = [
            (_space(each.holder), each.key, each.now.to("meta") if id(each.holder) in spaces else each.now)
            for each in self.values.values()
        ]
        with placed(entries):
            yield


def neighbours(every: Sequence[FoundTables], count: int) -> list[FoundTables]:
    """Those next to so many elements, of each mode: what is alike for these is so for those beyond."""
    found: list[FoundTables] = []
    for training in (True, False):
        sized = sorted((each for each in every if each.training is training), key=lambda each: each.count)
        smaller = [each for each in sized if each.count < count]
        larger = [each for each in sized if each.count > count]
        found += [*smaller[-1:], *(each for each in sized if each.count == count), *larger[:1]]
    return found


def left_by(captured: Capture, key: InputKey) -> FoundTables | None:
    """The tables that a captured forward leaves for inputs of some sizes; None: they do not follow from these."""
    if not captured.tables:
        return FoundTables(key, {}, captured.training, captured.opened)
    values, found = NodeValues(captured, key), {}
    for each in captured.tables:
        value = values.of_memory(each.now)
        if value is None:
            return None
        found[attribute_of(each)] = each._replace(before=None, now=value)
    return FoundTables(key, found, captured.training, captured.opened)


def leaves_as(captured: Capture, others: FoundTables) -> bool:
    """Whether a captured forward leaves the same for inputs of the sizes that others have been left for."""
    if not captured.domain.admits(others.sizes):
        return False
    found = left_by(captured, others.sizes)
    return found is not None and found.are_as(others)


class NodeValues:
    """What the nodes of a captured forward do, and the values of those that follow from its inputs' sizes alone.

    Regions are ordinary nodes of its graph.
    """

    def __init__(self, captured: Capture, key: InputKey) -> None:
        self._captured, self._sizes = captured, captured.domain.numbers(key)
        self._nodes = list(captured.program.graph.nodes)
        self._given = {name: n for n, name in enumerate(captured.users)}
        self._values: dict[fx.Node, Any] = {}
        self.known: dict[fx.Node, None] = {}
        for node in self._nodes:
            if self._follows(node):
                self.known[node] = None

    def _follows(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
            return self.number(value) is not None
        if node.op == "placeholder":
            return self._constant(node) is not None
        is_plain = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        is_made = node.op == "call_function" and is_plain and not is_call(node) and not is_random(node.target)
        return is_made and bool(tensor_leaves(value)) and all(each in self.known for each in node.all_input_nodes)

    def _constant(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a placeholder that is a tensor with one, or a table that was found."""
        kind, target = self._captured.kinds.get(node.name, (None, ""))
        if target in self._captured.found:
            return self._captured.found[target]
        value = self._captured.program.constants.get(target) if kind is InputKind.CONSTANT_TENSOR else None
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and not value.is_meta
        return value if is_real else None

    def does(self, node: fx.Node) -> str:
        """What a node is, but for the nodes that it reads."""
        if node.op == "placeholder":
            kind, target = self._captured.kinds[node.name]
            return f"{kind} {target or self._given.get(node.name)}"
        turn = {each: n for n, each in enumerate(node.all_input_nodes)}
        args: Any = fx.map_arg((node.args, node.kwargs), lambda each: f"%{turn[each]}")
        if is_call(node):
            args = (call_of(node).label, repr(call_of(node).arguments))
        elif is_hook(node):  # whose number is another one in each capture
            args = in_words(node.meta["hook"])
        return f"{node.op} {node.target} {args}{' without gradient' * bool(node.meta.get('without_gradient'))}"

    def number(self, value: Any) -> Any:
        """A size as a number; None: it depends on values."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value
        found = value.node.expr.subs(self._sizes)
        if found.free_symbols:
            return None
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        return kind(found)

    def of_memory(self, table: torch.Tensor) -> Any:
        """The value of the last node that is a tensor, or the same view of its memory; None: it is not known."""
        for node in reversed(self._nodes):
            value = node.meta.get("val")
            is_there = isinstance(value, torch.Tensor) and storage_of(value) == storage_of(table)
            if is_there and is_same_view(value, table):
                return self.of(node)
        return None

    def of(self, node: fx.Node) -> Any:
        """A node's value, after all that is written to it; None: it is not known."""
        if node not in self.known:
            return None
        if node not in self._values:
            needed = self._behind(node)
            if not needed <= self.known.keys():
                return None
            with _disable_current_modes(), torch.no_grad():
                for each in self._nodes:
                    if each in needed:
                        self._values[each] = self._made(each)
        return self._values[node]

    def _behind(self, node: fx.Node) -> set[fx.Node]:
        """All that a node is made of, with what is written to the memory of it."""

        def further(each: fx.Node) -> list[fx.Node]:
            made_of = each.all_input_nodes if tensor_leaves(each.meta.get("val")) else []  # a size is a number
            return [*made_of, *(other for place in storages(each) for other in self._in_memory.get(place, ()))]

        return reached([node], further)

    @cached_property
    def _in_memory(self) -> dict[int, list[fx.Node]]:
        found: dict[int, list[fx.Node]] = {}
        for node in self._nodes:
            for place in storages(node) if node.op == "call_function" and not is_call(node) else ():
                found.setdefault(place, []).append(node)
        return found

    def _made(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not tensor_leaves(value):
            return self.number(value)
        if node.op == "placeholder":
            constant = self._constant(node)
            return None if constant is None else constant.clone()
        target: Any = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        return target(*args, **kwargs)

    @cached_property
    def words(self) -> dict[fx.Node, int]:
        """Of each node, by what it is made."""
        found: dict[fx.Node, int] = {}
        for node in self._nodes:
            value, read = node.meta.get("val"), [found[each] for each in node.all_input_nodes]
            if node in self.known and not tensor_leaves(value):
                found[node] = digest([f"size {self.number(value)}"])
            elif node in self.known and node.op == "placeholder":  # another table may stand there under the same name
                found[node] = digest([f"tensor {id(self._constant(node))}"])
            else:
                found[node] = digest([self.does(node), *map(str, read)])
        return found

    @property
    def ends(self) -> list[fx.Node]:
        """What the forward is for: its output, its writes, and what is called for its own sake."""
        return [
            node for node in self._nodes
            if node.op == "output"
            or (self._brings(node) and (not node.users or _is_write(node)))
        ]  # fmt: skip

    def _brings(self, node: fx.Node) -> bool:
        """Whether a node does something that does not follow from sizes; a look at a type does."""
        is_plain = not is_call(node) and not is_random(node.target)
        is_known = node in self.known or (is_plain and all(each in self.known for each in node.all_input_nodes))
        return node.op == "call_function" and not is_known

    def shows_as(self, others: NodeValues) -> bool:
        """Whether both forwards do the same."""
        if len(self.ends) != len(others.ends):
            return False
        waiting, seen = [*zip(self.ends, others.ends, strict=True)], set[tuple[fx.Node, fx.Node]]()
        while waiting:
            pair = one, other = waiting.pop()
            if pair in seen or self.words[one] == others.words[other]:
                continue
            seen.add(pair)
            if one in self.known and other in others.known:
                if not _are_equal(self.of(one), others.of(other)):
                    return False
            elif self.does(one) != others.does(other):
                return False
            else:
                inputs = one.all_input_nodes, other.all_input_nodes
                if len(inputs[0]) != len(inputs[1]):
                    return False
                waiting += zip(*inputs, strict=True)
        return True


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, up to what a vectorised function may make of one number."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or torch.equal(one, other):
        return torch.equal(one, other)
    step = _ULPS * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=step, atol=step * 1e-3, equal_nan=True)


def _is_write(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _space(holder: Any) -> dict[Any, Any]:
    return holder if isinstance(holder, dict) else vars(holder)


def check_tables(
    name: str,
    first: Capture,
    others: Sequence[FoundTables],
    again: Callable[[FoundTables, InputKey], Capture],
) -> FoundTables:
    """A forward does the same whichever tables it finds: those of the builder, or what others have left.

    Args:
        name: Of the model's class.
        first: The forward where it finds those of the builder.
        others: What forwards leave that were captured for other inputs, or in the other mode.
        again: The forward for some inputs where it finds tables.

    Returns:
        What it leaves for its example's inputs.

    Raises:
        MarkingError: it does not.
    """
    own = left_by(first, first.domain.example)
    if own is None:
        raise MarkingError(
            f"the forward of {name} keeps {first.tables[0].name} for its next call, which does not follow from the"
            " shapes of inputs alone",
            hint=_ANEW,
        )
    for found, key in _starts(first, others, own):
        cause: MarkingError | None = None
        try:
            second = again(found, key)
        except MarkingError as error:
            cause = error
        if cause is not None or not NodeValues(first, key).shows_as(NodeValues(second, key)):
            raise MarkingError(
                f"the forward of {name} keeps {min(found.by_name)} for its next call: with inputs {key} it does"
                f" something else where it finds what inputs {found.sizes} have left there than where it makes that"
                " itself, so that its result depends on which sizes came before",
                hint=_ANEW,
            ) from cause
    return own


def _starts(first: Capture, others: Sequence[FoundTables], own: FoundTables) -> list[tuple[FoundTables, InputKey]]:
    """Which tables a forward is to find, each with the sizes of its inputs then.

    They are of its neighbours, unless these leave what it leaves itself; and of its own for one larger size, of each
    that they depend on. Where it holds for no larger one, it finds those for its example with a smaller one.
    """
    example = first.domain.example
    tries = [(each, example) for each in neighbours(others, own.count) if not leaves_as(first, each)]
    for key, is_larger in first.domain.beside() if own.values else ():
        left = left_by(first, key)
        if left is not None and not left.are_as(own):
            tries.append((left, example) if is_larger else (own, key))
    return [
        (found, key) for n, (found, key) in enumerate(tries)
        if not any(key == known and found.are_as(each) for each, known in tries[:n])
    ]  # fmt: skip


_ANEW = (
    "make it for a fixed longest size in the model's builder (register_buffer), or anew in each forward; or mark a"
    " larger module that contains the line"
)
