"""What the partitions reach beside their own, and what of it cannot go to another rank.

A partition that moves is built anew by the same functions around the same objects from outside (the script's, what
hooks and other functions close over), of which each rank has its own:

    rank 0    forward of b: registry["calls"] += 1      b goes to rank 1, whose registry has seen no calls: refused
    all       the script: registry["share"] = 0.5       the same on both: b goes

So what has changed there since the start is held against it between the rank that has a partition and one that gets it.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from assigner.errors import UsageError
from assigner.runtime.forward.lossvalues import plain_values
from assigner.runtime.relocation import removals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph


class OutsideValues:
    """The numbers and texts that each partition of the model can reach, by its modules and the hooks on its parameters.

    The model that the builder has made leads to the same objects and functions as the partitions on this rank.
    """

    def __init__(self, graph: PartitionGraph) -> None:
        self._reached = reached_by(graph)
        self._first = {name: plain_values(reached) for name, reached in self._reached.items()}

    def digests(self) -> list[float]:
        """Of what has changed, partition by partition; 0: nothing."""
        return [self._digest(name) for name in self._reached]

    def _digest(self, name: str) -> float:
        now, first = plain_values(self._reached[name]), self._first[name]
        changed = [(each, now.get(each)) for each in sorted({*now, *first}) if now.get(each) != first.get(each)]
        return float(1 + zlib.crc32(repr(changed).encode())) if changed else 0.0

    def check_moved(self, old: Plan, new: Plan, told: Sequence[Sequence[float]]) -> None:
        """Refuse to build a partition where what it holds from outside is not what it was where it comes from.

        `told` are the digests of the ranks.
        """
        place = {name: n for n, name in enumerate(self._reached)}
        for partition, source, target in removals(old, new):
            if told[source][place[partition]] != told[target][place[partition]]:
                raise UsageError(
                    f"what the forward or a hook of {partition!r} keeps outside of its modules (in an object that the"
                    " builder was given, a name of its file or a closure) would stay on"
                    f" worker:{source}, and {partition!r} goes to worker:{target}",
                    hint="keep it as an attribute of a module: a buffer, a number, text, lists and dicts; or a plan"
                    f" that leaves {partition!r} where it is",
                )


def reached_by(graph: PartitionGraph) -> dict[str, dict[str, Any]]:
    """By which of the builder's modules, and hooks on parameters, each partition's code reaches all else, by name."""
    model, tensors = graph.deferred.model, graph.deferred.tensors()
    found: dict[str, dict[str, Any]] = {}
    for piece in graph.pieces:
        hooks = {
            f"a hook of {name}": hook
            for name in piece.parameters
            for hook in (tensors[name]._backward_hooks or {}).values()
        }
        found[piece.name] = {**{each: model.get_submodule(each) for each in piece.called}, **hooks}
    return found
