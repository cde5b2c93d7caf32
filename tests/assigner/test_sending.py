"""Sends are kept until they have left: small ones by the worker itself, large ones by a thread."""

from __future__ import annotations

import threading
import types
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch

from assigner.runtime.failures.questions import awaited
from assigner.runtime.messages.ordering import Message
from assigner.runtime.messages.sending import SMALL_BYTES, LostConnectionError, PendingSends, checked
from assigner.runtime.messages.transport import Transport
from assigner.runtime.recording.recorder import RecordedSpan
from assigner.schedule.program import Payload, Route

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL, LARGE = torch.zeros(8), torch.zeros(SMALL_BYTES)


class Sent:
    """A send that leaves when it is let go."""

    def __init__(self, error: str | None = None, *, gone: bool = True) -> None:
        self.left = threading.Event()
        self.error = error
        self.waited_in: str | None = None
        if gone:
            self.left.set()

    def wait(self) -> None:
        self.waited_in = threading.current_thread().name
        if not self.left.wait(10):
            raise RuntimeError("late")
        if self.error:
            raise RuntimeError(self.error)


def wait(work: Any) -> None:
    work.wait()


@pytest.fixture
def pending() -> Iterator[PendingSends]:
    made = PendingSends(timedelta(seconds=10), wait)
    yield made
    made.close()


def test_small_sends_wake_no_thread(pending: PendingSends) -> None:
    """The worker waits for them itself, where everything has to have left."""
    small, large = Sent(), Sent()
    pending.add("worker:1/cpu", SMALL, small)  # type: ignore[arg-type]
    pending.add("worker:1/cpu", LARGE, large)  # type: ignore[arg-type]
    pending.flush()
    assert small.waited_in == threading.current_thread().name
    assert large.waited_in == "assigner-sends"


def test_many_small_sends_do_not_pile_up(pending: PendingSends) -> None:
    """Beyond a number and a size the thread gets them."""
    sends = [Sent() for _ in range(300)]
    for each in sends:
        pending.add("worker:1/cpu", SMALL, each)  # type: ignore[arg-type]
    pending.flush()
    assert {each.waited_in for each in sends[:129]} == {"assigner-sends"}
    assert sends[-1].waited_in == threading.current_thread().name


def test_memory_is_free_when_a_send_has_left(pending: PendingSends) -> None:
    """A large tensor goes with the message, without a flush."""
    tensor, sent = torch.zeros(SMALL_BYTES), Sent(gone=False)
    gone = threading.Event()
    weakref.finalize(tensor, gone.set)
    pending.add("worker:1/cpu", tensor, sent)  # type: ignore[arg-type]
    del tensor
    assert not gone.is_set()
    sent.left.set()
    assert gone.wait(10)


def test_a_traced_send_is_seen_off(pending: PendingSends) -> None:
    """Its span ends when it has left, however small it is."""
    span = RecordedSpan(None, 0.0)
    pending.add("worker:1/cpu", SMALL, Sent(), span)  # type: ignore[arg-type]
    pending.flush()
    assert span.end_s > 0


@pytest.mark.parametrize("tensor", [SMALL, LARGE])
def test_a_lost_receiver_is_named(pending: PendingSends, tensor: torch.Tensor) -> None:
    """Whoever waits learns which one is gone."""
    pending.add("worker:2/cpu", tensor, Sent("closed by peer"))  # type: ignore[arg-type]
    with pytest.raises(LostConnectionError, match="closed by peer") as raised:
        pending.flush()
    assert raised.value.peer == "worker:2/cpu"


def test_others_can_be_told_whom_a_rank_waits_for() -> None:
    """While it waits, and where the wait broke off."""

    def broken() -> None:
        raise RuntimeError("Timed out")

    me = threading.get_ident()
    assert checked("worker:1", lambda: awaited[me]) == "worker:1"
    assert me not in awaited
    with pytest.raises(LostConnectionError):
        checked("worker:2", broken)
    assert awaited.pop(me) == "worker:2"


@pytest.mark.parametrize("own", [torch.OutOfMemoryError("no memory"), torch.AcceleratorError("an illegal address")])
def test_an_error_of_the_own_device_is_no_lost_connection(own: RuntimeError) -> None:
    """Whoever waits gets it as it is: in the call itself, and from both threads."""

    def fails(*_: Any) -> Any:
        raise own

    with pytest.raises(type(own), match=str(own)):
        checked("worker:1/cuda:0", fails)
    for starts in (fails, Sent):
        pending = PendingSends(timedelta(seconds=10), fails)
        pending.add_copied("worker:1/cuda:0", LARGE, None, starts)  # type: ignore[arg-type]
        with pytest.raises(type(own), match=str(own)):
            pending.flush()
        pending.close()


def test_a_receiver_that_does_not_come() -> None:
    """A flush ends after the time-out, and names it."""
    pending, sent = PendingSends(timedelta(seconds=0.05), wait), Sent(gone=False)
    pending.add("worker:3/cpu", LARGE, sent)  # type: ignore[arg-type]
    with pytest.raises(LostConnectionError, match=r"it took no message for 0\.05 s") as raised:
        pending.flush()
    assert raised.value.peer == "worker:3/cpu"
    sent.left.set()
    pending.close()


def test_a_copied_send_starts_when_its_copy_is_there() -> None:
    """One that is still copied holds up no other thread; each starts after its own copy, in order."""
    attended: list[str] = []
    pending = PendingSends(timedelta(seconds=10), wait, lambda: attended.append(threading.current_thread().name))
    copies = [Copied(), Copied()]
    started: list[int] = []
    for n, copied in enumerate(copies):
        pending.add_copied("worker:1/cpu", SMALL, copied, lambda n=n: started.append(n) or Sent())  # type: ignore
    copies[1].done.set()
    pending.add("worker:1/cpu", LARGE, Sent())  # type: ignore[arg-type]
    assert started == []
    copies[0].done.set()
    pending.flush()
    assert started == [0, 1]
    assert sorted(attended) == ["assigner-copies", "assigner-sends"]
    pending.close()


class Copied:
    """A CUDA event that is reached when it is told so."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def synchronize(self) -> None:
        assert self.done.wait(10)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(4.0).expand(3),
    ],
)
def test_what_leaves_is_what_the_tensor_says(tensor: torch.Tensor) -> None:
    """Conjugates and negatives that torch has put off, and strides, are worked out: gloo sends bare memory."""
    left: list[torch.Tensor] = []
    carrier: Any = types.SimpleNamespace(
        name="one that keeps", most_tag=1 << 20, close=lambda *, failed: None,  # noqa: ARG005
        isend=lambda buffer, *_: left.append(buffer) or Sent(),
    )  # fmt: skip
    transport = Transport(device=torch.device("cpu"), timeout_s=5.0, carrier=carrier)
    route = Route(Payload.ACTIVATION, "p", 0, "worker:0/cpu", "worker:1/cpu")
    transport.know([route])
    transport.send(Message(route, 0), tensor)
    sent = left[0]
    assert not sent.is_conj()
    assert not sent.is_neg()
    assert sent.is_contiguous()
    assert torch.equal(sent, tensor)
    transport.close()
