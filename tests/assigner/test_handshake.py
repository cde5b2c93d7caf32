"""Messages from GPU to GPU are launched where both ends have agreed on them, and hosts do not wait in a circle."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from assigner.runtime.messages.handshake import Handshake, Meeting, Signal
from assigner.runtime.messages.ordering import Message
from assigner.runtime.messages.transport import Transport
from assigner.schedule.program import Payload, Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

PATIENCE_S = 20.0  # a circle is an error after this; nothing waits so long else
MESSAGES = 40


class Post:
    """gloo's messages between ranks that are threads of this process."""

    name, most_tag = "gloo", 1 << 30

    def __init__(self) -> None:
        self.boxes: defaultdict[tuple[int, int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.lock, self.here = threading.Lock(), threading.local()

    def box(self, source: int, target: int, tag: int) -> queue.Queue[torch.Tensor]:
        with self.lock:  # two threads that ask at once get the same one
            return self.boxes[source, target, tag]

    def isend(self, tensor: torch.Tensor, peer: int, tag: int) -> Letter:
        self.box(self.here.rank, peer, tag).put(tensor.clone())
        return Letter(None, tensor)

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int) -> Letter:
        return Letter(self.box(peer, self.here.rank, tag), tensor)

    def close(self, *, failed: bool) -> None:
        pass


class Letter:
    def __init__(self, box: queue.Queue[torch.Tensor] | None, tensor: torch.Tensor) -> None:
        self.box, self.tensor = box, tensor

    def wait(self, _: timedelta | None = None) -> None:
        if self.box is not None:
            self.tensor.copy_(self.box.get(timeout=PATIENCE_S))


def wait(work: Any) -> None:
    work.wait()


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Post:
    made = Post()
    monkeypatch.setattr(dist, "isend", made.isend)
    monkeypatch.setattr(dist, "irecv", made.irecv)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    return made


class Pair:
    """A message's two kernels: each spins until the other one runs."""

    def __init__(self) -> None:
        self.launched: set[str] = set()
        self.both = threading.Event()

    def launch(self, end: str) -> None:
        self.launched.add(end)
        if len(self.launched) == 2:
            self.both.set()


class Device:
    """A GPU: whoever waits until it rests lets nobody launch meanwhile, as the loading of a kernel may."""

    def __init__(self) -> None:
        self.lock, self.kernels = threading.Lock(), list[Pair]()

    def launch(self, pair: Pair, end: str) -> None:
        with self.lock:
            self.kernels.append(pair)
            pair.launch(end)

    def rest(self) -> None:
        with self.lock:
            assert all(pair.both.wait(PATIENCE_S) for pair in self.kernels), "a circle"
            self.kernels.clear()


def tag(source: int, target: int, n: int) -> int:
    return 9 * n + 3 * source + target


def started(post: Post, rank: int, run: Callable[[], None], errors: list[BaseException]) -> threading.Thread:
    def body() -> None:
        post.here.rank = rank
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", range(5))
def test_no_circle_of_hosts_that_wait_for_their_devices(post: Post, seed: int) -> None:
    """Three ranks send to each other, and each lets its device rest whenever it likes: all messages pass."""
    ranks, errors = range(3), list[BaseException]()
    ways = [(source, target) for source in ranks for target in ranks if source != target]
    pairs = {(way, n): Pair() for way in ways for n in range(MESSAGES)}
    devices = [Device() for _ in ranks]

    def sends(source: int, target: int) -> None:
        for n in range(MESSAGES):
            launch = lambda n=n: devices[source].launch(pairs[(source, target), n], "send")  # noqa: E731
            Handshake(target, tag(source, target, n), wait).offer(launch)

    def trains(rank: int) -> None:
        draws = random.Random(10 * seed + rank)
        for n in range(MESSAGES):
            for source in draws.sample([each for each in ranks if each != rank], 2):
                handshake = Handshake(source, tag(source, rank, n), wait)
                handshake.listen()
                if draws.random() < 0.5:
                    devices[rank].rest()
                assert handshake.told() is Signal.READY
                if draws.random() < 0.5:
                    devices[rank].rest()  # its memory is made
                handshake.accept(lambda pair=pairs[(source, rank), n]: devices[rank].launch(pair, "receive"))
                if draws.random() < 0.5:
                    devices[rank].rest()  # a kernel is loaded

    threads = [started(post, source, lambda s=source, t=target: sends(s, t), errors) for source, target in ways]
    threads += [started(post, rank, lambda r=rank: trains(r), errors) for rank in ranks]
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert not errors
    assert all(pair.both.is_set() for pair in pairs.values())


class Sum:
    """The kernels of a sum: each spins until all of them run."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members, self.launched, self.both = members, set[str](), threading.Event()

    def launch(self, end: str) -> None:
        self.launched.add(end)
        if len(self.launched) == len(self.members):
            self.both.set()


class Room:
    """Where members meet: the largest of their values, once all have given theirs."""

    def __init__(self, members: int) -> None:
        self.given: dict[int, torch.Tensor] = {}
        self.all_in, self.all_out = threading.Barrier(members), threading.Barrier(members)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        self.given[threading.get_ident()] = tensor
        self.all_in.wait(PATIENCE_S)
        found = torch.stack([*self.given.values()]).amax(0)
        self.all_out.wait(PATIENCE_S)
        return found


GROUPS = ((0, 1), (1, 2), (0, 1, 2))


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_groups_that_share_members_are_launched_by_all(post: Post, seed: int) -> None:
    """Each member's device rests whenever it likes, and what it sends in a thread waits for that, too: none is held up.

    The last sum of a round has members that come to it only with a message of another member.
    """
    rooms = [Room(len(group)) for group in GROUPS]
    rounds = [[Sum(group) for group in GROUPS] for _ in range(MESSAGES)]
    sent = [queue.Queue[int]() for _ in range(MESSAGES)]
    devices, errors, senders = [Device() for _ in range(3)], list[BaseException](), list[threading.Thread]()

    def sends(n: int) -> None:
        time.sleep(1e-3)  # its rank has come to the sum by now
        devices[0].rest()  # pinned memory is made
        sent[n].put(n)

    def trains(rank: int) -> None:
        draws, meetings = random.Random(10 * seed + rank), [Meeting(room.largest) for room in rooms]
        for n, sums in enumerate(rounds):
            for number, (group, each) in enumerate(zip(GROUPS, sums, strict=True)):
                if rank not in group:
                    continue
                if rank == 0 and number == 2:
                    senders.append(started(post, 0, lambda n=n: sends(n), errors))
                if rank == 2 and number == 2:
                    assert sent[n].get(timeout=PATIENCE_S) == n
                if draws.random() < 0.5:
                    devices[rank].rest()
                meetings[number].launch(lambda each=each: devices[rank].launch(each, str(rank)))  # type: ignore[arg-type]
                if draws.random() < 0.5:
                    devices[rank].rest()

    threads = [started(post, rank, lambda r=rank: trains(r), errors) for rank in range(3)]
    for thread in (*threads, *senders):
        thread.join(2 * PATIENCE_S)
    assert not errors
    assert all(each.both.is_set() for sums in rounds for each in sums)


def test_members_at_unlike_sums_launch_nothing(post: Post) -> None:
    """One that is a sum ahead is found at the next meeting, by all."""
    room, errors, launched = Room(2), list[BaseException](), list[int]()
    meetings = [Meeting(room.largest) for _ in range(2)]
    meetings[1]._count = 1
    threads = [
        started(post, rank, lambda rank=rank: meetings[rank].launch(lambda: launched.append(rank)), errors)
        for rank in range(2)
    ]
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [str(each) for each in errors] == ["workers of a group are at unlike sums: at number 1 and at number 2"] * 2
    assert launched == []


class Channels:
    """What stands for NCCL's channels: it notes what is launched, by whom and in which order."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []
        self.wire: defaultdict[Message, queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)

    def carries(self, _: Route) -> bool:
        return True

    def due(self, message: Message) -> tuple[Message, ...]:
        return (message,)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, -1.0, dtype=dtype)

    def start(self, message: Message, tensor: torch.Tensor) -> Letter:
        self.launched.append((message.route.source, message.micro_batch))
        if float(tensor.flatten()[0]) == -1:
            return Letter(self.wire[message], tensor)
        self.wire[message].put(tensor)
        return Letter(None, tensor)

    def arrived(self, work: Letter, buffer: torch.Tensor) -> torch.Tensor:
        work.wait()
        return buffer

    def open(self, _: object) -> None:
        pass

    def close(self) -> None:
        pass


