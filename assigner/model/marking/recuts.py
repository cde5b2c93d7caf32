"""The same model cut again: for other inputs, or in the other mode, beside what the captures before hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.model.deferred.originals import keep_left
from assigner.model.marking.capture import Capture, opened_in_vain
from assigner.model.marking.cut import captured_for, read_by, tables_of
from assigner.model.marking.cutter import Cutter
from assigner.model.marking.domain import input_key
from assigner.model.marking.isolation import CrossingError
from assigner.model.marking.leftovers import check_apart, check_followed, left_by_module
from assigner.model.marking.marks import Mark, find_marks
from assigner.model.marking.modules import modules_inside, modules_outside, opaque_modules
from assigner.model.marking.tables import CapturedTables, neighbours

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.utils._pytree import TreeSpec

    from assigner.model.marking.fakeforward import Named
    from assigner.model.marking.graph import PartitionGraph
    from assigner.model.marking.leftovers import Notes

_MOST_RECUTS = 64


def recut(graph: PartitionGraph, structure: TreeSpec, leaves: Sequence[Any], *, training: bool) -> PartitionGraph:
    """The same model cut again, for other inputs or in the other mode; what can stay where it was stays.

    Args:
        graph: The model as it was cut first; it keeps the last ones that were made of it.
        structure: Of the model's (args, kwargs).
        leaves: A micro-batch's flattened inputs.
        training: The mode that it is cut in: as it was built, or after `model.eval()`.

    Returns:
        Its partitions have the same names; one whose modules are not called is left out.

    Raises:
        MarkingError: the forward cannot be cut for these inputs.
    """
    key, made = input_key(structure, leaves), graph.recuts[training]
    found = next((each for each in made if each.domain.admits(key)), None)
    if found is None:
        args, kwargs = pytree.tree_unflatten([_on_cpu(leaf) for leaf in leaves], structure)
        found = _recut(graph, kwargs or args, training=training)
        made.append(found)
        del made[:-_MOST_RECUTS]
    return found


def _recut(graph: PartitionGraph, inputs: Any, *, training: bool) -> PartitionGraph:
    deferred = graph.deferred
    marked, opened = find_marks(deferred.model, graph.marks), dict(graph.opened)
    left = [each for each in graph.tables if each.left.values]
    while True:
        captured = _captured_again(graph, marked, inputs, training=training, opened=opened, others=left)
        try:
            cutter = Cutter(
                deferred, marked, captured, graph.last.autocast, rows=graph.rows, base=graph, training=training
            )
            cut = cutter.cut()
            if not training:
                _check_called(graph, cut)
            break
        except CrossingError as error:
            if training or not error.module or error.module in captured.opened:
                raise
            names = (name for name, _ in modules_inside(deferred.model, error.module))
            opened = {**captured.opened, **dict.fromkeys(names, error)}
    followed = _followed(graph, captured)
    read_elsewhere = captured.read_elsewhere | captured.notes.reads.of(followed)
    read = read_by(deferred.model, followed) if followed else cut.read
    _check_notes(graph, captured.notes)
    _check_found(graph, marked, captured, training=training)
    try:
        check_apart(deferred.model, graph.left, read_elsewhere)
        check_followed(followed, read, graph.left)
    except CrossingError as error:
        raise opened_in_vain(error, captured.opened) from error
    check_apart(deferred.model, captured.left, graph.read_elsewhere)
    keep_left(deferred.model, left_by_module(deferred.model, captured.left))
    return replace(cut, read=read, read_elsewhere=read_elsewhere)


def _followed(graph: PartitionGraph, captured: Capture) -> Named:
    """The modules whose own code is followed in a capture, and was one call, or within one, in the first one."""
    model = graph.deferred.model
    known = modules_outside(model, opaque_modules(model, graph.marks, graph.opened))
    names = {name for name, _ in known}
    return [(name, each) for name, each in modules_outside(model, captured.opaque) if name not in names]


def _check_called(graph: PartitionGraph, cut: PartitionGraph) -> None:
    """Partitions call the modules that they have under the plan.

    Raises:
        CrossingError: one calls an unmarked module that another has, that training does not use or that has no tensors:
            its code can be followed.
    """
    held = {name for piece in graph.pieces for name in piece.state} | graph.unread
    for piece in cut.pieces:
        for name in piece.called:
            own = {f"{name}.{each}" for each in graph.deferred.model.get_submodule(name).state_dict()}
            if name not in graph.piece[piece.name].called and own <= held:
                error = CrossingError(f"{piece.name!r} calls {name!r}, which it does not have under the plan")
                error.module = name
                raise error


def _captured_again(
    graph: PartitionGraph,
    marked: Mapping[str, Mark],
    inputs: Any,
    *,
    training: bool,
    opened: Mapping[str, CrossingError],
    others: Sequence[CapturedTables],
) -> Capture:
    with graph.deferred.mode(training=training):
        return captured_for(
            graph.deferred, marked, inputs, graph.maker, graph.rows.inputs,
            autocast=graph.last.autocast, any_rows=False, training=training,
            sized=graph.domain.example if graph.learnt else None, opened=opened, others=others,
        )  # fmt: skip


def _check_found(graph: PartitionGraph, marked: Mapping[str, Mark], captured: Capture, *, training: bool) -> None:
    """Earlier captures must hold where they find the tables that this one leaves, too.

    Raises:
        MarkingError: one does not.
    """
    own = tables_of(captured, training=training)
    for other in neighbours(graph.tables, own.left.count) if captured.tables else ():
        if not other.left.values or not captured.traced.leaves(captured.tables, other.left):
            inputs, opened = other.left.sizes.inputs(), {**other.opened, **captured.opened}
            _captured_again(graph, marked, inputs, training=other.training, opened=opened, others=[own])
    graph.tables.append(own)
    del graph.tables[1:-_MOST_RECUTS]


def _check_notes(graph: PartitionGraph, notes: Notes) -> None:
    """Each forward was captured as the first one: what others leave, it must not find, or find as it leaves it.

    Args:
        graph: The first capture's, which learns of this one.
        notes: Of another one.

    Raises:
        MarkingError: a forward may find what another one has set, by which its graph was not captured.
    """
    for others in graph.notes:
        if found := notes.found_of(others) or others.found_of(notes):
            raise MarkingError(
                f"the forward of {type(graph.deferred.model).__name__} sets {found} outside its partitions to"
                " another value for these inputs than for those before, or in one mode alone, and may read it: a"
                " captured graph would go on with its own",
                hint="mark a larger module that contains the line, or set it in the model's builder",
            )
    if not any(map(notes.says_as, graph.notes)):
        graph.notes.append(notes)


def _on_cpu(leaf: Any) -> Any:
    """An input to capture with, where captures run: only its shape and type count."""
    if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")
    return leaf
