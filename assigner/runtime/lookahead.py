"""How early receives are posted.

A message whose receive is posted travels while its receiver computes, and gloo sends it at once; else its two ends
first talk in four turns, each of which wakes a thread (2 ranks, tiny messages, 1f1b: 1049 us of CPU time a micro-batch
two actions ahead, 478 us four ahead). A posted receive takes memory, so that large messages are posted late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner.model.marking import Value
from assigner.schedule.program import Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.model.marking import PartitionGraph
    from assigner.runtime.microbatch import MicroBatch
    from assigner.schedule.program import Program

_AHEAD = 2
_SMALL_AHEAD = 4
_SMALL_BYTES = 1 << 18


def posted_ahead(graph: PartitionGraph, program: Program, worker: str, micro_batches: Sequence[MicroBatch]) -> int:
    """For so many forwards and backwards to come a worker has posted the receives: 4 where its messages are small.

    Args:
        graph: What the values between partitions are.
        program: What the worker does; how many rows there really are its plan does not say.
        worker: Its name.
        micro_batches: What it does it to.
    """
    rows = max(each.rows for each in micro_batches)
    values = [
        graph.values[Value(route.partition, route.output)]
        for route in program.routes
        if route.target == worker and route.payload in (Payload.ACTIVATION, Payload.GRADIENT)
    ]
    largest = max((value.bytes_per_sample * rows + value.fixed_bytes for value in values), default=0.0)
    return _SMALL_AHEAD if largest <= _SMALL_BYTES else _AHEAD
