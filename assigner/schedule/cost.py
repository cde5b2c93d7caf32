"""Durations and bytes of one action: the only place that interpolates between measurements.

`CostModel` answers for one profile: how long partition i takes on worker w at micro-batch size b, how long n
bytes take over link (u, v), how long some workers add up gradients, and what a worker must hold at its peak.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

from assigner.errors import FormatError
from assigner.formats.prediction import Memory
from assigner.schedule.rings import BUCKET_BYTES, ReducePrices

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence

    from assigner.formats.profile import Collective, Edge, Link, LinkPoint, Measurement, Profile, Tie
    from assigner.schedule.orders import Halves


_STRETCH = 0.02  # what rounding and small noise may take off a line that goes through the origin


@dataclass(frozen=True)
class PartitionCost:
    """One partition on one worker at one micro-batch size: seconds and bytes.

    `recompute_s` is what rematerialising adds to forward and backward together. `parts` are the seconds of the input
    and of the weight part of a backward, and the bytes that wait between them; None: they were not measured.
    """

    forward_s: float
    backward_s: float
    update_s: float
    activation_bytes: float
    workspace_bytes: float
    recompute_s: float
    parts: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class PartitionOutput:
    """A value that a partition makes: `partition`'s output number `index`."""

    partition: str
    index: int


class MessageTime(NamedTuple):
    """One message over one link: seconds on the wire, and in which its two ends are busy with it."""

    seconds: float
    sender_s: float
    receiver_s: float


