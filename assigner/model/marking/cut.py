"""A workload's model as a graph of partitions."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from assigner.errors import MarkingError, UsageError
from assigner.model.deferred import DeferredModel
from assigner.model.deferred.memento import Memento
from assigner.model.deferred.origins import digest
from assigner.model.deferred.vocabulary import vocabulary_of
from assigner.model.marking.capture import Capture, capture
from assigner.model.marking.cutter import Cutter
from assigner.model.marking.domain import input_key
from assigner.model.marking.leftovers import check_loss
from assigner.model.marking.marks import Mark, find_marks
from assigner.model.marking.modules import modules_outside
from assigner.model.marking.realforward import Maker, example_inputs, learn
from assigner.model.marking.rows import EXAMPLE_ROWS, batch_rows, find_carriers
from assigner.model.marking.tables import CapturedTables, FoundTables
from assigner.model.members import named_parameters
from assigner.model.workload import call_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from assigner.model.marking.domain import InputKey
    from assigner.model.marking.fakeforward import Named
    from assigner.model.marking.graph import ModelOutput, PartitionGraph
    from assigner.model.marking.isolation import CrossingError
    from assigner.model.marking.observation import LearntCall
    from assigner.model.marking.rows import RowLeaves
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
    check_names(workload, deferred)
    _ = deferred.origins  # before a forward runs, which may note the time in a list
    marked = find_marks(deferred.model, workload.marks if marks is None else tuple(marks))
    example = workload.make_batch(EXAMPLE_ROWS, workload.seed)
    rows = batch_rows(workload, example)

    def maker(rows: int) -> Any:
        return workload.make_batch(rows, workload.seed)[0]

    captured = captured_for(deferred, marked, example[0], maker, rows.inputs, autocast=workload.autocast)
    check_loss(workload.loss, deferred.model, captured.left)
    read = read_by(deferred.model, modules_outside(deferred.model, captured.opaque))
    cut = Cutter(deferred, marked, captured, workload.autocast, rows=rows).cut()
    if not cut.output.rows_known and rows.inputs is not None:
        with contextlib.suppress(UsageError, MarkingError):
            twice = workload.make_batch(2 * EXAMPLE_ROWS, workload.seed)
            second = captured_for(
                deferred, marked, twice[0], maker, rows.inputs, autocast=workload.autocast, any_rows=False
            )
            larger = Cutter(deferred, marked, second, workload.autocast, rows=rows).output()
            cut = replace(cut, output=following(cut.output, larger, rows.group * EXAMPLE_ROWS))
    calls: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for call in captured.calls:
        calls[call.label].append(call.effects.order)
    order = {label: _together(each) for label, each in calls.items()}
    return replace(
        cut, read=read, read_elsewhere=captured.read_elsewhere, left=captured.left, order=order,
        notes=[captured.notes], opened=captured.opened, tables=[tables_of(captured, training=True)],
        rows=rows, maker=maker, learnt=any(call.learnt for call in captured.calls),
    )  # fmt: skip


def following(output: ModelOutput, larger: ModelOutput, rows: int) -> ModelOutput:
    """What two captures by numbers say of the rows of an output: a list with an entry for each makes such captures.

    Args:
        output: Of the first, for so many rows.
        larger: Of the second, for twice as many.
        rows: The first number of rows.

    Returns:
        The first, with rows where a size follows them; where the two differ in more than sizes it is as it was.
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


def read_by(model: nn.Module, outside: Named) -> Memento:
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


def check_names(workload: Workload, deferred: DeferredModel) -> None:
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


def captured_for(
    deferred: DeferredModel,
    marked: Mapping[str, Mark],
    inputs: Any,
    maker: Maker | None,
    row_leaves: RowLeaves | None,
    *,
    autocast: str | None,
    any_rows: bool = True,
    training: bool = True,
    sized: InputKey | None = None,
    opened: Mapping[str, CrossingError] | None = None,
    others: Sequence[CapturedTables] = (),
) -> Capture:
    """A capture for inputs like these, where batches of `maker` tell what modules give whose forward needs values.

    Where they have the sizes of those that `sized` is the key of, but for the rows, it holds for no others: a forward
    that needs values there takes seconds to be followed with symbols for all sizes.
    """
    leaves, structure = pytree.tree_flatten(call_arguments(inputs))
    _, carriers = find_carriers(row_leaves, inputs, leaves)

    def learn_calls(names: Sequence[str], wanted: Mapping[str, Exception | None]) -> Mapping[str, Sequence[LearntCall]]:
        assert maker is not None
        batches = example_inputs(maker, leaves, carriers)
        return learn(deferred, names, batches, structure, wanted=wanted, autocast=autocast, training=training)

    return capture(
        deferred.model, list(marked), inputs, autocast=autocast, any_rows=any_rows, row_leaves=row_leaves,
        training=training, learner=None if maker is None else learn_calls,
        these_sizes=sized is not None and input_key(structure, leaves).differs_in_rows(sized, carriers),
        opened=opened, others=others, originals=_originals(deferred, others),
    )  # fmt: skip


def _originals(deferred: DeferredModel, tables: Sequence[CapturedTables]) -> dict[str, torch.Tensor]:
    """The buffers in whose places tables are, as the builder has made them."""
    names = {place.name for each in tables for place, _ in each.left.values.values()}
    return deferred.materialise(names & {name for name, _ in deferred.model.named_buffers()}) if names else {}


def tables_of(captured: Capture, *, training: bool) -> CapturedTables:
    """What a capture leaves for the next one, empty where it leaves nothing."""
    left = captured.kept or FoundTables(captured.domain.example, {})
    return CapturedTables(training, captured.opened, left)
