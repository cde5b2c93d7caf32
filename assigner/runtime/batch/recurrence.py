"""State that goes from batch to batch: kept where it is made, and brought to where the next batch reads it.

An output that `Workload.carried` names becomes an input of the next batch, micro-batch by micro-batch:

    batch 0    rows 0-3: zeros -> h0     rows 4-7: zeros -> h1      h0 h1 on the worker of the partition that makes them
    batch 1    rows 0-3: h0 -> h0'       rows 4-7: h1 -> h1'        where another worker reads them, they go there first

To the partitions it is an input as any other: a recompute reads what its first forward read. Ranks that do not read a
state know its shape alone, as a tensor on the meta device: all ranks must find the same graphs and sizes. Where a
batch is cut in another way than the one before (another plan, a loaded checkpoint), its state is joined by rows and
cut again.

A state is whatever stands in the places that are named, a tensor or a tree of tensors:

    carried {1: 1}      model(data, (h, c))  ->  output, (h, c)       h and c of (layers, rows, width)

Its rows are in the dimension that follows them in the workload's own batches; where those have no tensors there, in the
one that follows them in the model's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from assigner.errors import UsageError
from assigner.formatting import Unquoted
from assigner.location import rank_of
from assigner.model.marking.graph import LEAF, Value
from assigner.model.marking.rows import Carry, RowLeaves, known_parts
from assigner.model.workload import StatePlace
from assigner.runtime.ranks.packedvalues import copy_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph
    from assigner.model.marking.graph import ModelOutput
    from assigner.model.workload import Workload
    from assigner.runtime.batch.microbatch import Cutting, MicroBatch
    from assigner.runtime.batch.variants import VariantGroup
    from assigner.runtime.ranks.membership import Membership

_ONE = "or use one micro-batch (solve with --micro-batches 1)"

Made = dict[tuple[Value, int], torch.Tensor]
"""What the forwards of a batch made of the state on this rank, by value and micro-batch."""


@dataclass
class StateLeaf:
    """One leaf of the state behind a micro-batch."""

    place: StatePlace  # the input that it is a part of
    value: Any  # a tensor, on the meta device where this rank has not its values; or a plain value
    dimension: int | None  # that of its rows; None: it has none
    holders: frozenset[int]  # the ranks that have its values


@dataclass
class StatePart:
    """The state behind a micro-batch."""

    rows: int
    structures: dict[StatePlace, TreeSpec]  # by the input that carries it
    leaves: list[StateLeaf]  # of all these inputs, in order

    def trees(self) -> dict[StatePlace, Any]:
        """The states by the inputs that carry them."""
        return {
            place: pytree.tree_unflatten([each.value for each in self.leaves if each.place == place], structure)
            for place, structure in self.structures.items()
        }


_Want = tuple[StateLeaf, int, int]
"""A leaf of the state, the rank that sends it, and the one that needs it."""


class CarriedState:
    """What the batches of one mode hand on, by `Workload.carried`.

    `planned` is the output of the plan's own graph: it knows where rows are, also where another graph's does not.
    """

    def __init__(
        self,
        carried: Mapping[StatePlace, StatePlace] | None,
        *,
        cutting: Cutting,
        planned: ModelOutput,
        member: Membership,
    ) -> None:
        self.parts: list[StatePart] = []  # what the last batch left, by micro-batch; empty: the next begins anew
        self.places, self._cutting, self._planned = dict(carried or {}), cutting, planned
        self._member = member

    def sources(self, graph: PartitionGraph) -> frozenset[Value]:
        """The values that become state of the next batch.

        Raises:
            UsageError: the model's output lacks what is carried, or it cannot be carried.
        """
        numbers = [number for source in self.places.values() for number in check_output(graph.output, source)[0]]
        facts = [graph.output.tensors[number] for number in numbers]
        return frozenset(each.source for each in facts if each is not None)

    def given_to(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the state that the batch before left; all ranks call this.

        Raises:
            UsageError: the batch has other rows than that, or no such input.
        """
        if not self.parts:
            return list(micro_batches)
        sizes = [cut.rows for cut in micro_batches]
        if [part.rows for part in self.parts] != sizes:
            self._cut_again(sizes)
        found = []
        for cut, part in zip(micro_batches, self.parts, strict=True):
            inputs, structure = with_states(cut.inputs, cut.structure, part.trees())
            found.append(replace(cut, inputs=inputs, structure=structure))
        return found

    def bring(self, groups: Sequence[VariantGroup]) -> None:
        """Have every rank get the values that its partitions read of the state; all ranks call this."""
        if self.parts:
            self._exchange([want for group in groups for want in self._wants(group)])
            for group in groups:
                for place, cut in zip(group.places, group.micro_batches, strict=True):
                    for number, leaf in self._with_numbers(cut, self.parts[place]):
                        cut.inputs[number] = leaf.value

    def _with_numbers(self, cut: MicroBatch, part: StatePart) -> Iterator[tuple[int, StateLeaf]]:
        numbers = [number for place in part.structures for number in input_leaves(cut.structure, place)]
        yield from zip(numbers, part.leaves, strict=True)

    def _wants(self, group: VariantGroup) -> Iterator[_Want]:
        graph, plan = group.variant.graph, group.variant.plan
        readers: dict[int, set[int]] = {}
        for piece in graph.pieces:
            for value in piece.reads:
                if not value.partition:
                    readers.setdefault(value.index, set()).add(_rank(plan, piece.name))
        for place, cut in zip(group.places, group.micro_batches, strict=True):
            for number, leaf in self._with_numbers(cut, self.parts[place]):
                missing = readers.get(number, set()) - leaf.holders
                if isinstance(leaf.value, torch.Tensor):
                    yield from ((leaf, min(leaf.holders), target) for target in sorted(missing))

    def keep(self, groups: Sequence[tuple[VariantGroup, Made]]) -> None:
        """What the batch has made, here by this rank, is the state from now on; all ranks call this.

        Raises:
            UsageError: there are several micro-batches, and a part of the state has no rows.
        """
        if self.places:
            found = {
                place: self._part(group, place, cut, made)
                for group, made in groups
                for place, cut in zip(group.places, group.micro_batches, strict=True)
            }
            parts = [found[place] for place in sorted(found)]
            for leaf in parts[0].leaves if len(parts) > 1 else ():
                if leaf.dimension is None and isinstance(leaf.value, torch.Tensor):
                    cut_leaf(leaf.value, None, [part.rows for part in parts], carried_input(leaf.place))
            self.parts = parts

    def _part(self, group: VariantGroup, place: int, cut: MicroBatch, made: Made) -> StatePart:
        output, plan = group.variant.graph.output, group.variant.plan
        structures, leaves = {}, []
        for target, source in self.places.items():
            numbers, structure = check_output(output, source)
            known = known_by_leaf(
                self._cutting.known_of_state(target), pytree.tree_unflatten([None] * len(numbers), structure)
            )
            structures[target] = structure
            for number, of_input, made_rows in zip(numbers, known, self._rows_of(output, source), strict=True):
                facts = output.tensors[number]
                if facts is None:
                    leaves.append(StateLeaf(target, output.leaves[number], None, frozenset()))
                    continue
                assert facts.shape is not None
                shape = tuple(size if isinstance(size, int) else size.evaluate(cut.inputs) for size in facts.shape)
                holder = _rank(plan, facts.source.partition)
                value = made.get((facts.source, place))
                if value is None:
                    value = torch.empty(shape, dtype=facts.dtype, device="meta")
                elif (tuple(value.shape), value.dtype) != (shape, facts.dtype):
                    raise ValueError(
                        f"the carried output {source!r} is {value.dtype} of shape {tuple(value.shape)}; the captured"
                        f" forward says {facts.dtype} of shape {shape}"
                    )
                dimension = rows_dimension(of_input, shape, cut.rows, made_rows)
                leaves.append(StateLeaf(target, value, dimension, frozenset([holder])))
        return StatePart(cut.rows, structures, leaves)

    def _rows_of(self, output: ModelOutput, source: StatePlace) -> list[int | None]:
        """In which dimensions a graph's output has the rows, leaf by leaf of what is carried."""
        numbers, _ = output_leaves(output.structure, source)
        planned, _ = output_leaves(self._planned.structure, source)
        if output.rows_known or len(planned) != len(numbers):
            return [output.rows[number] for number in numbers]
        return [self._planned.rows[number] for number in planned]

    def gather(self) -> None:
        """Have one rank hold each leaf of the state for all micro-batches; all ranks call this."""
        first = self.parts[0].leaves if self.parts else []
        wants = [
            (part.leaves[n], min(part.leaves[n].holders), min(leaf.holders))
            for n, leaf in enumerate(first)
            if leaf.holders
            for part in self.parts
            if min(leaf.holders) not in part.leaves[n].holders
        ]
        self._exchange(wants)

    def joined(self) -> StatePart | None:
        """The state of the whole batch, by rows; None: the next batch begins anew. After `gather`.

        Raises:
            UsageError: its micro-batches have states of other structures.
        """
        if len(self.parts) < 2:
            return self.parts[0] if self.parts else None
        if any(part.structures != self.parts[0].structures for part in self.parts):
            raise UsageError(
                "the carried state has another structure for some micro-batches than for others",
                hint="give batches whose micro-batches are alike",
            )
        leaves = []
        for n, first in enumerate(self.parts[0].leaves):
            each = [part.leaves[n] for part in self.parts]
            if isinstance(first.value, torch.Tensor):
                holders = frozenset.intersection(*(leaf.holders for leaf in each))
                values = [leaf.value for leaf in each]
                if self._member.rank not in holders:  # it may have some of them
                    values = [value.to("meta") for value in values]
                assert first.dimension is not None
                leaves.append(replace(first, value=torch.cat(values, first.dimension), holders=holders))
            else:
                leaves.append(first)
        return StatePart(sum(part.rows for part in self.parts), self.parts[0].structures, leaves)

    def _cut_again(self, sizes: Sequence[int]) -> None:
        self.gather()
        whole = self.joined()
        assert whole is not None
        if whole.rows != sum(sizes) and any(leaf.dimension is not None for leaf in whole.leaves):
            raise UsageError(
                f"the state that is carried from the batch before is of {whole.rows} rows, and this batch has"
                f" {sum(sizes)}",
                hint="give batches of one number of rows, where a row goes on in the next batch's same row; or begin"
                " anew with pipeline.reset_carried()",
            )
        cut = [cut_leaf(leaf.value, leaf.dimension, sizes, carried_input(leaf.place)) for leaf in whole.leaves]
        self.parts = [
            StatePart(
                rows,
                whole.structures,
                [replace(leaf, value=parts[n]) for leaf, parts in zip(whole.leaves, cut, strict=True)],
            )
            for n, rows in enumerate(sizes)
        ]

    def _exchange(self, wants: Sequence[_Want]) -> None:
        """Send what others want and receive what this rank wants; all ranks know of all."""
        transport, rank = self._member.transport, self._member.rank
        if transport is None or not wants:
            return
        self._member.at = "the transfer of the carried state"
        for leaf, source, target in wants:
            if source == rank:
                transport.put_tensor(copy_of(leaf.value), target)
        for leaf, source, target in wants:
            if target == rank:
                leaf.value = self._here(transport.get_tensor(source, tuple(leaf.value.shape), leaf.value.dtype))
            leaf.holders |= {target}
        transport.flush()

    def put(self, part: StatePart | None) -> None:
        """Go on from a state that all ranks have; None: the next batch begins with the state that it has itself."""
        everyone = frozenset(self._member.ranks)
        self.parts = []
        if part is not None:
            leaves = [replace(leaf, value=self._here(leaf.value), holders=everyone) for leaf in part.leaves]
            self.parts = [replace(part, leaves=leaves)]

    def _here(self, value: Any) -> Any:
        return value.to(self._member.device) if isinstance(value, torch.Tensor) else value


