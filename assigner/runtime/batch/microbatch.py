"""Cutting a batch into micro-batches, along the rows of everything in it that carries them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from assigner.errors import UsageError
from assigner.formats.fineness import micro_batch_count
from assigner.model.marking.rows import (
    NOTHING,
    BatchRows,
    Carry,
    RowLeaves,
    batch_rows,
    carriers,
    may_carry,
    row_length,
)
from assigner.model.plainvalues import SINGLE
from assigner.model.workload import IN_CONTAINERS, Batch, Workload, call_arguments
from assigner.runtime.batch.division import Division, check_tensor, fair_sizes
from assigner.runtime.batch.recurrence import carried_input, cut_state
from assigner.runtime.failures.callrecord import described
from assigner.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.model.workload import StatePlace


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch."""

    inputs: list[Any]  # the flattened arguments of the model's forward
    structure: TreeSpec  # of these
    targets: Any  # those of the whole batch where the loss is over it
    weight: float  # what its loss counts for in the step's loss; 0: it is not even computed
    rows: int
    amount: float  # what it counts for beside other batches: what the workload's `weight` says of it, or its rows


def check_pair(batch: Any) -> None:
    """Refuse a batch to train on or to evaluate that is not (inputs, targets); a DataLoader makes a list of them."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list | dict) else ""
        given = described(batch) if isinstance(batch, torch.Tensor) else f"a {type(batch).__name__}{size}"
        raise UsageError(
            f"a batch is a pair (inputs, targets), and {given} was given",
            hint="pass (inputs, targets), as Workload.batch makes them",
        )


class Cutting:
    """How the batches of a workload are cut.

    What carries rows is learnt from two batches of the workload's own, once, at the first use. Where the workload makes
    none for 4 and for 8 rows, and in a part of a batch that those do not have, it is what has as many rows as the first
    tensor.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    @cached_property
    def _known(self) -> BatchRows:
        return batch_rows(self._workload)

    def row_count(self, inputs: Any) -> int:
        """Rows of a batch, as `Workload.batch` counts them; of rows that belong together the groups.

        They are the dimension of rows, or the length, of the first input that carries them.
        """
        return self.counted(self._rows(inputs)[0])

    def counted(self, rows: int) -> int:
        """So many rows as `Workload.batch` counts them."""
        return self._known.counted(rows)

    def _rows(self, inputs: Any) -> tuple[int, bool]:
        """The rows, and whether they can be nothing else."""
        arguments = call_arguments(inputs)
        known = self._known.inputs
        lengths = [rows for _, rows in carriers(known or NOTHING, arguments)]
        if any(lengths):
            return next(filter(None, lengths)), True
        leaves, structure = pytree.tree_flatten(arguments)
        listed = {id(leaf) for leaf in _in_lists([*arguments[0], *arguments[1].values()])}
        for leaf, dim in zip(leaves, may_carry(known, structure, leaves), strict=True):
            lengths.append(None if dim is None else row_length(leaf, dim))
            if rows := lengths[-1]:
                return rows, id(leaf) not in listed
        if 0 in lengths:
            raise UsageError(
                "the batch is empty: its inputs have 0 rows", hint="leave it out: nothing can be learnt of no rows"
            )
        if strange := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *SINGLE))]:
            raise UsageError(
                f"the batch's inputs hold no tensor with rows, but for what may be in a {strange[0]}, into which nobody"
                " looks",
                hint=IN_CONTAINERS,
            )
        raise UsageError(
            "the batch's inputs hold no tensor with rows",
            hint="a dimension of the inputs, mostly the first, is the rows",
        )

    def count(self, rows: int, plan: Plan) -> int:
        """How many micro-batches a batch of so many rows is cut into: as planned, or fewer where rows are few."""
        return micro_batch_count(rows, plan.micro_batches, plan.micro_batch_size, self._workload.fineness)

    def weigher(self, plan: Plan) -> Callable[[Batch], list[float]] | None:
        """What each micro-batch of a batch counts for under a plan; None: the workload has no `weight`.

        It raises a UsageError as `split` does.
        """

        def weights(batch: Batch) -> list[float]:
            rows, _ = self._rows(batch[0])
            sizes = self._sizes(rows, self.count(self.counted(rows), plan))
            return self._weighed(self._inputs(batch[0], sizes), self._targets(batch[1], sizes))

        return None if self._workload.weight is None else weights

    def _weighed(self, inputs: Sequence[Any], targets: Sequence[Any]) -> list[float]:
        """What the workload's `weight` says of each micro-batch."""
        found: list[float] = []
        for pair in zip(inputs, targets, strict=True):
            assert self._workload.weight is not None
            with user_code("Workload.weight"):
                weight = float(self._workload.weight(*pair))
            if not (math.isfinite(weight) and weight >= 0):
                raise UsageError(
                    f"Workload.weight gave {weight} for a micro-batch", hint="return a number that is not negative"
                )
            found.append(weight)
        return found

    def split(
        self, batch: Batch, count: int, *, weighed: bool = True, weights: Sequence[float] | None = None
    ) -> list[MicroBatch]:
        """A batch, (inputs, targets), as `count` micro-batches, whose rows differ by one at most, or by one group.

        What carries the batch's rows is cut, the rest goes whole to every micro-batch. They count by `weights`, which a
        rank has told that had all of the batch (and perhaps more numbers); or by the workload's `weight`; or by their
        rows, also where not `weighed`.

        Raises:
            UsageError: a weight that is negative or not finite, or all of them are 0; inputs and targets differ in
                their rows; or there are several micro-batches and a part of the batch cannot be cut.
        """
        rows, certain = self._rows(batch[0])
        if not certain and count > 1:
            raise UsageError(
                f"the batch's first tensor is in a list of the inputs: its rows may be the list's entries, or {rows}",
                hint="have Workload.batch make such lists for any number of rows, as it is asked: they tell",
            )
        self._check_targets(batch[1], rows)
        sizes = self._sizes(rows, count)
        inputs = self._inputs(batch[0], sizes)
        targets = self._targets(batch[1], sizes)
        amounts = [float(each) for each in sizes]
        if self._workload.reduction == "sum":
            shares = [1.0] * len(sizes)
        elif self._workload.weight is None or not weighed:
            shares = [each / rows for each in sizes]
        else:
            amounts = self._weighed(inputs, targets) if weights is None else list(weights[:count])
            shares = _shares(amounts)
        return [_micro_batch(*part) for part in zip(inputs, targets, shares, sizes, amounts, strict=True)]

    def _sizes(self, rows: int, count: int) -> tuple[int, ...]:
        """Rows of each micro-batch: those that belong together stay together; of a group that is not whole the last."""
        group = self._known.group
        *first, _ = (group * each for each in fair_sizes(self._known.counted(rows), count))
        return (*first, rows - sum(first))

    def _inputs(self, inputs: Any, sizes: tuple[int, ...]) -> list[Any]:
        """Those of each micro-batch; the state that a batch begins with has its rows in any dimension."""
        listed = dict(enumerate(inputs)) if isinstance(inputs, list | tuple) else {}
        held: Mapping[Any, Any] = inputs if isinstance(inputs, dict) else listed
        states = {place: held[place] for place in self._workload.carried or () if place in held}
        parts = Division(sizes).cut(_with_states(inputs, dict.fromkeys(states)), self._of_given(inputs), "inputs")
        for place, state in states.items():
            cut = cut_state(state, self.known_of_state(place), sizes, carried_input(place))
            parts = [_with_states(part, {place: each}) for part, each in zip(parts, cut, strict=True)]
        return parts

    def known_of_state(self, place: StatePlace) -> RowLeaves:
        """What the workload's own batches say of an input that carries state."""
        known = self._known.inputs
        if known is None or known.carry is not Carry.UNKNOWN:
            return NOTHING
        return known.children[isinstance(place, str)].children.get(place, NOTHING)

    def _targets(self, targets: Any, sizes: Sequence[int]) -> list[Any]:
        """Those of each micro-batch; all of them where one loss is over the whole batch."""
        if self._workload.loss_over == "batch":
            return [targets] * len(sizes)
        division = Division(tuple(sizes), counts=self._workload.reduction == "sum")
        return division.cut(targets, self._known.targets or NOTHING, "targets")

    def _of_given(self, inputs: Any) -> RowLeaves:
        """What is known of a batch's inputs, in the form that they were given in."""
        known = self._known.inputs
        if known is None or known.carry is not Carry.UNKNOWN:
            return NOTHING
        args, kwargs = known.children[0], known.children[1]
        if isinstance(inputs, dict):
            return kwargs
        return args if isinstance(inputs, tuple | list) else args.children.get(0, NOTHING)

    def _check_targets(self, targets: Any, rows: int) -> None:
        for value, found in carriers(self._known.targets or NOTHING, targets):
            if found not in (None, rows):
                what = f" ({described(value)})" if isinstance(value, torch.Tensor) else ""
                raise UsageError(
                    f"the batch has {rows} rows of inputs, and {found} of targets{what}",
                    hint="give each row of the inputs its target",
                )


