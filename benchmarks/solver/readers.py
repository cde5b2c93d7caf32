"""Readers of three published families of instances, each with the convention by which its authors count a load.

dnn-partitioning (Tarnawski et al., NeurIPS 2020; `read_dnn_partitioning`)
    Like accelerators and CPUs. Both ends of a transfer pay it, once per output and device, added to compute; a CPU
    pays nothing and has no memory limit. Nodes of one colour share a device. Forward nodes are contiguous; backward
    nodes follow their colour, and a colour of backward nodes only is ordered by its edges turned round.
Piper (Tarnawski et al., NeurIPS 2021; `read_piper`), tensor-parallel degree 1, no replication
    Every edge into and out of a stage costs 2 / bandwidth * bytes, added to compute. Each node has options with time
    and memory a * (position from the end of the line) + b. At most k stages.
PipeDream (Narayanan et al., SOSP 2019; `read_pipedream`)
    A stage takes max(compute, 2 * bytes in / bandwidth, 2 * bytes out / bandwidth), and passes on what later stages
    read; input nodes cost nothing. On r replicas compute is (compute + 4 (r - 1) / r * parameters / bandwidth) / r, and
    transfers take 1 / r of their time.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from load import (
    DeviceClass,
    LoadProblem,
    Node,
    Option,
    Output,
    Transfer,
)

if TYPE_CHECKING:
    from pathlib import Path

PIPER_BANDWIDTH = 25 * 2**30
PIPEDREAM_BANDWIDTH = 1e9

PIPER_KNOWN: dict[tuple[str, int, float], float] = {
    ("bert32a100", 8, 8): 0.16585575,
    ("resnet", 8, 16): 60.271796875,
    ("resnet", 8, 8): 64.060109375,
    ("resnet", 8, 4): 74.25128125,
    ("resnet", 16, 4): 37.2523671875,
    ("resnet", 16, 2): 76.5213125,
}
"""Optimum with recompute, by file, devices and GiB: proven by an integer program."""

PIPER_WITHOUT_REMAT: dict[tuple[str, int, float], float] = {
    ("bert32a100", 8, 8): math.inf,
    ("resnet", 8, 16): 65.82519531,
    ("resnet", 8, 8): 199.837625,
    ("resnet", 8, 4): math.inf,
    ("resnet", 16, 4): math.inf,
    ("resnet", 16, 2): math.inf,
}
"""The same without recompute; inf: nothing fits."""

PIPER_DEFAULT: list[tuple[int, float]] = [(8, 16), (8, 8), (8, 4)]
"""Devices and GiB for a file that is not in the table."""

PIPEDREAM_KNOWN: dict[tuple[str, int, bool], float] = {
    ("vgg16", 4, False): 0.411041792,
    ("alexnet", 4, False): 0.066453504,
    ("resnet50", 4, False): 0.258149,
    ("vgg16", 4, True): 0.205520896,
    ("alexnet", 4, True): 0.034217141,
    ("resnet50", 4, True): 0.162880924,
}
"""PipeDream's own planner, by file, workers, and whether stages may be replicated."""

_NODE = re.compile(r"^(?P<name>\S+) -- (?P<kind>.*) -- (?P<figures>forward_compute_time=.*)$")
_EDGE = re.compile(r"^\t(?P<source>\S+) -- (?P<target>\S+)\s*$")


def read_dnn_partitioning(path: Path, *, cpu: bool = True, contiguous: bool = True) -> LoadProblem:
    """A throughput instance.

    Args:
        path: The file.
        cpu: Whether the CPUs may be used.
        contiguous: Whether devices form a line.
    """
    document = json.loads(path.read_text())
    nodes = document["nodes"]
    position = {node["id"]: n for n, node in enumerate(nodes)}
    accelerators, processors = int(document["maxFPGAs"]), int(document["maxCPUs"]) if cpu else 0
    devices = [DeviceClass("accelerator", accelerators, float(document["maxSizePerFPGA"]))]
    if processors:
        devices.append(DeviceClass("cpu", processors, pays=False))

    def seconds(node: dict[str, Any]) -> tuple[float, ...]:
        fast = float(node["fpgaLatency"]) if node.get("supportedOnFpga", True) else math.inf
        return (fast, float(node["cpuLatency"])) if processors else (fast,)

    return LoadProblem(
        nodes=tuple(
            Node(
                str(node["name"]), (Option("as is", seconds(node), fixed=float(node["size"])),), node.get("colorClass")
            )
            for node in nodes
        ),
        outputs=_outputs(document["edges"], position),
        order=tuple(_order(document["edges"], nodes, position)),
        devices=tuple(devices),
        transfer=Transfer("added"),
        contiguous=contiguous,
    )


