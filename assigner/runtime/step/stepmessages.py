"""What one rank's step holds between its actions, sends to other ranks and receives from them.

That is values, gradients, and those of shared parameters. Where a value's shape depends on data, and its receiver
cannot work it out, the shape goes ahead of it, as a header:

    sender     shape (1, 8, ...)   value                    the header on a route of its own, right before the value
    receiver   waits for the shape, posts the value, waits for the value

Its gradient needs no header on the way back: whoever made the value knows its shape.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from assigner.errors import MarkingError
from assigner.model.marking import PartitionGraph, Value
from assigner.runtime.batch.microbatch import MicroBatch
from assigner.runtime.batch.variants import header_route
from assigner.runtime.messages.ordering import Message
from assigner.runtime.recording.ranges import range_of
from assigner.runtime.stages.reduction import Reduction
from assigner.runtime.step.joined import Island
from assigner.schedule.orders import LETTERS, ActionKind
from assigner.schedule.program import Action, Payload, Program, Route

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from assigner.runtime.messages.transport import Transport
    from assigner.runtime.ranks.membership import Membership
    from assigner.runtime.recording.recorder import RecordedSpan, Recorder

COMPUTE = frozenset(LETTERS)
"""The actions that compute."""
Key = tuple[Value, int]
"""A value of one micro-batch."""
_AHEAD = 2
_SMALL_AHEAD = 4
_SMALL_BYTES = 1 << 18
_MOST_DIMENSIONS = 16


def unlike_shape(value: Value, shape: tuple[int, ...], captured: tuple[int, ...]) -> MarkingError:
    """The error for a value of another shape than its receiver works out, both shapes in full."""
    return MarkingError(
        f"output {value.index} of partition {value.partition!r} has shape {shape}; the captured forward says"
        f" {captured}: it hangs on values, as the longest of some lengths, which a receiver does not know",
        hint="give it a size of the inputs, as pad_packed_sequence(..., total_length=x.shape[0]), or mark a larger"
        " module that contains what reads it",
    )


@dataclass
class StepValues:
    """Of one step; between steps there are none."""

    number: int = 0  # the batch's, in training
    micro_batches: Sequence[MicroBatch] = ()
    places: Sequence[int] = ()  # their numbers in the whole batch
    counts: Counter[Key] = field(default_factory=Counter)  # how many partitions of this rank read a value in the step
    leaves: dict[Key, torch.Tensor] = field(default_factory=dict)  # what they read; its gradients are in `.grad`
    readers: Counter[Key] = field(default_factory=Counter)  # how many backwards of this rank still need a leaf
    gradients: dict[Key, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))  # from other ranks
    outbox: dict[Key, torch.Tensor] = field(default_factory=dict)  # what the last forward made for others
    islands: dict[tuple[int, int], list[Island]] = field(default_factory=dict)  # by stage and micro-batch, as they ran
    # of what this rank has sent, where shapes depend on data; the gradients have the same
    shapes: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    # adds up the gradients of stages that several workers share; None: not before the step's end
    reduction: Reduction | None = None

    def keep(self, key: Key, tensor: torch.Tensor, *, differentiable: bool, joined: int = 0) -> None:
        """Make a value a leaf if partitions of this rank read it, beside `joined` ones that have it with its graph."""
        if readers := self.counts[key] - joined:
            self.leaves[key] = tensor.detach().requires_grad_(differentiable)
            self.readers[key] = readers

    def read(self, keys: Iterable[Key]) -> None:
        """Each of these leaves has had one of its readers; behind the last one it goes."""
        for key in keys:
            self.readers[key] -= 1
            if not self.readers[key]:
                del self.leaves[key]

    def gradient(self, key: Key) -> torch.Tensor | None:
        """The gradient of a value that this rank made: of its readers here, and of those elsewhere."""
        leaf, total = self.leaves.pop(key, None), None
        if leaf is not None:
            total = leaf.grad
        for part in self.gradients.pop(key, ()):
            total = part if total is None else total + part
        return total


class StepMessages:
    """Carries out the sends and receives of a program."""

    def __init__(self, graph: PartitionGraph, member: Membership) -> None:
        self.graph, self.member = graph, member

    @property
    def transport(self) -> Transport:
        """To the other ranks; only asked for where there are some."""
        assert self.member.transport is not None
        return self.member.transport

    def post_ahead(self, actions: Sequence[Action], ahead: int, step: StepValues) -> Iterator[None]:
        """Post the receives of the first forwards and backwards; then, at each one, those of one more.

        So a message travels while its receiver computes, and its memory exists no longer than that takes.
        """
        computed = 0
        for action in actions:
            if action.kind is ActionKind.RECEIVE:
                assert action.route is not None
                for message in self.transport.due(Message(action.route, action.micro_batch)):
                    self._post(message, step)
            elif action.kind in COMPUTE:
                computed += 1
                if computed >= ahead:
                    yield

    def send(self, action: Action, step: StepValues, span: RecordedSpan | None) -> None:
        """Send what the last forward has made, or the gradient of what was received.

        Raises:
            MarkingError: it has not the shape that the captured forward says.
            LostConnectionError: the receiver is gone, or late.
        """
        assert action.route is not None
        route, micro_batch = action.route, action.micro_batch
        value = Value(route.partition, route.output)
        self.member.at = f"the send of {_what(route)}, micro-batch {step.places[micro_batch]}"
        if route.payload is Payload.GRADIENT:
            leaf = step.leaves.pop((value, micro_batch))
            self._send_gradient(Message(route, micro_batch), leaf.grad, leaf, span)
            return
        tensor = step.outbox[value, micro_batch]
        shape, found = self.graph.values[value], tuple(tensor.shape)
        # the receiver works it out by itself: a value of another shape must not leave
        expected = shape.sizes(step.micro_batches[micro_batch].inputs)
        if expected is not None and found != expected:
            raise unlike_shape(value, found, expected)
        if route.payload is Payload.ACTIVATION and shape.shape is None:
            step.shapes[value, micro_batch] = found
            header = torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64, device="cpu")
            header[: 1 + tensor.dim()] = torch.tensor([tensor.dim(), *tensor.shape], device="cpu")
            self.transport.send(Message(header_route(route), micro_batch), header)
        self.transport.send(Message(route, micro_batch), tensor, span)

    def _post(self, message: Message, step: StepValues) -> None:
        route = message.route
        place = step.places[message.micro_batch]
        self.member.at = f"getting ready for {_what(route)} from {route.source}, micro-batch {place}"
        shape = self.graph.values[Value(route.partition, route.output)]
        sizes = shape.sizes(step.micro_batches[message.micro_batch].inputs)
        if sizes is not None:
            self.transport.post(message, sizes, shape.dtype)
        elif route.payload is Payload.ACTIVATION:
            self.transport.post(Message(header_route(route), message.micro_batch), (1 + _MOST_DIMENSIONS,), torch.int64)

    def receive(self, action: Action, step: StepValues, span: RecordedSpan | None) -> None:
        """Have what arrives among the step's values, ready to be read, or among its gradients.

        Raises:
            LostConnectionError: the sender is gone, or late.
        """
        assert action.route is not None
        route, micro_batch = action.route, action.micro_batch
        place = step.places[micro_batch]
        self.member.at = f"the receive of {_what(route)} from {route.source}, micro-batch {place}"
        message, value = Message(route, micro_batch), Value(route.partition, route.output)
        shape = self.graph.values[value]
        if shape.shape is None:
            if (sizes := step.shapes.get((value, micro_batch))) is None:
                dimensions, *found = self.transport.receive(Message(header_route(route), micro_batch)).tolist()
                sizes = tuple(found[:dimensions])
            self.transport.post(message, sizes, shape.dtype)
        if route.payload is not Payload.GRADIENT:
            tensor = shape.laid_out(self.transport.receive(message, span))
            step.keep((value, micro_batch), tensor, differentiable=shape.gradient)
        elif (gradient := self.transport.receive_gradient(message, span)) is not None:
            step.gradients[value, micro_batch].append(gradient)

    def exchange_ties(
        self,
        program: Program,
        parameters: Mapping[int, torch.Tensor],
        gradients: Mapping[int, torch.Tensor],
        recorder: Recorder | None,
    ) -> dict[int, list[torch.Tensor]]:
        """Send this worker's gradients of shared parameters and receive the others'.

        Returns:
            tie -> the gradients of all holders that have one, this one too, in the order of the workers' names.
        """
        found = {number: {self.member.name: gradients.get(number)} for number in parameters}
        routes = [
            action for action in program.actions.get(self.member.name, ()) if action.route and action.micro_batch < 0
        ]
        for action in routes:
            assert action.route is not None
            self.member.at = f"the exchange of shared parameter {self.graph.ties[action.route.output].parameter!r}"
            message, tie = Message(action.route, -1), action.route.output
            span = None if recorder is None else recorder.begin(action)
            with range_of(action, program.plan.stages):
                if action.kind is ActionKind.SEND:
                    self._send_gradient(message, gradients.get(tie), parameters[tie], span)
                else:
                    for each in self.transport.due(message):
                        like = parameters[each.route.output]
                        self.transport.post(each, tuple(like.shape), like.dtype)
                    found[tie][action.route.source] = self.transport.receive_gradient(message, span)
        return {
            number: [gradient for _, gradient in sorted(of_worker.items()) if gradient is not None]
            for number, of_worker in found.items()
        }

    def _send_gradient(
        self, message: Message, gradient: torch.Tensor | None, like: torch.Tensor, span: RecordedSpan | None
    ) -> None:
        if gradient is None:
            self.transport.send_missing(message, like, span)
        else:
            self.transport.send(message, gradient, span)


@functools.lru_cache(maxsize=1024)
def _what(route: Route) -> str:
    kind = "the gradient of output" if route.payload is Payload.GRADIENT else "output"
    return f"{kind} {route.output} of partition {route.partition!r}"


def posted_ahead(graph: PartitionGraph, program: Program, worker: str, micro_batches: Sequence[MicroBatch]) -> int:
    """For so many forwards and backwards to come a worker has posted the receives: 4 where its messages are small.

    A message whose receive is posted travels while its receiver computes, and gloo sends it at once; else its two ends
    first talk in four turns, each of which wakes a thread (2 ranks, tiny messages, 1f1b: 1049 us of CPU time a
    micro-batch two actions ahead, 478 us four ahead). A posted receive takes memory: large messages are posted late.
    """
    rows = graph.rows.counted(max(each.rows for each in micro_batches))
    values = [
        graph.values[Value(route.partition, route.output)]
        for route in program.routes
        if route.target == worker and route.payload in (Payload.ACTIVATION, Payload.GRADIENT)
    ]
    largest = max((value.bytes_per_sample * rows + value.fixed_bytes for value in values), default=0.0)
    return _SMALL_AHEAD if largest <= _SMALL_BYTES else _AHEAD
