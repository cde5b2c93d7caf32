"""Workers without processes: each is a member of a run whose messages are copies in this process's memory.

Their code has a thread for each, of which one runs at a time. What a rank does in a run blocks in the middle of it,
where it waits for a message. Here such a wait ends the thread's turn, and the next thread whose message is there goes
on. The order is the same each time, and nothing runs at once:

    worker 0    forward, send ...........................  receive, backward
    worker 1    ................ receive, forward, backward, send
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from assigner.errors import MarkingError
from assigner.model.marking import Value
from assigner.runtime.messages.transport import Transport, is_missing, missing_gradient
from assigner.runtime.ranks.membership import Membership
from assigner.runtime.step.stepmessages import unlike_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from assigner.runtime.messages.ordering import Message
    from assigner.runtime.recording.recorder import RecordedSpan
    from assigner.schedule.program import Program, Route

T = TypeVar("T")


class _StoppedError(BaseException):
    """Ends a thread whose companions have failed; no user code catches it."""


class _Turn(Generic[T]):
    """One thread and what it waits for."""

    def __init__(self, body: Callable[[], T]) -> None:
        self.ready: Callable[[], bool] = lambda: True
        self.done = self.stopped = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self._mine, self._given_back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[], T]) -> None:
        try:
            self._mine.acquire()
            if not self.stopped:
                self.result = body()
        except _StoppedError:
            self.result = None
        except BaseException as error:  # noqa: BLE001 - it is raised again where the turns are given
            self.error = error
        finally:
            self.done = True
            self._given_back.release()

    def give(self) -> None:
        """Let the thread run until it waits or ends."""
        self._mine.release()
        self._given_back.acquire()

    def wait(self, ready: Callable[[], bool]) -> None:
        """In the thread: end the turn until `ready` says yes."""
        self.ready = ready
        self._given_back.release()
        self._mine.acquire()
        if self.stopped:
            raise _StoppedError

    def stop(self) -> None:
        """End the thread, wherever it waits."""
        self.stopped = True
        self._mine.release()
        self._thread.join()


class Turns:
    """Runs the bodies of several workers, one at a time."""

    def __init__(self) -> None:
        self._current: _Turn[object] | None = None

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Called by a body: the others run until `ready` says yes."""
        if not ready():
            assert self._current is not None
            self._current.wait(ready)

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run all of them to their ends.

        Returns:
            What each of them returned.

        Raises:
            RuntimeError: each one that is left waits for something that nobody will do.
            BaseException: what one of them raised; the others are stopped.
        """
        turns = [_Turn(body) for body in bodies]
        try:
            while waiting := [turn for turn in turns if not turn.done]:
                able = [turn for turn in waiting if turn.ready()]
                if not able:
                    raise RuntimeError("every worker waits for a message that no other one sends")
                for turn in able:
                    self._current = turn  # type: ignore[assignment]
                    turn.give()
                    if turn.error is not None:
                        raise turn.error
        finally:
            self._current = None
            for turn in turns:
                turn.stop()
        return [turn.result for turn in turns]  # type: ignore[misc]


class Mailbox:
    """What the workers have sent to each other.

    Args:
        turns: Who waits for a message ends its turn.
        ranks: How many workers there are.
    """

    def __init__(self, turns: Turns, ranks: int) -> None:
        self.turns, self.ranks = turns, ranks
        self.messages: dict[Message, deque[torch.Tensor]] = defaultdict(deque)  # a sender may be a program ahead
        self.told: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)  # beside programs


class CopyingTransport(Transport):
    """The messages of one worker, which arrive as fresh contiguous memory without a history.

    Args:
        mailbox: Where they lie.
        rank: The worker's.
    """

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox, self._rank, self.direct = mailbox, rank, None
        self._expected: dict[Message, tuple[tuple[int, ...], torch.dtype]] = {}

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
        if tuple(tensor.shape) != shape:
            raise unlike_shape(Value(message.route.partition, message.route.output), tuple(tensor.shape), shape)
        if tensor.dtype != dtype:
            raise MarkingError(
                f"output {message.route.output} of partition {message.route.partition!r} is {tensor.dtype}; the"
                f" captured forward says {dtype}",
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

    def put_tensor(self, tensor: torch.Tensor, target: int) -> None:
        """Send a copy to a worker, beside the program."""
        self._mailbox.told[self._rank, target].append(tensor.clone())

    def get_tensor(self, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """What a worker puts next."""
        waiting = self._mailbox.told[source, self._rank]
        self._mailbox.turns.wait_until(lambda: bool(waiting))
        return waiting.popleft()

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
        self._watch, self._stop, self._groups = None, None, None
        self.groups = {}
        self.calls = ()
        self._left, self._settled = "", False
        self._owns_group = self.failed = False

    @property
    def ranks(self) -> range:
        """All workers' ranks."""
        return range(self._ranks)

    def fail(self, at: str, error: BaseException) -> None:
        """This worker failed."""
        self.failed = isinstance(error, Exception)  # and was not stopped for another one's failure
        super().fail(at, error)