def _outputs(edges: list[dict[str, Any]], position: dict[Any, int]) -> tuple[Output, ...]:
    """One output for each node with successors; its edges should all say the same cost, and the largest counts."""
    targets: dict[int, list[int]] = defaultdict(list)
    cost: dict[int, float] = defaultdict(float)
    for edge in edges:
        source = position[edge["sourceId"]]
        targets[source].append(position[edge["destId"]])
        cost[source] = max(cost[source], float(edge["cost"]))
    return tuple(Output(source, tuple(dict.fromkeys(found)), cost[source]) for source, found in targets.items())


def _order(edges: list[dict[str, Any]], nodes: list[dict[str, Any]], position: dict[Any, int]) -> list[tuple[int, int]]:
    colour = [("node", n) if node.get("colorClass") is None else node["colorClass"] for n, node in enumerate(nodes)]
    with_forward = {colour[n] for n, node in enumerate(nodes) if not node.get("isBackwardNode")}
    found = []
    for edge in edges:
        u, v = position[edge["sourceId"]], position[edge["destId"]]
        back = [bool(nodes[n].get("isBackwardNode")) for n in (u, v)]
        if not any(back):
            found.append((u, v))
        elif all(back) and not {colour[u], colour[v]} <= with_forward:
            found.append((v, u))
    return found


def read_piper(path: Path, *, stages: int, gibibytes: float, remat: bool = True) -> LoadProblem:
    """A Piper instance with degree 1.

    Args:
        path: The file.
        stages: How many devices there are.
        gibibytes: Memory of each.
        remat: Whether nodes may be recomputed.
    """
    document = json.loads(path.read_text())
    nodes = document["nodes"]
    position = {node["id"]: n for n, node in enumerate(nodes)}
    return LoadProblem(
        nodes=tuple(Node(str(node["name"]), _piper_options(node, remat=remat)) for node in nodes),
        outputs=tuple(
            Output(position[edge["sourceId"]], (position[edge["destId"]],), float(edge["communicationCost"]))
            for edge in document["edges"]
        ),
        order=tuple((position[edge["sourceId"]], position[edge["destId"]]) for edge in document["edges"]),
        devices=(DeviceClass("device", stages, gibibytes * 2**30),),
        transfer=Transfer("added", factor=2 / PIPER_BANDWIDTH),
        from_end=True,
    )


def _piper_options(node: dict[str, Any], *, remat: bool) -> tuple[Option, ...]:
    options = {
        option["id"]: Option(
            option["id"], (float(option["timePerSample"]),),
            stored=float(option["memoryUsageA"]), fixed=float(option["memoryUsageB"]),
        )
        for option in node["TMPCs"]["1"]
    }  # fmt: skip
    vanilla, again = options["vanilla"], options.get("activation recomp")
    if not remat or again is None or replace(again, name=vanilla.name) == vanilla:
        return (vanilla,)
    return vanilla, again


def is_pipedream(path: Path) -> bool:
    """True if the file holds a profile (a licence may lie beside it)."""
    with path.open() as lines:
        return any(_NODE.match(line) for line in lines)


def read_pipedream(
    path: Path, *, workers: int, replicas: int = 1, bandwidth: float = PIPEDREAM_BANDWIDTH
) -> LoadProblem:
    """A PipeDream profile, times in seconds.

    Args:
        path: The file.
        workers: How many devices there are.
        replicas: How many of them may share a stage.
        bandwidth: Bytes per second.
    """
    position: dict[str, int] = {}
    seconds: list[float] = []
    size: list[float] = []
    parameters: list[float] = []
    edges: list[tuple[int, int]] = []
    for line in path.read_text().splitlines():
        if found := _NODE.match(line):
            figures = dict(piece.split("=") for piece in found["figures"].split(", "))
            position[found["name"]] = len(position)
            time = float(figures["forward_compute_time"]) + float(figures["backward_compute_time"])
            is_input = found["kind"].startswith("Input")
            seconds.append(0.0 if is_input else time / 1000)
            activation = sum(map(float, re.findall(r"[0-9.eE+]+", figures["activation_size"])))
            size.append(0.0 if is_input else activation)
            parameters.append(float(figures["parameter_size"]))
        elif found := _EDGE.match(line):
            edges.append((position[found["source"]], position[found["target"]]))
    targets: dict[int, list[int]] = defaultdict(list)
    for source, target in edges:
        targets[source].append(target)
    return LoadProblem(
        nodes=tuple(
            Node(name, (Option("as is", (seconds[n],)),), sync=4 * parameters[n] / bandwidth)
            for name, n in position.items()
        ),
        outputs=tuple(Output(source, tuple(dict.fromkeys(found)), size[source]) for source, found in targets.items()),
        order=tuple(edges),
        devices=(DeviceClass("worker", workers),),
        transfer=Transfer("relayed", factor=2 / bandwidth),
        replicas=replicas,
    )
