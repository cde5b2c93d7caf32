"""Two sides, step by step side by side: what is compared, what of it differs, and by how much.

Losses, outputs, gradients, buffers and parameters are compared, each under the partition that holds it.

Nothing is kept of the sides but the differences. Whether one counts is asked in two stages. First against a floor: some
units in the last place of the largest number in the tensor, which sums in another order may differ by. What is above
it is held against the noise: how far the plain model moves away from itself where each of its parameters is off by
one unit in the last place. So an error of 3e-5 is found in float32, and a model that multiplies errors is no alarm.

Gradients below the floor are made equal before they are applied: AdamW's first step is nearly the gradient's sign, so
that 1e-12 beside -1e-12 become parameters that are two learning rates apart, and everything behind them would differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from assigner.errors import MarkingError
from assigner.verification.exercise import STEPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from assigner.model.marking import PartitionGraph
    from assigner.verification.exercise import Exercise
    from assigner.verification.partitions import Partitions
    from assigner.verification.plain import PlainModel

Side: TypeAlias = "PlainModel | Partitions"
"""A way to train the model: as it is, or cut into partitions."""
Quantity = Literal["initial value", "loss", "output", "gradient", "buffer", "parameter"]
Phase = Literal["start", "step", "evaluation"]
_FLOOR = 8
_NOISE = 16
_PART = 1 << 16  # numbers that are compared at a time: they and their difference stay in a core's cache


class Item(NamedTuple):
    """One value that both sides have."""

    quantity: Quantity
    partition: str  # the one that holds it
    name: str = ""  # of the parameter or buffer in the model; of an output its place

    def __str__(self) -> str:
        if self.quantity == "loss":
            return "the loss"
        if self.quantity == "output":
            return f"the model's output{self.name}"
        return {"gradient": "the gradient of ", "parameter": "", "buffer": "buffer ", "initial value": ""}[
            self.quantity
        ] + self.name


class Moment(NamedTuple):
    """When a value is looked at."""

    phase: Phase  # before the first step, after a step or in eval mode after the last one
    step: int = 0

    def __str__(self) -> str:
        return {"start": "before training", "evaluation": f"in eval mode after {STEPS} steps"}.get(
            self.phase, f"in step {self.step + 1} of {STEPS}"
        )


@dataclass(frozen=True)
class Difference:
    """A value that is not the same on both sides."""

    moment: Moment
    item: Item
    largest: float  # absolute difference of its numbers; infinite: another shape, no value or other whole numbers
    scale: float  # the largest absolute number in it
    epsilon: float  # the relative step between neighbouring numbers of its type

    def counts(self, noise: float | None = None) -> bool:
        """Whether rounding does not explain it.

        Args:
            noise: By how much the plain model differs from itself there; None: that is not known yet.
        """
        return self.largest > max(_FLOOR * self.epsilon * self.scale, 0.0 if noise is None else _NOISE * noise)


def held_items(graph: PartitionGraph, quantity: Quantity) -> Iterator[Item]:
    """The parameters of all partitions, or their buffers, or both (the initial values)."""
    for piece in graph.pieces:
        for name in {"buffer": piece.buffers, "initial value": piece.state}.get(quantity, piece.parameters):
            yield Item(quantity, piece.name, name)


@dataclass
class HeardLoss:
    """A workload's loss that keeps what it is given in eval mode: the model's outputs for each micro-batch.

    In training it need not: gradients tell of outputs, and a recompute asks for losses in another order.
    """

    loss: Callable[[Any, Any], torch.Tensor] | None  # the workload's; None: the model is used for its outputs alone
    listens: bool = False  # calls are kept
    heard: list[Any] = field(default_factory=list)  # the outputs, by micro-batch
    dtype: torch.dtype = torch.float64  # of the loss

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The loss's value; 0 where there is none."""
        if self.listens:
            self.heard.append(pytree.tree_map_only(torch.Tensor, lambda each: each.detach().clone(), outputs))
        value = torch.zeros((), device="cpu") if self.loss is None else self.loss(outputs, targets)
        self.dtype = getattr(value, "dtype", self.dtype)  # what is no tensor is refused by who asked
        return value

    def begin(self, *, listens: bool) -> None:
        """Forget what was heard, and keep what is said from now on or do not."""
        self.heard, self.listens = [], listens

    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors and numbers among the outputs, by micro-batch and place."""
        return {
            f"{pytree.keystr(path)} of micro-batch {n}": leaf
            if isinstance(leaf, torch.Tensor)
            else torch.tensor(leaf, device="cpu")
            for n, outputs in enumerate(self.heard)
            for path, leaf in pytree.tree_leaves_with_path(outputs)
            if isinstance(leaf, torch.Tensor | bool | int | float)
        }


def differences(
    exercise: Exercise, plain: PlainModel, others: Sequence[Side], *, evaluates: bool, aligns: bool = True
) -> list[list[Difference]]:
    """Train and evaluate the sides side by side.

    Args:
        exercise: What to train on.
        plain: The plain model.
        others: What is compared with it.
        evaluates: False: training alone.
        aligns: The others apply the plain model's gradients where their own differ by rounding alone.

    Returns:
        For each of the others all that is not the same to the last bit, in the order in which it came to be.
    """
    found: list[list[Difference]] = [[] for _ in others]

    def look(n: int, moment: Moment, items: Iterator[Item]) -> None:
        found[n] += differing(moment, items, plain.look, others[n].look)

    for n in range(len(others)):
        look(n, Moment("start"), held_items(exercise.graph, "initial value"))
    for step in range(STEPS if exercise.trains else 0):
        moment = Moment("step", step)
        plain.train(step)
        for n, other in enumerate(others):
            other.train(step)
            look(n, moment, _made(exercise, plain, loss=True))
            apart = list(differing(moment, held_items(exercise.graph, "gradient"), plain.look, other.look))
            found[n] += apart
            if aligns:
                align(plain, other, apart)
            look(n, moment, held_items(exercise.graph, "buffer"))
            other.update()
        plain.update()
        for n in range(len(others)):
            look(n, moment, held_items(exercise.graph, "parameter"))
    if evaluates:
        plain.evaluate()
        for n, other in enumerate(() if plain.unevaluated else others):
            other.evaluate()
            look(n, Moment("evaluation", STEPS), _made(exercise, plain, loss=exercise.workload.loss is not None))
    return found


def differing(moment: Moment, items: Iterable[Item], one: _Look, two: _Look) -> Iterator[Difference]:
    """Which of some values differ, of which `one` and `two` give each side's."""
    for item in items:
        apart = difference(moment, item, one(item), two(item))
        if apart is not None:
            yield apart


