"""Which values between partitions bear a gradient.

A value that may have one has one: its readers send a gradient back, and its maker goes on from there if it needs to.
Where code behind it looks, as a reentrant checkpoint does, it has one exactly if it had one in the capture:

    h = self.frozen(x).requires_grad_()     has one, though nothing is trained behind it
    h = self.trained(x).detach()            has none, though the partition is trained

What leads to such a value counts likewise. Readers on the maker's rank find it as this forward has left it, so that a
loop may freeze what lies in front. A message says nothing of that, and neither does a graph between partitions that
was captured once: there, what later forwards decide otherwise is refused.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from assigner.model.deferred.mutation import gives_back, storage_of
from assigner.model.marking.fakeforward import is_same_view
from assigner.model.marking.graph import Value
from assigner.model.marking.nodes import call_of, given_to, is_result, reached
from assigner.model.marking.opaque import is_call
from assigner.model.marking.writing import decided_otherwise, still_required, wanted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.model.marking.cutter import Cutter
    from assigner.model.marking.graph import Piece, ValueShape


def _requiring(cutter: Cutter) -> set[fx.Node]:
    """The nodes whose values require a gradient, or may; without training, those that a forward has asked one for."""
    ownership, tensors = cutter.ownership, cutter.deferred.tensors()
    found: set[fx.Node] = set()
    for node in ownership.nodes:
        if node.op == "placeholder":
            kind, name = ownership.placeholders[node]
            requires = kind is InputKind.PARAMETER and tensors[name].requires_grad
        elif is_result(node):
            requires = node.args[1] in call_of(node.args[0]).effects.wanting
        elif node.target is torch.ops.aten.detach.default or is_call(node):
            requires = False
        else:
            requires = node.target is wanted or (
                cutter.training and any(each in found for each in node.all_input_nodes)
            )
        if requires:
            found.add(node)
    return found


def _asked(cutter: Cutter, pieces: Sequence[Piece]) -> set[Value]:
    """The values between partitions of which code behind them looks whether they require a gradient."""
    asking = {
        cutter.names[cutter.ownership.owner[node]]
        for node in cutter.ownership.nodes
        if node.target is still_required or (is_call(node) and call_of(node).effects.asks)
    }
    found: set[Value] = set()
    for piece in reversed(pieces):
        if piece.name in asking or any(value.partition == piece.name for value in found):
            found.update(piece.reads)
    return found


def check_asked(partition: str, made: torch.Tensor, *, gradient: bool, sent: bool) -> None:
    """Look at a value that a partition has made and code behind it looks at (`ValueShape.asked`).

    A gradient comes back for it or not; where it is sent, another rank takes that for an answer.

    Raises:
        UsageError: it requires a gradient and none comes back, or it requires none and another rank does not know.
    """
    if made.requires_grad != gradient and (sent or not gradient):
        raise decided_otherwise(f"a result of partition {partition!r}", requires=gradient)


def with_gradients(
    cutter: Cutter, values: Mapping[Value, ValueShape], pieces: Sequence[Piece]
) -> dict[Value, ValueShape]:
    """A value bears a gradient if it is a float and a trainable parameter lies behind it.

    Without training no parameter has a value require one: those that required one in the capture bear it.
    """
    tensors = cutter.deferred.tensors()
    requires = {cutter.crossing[node] for node in _requiring(cutter) if node in cutter.crossing}
    asked = _asked(cutter, pieces)
    exactly = asked if cutter.training else values
    trained = {value.partition for value in requires}
    for piece in pieces:
        own = any(tensors[name].requires_grad for name in piece.parameters)
        fed = any(value.partition in trained and values[value].gradient for value in piece.reads)
        if own or fed:
            trained.add(piece.name)
    bearing = {value for value in values if (value in requires if value in exactly else value.partition in trained)}
    return {
        value: replace(shape, gradient=shape.gradient and value in bearing, asked=shape.gradient and value in asked)
        for value, shape in values.items()
    }


AGAIN = Value("", -1)
"""Stands for leaves of graphs that are no value between partitions, no input and no parameter."""


def values_behind(cutter: Cutter) -> dict[Value, frozenset[Value]]:
    """For each tensor that the last partition returns, and for each input of the model, what may be made of it.

    These are values between partitions, and inputs; itself among them where it is one. What a module returns may be
    made of anything else that it returns; a parameter is one in all that hold it.

        h = a(x)
        u = b(h)
        return c(u, h), h       of h: h and u       of what c returns: none

    What of the batch alone several partitions make, each for itself, has `AGAIN` besides: of each there is a leaf.
    """
    captured, ownership = cutter.captured, cutter.ownership
    inputs = {
        Value("", captured.users.index(node.name)): node
        for node, (kind, _) in ownership.placeholders.items()
        if kind is InputKind.USER_INPUT
    }
    made = [each for each in cutter.outputs if isinstance(each, fx.Node)]
    sources = {**inputs, **{Value(cutter.names[cutter.last], n): node for n, node in enumerate(made)}}
    found: dict[Value, set[Value]] = {value: set() for value, node in sources.items() if _may_bear(node)}
    starts: dict[fx.Node, int] = defaultdict(int)
    for n, (value, behind) in enumerate(found.items()):
        for node in _as_one(cutter, sources[value]):
            starts[node] |= 1 << n
            if node.op == "call_function" and node not in ownership.owner and len(ownership.places([node])) > 1:
                behind.add(AGAIN)
    bits: dict[fx.Node, int] = {}  # of each source, whether a node may be made of it
    for node in captured.graph.nodes:
        passes = _may_bear(node) and node.target is not torch.ops.aten.detach.default and not _is_new(node)
        bits[node] = starts.get(node, 0)
        if passes:
            bits[node] = functools.reduce(operator.or_, (bits[each] for each in node.all_input_nodes), bits[node])
    for node, value in (*cutter.crossing.items(), *((node, value) for value, node in inputs.items())):
        for n, behind in enumerate(found.values()):
            if bits[node] >> n & 1:
                behind.add(value)
    return {value: frozenset(behind) for value, behind in found.items()}


def _is_new(node: fx.Node) -> bool:
    """Whether an operation takes of a tensor but its shape and type, as `zeros_like` and `new_ones` do."""
    named = re.fullmatch(r"aten::(new_\w+|\w+_like)", getattr(getattr(node.target, "_schema", None), "name", ""))
    return named is not None


def _may_bear(node: fx.Node) -> bool:
    """Whether a node's value, or one that is in it, may have a gradient."""
    value = node.meta.get("val")
    return isinstance(value, list | tuple) or (
        isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    )


