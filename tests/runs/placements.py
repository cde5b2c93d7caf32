"""Plans on three ranks in which workers share stages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workloads import graph_of, make_plan

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.model.workload import Workload


def names_of(made: Workload) -> list[str]:
    return [piece.name for piece in graph_of(made).pieces]


def everywhere(made: Workload) -> Plan:
    """All of the model on every rank, with unlike shares."""
    return make_plan(made, [({1: 2, 0: 1, 2: 1}, names_of(made))])


def mixed(made: Workload) -> Plan:
    """Two stages that share workers, and one alone; some of it runs its forward again."""
    names = names_of(made)
    stages = [({0: 3, 2: 1}, names[:1]), ({2: 2, 1: 2}, names[1:2]), (0, names[2:])]
    return make_plan(made, stages, remat=names[1:2])


def divided(plan: Plan) -> Plan:
    """The workers of each stage update its partitions in turn, the last worker the first one, for each other."""
    stages = []
    for stage in plan.stages:
        count = len(stage.replicas)
        replicas = tuple(
            replace(each, updates=tuple(stage.partitions[count - 1 - k :: count]))
            for k, each in enumerate(stage.replicas)
        )
        stages.append(replace(stage, replicas=replicas))
    return replace(plan, stages=tuple(stages))


def by_one(plan: Plan) -> Plan:
    """The first worker of each stage updates all of it."""
    stages = []
    for stage in plan.stages:
        first, *others = stage.replicas
        replicas = replace(first, updates=stage.partitions), *(replace(each, updates=()) for each in others)
        stages.append(replace(stage, replicas=replicas))
    return replace(plan, stages=tuple(stages))
