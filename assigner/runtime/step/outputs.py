"""The model's outputs: micro-batches joined to those of the batch, and brought to the ranks that want them.

a tensor with rows          joined along them, whichever dimension they are; an error, where that is not the batch's
one without, a plain value  stays as it is, where it is the same for all micro-batches
a floating number           else counts as the loss does: a mean over what the micro-batches weigh
any other                   is an error, as is a number under reduction "sum": it may be a sum, or the same for any rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.location import rank_of
from assigner.model.marking.blocks import Unjoinable
from assigner.model.marking.graph import ModelOutput
from assigner.runtime.ranks.packedvalues import PackedValue, receive_value, send_value
from assigner.runtime.step.results import exact_sum
from assigner.schedule.replication import takers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import Workload
    from assigner.runtime.batch.microbatch import MicroBatch
    from assigner.runtime.batch.variants import VariantGroup
    from assigner.runtime.ranks.membership import Membership

Receiver = int | Literal["all"]
"""The rank that wants outputs, or every rank."""


@dataclass(frozen=True)
class Part:
    """What the last partition made of one micro-batch."""

    output: ModelOutput
    leaves: list[Any]  # all of it
    rows: int  # the micro-batch's
    weight: float | None  # what a number counts for; None: nobody knows

    def rows_dimension(self, index: int) -> int | None:
        """Along which dimension a leaf has the rows, as far as this micro-batch tells."""
        leaf = self.leaves[index]
        if self.output.rows_known:
            return self.output.rows[index]
        return 0 if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) == self.rows else None


def join(parts: Sequence[Part]) -> list[Any]:
    """The leaves of the whole batch's output.

    Raises:
        UsageError: one of them cannot be told from those of the micro-batches.
    """
    return [_join_leaf(parts, index) for index in range(len(parts[0].leaves))]


def _join_leaf(parts: Sequence[Part], index: int) -> Any:
    leaves = [part.leaves[index] for part in parts]
    if len(leaves) == 1:
        return leaves[0]
    shape = f" of shape {tuple(leaves[0].shape)}" if isinstance(leaves[0], torch.Tensor) else ""
    what = f"the model's output{leaf_path(parts[0].output, index)}{shape}"
    if reason := next(filter(None, (part.output.unjoinable[index] for part in parts)), None):
        raise UsageError(f"{what} cannot be put together of its micro-batches': {reason}", hint=ways_out(reason))
    known = [part.rows_dimension(index) for part in parts if part.output.rows_known]
    dim, *others = set(known or [part.rows_dimension(index) for part in parts])
    if dim is not None and not others:
        return torch.cat(leaves, dim)
    if all(_same(leaves[0], leaf) for leaf in leaves[1:]):
        return leaves[0]
    weights = [part.weight for part in parts]
    if all(map(_is_floating, leaves)) and None not in weights:
        return _mean(leaves, [weight or 0.0 for weight in weights])
    raise UsageError(
        f"{what} differs between micro-batches, and has no dimension of rows to join them along",
        hint="return it for each row, or have it as one of Workload.metrics"
        + ("; pipeline.evaluate(batch, outputs_to=...) knows what each micro-batch weighs" if None in weights else ""),
    )


def ways_out(reason: str) -> str:
    """What to do about an output that cannot be joined."""
    return _WAYS_OUT[Unjoinable(reason)] + "; or use one micro-batch (solve with --micro-batches 1)"


_BEHIND = "in the loss function, or of joined outputs: there the whole batch is"
_WAYS_OUT = {
    Unjoinable.BLOCKS: "return it for each row, of two views as two outputs",
    Unjoinable.NUMBERS: f"compute them from the shape of what the model returns {_BEHIND}",
    Unjoinable.PAIRS: f"return what is of each row, and compute what is of pairs {_BEHIND}",
    Unjoinable.COUNT: f"take it from the shape of what the model returns {_BEHIND}",
}


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, float) or (isinstance(leaf, torch.Tensor) and not leaf.dim() and leaf.is_floating_point())


def _mean(numbers: Sequence[Any], weights: Sequence[float]) -> Any:
    """The number of the batch, of the kind of the micro-batches'."""
    found = exact_sum(weight * float(number) for number, weight in zip(numbers, weights, strict=True) if weight)
    first = numbers[0]
    if isinstance(first, torch.Tensor):
        return torch.tensor(found, dtype=first.dtype, device=first.device)
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return bool(one == other)


