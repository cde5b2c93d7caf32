"""What stands in a partition's graph for writes, hooks and stores, as functions that give their results.

Each is made for one place in the graph. None of them changes what it is given, but the stores, which change the
parameter or buffer that they are named for.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from assigner.errors import UsageError
from assigner.model.deferred.mutation import fresh_values, is_random, returned_arguments, written_names
from assigner.model.marking.changedarguments import Slot, fill

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_mapped: Callable[[Any, Callable[[fx.Node], Any]], Any] = fx.map_arg


@dataclass(frozen=True)
class ViewStep:
    """One view of a tensor.

    Args:
        target: The operation.
        args: Its arguments, with a Slot where the tensor stands, its parent, and within a write for other operands.
        kwargs: Likewise.
        detached: It is made under no_grad.
    """

    target: Any
    args: Any
    kwargs: Any
    detached: bool

    @classmethod
    def of(cls, node: fx.Node, parent: fx.Node, now: Callable[[fx.Node], Any], *, detached: bool) -> ViewStep:
        """The view that a node takes of `parent`; its other arguments are what `now` says."""
        slot = Slot("parent", 0)
        args, kwargs = _mapped((node.args, node.kwargs), lambda each: slot if each is parent else now(each))
        return cls(node.target, args, kwargs, detached)

    def filled(self, parent: Any, operands: Sequence[Any] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for a source."""
        args, kwargs = fill((self.args, self.kwargs), parent=(parent,), operand=operands)
        return tuple(args), dict(kwargs)


class _Overwritten(torch.autograd.Function):
    """Other values in the place of a tensor's: the gradient passes as if they were its own."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - takes the gradient
        return values.view_as(values)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0], None


_overwritten: Callable[..., torch.Tensor] = _Overwritten.apply


def write(
    node: fx.Node,
    written: Sequence[fx.Node],
    views: Sequence[tuple[int, Sequence[ViewStep]]],
    read: Callable[[fx.Node], Any],
    *,
    count: int,
    without_gradient: bool,
) -> tuple[Callable[..., Any], list[fx.Node]]:
    """A writing operation as a function of the tensors that it writes to and of its other operands.

    Args:
        node: The operation in the exported graph.
        written: The nodes that it writes to, in the order of its arguments.
        views: For each of them which base it is a view of, and how.
        read: The node that shows a node's value.
        count: How many bases there are.
        without_gradient: It runs under no_grad.

    Returns:
        The function of (*bases, *operands), which gives new bases and then what the operation makes besides; and the
        operands.
    """
    operands: list[fx.Node] = []

    def operand(value: Any) -> Slot:
        operands.append(value)
        return Slot("operand", len(operands) - 1)

    target: Any = node.target
    names = set(written_names(target, node.args, node.kwargs))
    named = [argument.name for argument in target._schema.arguments]
    turn = iter(range(len(written)))

    def template(name: str, value: Any) -> Any:
        if name in names:
            return _mapped(value, lambda _: Slot("target", next(turn)))
        return _mapped(value, lambda each: operand(read(each)))

    args = tuple(template(name, value) for name, value in zip(named, node.args, strict=False))
    kwargs = {name: template(name, value) for name, value in node.kwargs.items()}
    paths = [(base, [_with_operands(step, operand) for step in steps]) for base, steps in views]
    returned = returned_arguments(target)

    def apply(*values: Any) -> tuple[Any, ...]:
        bases, others = values[:count], values[count:]
        with torch.no_grad() if without_gradient else contextlib.nullcontext():
            copies = [base.clone() for base in bases]
            targets = [_view(copies[base], steps, others) for base, steps in paths]
            given, words = fill((args, kwargs), target=targets, operand=others)
            result = target(*given, **words)
        fresh = fresh_values(returned, result)
        if without_gradient:
            copies = [
                _overwritten(base, copy) if base.requires_grad else copy
                for base, copy in zip(bases, copies, strict=True)
            ]
        return (*copies, *fresh)

    steps_named = [str(step.target) for _, steps in views for step in steps]
    text = "_".join(["write", str(target), *steps_named, *(["without_gradient"] if without_gradient else [])])
    apply.__name__ = apply.__qualname__ = "".join(each if each.isalnum() else "_" for each in text)
    apply.is_random = is_random(target)  # type: ignore[attr-defined]
    return apply, operands


def is_write(target: Any) -> bool:
    """Whether a node's target is a function that `write` gives."""
    return isinstance(target, FunctionType) and hasattr(target, "is_random")


