"""What the load solver is asked: nodes, what they send each other, devices, and who pays for a transfer.

A *load* is the time in which a device is busy for one micro-batch; the largest load is what a pipeline's steady state
takes per micro-batch. The conventions by which programs count it differ in few points, and those are data here:

    convention        rule          an output is               factor   memory
    dnn-partitioning  "added"       paid once at either end    1        sum of sizes
    Piper             "added"       one per edge               2 / bw   a * (position from the end) + b, two options
    PipeDream         "relayed"     passed on by every stage   2 / bw   none

Sources: Tarnawski et al., Efficient Algorithms for Device Placement of DNN Graph Operators, NeurIPS 2020, and Piper:
Multidimensional Planner for DNN Parallelization, NeurIPS 2021; Narayanan et al., PipeDream, SOSP 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from assigner.errors import FormatError

TransferRule = Literal["added", "relayed"]


@dataclass(frozen=True)
class Option:
    """One way to run a node.

    Args:
        name: What a person calls it.
        seconds: Per device class the node's time per micro-batch; inf: not on this class.
        stored: Bytes for each micro-batch in flight.
        fixed: Bytes once.
    """

    name: str
    seconds: tuple[float, ...]
    stored: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True)
class Node:
    """What is placed as a whole.

    Args:
        name: Its name.
        options: How it can be run: one way, or two of which the second is slower and smaller.
        colour: Nodes of one colour share a device; None: on its own.
        sync: Seconds that synchronising its parameters takes among infinitely many replicas, per micro-batch.
    """

    name: str
    options: tuple[Option, ...]
    colour: int | str | None = None
    sync: float = 0.0


@dataclass(frozen=True)
class Output:
    """A value that a node makes and others read.

    Args:
        source: The node that makes it.
        targets: The nodes that read it.
        cost: Time of one transfer, before the factor.
    """

    source: int
    targets: tuple[int, ...]
    cost: float = 0.0


@dataclass(frozen=True)
class DeviceClass:
    """Devices that are alike.

    Args:
        name: The class's name.
        count: How many there are; a placement may leave some unused.
        memory: Bytes of each.
        pays: False: transfers cost this class no time.
    """

    name: str
    count: int
    memory: float = math.inf
    pays: bool = True


@dataclass(frozen=True)
class Transfer:
    """Who pays for a value that changes device, and how.

    "added": either end pays, once per value and device, and the time adds to its compute. "relayed": compute, all that
    comes in and all that goes out run side by side, the longest counts, and a value goes through every stage on its way
    to the last that reads it.

    Args:
        rule: One of the two.
        factor: Multiplies every `Output.cost`.
    """

    rule: TransferRule
    factor: float = 1.0


@dataclass(frozen=True)
class LoadProblem:
    """Minimise the largest load.

    Args:
        nodes: What is placed.
        outputs: What travels between them.
        order: Pairs (u, v): v's stage is not before u's. With it stages are convex and devices form a line.
        devices: Classes of devices.
        transfer: The convention for transfers.
        from_end: A stage keeps as many micro-batches as its position from the end, from 1; else one.
        contiguous: False: a device may hold any set of nodes, and `order` says nothing.
        replicas: So many devices of a class may run one stage, micro-batches in turn. On r of them a stage takes
            (compute + (r - 1) / r * sync) / r, and its transfers 1 / r of their time (PipeDream, section 3.1).
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    order: tuple[tuple[int, int], ...]
    devices: tuple[DeviceClass, ...]
    transfer: Transfer
    from_end: bool = False
    contiguous: bool = True
    replicas: int = 1

    def __post_init__(self) -> None:
        for node in self.nodes:
            if len(node.options) not in (1, 2) or any(len(o.seconds) != len(self.devices) for o in node.options):
                raise FormatError(
                    f"node {node.name}: {len(node.options)} options, times {[o.seconds for o in node.options]} for "
                    f"{len(self.devices)} classes of devices",
                    hint="give one or two options, each with one time per class",
                )
        if self.replicas > 1 and (
            not self.contiguous or self.from_end or any(len(node.options) > 1 for node in self.nodes)
        ):
            raise FormatError("replicas need a line with one option per node, and memory alike at every place")
        if not self.contiguous and self.transfer.rule == "relayed":
            raise FormatError("relayed transfers need a line; a free placement has none")
        if not self.contiguous and (self.from_end or any(len(node.options) > 1 for node in self.nodes)):
            raise FormatError("a free placement knows neither positions in a line nor options")

    def in_flight(self, position: int) -> int:
        """How many micro-batches a stage keeps at this position from the end."""
        return position if self.from_end else 1

    @property
    def device_count(self) -> int:
        """Devices of all classes."""
        return sum(device.count for device in self.devices)


@dataclass(frozen=True)
class Stage:
    """What one device holds, or each of several.

    Args:
        device: Its class.
        nodes: Its nodes, in ascending order.
        options: The option of each.
        replicas: How many devices run it in turn.
    """

    device: int
    nodes: tuple[int, ...]
    options: tuple[int, ...]
    replicas: int = 1


@dataclass(frozen=True)
class LoadAnswer:
    """A placement with what is proven about it.

    Args:
        stages: In the line's order (a free placement's in no order).
        value: Its largest load, evaluated.
        bound: No placement has a smaller one.
        found_by: What found it; empty: nothing was found.
        proven_by: What proved the bound.
        seconds: The search took.
        infeasible: There is no placement, and that is proven.
    """

    stages: tuple[Stage, ...]
    value: float
    bound: float
    found_by: str
    proven_by: str
    seconds: float
    infeasible: bool = False

    @property
    def gap(self) -> float:
        """By how much the value may exceed the optimum, as a share of the value."""
        if math.isinf(self.value):
            return math.inf
        return max(0.0, (self.value - self.bound) / self.value) if self.value else 0.0
