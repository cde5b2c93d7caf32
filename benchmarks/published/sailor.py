"""The runs that Sailor's authors measured (Strati et al., SOSP 2025), as profiles and plans of this program.

A node with n GPUs of one kind that share every layer (tensor parallelism of degree n) is one worker; its bytes are
those of its n GPUs together. The same is assumed of every plan:

- A layer takes what the profile says of its GPU, its degree and the micro-batch's size. The time of an update, in the
  file the same for every layer, is that of the model that was profiled (embedding, two blocks, head): a layer has the
  share of it that its parameters are.
- A message is cut over the n GPUs (`PartitionedTensor` of the authors' engine); the bandwidth of the profile is that of
  the node for n such pieces at once, by the size of one piece.
- DeepSpeed's engine takes the gradient from the next stage before it sends it the next activation, and waits for each
  message. So between two backwards the later of two stages sends a gradient and then waits for an activation, while the
  earlier one computes ahead: both messages keep the later stage from computing, neither the earlier one.
- Embedding and head have weights of their own. A layer keeps, for each parameter of 4 bytes, its gradient and Adam's
  two moments; for each micro-batch in flight what the profile says; and its backward needs that much again.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from assigner.errors import FormatError
from assigner.formats.profile import (
    Collective,
    Edge,
    Link,
    LinkPoint,
    Measurement,
    Partition,
    Profile,
    Worker,
    WorkloadReference,
)
from assigner.schedule.cost import CostModel
from assigner.schedule.rings import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

GPU_BYTES = {"RTX-2080": 11e9, "RTX-3090": 24e9, "Titan-RTX": 24e9, "GH-96": 96e9}
"""Memory of one GPU, as the authors' planner has it."""

PROFILED_BLOCKS = 2
"""How many blocks the profiled model had beside embedding and head (`--num_prof_layers` of their profile.sh)."""

PIECE_BYTES = tuple(2.0**power for power in range(18, 31))
"""Of one GPU's piece of a message, where links are priced. The fitted curves mean nothing far below."""

WAITING = {"later": (0.0, 1.0), "both": (1.0, 1.0), "neither": (0.0, 0.0)}
"""Who does not compute during a message between two stages: shares of its time, of the earlier and of the later one."""


@dataclass(frozen=True)
class Node:
    """GPUs of one kind that share every layer.

    Args:
        gpu: Their kind.
        gpus: How many.
    """

    gpu: str
    gpus: int


@dataclass(frozen=True)
class Run:
    """One plan as it was measured.

    Args:
        name: Of the authors: nodes and replicas.
        micro_batch_size: In samples.
        micro_batches: Of each replica in a step.
        cuts: How many layers each stage has.
        replicas: By stage, the nodes that hold it.
        step_s: Measured, of a step.
        all_reduce_s: Measured, of the gradients, as the first rank saw it.
        peak_bytes: Measured, on the fullest GPU, whatever takes it.
    """

    name: str
    micro_batch_size: int
    micro_batches: int
    cuts: tuple[int, ...]
    replicas: tuple[tuple[Node, ...], ...]
    step_s: float
    all_reduce_s: float
    peak_bytes: float

    @property
    def chains(self) -> int:
        """How many replicas every stage has."""
        return len(self.replicas[0])


def read_runs(path: Path) -> tuple[Run, ...]:
    """The runs of a file.

    Raises:
        FormatError: stages have unlike numbers of replicas, or the batch is no multiple of the micro-batches.
    """
    return tuple(_run(document) for document in json.loads(path.read_text()))


def _run(document: dict[str, Any]) -> Run:
    replicas = tuple(
        tuple(Node(each["gpu"], each["tensor_parallel"]) for each in stage["replicas"]) for stage in document["stages"]
    )
    chains = {len(nodes) for nodes in replicas}
    size, batch = document["micro_batch_size"], document["global_batch_size"]
    if len(chains) != 1 or batch % (size * len(replicas[0])):
        raise FormatError(
            f"{document['name']}: {batch} samples as micro-batches of {size} on {chains} replicas a stage"
        )
    return Run(
        document["name"], size, batch // (size * len(replicas[0])),
        tuple(1 + stage["layers"][1] - stage["layers"][0] for stage in document["stages"]), replicas,
        document["measured_step_s"], document["measured_all_reduce_s"], document["measured_peak_bytes"],
    )  # fmt: skip


