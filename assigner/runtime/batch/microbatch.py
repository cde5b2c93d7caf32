"""Cutting a batch into micro-batches: tensors along the dimension of their rows, sequences by their length.

    rows 5, micro-batches 2    ids (5, 16)    by time (16, 5)    boxes: a list of 5    class weights (20,)
    the first                  ids[:3]        by time[:, :3]     boxes[:3]             whole
    the second                 ids[3:]        by time[:, 3:]     boxes[3:]             whole

Which parts carry rows the workload's own batches tell (`assigner.model.marking.rows`). Where they do not, it is what
has as many entries as the batch has rows. What might mean two things is refused, as is what cannot be cut.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from assigner.errors import UsageError
from assigner.formats.fineness import micro_batch_count
from assigner.model.marking.changedarguments import containers
from assigner.model.marking.rows import (
    NOTHING,
    BatchRows,
    Carry,
    RowLeaves,
    batch_rows,
    carriers,
    entries_of,
    is_plain,
    may_carry,
    row_length,
)
from assigner.model.plainvalues import SINGLE
from assigner.model.workload import IN_CONTAINERS, Batch, Workload, call_arguments
from assigner.runtime.batch.recurrence import carried_input, cut_state
from assigner.runtime.failures.callrecord import described
from assigner.runtime.forward.randomness import kept_generators
from assigner.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.formats.plan import Plan
    from assigner.model.workload import StatePlace

_OWN_KINDS = (torch.Tensor, nn.Parameter, nn.Buffer)
_ONE = "with one micro-batch (solve with --micro-batches 1) the batch stays whole"


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch."""

    inputs: list[Any]  # the flattened arguments of the model's forward
    structure: TreeSpec  # of these
    targets: Any  # those of the whole batch where the loss is over it
    weight: float  # what its loss counts for in the step's loss; 0: it is not even computed
    rows: int
    amount: float  # what it counts for beside other batches: what the workload's `weight` says of it, or its rows
    shared: bool = False  # the batch had a list or dict among its inputs and its targets, too


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
        with kept_generators(torch.device("cpu"), draws=True):  # the script has not asked for these batches
            return batch_rows(self._workload)

    def row_count(self, inputs: Any) -> int:
        """Rows of a batch, as `Workload.batch` counts them; of rows that belong together the groups.

        They are the dimension of rows, or the length, of the first input that carries them.

        Raises:
            UsageError: there is none, or it has none.
        """
        return self.counted(self._rows(inputs)[0])

    def counted(self, rows: int) -> int:
        """So many rows as `Workload.batch` counts them."""
        return self._known.counted(rows)

    def _rows(self, inputs: Any) -> tuple[int, bool]:
        """The rows, and whether they can be nothing else."""
        arguments = call_arguments(inputs)
        known = self._known.inputs
        lengths = [rows for _, rows in carriers(known, arguments)]
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
        parts, shared = zip(inputs, targets, shares, sizes, amounts, strict=True), _share_containers(*batch)
        return [_micro_batch(*part, shared=shared) for part in parts]

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
        if not known.children:
            return NOTHING
        return known.children[isinstance(place, str)].children.get(place, NOTHING)

    def _targets(self, targets: Any, sizes: Sequence[int]) -> list[Any]:
        """Those of each micro-batch; all of them where one loss is over the whole batch."""
        if self._workload.loss_over == "batch":
            return [targets] * len(sizes)
        division = Division(tuple(sizes), counts=self._workload.reduction == "sum")
        return division.cut(targets, self._known.targets, "targets")

    def _of_given(self, inputs: Any) -> RowLeaves:
        """What is known of a batch's inputs, in the form that they were given in."""
        known = self._known.inputs
        if not known.children:
            return NOTHING
        args, kwargs = known.children[0], known.children[1]
        if isinstance(inputs, dict):
            return kwargs
        return args if isinstance(inputs, tuple | list) else args.children.get(0, NOTHING)

    def _check_targets(self, targets: Any, rows: int) -> None:
        for value, found in carriers(self._known.targets, targets):
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


def _share_containers(inputs: Any, targets: Any) -> bool:
    """Whether a list or dict is among the inputs and the targets, too, or twice among the inputs."""
    found = [id(each) for each in containers((inputs,))]
    return len({*found}) < len(found) or not {*found}.isdisjoint(id(each) for each in containers((targets,)))


