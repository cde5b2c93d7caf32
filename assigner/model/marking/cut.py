"""A workload's model as a graph of partitions, and cut again: for other inputs, or in the other mode."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError, UsageError
from assigner.model.deferred import DeferredModel
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.modes import train_methods
from assigner.model.deferred.originals import keep_left
from assigner.model.deferred.origins import digest
from assigner.model.deferred.vocabulary import vocabulary_of
from assigner.model.marking.capture import Capture, capture, opened_in_vain
from assigner.model.marking.cutter import Cutter
from assigner.model.marking.domain import input_key
from assigner.model.marking.graph import FirstCut
from assigner.model.marking.isolation import CrossingError
from assigner.model.marking.leftovers import check_apart, check_followed, check_loss, left_by_module
from assigner.model.marking.marks import find_marks
from assigner.model.marking.modules import modules_inside, modules_outside, opaque_modules
from assigner.model.marking.realforward import kept_draws
from assigner.model.marking.rows import EXAMPLE_ROWS, NOTHING, batch_rows
from assigner.model.marking.tables import FoundTables, leaves_as, neighbours
from assigner.model.members import named_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.utils._pytree import TreeSpec

    from assigner.model.marking.fakeforward import Named
    from assigner.model.marking.graph import ModelOutput, PartitionGraph
    from assigner.model.marking.leftovers import Notes
    from assigner.model.workload import Workload


def partition_graph(workload: Workload, marks: Sequence[str] | None = None) -> PartitionGraph:
    """Cut a workload's model at its marks.

    Args:
        workload: Whose model; its builder is called once, without memory behind the tensors.
        marks: Name patterns in place of the workload's own; None: those; empty: none. Marks in code stay.

    Raises:
        MarkingError: nothing is marked, or the forward cannot be cut there; the message has the line. Or the loss
            reads what a forward leaves on the model.
        UsageError: the model is to be trained, and its builder gives it in eval mode.
    """
    deferred = DeferredModel(workload.model, seed=workload.seed)
    check_mode(workload, deferred)
    _check_names(workload, deferred)
    _ = deferred.origins  # before a forward runs, which may note the time in a list
    marked = find_marks(deferred.model, workload.marks if marks is None else tuple(marks))
    with kept_draws():  # the script has not asked for these batches
        example = workload.make_batch(EXAMPLE_ROWS, workload.seed)
        rows = batch_rows(workload, example)

    def maker(rows: int) -> Any:
        with kept_draws():
            return workload.make_batch(rows, workload.seed)[0]

    captured_for = partial(capture, deferred, [*marked], maker, rows.inputs, autocast=workload.autocast)
    captured = captured_for(example[0])
    check_loss(workload.loss, deferred.model, captured.left)
    read = _read_by(deferred.model, modules_outside(deferred.model, captured.opaque))
    cut = Cutter(deferred, marked, captured, rows=rows).cut()
    if not cut.output.rows_known and rows.inputs != NOTHING:
        with contextlib.suppress(UsageError, MarkingError):
            second = captured_for(maker(2 * EXAMPLE_ROWS), any_rows=False)
            larger = Cutter(deferred, marked, second, rows=rows).output()
            cut = replace(cut, output=_following(cut.output, larger, rows.group * EXAMPLE_ROWS))
    trains = train_methods(deferred.model.modules())
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for call in captured.calls:
        calls[call.label].append(call.effects.order)
    order = {label: _together(each) for label, each in calls.items()}
    return replace(
        cut, read=read, read_by_train=Memento((), trains, vocabulary=vocabulary_of((), others=trains), top="read"),
        read_elsewhere=captured.read_elsewhere, left=captured.left, order=order, rows=rows,
        first=FirstCut(
            maker, learnt=any(call.learnt for call in captured.calls), opened=captured.opened,
            notes=[captured.notes], tables=[captured.kept],
        ),
    )  # fmt: skip


def _following(output: ModelOutput, larger: ModelOutput, rows: int) -> ModelOutput:
    """What two captures by numbers say of the rows of an output: a list with an entry for each makes such captures.

    It is that of the first, for so many rows, and has rows where a size is twice as large in the second, for twice as
    many; where the two differ in more than sizes it is as it was.
    """
    pairs = [*zip(output.tensors, larger.tensors, strict=False)]
    if (output.structure, len(output.tensors)) != (larger.structure, len(larger.tensors)) or any(
        (one is None) != (other is None) for one, other in pairs
    ):
        return output
    found = [
        [dim for dim, sizes in enumerate(zip(one.shape, other.shape, strict=False)) if sizes == (rows, 2 * rows)]
        if one is not None and other is not None and one.shape is not None and other.shape is not None
        else []
        for one, other in pairs
    ]
    return replace(output, rows=tuple(dims[0] if len(dims) == 1 else None for dims in found), rows_known=True)


def _read_by(model: nn.Module, outside: Named) -> Memento:
    """The Python values that the code of some of a model's modules can read, as they are."""
    own, modules = {id(each) for _, each in outside}, [*model.modules()]
    vocabulary = vocabulary_of((each for _, each in outside), (each for each in modules if id(each) not in own))
    return Memento(outside, beside=modules, top="read", vocabulary=vocabulary)


