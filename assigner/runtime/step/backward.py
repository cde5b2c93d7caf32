"""What a backward finds of its partitions, and must leave: they are as its own forward left them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.model.deferred.memento import Memento
    from assigner.runtime.forward.state import PartitionState
    from assigner.runtime.step.partition import PartitionRunner


Watched = tuple["PartitionRunner", bool]
"""A partition that a backward goes through, and may not change; and whether to look at Python values beside tensors."""


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
    """Say in words what torch raises for a tensor that was saved and has changed, where a later forward changed it.

    Args:
        overwritten: The partition whose forward did, and the tensor's name; None: none was.
    """
    try:
        yield
    except RuntimeError as error:
        if overwritten is not None and "modified by an inplace operation" in str(error):
            raise overwritten_error(*overwritten) from error
        raise


@contextlib.contextmanager
def restored(values: Sequence[Memento]) -> Iterator[None]:
    """Python values as forwards have left them while the block runs."""
    with contextlib.ExitStack() as stack:
        for each in values:
            stack.enter_context(each.restored())
        yield


@contextlib.contextmanager
def unchanged_by_backward(watched: Sequence[Watched], whole: PartitionState | None = None) -> Iterator[None]:
    """A backward that finds partitions as their forwards left them must not change them: it would be undone.

    Or it would come in another order than in training without a plan, where each forward finds what the backward of
    the micro-batch before it has left.

    Args:
        watched: The partitions.
        whole: The state of all of them, if there is one.

    Raises:
        UsageError: it does.
    """
    states = [whole] if whole is not None and watched else [each.state for each, _ in watched]
    counts = [(each, each.last_counts()) for each in states]
    values = [(each.piece.name, each.state.values()) for each, shows_values in watched if shows_values]
    yield
    changed = [tensor for state, before in counts for tensor in state.changed_since(before)]
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
