"""What a step or an evaluation gives: the loss, a number like any other, with what else is known of the batch.

Metrics are called on the rank that makes the model's output, as often as the loss, and seen by nobody. They see what
the last partition made before the loss does, which may write there; in a rematerialised partition that is its first
forward's. Their values stay where they are made until the step has ended: nothing waits for a GPU.

The ranks that make the model's output add up what they see of it. Their numbers reach every rank, in one message of
each:

    loss    losses with a gradient    weight    and for each metric, by name: total    number    calls    pairs

A metric that gives numbers has its weighted ones in `total`, one that gives pairs has their counts in `number`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from assigner.errors import Otherwise, UsageError
from assigner.runtime.forward.randomness import kept_generators, seed_device, seed_python
from assigner.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from assigner.model.workload import Metric, Workload
    from assigner.runtime.ranks.membership import Membership

Number = float | torch.Tensor

_HINT = "a metric is called as the loss is, with the outputs and targets of a micro-batch (loss_over='batch': of all)"


class MetricTotal(NamedTuple):
    """What a metric's values add up to; all of it can be added to another's."""

    total: float = 0.0  # of numbers, each with its micro-batch's weight, or of the pairs' totals
    number: float = 0.0  # of the pairs' counts
    calls: float = 0.0  # how often the metric was called
    pairs: float = 0.0  # how often it gave a pair

    def value(self, name: str) -> float:
        """Over the batch.

        Raises:
            UsageError: the metric, of this name, gave a number here and a pair there.
        """
        if 0 < self.pairs < self.calls:
            raise UsageError(
                f"Workload.metrics[{name!r}] gave a number for some micro-batches and a pair for others",
                hint="return a number always, or (total, count) always",
            )
        if not self.pairs:
            return self.total
        return self.total / self.number if self.number else math.nan


_LOSS = "the loss that a step returns"


class StepResult(float):
    """The loss of a step or of an evaluation, a float, with what else is known of the batch.

    A script that saves it with torch.save saves `float(result)`: torch.load takes classes of torch's own alone.

    Attributes:
        metrics: Each of `Workload.metrics` over the batch, by name; the same on every rank.
        outputs: The model's output, where `outputs_to` asked for it; else None.
        weight: What the batch counts for beside others: the sum of `Workload.weight` over it, else its rows.
    """

    backward = Otherwise(_LOSS, "leave it out: step has run all backwards, and updated unless it got update=False")
    item = Otherwise(_LOSS, "it is a number already, the same on every rank: float(loss)")
    detach = Otherwise(_LOSS, "it is a number already, the same on every rank: float(loss)")
    metrics: dict[str, float]
    outputs: Any
    weight: float
    _summed: bool
    _totals: dict[str, MetricTotal]

    def __new__(
        cls,
        loss: float = 0.0,
        *,
        weight: float = 1.0,
        summed: bool = False,
        totals: Mapping[str, MetricTotal] | None = None,
        outputs: Any = None,
    ) -> StepResult:
        """As the pipeline makes it; the metrics follow from what their values add up to."""
        made = super().__new__(cls, loss)
        made.weight, made.outputs, made._summed, made._totals = weight, outputs, summed, dict(totals or {})
        made.metrics = {name: each.value(name) for name, each in made._totals.items()}
        return made

    @classmethod
    def over(cls, results: Iterable[StepResult]) -> StepResult:
        """Several batches as one: `StepResult.over(pipeline.evaluate(batch) for batch in loader)`.

        Losses and metrics that are numbers count by their batches' weights (summed ones add up), pairs by their
        counts: as if all rows had been in one batch, also where the last one is smaller.

        Args:
            results: Of steps or evaluations of one workload; one at a time is held.

        Returns:
            Their loss, metrics and weight, without outputs.

        Raises:
            UsageError: there are none, one is no `StepResult`, or they are of unlike workloads.
        """
        kept = [(float(each), each.weight, each._summed, each._totals) for each in map(_checked, results)]
        if not kept:
            raise UsageError("there are no results to put together", hint="the loader gave no batch")
        _, _, summed, first = kept[0]
        if any(each[2] != summed or each[3].keys() != first.keys() for each in kept):
            raise UsageError("results of unlike workloads cannot be put together", hint="their metrics differ")
        weights = [weight for _, weight, _, _ in kept]
        shares = [1.0] * len(kept) if summed else [weight / math.fsum(weights) for weight in weights]
        return cls(
            exact_sum(share * loss for share, (loss, *_) in zip(shares, kept, strict=True)),
            weight=math.fsum(weights),
            summed=summed,
            totals={name: _over([each[3][name] for each in kept], shares) for name in first},
        )


def _checked(result: StepResult) -> StepResult:
    if isinstance(result, StepResult):
        return result
    raise UsageError(
        f"StepResult.over: {result!r} is a {type(result).__name__}, and no result of a step",
        hint="give what pipeline.step and pipeline.evaluate return, as it is: a plain number has no weight",
    )


def _over(totals: Sequence[MetricTotal], shares: Sequence[float]) -> MetricTotal:
    """Of several batches, of which numbers count by their shares and pairs as they are."""
    scaled = [
        each if each.pairs else each._replace(total=share * each.total)
        for each, share in zip(totals, shares, strict=True)
    ]
    return MetricTotal(*map(exact_sum, zip(*scaled, strict=True)))


def exact_sum(numbers: Iterable[float]) -> float:
    """As math.fsum; infinities of both signs, which that refuses to add, are nan."""
    found = list(numbers)
    return math.fsum(found) if all(map(math.isfinite, found)) else sum(found)


def added(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """What two parts of a batch add up to, as numbers of a message."""
    return [mine + others for mine, others in zip(one, other, strict=True)]


def nothing(workload: Workload) -> list[float]:
    """The numbers of a rank that sees no outputs."""
    return [0.0] * (3 + len(MetricTotal._fields) * len(workload.metrics or ()))


def check_trained(numbers: Sequence[float]) -> None:
    """Refuse a step over losses of which none has a gradient."""
    if not numbers[1]:
        raise UsageError(
            "the loss requires no gradient: a step would train nothing, and a plain backward fails here",
            hint="see whether all parameters behind it are frozen, the output is detached, or the loss is computed"
            " under torch.no_grad(); what a step need not train, evaluate(batch) computes",
        )


def shared_result(
    found: Mapping[int, Sequence[float]], workload: Workload, member: Membership, *, training: bool
) -> StepResult:
    """The result of a batch on every rank.

    `found` has the numbers of the ranks that make the model's output; those of others need not be known here.

    Raises:
        UsageError: a metric gave numbers and pairs; or no loss of a step has a gradient.
    """
    numbers = nothing(workload)
    for of_rank in member.numbers_of(found).values():
        numbers = added(numbers, of_rank)
    if training:
        check_trained(numbers)
    loss, _, weight, *rest = numbers
    size = len(MetricTotal._fields)
    made = {
        name: MetricTotal(*rest[n * size : (n + 1) * size]) for n, name in enumerate(sorted(workload.metrics or ()))
    }
    totals = {name: made[name] for name in workload.metrics or ()}
    return StepResult(loss, weight=weight, summed=workload.reduction == "sum", totals=totals)


class StepMetrics:
    """The metrics of a step, or of an evaluation."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._metrics, self._device = metrics, device
        self.begin()

    def begin(self) -> None:
        """A step comes next."""
        self._seen: dict[str, list[tuple[float, Number, Number | None]]] = {name: [] for name in self._metrics}

    def see(self, outputs: Any, targets: Any, weight: float, seed: int = 0) -> None:
        """Call them.

        `weight`: what a number counts for; 0: for nothing, whatever it is. `seed`: of what they draw.

        Raises:
            UsageError: a metric fails, gives something else than a number or a pair of them, or writes into what it is
                given.
        """
        with torch.no_grad(), kept_generators(self._device, draws=True):
            seed_device(seed, self._device)
            seed_python(seed)
            for name, metric in self._metrics.items():
                mine = pytree.tree_map_only(torch.Tensor, _detached, (outputs, targets))
                tensors = (each for each in pytree.tree_leaves(mine) if isinstance(each, torch.Tensor))
                given = [each for each in tensors if not each.is_inference()]
                before = [each._version for each in given]
                with user_code(f"Workload.metrics[{name!r}]", hint=_HINT):
                    made = metric(*mine)
                self._seen[name].append((weight, *_number_or_pair(made, name)))
                if [each._version for each in given] != before:
                    raise UsageError(
                        f"Workload.metrics[{name!r}] writes into the outputs or the targets that it is given",
                        hint="the loss and its gradients would see that: have it work on a copy, outputs.clone()",
                    )

    def numbers(self) -> list[float]:
        """What their values add up to, in the order of the names."""
        return [number for name in sorted(self._seen) for number in _total(self._seen[name])]


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Without its graph; a copy where torch counts no writes: in its inference mode, and through NumPy on the CPU."""
    return tensor.detach().clone() if tensor.is_inference() or tensor.device.type == "cpu" else tensor.detach()


def _total(values: list[tuple[float, Number, Number | None]]) -> MetricTotal:
    pairs = [(float(total), float(count)) for _, total, count in values if count is not None]
    numbers = [weight * float(value) for weight, value, count in values if count is None and weight]
    parts = [*numbers, *(total for total, _ in pairs)]
    return MetricTotal(exact_sum(parts), exact_sum(count for _, count in pairs), len(values), len(pairs))


def _number_or_pair(made: Any, name: str) -> tuple[Number, Number | None]:
    """A number, and None or the count that it is to be divided by."""
    if isinstance(made, tuple | list) and len(made) == 2:
        return _number(made[0], name, "a total that is "), _number(made[1], name, "a count that is ")
    return _number(made, name, ""), None


def without_values(what: str) -> UsageError:
    """An error of what computes with tensors that the builder has made beside the model."""
    return UsageError(
        f"{what} computes with a tensor that Workload.model has made, where tensors have no values (the meta device)",
        hint="return what it needs from the model's forward; a teacher is made outside of Workload.model, and weights"
        " decay in the optimizer (weight_decay)",
    )


def _number(made: Any, name: str, what: str) -> Number:
    if isinstance(made, torch.Tensor) and made.is_meta:
        raise without_values(f"Workload.metrics[{name!r}]")
    if isinstance(made, torch.Tensor) and not made.dim() and not made.is_complex():
        return made.detach().clone()  # a running sum moves on, and a view keeps all outputs
    if isinstance(made, bool | int | float | np.bool_ | np.integer | np.floating):
        return float(made)
    if isinstance(made, torch.Tensor | np.ndarray):
        kind = f"{'a tensor' if isinstance(made, torch.Tensor) else 'an array'} of shape {tuple(made.shape)}"
        kind += f" and type {made.dtype}"
    else:
        kind = f"a {type(made).__name__}" + (f" of {len(made)}" if isinstance(made, tuple | list) else "")
    raise UsageError(
        f"Workload.metrics[{name!r}] gave {what}{kind if made is not None else 'None'}",
        hint="return a number, or (total, count)",
    )