def _with_states(inputs: Any, states: Mapping[Any, Any]) -> Any:
    """A batch's inputs with other states in them, in their own structure."""
    if not states:
        return inputs
    if isinstance(inputs, dict):
        return {**inputs, **states}
    entries, structure = pytree.tree_flatten(inputs, is_leaf=lambda each: each is not inputs)
    return pytree.tree_unflatten([states.get(place, each) for place, each in enumerate(entries)], structure)


def _in_lists(arguments: list[Any]) -> list[Any]:
    """The leaves that are in a list or tuple among these arguments of the model."""
    nested = [each for each in arguments if isinstance(each, list | tuple)]
    inner = [value for each in arguments if isinstance(each, dict) for value in each.values()]
    return pytree.tree_leaves(nested) + (_in_lists(inner) if inner else [])


def _micro_batch(inputs: Any, targets: Any, weight: float, rows: int, amount: float) -> MicroBatch:
    args, kwargs = call_arguments(inputs)
    leaves: list[Any] = [*args, *kwargs.values()]
    if type(kwargs) is dict and all(type(each) is torch.Tensor for each in leaves):
        structure = _flat_structure(len(args), tuple(kwargs))
    else:
        leaves, structure = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            check_tensor(leaf, "one of the inputs")
    return MicroBatch(leaves, structure, targets, weight, rows, amount)


@functools.lru_cache
def _flat_structure(positional: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    """Of a model's arguments that are tensors: pytree takes a tenth of a tiny step for each micro-batch's."""
    return pytree.tree_structure(((0,) * positional, dict.fromkeys(names, 0)))


def _shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    if not total:
        raise UsageError(
            "Workload.weight gave 0 for every micro-batch: the batch's loss would be 0 / 0",
            hint="leave out batches in which no target counts",
        )
    return [each / total for each in weights]
