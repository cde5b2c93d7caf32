"""A whole pipeline with its step time, and the plan that it becomes."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.formats.plan import Plan
from assigner.formats.stage import Stage
from assigner.schedule.program import build_program
from assigner.schedule.simulate import run_program
from assigner.solver import tuning
from assigner.solver.chain.formula import turn_steps_s
from assigner.solver.dynamic_program import DynamicProgram
from assigner.solver.local_search import local_search, pipeline_moves
from assigner.solver.objectives import GPipeStep
from assigner.solver.prices import PriceTable, StageOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.solver.local_search import Intervals
    from assigner.solver.prices import Hop


@dataclass(frozen=True)
class Placement:
    """Columns in the order of their positions, priced.

    Args:
        instance: What they belong to.
        columns: The stages.
        step_s: The step time, in seconds; inf: two workers that must talk have no link.
    """

    instance: PriceTable
    columns: tuple[StageOption, ...]
    step_s: float

    @classmethod
    def of(cls, instance: PriceTable, columns: Iterable[StageOption]) -> Placement:
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

    @property
    def stages(self) -> Intervals:
        """Where each stage starts, and the group of its worker."""
        return tuple((column.first, column.group) for column in self.columns)

    def improved(self, *, until: float) -> Placement:
        """The best pipeline that single moves lead to: it sharpens a beam's plans, and of graphs it finds them.

        Args:
            until: A time of `time.monotonic` at which to stop whatever is found.
        """
        table, n = self.instance, len(self.instance.problem.order)
        tries = 50_000 if table.problem.exact else tuning.GRAPH_ACTIONS // (2 * table.micro_batches * len(self.columns))
        known: dict[Intervals, Placement | None] = {self.stages: self}

        def price(stages: Intervals) -> float:
            nonlocal tries
            if stages not in known:
                known[stages] = placed(table, stages)
                tries -= known[stages] is not None
            found = known[stages]
            return math.inf if found is None else found.step_s

        best, _ = local_search(
            self.stages, self.step_s, price=price, may_go_on=lambda: tries > 0 and time.monotonic() <= until,
            neighbours=lambda at: pipeline_moves(at, n, tuple(map(len, table.groups)), table.gpipe.sets),
        )  # fmt: skip
        return known[best] or self

    def plan(self) -> Plan:
        """The pipeline as a plan, without a prediction."""
        return make_plan(self.instance, self.columns)


def placed(table: PriceTable, stages: Intervals) -> Placement | None:
    """A pipeline, priced; None: a stage of it does not fit, or it has too many."""
    ends = [start for start, _ in stages[1:]] + [len(table.problem.order)]
    found = [table.options.get((start, end - 1, group)) for (start, group), end in zip(stages, ends, strict=True)]
    whole = tuple(option for option in found if option is not None)
    if len(whole) < len(found) or len(whole) > table.problem.most_workers:
        return None
    return Placement.of(table, whole)


def hops_of(instance: PriceTable, columns: Sequence[StageOption]) -> tuple[Hop, ...] | None:
    """The boundaries between the columns; None: one of them cannot be."""
    found = [instance.hop(right.first, left.group, right.group) for left, right in itertools.pairwise(columns)]
    whole = tuple(hop for hop in found if hop is not None)
    return whole if len(whole) == len(found) else None


def make_plan(instance: PriceTable, columns: Sequence[StageOption]) -> Plan:
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


def beam(table: PriceTable, *, most: int = 8) -> list[Placement]:
    """Good pipelines in a fraction of a second, the most promising first; empty: the beam found none."""
    program = DynamicProgram(table, table.gpipe, GPipeStep(table.micro_batches))
    found = program.run(width=tuning.BEAM_WIDTH, per_state=tuning.BEAM_PER_STATE, dominance=False, most=most)
    return [Placement.of(table, options) for _, options in found.pipelines]