def _with_operands(step: ViewStep, operand: Callable[[fx.Node], Slot]) -> ViewStep:
    args, kwargs = _mapped((step.args, step.kwargs), operand)
    return ViewStep(step.target, args, kwargs, step.detached)


def _view(base: torch.Tensor, steps: Sequence[ViewStep], operands: Sequence[Any]) -> Any:
    made: Any = base
    for step in steps:
        args, kwargs = step.filled(made, operands)
        made = step.target(*args, **kwargs)
        if step.detached and isinstance(made, torch.Tensor):
            made = made.detach()
    if not torch.compiler.is_compiling() and made.untyped_storage()._cdata != base.untyped_storage()._cdata:
        raise RuntimeError("a view of the captured forward is a copy here: the write to it would be lost")
    return made


def hooked(hook: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that registers a hook on a tensor and gives the tensor."""

    def register(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return tensor

    register.__name__ = register.__qualname__ = f"hook_{getattr(hook, '__name__', 'function').strip('<>')}"
    return register


def wanted(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that requires a gradient: itself, or where nothing lies behind it, one that ends there."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def still_required(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that required a gradient in the capture, where code between partitions looked at that.

    Raises:
        UsageError: it requires none any more.
    """
    if torch.is_grad_enabled() and not tensor.requires_grad:
        raise decided_otherwise("a tensor between partitions", requires=True)
    return tensor


def decided_otherwise(what: str, *, requires: bool) -> UsageError:
    """Whether something requires a gradient is no more as in the capture."""
    return UsageError(
        f"{what} {'has no' if requires else 'has a'} gradient now, and {'had one' if requires else 'had none'} in the"
        " forward that the model was cut by: what a reentrant checkpoint, or code that asks for requires_grad, does"
        " behind it depends on that",
        hint="checkpoint with use_reentrant=False; or detach, freeze and require gradients alike in each step",
    )


def after(tensor: torch.Tensor, call: Any) -> torch.Tensor:
    """A tensor as it is after a call that has written to it."""
    del call
    return tensor


@dataclass
class StepStores:
    """What the forwards of a step store once, on one worker.

    Args:
        first: The forward is of the step's first micro-batch.
        stored: Which partition has stored into a tensor in this step, by the tensor's id.
        pending: What is stored when the step's forwards are done: tensors and their new values.
        running: Those of the step whose forward runs in this process; None: a graph runs by itself.
    """

    running: ClassVar[StepStores | None] = None
    first: bool = True
    stored: dict[int, str] = field(default_factory=dict)
    pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def enter(self, *, first: bool) -> None:
        """A forward comes next, whose graph finds its worker's stores by this."""
        self.first = first
        StepStores.running = self

    @torch.no_grad()
    def commit(self) -> None:
        """The step's forwards are done: store what waits for that."""
        for state, values in self.pending.values():
            state.copy_(values)
        self.forget()

    def forget(self) -> None:
        """The step is over: nothing is stored any more."""
        self.pending.clear()
        self.stored.clear()
        StepStores.running = None


def snapshot(state: torch.Tensor) -> torch.Tensor:
    """A buffer's or parameter's value before this forward changes it."""
    return state.clone()


def stored(state: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Store what this micro-batch makes of a buffer or parameter."""
    with torch.no_grad():
        state.copy_(values)
    return values


def _store_at_first(state: torch.Tensor, values: torch.Tensor, partition: str = "") -> torch.Tensor:
    stores = StepStores.running
    if stores is not None and not (stores.first and stores.stored.setdefault(id(state), partition) == partition):
        return state
    return stored(state, values)


def _store_at_end(state: torch.Tensor, values: torch.Tensor, partition: str = "") -> torch.Tensor:
    del partition  # all that hold the tensor find the same value
    if StepStores.running is None:
        state.detach().copy_(values)
    elif StepStores.running.first:
        StepStores.running.pending[id(state)] = state, values.detach()
    return values


ONCE = (_store_at_first, _store_at_end)
"""What stores a value that is the same for all micro-batches of a step, once, and gives it.

They are given the tensor, the value and the partition's name. Several partitions of a process may hold the tensor: the
first one that comes stores for all. Its recompute starts from the old value and stores anew. By the second function the
old value, which the forward uses before, stays until the step's forwards are done.
"""
STORES = (stored, *ONCE)