def leaf_path(output: ModelOutput, index: int) -> str:
    """Where a leaf stands in the output, as Python writes it."""
    tree = pytree.tree_unflatten(list(range(len(output.leaves))), output.structure)
    return next(pytree.keystr(path) for path, leaf in pytree.tree_leaves_with_path(tree) if leaf == index)


class BatchOutputs:
    """The outputs of one batch: kept as forwards make them, joined, and brought to the ranks that want them.

    Args:
        groups: The batch's micro-batches by the graph that they run through.
        workload: What a micro-batch's numbers count for.
        to: Who wants the outputs.
        alone: Nothing else is made of them: no loss, and of the batch there are no targets.

    Raises:
        UsageError: the output has another structure for some micro-batches than for others.
    """

    def __init__(
        self, groups: Sequence[VariantGroup], workload: Workload, to: Receiver, *, alone: bool = False
    ) -> None:
        graphs = [group.variant.graph for group in groups]
        makers = {group.variant.makers for group in groups}
        if len(makers) > 1 or any(graph.output.structure != graphs[0].output.structure for graph in graphs):
            raise UsageError(
                "the model's output has another structure for some micro-batches than for others",
                hint="give batches whose micro-batches are alike",
            )
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.alone = alone
        self._graph, self._groups, self._makers = graphs[0], groups, makers.pop()
        self._targets = range(world) if to == "all" else [to]
        self._counts = workload.reduction == "mean" and not (alone and workload.weight is not None)
        self._parts: dict[int, Part] = {}

    def keep(self, graph: PartitionGraph, made: Sequence[Any], place: int, cut: MicroBatch) -> None:
        """Keep what the last partition made of a micro-batch.

        A loss may write there, and an update into a weight among it: unless outputs are wanted alone, it is copied.
        """
        if not self.alone:
            made = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in made]
        self._put(graph, made, place, cut)

    def _put(self, graph: PartitionGraph, kept: Sequence[Any], place: int, cut: MicroBatch) -> None:
        weight = cut.weight if self._counts else None
        self._parts[place] = Part(graph.output, graph.output.filled(kept), cut.rows, weight)

    def carry(self, member: Membership) -> Any:
        """Join the micro-batches' outputs and bring them to the ranks that want them; every rank calls this.

        Returns:
            The model's output in its own structure where it is wanted, else None.

        Raises:
            UsageError: a part of it cannot be joined.
        """
        if len(self._makers) > 1:
            member.at = "the transfer of the micro-batches' outputs"
            self._bring_together(member)
        member.at = "joining the micro-batches' outputs"
        joined = join([self._parts[place] for place in sorted(self._parts)]) if self._parts else None
        self._parts.clear()
        member.at = "the transfer of the model's output"
        leaves = _brought(joined, self._graph, maker=self._makers[0], targets=self._targets, member=member)
        return None if leaves is None else self._graph.rebuild_output(leaves)

    def _bring_together(self, member: Membership) -> None:
        """Have the first of the workers that share the last stage get the micro-batches' outputs of the others."""
        first = self._makers[0]
        for group in self._groups:
            graph, plan = group.variant.graph, group.variant.program(len(group.places), training=False).plan
            workers = takers(plan, plan.stage_of[graph.last.name])
            for place, cut, worker in zip(group.places, group.micro_batches, workers, strict=True):
                if (maker := rank_of(worker)) != first:
                    part = self._parts.pop(place, None)
                    leaves = None if part is None else part.leaves
                    kept = _brought(leaves, graph, maker=maker, targets=[first], member=member)
                    if kept is not None:
                        self._put(graph, kept, place, cut)


def _brought(
    leaves: Sequence[Any] | None,
    graph: PartitionGraph,
    *,
    maker: int,
    targets: Collection[int],
    member: Membership,
) -> list[Any] | None:
    """Bring an output's leaves, which only `maker` has, to the ranks that want them; every rank calls this.

    Returns:
        Where they are wanted those that the last partition returns, else None.
    """
    found = None if leaves is None else [leaves[index] for index in graph.output.made]
    if member.transport is None:
        return found if member.rank in targets else None
    others = [rank for rank in targets if rank != maker]
    if found is not None and others:
        send_value(member, PackedValue.of(found, "the model's output"), others)
    elif member.rank in others:
        received = receive_value(member, maker).value
        found = pytree.tree_map_only(torch.Tensor, lambda each: each.to(member.device), received)
    member.transport.flush()  # the values between partitions: nothing else waits for them to leave
    return found if member.rank in targets else None
