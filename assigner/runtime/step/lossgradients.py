"""Gradients that a loss takes by itself, of one of the model's outputs by another: whole ones, or a refusal.

    model returns (y, x); loss takes grad(y, x)       x: coordinates, features, a point between two samples

The graph that the loss computes in has ends: what other partitions have made, and where it is computed apart from the
last partition's graph, the outputs. Behind an input of the model it goes on in the script's own graph. A gradient is
whole if no end that a way from y leads to was made of x (`values_behind`), but where x itself lies:

    y = c(b(a(x)), x)        grad(y, x) comes to what b has made, which was made of x: refused
    y = c(h), h = a(t)       grad(y, h) comes to h alone
    y, u = c(b(a(t)))        grad(y, u) comes to what b has made, which was not made of u

What is only handed on comes to the loss as a copy, as does the batch, for it may write there: the gradient is taken by
what that is a copy of. A hook asks for the gradient of the tensor that it is on, in each backward from the loss on.
Inputs of the model may be made of each other, too: by the script, before they were cut into micro-batches.

A backward that adds to the `.grad` of leaves adds to that of parameters: as it is, for only the loss that is returned
is weighed. A `.grad` that the loss may look for there is that of an input, a parameter, or what `detach` made a leaf.
What another partition has made begins a graph here, and in plain torch it may be a leaf or not: it may ask for neither
its `.grad` nor its `grad_fn`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.model.deferred.mutation import GradientUses
from assigner.model.marking.fakeforward import GradientPlace, gradient_place, places_behind
from assigner.model.marking.gradients import AGAIN
from assigner.model.marking.graph import PartitionGraph, Value
from assigner.runtime.step.outputs import leaf_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

Ends = dict[GradientPlace, set[Value]]
"""Of which values of the model there is something at places of a graph."""

_CUTS = ("SplitWithSizesBackward0", "SplitBackward0", "ToCopyBackward0")
"""The nodes of what cuts a batch into micro-batches, and of what copies one to a device."""


class GraphWantedError(Exception):
    """A loss on stand-ins asks for what the last partition's graph alone can tell; it can be called with that later."""


class Origin(NamedTuple):
    """Of what a micro-batch's outputs were made, as far as this rank has their graph.

    `came_in` gives what graphs of this rank begin with: values of other partitions, and inputs of the model.
    """

    graph: PartitionGraph
    returned: Sequence[Any]  # by the last partition
    came_in: Callable[[], Iterable[tuple[Value, torch.Tensor]]]

    def outputs(self) -> list[tuple[Value, Any]]:
        """What the last partition has returned, and which value that is."""
        return [(Value(self.graph.last.name, n), each) for n, each in enumerate(self.returned)]

    def inputs(self) -> list[tuple[Value, torch.Tensor]]:
        """Those of the model that require a gradient."""
        return [(value, each) for value, each in self.came_in() if not value.partition and each.requires_grad]

    def made_from(self, source: Any) -> set[Value]:
        """The inputs of the model that the script has made of a tensor of the batch: itself, a view, or what it gives.

        A micro-batch's are cut out of these: two that are one tensor, or made of each other, have only that in common.
        """
        places = _uncut(source)
        return {value for value, each in self.inputs() if not places.isdisjoint(places_behind([each]))}

    def is_leaf(self, returned: torch.Tensor) -> bool:
        """Whether an output is a leaf in plain torch, too, and no value of another partition that was handed on."""
        if not returned.is_leaf:
            return False
        places = _places([returned])
        handed_on = (each for value, each in self.came_in() if value.partition)
        return not any(each is returned or _places([each]) == places for each in handed_on)

    def ends(self) -> Ends:
        """Where the outputs lie, and what came in."""
        found: Ends = defaultdict(set)
        for value, tensor in (*self.came_in(), *self.outputs()):
            for place in _places([tensor]):
                found[place].add(value)
        return found

    def made_of(self) -> list[set[Value]]:
        """For each output itself, and what it was made of where anything else could be asked for."""
        outputs = self.outputs()
        if len(_places(each for _, each in outputs)) < 2 and not self.inputs():
            return [{value} for value, _ in outputs]
        ends = self.ends()
        return [{value} | _made_of([each], ends) for value, each in outputs]


class _Given(NamedTuple):
    """A tensor that the loss is given."""

    tensor: torch.Tensor
    value: Value | None  # which output it is; None: it is of the batch
    source: torch.Tensor | None  # itself, or what it is a copy of, in the graph; None: it stands in for an output
    is_leaf: bool  # it is a leaf, or is there for one, and so in plain torch would have gradients in `.grad`
    places: tuple[GradientPlace, ...]  # where its gradient arrives, and that of what stands in

    @property
    def may_have_gradient(self) -> bool:
        """What it stands for may be a leaf in plain torch; of what retains a gradient its hooks say more."""
        return not self.tensor.retains_grad and (self.source is None or self.source.is_leaf)

    @property
    def is_copy(self) -> bool:
        """The loss's graph has another tensor in its place."""
        return self.source is not None and self.source is not self.tensor