class CostModel:
    """Prices of one profile.

    Args:
        profile: The measurements. Workers of one kind and thread count, and partitions of one kind, share them.

    Attributes:
        wires: Of each link that shares a wire, by source and target: the wire's number, and `Wire.share`.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._points: dict[tuple[Hashable, Hashable], list[Measurement]] = {}
        exact: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
        for measured in profile.measurements:
            exact[measured.partition, measured.worker].append(measured)
        for (partition, worker), found in exact.items():
            for key in self._keys(partition, worker):
                self._points.setdefault(key, found)
        self.wires = {
            (link.source, link.target): (n, wire.share) for n, wire in enumerate(profile.wires) for link in wire.links
        }
        self.partition = cache(self._partition)
        self.transfer_s = cache(self._transfer_s)
        self.reduce_s = cache(self._reduce_s)
        self.reduce_busy_s = cache(self._reduce_busy_s)

    @cached_property
    def apart(self) -> CostModel:
        """The same with a wire for each link: by it no plan takes longer, as a wire that is shared only delays."""
        if not self.wires:
            return self
        found = copy(self)
        found.wires = {}
        return found

    def _keys(self, partition: str, worker: str) -> Iterator[tuple[Hashable, Hashable]]:
        """What may stand for a pair, the nearest first: itself, the worker with a like partition, then like workers."""
        part, like = (self.profile.partition[partition].kind,), self.profile.worker[worker].alike  # no tuple is a name
        yield from ((partition, worker), (part, worker), (partition, like), (part, like))

    def measurements(self, partition: str, worker: str) -> list[Measurement]:
        """The points that price a pair: its own, or those of a pair of the same kinds; empty: none."""
        return next((self._points[key] for key in self._keys(partition, worker) if key in self._points), [])

    @cached_property
    def first_alike(self) -> dict[str, str]:
        """For each worker the first one that has its prices: for every partition the same points."""
        first: dict[tuple[int | None, ...], str] = {}
        found = {}
        for worker in self.profile.worker:
            points = [self.measurements(partition, worker) for partition in self.profile.partition]
            found[worker] = first.setdefault(tuple(id(each) if each else None for each in points), worker)
        return found

    def obstacle(self, partition: str, worker: str, micro_batch: int) -> str | None:
        """Why a partition cannot be priced on a worker at this micro-batch size; None: it can."""
        found = self.measurements(partition, worker)
        if not found:
            return f"{partition} was not measured on {worker}"
        for point in found:
            if point.infeasible is not None and micro_batch >= point.micro_batch:
                return f"{partition} on {worker} at micro-batch {point.micro_batch}: {point.infeasible}"
        sizes = [point.micro_batch for point in found if point.infeasible is None]
        if micro_batch not in sizes and len(sizes) < 2:
            known = f"only micro-batch {sizes[0]}" if sizes else "no micro-batch size"
            return f"{partition} on {worker} was measured at {known}, not at {micro_batch}"
        return None

    def _partition(self, partition: str, worker: str, micro_batch: int) -> PartitionCost:
        """What `partition` costs on `worker` at `micro_batch` samples.

        A measured size gives that value, a size between two the line between them, a size outside the line
        through the two nearest, never below zero.

        Raises:
            FormatError: the profile cannot price the pair at this size (`obstacle` says why).
        """
        why = self.obstacle(partition, worker, micro_batch)
        if why is not None:
            raise FormatError(
                f"the profile cannot price this: {why}",
                hint="profile it there, with two or more sizes in --micro-batches",
            )
        found = sorted(
            (point for point in self.measurements(partition, worker) if point.infeasible is None),
            key=lambda point: point.micro_batch,
        )
        position = bisect_left([point.micro_batch for point in found], micro_batch)
        if position < len(found) and found[position].micro_batch == micro_batch:
            low = high = found[position]
            share = 0.0
        else:
            position = min(max(position, 1), len(found) - 1)
            low, high = found[position - 1], found[position]
            share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)

        def line(at_low: float, at_high: float) -> float:
            return at_low if share == 0 else max(0.0, at_low + share * (at_high - at_low))

        return PartitionCost(
            forward_s=line(low.forward_s, high.forward_s),
            backward_s=line(low.backward_s, high.backward_s),
            update_s=line(low.update_s, high.update_s),
            activation_bytes=line(low.activation_bytes, high.activation_bytes),
            workspace_bytes=line(low.workspace_bytes, high.workspace_bytes),
            recompute_s=line(_recompute_s(low), _recompute_s(high)),
            parts=tuple(map(line, low.parts, high.parts)) if low.parts and high.parts else None,  # type: ignore[arg-type]
        )

    def is_plausible(self, micro_batch: int) -> bool:
        """False where a size is below the measured ones and the line promises it cheaper, per sample, than those.

        A smaller micro-batch never costs less a sample: such a line is the noise of its two points, stretched. Looked
        at for each worker over all its partitions.
        """
        for worker in dict.fromkeys(self.first_alike.values()):
            said = floor = 0.0
            for partition in self.profile.partition:
                points = [point for point in self.measurements(partition, worker) if point.infeasible is None]
                smallest = min(points, key=lambda point: point.micro_batch, default=None)
                if smallest is None or smallest.micro_batch <= micro_batch:
                    continue
                if self.obstacle(partition, worker, micro_batch) is None:
                    price = self.partition(partition, worker, micro_batch)
                    said += price.forward_s + price.backward_s
                    share = micro_batch / smallest.micro_batch
                    floor += share * (smallest.forward_s + smallest.backward_s)
            if said < floor * (1 - _STRETCH):
                return False
        return True

    def link(self, source: str, target: str) -> Link | None:
        """The directed link between two workers; None: they cannot talk."""
        return self.profile.link.get((source, target))

    def _transfer_s(self, source: str, target: str, size: float) -> float:
        """Seconds that one message of `size` bytes takes from `source` to `target`; inf without a link."""
        if source == target:
            return 0.0
        link = self.link(source, target)
        return math.inf if link is None else message_s(link.points, size)

    def message(self, source: str, target: str, size: float) -> MessageTime:
        """One message of `size` bytes: as of `transfer_s`, and in which its two ends cannot compute."""
        seconds, link = self.transfer_s(source, target, size), self.link(source, target)
        if link is None:
            return MessageTime(seconds, 0.0, 0.0)
        return MessageTime(
            seconds, link.sender_s + link.sender_busy * seconds, link.receiver_s + link.receiver_busy * seconds
        )

    @cached_property
    def rings(self) -> ReducePrices:
        """Prices of all-reduces."""
        return ReducePrices(self.profile, self.transfer_s)

    def _reduce_s(self, workers: tuple[str, ...], size: float) -> float:
        """Seconds in which workers add up a tensor of `size` bytes that each of them has, bucket by bucket.

        One worker has nothing to add; the order of workers makes no difference. `rings` has the formula.

        Raises:
            FormatError: the profile lacks a link that this needs (`rings.obstacle` says which).
        """
        members = frozenset(workers)
        if len(members) < 2 or size <= 0:
            return 0.0
        why = self.rings.obstacle(members)
        if why is not None:
            raise FormatError(
                f"the profile cannot price this: {why}", hint="measure it on all ranks: assigner profile --only links"
            )
        buckets, rest = divmod(size, BUCKET_BYTES)
        whole = buckets * self.rings.seconds(members, BUCKET_BYTES) if buckets else 0.0
        return whole + (self.rings.seconds(members, rest) if rest else 0.0)

    def _reduce_busy_s(self, workers: tuple[str, ...], size: float) -> float:
        """Seconds of that in which each of the workers cannot compute; errors as `reduce_s`."""
        seconds = self.reduce_s(workers, size)
        return self.rings.busy_share(frozenset(workers)) * seconds if seconds else 0.0

    @cached_property
    def outputs(self) -> dict[PartitionOutput, Edge]:
        """One edge for each value that crosses between partitions: its size."""
        return {PartitionOutput(edge.source, edge.output): edge for edge in reversed(self.profile.edges)}

    def output_bytes(self, output: PartitionOutput, micro_batch: int) -> float:
        """Bytes of one value for one micro-batch."""
        edge = self.outputs[output]
        return edge.bytes_per_sample * micro_batch + edge.fixed_bytes

    def input_bytes(self, partitions: Iterable[str], micro_batch: int) -> float:
        """Bytes of the values that partitions of one stage read of each other and of others, for one micro-batch."""
        read = dict.fromkeys(output for name in partitions for output in self.reads[name])
        return sum(self.output_bytes(output, micro_batch) for output in read)

    @cached_property
    def reads(self) -> dict[str, tuple[PartitionOutput, ...]]:
        """The values that each partition reads from others, in the order of the profile's edges."""
        found: dict[str, list[PartitionOutput]] = {name: [] for name in self.profile.partition}
        for edge in self.profile.edges:
            found[edge.target].append(PartitionOutput(edge.source, edge.output))
        return {name: tuple(outputs) for name, outputs in found.items()}

    @cached_property
    def differentiated(self) -> frozenset[str]:
        """The partitions that read something whose gradient goes back; the backward of others is all weight part."""
        return frozenset(edge.target for edge in self.profile.edges if edge.gradient)

    @cached_property
    def makes(self) -> dict[str, tuple[PartitionOutput, ...]]:
        """The values that each partition makes for others."""
        found: dict[str, list[PartitionOutput]] = {name: [] for name in self.profile.partition}
        for output in self.outputs:
            found[output.partition].append(output)
        return {name: tuple(outputs) for name, outputs in found.items()}

    @cached_property
    def readers(self) -> dict[PartitionOutput, tuple[Edge, ...]]:
        """The edges on which each value leaves its partition."""
        found: dict[PartitionOutput, list[Edge]] = defaultdict(list)
        for edge in self.profile.edges:
            found[PartitionOutput(edge.source, edge.output)].append(edge)
        return {output: tuple(edges) for output, edges in found.items()}

    def tied_share(self, partition: str, tie: Tie) -> float:
        """The part of a partition's parameters that is one that it shares."""
        whole = self.profile.partition[partition].parameter_bytes
        return tie.bytes / whole if whole else 0.0

    def state(self, partitions: Iterable[str]) -> Memory:
        """Parameters, gradients, optimizer state and buffers of partitions on one worker.

        A parameter that several of them hold is there once, with its gradient and its optimizer state.
        """
        held = [self.profile.partition[name] for name in partitions]
        parameters = sum(each.parameter_bytes for each in held)
        gradients = sum(each.gradient_bytes for each in held)
        optimizer = sum(each.optimizer_bytes for each in held)
        names = {each.name for each in held}
        for tie in self.profile.ties:
            members = [name for name in tie.partitions if name in names]
            for name in members[1:]:
                owner, share = self.profile.partition[name], self.tied_share(name, tie)
                parameters -= tie.bytes
                gradients -= share * owner.gradient_bytes
                optimizer -= share * owner.optimizer_bytes
        return Memory(
            parameters=max(0, parameters), gradients=max(0, gradients), optimizer=max(0, optimizer),
            buffers=sum(each.buffer_bytes for each in held),
        )  # fmt: skip

    def parts(self, partition: str, worker: str, micro_batch: int) -> tuple[float, float, float]:
        """Seconds of the input and of the weight part of a backward, and the bytes that wait between them.

        Raises:
            FormatError: they were not measured.
        """
        found = self.partition(partition, worker, micro_batch).parts
        if found is None:
            raise FormatError(
                f"the profile cannot price this: the parts of the backward of {partition} were not measured on"
                f" {worker} at micro-batch {micro_batch}",
                hint="assigner profile --split-backward measures them; or list whole backwards: B instead of I and W",
            )
        return found

    def waiting_bytes(
        self, partitions: Iterable[str], rematerialise: Container[str], worker: str, micro_batch: int
    ) -> float:
        """What a stage keeps of a micro-batch between the parts of its backward, its inputs left out.

        Errors as `parts`. A partition that reads nothing with a gradient puts off its recompute: it has no graph yet.
        """
        found = 0.0
        for name in partitions:
            waiting = self.parts(name, worker, micro_batch)[2]
            if name in rematerialise and name not in self.differentiated:
                waiting = max(0.0, waiting - self.partition(name, worker, micro_batch).activation_bytes)
            found += waiting
        return found

    def gradient_bytes(self, partitions: Iterable[str], apart: Sequence[Tie]) -> float:
        """Bytes of the gradients of partitions on one worker, but for those of the shared parameters `apart`."""
        names = tuple(partitions)
        found = self.state(names).gradients
        for tie in apart:
            owner = next((self.profile.partition[name] for name in tie.partitions if name in names), None)
            if owner is not None:
                found -= self.tied_share(owner.name, tie) * owner.gradient_bytes
        return max(0.0, found)

    def memory(
        self,
        worker: str,
        stages: Sequence[tuple[Sequence[str], Iterable[str], int]],
        micro_batch: int,
        *,
        leaving: Iterable[Edge] | None = None,
        bucket_bytes: float = 0.0,
        state: Memory | None = None,
        halves: Mapping[int, Iterable[Halves]] | None = None,
    ) -> Memory:
        """What a worker holds at its peak, in bytes; its workspace includes what the allocator takes beside tensors.

        Args:
            worker: The worker's name.
            stages: Its stages, each as (partitions, those rematerialised, micro-batches in flight).
            micro_batch: Samples in a micro-batch.
            leaving: The edges whose values it sends; None: those to partitions that it does not hold.
            bucket_bytes: Of gradients on their way in a reduction.
            state: Of its partitions; None: all of it, as `state` has it.
            halves: Of stages whose backwards run in two parts, by position: how many micro-batches have their graph
                and how many wait for their weight part, at each moment; else all in flight have their graph.

        Raises:
            FormatError: the profile knows nothing of the parts of such a backward.
        """
        held = [name for partitions, _, _ in stages for name in partitions]
        cost = {name: self.partition(name, worker, micro_batch) for name in held}
        activations = 0.0
        again: set[str] = set()
        for n, (partitions, rematerialise, in_flight) in enumerate(stages):
            remat = set(rematerialise)
            again |= remat
            kept = sum(cost[name].activation_bytes for name in partitions if name not in remat)
            inputs = self.input_bytes(partitions, micro_batch)
            if halves and n in halves:
                waiting = self.waiting_bytes(partitions, remat, worker, micro_batch)
                activations += in_flight * inputs
                activations += max((each.graphs * kept + each.waiting * waiting for each in halves[n]), default=0.0)
            else:
                activations += in_flight * (kept + inputs)
        activations += max((cost[name].activation_bytes for name in again), default=0)
        inside, messages = set(held), bucket_bytes
        if leaving is None:
            made = (output for name in held for output in self.makes[name])
            leaving = (edge for output in made for edge in self.readers[output] if edge.target not in inside)
        sent: dict[PartitionOutput, bool] = {}  # and whether its gradient comes back
        for edge in leaving:
            output = PartitionOutput(edge.source, edge.output)
            sent[output] = sent.get(output, False) or edge.gradient
        for output, comes_back in sent.items():
            messages += self.output_bytes(output, micro_batch) * (1 + comes_back)
        state = state or self.state(held)
        tensors = Memory(
            parameters=state.parameters, gradients=state.gradients, optimizer=state.optimizer, buffers=state.buffers,
            activations=activations, workspace=max((each.workspace_bytes for each in cost.values()), default=0),
            messages=messages,
        )  # fmt: skip
        beyond = self.profile.worker[worker].allocator_share * tensors.total
        return replace(tensors, workspace=tensors.workspace + beyond)


