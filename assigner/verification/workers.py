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
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from assigner.errors import MarkingError
from assigner.runtime.messages.transport import Transport, is_missing, missing_gradient
from assigner.runtime.ranks.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

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
        self.future: Future[T] = Future()
        self._stopped = False
        self._mine, self._given_back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[], T]) -> None:
        try:
            self._take()
            self.future.set_result(body())
        except BaseException as error:  # noqa: BLE001 - it is raised again where the turns are given
            self.future.set_exception(error)
        finally:
            self._given_back.release()

    def _take(self) -> None:
        self._mine.acquire()
        if self._stopped:
            raise _StoppedError

    def give(self) -> None:
        """Let the thread run until it waits or ends."""
        self._mine.release()
        self._given_back.acquire()

    def wait(self, ready: Callable[[], bool]) -> None:
        """In the thread: end the turn until `ready` says yes."""
        self.ready = ready
        self._given_back.release()
        self._take()

    def stop(self) -> None:
        """End the thread, wherever it waits."""
        self._stopped = True
        self._mine.release()
        self._thread.join()


class Turns:
    """Runs the bodies of several workers, one at a time, and has what they have sent to each other."""

    def __init__(self) -> None:
        self._current: _Turn[object] | None = None
        self._sent: dict[Hashable, deque[torch.Tensor]] = defaultdict(deque)  # a sender may be a program ahead

    def put(self, label: Hashable, tensor: torch.Tensor) -> None:
        """Called by a body: leave a tensor for the one that takes what has this label."""
        self._sent[label].append(tensor)

    def take(self, label: Hashable) -> torch.Tensor:
        """Called by a body: the next one; the others run until it is there."""
        sent = self._sent[label]
        if not sent:
            assert self._current is not None
            self._current.wait(lambda: bool(sent))
        return sent.popleft()

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
            while waiting := [turn for turn in turns if not turn.future.done()]:
                able = [turn for turn in waiting if turn.ready()]
                if not able:
                    raise RuntimeError("every worker waits for a message that no other one sends")
                for turn in able:
                    self._current = turn  # type: ignore[assignment]
                    turn.give()
                    if turn.future.done():
                        turn.future.result()
            return [turn.future.result() for turn in turns]
        finally:
            self._current = None
            for turn in turns:
                turn.stop()


class CopyingTransport(Transport):
    """The messages of one worker, which arrive as fresh contiguous memory without a history."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self._rank, self.direct = turns, rank, None
        self._expected: dict[Message, torch.dtype] = {}

    def know(self, routes: Iterable[Route]) -> None:
        """Messages have no numbers here."""

    def begin(self, program: Program) -> None:
        """Messages have no order here."""

    def due(self, message: Message) -> Sequence[Message]:
        """What to post so that `message` is posted."""
        return () if message in self._expected else (message,)

    def post(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> None:  # noqa: ARG002
        """Expect a message."""
        self._expected[message] = dtype

    def receive(self, message: Message, span: RecordedSpan | None = None) -> torch.Tensor:  # noqa: ARG002 - of a trace
        """The message, once it is there.

        Raises:
            MarkingError: it is of another type than its receiver expects.
        """
        tensor, dtype = self._turns.take(message), self._expected.pop(message)
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
        self._turns.put(message, data.clone(memory_format=torch.contiguous_format))

    def send_missing(self, message: Message, like: torch.Tensor, span: RecordedSpan | None = None) -> None:
        """Say that there is no gradient of `like`."""
        self.send(message, missing_gradient(like), span)

    def flush(self) -> None:
        """What was sent has left at once."""

    def put_tensor(self, tensor: torch.Tensor, target: int) -> None:
        """Send a copy to a worker, beside the program."""
        self._turns.put((self._rank, target), tensor.clone())

    def get_tensor(self, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """What a worker puts next."""
        return self._turns.take((source, self._rank))

    def close(self, *, failed: bool = False) -> None:  # noqa: ARG002 - nothing is waited for
        """Forget what is under way."""
        self._expected.clear()


class CopyingMembership(Membership):
    """One worker's part in a run of which all workers are in this process, on the CPU.

    Args:
        turns: What carries their messages.
        workers: Their names.
        rank: This one's.

    Attributes:
        failed: What it does has failed; `at` says what that was.
    """

    def __init__(self, turns: Turns, workers: Sequence[str], rank: int) -> None:
        self.at, self.on_leaving = "the start", None
        self.rank, self.worker, self.device = rank, workers[rank], torch.device("cpu")
        self.transport: Transport | None = CopyingTransport(turns, rank)
        self._ranks = range(len(workers))
        self._run, self._stop, self._groups = None, None, None
        self.groups = {}
        self.calls = deque(maxlen=2)
        self._left = ""
        self._settled = self.failed = False

    @property
    def ranks(self) -> range:
        """All workers' ranks."""
        return self._ranks

    def fail(self, at: str, error: BaseException) -> None:
        """This worker failed."""
        self.failed = isinstance(error, Exception)  # and was not stopped for another one's failure
        super().fail(at, error)