def _rank(plan: Plan, partition: str) -> int:
    return rank_of(plan.holders[partition][0])  # it has one: see `replicas`


def carried_input(place: StatePlace) -> str:
    """An input that carries state, for errors."""
    return f"the carried input {place!r}"


def input_leaves(structure: TreeSpec, place: StatePlace) -> list[int]:
    """The numbers of an input's leaves among the flattened (args, kwargs).

    Raises:
        UsageError: there is no such input.
    """
    args, kwargs = _numbered(structure)
    try:
        return pytree.tree_leaves(kwargs[place] if isinstance(place, str) else args[place])
    except LookupError:
        had = [*range(len(args)), *map(repr, kwargs)]
        raise UsageError(
            f"the workload carries input {place!r}, and the model is called with {', '.join(map(str, had))}",
            hint="let each batch's inputs have the state to begin with there; a dict's inputs go by name, a tuple's by"
            " position",
        ) from None


def output_leaves(structure: TreeSpec, place: StatePlace) -> tuple[list[int], TreeSpec]:
    """The numbers of an output's leaves among those of the model's output, which has this structure; and their own.

    Raises:
        UsageError: there is no such output.
    """
    tree = _numbered(structure)
    try:
        found = getattr(tree, place) if isinstance(place, str) and not isinstance(tree, Mapping) else tree[place]
    except (LookupError, TypeError, AttributeError):
        found = None
    leaves, below = pytree.tree_flatten(found)
    if not leaves or any(type(leaf) is not int for leaf in leaves):
        raise UsageError(
            f"the workload carries output {place!r}, and the model's output has none: it is"
            f" {pytree.tree_unflatten([Unquoted('...')] * structure.num_leaves, structure)!r}",
            hint="Workload.carried says which input is which output, as {1: 1} for"
            " `output, hidden = model(data, hidden)`",
        )
    return leaves, below


