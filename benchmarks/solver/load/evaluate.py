"""What a placement costs, computed from the problem alone, and every rule that it breaks.

No solver's figure is trusted: values that are reported come from here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from load.problem import LoadProblem, Option, Output, Stage

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Evaluation:
    """A placement's figures.

    Args:
        value: The largest load of a device; inf if a rule is broken.
        loads: Per stage.
        memory: Bytes per stage.
        broken: What the placement violates, in words.
    """

    value: float
    loads: tuple[float, ...]
    memory: tuple[float, ...]
    broken: tuple[str, ...]


def evaluate(problem: LoadProblem, stages: Sequence[Stage]) -> Evaluation:
    """Loads, memory and broken rules of a placement.

    Args:
        problem: What is placed, and by which convention.
        stages: Each on a device of its own; in the line's order where the problem is contiguous.
    """
    broken = _broken(problem, stages)
    where = {node: s for s, stage in enumerate(stages) for node in stage.nodes}
    if len(where) < len(problem.nodes):
        return Evaluation(math.inf, (), (), tuple(broken))
    memory = tuple(stage_memory(problem, stage, position=len(stages) - s) for s, stage in enumerate(stages))
    for stage, held in zip(stages, memory, strict=True):
        device = problem.devices[stage.device]
        if held > device.memory * (1 + _ROUNDING):
            broken.append(f"a stage on {device.name} needs {held:.0f} of {device.memory:.0f} bytes")
    relayed = problem.transfer.rule == "relayed"
    loads = _relayed(problem, stages, where) if relayed else [_added(problem, stage) for stage in stages]
    value = math.inf if broken else max(loads, default=0.0)
    return Evaluation(value, tuple(loads), memory, tuple(broken))


def stage_memory(problem: LoadProblem, stage: Stage, *, position: int) -> float:
    """Bytes that a stage needs at `position` from the end of the line, the last being 1."""
    depth = problem.in_flight(position)
    return sum(depth * option.stored + option.fixed for option in _chosen(problem, stage))


def _broken(problem: LoadProblem, stages: Sequence[Stage]) -> list[str]:
    broken: list[str] = []
    where: dict[int, int] = {}
    for s, stage in enumerate(stages):
        for node in stage.nodes:
            if node in where:
                broken.append(f"{problem.nodes[node].name} is placed twice")
            where[node] = s
    broken += [f"{node.name} is not placed" for n, node in enumerate(problem.nodes) if n not in where]
    used = [stage.device for stage in stages if stage.nodes for _ in range(stage.replicas)]
    broken += [
        f"{stage.replicas} replicas of a stage, at most {problem.replicas}"
        for stage in stages
        if stage.replicas > problem.replicas
    ]
    for number, device in enumerate(problem.devices):
        if used.count(number) > device.count:
            broken.append(f"{used.count(number)} stages on {device.count} devices of class {device.name}")
    homes: dict[int | str, set[int]] = defaultdict(set)
    for n, coloured in enumerate(problem.nodes):
        if coloured.colour is not None and n in where:
            homes[coloured.colour].add(where[n])
    broken += [f"colour {colour} is on {len(home)} devices" for colour, home in homes.items() if len(home) > 1]
    if problem.contiguous:
        broken += [
            f"{problem.nodes[u].name} lies behind {problem.nodes[v].name}"
            for u, v in problem.order
            if u in where and v in where and where[u] > where[v]
        ]
    broken += [
        f"{problem.nodes[node].name} cannot run on {problem.devices[stage.device].name}"
        for stage in stages
        for node, option in zip(stage.nodes, _chosen(problem, stage), strict=True)
        if math.isinf(option.seconds[stage.device])
    ]
    return broken


def _added(problem: LoadProblem, stage: Stage) -> float:
    """A stage's load, which does not depend on who holds the rest."""
    inside = set(stage.nodes)
    compute = _compute(problem, stage)
    if not problem.devices[stage.device].pays:
        return compute
    there = sum(output.cost for output in problem.outputs if _leaves(output, inside))
    back = sum(output.cost for output in problem.outputs if _arrives(output, inside))
    return compute + problem.transfer.factor * (there + back) / stage.replicas


def _relayed(problem: LoadProblem, stages: Sequence[Stage], where: dict[int, int]) -> list[float]:
    into, out = [0.0] * len(stages), [0.0] * len(stages)
    for output in problem.outputs:
        last = max((where[target] for target in output.targets), default=0)
        for s in range(where[output.source], last):
            out[s] += problem.transfer.factor * output.cost
            into[s + 1] += problem.transfer.factor * output.cost
    return [
        max(_compute(problem, stage), into[s] / stage.replicas, out[s] / stage.replicas)
        if problem.devices[stage.device].pays
        else _compute(problem, stage)
        for s, stage in enumerate(stages)
    ]


def _chosen(problem: LoadProblem, stage: Stage) -> list[Option]:
    return [
        problem.nodes[node].options[option] for node, option in zip(stage.nodes, stage.options, strict=True)
    ]  # fmt: skip


def _compute(problem: LoadProblem, stage: Stage) -> float:
    r = stage.replicas
    seconds = sum(option.seconds[stage.device] for option in _chosen(problem, stage))
    return (seconds + (r - 1) / r * sum(problem.nodes[node].sync for node in stage.nodes)) / r


def _leaves(output: Output, inside: set[int]) -> bool:
    return output.source in inside and any(target not in inside for target in output.targets)


def _arrives(output: Output, inside: set[int]) -> bool:
    return output.source not in inside and any(target in inside for target in output.targets)