def _micro_batch(inputs: Any, targets: Any, weight: float, rows: int, amount: float, *, shared: bool) -> MicroBatch:
    args, kwargs = call_arguments(inputs)
    leaves: list[Any] = [*args, *kwargs.values()]
    if type(kwargs) is dict and all(type(each) is torch.Tensor for each in leaves):
        structure = _flat_structure(len(args), tuple(kwargs))
    else:
        leaves, structure = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            check_tensor(leaf, "one of the inputs")
    return MicroBatch(leaves, structure, targets, weight, rows, amount, shared)


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


def fair_sizes(rows: int, count: int) -> tuple[int, ...]:
    """Rows of each of `count` micro-batches, at most one apart, the larger ones first."""
    least, more = divmod(rows, count)
    return (least + 1,) * more + (least,) * (count - more)


@dataclass(frozen=True)
class Division:
    """How many rows each micro-batch of a batch gets."""

    sizes: tuple[int, ...]
    counts: bool = False  # a number of all rows goes whole to every micro-batch, as a summed loss may divide by it

    @property
    def rows(self) -> int:
        """Of the whole batch."""
        return sum(self.sizes)

    def cut(self, tree: Any, known: RowLeaves, where: str) -> list[Any]:
        """The tree of each micro-batch, by what is known of its rows.

        Raises:
            UsageError: there are several micro-batches, and a part cannot be cut, has other rows, or might carry the
                rows in two ways.
        """
        if len(self.sizes) > 1 and known.carry is Carry.WHOLE:
            self._check_whole(tree, known, where)
        whole = len(self.sizes) == 1 or known.carry is Carry.WHOLE or tree is None
        if not whole:
            self._check_known(tree, known, where)
        if whole or is_plain(tree):
            return [tree] * len(self.sizes)
        if isinstance(tree, torch.Tensor):
            return self._cut_tensor(tree, known.dimension, where)
        if known.carry is Carry.ROWS:
            return self._slices(tree, where)
        entries = entries_of(tree)
        nodes = [] if entries is None else known.below(entries, named=isinstance(tree, Mapping))
        known_inside = any(node != NOTHING for node in nodes)
        if row_length(tree) == self.rows and isinstance(tree, Sequence | np.ndarray) and not known_inside:
            self._check_meaning(tree, where)
            return self._slices(tree, where)
        if entries is None and not isinstance(tree, np.ndarray):
            raise UsageError(
                f"{where} is a {type(tree).__name__}, which cannot be cut into {len(self.sizes)} micro-batches",
                hint="give tensors and plain values, in tuples, lists and dicts; " + _ONE,
            )
        return self._cut_entries(
            tree, [(*entry, node) for entry, node in zip(entries or (), nodes, strict=True)], where
        )

    def _check_known(self, tree: Any, known: RowLeaves, where: str) -> None:
        """What is known to carry the rows has as many, and what goes with them in another way stays out."""
        if known.carry is Carry.ROWS and (length := row_length(tree, known.dimension)) != self.rows:
            raise UsageError(
                f"the batch has {self.rows} rows, and {where} has {'none' if length is None else length}",
                hint="give every row its entry",
            )
        if known.carry in (Carry.VARIES, Carry.MIXED) and not (self.counts and _is_number(tree)):
            hint = "give each row of the batch its own entry, along one dimension of a tensor or in a list, and" + (
                " add them up where the number is needed, with Workload.weight for what they count; a loss divided by"
                " one of the whole batch goes with reduction='sum'; "
                if _is_number(tree)
                else " flatten in the loss; "
            )
            raise UsageError(
                f"{where} cannot be cut into {len(self.sizes)} micro-batches: it is {known.why}",
                hint=hint + "a loss of the whole batch is loss_over='batch'; " * (known.carry is Carry.MIXED) + _ONE,
            )

    def _check_whole(self, tree: Any, known: RowLeaves, where: str) -> None:
        """What goes whole has no rows where the examples' broadcasts, as a mask of (1, T) for one of (rows, T).

        Nor where the examples have another size, but for a length that may vary, as the number of steps.
        """
        is_sequence = isinstance(tree, list | tuple | deque) and not isinstance(tree, torch.Size)
        if not is_sequence and not isinstance(tree, torch.Tensor | np.ndarray):
            return
        shape = (len(tree),) if is_sequence else tuple(tree.shape)
        made = known.sizes or (len(known.children),) * bool(known.children)
        alike = made[:1] if is_sequence else made
        theirs = alike if len(alike) == len(shape) else (1,) * len(shape)  # a number broadcasts, too
        lengths = () if is_sequence else known.lengths
        if any(
            size == self.rows and (its == 1 or (its != size and dim not in lengths))
            for dim, (size, its) in enumerate(zip(shape, theirs, strict=True))
        ):
            raise UsageError(
                f"{where} of shape {shape} {_TWO_MEANINGS}: Workload.batch makes"
                f" {f'one of {made}' if made else 'a single value'} for any number of rows",
                hint="have it make them of the data's shape, for as many rows as it is asked; " + _ONE,
            )

    def _cut_entries(self, tree: Any, entries: Sequence[tuple[Any, Any, RowLeaves]], where: str) -> list[Any]:
        """An inner node entry by entry, each with its key and what is known of it."""
        if not entries:
            return [tree] * len(self.sizes)
        cut = [self.cut(each, node, f"{where}[{key!r}]") for key, each, node in entries]
        _, structure = pytree.tree_flatten(tree, is_leaf=lambda each: each is not tree)
        return [pytree.tree_unflatten(list(part), structure) for part in zip(*cut, strict=True)]

    def _cut_tensor(self, tensor: torch.Tensor, dimension: int, where: str) -> list[torch.Tensor]:
        check_tensor(tensor, where)
        if row_length(tensor, dimension) != self.rows:
            return [tensor] * len(self.sizes)
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"{where} is a tensor of layout {tensor.layout}, which cannot be cut into {len(self.sizes)}"
                " micro-batches",
                hint="give it dense; " + _ONE,
            )
        parts = torch.split(tensor, list(self.sizes), dimension)
        return [part.contiguous() for part in parts] if dimension and tensor.is_contiguous() else list(parts)

    def _slices(self, sequence: Any, where: str) -> list[Any]:
        """The parts of something as long as there are rows, of its own kind."""
        ends = list(itertools.accumulate(self.sizes))
        spans = [(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]
        if isinstance(sequence, deque):
            return [type(sequence)(itertools.islice(sequence, *span)) for span in spans]
        try:
            parts = [sequence[start:end] for start, end in spans]
            sound = all(
                type(part) is type(sequence) and len(part) == size for part, size in zip(parts, self.sizes, strict=True)
            )
        except (TypeError, ValueError, IndexError, KeyError, AttributeError):
            sound = False
        if not sound:
            raise UsageError(
                f"{where}, a {type(sequence).__name__}, has an entry for each row and cannot be sliced",
                hint="give it as a list; " + _ONE,
            )
        return parts

    def _check_meaning(self, sequence: Any, where: str) -> None:
        """A sequence that the examples do not show, as long as there are rows: its entries must be the rows."""
        tensors = [each for each in pytree.tree_leaves(list(sequence)) if isinstance(each, torch.Tensor)]
        settings = self.rows <= _FEW and all(isinstance(each, bool | int | float) for each in sequence)
        if settings or any(row_length(each) == self.rows for each in tensors):
            raise UsageError(
                f"{where} {_TWO_MEANINGS}",
                hint="have Workload.batch make batches of this structure for any number of rows: they tell; " + _ONE,
            )


_TWO_MEANINGS = "has as many entries as the batch has rows: it might be cut, or go whole to every micro-batch"
_FEW = 4  # so short a sequence of numbers may as well be a size or a padding


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def check_tensor(tensor: torch.Tensor, where: str) -> None:
    """Refuse what a plain tensor is not, a class of its own or attributes: it would be lost in a graph or a part."""
    if type(tensor) not in _OWN_KINDS or tensor.is_nested:
        kind = "nested tensor" if tensor.is_nested else type(tensor).__name__
        raise UsageError(
            f"{where} is a {kind}: what it has beyond a plain tensor would be lost",
            hint="give plain tensors, as tensor.as_subclass(torch.Tensor), and the rest beside them",
        )
    hung = [name for name in vars(tensor) if not name.startswith("_")]
    if hung:
        raise UsageError(
            f"{where} is a tensor with an attribute {hung[0]!r} hung on it, which would be lost",
            hint="hand it over beside the tensor, as an input or a target of its own",
        )
