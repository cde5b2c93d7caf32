"""A whole pipeline with its step time, and the plan that it becomes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.plan import Plan, Stage
from assigner.schedule import build_program
from assigner.simulate import run_program
from assigner.solver.chain.formula import turn_steps_s
from assigner.solver.instance import Instance
from assigner.solver.segments import Column

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.solver.instance import Hop


@dataclass(frozen=True)
class Placement:
    """Columns in the order of their positions, priced.

    Args:
        instance: What they belong to.
        columns: The stages.
        step_s: The step time, in seconds; inf: two workers that must talk have no link.
    """

    instance: Instance
    columns: tuple[Column, ...]
    step_s: float

    @classmethod
    def of(cls, instance: Instance, columns: Iterable[Column]) -> Placement:
        """Price a pipeline: a chain by the closed formula, anything else by the simulator."""
        ordered = tuple(columns)
        hops = hops_of(instance, ordered)
        if hops is None:
            return cls(instance, ordered, math.inf)
        if instance.problem.exact:
            return cls(instance, ordered, max(turn_steps_s(ordered, hops, instance.micro_batches)))
        problem = instance.problem
        try:
            program = build_program(make_plan(instance, ordered), problem.profile.edges, problem.profile.ties)
            return cls(instance, ordered, run_program(program, problem.cost).step_s)
        except FormatError:
            return cls(instance, ordered, math.inf)

    def plan(self) -> Plan:
        """The pipeline as a plan, without a prediction."""
        return make_plan(self.instance, self.columns)


def hops_of(instance: Instance, columns: Sequence[Column]) -> tuple[Hop, ...] | None:
    """The boundaries between the columns; None: one of them cannot be."""
    found = [instance.hop(right.first, left.group, right.group) for left, right in itertools.pairwise(columns)]
    whole = tuple(hop for hop in found if hop is not None)
    return whole if len(whole) == len(found) else None


def make_plan(instance: Instance, columns: Sequence[Column]) -> Plan:
    """A plan of the columns; of each group, workers are taken in the profile's order."""
    problem = instance.problem
    free = [list(reversed(group)) for group in instance.groups]
    stages = []
    for column in columns:
        worker = free[column.group].pop()
        stages.append(
            Stage(
                worker,
                problem.names(range(column.first, column.last + 1)),
                problem.names(column.rematerialise),
                threads=problem.profile.worker[worker].threads,
            )
        )
    return Plan(
        workload=problem.workload,
        micro_batches=instance.micro_batches,
        micro_batch_size=instance.size,
        stages=tuple(stages),
    )