class LossGraph:
    """What a loss is given, and where the graph ends that it computes in: that of the last partition, or one apart.

    Args:
        origin: Of a micro-batch's outputs.
        outputs: As the loss gets them: some are copies of what the partition has returned, or made of leaves.
        elsewhere: In words, where else there are ways; empty: the loss can be called later where it has these, too.
        weight: What the loss is multiplied by.
        looks: The loss's code may ask for a tensor's gradient, or for its node in the graph.
        leaves: Where one ends that is apart: for each micro-batch they stand in for its outputs, one for each.
        made_of: Gives likewise what these outputs are made of.
    """

    def __init__(
        self,
        origin: Origin,
        outputs: Sequence[Any],
        *,
        elsewhere: str = "graphs of partitions that it does not see",
        weight: float = 1.0,
        looks: bool = False,
        leaves: Sequence[Sequence[Any]] = (),
        made_of: Callable[[], Sequence[Sequence[set[Value]]]] = tuple,
    ) -> None:
        self._origin, self._elsewhere, self._weight, self._looks = origin, elsewhere, weight, looks
        self._leaves, self._made_of = leaves, made_of
        self._given = list[_Given]()
        self._hooked = list[tuple[int, int, bool]]()
        self._problem: Exception | None = None
        for n, ((value, returned), tensor) in enumerate(zip(origin.outputs(), outputs, strict=True)):
            if places := _places([tensor, *(each[n] for each in leaves)]):
                source = None if leaves else returned
                self._given.append(_Given(tensor, value, source, origin.is_leaf(returned), places))

    @functools.cached_property
    def _ends(self) -> Ends:
        """Behind an input of the model it goes on, to what the script has made that of, or cut it out of."""
        if not self._leaves:
            ends = self._origin.ends().items()
            return {place: {value for value in values if value.partition} for place, values in ends}
        found: Ends = defaultdict(set)
        for of_leaves, of_values in zip(self._leaves, self._made_of(), strict=True):
            for leaf, values in zip(of_leaves, of_values, strict=True):
                for place in _places([leaf]):
                    found[place] |= values
        return found

    def add_batch(self, targets: Any, given: Any) -> None:
        """Tell it what the loss is given of the batch."""
        for source, tensor in zip(pytree.tree_leaves(targets), pytree.tree_leaves(given), strict=True):
            if places := _places([tensor]):
                self._given.append(_Given(tensor, None, source, source.is_leaf, places))

    def call(self, loss: Callable[[Any, Any], Any], output: Any, targets: Any) -> Any:
        """What a loss gives; the gradients that it takes are whole.

        Raises:
            UsageError: one that it takes, or that a hook of its own asks for, is not; also where it has caught that.
            GraphWantedError: likewise, and the loss can be called with the last partition's graph later.
        """
        if not self._given:
            return loss(output, targets)
        autograd: Any = torch.autograd
        original = autograd._engine_run_backward
        self._hooked = [_hooks(each.tensor) for each in self._given]

        def run_backward(
            outputs: Any, gradients: Any, keep: Any, create: Any, inputs: Any, *rest: Any, **words: Any
        ) -> Any:
            self._check_hooks(outputs)
            if words.get("accumulate_grad"):
                self._check_added(outputs, inputs)
            else:
                inputs = tuple([self._taken(outputs, each) for each in inputs])
            return original(outputs, gradients, keep, create, inputs, *rest, **words)

        uses = GradientUses() if self._looks else None
        autograd._engine_run_backward = run_backward
        try:
            with uses or contextlib.nullcontext():
                value = loss(output, targets)
            self._check_hooks([value])
        except Exception:
            self._raise_problem(uses)
            raise
        finally:
            autograd._engine_run_backward = original
        self._raise_problem(uses)
        return value

    def _raise_problem(self, uses: GradientUses | None) -> None:
        """Raise what the loss has asked for and cannot have, whatever it has made of that."""
        if uses is not None:
            self._check_uses(uses)
        if self._problem is not None:
            raise self._problem

    def _check_uses(self, uses: GradientUses) -> None:
        """See whether the loss has asked a tensor that stands for another one for what that one alone has."""
        for given in self._given:
            if self._problem is not None or given.source is given.tensor:
                continue
            if any(each is given.tensor for each in uses.nodes):
                hint = "hook on to the tensor (register_hook), in the marked module that makes it"
                self._refused(given, "looks at the graph behind {} (grad_fn)", hint)
            elif any(each is given.tensor for each in uses.found) and given.may_have_gradient:
                self._refused(given, "looks at the gradient (.grad) of {}", "take it with torch.autograd.grad")

    def _check_hooks(self, outputs: Sequence[Any]) -> None:
        """Look at hooks that were hung on what the loss is given: whether a backward from outputs has all for them."""
        for given, before in zip(self._given, self._hooked, strict=True):
            if _hooks(given.tensor) != before and not self._is_whole(outputs, given, hooked=True):
                raise self._refused(
                    given,
                    "hooks on to {} (register_hook, retain_grad)",
                    "hook on to it in the marked module that makes it; or to a tensor of the loss's own, as x = x * 1",
                )

    def _known(self, asked: Any) -> list[_Given]:
        place = gradient_place(asked)
        return [each for each in self._given if place in each.places]

    def _taken(self, outputs: Sequence[Any], asked: Any) -> Any:
        """By what to take a gradient, in the place of what the loss asks it by."""
        for given in self._known(asked):
            if not self._is_whole(outputs, given):
                raise self._refused(
                    given,
                    "takes a gradient by {}",
                    "have a marked module that contains both compute the gradient (torch.autograd.grad) and return it",
                )
            if given.is_copy:
                asked = given.source
        return asked

    def _check_added(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Look at a backward that adds to the `.grad` of its leaves, or of these inputs.

        What it adds to the model's may not have to be weighed, and what it leaves has to be what the loss finds.
        """
        known = [given for each in inputs for given in self._known(each)]
        behind = [each for each in known if each.is_leaf] if inputs else self._given
        places = places_behind(outputs if self._weight != 1 else ()).keys()
        if any(each.value is not None and not places.isdisjoint(each.places) for each in behind):
            self._problem = UsageError(
                "Workload.loss runs a backward of its own through the model's output, and is computed for a micro-batch"
                f" whose loss counts {self._weight:g} times: what that adds to the gradients of parameters would count"
                " in full",
                hint="add what it starts from to the loss that is returned; or use one micro-batch (solve with"
                " --micro-batches 1)",
            )
            raise self._problem
        for given in known if inputs else [each for each in self._given if each.is_leaf]:
            if given.source is not given.tensor or not self._is_whole(outputs, given):
                raise self._refused(
                    given,
                    "runs a backward, which may leave a gradient in the .grad of {}",
                    "take it with torch.autograd.grad",
                )

    def _is_whole(self, outputs: Sequence[Any], given: _Given, *, hooked: bool = False) -> bool:
        """Whether all ways from outputs to what is given are in this graph; `hooked`: to it, and not what it copies."""
        stops = {*given.places, *_places([given.source] if given.is_copy and not hooked else [])}
        behind, inputs = self._origin.graph.output.behind, self._origin.inputs()
        values = self._origin.made_from(given.source) if given.value is None else {given.value}
        values.update(*(behind.get(each, ()) for each in tuple(values)))
        itself = [each for value, each in inputs if value in values] if given.value is not None else [given.source]
        for value, each in inputs:
            if value in values:
                values |= self._origin.made_from(each)
        apart = values.union(*(behind.get(each, ()) for each in values))
        uncut = set[GradientPlace]().union(*map(_uncut, itself)) - stops
        is_met = bool(uncut) and not uncut.isdisjoint(places_behind(outputs, stops))
        return not is_met and apart.isdisjoint(_made_of(outputs, self._ends, stops))

    def _refused(self, given: _Given, does: str, hint: str) -> Exception:
        output, what = self._origin.graph.output, "a tensor of the batch, of which inputs of the model are made"
        if given.value is not None:
            what = f"the model's output{leaf_path(output, output.made[given.value.index])}"
        self._problem, where = GraphWantedError(), self._elsewhere
        if len(self._origin.graph.pieces) == 1 and any(len(_uncut(each)) > 1 for _, each in self._origin.inputs()):
            where = "the cutting of the batch into micro-batches"
            hint = (
                "use one micro-batch (Workload.max_micro_batches=1); or have the marked module begin the graph,"
                " x = x.detach().requires_grad_(), and return x"
            )
        if self._elsewhere:
            self._problem = UsageError(
                f"Workload.loss {does.format(what)}, and some of what lies between is in {where}: that part of the"
                " gradient would be missing",
                hint=hint,
            )
        return self._problem


def _made_of(
    tensors: Iterable[Any], ends: Mapping[GradientPlace, Collection[Value]], stops: Collection[GradientPlace] = ()
) -> set[Value]:
    """Of what tensors were made, by ways that do not go through `stops`."""
    found = set[Value]()
    for place, leaf in places_behind(tensors, stops).items():
        if place in stops:
            continue
        if place in ends:
            found.update(ends[place])
        elif leaf is not None and not isinstance(leaf, nn.Parameter):
            found.add(AGAIN)
    return found


def _places(tensors: Iterable[Any]) -> tuple[GradientPlace, ...]:
    """Where gradients of tensors arrive, of those that may have one."""
    return tuple([place for each in tensors if (place := gradient_place(each)) is not None])


def _uncut(tensor: Any) -> set[GradientPlace]:
    """Where the gradient of a tensor of the batch arrives, and that of what it was cut out of."""
    found, place = set[GradientPlace](), gradient_place(tensor)
    while place is not None:
        found.add(place)
        node = place[0]
        is_cut = isinstance(node, Node) and node.name() in _CUTS
        place = gradient_place(GradientEdge(*node.next_functions[0])) if is_cut else None
    return found


def _hooks(tensor: Any) -> tuple[int, int, bool]:
    """How many hooks of which kind are on a tensor."""
    return len(tensor._backward_hooks or ()), len(tensor._post_accumulate_grad_hooks or ()), tensor.retains_grad
