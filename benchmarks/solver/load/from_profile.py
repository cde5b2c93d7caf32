"""A profile at one micro-batch size as a load problem in this project's own convention, and its answer as stages.

A worker's load is forward + backward (+ recompute) of its partitions and the busy shares of its messages; each directed
link is a server of its own. Rematerialisation is a partition's second option: nothing stored, its activation once.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from assigner.formats import plan
from load.problem import (
    DeviceClass,
    InFlight,
    LoadProblem,
    Node,
    Option,
    Output,
    Shared,
    Transfer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.profile import Partition, Profile, Tie
    from assigner.schedule.cost import CostModel, PartitionCost
    from assigner.solver.problem.options import Remat
    from load.problem import LoadAnswer

REMATERIALISE = "rematerialise"


def load_problem(
    cost: CostModel,
    *,
    micro_batch: int,
    groups: Sequence[Sequence[str]],
    in_flight: InFlight,
    allowed: Callable[[str, str], bool] | None = None,
    remat: Remat = "auto",
) -> LoadProblem:
    """The steady state of one micro-batch size: what each worker and link does per micro-batch.

    Where workers of different groups keep different activations or workspace of a partition, the largest counts.

    Args:
        cost: Prices of a profile.
        micro_batch: Samples in a micro-batch.
        groups: Names of workers that are alike, group by group; others are not used.
        in_flight: `InFlight(M)` under GPipe, `InFlight(M, from_end=True)` under 1F1B.
        allowed: Whether a partition (by name) may lie on a worker; None: as the profile's pins say.
        remat: "auto" lets the search choose, "never" and "always" do not; a partition's own wish comes first.
    """
    profile = cost.profile
    may = allowed or (lambda name, worker: _pinned(profile, name, worker))
    number = {name: n for n, name in enumerate(profile.order)}
    nodes = []
    for name in profile.order:
        prices = [
            cost.partition(name, group[0], micro_batch)
            if may(name, group[0]) and cost.obstacle(name, group[0], micro_batch) is None
            else None
            for group in groups
        ]
        nodes.append(_node(profile.partition[name], prices, remat))
    return LoadProblem(
        nodes=tuple(nodes),
        outputs=_outputs(cost, micro_batch, groups, number),
        order=tuple((number[edge.source], number[edge.target]) for edge in profile.edges),
        devices=tuple(
            DeviceClass(", ".join(group), len(group), profile.worker[group[0]].tensor_bytes) for group in groups
        ),
        transfer=_transfer(cost, groups),
        in_flight=in_flight,
        apart=_apart(profile, number),
        shared=tuple(_shared(profile, tie, number) for tie in profile.ties),
    )


def plan_stages(
    profile: Profile, problem: LoadProblem, answer: LoadAnswer, groups: Sequence[Sequence[str]]
) -> tuple[plan.Stage, ...]:
    """The answer's stages in pipeline order, workers of a group in the order in which it names them."""
    left = [iter(group) for group in groups]
    stages = []
    for stage in answer.stages:
        chosen = zip(stage.nodes, stage.options, strict=True)
        again = [node for node, option in chosen if problem.nodes[node].options[option].name == REMATERIALISE]
        stages.append(
            plan.Stage(
                next(left[stage.device]),
                tuple(profile.order[node] for node in stage.nodes),
                tuple(profile.order[node] for node in again),
            )
        )
    return tuple(stages)


def _pinned(profile: Profile, name: str, worker: str) -> bool:
    pin = profile.partition[name].pin
    return pin is None or profile.matches(pin, profile.worker[worker])


def _node(partition: Partition, prices: Sequence[PartitionCost | None], remat: Remat) -> Node:
    """A partition with the options that are open to it."""

    def seconds(again: int) -> tuple[float, ...]:
        return tuple(
            math.inf if price is None else price.forward_s + price.backward_s + again * price.recompute_s
            for price in prices
        )

    known = [price for price in prices if price is not None]
    activation = max((price.activation_bytes for price in known), default=0.0)
    workspace = max((price.workspace_bytes for price in known), default=0.0)
    state = (
        partition.parameter_bytes + partition.gradient_bytes + partition.optimizer_bytes + partition.buffer_bytes
    )  # fmt: skip
    keep = Option("keep", seconds(0), stored=activation, fixed=state)
    again = Option(REMATERIALISE, seconds(1), fixed=state, peak=activation)
    wish = partition.rematerialise or remat
    if wish == "never" or not activation:
        options: tuple[Option, ...] = (keep,)
    else:
        options = (again,) if wish == "always" else (keep, again)
    return Node(partition.name, options, partition.colocate, workspace)


def _outputs(
    cost: CostModel, micro_batch: int, groups: Sequence[Sequence[str]], number: dict[str, int]
) -> tuple[Output, ...]:
    found = []
    for output in cost.outputs:
        edges = cost.readers[output]
        size = cost.output_bytes(output, micro_batch)
        found.append(
            Output(
                number[output.partition], tuple(number[edge.target] for edge in edges), held=size,
                gradients=tuple(edge.gradient for edge in edges), bytes=size,
                seconds=tuple(
                    tuple(cost.transfer_s(*pair, size) if pair else 0.0 for pair in row) for row in _pairs(groups)
                ),
            )
        )  # fmt: skip
    return tuple(found)


def _pairs(groups: Sequence[Sequence[str]]) -> list[list[tuple[str, str] | None]]:
    """By groups (sender, receiver) two workers that stand for all; None: there are no two."""
    return [
        [(one[0], other[0]) if one is not other else (one[0], one[1]) if len(one) > 1 else None for other in groups]
        for one in groups
    ]  # fmt: skip


def _transfer(cost: CostModel, groups: Sequence[Sequence[str]]) -> Transfer:
    if any(link.sender_s or link.receiver_s for link in cost.profile.links):
        raise ValueError("a load problem has busy shares alone: it cannot state the links' sender_s and receiver_s")
    shares = [
        [(0.0, 0.0) if not pair or (link := cost.link(*pair)) is None else (link.sender_busy, link.receiver_busy)
         for pair in row]
        for row in _pairs(groups)
    ]  # fmt: skip
    return Transfer(
        "links",
        sender_busy=tuple(tuple(sender for sender, _ in row) for row in shares),
        receiver_busy=tuple(tuple(receiver for _, receiver in row) for row in shares),
    )


def _apart(profile: Profile, number: dict[str, int]) -> tuple[tuple[int, int], ...]:
    by_label: dict[str, list[int]] = {}
    for partition in profile.partitions:
        if partition.apart is not None:
            by_label.setdefault(partition.apart, []).append(number[partition.name])
    return tuple(pair for nodes in by_label.values() for pair in itertools.combinations(nodes, 2))


def _shared(profile: Profile, tie: Tie, number: dict[str, int]) -> Shared:
    """What a tied parameter saves with its gradient and optimizer state."""
    saves = []
    for name in tie.partitions:
        owner = profile.partition[name]
        share = tie.bytes / owner.parameter_bytes if owner.parameter_bytes else 0.0
        saves.append(tie.bytes + share * (owner.gradient_bytes + owner.optimizer_bytes))
    return Shared(tuple(number[name] for name in tie.partitions), tuple(saves))
