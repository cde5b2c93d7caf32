"""State that goes from batch to batch: kept where it is made, and brought to where the next batch reads it.

An output that `Workload.carried` names becomes an input of the next batch, micro-batch by micro-batch:

    batch 0    rows 0-3: zeros -> h0     rows 4-7: zeros -> h1      h0 h1 on the worker of the partition that makes them
    batch 1    rows 0-3: h0 -> h0'       rows 4-7: h1 -> h1'        where another worker reads them, they go there first

To the partitions it is an input as any other: a recompute reads what its first forward read. Ranks that do not read a
state know its shape alone, as a tensor on the meta device: all ranks must find the same graphs and sizes. Where a
batch is cut in another way than the one before (another plan, a loaded checkpoint), its state is joined by rows and
cut again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from assigner.errors import UsageError
from assigner.location import rank_of
from assigner.model.marking.graph import Value
from assigner.model.workload import StatePlace
from assigner.runtime.batch.staterows import (
    carried_input,
    check_output,
    cut_leaf,
    input_leaves,
    known_by_leaf,
    output_leaves,
    rows_dimension,
    with_states,
)
from assigner.runtime.ranks.packedvalues import copy_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph
    from assigner.model.marking.graph import ModelOutput
    from assigner.runtime.batch.microbatch import Cutting, MicroBatch
    from assigner.runtime.batch.variants import VariantGroup
    from assigner.runtime.ranks.membership import Membership

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
        """The values that become state of the next batch."""
        numbers = [number for source in self.places.values() for number in check_output(graph.output, source)[0]]
        facts = [graph.output.tensors[number] for number in numbers]
        return frozenset(each.source for each in facts if each is not None)

    def given_to(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the state that the batch before left; all ranks call this."""
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
                    for number, leaf in self._numbered(cut, self.parts[place]):
                        cut.inputs[number] = leaf.value

    def _numbered(self, cut: MicroBatch, part: StatePart) -> Iterator[tuple[int, StateLeaf]]:
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
            for number, leaf in self._numbered(cut, self.parts[place]):
                missing = readers.get(number, set()) - leaf.holders
                if isinstance(leaf.value, torch.Tensor):
                    yield from (_Want(leaf, min(leaf.holders), target) for target in sorted(missing))

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
            _Want(part.leaves[n], min(part.leaves[n].holders), min(leaf.holders))
            for n, leaf in enumerate(first)
            if leaf.holders
            for part in self.parts
            if min(leaf.holders) not in part.leaves[n].holders
        ]
        self._exchange(wants)

    def joined(self) -> StatePart | None:
        """The state of the whole batch, by rows; None: the next batch begins anew. After `gather`."""
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


class _Want(NamedTuple):
    """A leaf of the state that a rank, `target`, needs of another one."""

    leaf: StateLeaf
    source: int
    target: int


def _rank(plan: Plan, partition: str) -> int:
    return rank_of(plan.holders[partition][0])  # it has one: see `replicas`
