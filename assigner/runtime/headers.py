"""Shapes that go ahead of their values, where a value's shape depends on data and its receiver cannot work it out.

    sender     shape (1, 8, ...)   value                    the header on a route of its own, right before the value
    receiver   waits for the shape, posts the value, waits for the value

Its gradient needs no header on the way back: whoever made the value knows its shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from assigner.marking import Value
from assigner.runtime.ordering import Message
from assigner.schedule import Payload

if TYPE_CHECKING:
    from assigner.marking import PartitionGraph
    from assigner.runtime.transport import Transport
    from assigner.schedule import Program, Route

MOST_DIMENSIONS = 16


def header_routes(graph: PartitionGraph, program: Program) -> tuple[Route, ...]:
    """The routes of the headers that a program's messages need."""
    return tuple(
        header_route(route)
        for route in program.routes
        if route.payload is Payload.ACTIVATION and graph.values[Value(route.partition, route.output)].shape is None
    )


def header_route(route: Route) -> Route:
    """The route of the shapes of a route's values."""
    outside = route.payload is Payload.OUTPUT  # the model's outputs are numbered on their own
    return replace(route, payload=Payload.SHAPE, output=-1 - route.output if outside else route.output)


def post_header(transport: Transport, message: Message) -> None:
    """Get ready for the shape of a message."""
    transport.post(Message(header_route(message.route), message.micro_batch), (1 + MOST_DIMENSIONS,), torch.int64)


def send_header(transport: Transport, message: Message, tensor: torch.Tensor) -> None:
    """Send the shape of a message."""
    numbers = torch.zeros(1 + MOST_DIMENSIONS, dtype=torch.int64)
    numbers[: 1 + tensor.dim()] = torch.tensor([tensor.dim(), *tensor.shape])
    transport.send(Message(header_route(message.route), message.micro_batch), numbers)


def receive_header(transport: Transport, message: Message) -> tuple[int, ...]:
    """The shape of a message whose header was posted, once it is there."""
    dimensions, *sizes = transport.receive(Message(header_route(message.route), message.micro_batch)).tolist()
    return tuple(sizes[:dimensions])