ROUTES = [Route(Payload.GRADIENT, "p", n, f"worker:{n}/cuda:0", "worker:2/cuda:0") for n in range(2)]


@pytest.fixture
def transports(post: Post, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Post, list[Transport], Channels]]:
    channels, made = Channels(), list[Transport]()
    monkeypatch.setattr(
        "assigner.runtime.messages.sending.threading.Thread", lambda **given: Threads(post, made, **given)
    )
    for rank in range(3):
        post.here.rank = rank
        given: Any = {"direct": channels, "carrier": post}
        made.append(Transport(device=torch.device("cpu"), timeout_s=PATIENCE_S, **given))
        made[-1].know(ROUTES)
    yield post, made, channels
    for each in made:
        each.close()


class Threads(threading.Thread):
    """A thread of the rank that starts it."""

    def __init__(self, post: Post, _: object, **given: Any) -> None:
        super().__init__(**given)
        self.post, self.rank = post, post.here.rank

    def run(self) -> None:
        self.post.here.rank = self.rank
        super().run()


def test_nothing_is_launched_before_its_receiver_is_there(
    transports: tuple[Post, list[Transport], Channels],
) -> None:
    """A send waits in its thread; the receiver launches what is ready, whatever was posted first elsewhere."""
    post, (first, second, target), channels = transports
    messages = [Message(route, 0) for route in ROUTES]
    post.here.rank = 2
    for message in messages:
        target.post(message, (3,), torch.float32)
    post.here.rank = 1
    second.send(messages[1], torch.arange(3.0) + 4)
    post.here.rank = 2
    assert channels.launched == []
    assert target.receive_gradient(messages[1]).tolist() == [4.0, 5.0, 6.0]  # type: ignore[union-attr]
    assert channels.launched == [("worker:1/cuda:0", 0)] * 2
    post.here.rank = 0
    first.send(messages[0], torch.arange(3.0))
    post.here.rank = 2
    assert target.receive_gradient(messages[0]).tolist() == [0.0, 1.0, 2.0]  # type: ignore[union-attr]


def test_a_later_message_brings_those_before_it(transports: tuple[Post, list[Transport], Channels]) -> None:
    """Both ends launch a channel's messages in the order in which they were sent."""
    post, (first, _, target), channels = transports
    messages = [Message(ROUTES[0], n) for n in range(3)]
    post.here.rank = 2
    for message in messages:
        target.post(message, (1,), torch.float32)
    post.here.rank = 0
    for n, message in enumerate(messages):
        first.send(message, torch.full((1,), float(n)))
    post.here.rank = 2
    found = [float(target.receive(messages[n])) for n in (2, 0, 1)]
    assert found == [2.0, 0.0, 1.0]
    assert [n for _, n in channels.launched] == [0, 0, 1, 1, 2, 2]


def test_a_gradient_that_is_not_there_is_not_launched(transports: tuple[Post, list[Transport], Channels]) -> None:
    """Its receiver is told so, and no GPU is asked."""
    post, (first, _, target), channels = transports
    message = Message(ROUTES[0], 0)
    post.here.rank = 2
    target.post(message, (2, 2), torch.float32)
    post.here.rank = 0
    first.send_missing(message, torch.zeros(2, 2))
    post.here.rank = 2
    assert target.receive_gradient(message) is None
    assert channels.launched == []