_Look = Callable[[Item], torch.Tensor | None]
"""Gives a value of one side; None: there is none."""


def align(plain: PlainModel, other: Side, gradients: Iterable[Difference]) -> None:
    """Make those gradients of a side that differ by rounding alone equal to the plain model's.

    An optimizer may treat no gradient unlike one of zeros, and a sparse one unlike a dense one: those stay.
    """
    for each in gradients:
        source, target = plain.look(each.item), other.look(each.item)
        if each.counts() or source is None or target is None:
            continue
        if source.layout is target.layout is torch.strided:
            target.detach().copy_(source.detach())


def _made(exercise: Exercise, plain: PlainModel, *, loss: bool) -> Iterator[Item]:
    """The loss, and the outputs that the plain model gave."""
    last = exercise.graph.last.name
    if loss:
        yield Item("loss", last)
    for name in plain.outputs():
        yield Item("output", last, name)


def difference(moment: Moment, item: Item, one: torch.Tensor | None, two: torch.Tensor | None) -> Difference | None:
    """How far two values are apart; None: they are the same to the last bit, or there is none on both sides."""
    if one is None and two is None:
        return None
    one, two = _plain_values(one, two), _plain_values(two, one)
    alike = one.shape == two.shape and one.dtype == two.dtype
    if alike and (one.numel() == 0 or torch.equal(one, two)):
        return None
    largest, scale = _apart(one, two) if alike and one.is_floating_point() else _NOTHING
    epsilon = torch.finfo(one.dtype).eps if math.isfinite(largest) else 0.0
    return Difference(moment, item, largest, scale, epsilon) if largest else None


