"""Which points are measured together, and who runs beside them, so that they run as in a stage.

Where memory is short nobody does, and where it is shorter each point runs alone.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.profiler.stage import StageBench
from assigner.profiler.tasks import Point

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from assigner.model.marking import PartitionGraph
    from assigner.profiler.partitionbench import PartitionBench
    from assigner.profiler.workbench import Workbench

_ALIKE, _STAGE = 6, 6  # partitions of one kind in a stage that is measured, and partitions of any
_IN_TURN = 12  # points that are measured in turn: about 20 s, which is what an interruption costs at most
_ROOM_SHARE = 0.5  # of the memory that is free: what a stage may take


@dataclass(frozen=True)
class MeasuredStage:
    """Points that are measured as one stage.

    Args:
        points: They, in the order of the bench's figures.
        bench: They and their company.
    """

    points: tuple[Point, ...]
    bench: StageBench


def in_turn(points: Sequence[Point]) -> list[list[Point]]:
    """Points in groups that are measured in turn: even ones, of twelve at most, the sizes of a partition together."""
    by_name: dict[str, list[Point]] = {}
    for point in points:
        by_name.setdefault(point.partition, []).append(point)
    groups = max(1, math.ceil(len(points) / _IN_TURN))
    found: list[list[Point]] = []
    for alike in by_name.values():
        begun = sum(len(each) for each in found)
        if not found or (len(found) < groups and begun >= len(found) * len(points) / groups):
            found.append([])
        found[-1] += alike
    return found


def stage_partitions(graph: PartitionGraph, names: Sequence[str], budget_bytes: float = math.inf) -> list[str]:
    """Partitions to run beside some, as in a stage: others of their kinds, and where those are few their neighbours.

    Args:
        graph: The model's partitions.
        names: Those that are measured.
        budget_bytes: What parameters and buffers of the company may take.
    """
    order, tensors = [piece.name for piece in graph.pieces], graph.deferred.tensors()
    alike = Counter(graph.piece[name].kind for name in names)
    near = sorted(set(order) - set(names), key=lambda name: (abs(order.index(name) - order.index(names[0])), name))
    found: list[str] = []
    for name in sorted(near, key=lambda name: graph.piece[name].kind not in alike):  # the like ones first
        kind, size = graph.piece[name].kind, sum(tensors[each].nbytes for each in graph.piece[name].state)
        wanted = alike[kind] < _ALIKE if kind in alike else len(names) + len(found) < _STAGE
        if wanted and size <= budget_bytes:
            found.append(name)
            budget_bytes -= size
            if kind in alike:
                alike[kind] += 1
    return found


def stages(benches: Mapping[Point, PartitionBench], workbench: Workbench) -> list[MeasuredStage]:
    """Points of each size as one stage, with others beside them; where memory is short each of them alone.

    Args:
        benches: Those that are measured.
        workbench: Makes the company's; the bytes of all are known there.
    """
    return [
        stage
        for size in dict.fromkeys(point.micro_batch for point in benches)
        for stage in _of_size({each: benches[each] for each in benches if each.micro_batch == size}, size, workbench)
    ]


def alone(point: Point, bench: PartitionBench, *, depth: int, in_parts: bool) -> MeasuredStage:
    """A point as a stage of its own, where memory is short."""
    stage = StageBench([bench], [[bench]], depth=depth, is_crowded=True, device=bench.device, in_parts=in_parts)
    return MeasuredStage((point,), stage)


def _of_size(mine: Mapping[Point, PartitionBench], size: int, workbench: Workbench) -> list[MeasuredStage]:
    beside: dict[Point, PartitionBench] = {}
    for name in stage_partitions(workbench.graph, [point.partition for point in mine]):
        if name in workbench.modules:
            try:
                beside[Point(name, size)] = workbench.companion(Point(name, size))
            except MemoryError:
                break  # the others are measured without it
    for others in (beside, {}):
        stage = _together(mine, others, workbench)
        if stage is not None:
            return [stage]
        for bench in beside.values():
            bench.leave()
    return [alone(point, bench, depth=bench.depth, in_parts=workbench.in_parts) for point, bench in mine.items()]


def _together(
    mine: Mapping[Point, PartitionBench], others: Mapping[Point, PartitionBench], workbench: Workbench
) -> MeasuredStage | None:
    """A stage of these and those, with as many micro-batches in flight as fit; None: not even one does."""
    benches, room = {**mine, **others}, _ROOM_SHARE * workbench.room()
    deepest = min(bench.depth for bench in mine.values())
    needed = {
        depth: sum(workbench.held[each].needed(depth=depth) for each in benches) for depth in range(1, 1 + deepest)
    }
    depth = max((each for each in needed if needed[each] <= room), default=None)
    if depth is None:
        return None
    place = {piece.name: n for n, piece in enumerate(workbench.graph.pieces)}
    alike = [[benches[each] for each in benches if workbench.kind(each) == workbench.kind(point)] for point in mine]
    bench = StageBench(
        [benches[point] for point in sorted(benches, key=lambda each: place[each.partition])], alike,
        depth=depth, is_crowded=2 * needed[depth] > room, device=workbench.device, in_parts=workbench.in_parts,
    )  # fmt: skip
    return MeasuredStage(tuple(mine), bench)
