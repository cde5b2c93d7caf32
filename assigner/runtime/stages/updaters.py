"""Who updates which parameter: each worker that holds it its own copy, or one of a stage's workers for all of them.

The plan says it by partitions (`Replica.updates`), as `schedule/replication.py` prices it. All workers that hold it
update what partitions of several stages share, and what wants no gradient: no state is kept of that.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from assigner.location import Location
from assigner.schedule.replication import is_exchanged

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph


def updaters(graph: PartitionGraph, plan: Plan) -> dict[str, tuple[str, ...]]:
    """The workers that update each parameter, by the first of its names in the model, in the plan's order."""
    by_all = {tie.parameter for tie in graph.ties if is_exchanged(plan, tie)}
    by_all |= {name for name, _ in graph.deferred.model.named_parameters()} - wanting(graph)
    found: dict[str, tuple[str, ...]] = {}
    for stage in plan.stages:
        for partition in stage.partitions:
            for each in graph.piece[partition].parameters:
                name = graph.canonical[each]
                if name in by_all:
                    found[name] = tuple(dict.fromkeys((*found.get(name, ()), *stage.workers)))
                else:
                    found.setdefault(name, stage.updaters(partition))
    return found


def wanting(graph: PartitionGraph) -> set[str]:
    """The parameters that want gradients, as the model was built."""
    return {name for name, each in graph.deferred.model.named_parameters() if each.requires_grad}


def updating_ranks(graph: PartitionGraph, plan: Plan) -> dict[int, frozenset[str]]:
    """What each rank updates of what is trained, without those that update nothing of it, in the plan's order."""
    trained, by = wanting(graph), updaters(graph, plan)
    found = {worker: frozenset(name for name in trained if worker in by.get(name, ())) for worker in plan.workers}
    return {Location.parse(worker).rank: names for worker, names in found.items() if names}


def shares_of(graph: PartitionGraph, plan: Plan) -> list[frozenset[str]]:
    """The parameters that each worker updates, of those that update some, by the model's own names."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, workers in updaters(graph, plan).items():
        for worker in workers:
            found[worker].add(name)
    return [frozenset(found[worker]) for worker in plan.workers if worker in found]


def holders_of(graph: PartitionGraph, plan: Plan) -> dict[str, tuple[str, ...]]:
    """The workers that hold each parameter, by the model's own names; the first counts where all count once."""
    found: dict[str, tuple[str, ...]] = {}
    for piece in graph.pieces:
        for name in dict.fromkeys(graph.canonical[each] for each in piece.parameters):
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *plan.holders[piece.name])))
    return found


def holder_counts(graph: PartitionGraph, plan: Plan) -> dict[str, int]:
    """How many workers hold each parameter."""
    return {name: len(workers) for name, workers in holders_of(graph, plan).items()}
