"""The examples at sizes that train in no time, under plans written by hand, on local ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kept import kept

from assigner.formats.plan import Plan
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Stage
from assigner.model.marking import PartitionGraph, partition_graph
from assigner.model.workload import load_workload

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "gpt": "width=16,heads=2,blocks=3,context=12,batch_size=8",
    "resnet": "width=4,blocks_per_group=1,size=16,batch_size=16",
    "unet": "width=4,depth=2,size=16,batch_size=8",
    "two_tower": "width=16,query_blocks=2,item_layers=2,length=8,features=8,batch_size=8",
    "clicks": "items=50,width=8,layers=2,length=4,batch_size=8",
}


def entry(example: str, arguments: str = "") -> str:
    return f"{ROOT}/examples/{example}.py:workload({arguments})"


def tiny(example: str, arguments: str = "") -> str:
    return entry(example, f"{TINY[example]},{arguments}")


@kept
def cut(workload: str) -> PartitionGraph:
    return partition_graph(load_workload(workload))


def make_plan(workload: str, stages: Sequence[tuple[int, int]], *, micro_batches: int = 4) -> Plan:
    """Stages as (rank, number of partitions) in topological order; every second partition rematerialises."""
    made = load_workload(workload)
    graph = cut(workload)
    names = iter([piece.name for piece in graph.pieces])
    taken = [(rank, tuple(next(names) for _ in range(count))) for rank, count in stages]
    assert not list(names)
    return Plan(
        workload=WorkloadReference(made.name, workload, graph.fingerprint, made.batch_size),
        micro_batches=micro_batches,
        micro_batch_size=-(-made.batch_size // micro_batches),
        stages=tuple(Stage(f"worker:{rank}/cpu", held, held[::2]) for rank, held in taken),
    )
