"""State that goes from batch to batch: where it stands in the model's inputs and output, and its rows.

`Workload.carried` names the places; a state is whatever stands there, a tensor or a tree of tensors:

    carried {1: 1}      model(data, (h, c))  ->  output, (h, c)       h and c of (layers, rows, width)

Its rows are in the dimension that follows them in the workload's own batches; where those have no tensors there, in the
one that follows them in the model's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import UsageError
from assigner.formatting import Unquoted
from assigner.model.marking.graph import LEAF
from assigner.model.marking.rows import Carry, RowLeaves, entries_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils._pytree import TreeSpec

    from assigner.model.marking import PartitionGraph
    from assigner.model.marking.graph import ModelOutput
    from assigner.model.workload import StatePlace, Workload

_ONE = "or use one micro-batch (solve with --micro-batches 1)"


def carried_input(place: StatePlace) -> str:
    """An input that carries state, for errors."""
    return f"the carried input {place!r}"


def input_leaves(structure: TreeSpec, place: StatePlace) -> list[int]:
    """The numbers of an input's leaves among the flattened (args, kwargs); a UsageError where it is not there."""
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

    A UsageError where there is no such output.
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
    """The places that the workload names are there, and what stands there can be carried."""
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
    entries = entries_of(tree)
    if entries is None or known.carry is not Carry.UNKNOWN:
        return [known] * len(pytree.tree_leaves(tree))
    nodes = known.below(entries, named=isinstance(tree, Mapping))
    return [each for node, (_, child) in zip(nodes, entries, strict=True) for each in known_by_leaf(node, child)]


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
    """A leaf of a state for each micro-batch; a UsageError where there are several, and it is a tensor without rows."""
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