def _as_one(cutter: Cutter, node: fx.Node) -> set[fx.Node]:
    """The nodes whose users may have a node's tensor, or what its module has made of it before it returned it."""
    ownership = cutter.ownership

    def further(each: fx.Node) -> list[fx.Node]:
        if each.op == "placeholder":
            kind, name = ownership.placeholders[each]
            return [] if kind is InputKind.USER_INPUT else ownership.holding(name)
        if is_result(each):
            maker, result = cast("tuple[fx.Node, int]", each.args)
            found, effects = [maker], call_of(maker).effects
            alias = None if result in effects.begun else effects.aliases.get(result)
            if alias is not None and alias.kind == "own":
                found += ownership.holding(str(alias.index))
            elif alias is not None and alias.kind == "given":
                other = given_to(maker)[int(alias.index)]
                found += [other] if alias.exact or _has_shape_of(each, other) else []
            return found
        if each.op == "call_function" and each.target is not torch.ops.aten.detach.default:
            return [one for one in each.all_input_nodes if _gives(each, one)]
        return []

    return reached([node], further)


def _has_shape_of(node: fx.Node, other: fx.Node) -> bool:
    """Whether a result that some decision on values makes a view of a tensor may be that itself by another one."""
    return [*map(str, node.meta["val"].shape)] == [*map(str, other.meta["val"].shape)]


def _gives(node: fx.Node, other: fx.Node) -> bool:
    """Whether an operation gives a tensor as it is, as `contiguous` may, and what sees to hooks."""
    if gives_back(node.target, node.args, node.kwargs):
        return other is node.args[0]
    made, read = node.meta.get("val"), other.meta.get("val")
    if not isinstance(made, torch.Tensor) or not isinstance(read, torch.Tensor):
        return False
    is_strided = made.layout is read.layout is torch.strided
    return is_strided and storage_of(made) == storage_of(read) and is_same_view(made, read)
