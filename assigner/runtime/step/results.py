"""What a step or an evaluation gives: the loss, a number like any other, with what else is known of the batch.

The ranks that make the model's output add up what they see of it. Their numbers reach every rank, in one message of
each:

    loss    losses with a gradient    weight    and for each metric, by name: total    number    calls    pairs

A metric that gives numbers has its weighted ones in `total`, one that gives pairs has their counts in `number`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from assigner.errors import Otherwise, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from assigner.model.workload import Workload
    from assigner.runtime.ranks.membership import Membership


class MetricTotal(NamedTuple):
    """What a metric's values add up to; all of it can be added to another's.

    Args:
        total: Of numbers, each with its micro-batch's weight, or of the pairs' totals.
        number: Of the pairs' counts.
        calls: How often the metric was called.
        pairs: How often it gave a pair.
    """

    total: float = 0.0
    number: float = 0.0
    calls: float = 0.0
    pairs: float = 0.0

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
    """Refuse a step over losses of which none has a gradient.

    Raises:
        UsageError: so it is.
    """
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

    Args:
        found: By the ranks that make the model's output: their numbers; those of others need not be known here.
        workload: The metrics.
        member: This process in the run.
        training: It is a step's.

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