def _together(orders: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Of all calls of one module or function, whichever comes first."""
    kinds, ways = (digest(sorted(map(str, each))) for each in zip(*orders, strict=True))
    return kinds, ways


def check_mode(workload: Workload, deferred: DeferredModel) -> None:
    """Refuse to train a model that its builder has left in eval mode.

    Raises:
        UsageError: the workload has an optimizer, and the model as a whole is in eval mode.
    """
    if workload.optimizer is not None and not deferred.model.training:
        raise UsageError(
            "Workload.model gives the model in eval mode, as from_pretrained does: it would be trained without dropout,"
            " and its BatchNorm with the statistics that it has",
            hint="end the builder with model.train(), which a training loop calls; parts that are to stay in eval mode"
            " behind that: model.backbone.eval()",
        )


def _check_names(workload: Workload, deferred: DeferredModel) -> None:
    """Refuse to train a model that tells its optimizer other names than those under which it holds its parameters.

    Raises:
        UsageError: the workload has an optimizer, and the model's own `named_parameters` gives other names.
    """
    if workload.optimizer is None:
        return
    held = dict(named_parameters(deferred.model, remove_duplicate=False))
    for name, parameter in deferred.model.named_parameters():
        if held.get(name) is not parameter:
            true = next((each for each, other in held.items() if other is parameter), "none of its own")
            raise UsageError(
                f"{type(deferred.model).__name__}, the model, has a named_parameters of its own, by which {true!r} is"
                f" called {name!r}: its optimizer, checkpoints and partitions could not agree about it",
                hint="give the model without the wrapper around all of it, and wrap its parts; or leave"
                " named_parameters to nn.Module",
            )


_MOST_RECUTS = 64


def recut(
    graph: PartitionGraph,
    structure: TreeSpec,
    leaves: Sequence[Any],
    *,
    training: bool,
    order: Sequence[str] = (),
) -> PartitionGraph:
    """The same model cut again, for other inputs or in the other mode; what can stay where it was stays.

    Args:
        graph: The model as it was cut first; it keeps the last ones that were made of it.
        structure: Of the model's (args, kwargs).
        leaves: A micro-batch's flattened inputs.
        training: The mode that it is cut in: as it was built, or after `model.eval()`.
        order: In which a plan runs the partitions; empty: that of their first calls. A forward may call two that need
            nothing of each other, as a CycleGAN's discriminators, the other way round than the first one did.

    Returns:
        Its partitions have the same names; one whose modules are not called is left out.

    Raises:
        MarkingError: the forward cannot be cut for these inputs.
    """
    key, made = input_key(structure, leaves), graph.recuts[training]
    found = next((each for each in made if each.domain.admits(key) and _runs_in(each, order)), None)
    if found is None:
        args, kwargs = pytree.tree_unflatten([_on_cpu(leaf) for leaf in leaves], structure)
        found = _recut(graph, kwargs or args, training=training)
        if not _runs_in(found, order):
            found = _recut(graph, kwargs or args, training=training, order=order)
        made.append(found)
        del made[:-_MOST_RECUTS]
    return found


def _runs_in(graph: PartitionGraph, order: Sequence[str]) -> bool:
    """Whether all values of a graph go forward in an order of its partitions; empty: there is none."""
    place = {name: n for n, name in enumerate(order)}
    return not place or all(place[edge.source] < place[edge.target] for edge in graph.edges)


def _recut(graph: PartitionGraph, inputs: Any, *, training: bool, order: Sequence[str] = ()) -> PartitionGraph:
    deferred, first = graph.deferred, graph.first
    assert first is not None  # it is one that was cut first
    marked, opened = find_marks(deferred.model, graph.marks), dict(first.opened)
    left = [each for each in first.tables if each.values]

    def captured_for(
        inputs: Any, *, training: bool, opened: Mapping[str, CrossingError], others: Sequence[FoundTables]
    ) -> Capture:
        with deferred.mode(training=training):
            return capture(
                deferred, [*marked], first.maker, graph.rows.inputs, inputs,
                autocast=graph.last.autocast, any_rows=False, training=training,
                sized=graph.domain.example if first.learnt else None, opened=opened, others=others,
            )  # fmt: skip

    while True:
        captured = captured_for(inputs, training=training, opened=opened, others=left)
        try:
            cut = Cutter(deferred, marked, captured, rows=graph.rows, base=graph, order=order).cut()
            if not training:
                _check_called(graph, cut)
            break
        except CrossingError as error:
            if training or not error.module or error.module in captured.opened:
                raise
            names = (name for name, _ in modules_inside(deferred.model, error.module))
            opened = {**captured.opened, **dict.fromkeys(names, error)}
    followed = _followed(graph, first.opened, captured)
    read_elsewhere = captured.read_elsewhere | captured.notes.reads.of(followed)
    read = _read_by(deferred.model, followed) if followed else cut.read
    _check_notes(type(deferred.model).__name__, first.notes, captured.notes)
    _check_found(first.tables, captured, captured_for)
    try:
        check_apart(deferred.model, graph.left, read_elsewhere)
        check_followed(followed, read, graph.left)
    except CrossingError as error:
        raise opened_in_vain(error, captured.opened) from error
    check_apart(deferred.model, captured.left, graph.read_elsewhere)
    keep_left(deferred.model, left_by_module(deferred.model, captured.left))
    return replace(cut, read=read, read_elsewhere=read_elsewhere)


def _followed(graph: PartitionGraph, opened: Mapping[str, CrossingError], captured: Capture) -> Named:
    """The modules whose own code is followed in a capture, and was one call, or within one, in the first one."""
    model = graph.deferred.model
    known = modules_outside(model, opaque_modules(model, graph.marks, opened))
    names = {name for name, _ in known}
    return [(name, each) for name, each in modules_outside(model, captured.opaque) if name not in names]


def _check_called(graph: PartitionGraph, cut: PartitionGraph) -> None:
    """Partitions call the modules that they have under the plan.

    Raises:
        CrossingError: one calls an unmarked module that another has, that training does not use or that has no tensors:
            its code can be followed.
    """
    held = graph.holders.keys() | graph.unread
    for piece in cut.pieces:
        for name in piece.called:
            own = {f"{name}.{each}" for each in graph.deferred.model.get_submodule(name).state_dict()}
            if name not in graph.piece[piece.name].called and own <= held:
                raise CrossingError(
                    f"{piece.name!r} calls {name!r}, which it does not have under the plan", module=name
                )


def _check_found(known: list[FoundTables], captured: Capture, captured_for: Callable[..., Capture]) -> None:
    """Earlier captures must hold where they find the tables that this one leaves, too: it is one of them from then on.

    Raises:
        MarkingError: one does not.
    """
    own = captured.kept
    for other in neighbours(known, own.count) if captured.tables else ():
        if not other.values or not leaves_as(captured, other):
            inputs, opened = other.sizes.inputs(), {**other.opened, **captured.opened}
            captured_for(inputs, training=other.training, opened=opened, others=[own])
    known.append(own)
    del known[1:-_MOST_RECUTS]


def _check_notes(name: str, known: list[Notes], notes: Notes) -> None:
    """Each forward was captured as the first one: what others leave, it must not find, or find as it leaves it.

    Raises:
        MarkingError: a forward may find what another one has set, by which its graph was not captured.
    """
    for others in known:
        if found := notes.found_of(others) or others.found_of(notes):
            raise MarkingError(
                f"the forward of {name} sets {found} outside its partitions to"
                " another value for these inputs than for those before, or in one mode alone, and may read it: a"
                " captured graph would go on with its own",
                hint="mark a larger module that contains the line, or set it in the model's builder",
            )
    if not any(map(notes.says_as, known)):
        known.append(notes)


def _on_cpu(leaf: Any) -> Any:
    """An input to capture with, where captures run: only its shape and type count."""
    if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="cpu")
    return leaf
