"""What partitions hold that is not their own: objects of the script's, what hooks and other functions close over.

A partition that moves is built anew by the same functions around the same objects, of which each rank has its own:

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
    from collections.abc import Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph


class OutsideValues:
    """The numbers and texts that each partition of the model can reach beside its own, as they are when this is made.

    The model that the builder has made holds the same objects and functions as the partitions on this rank; the
    attributes of its modules stay as they were built.

    Args:
        graph: Of the model.
    """

    def __init__(self, graph: PartitionGraph) -> None:
        model, tensors = graph.deferred.model, graph.deferred.tensors()
        self._started: dict[str, dict[str, Any]] = {}
        for piece in graph.pieces:
            paths = [str(node.target) for node in piece.graph.nodes if node.op == "call_module"]
            hooks = {
                f"a hook of {name}": hook
                for name in piece.parameters
                for hook in (tensors[name]._backward_hooks or {}).values()
            }
            self._started[piece.name] = {**{each: model.get_submodule(each) for each in paths}, **hooks}
        self._first = {name: plain_values(started) for name, started in self._started.items()}

    def digests(self) -> list[float]:
        """Of what has changed, partition by partition; 0: nothing."""
        return [self._digest(name) for name in self._started]

    def _digest(self, name: str) -> float:
        now, first = plain_values(self._started[name]), self._first[name]
        changed = [(each, now.get(each)) for each in sorted({*now, *first}) if now.get(each) != first.get(each)]
        return float(1 + zlib.crc32(repr(changed).encode())) if changed else 0.0

    def check_moved(self, old: Plan, new: Plan, told: Mapping[int, Sequence[float]]) -> None:
        """Refuse to build a partition where what it holds from outside is not what it was where it comes from.

        Args:
            old: Who has them.
            new: Who gets them.
            told: What `digests` gave on each rank.

        Raises:
            UsageError: naming the partition; on every rank.
        """
        place = {name: n for n, name in enumerate(self._started)}
        for partition, source, target in removals(old, new):
            if told[source][place[partition]] != told[target][place[partition]]:
                raise UsageError(
                    f"what the forward or a hook of {partition!r} keeps outside of its modules (in an object that the"
                    " builder was given, a name of its file or a closure) would stay on"
                    f" worker:{source}, and {partition!r} goes to worker:{target}",
                    hint="keep it as an attribute of a module: a buffer, a number, text, lists and dicts; or a plan"
                    f" that leaves {partition!r} where it is",
                )
