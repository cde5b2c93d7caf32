"""A backward in two parts: the gradients of what a partition read, and later those of its weights.

    y = gelu(x A) B    input part:   dy -> (dy B') -> (gelu') -> (.. A') -> dx, and what came in at each product is kept
                       weight part:  x' times what came in at A -> dA,  gelu(x A)' times what came in at B -> dB

Only the weights of products and convolutions wait: there the two parts share no work. What a norm's weight gets, or a
bias that is added, falls off on the way, so the input part computes it, in the same pass. So it does where a weight is
used twice in a row, where a Function of the user's takes part, and where a forward hooks on to tensors or retains their
gradients: each node of the graph but the products, and each hook, runs once, as in a whole backward. A partition
without a product is all input part; one that reads nothing with a gradient is all weight part.

Between the parts stay what the products have saved, and what came in at them; all else is let go.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), section 2; torch's own pipelining
package splits a backward at nodes as well (torch/distributed/pipelining/_backward.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from assigner.runtime.forward.nodes import is_leaf

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    Gradient = torch.Tensor | None

_PRODUCTS = frozenset(
    f"{name}Backward0" for name in ("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Addmv", "Mv", "Linear", "Convolution")
)
_WHOLE = frozenset({"CheckpointFunctionBackward"})  # runs a backward of its own, and forbids one that is not whole
_INPUT = 1  # the bit of what has to be differentiated first


@dataclass(slots=True)
class _WaitingWeights:
    """Weights whose gradients wait, with what they are computed from."""

    weights: list[torch.Tensor]
    products: list[Node]  # that use them, none of which lies behind another
    arrived: list[tuple[Gradient, ...] | None]  # what came in at each; None: nothing did

    def watch(self, n: int) -> RemovableHandle:
        """Take note of what comes in at a product."""

        def note(gradients: tuple[Gradient, ...]) -> None:
            self.arrived[n] = tuple(gradients)

        return self.products[n].register_prehook(note)

    def run(self) -> None:
        """Add to the weights' gradients, and let go of the graph."""
        pairs = [
            (GradientEdge(node, n), gradient)
            for node, arrived in zip(self.products, self.arrived, strict=True)
            for n, gradient in enumerate(arrived or ())
            if gradient is not None
        ]
        self.products, self.arrived = [], []
        if pairs:
            edges, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self.weights)


@dataclass(slots=True)
class WeightPart:
    """What is left of a backward whose input part has run: all of it (`edges`), or the weights of products."""

    edges: Sequence[GradientEdge] = ()
    gradients: Sequence[Gradient] = ()
    waiting: list[_WaitingWeights] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """What it is computed from: what came in, and what products have saved; not what a whole graph holds."""
        found = [each for each in self.gradients if each is not None]
        for group in self.waiting:
            found += [each for arrived in group.arrived for each in arrived or () if each is not None]
            for node in group.products:
                saved = (getattr(node, name.removeprefix("_raw")) for name in _saved(type(node)))
                found += [each for each in saved if isinstance(each, torch.Tensor)]
        return found

    def run(self) -> None:
        """Compute what is left; gradients land in the weights."""
        if self.edges:
            edges, gradients, self.edges, self.gradients = self.edges, self.gradients, (), ()
            torch.autograd.backward(edges, gradients)
        while self.waiting:
            self.waiting.pop(0).run()


