"""State that goes from batch to batch, in a checkpoint: tensors of the whole batch, keyed `INPUT/NUMBER`.

The number is that of the leaf in the state. The index of these shards has a section `dimensions`: in which dimension a
tensor has its rows, or null; and the batch's rows in a section `batch`. Any plan cuts them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assigner.errors import FormatError, UsageError
from assigner.runtime.batch.recurrence import StateLeaf, StatePart
from assigner.runtime.batch.staterows import output_leaves
from assigner.runtime.checkpoints.shards import DAMAGED, Index, index_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from assigner.model.marking import PartitionGraph
    from assigner.model.workload import StatePlace


def check_saved(state: StatePart | None, graph: PartitionGraph, places: Mapping[StatePlace, StatePlace]) -> None:
    """A state is saved without its structure: it must be that of the model's output.

    Raises:
        UsageError: it has another one.
    """
    if state is not None and state.structures != {
        place: output_leaves(graph.output.structure, source)[1] for place, source in places.items()
    }:
        raise UsageError(
            "the carried state has another structure than with batches as Workload.batch makes them, and is not saved",
            hint="save after a batch like those, or after pipeline.reset_carried()",
        )


def packed_state(state: StatePart, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """What a rank writes: the tensors that it is the first to hold, and sections of the index."""
    mine = {key: leaf for key, leaf in _keyed(state) if leaf.holders and min(leaf.holders) == rank}
    tensors = {key: leaf.value for key, leaf in mine.items()}
    return tensors, {"dimensions": {key: leaf.dimension for key, leaf in mine.items()}, "batch": {"rows": state.rows}}


def _keyed(state: StatePart) -> Iterator[tuple[str, StateLeaf]]:
    for place in state.structures:
        for number, leaf in enumerate(each for each in state.leaves if each.place == place):
            yield f"{place}/{number}", leaf


def read_state(folder: Path, graph: PartitionGraph, places: Mapping[StatePlace, StatePlace]) -> StatePart | None:
    """The state of a checkpoint, with the values of all of it; None: there is none.

    Raises:
        FormatError: it is broken, or that of a workload which carries something else.
    """
    if not index_of(folder, "carried").is_file():
        return None
    index = Index.read(folder, "carried")
    dimensions, given = index.section("dimensions"), index.section("batch").get("rows")
    rows: int = given if type(given) is int and given > 0 else index.refuse("batch: rows", given, "a number of rows")
    found = index.tensors(lambda _: True)
    structures, leaves = {}, []
    for place, source in places.items():
        numbers, structures[place] = output_leaves(graph.output.structure, source)
        for n, number in enumerate(numbers):
            facts, key = graph.output.tensors[number], f"{place}/{n}"
            if facts is None:
                leaves.append(StateLeaf(place, graph.output.leaves[number], None, frozenset()))
            elif key in found:
                leaves.append(StateLeaf(place, found.pop(key), _dimension(index, dimensions, key), frozenset()))
                _check_rows(index, key, leaves[-1], rows)
            else:
                raise FormatError(f"{index.path}: {key!r} is missing", hint=_HINT)
    if found:
        raise FormatError(f"{index.path}: {min(found)!r} is no state of this workload", hint=_HINT)
    return StatePart(rows, structures, leaves)


_HINT = "load it with the workload that wrote it: its Workload.carried says which inputs carry state"


def _dimension(index: Index, dimensions: Mapping[str, Any], key: str) -> int | None:
    found = dimensions.get(key)
    if found is not None and (type(found) is not int or found < 0):
        index.refuse(f"dimensions: {key!r}", found, "a dimension or null")
    return found


def _check_rows(index: Index, key: str, leaf: StateLeaf, rows: int) -> None:
    dimension, shape = leaf.dimension, tuple(leaf.value.shape)
    if dimension is not None and (dimension >= len(shape) or shape[dimension] != rows):
        raise FormatError(
            f"{index.path}: {key!r} has shape {shape}, without {rows} rows in dimension {dimension}", hint=DAMAGED
        )
