"""What is kept of a micro-batch's forward for its backward, the backward through it, and what both may not change."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.nn.modules import module

from assigner.errors import UsageError
from assigner.model.deferred.memento import Memento
from assigner.model.singleprocess import as_single_process
from assigner.runtime.forward.heldtensors import HeldTensor, as_they_were
from assigner.runtime.forward.splitbackward import WeightPart
from assigner.runtime.forward.state import ForwardStart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.model.marking import Piece, Value
    from assigner.runtime.forward.state import PartitionState
    from assigner.runtime.step.partition import PartitionRunner


NOTHING = contextlib.nullcontext()


class ForwardPlace(NamedTuple):
    """Which forward this is: the randomness and the micro-batch belong to it."""

    seed: int  # the workload's
    step: int  # the batch's number in training
    micro_batch: int  # its number
    last: bool = False  # it is the step's last one

    @property
    def is_alone(self) -> bool:
        """No other forward of its partitions comes between this one and its backward."""
        return self.last and self.micro_batch == 0


class Postponed(NamedTuple):
    """A backward that is all weight part: the arguments of the one that is to run."""

    output_gradients: Sequence[torch.Tensor | None]
    reads: Sequence[torch.Tensor]
    sizes: Sequence[Any]


@dataclass(slots=True)
class Graph:
    """What the backward of a micro-batch needs: a graph, or what its forward starts from when it runs again."""

    roots: list[GradientEdge | None]  # where it starts, for each output; empty once its input part has run
    held: list[HeldTensor]  # tensors that forwards write, as this one left them
    is_hooked: bool = False  # the forward has hooked on to tensors
    start: ForwardStart | None = None  # from which it runs again, and there is no graph till then; None: it does not
    overwritten: tuple[str, str] | None = None  # a partition, and what a later forward of it wrote without a copy
    values: list[Memento] = field(default_factory=list)  # Python's, as this forward left them, if its backward may read
    rest: WeightPart | Postponed | None = None  # what is left to the weight part; None: no input part has run
    entries: list[set[Node]] = field(default_factory=list)  # where its backward comes into each partition, if asked
    draws: bool = False  # code that is not torch's own may run in its backward, and draw

    def as_left(self) -> contextlib.AbstractContextManager[None]:
        """Python values and tensors as forwards have left them while the block runs."""
        return self._as_left() if self.values or self.held else NOTHING

    @contextlib.contextmanager
    def _as_left(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self.values:
                stack.enter_context(each.restored())
            stack.enter_context(as_they_were(self.held))
            yield

    def given(self, output_gradients: Sequence[torch.Tensor | None]) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where a backward starts, and with what."""
        pairs = zip(self.roots, output_gradients, strict=True)
        both = [(root, gradient) for root, gradient in pairs if root is not None and gradient is not None]
        return [root for root, _ in both], [gradient for _, gradient in both]

    def differentiate(
        self, output_gradients: Sequence[torch.Tensor | None], runners: Sequence[PartitionRunner], micro_batch: int
    ) -> None:
        """A backward through the partitions whose graph this is: those that have statistics know of it."""
        roots, gradients = self.given(output_gradients)
        if not roots:
            return
        counting = [each.statistics for each in runners if each.statistics is not None]
        for statistics in counting:
            statistics.backward_of = micro_batch
        with as_single_process(), NOTHING if self.overwritten is None else in_words(self.overwritten):
            # what torch.autograd.backward calls, without its checks of what a user gives
            _engine_run_backward(
                tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        for statistics in counting:
            statistics.end_backward()


Graphs = dict[tuple[tuple[str, ...], int], Graph]
"""Those under way on a rank, by their partitions and micro-batch."""


def overwritten_error(partition: str, tensor: str) -> UsageError:
    """A forward of a partition writes a tensor, by its name, that graphs under way have saved."""
    return UsageError(
        f"the forward of partition {partition!r} begins to write {tensor} in place while the backwards of earlier"
        " micro-batches, which need what it held, are still to come",
        hint="write it from the first forward on, as with a factor of 0 or 1; or assign a new tensor; or use one"
        " micro-batch (solve with --micro-batches 1)",
    )


@contextlib.contextmanager
def in_words(overwritten: tuple[str, str] | None) -> Iterator[None]:
    """Say in words what torch raises for a tensor that was saved and has changed, where a later forward changed it."""
    try:
        yield
    except RuntimeError as error:
        if overwritten is not None and "modified by an inplace operation" in str(error):
            raise overwritten_error(*overwritten) from error
        raise


class ReadValue(NamedTuple):
    """A value that a forward reads, and may not change."""

    value: Value
    is_shared: bool  # others read it too, and have it from elsewhere, or may


Watched = tuple["PartitionRunner", bool]
"""A partition that a backward goes through, and may not change; and whether to look at Python values beside tensors."""

Facts = tuple[int, bool, int, torch.Size, tuple[int, ...]]
"""What a forward can change of a tensor so that others with the same values do not see it: torch's count of the changes
to its values, whether it requires a gradient, where its values lie, and how."""

_VERSION, _HAS_GRADIENT, _MEMORY = 0, 1, slice(2, None)


def facts_of(tensor: torch.Tensor) -> Facts | None:
    """A tensor as it is now; None: torch does not say how it is, as of a sparse one."""
    if type(tensor) is not torch.Tensor:
        return None
    try:
        return tensor._version, tensor.requires_grad, tensor.data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:
        return None


def check_unchanged(
    piece: Piece,
    watched: Sequence[ReadValue],
    tensors: Sequence[torch.Tensor],
    before: Sequence[Facts | None],
    *,
    runs_again: bool = False,
) -> None:
    """Look at values that a forward has read, beside what they were `before`; `runs_again`: it will be recomputed.

    What a partition does to them would differ from plan to plan: those that are joined have one tensor for a value,
    those elsewhere one of their own, with the part of its gradient that comes from there; and what runs again finds the
    value as its first forward has left it. What a capture sees to be written is written to a copy.

    Raises:
        UsageError: one is no longer what it was, as behind `x.detach_()`, `x.data = ...` or an `x.mul_(2)` that is new.
    """
    now = [facts_of(each) for each in tensors]
    if now == before:
        return
    for (value, is_shared), is_now, was in zip(watched, now, before, strict=True):
        if is_now is None or was is None or is_now == was:
            continue
        if is_now[_VERSION] != was[_VERSION]:
            raise _written_error(piece)
        if (is_now[_MEMORY] != was[_MEMORY] and (is_shared or runs_again)) or (
            is_now[_HAS_GRADIENT] != was[_HAS_GRADIENT] and is_shared and value.partition
        ):
            raise UsageError(
                f"the forward of partition {piece.name!r} changes a value that it reads in its shape or its memory, or"
                " in whether it has a gradient (detach_, set_, resize_, .data =): others that read the value have their"
                " own, and a recompute would change it once more",
                hint="change a value of the partition's own: x = x.detach()",
            )


def written_in_words(error: RuntimeError, piece: Piece, reads: Sequence[torch.Tensor]) -> RuntimeError | UsageError:
    """What to raise in the place of an error of torch's: a write to a leaf is none in the plain model."""
    is_of_leaf = "leaf Variable that requires grad" in str(error) and "in-place operation" in str(error)
    return _written_error(piece) if is_of_leaf and any(each.requires_grad for each in reads) else error


def _written_error(piece: Piece) -> UsageError:
    return UsageError(
        f"the forward of partition {piece.name!r} writes in place to a value that it reads (as x.mul_(2)), and did not"
        " when the model was captured: others that read the value have their own, and a recompute would write it once"
        " more",
        hint="write to a value of the partition's own: x = x.clone(); or write from the first forward on, as with a"
        " factor of 1",
    )


def check_hooks(piece: Piece, reads: Sequence[torch.Tensor]) -> None:
    """Look at the values that a forward has read which has hooked on to tensors.

    Raises:
        UsageError: it has hooked on to one that another partition has made: the hook would see the part of its gradient
            that comes from here, and twice where the forward runs again.
    """
    for value, tensor in zip(piece.reads, reads, strict=True):
        if value.partition and tensor._backward_hooks:
            who, hint = "", "hook on to it where it is made; or on a value of the partition's own, as x = x * 1"
            if on_all := [*module._global_forward_pre_hooks.values(), *module._global_forward_hooks.values()]:
                who = f", or a hook on all modules ({getattr(on_all[0], '__qualname__', type(on_all[0]).__name__)}),"
                hint = (
                    "leave what hooks on to all modules, as FlopCounterMode and ModuleTracker do, for a plain model:"
                    f" it counts the same around workload.model(); a forward: {hint}"
                )
            raise UsageError(
                f"the forward of partition {piece.name!r}{who} hooks on to output {value.index} of partition"
                f" {value.partition!r}: the hook would not act once on the whole gradient",
                hint=hint,
            )


@contextlib.contextmanager
def unchanged_by_backward(watched: Sequence[Watched], whole: PartitionState) -> Iterator[None]:
    """A backward that finds partitions as their forwards left them must not change them: it would be undone.

    Or it would come in another order than in training without a plan, where each forward finds what the backward of
    the micro-batch before it has left.

    Raises:
        UsageError: it does.
    """
    counts = whole.last_counts() if watched else []
    values = [(each.piece.name, each.state.values.now()) for each, shows_values in watched if shows_values]
    yield
    changed = whole.tensors.changed_since(counts) if watched else []
    for each, _ in watched if changed else ():
        if any(map(each.state.tensors.holds, changed)):
            raise UsageError(
                f"the backward of partition {each.piece.name!r} changes a buffer or a weight (a Function's backward,"
                " a hook, or a checkpoint's recompute, as of a BatchNorm): with rematerialisation, or with several"
                " micro-batches under way, that would be lost",
                hint="change it in forward, and leave checkpoints to the plan (or batch_norm='deferred'); or"
                " assigner.partition(..., rematerialise='never') and one micro-batch",
            )
    for name, before in values:
        if before.has_changed(ignoring="tensors"):
            raise UsageError(
                f"the backward of partition {name!r} changes what its modules keep beside tensors (a hook,"
                " a Function's backward, a checkpoint's recompute): with rematerialisation, or with several"
                " micro-batches under way, its forwards would find something else there than without a plan",
                hint="what is only noted for the script goes outside the modules, as to a list of the hook's own; what"
                " backwards compute with must not go by how many came before: keep that in forward, or"
                " assigner.partition(..., rematerialise='never') and one micro-batch",
            )
