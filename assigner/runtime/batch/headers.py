"""Shapes that go ahead of their values, where a value's shape depends on data and its receiver cannot work it out.

    sender     shape (1, 8, ...)   value                    the header on a route of its own, right before the value
    receiver   waits for the shape, posts the value, waits for the value

Its gradient needs no header on the way back: whoever made the value knows its shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from assigner.model.marking import Value
from assigner.runtime.messages.ordering import Message
from assigner.schedule.program import Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.model.marking import PartitionGraph
    from assigner.runtime.messages.transport import Transport
    from assigner.schedule.program import Program, Route

_MOST_DIMENSIONS = 16


def header_routes(graph: PartitionGraph, program: Program) -> tuple[Route, ...]:
    """The routes of the headers that a program's messages need."""
    return tuple(
        header_route(route)
        for route in program.routes
        if route.payload is Payload.ACTIVATION and graph.values[Value(route.partition, route.output)].shape is None
    )


def header_route(route: Route) -> Route:
    """The route of the shapes of a route's values."""
    return route._replace(payload=Payload.SHAPE)


def post_header(transport: Transport, message: Message) -> None:
    """Get ready for the shape of a message."""
    transport.post(Message(header_route(message.route), message.micro_batch), (1 + _MOST_DIMENSIONS,), torch.int64)


def send_header(transport: Transport, message: Message, shape: Sequence[int]) -> None:
    """Send the shape of a message ahead of it."""
    numbers = torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64, device="cpu")
    numbers[: 1 + len(shape)] = torch.tensor([len(shape), *shape], device="cpu")
    transport.send(Message(header_route(message.route), message.micro_batch), numbers)


def receive_header(transport: Transport, message: Message) -> tuple[int, ...]:
    """The shape of a message, for which `post_header` got ready, once it is there."""
    dimensions, *sizes = transport.receive(Message(header_route(message.route), message.micro_batch)).tolist()
    return tuple(sizes[:dimensions])