def collectives_over(profile: Profile, links: Iterable[Link]) -> tuple[Collective, ...]:
    """The profile's all-reduces with other links: each takes as many times as long as the ring formula then says.

    What they say of the formula stays the same.
    """
    if not profile.collectives:
        return ()
    before, after = CostModel(profile).rings, CostModel(replace(profile, links=tuple(links))).rings

    def times(workers: frozenset[str], size: float) -> float:
        was, is_now = before.formula_s(workers, size), after.formula_s(workers, size)
        return is_now / was if 0 < was < math.inf and is_now < math.inf else 1.0

    return tuple(
        replace(
            each,
            points=tuple(
                replace(point, seconds=point.seconds * times(frozenset(each.workers), point.bytes))
                for point in each.points
            ),
        )
        for each in profile.collectives
    )


def _recompute_s(point: Measurement) -> float:
    """A recompute costs a forward unless it was measured."""
    return point.forward_s if point.recompute_s is None else point.recompute_s


def message_s(points: Sequence[LinkPoint], size: float) -> float:
    """One-way seconds of a message, from a link's sweep.

    Between two points: linear in log(bytes), log(seconds). Below the smallest: that one's time. Above the largest:
    alpha + size / beta through the two largest (one point alone: in proportion), never faster than the largest.
    """
    if size <= points[0].bytes:
        return points[0].seconds
    last = points[-1]
    if size >= last.bytes:
        if len(points) == 1:
            return last.seconds * size / last.bytes if last.bytes else last.seconds
        before = points[-2]
        slope = (last.seconds - before.seconds) / (last.bytes - before.bytes)
        return last.seconds + max(0.0, slope) * (size - last.bytes)
    position = bisect_left([point.bytes for point in points], size)
    low, high = points[position - 1], points[position]
    if size == high.bytes:
        return high.seconds
    if min(low.seconds, high.seconds, low.bytes) <= 0:
        share = (size - low.bytes) / (high.bytes - low.bytes)
        return low.seconds + share * (high.seconds - low.seconds)
    share = math.log(size / low.bytes) / math.log(high.bytes / low.bytes)
    return float(low.seconds * (high.seconds / low.seconds) ** share)