def _numbered(structure: TreeSpec) -> Any:
    return pytree.tree_unflatten(list(range(structure.num_leaves)), structure)


def with_states(
    leaves: Sequence[Any], structure: TreeSpec, states: Mapping[StatePlace, Any]
) -> tuple[list[Any], TreeSpec]:
    """The flattened arguments of the model with other states in them."""
    given, kwargs = pytree.tree_unflatten(list(leaves), structure)
    args, named = list(given), dict(kwargs)
    for place, state in states.items():
        input_leaves(structure, place)  # there must be one
        if isinstance(place, str):
            named[place] = state
        else:
            args[place] = state
    return pytree.tree_flatten((tuple(args), named))


def state_of(output: Any, place: StatePlace) -> Any:
    """The state in what the model returned, detached, in memory of its own."""
    leaves, structure = pytree.tree_flatten(output)
    numbers, below = output_leaves(structure, place)
    return pytree.tree_unflatten([kept(leaves[number]) for number in numbers], below)


def kept(leaf: Any) -> Any:
    """A state's leaf as it is kept: detached, contiguous, and what the model writes to later is not it."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone(memory_format=torch.contiguous_format)


def check_carried(workload: Workload, graph: PartitionGraph) -> None:
    """The places that the workload names are there, and what stands there can be carried.

    Raises:
        UsageError: there is no such input or output, or a number or a shape that depends on data is among the state.
    """
    for place, source in (workload.carried or {}).items():
        input_leaves(graph.domain.example.structure, place)
        check_output(graph.output, source)


def check_output(output: ModelOutput, place: StatePlace) -> tuple[list[int], TreeSpec]:
    """As `output_leaves`; raises UsageError also where they cannot be carried."""
    numbers, structure = output_leaves(output.structure, place)
    for number in numbers:
        facts = output.tensors[number]
        if (facts is None and output.leaves[number] is LEAF) or (facts is not None and facts.shape is None):
            what = "a number that the forward works out" if facts is None else "a tensor whose shape depends on values"
            raise UsageError(
                f"the workload carries output {place!r}, and in it is {what}",
                hint="carry tensors whose shapes follow from those of the inputs",
            )
    return numbers, structure


def known_by_leaf(known: RowLeaves, tree: Any) -> list[RowLeaves]:
    """What is known of each leaf of a tree."""
    return [each for each, part in known_parts(known, tree) for _ in pytree.tree_leaves(part)]


def rows_dimension(known: RowLeaves, shape: Sequence[int], rows: int, made: int | None = None) -> int | None:
    """In which dimension a tensor of a state has its rows; None: in none, or it cannot be told.

    By what the workload's batches say of it (`known`), or the model's output (`made`).
    """
    dimension = made
    if known.carry is Carry.ROWS:
        dimension = known.dimension
    elif known.carry is not Carry.UNKNOWN:
        return None
    elif made is None:
        dimension = list(shape).index(rows) if list(shape).count(rows) == 1 else None
    return dimension if dimension is not None and dimension < len(shape) and shape[dimension] == rows else None


def cut_leaf(leaf: Any, dimension: int | None, sizes: Sequence[int], where: str) -> list[Any]:
    """A leaf of a state for each micro-batch.

    Raises:
        UsageError: there are several, and it is a tensor without rows.
    """
    if len(sizes) == 1 or not isinstance(leaf, torch.Tensor):
        return [leaf] * len(sizes)
    if dimension is None:
        raise UsageError(
            f"{where} has a tensor of shape {tuple(leaf.shape)}, in which {sum(sizes)} rows are not to be found: it"
            f" cannot be cut into {len(sizes)} micro-batches",
            hint="carry a state of its own for each row, and have Workload.batch make it for any number of rows; "
            + _ONE,
        )
    return [each.contiguous() for each in torch.split(leaf, list(sizes), dimension)]


def cut_state(state: Any, known: RowLeaves, sizes: Sequence[int], where: str) -> list[Any]:
    """The state that a batch begins with, for each of its micro-batches; raises UsageError as `cut_leaf`."""
    leaves, structure = pytree.tree_flatten(state)
    rows = sum(sizes)
    cut = [
        cut_leaf(leaf, rows_dimension(each, leaf.shape, rows) if isinstance(leaf, torch.Tensor) else None, sizes, where)
        for leaf, each in zip(leaves, known_by_leaf(known, state), strict=True)
    ]
    return [pytree.tree_unflatten([parts[n] for parts in cut], structure) for n in range(len(sizes))]
