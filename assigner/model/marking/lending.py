"""What partitions read in evaluations beside what they hold under the plan, and who has it beside them.

    lent      another partition of the same workers holds it: both read one tensor
    unread    none does, for training does not use it: every rank has it as it was built or loaded

Nothing of the evaluation may write it: no order of what two partitions do is kept there.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from assigner.model.deferred.mutation import storage_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from assigner.model.marking.graph import PartitionGraph, Piece

UNREAD = ""
"""Stands for a partition, where none holds what is lent."""


def lent(
    graph: PartitionGraph, base: PartitionGraph, workers: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, str]]:
    """By partition the tensors that it can be lent, by name, each with the partition that holds it, or `UNREAD`.

    Args:
        graph: Of evaluations.
        base: The plan's own.
        workers: Of each partition.
    """
    held = _held(base)
    unread, written = _unread(base), _storages(graph, {*graph.changed, *graph.written})
    found: dict[str, dict[str, str]] = {}
    for piece in graph.pieces:
        own = {*base.piece[piece.name].state}
        lenders = {_path(name): piece.name for name in own & {*piece.state}}
        found[piece.name] = {}
        for name in piece.state:
            if name in own or not written.isdisjoint(_storages(graph, [name])):
                continue
            near = [each for each in held[name] if workers[each] == workers[piece.name]]
            if base.canonical.get(name, name) in unread:
                near = [UNREAD]
            if near and _is_apart(name, near[0], piece, lenders):
                found[piece.name][name] = near[0]
    return found


def _held(base: PartitionGraph) -> defaultdict[str, list[str]]:
    """The partitions that hold a tensor, by its name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for piece in base.pieces:
        for name in piece.state:
            found[name].append(piece.name)
    return found


def _unread(base: PartitionGraph) -> set[str]:
    """The names of tensors that no partition holds, not even as a part of another one's memory."""
    taken = _storages(base, (name for piece in base.pieces for name in piece.state))
    return {name for name in base.unread if taken.isdisjoint(_storages(base, [name]))}


def _storages(graph: PartitionGraph, names: Iterable[str]) -> set[int]:
    built = graph.deferred.tensors()
    return {storage_of(built[name]) for name in names if name in built}


def _path(name: str) -> str:
    return name.rpartition(".")[0]


def _is_apart(name: str, lender: str, piece: Piece, lenders: dict[str, str]) -> bool:
    """Whether the module that has a tensor can stand in a partition as its lender has it, beside what is there."""
    path = _path(name)
    if not path:
        return True
    if lender != UNREAD and any(f"{each}.".startswith(f"{path}.") for each in piece.called):
        return False
    return lenders.setdefault(path, lender) == lender
