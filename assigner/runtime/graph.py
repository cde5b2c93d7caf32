"""The partitions that a plan speaks of, found in the workload's model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.deferred import DeferredModel
from assigner.errors import FormatError, MarkingError
from assigner.marking import PartitionGraph, partition_graph
from assigner.runtime.loss import check_schedule

if TYPE_CHECKING:
    from assigner.plan import Plan
    from assigner.workload import Workload


def plan_graph(workload: Workload, plan: Plan, known: PartitionGraph | None = None) -> PartitionGraph:
    """The partitions of a plan's model, found again from the workload.

    Args:
        workload: The model.
        plan: Whose partitions.
        known: The partitions as they were found before; they must be the plan's.

    Raises:
        FormatError: the plan is for another model.
        UsageError: its schedule cannot have the workload's loss.
    """
    graph = known if known is not None and _fits(plan, known) else _found(workload, plan)
    check_schedule(workload, plan, graph)
    return graph


def _found(workload: Workload, plan: Plan) -> PartitionGraph:
    names = {name for name, _ in DeferredModel(workload.model, seed=workload.seed).model.named_modules()}
    found = [name for name in plan.partitions if name in names]
    try:
        graph = partition_graph(workload, found)
        if _fits(plan, graph):
            return graph
        detail = _difference(plan, graph)
    except MarkingError as error:
        detail = error.message if found or not workload.marks else _difference(plan, partition_graph(workload))
    raise FormatError(
        f"the plan is for workload {plan.workload.name!r}, and this model is another one: {detail}",
        hint="profile this workload and solve again",
    )


def _difference(plan: Plan, graph: PartitionGraph) -> str:
    strange = set(graph.piece) ^ set(plan.partitions)
    if strange:
        return f"partition {min(strange)!r} is in only one of the two"
    return "shapes, edges, autocast or a setting of a module (a dropout's share, ...) differ"


def _fits(plan: Plan, graph: PartitionGraph) -> bool:
    """The names are compared as well: a plan may have been edited by hand."""
    return graph.fingerprint == plan.workload.fingerprint and set(graph.piece) == set(plan.partitions)
