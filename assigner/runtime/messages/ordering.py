"""Messages, and the order in which those without tags pass from one worker to another.

NCCL matches the n-th send on a channel with the n-th receive. A channel goes one way between two workers, so its order
is the order in which its source's program sends; both ends know all programs and find the same one. A receiver that
needs a message posts all before it first, which its source has sent before:

    source   F0 →a0 →b0   F1 →a1 →b1        order: a0 b0 a1 b1
    target   ←b0 G0   ←a0 H0 ...            at ←b0 it posts a0 b0, and takes b0; at ←a0 a0 is there already

No wait goes in a circle that the program has not: a send holds up later sends of its channel alone, never its source's
computing; it ends when its receive is posted, which is no later than the target needs that or any later message of
the channel; and the two directions between workers are two channels.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from assigner.schedule.program import ActionKind, Route

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from assigner.schedule.program import Program


class Message(NamedTuple):
    """One message: a route and a micro-batch."""

    route: Route
    micro_batch: int

    @property
    def channel(self) -> Channel:
        """Where it passes, where messages have no tags. A step's messages and those of ties are two rounds of it."""
        return self.route.source, self.route.target, self.micro_batch < 0


Channel = tuple[str, str, bool]
"""Source, target, and whether it is the round of the ties: a step without an update has none."""


def sending_orders(
    program: Program, carried: Callable[[Route], bool] = lambda _route: True
) -> dict[Channel, tuple[Message, ...]]:
    """The order of the messages in each channel of a program."""
    orders: dict[Channel, list[Message]] = defaultdict(list)
    for actions in program.actions.values():
        for action in actions:
            if action.kind is ActionKind.SEND:
                assert action.route is not None
                if not carried(action.route):
                    continue
                message = Message(action.route, action.micro_batch)
                orders[message.channel].append(message)
    return {channel: tuple(order) for channel, order in orders.items()}


class Posting:
    """What is still to be posted of one run of a program."""

    def __init__(self, orders: Mapping[Channel, Sequence[Message]]) -> None:
        self._orders = orders
        self._place = {channel: {message: n for n, message in enumerate(order)} for channel, order in orders.items()}
        self._posted = dict.fromkeys(orders, 0)

    def due(self, message: Message) -> Sequence[Message]:
        """What to post now so that `message` is posted in its order: it and those before it that are not yet."""
        channel = message.channel
        first, end = self._posted[channel], self._place[channel][message] + 1
        self._posted[channel] = max(first, end)
        return self._orders[channel][first:end]

    def start_over(self) -> None:
        """The program runs once more."""
        self._posted = dict.fromkeys(self._orders, 0)
