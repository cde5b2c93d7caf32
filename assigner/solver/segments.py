"""Segments: which intervals of partitions fit on which worker, at what price, with the best rematerialisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from assigner.solver.remat import least_remat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from assigner.cost import Output, PartitionCost
    from assigner.solver.problem import Problem


@dataclass(frozen=True, slots=True)
class Column:
    """A stage on a worker of one group; times in seconds per micro-batch, the update's per step.

    Args:
        first: Position of its first partition.
        last: Position of its last.
        group: Number of the worker's group.
        forward_s: One forward.
        backward_s: One backward, with what is rematerialised.
        update_s: The optimizer's update; of a graph, at least what follows the last backward: shared gradients, too.
        rematerialise: Positions of the partitions that run forward again.
    """

    first: int
    last: int
    group: int
    forward_s: float
    backward_s: float
    update_s: float
    rematerialise: tuple[int, ...] = ()


class SegmentSizes:
    """Bytes of a segment that do not depend on its worker: state, values read, messages."""

    def __init__(self, problem: Problem, size: int) -> None:
        self._problem, self._size, cost = problem, size, problem.cost
        self._tied = {name for tie in problem.profile.ties for name in tie.partitions}
        self._leaving: list[list[tuple[float, int, int]]] = [[] for _ in problem.order]
        for output in cost.outputs:
            edges = cost.readers[output]
            last = max(problem.position[edge.target] for edge in edges)
            graded = max((problem.position[edge.target] for edge in edges if edge.gradient), default=-1)
            bytes_ = cost.output_bytes(output, self._size)
            self._leaving[problem.position[output.partition]].append((bytes_, last, graded))
        self.grown = cache(lambda first: tuple(self.grown_from(first)))

    def grown_from(self, first: int) -> Iterator[tuple[float, float, float]]:
        """(state, values read, messages) in bytes of the segments first .. first, first .. first + 1, and so on."""
        problem, cost = self._problem, self._problem.cost
        state, read = 0.0, 0.0
        seen: set[Output] = set()
        held: list[str] = []
        open_values: list[tuple[float, int, int]] = []
        for last in range(first, len(problem.order)):
            name = problem.order[last]
            held.append(name)
            if name in self._tied:
                state = cost.state(held).total
            else:
                state += cost.state((name,)).total
            for output in cost.reads[name]:
                if output not in seen:
                    seen.add(output)
                    read += cost.output_bytes(output, self._size)
            open_values = [value for value in (*open_values, *self._leaving[last]) if value[1] > last]
            yield state, read, sum(bytes_ * (1 + (graded > last)) for bytes_, _, graded in open_values)


def group_columns(
    problem: Problem, group: int, prices: Sequence[PartitionCost | None], sizes: SegmentSizes, *,
    micro_batches: int, capacity: float, tied_s: Callable[[int, int, int], float],
) -> Iterator[Column]:  # fmt: skip
    """Every segment that fits on a worker of one group.

    Args:
        problem: What is to be placed.
        group: The group's number.
        prices: Of each position on the group's workers; None: not there.
        sizes: Bytes of the segments at this micro-batch size.
        micro_batches: M, all of them in flight.
        capacity: The worker's memory less its reserve, in bytes.
        tied_s: `Instance.tied_s`.
    """
    for first in range(len(prices)):
        if not problem.may_cut[first]:
            continue
        held: list[PartitionCost] = []
        forward = backward = update = workspace = 0.0
        for last, (state, read, messages) in enumerate(sizes.grown(first), start=first):
            price = prices[last]
            if price is None or problem.apart[last] >= first:
                break
            held.append(price)
            forward += price.forward_s
            backward += price.backward_s
            update += price.update_s
            workspace = max(workspace, price.workspace_bytes)
            fixed = state + micro_batches * read + workspace
            if fixed > capacity:
                break
            if problem.may_cut[last + 1]:
                again = least_remat(
                    [each.activation_bytes for each in held], [each.recompute_s for each in held],
                    in_flight=micro_batches, room=capacity - fixed - messages,
                    rules=problem.remat_rules[first : last + 1],
                )  # fmt: skip
                if again is not None:
                    repeated = sum(held[i].recompute_s for i in again)
                    after = max(update, tied_s(first, last, group))
                    if after < math.inf:
                        yield Column(
                            first, last, group, forward, backward + repeated, after, tuple(first + i for i in again)
                        )