class Measured:
    """The authors' profile.

    Args:
        path: Their file, `opt350-profile.json`.
        waiting: Who waits for a message: a key of WAITING.
    """

    def __init__(self, path: Path, *, waiting: str = "later") -> None:
        self._waiting = WAITING[waiting]
        document = json.loads(path.read_text())
        self._layers: dict[str, list[dict[str, float]]] = document["layers"]
        self._seconds: dict[str, dict[str, dict[str, list[list[float]]]]] = document["seconds"]
        self._link: dict[str, dict[str, dict[str, list[float]]]] = document["link"]
        self.layers = len(next(iter(self._layers.values())))

    @property
    def names(self) -> tuple[str, ...]:
        """The layers as partitions."""
        return ("embedding", *(f"block.{n}" for n in range(self.layers - 2)), "head")

    def message_s(self, source: Node, target: Node, size: float) -> float:
        """Seconds of one message between nodes, of `size` bytes in all."""
        curve = self._link[source.gpu][str(source.gpus)][target.gpu]
        doublings = math.log2(size / source.gpus / 1e6)
        return size / 1e9 / (curve[0] * doublings**2 + curve[1] * doublings + curve[2])

    def profile(
        self, groups: Sequence[Sequence[Node]], *, batch_size: int, reserve: float = 0.0, ordered: bool = True
    ) -> Profile:
        """A profile of nodes.

        Args:
            groups: The nodes that hold each stage; `worker:0` is the first of the first. All have one degree.
            batch_size: Samples in a step of one replica.
            reserve: Bytes of each GPU that its tensors cannot have.
            ordered: Whether stages follow in this order; else each end of a message waits as the two do on average.
        """
        nodes = {f"worker:{n}/cuda:0": node for n, node in enumerate(node for group in groups for node in group)}
        position = dict(zip(nodes, (n for n, group in enumerate(groups) for _ in group), strict=True))
        profile = Profile(
            workload=WorkloadReference("OPT-350", batch_size=batch_size, optimizer="Adam"),
            workers=tuple(
                Worker(
                    name, f"{node.gpus} {node.gpu}", f"node{n}", "cuda:0",
                    memory_bytes=node.gpus * GPU_BYTES[node.gpu], reserve_bytes=node.gpus * reserve,
                )
                for n, (name, node) in enumerate(nodes.items())
            ),
            links=tuple(self._links(nodes, position if ordered else {})),
            partitions=tuple(self._partitions(groups[0][0].gpus)),
            edges=tuple(
                Edge(name, then, self._layers[str(groups[0][0].gpus)][n]["act_output_bytes"])
                for n, (name, then) in enumerate(zip(self.names, self.names[1:], strict=False))
            ),
            measurements=tuple(each for name, node in nodes.items() for each in self._measurements(name, node)),
        )  # fmt: skip
        return replace(profile, collectives=tuple(_in_one_bucket(profile)))

    def _links(self, nodes: dict[str, Node], position: dict[str, int]) -> Iterator[Link]:
        for source, target in itertools.permutations(nodes, 2):
            sender, receiver = nodes[source], nodes[target]
            if receiver.gpu in self._link[sender.gpu][str(sender.gpus)]:
                sizes = (sender.gpus * piece for piece in PIECE_BYTES)
                points = tuple(LinkPoint(size, self.message_s(sender, receiver, size)) for size in sizes)
                yield Link(source, target, points, "nccl", *self._busy(position.get(source), position.get(target)))

    def _busy(self, source: int | None, target: int | None) -> tuple[float, float]:
        """The busy shares of a message's sender and receiver, by their stages; None: the order is open."""
        earlier, later = self._waiting
        if source is None or target is None:
            return (earlier + later) / 2, (earlier + later) / 2
        if source == target:
            return 0.0, 0.0  # replicas: what they exchange comes when all have computed
        return (earlier, later) if source < target else (later, earlier)

    def _partitions(self, degree: int) -> Iterator[Partition]:
        for name, layer in zip(self.names, self._layers[str(degree)], strict=True):
            size = degree * layer["params_bytes"]
            yield Partition(name, name.split(".")[0], size, size, 2 * size)

    def _measurements(self, worker: str, node: Node) -> Iterator[Measurement]:
        layers = self._layers[str(node.gpus)]
        parameters = [layer["params_bytes"] for layer in layers]
        profiled = parameters[0] + PROFILED_BLOCKS * parameters[1] + parameters[-1]
        for micro_batch, by_degree in sorted((int(size), found) for size, found in self._seconds[node.gpu].items()):
            for n, name in enumerate(self.names if str(node.gpus) in by_degree else ()):
                times = by_degree[str(node.gpus)]
                forward_s, backward_s, update_s = times[n]
                kept = node.gpus * layers[n]["act_mem_bytes"]
                passed = layers[n]["act_output_bytes"] if n + 1 < self.layers else 0  # its reader keeps it
                yield Measurement(
                    name, worker, micro_batch, forward_s, backward_s, update_s * parameters[n] / profiled,
                    activation_bytes=micro_batch * (kept - passed), workspace_bytes=micro_batch * kept,
                )  # fmt: skip


def _in_one_bucket(profile: Profile) -> Iterator[Collective]:
    """What an all-reduce among any of the workers takes, as a rate: DeepSpeed's buckets (2 GB) hold the whole model.

    This program's are smaller, and their pieces would take longer for their bytes.
    """
    workers = tuple(profile.worker)
    if len(workers) < 2:
        return
    size = sum(each.gradient_bytes for each in profile.partitions)
    rate = size / CostModel(profile).rings.formula_s(frozenset(workers), size)
    pieces = [BUCKET_BYTES * len(workers) / count for count in range(len(workers), 1, -1)]
    yield Collective(workers, tuple(LinkPoint(piece, piece / rate) for piece in pieces), "nccl")