def input_part(edges: Sequence[GradientEdge], gradients: Sequence[Gradient], *, is_hooked: bool = False) -> WeightPart:
    """Compute the gradients of a graph's inputs, which land in the leaves, and those of weights that do not wait.

    Where the forward has hooked on to tensors or nodes none wait: a product's own hook must not run twice. The rest is
    returned.
    """
    graph = _BackwardGraph(edges)
    if not graph.reaches_input:
        return WeightPart(edges, gradients)
    waiting = [] if is_hooked else graph.waiting()
    if not waiting:
        torch.autograd.backward(edges, gradients)
        return WeightPart()
    later = {id(weight) for group in waiting for weight in group.weights}
    now = [leaf for leaf in graph.leaves if id(leaf) not in later]
    handles = [group.watch(n) for group in waiting for n in range(len(group.products))]
    try:
        torch.autograd.backward(edges, gradients, inputs=now, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    kept = {node for group in waiting for node in group.products}
    for node, below in graph.below.items():
        if below & _INPUT and node not in kept:
            _let_go(node)
    return WeightPart(waiting=waiting)


class _BackwardGraph:
    """A graph, looked through once.

    Each leaf and each product has a bit, and `below` says for a node which of them it leads to; each node stands there
    behind all those that it leads to. Leaves that are no weights are inputs, with one bit for all of them.
    """

    def __init__(self, edges: Sequence[GradientEdge]) -> None:
        self.below: dict[Node, int] = {}
        self.leaves: list[torch.Tensor] = []
        self._edges = edges
        self._bit: dict[Node, int] = {}
        self._next: dict[Node, tuple[Node, ...]] = {}
        self._weights: list[tuple[int, torch.Tensor]] = []
        self._last_bit = _INPUT
        self._is_whole = False
        for edge in edges:
            self._walk(edge.node)
        self.reaches_input = any(self._reached(edge.node) & _INPUT for edge in edges)

    def _walk(self, root: Node) -> None:
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                below = 0
                for each in self._next[node]:
                    below |= self._reached(each)
                self.below[node] = below
                self._bit[node] = self._own(node)
            elif node not in self._next:
                self._next[node] = following = tuple(each for each, _ in node.next_functions if each is not None)
                stack.append((node, True))
                stack += [(each, False) for each in following if each not in self._next]

    def _own(self, node: Node) -> int:
        """A node's own bit; 0: it has none."""
        name = node.name()
        if is_leaf(node):
            leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
            self.leaves.append(leaf)
            if not isinstance(leaf, nn.Parameter):
                return _INPUT
            self._last_bit <<= 1
            self._weights.append((self._last_bit, leaf))
        elif name in _PRODUCTS:
            self._last_bit <<= 1
        else:
            self._is_whole = self._is_whole or name in _WHOLE or not self._next[node]
            return 0
        return self._last_bit

    def _reached(self, node: Node) -> int:
        return self.below[node] | self._bit[node]

    def waiting(self) -> list[_WaitingWeights]:
        """The weights whose gradients can wait: those that are reached from products alone, none behind another."""
        if self._is_whole:
            return []
        weights_bits = sum(bit for bit, _ in self._weights)
        groups = [  # weights, the nodes that use them, whether they can wait
            (self._reached(edge.node) & weights_bits, list[Node](), False)
            for edge in self._edges
            if not self._reached(edge.node) & _INPUT
        ]
        for node in reversed(self.below):  # from the outputs to the inputs
            weights = self._aside(node) & weights_bits
            if weights:
                nodes, can_wait = [node], node.name() in _PRODUCTS
                for group in [group for group in groups if group[0] & weights]:
                    groups.remove(group)
                    weights, nodes, can_wait = weights | group[0], group[1] + nodes, can_wait and group[2]
                groups.append((weights, nodes, can_wait))
        return [
            _WaitingWeights([weight for bit, weight in self._weights if bit & weights], nodes, [None] * len(nodes))
            for weights, nodes, can_wait in groups
            if can_wait and not self._in_a_row(nodes)
        ]

    def _aside(self, node: Node) -> int:
        """What a node on the way to an input leads to beside that way."""
        found = 0
        if self.below[node] & _INPUT:
            for each in self._next[node]:
                reached = self._reached(each)
                if not reached & _INPUT:
                    found |= reached
        return found

    def _in_a_row(self, products: Sequence[Node]) -> bool:
        bits = 0
        for node in products:
            bits |= self._bit[node]
        return any(self.below[node] & bits for node in products)


def _let_go(node: Node) -> None:
    """Have a node drop the tensors that it has saved: it will not run again, but others keep it."""
    for name in _saved(type(node)):
        raw = getattr(node, name)
        for saved in raw if isinstance(raw, tuple) else (raw,):
            try:
                saved.register_hooks(_nothing, _gone)  # what a hook has packed, torch does not keep
            except RuntimeError:  # nothing was saved there, or hooks of the user's own have packed it
                continue


@cache
def _saved(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _nothing(_: torch.Tensor) -> None:
    return None


def _gone(_: None) -> NoReturn:
    raise RuntimeError("this part of a backward has run, and its tensors are gone")
