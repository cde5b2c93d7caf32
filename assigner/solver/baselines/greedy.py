"""List scheduling: every partition, in the model's order, goes to the worker that would be through with it first.

Source: the earliest-finish rule of HEFT (Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002, section 4.2), for a step of M
micro-batches instead of one task. A stage that starts at `start`, gets its last micro-batch at `last` and takes `each`
seconds for one has

    its first micro-batch done at  start + each        its last one at  max(start + M each, last + each)

Forward and backward count as one, and so do the two messages of a value. A partition joins the last stage of a worker
where the graph lets it. Workers whose memory is full are left out; where that leaves none, all is placed once more as
if everything were rematerialised. The way back is not looked at: the simulator has the last word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.formats.plan import Plan
    from assigner.schedule.cost import PartitionCost, PartitionOutput
    from assigner.solver.baselines.prices import BaselinePrices
    from assigner.solver.problem.arrays import Flags, Floats, Ints


def earliest_finish(pricing: BaselinePrices) -> Iterator[Plan]:
    """Its placement at each micro-batch count; none where no worker has room or may hold a partition."""
    modes = {"auto": (False, True), "never": (False,), "always": (True,)}[pricing.problem.options.remat]
    for count in pricing.counts:
        found = (_Placing(pricing, count, again=again).place() for again in modes)
        candidate = next((each for each in found if each is not None), None)
        if candidate is not None:
            yield candidate


@dataclass(slots=True)
class _Stage:
    """A stage that was opened; its times are those of its first and of its last micro-batch."""

    worker: int
    first_s: float = 0.0
    done_s: float = 0.0
    names: list[str] = field(default_factory=list)


class _Placing:
    """One pass over the partitions, which are all rematerialised or none. Arrays have one entry per worker.

    Attributes:
        stage: Number of the worker's last stage; -1: none yet.
        start, last, each, done: When it starts, gets its last micro-batch, its seconds for one, and when it is through.
        held: Bytes of state, of values read and of stored activations, of all stages of the worker.
        redone, workspace: Bytes of the largest partition while it is redone, and while it computes.
        leaving: Bytes of the messages to others.
    """

    def __init__(self, pricing: BaselinePrices, count: int, *, again: bool) -> None:
        self.pricing, self.problem, self.count, self.again = pricing, pricing.problem, count, again
        table = self.problem.prices(count)
        self.size = table.size
        self.workers = pricing.quickest(count)
        self.prices = np.array([_row(table.costs(worker), again=again) for worker in self.workers])
        self.capacity = np.array([self.problem.profile.worker[worker].tensor_bytes for worker in self.workers])
        zero = np.zeros(len(self.workers))
        self.start, self.each, self.last, self.done = zero.copy(), zero.copy(), zero.copy(), zero.copy()
        self.held, self.redone, self.workspace, self.leaving = zero.copy(), zero.copy(), zero.copy(), zero.copy()
        self.stage = np.full(len(self.workers), -1)
        self.stages: list[_Stage] = []
        self.stage_of: dict[str, int] = {}
        self.read_in: dict[
            PartitionOutput, Ints
        ] = {}  # per value: the number of each worker's last stage that reads it
        self.left: set[PartitionOutput] = set()  # values that are read on another worker
        self.round_trip = cache(self._round_trip)

    def place(self) -> Plan | None:
        """The placement; None: at some partition no worker has room, or none may hold it."""
        for position, name in enumerate(self.problem.order):
            if not self._place(position, name):
                return None
        return self.pricing.placed(self.count, [(self.workers[each.worker], each.names) for each in self.stages])

    def _place(self, position: int, name: str) -> bool:
        inputs = self.problem.cost.reads[name]
        newest = max((self.stage_of[output.partition] for output in inputs), default=-1)
        joins = (self.stage >= 0) & (self.stage >= newest)
        first, last = self._arrivals(inputs, joins)
        start = np.maximum(first, np.where(joins, self.start, self.done))
        last = np.maximum(last, np.where(joins, self.last, 0.0))
        each = self.prices[:, position, 0] + np.where(joins, self.each, 0.0)
        done = np.maximum(start + self.count * each, last + each)
        held, redone, workspace = self._bytes(position, name, joins)
        leaving = sum(map(self._message_bytes, self.problem.cost.makes[name]))  # if all of its values should
        need = held + redone + workspace + self.leaving + leaving
        free = self._may_hold(name) & (need <= self.capacity) & np.isfinite(done)
        if not free.any():
            return False
        worker = int(np.argmin(np.where(free, done, np.inf)))
        self._open(worker, name, joins=bool(joins[worker]), inputs=inputs)
        for kept, new in (
            (self.start, start), (self.last, last), (self.each, each), (self.done, done),
            (self.held, held), (self.redone, redone), (self.workspace, workspace),
        ):  # fmt: skip
            kept[worker] = new[worker]
        stage = self.stages[self.stage_of[name]]
        stage.first_s, stage.done_s = float(start[worker] + each[worker]), float(done[worker])
        return True

    def _open(self, worker: int, name: str, *, joins: bool, inputs: Sequence[PartitionOutput]) -> None:
        """Put a partition on a worker: into its last stage, or into a new one."""
        if not joins:
            self.stage[worker] = len(self.stages)
            self.stages.append(_Stage(worker))
        number = int(self.stage[worker])
        self.stages[number].names.append(name)
        self.stage_of[name] = number
        for output in inputs:
            self.read_in.setdefault(output, np.full(len(self.workers), -1))[worker] = number
            maker = self.stages[self.stage_of[output.partition]].worker
            if maker != worker and output not in self.left:
                self.left.add(output)
                self.leaving[maker] += self._message_bytes(output)

    def _arrivals(self, inputs: Sequence[PartitionOutput], joins: Flags) -> tuple[Floats, Floats]:
        """When the first and the last micro-batch of all inputs would be on each worker; its own are no matter."""
        first, last = np.zeros(len(self.workers)), np.zeros(len(self.workers))
        for output in inputs:
            made = self.stages[self.stage_of[output.partition]]
            wire = self.round_trip(made.worker, self.problem.cost.output_bytes(output, self.size), self._graded(output))
            inside = joins & (np.arange(len(self.workers)) == made.worker)
            comes = np.where(inside, 0.0, made.first_s + wire)
            on_wire = (self.count - 1) * np.where(np.isfinite(wire), wire, 0.0)  # without a link it never comes
            ends = np.maximum(made.done_s + wire, comes + on_wire)
            first, last = np.maximum(first, comes), np.maximum(last, np.where(inside, 0.0, ends))
        return first, last

    def _round_trip(self, source: int, size: float, graded: bool) -> Floats:
        """Seconds of a value from a worker to each other one, and of its gradient back."""
        cost, here = self.problem.cost, self.workers[source]
        there = np.array([cost.transfer_s(here, other, size) for other in self.workers])
        if not graded:
            return there
        back: Floats = there + np.array([cost.transfer_s(other, here, size) for other in self.workers])
        return back

    def _graded(self, output: PartitionOutput) -> bool:
        return any(edge.gradient for edge in self.problem.cost.readers[output])

    def _message_bytes(self, output: PartitionOutput) -> float:
        return self.problem.cost.output_bytes(output, self.size) * (1 + self._graded(output))

    def _bytes(self, position: int, name: str, joins: Flags) -> tuple[Floats, Floats, Floats]:
        """What each worker would hold for good, for the largest partition that is redone, and while it computes."""
        cost, activations = self.problem.cost, self.prices[:, position, 1]
        held = self.held + cost.state((name,)).total + (0.0 if self.again else self.count * activations)
        for output in cost.reads[name]:
            read = self.read_in.get(output)
            known = joins & (read == self.stage) if read is not None else False
            held = held + np.where(known, 0.0, self.count * cost.output_bytes(output, self.size))
        redone = np.maximum(self.redone, activations) if self.again else self.redone
        return held, redone, np.maximum(self.workspace, self.prices[:, position, 2])

    def _may_hold(self, name: str) -> Flags:
        """The workers that labels and partitions to be kept apart leave."""
        problem = self.problem
        free = np.ones(len(self.workers), dtype=bool)
        for other in problem.together[name]:
            if other in self.stage_of:
                free &= np.arange(len(self.workers)) == self.stages[self.stage_of[other]].worker
        for group in problem.options.apart:
            if name in group:
                free[[self.stages[self.stage_of[other]].worker for other in group if other in self.stage_of]] = False
        return free


def _row(prices: Sequence[PartitionCost | None], *, again: bool) -> list[tuple[float, float, float]]:
    """Of each position: seconds there and back, activations, workspace; with a price of inf it cannot be there."""
    return [
        (float("inf"), 0.0, 0.0)
        if price is None
        else (
            price.forward_s + again * price.recompute_s + price.backward_s,
            price.activation_bytes,
            price.workspace_bytes,
        )
        for price in prices
    ]
