"""What each rank needs of a batch: inputs where its partitions read some, targets where the model's output is made.

    rank 0   embedding, block.0    inputs     reads them; tells the others what they must know of them
    rank 1   block.1               neither
    rank 2   block.2, head         targets    the loss compares with them

A rank that has more than it needs is fine. `Workload.weight` is called where the targets are; whether it reads values
of the inputs is tried out with some that have none.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.location import rank_of
from assigner.model.marking.rows import EXAMPLE_ROWS
from assigner.model.workload import given_inputs
from assigner.runtime.batch.microbatch import check_pair
from assigner.runtime.forward.randomness import kept_generators

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.model.workload import Batch, Workload
    from assigner.runtime.batch.variants import Variant, VariantGroup, Variants
    from assigner.runtime.ranks.membership import Membership


def given_pair(batch: Any) -> tuple[Any, Any]:
    """What the script has handed in as inputs and targets; None for a part, or for the batch, is nothing.

    Raises:
        UsageError: it is no pair.
    """
    if batch is None:
        return None, None
    check_pair(batch)
    inputs, targets = batch
    return given_inputs(inputs), targets


class Needs:
    """What this rank needs under a plan, and who tells of a batch: the first that needs it in the plan's own graph."""

    def __init__(self, workload: Workload, variants: Variants, member: Membership) -> None:
        self._workload, self._variants, self._member = workload, variants, member
        graph, holders = variants.planned.graph, variants.plan.holders
        reading = [piece.name for piece in graph.pieces if any(not value.partition for value in piece.reads)]
        readers = [worker for name in reading for worker in holders[name]]
        self.inputs_rank = min(rank_of(worker) for worker in readers or variants.plan.stages[0].workers)
        self.targets_rank = variants.planned.makers[0]
        self.weighs = workload.weight is not None

    @property
    def inputs(self) -> bool:
        """This rank needs a batch's inputs, in any graph so far."""
        return bool(self._why_inputs(self._variants.made()))

    @property
    def targets(self) -> bool:
        """This rank needs a batch's targets, in any graph so far."""
        makers = {rank for each in self._variants.made() for rank in each.makers}
        return self._workload.loss is not None and not self.targets_are_none and self._member.rank in makers

    @cached_property
    def targets_are_none(self) -> bool:
        """The workload's own targets are None: its model makes its loss of the inputs alone."""
        return self._example is not None and self._example[1] is None

    @cached_property
    def _example(self) -> Batch | None:
        try:
            with kept_generators(self._member.device, draws=True):  # the script has not asked for this batch
                return self._workload.make_batch(EXAMPLE_ROWS, self._workload.seed)
        except UsageError:  # a script that brings its own batches needs no maker
            return None

    @cached_property
    def _weight_reads_inputs(self) -> bool:
        if self._workload.weight is None:
            return False
        if self._example is None:
            return True
        inputs, targets = self._example
        bare = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
        try:
            float(self._workload.weight(bare, targets))
        except Exception:  # noqa: BLE001 - whatever it does with a tensor that has no values
            return True
        return False

    def _why_inputs(self, variants: Sequence[Variant]) -> str:
        """Why this rank needs inputs; empty: it does not."""
        for variant in variants:
            for index, partition in variant.read_inputs.items():
                graph = "" if variant.is_planned else f" for inputs {variant.graph.domain.example}"
                return f"its partition {partition!r} reads {_argument(variant, index)}{graph}"
        if self._member.rank == self.targets_rank and self._weight_reads_inputs:
            return "it has the targets, and Workload.weight reads inputs beside them"
        return "it tells the other ranks how many rows there are" if self._member.rank == self.inputs_rank else ""

    def check(self, inputs: Any, targets: Any, *, loss: bool) -> None:
        """Refuse None for what this rank needs under the plan's own graph; targets where there will be a loss."""
        if inputs is None and (why := self._why_inputs([self._variants.planned])):
            self._refuse("inputs", why)
        planned = self._variants.planned
        lacks = loss and targets is None and self._member.rank in planned.makers
        # None may be what the loss is to get; the workload's own batch is made only where that has to be known
        if lacks and self._example is not None and not self.targets_are_none:
            self._refuse_targets(planned)

    def check_groups(self, groups: Sequence[VariantGroup], *, loss: bool) -> None:
        """Refuse what this rank was not given and needs in the graphs that a batch runs through, as in a new one."""
        for group in groups:
            cut, variant = group.micro_batches[0], group.variant
            for index in variant.read_inputs:
                leaf = cut.inputs[index]
                if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                    self._refuse("inputs", self._why_inputs([variant]))
            makes = self._member.rank in variant.makers and self._member.rank != self.targets_rank
            if loss and makes and cut.targets is None and not self.targets_are_none:
                self._refuse_targets(variant)

    def _refuse_targets(self, variant: Variant) -> None:
        graph = "" if variant.is_planned else f" for inputs {variant.graph.domain.example}"
        last = variant.graph.last.name
        self._refuse("targets", f"its partition {last!r} makes the model's output{graph}, which the loss compares")

    def _refuse(self, what: str, why: str) -> None:
        raise UsageError(
            f"{self._member.name} was given no {what} and needs them: {why}",
            hint=f"hand in {what} on this rank: None is for ranks whose pipeline.needs_{what} is False, whatever batch"
            " comes",
        )


def _argument(variant: Variant, index: int) -> str:
    """A flattened input as the batch's inputs have it."""
    example = variant.graph.domain.example
    tree = pytree.tree_unflatten(list(range(len(example.leaves))), example.structure)
    path = next(path for path, leaf in pytree.tree_leaves_with_path(tree) if leaf == index)[1:]
    args, kwargs = tree
    single = not kwargs and len(args) == 1 and len(path) == 1
    return "inputs" if single else f"inputs{pytree.keystr(path)}"
