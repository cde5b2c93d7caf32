"""One rank's messages to and from the others while links are measured: on the runtime's own transport.

A message is then posted, copied from and to the device, sent and waited for as in training, and goes the same way: a
GPU's to another GPU through NCCL where training would, a large one to another CPU rank of the host through memory. Both
ends count the messages of their directed pair, so that each has a tag of its own; they are posted in that order, which
is the one that a channel without tags needs.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.location import Location
from assigner.runtime.messages.ordering import Message
from assigner.runtime.messages.transport import Transport
from assigner.schedule.program import Payload, Route

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from assigner.formats.terms import Backend
    from assigner.profiler.pairs import Pair

_FIRST_MESSAGE = 16  # the tags below are those of `tell`, and of the clocks' comparison
_TAG_TOLD = 1


def _route(source: int, target: int) -> Route:
    return Route(Payload.ACTIVATION, "", 0, f"worker:{source}/cpu", f"worker:{target}/cpu")


class Lane:
    """Sends and receives of this rank; a wait for another one that takes longer than `timeout_s` fails."""

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        *,
        device: torch.device,
        timeout_s: float,
        backend: Backend | None,
    ) -> None:
        self.rank, self.workers, self.device = rank, len(names), device
        self.names = tuple(names)
        self._transport = Transport.opened(names, device, timeout_s=timeout_s, backend=backend)
        self._sent: Counter[int] = Counter()
        self._posted: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._transport.close(failed=error is not None)

    def carrier_to(self, target: int) -> str:
        """What carries the messages to a rank: `gloo`, `nccl` or `mpi`."""
        direct = self._transport.direct
        is_direct = direct is not None and direct.carries(_route(self.rank, target))
        return "nccl" if is_direct else self._transport.carrier.name

    def reaches_gpu(self, link: tuple[int, int]) -> bool:
        """Whether one of a link's ends is a GPU."""
        return any(Location.parse(self.names[rank]).device.startswith("cuda") for rank in link)

    def open(self, pairs: Iterable[Pair]) -> None:
        """Get ready for messages between some pairs. All ranks call this with the same ones, before they use them."""
        self._transport.know(_route(*way) for pair in pairs for way in (pair, pair[::-1]))

    def buffer(self, size: int) -> torch.Tensor:
        """A tensor of `size` bytes to send."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def send(self, target: int, tensor: torch.Tensor) -> None:
        """Send a tensor; returns at once."""
        self._transport.send(Message(_route(self.rank, target), _FIRST_MESSAGE + self._sent[target]), tensor)
        self._sent[target] += 1

    def post(self, source: int, size: int) -> None:
        """Get ready for one more message of `size` bytes."""
        message = Message(_route(source, self.rank), _FIRST_MESSAGE + self._posted[source])
        self._transport.post(message, (size,), torch.uint8)
        self._posted[source] += 1

    def receive(self, source: int) -> torch.Tensor:
        """The next message that was posted, once it is there and on the device."""
        message = Message(_route(source, self.rank), _FIRST_MESSAGE + self._received[source])
        self._received[source] += 1
        received = self._transport.receive(message)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # sends go on meanwhile
        return received

    def flush(self) -> None:
        """Wait until everything sent has left."""
        self._transport.flush()

    def tell(self, peer: int, number: float) -> None:
        """Give `peer` a number; it calls `ask`."""
        dist.send(torch.tensor([number], dtype=torch.float64, device="cpu"), peer, tag=_TAG_TOLD)

    def ask(self, peer: int) -> float:
        """A number that `peer` tells."""
        told = torch.zeros(1, dtype=torch.float64, device="cpu")
        dist.recv(told, peer, tag=_TAG_TOLD)
        return float(told)
