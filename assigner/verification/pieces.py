"""A model that does not fit twice: its forward, with the memory of one partition at a time.

The model itself runs module by module: each largest module gets its initial values right before it is called, and
loses them when it returns. Then the partitions run one after the other, each built alone. No graph is kept, so nothing
is said of gradients, of updates and of rematerialisation.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from assigner.model.deferred import slot_of
from assigner.model.deferred.memento import put
from assigner.model.marking import Value
from assigner.model.marking.casting import casting
from assigner.model.marking.cut import recut
from assigner.model.marking.domain import input_key
from assigner.model.marking.modules import forwards_called
from assigner.model.marking.owncopies import own_copy
from assigner.model.marking.writing import StepStores
from assigner.usercode import user_code
from assigner.verification.comparing import Difference, Item, Moment, differing
from assigner.verification.exercise import ComparableDraws, SideGenerators

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from assigner.model.marking import PartitionGraph
    from assigner.runtime.batch.microbatch import MicroBatch
    from assigner.verification.exercise import Exercise


def forward_differences(exercise: Exercise) -> list[Difference]:
    """What differs between the outputs of the model and those of its partitions, for the first batch's micro-batches.

    Raises:
        MarkingError: the forward cannot be cut for these micro-batches.
        UsageError: the plain model's forward fails; the message has its line.
    """
    return [each for place in range(len(exercise.cut(0))) for each in _of(exercise, place)]


def _of(exercise: Exercise, place: int) -> Iterator[Difference]:
    """The differences of one micro-batch; each side gets a copy of it."""
    graph, cut = exercise.graph, exercise.cut(0)[place]
    if not graph.domain.admits(input_key(cut.structure, cut.inputs)):
        graph = recut(graph, cut.structure, cut.inputs, training=True)

    def leaves(outputs: Any) -> dict[Item, torch.Tensor]:
        return {
            Item("output", graph.last.name, f"{pytree.keystr(path)} of micro-batch {place}"): leaf
            for path, leaf in pytree.tree_leaves_with_path(outputs)
            if isinstance(leaf, torch.Tensor)
        }

    plain = leaves(_streamed(exercise, cut))
    with SideGenerators(2).in_use(), torch.no_grad():
        mine = leaves(graph.rebuild_output(_chained(graph, exercise.cut(0)[place].inputs)))
    return differing(Moment("step"), {**plain, **mine}, plain.get, mine.get)


def _streamed(exercise: Exercise, cut: MicroBatch) -> Any:
    """The outputs of the model itself."""
    deferred = exercise.graph.deferred
    model = own_copy(deferred.model, "", {})
    names = {name for piece in exercise.graph.pieces for name in piece.called}
    inside = tuple(f"{name}." for name in names)
    _put(model, deferred.materialise(name for name in deferred.tensors() if not name.startswith(inside)))

    def fill(prefix: str, *_: object) -> None:
        with _disable_current_modes():  # the draws of initial values are their own
            _put(model, deferred.materialise(name for name in deferred.tensors() if name.startswith(prefix)))

    def empty(prefix: str, *_: object) -> None:
        _put(model, {name: each for name, each in deferred.tensors().items() if name.startswith(prefix)})

    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(partial(fill, f"{name}."))
        module.register_forward_hook(partial(empty, f"{name}."))
    args, kwargs = pytree.tree_unflatten(cut.inputs, cut.structure)
    with (
        forwards_called([model.get_submodule(name) for name in names]), SideGenerators(1).in_use(), torch.no_grad(),
        ComparableDraws(0), casting(exercise.workload.autocast, "cpu"), user_code("the plain model's forward"),
    ):  # fmt: skip
        return model(*args, **kwargs)


def _put(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    put((*slot_of(model, name), tensor) for name, tensor in tensors.items())


def _chained(graph: PartitionGraph, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """What the last partition returns; values go on as copies, and are dropped behind their last reader."""
    values: dict[Value, torch.Tensor] = {}
    readers = {value: piece.name for piece in graph.pieces for value in piece.reads}
    outputs: tuple[torch.Tensor, ...] = ()
    stores = StepStores()
    for piece in graph.pieces:
        stores.enter(first=True)
        module = graph.build([piece.name])[piece.name]
        reads = [values[value].clone() if value.partition else inputs[value.index] for value in piece.reads]
        with casting(piece.autocast, "cpu"), ComparableDraws(0):
            outputs = module(*reads, *(size.evaluate(inputs) for size in piece.sizes))
        values.update({Value(piece.name, index): each.contiguous() for index, each in enumerate(outputs)})
        for value in piece.reads:
            if readers[value] == piece.name:
                values.pop(value, None)
    return outputs
