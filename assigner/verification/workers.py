"""Workers without processes: each is a member of a run whose messages are copies in this process's memory."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import torch

from assigner.errors import MarkingError
from assigner.runtime.messages.transport import Transport, is_missing, missing_gradient
from assigner.runtime.ranks.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from assigner.runtime.messages.ordering import Message
    from assigner.runtime.recording.recorder import RecordedSpan
    from assigner.schedule.program import Program, Route
    from assigner.verification.turns import Turns


class Mailbox:
    """What the workers have sent to each other.

    Args:
        turns: Who waits for a message ends its turn.
        ranks: How many workers there are.
    """

    def __init__(self, turns: Turns, ranks: int) -> None:
        self.turns, self.ranks = turns, ranks
        self.messages: dict[Message, deque[torch.Tensor]] = defaultdict(deque)  # a sender may be a program ahead
        self.shared: dict[int, list[torch.Tensor]] = defaultdict(list)


class CopyingTransport(Transport):
    """The messages of one worker, which arrive as fresh contiguous memory without a history.

    Args:
        mailbox: Where they lie.
        rank: The worker's.
    """

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox, self._rank = mailbox, rank
        self._expected: dict[Message, tuple[tuple[int, ...], torch.dtype]] = {}
        self._taken: dict[int, int] = defaultdict(int)

    def know(self, routes: Iterable[Route]) -> None:
        """Messages have no numbers here."""

    def begin(self, program: Program) -> None:
        """Messages have no order here."""

    def due(self, message: Message) -> Sequence[Message]:
        """What to post so that `message` is posted."""
        return () if message in self._expected else (message,)

    def post(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Expect a message."""
        self._expected[message] = (tuple(shape), dtype)

    def receive(self, message: Message, span: RecordedSpan | None = None) -> torch.Tensor:  # noqa: ARG002 - of a trace
        """The message, once it is there.

        Raises:
            MarkingError: it is not what its receiver expects.
        """
        waiting = self._mailbox.messages[message]
        self._mailbox.turns.wait_until(lambda: bool(waiting))
        tensor = waiting.popleft()
        shape, dtype = self._expected.pop(message)
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise MarkingError(
                f"output {message.route.output} of partition {message.route.partition!r} is {tensor.dtype} of shape"
                f" {tuple(tensor.shape)}; the captured forward says {dtype} of shape {shape}",
                hint="mark a larger module that contains what reads it",
            )
        return tensor

    def receive_gradient(self, message: Message, span: RecordedSpan | None = None) -> torch.Tensor | None:
        """As `receive`, of a gradient; None: its sender has said that there is none."""
        tensor = self.receive(message, span)
        return None if is_missing(tensor) else tensor

    def send(self, message: Message, tensor: torch.Tensor, span: RecordedSpan | None = None) -> None:  # noqa: ARG002
        """Send a copy."""
        data = tensor.detach().resolve_conj().resolve_neg()
        self._mailbox.messages[message].append(data.clone(memory_format=torch.contiguous_format))

    def send_missing(self, message: Message, like: torch.Tensor, span: RecordedSpan | None = None) -> None:
        """Say that there is no gradient of `like`."""
        self.send(message, missing_gradient(like), span)

    def flush(self) -> None:
        """What was sent has left at once."""

    def share(self, value: torch.Tensor, root: int) -> torch.Tensor:
        """The value of `root`, on every worker; all of them call this in the same order."""
        if root == self._rank:
            self._mailbox.shared[root].append(value)
            return value
        number = self._taken[root]
        self._taken[root] += 1
        self._mailbox.turns.wait_until(lambda: len(self._mailbox.shared[root]) > number)
        return self._mailbox.shared[root][number].clone()

    def meet(self) -> None:
        """Nobody leaves before the others."""

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - nothing is waited for
        """Forget what is under way."""
        self._expected.clear()


class CopyingMembership(Membership):
    """One worker's part in a run of which all workers are in this process, on the CPU.

    Args:
        mailbox: What carries their messages.
        rank: The worker's.
        worker: Its name.

    Attributes:
        failed: What it does has failed; `at` says what that was.
    """

    def __init__(self, mailbox: Mailbox, rank: int, worker: str) -> None:
        self.at, self.on_leaving = "the start", None
        self.rank, self.worker, self.device = rank, worker, torch.device("cpu")
        self.transport: Transport | None = CopyingTransport(mailbox, rank)
        self._ranks = mailbox.ranks
        self._watch, self._direct, self._stop, self._groups = None, None, None, None
        self.groups = {}
        self.calls = ()
        self._left = self._owns_group = self.failed = False

    @property
    def ranks(self) -> range:
        """All workers' ranks."""
        return range(self._ranks)

    def fail(self, at: str, error: BaseException) -> None:
        """This worker failed."""
        self.failed = isinstance(error, Exception)  # and was not stopped for another one's failure
        super().fail(at, error)

    def text_from(self, rank: int, text: str) -> str:
        """One worker's text, for all of them."""
        assert self.transport is not None
        mine = torch.tensor([*text.encode()], dtype=torch.uint8, device="cpu")
        return bytes(self.transport.share(mine, rank).tolist()).decode()

    def numbers(self, number: float) -> list[float]:
        """Every worker's number, in their order."""
        assert self.transport is not None
        mine = torch.tensor(number, dtype=torch.float64, device="cpu")
        found = {self.rank: self.transport.share(mine, self.rank)}
        found.update({n: self.transport.share(mine, n) for n in range(self._ranks) if n != self.rank})
        return [float(found[n]) for n in range(self._ranks)]