_NOTHING = math.inf, 1.0
"""The difference and the scale of what cannot be compared."""


def _apart(one: torch.Tensor, two: torch.Tensor) -> tuple[float, float]:
    """The largest difference and the largest number, of floating-point numbers in one shape."""
    wide = torch.promote_types(one.dtype, torch.float32)
    parts = [each.reshape(-1).split(_PART) for each in (one, two)]  # type: ignore[no-untyped-call]
    largest = _reach(mine.to(wide) - theirs.to(wide) for mine, theirs in zip(*parts, strict=True))
    if math.isfinite(largest):
        return largest, max(_reach(part.to(wide) for part in each) for each in parts)
    one, two = one.to(wide), two.to(wide)
    if bool((one.isnan() != two.isnan()).any()):
        return _NOTHING
    same = (one == two) | one.isnan()  # the same infinity is no difference
    apart = (one - two).abs().masked_fill(same, 0.0)
    return float(apart.max()), max(float(each.abs().nan_to_num(nan=0.0, posinf=0.0).max()) for each in (one, two))


def _reach(parts: Iterable[torch.Tensor]) -> float:
    """The largest absolute number in some tensors; no number where one of them has such."""
    return float(torch.stack([torch.stack(torch.aminmax(part)).abs().amax() for part in parts]).amax())


def _plain_values(tensor: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor:
    """Dense real numbers; of a gradient that is not there, zeros."""
    if tensor is None:
        assert other is not None
        return torch.zeros_like(_plain_values(other, other))
    if isinstance(tensor, FakeTensor):
        raise MarkingError(
            "the forward reads a tensor that it has kept since the capture, and that has no values: a cache outside of"
            " the modules (functools.cache, a global) holds it",
            hint="keep it in a buffer of the module, or make it anew in each forward",
        )
    found = tensor.detach()
    found = found.to_dense() if found.layout is not torch.strided else found
    return torch.view_as_real(found.resolve_conj()) if found.is_complex() else found


def is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two values differ by no more than sums in another order may."""
    apart = difference(Moment("step"), Item("output", ""), one, two)
    return apart is None or not apart.counts()


def refusal(first: Difference, *, only_recomputed: bool, begins: str | None) -> MarkingError:
    """The error for a model that would train something else.

    Args:
        first: The first value that differs.
        only_recomputed: Without rematerialisation it does not.
        begins: Where it begins; None: that was not found.
    """
    how = (
        "cannot be compared (another shape or type, or only one of them has numbers in some places)"
        if math.isinf(first.largest)
        else f"differs by {first.largest:.3g}, and its largest number is {first.scale:.3g}"
    )
    where = f" of partition {first.item.partition!r}" if first.item.quantity not in ("loss", "output") else ""
    remat = ", where partitions are rematerialised (without, it is right)" if only_recomputed else ""
    beginning = f"; {begins}" if begins else ""
    return MarkingError(
        f"cut into partitions the model computes something else than as it is{remat}: {first.moment},"
        f" {first.item}{where} {how}{beginning}",
        hint=_hint(first, only_recomputed=only_recomputed),
    )


def _hint(first: Difference, *, only_recomputed: bool) -> str:
    if first.item.quantity == "initial value":
        return "the builder must make the same model each time: seed every generator that it draws from"
    if first.item.quantity == "parameter":
        return (
            "the gradients were equal, so it is the optimizer: each worker's sees its own partitions alone; one that"
            " looks at all parameters (a norm over them, a global step size) cannot run so; clip with"
            " pipeline.step(batch, max_norm=...)"
        )
    if only_recomputed:
        return (
            "a recomputed forward must do what the first one did: no history, no counters outside of buffers, no draws"
            ' of its own; or mark it with partition(module, rematerialise="never")'
        )
    return (
        "move what differs into one marked module, or mark a larger one that contains it; partitions share nothing but"
        " the tensors that they hand on"
    )
