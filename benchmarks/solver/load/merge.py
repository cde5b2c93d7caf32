"""Devices that differ in their links alone as one class: a coarser problem that bounds the real one.

Where every link was measured by itself hardly two workers are alike, and the dynamic program's states, one for each
choice of classes, double with each. Taking for those of one compute time and memory the least time of every message can
only make placements faster, so the coarse optimum is a bound; and its stages, given to real devices, a good start.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from load.problem import DeviceClass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from load.problem import LoadProblem, Stage

Table = tuple[tuple[float, ...], ...]


def state_count(problem: LoadProblem) -> int:
    """Ways to use devices by class, which is what the dynamic program has states for."""
    return math.prod(device.count + 1 for device in problem.devices)


def alike(problem: LoadProblem) -> list[list[int]]:
    """Classes with the same memory and the same times of every node."""
    found: dict[tuple[object, ...], list[int]] = {}
    for c, device in enumerate(problem.devices):
        times = tuple(option.seconds[c] for node in problem.nodes for option in node.options)
        found.setdefault((device.memory, device.pays, times), []).append(c)
    return list(found.values())


def merged(problem: LoadProblem, groups: Sequence[Sequence[int]]) -> LoadProblem:
    """The problem with each group as one class, and the least seconds of each message between them."""
    devices = tuple(
        DeviceClass(
            ", ".join(problem.devices[c].name for c in group), sum(problem.devices[c].count for c in group),
            problem.devices[group[0]].memory, problem.devices[group[0]].pays,
        )
        for group in groups
    )  # fmt: skip

    def least(table: Table) -> Table:
        """Of the pairs of devices behind each pair of groups; an empty table stays empty."""
        if not table:
            return ()
        return tuple(
            tuple(
                min(
                    (table[u][v] for u in one for v in other if u != v or problem.devices[u].count > 1), default=0.0
                )
                for other in groups
            )
            for one in groups
        )  # fmt: skip

    transfer = problem.transfer
    return replace(
        problem,
        nodes=tuple(
            replace(
                node, options=tuple(replace(o, seconds=tuple(o.seconds[g[0]] for g in groups)) for o in node.options)
            )
            for node in problem.nodes
        ),
        outputs=tuple(replace(output, seconds=least(output.seconds)) for output in problem.outputs),
        devices=devices,
        transfer=replace(
            transfer,
            sender_busy=least(transfer.sender_busy),
            receiver_busy=least(transfer.receiver_busy),
        ),
    )


def unmerged(problem: LoadProblem, groups: Sequence[Sequence[int]], stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Stages of a merged problem on real devices, those of each group in turn."""
    left = [iter([c for c in group for _ in range(problem.devices[c].count)]) for group in groups]
    return tuple(replace(stage, device=next(left[stage.device])) for stage in stages)
