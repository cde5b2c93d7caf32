"""A placement without any shape: stages in a topological order, each on some worker, with what they rematerialise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.solver.problem.prices import PriceTable, bits
from assigner.solver.problem.set_memory import Masks, SetMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.terms import Schedule

Stages = tuple[tuple[int, int], ...]
"""(worker, mask of positions) of each stage, in a topological order."""


@dataclass(frozen=True)
class Arrangement:
    """Stages, priced.

    Args:
        table: The prices.
        stages: The stages.
        again: Of each stage the mask of what it rematerialises.
        value_s: The step time, or that of M micro-batches in the steady state, in seconds.
    """

    table: PriceTable
    stages: Stages
    again: Masks
    value_s: float

    def plan(self, schedule: Schedule) -> Plan:
        """The plan, without a prediction."""
        problem, order = self.table.problem, self.table.problem.options.order
        names = [self.table.names[worker] for worker, _ in self.stages]
        rows = list(zip(names, [mask for _, mask in self.stages], self.again, strict=True))
        if order:
            rows.sort(key=lambda row: order.index(row[0]))  # every value goes along that order: still topological
        return Plan(
            workload=problem.workload,
            objective=problem.options.objective,
            schedule=schedule,
            micro_batches=self.table.micro_batches,
            micro_batch_size=self.table.size,
            stages=tuple(
                Stage(
                    name,
                    tuple(problem.order[i] for i in bits(mask)),
                    tuple(problem.order[i] for i in bits(again)),
                    threads=problem.profile.worker[name].threads,
                )
                for name, mask, again in rows
            ),
        )


def held_stages(stages: Stages) -> dict[int, list[int]]:
    """Of each worker the numbers of its stages."""
    held: dict[int, list[int]] = {}
    for n, (worker, _) in enumerate(stages):
        held.setdefault(worker, []).append(n)
    return held


def joined(stages: Stages, chosen: Sequence[Masks]) -> Masks:
    """What each stage rematerialises, from what the stages of each worker do, in the order of `held_stages`."""
    again = [0] * len(stages)
    for numbers, masks in zip(held_stages(stages).values(), chosen, strict=True):
        for n, mask in zip(numbers, masks, strict=True):
            again[n] = mask
    return tuple(again)


def cheapest_again(memory: SetMemory, stages: Stages, in_flight: int | None = None) -> Masks | None:
    """What each stage rematerialises for the least added time; None: they do not fit. In flight as of `SetMemory`."""
    chosen = []
    for worker, numbers in held_stages(stages).items():
        cheapest = memory.cheapest(worker, tuple(stages[n][1] for n in numbers), in_flight)
        if cheapest is None:
            return None
        chosen.append(cheapest)
    return joined(stages, chosen)


def again_s(memory: SetMemory, stages: Stages, again: Masks) -> tuple[float, ...]:
    """Seconds that each stage's backward takes longer."""
    return tuple(memory.again_s(worker, list(bits(mask))) for (worker, _), mask in zip(stages, again, strict=True))
