"""The watch over a run: joins that fail, main threads that do not come out, and stores that are gone."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from free_ports import free_ports
from single_rank import be_only_rank
from stopped_store import StoppedStore, stopped_store
from torch.distributed import DistError, HashStore

from assigner.errors import UsageError, WorkerError
from assigner.launch import launcherwatch, limitedstore
from assigner.launch.seal import SECRET, seal_first, unseal
from assigner.launch.shutdown import FAILED_KEY, HostFailure
from assigner.machine.launchedrank import Launched, launched
from assigner.runtime.failures import failure
from assigner.runtime.failures.cause import Failure
from assigner.runtime.failures.failure import FailureWatch, joining
from assigner.runtime.failures.questions import DOINGS, Doing
from assigner.runtime.messages.rendezvous import _wait_for_all, join_group, leave_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forked_ranks import ForkedRanks


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which a watch would have ended this process; it looks often, and waits briefly."""
    codes: list[int] = []

    def ended(watch: FailureWatch) -> None:
        codes.append(watch.exit_code)
        watch.closed.set()

    for name, seconds in (("_POLL_S", 0.01), ("_GRACE_S", 0.05), ("_LEAVE_S", 600.0), ("_BUSY_S", 0.1)):
        monkeypatch.setattr(failure, name, seconds)
    monkeypatch.setattr(failure, "_STAY_S", 0.0)
    monkeypatch.setattr(failure, "_MOMENT_S", 0.0)
    monkeypatch.setattr(failure.FailureWatch, "_exit", ended)
    return codes


@pytest.fixture
def watching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FailureWatch]]:
    """Makes watches, and closes them at the end; without `exits` none of them ends this process on a busy machine."""
    made: list[FailureWatch] = []
    if "exits" not in request.fixturenames:
        for name in ("_GRACE_S", "_LEAVE_S"):
            monkeypatch.setattr(failure, name, 600.0)

    def watch(store: object, worker: str = "worker:1", **more: object) -> FailureWatch:
        made.append(FailureWatch(store, worker, ranks=3, **more))  # type: ignore[arg-type]
        return made[-1]

    yield watch
    for each in made:
        each.close()


class Gone(HashStore):
    """A store whose host has left."""

    def check(self, _: list[str]) -> bool:
        raise DistError("Connection reset by peer")


def test_a_second_join_does_not_read_the_first_ones_failure(exits: list[int]) -> None:
    """Groups that are made one after another have a failure each."""
    store = HashStore()
    with pytest.raises(WorkerError, match="another worker"), joining(store, "group 0", "worker:0", 2):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    with joining(store, "group 1", "worker:0", 2) as watch:
        time.sleep(0.2)
        assert not watch.printed
    assert exits == []


def test_an_error_of_ones_own_while_joining(exits: list[int]) -> None:
    """It is this worker's, for the others as well."""
    store = HashStore()
    with pytest.raises(WorkerError, match="worker:0 cannot join the run") as raised, joining(store, "g", "worker:0", 2):
        raise RuntimeError("[enforce fail at gloo/transport/tcp/device.cc:84] Unable to find address for: nosuch0")
    assert "nosuch0" in raised.value.message
    assert "GLOO_SOCKET_IFNAME" in (raised.value.hint or "")


def test_gloos_words_for_an_unknown_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are still those that are recognised."""
    be_only_rank(monkeypatch)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    place = launched()
    assert place is not None
    with pytest.raises(WorkerError, match=r"worker:0 cannot join the run .*nosuch0"):
        join_group(place, 20.0)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    join_group(place, 20.0)
    leave_group()


def test_a_main_thread_that_knows_is_ended_where_it_gets_stuck(
    exits: list[int], watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has some time to leave the run."""
    monkeypatch.setattr(failure, "_LEAVE_S", 0.1)
    watch = watching(HashStore())
    watch.report("a step", ValueError("x"))
    watch.thread.join(30)
    assert exits == [7]


def test_a_main_thread_that_leaves_is_not(exits: list[int], watching: Callable[..., FailureWatch]) -> None:
    """The watch is closed when it has left."""
    watch = watching(HashStore())
    watch.report("a step", ValueError("x"))
    watch.close()
    watch.thread.join(30)
    assert exits == []


def test_whoever_knows_of_a_failure_stays_until_all_do(watching: Callable[..., FailureWatch]) -> None:
    """However long a rank gets no processor: the one that ends may host the store."""
    store, ended = HashStore(), threading.Event()
    watch = watching(store, "worker:0/cpu")
    failing = threading.Thread(target=lambda: (watch.report("a step", ValueError("x")), ended.set()))
    failing.start()
    others = [watching(store, "worker:1")]
    assert not ended.wait(2.0)
    others.append(watching(store, "worker:2/cuda:0"))
    assert ended.wait(60.0)
    assert [each.printed for each in others] == [True, True]
    for each in others:
        each.known.set()


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["worker:2", "one of worker:2/cpu, worker:3/cpu"])
def test_nobody_waits_for_a_rank_that_is_gone(
    watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """It comes to know of nothing: the others say so and end."""
    monkeypatch.setattr(failure, "_STAY_S", 1e6)
    store = HashStore()
    watches = [watching(store, worker) for worker in ("worker:0", "worker:1")]
    for each in watches:
        assert each.lost(gone, "a step", RuntimeError("closed")).worker == gone


def test_a_rank_that_was_only_stuck_learns_that_it_was_taken_for_gone(
    watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever misses it stays a moment: else the store may be gone before it looks, and it would never end."""
    monkeypatch.setattr(failure, "_GONE_S", 1e6)
    monkeypatch.setattr(failure, "_STAY_S", 1e6)
    store, ended = HashStore(), threading.Event()
    watch, third = watching(store, "worker:0"), watching(store, "worker:2")
    missing = threading.Thread(
        target=lambda: (watch.lost("worker:1/cpu", "a step", RuntimeError("closed")), ended.set())
    )
    missing.start()
    assert not ended.wait(2.0)
    stuck = watching(store, "worker:1")
    assert ended.wait(60.0)
    assert stuck.printed
    for each in (stuck, third):
        each.known.set()


def test_a_network_that_failed_may_be_that_of_either_host(
    watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that notices it says so, unless no other host answers it."""
    monkeypatch.setattr(failure, "_STAY_S", 0.1)
    for alone, words in ((False, "worker:0 failed: it did not answer for 5 s: its host is cut off, or that of "),
                         (True, "worker:1 failed: its host is cut off, or its wire loses much: no")):  # fmt: skip
        connections = SimpleNamespace(
            silent={"10.0.0.2"}, is_alone=lambda alone=alone: alone, run_failed=False, guard=lambda: None
        )
        for store in (HashStore(), Gone()):
            watch = watching(store, connections=connections)
            assert str(watch.lost("worker:0", "a step", RuntimeError("closed"))).startswith(words)


def test_the_store_is_gone(exits: list[int], watching: Callable[..., FailureWatch]) -> None:
    """A main thread that does something for the run, and stays at it, is ended; one that does not may go on."""
    watch = watching(Gone())
    time.sleep(0.3)
    assert exits == []
    watch.busy_since = time.monotonic()
    watch.thread.join(30)
    assert exits == [7]


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoppedStore]:
    """Nobody waits long for it."""
    monkeypatch.setattr(limitedstore, "LIMIT_S", 0.5)
    with stopped_store() as found:
        yield found


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (
            "",
            "worker:0 failed: its process is stopped, and so is the job's store, or cut off; after it, worker:2",
        ),
        ("1", "worker:2 failed: .*the launcher, which keeps the run's store, is stopped"),
    ],
)
def test_a_store_that_is_stopped(
    exits: list[int],
    watching: Callable[..., FailureWatch],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    stopped: StoppedStore,
    hosts: str,
    words: str,
) -> None:
    """Who keeps it is told of where another rank is missed; and a main thread that stays in a wait is ended."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    found = watching(stopped).lost("worker:2", "a step", RuntimeError("closed"))
    assert re.match(words, str(found))
    watch = watching(stopped)
    watch.busy_since = time.monotonic()
    watch.thread.join(30)
    assert exits == [7]
    told = "the launcher, which keeps the run's store, is stopped" if hosts else "error: worker:0 failed: its process"
    assert told in (said := capfd.readouterr().err)
    assert "hint: " in said


def test_a_store_that_answers_again(
    exits: list[int], watching: Callable[..., FailureWatch], stopped: StoppedStore
) -> None:
    """The watch goes on: a failure is told."""
    watch = watching(stopped)
    while not watch.store.is_silent:
        time.sleep(0.01)
    stopped.goes_on.set()
    watching(stopped, "worker:0").report("a step", ValueError("x"))
    watch.thread.join(30)
    assert watch.printed


def test_a_launcher_that_is_gone_is_the_one_cause(
    watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host it keeps the store: what watches it has the time to end this process, and no neighbour is blamed."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    slept: list[float] = []
    monkeypatch.setattr(failure.time, "sleep", slept.append)
    watching(Gone()).lost("worker:0", "a step", RuntimeError("Connection closed by peer"))
    assert slept
    assert slept[0] > launcherwatch.LOOK_S


_TIME_OUT = RuntimeError("Timed out waiting 6000ms for recv operation to complete")


@pytest.mark.parametrize(
    ("doings", "error", "words"),
    [
        ({0: ("a step", "worker:2/cpu")}, _TIME_OUT, "worker:2 failed: its process is gone, cut off or stuck; "),
        ({0: ("a step", "worker:2/cpu"), 2: ("", "")}, _TIME_OUT,
         "worker:2/cpu failed: others wait for it in vain: it is in no call of the pipeline, for 7 s by now; "),
        ({0: ("a step", "worker:2/cpu"), 2: ("forward", "")}, RuntimeError("Connection closed by peer"),
         "worker:2/cpu failed: others wait for it in vain: it is at forward, for 7 s by now; "),
        ({0: ("the end", "another worker"), 2: ("the end", "another worker")}, _TIME_OUT,
         "worker:0/cpu failed: it did not answer in time, and waits for another itself, at the end; "),
        ({0: ("forward", ""), 2: ("", "")}, RuntimeError("Connection reset by peer"),
         "worker:0/cpu failed: the connection to it broke, and its process is there; "),
        ({2: ("", "")}, RuntimeError("Connection reset by peer"),
         "worker:0/cpu failed: its process is gone, cut off or stuck; "),
    ],
    ids=["stopped", "idle", "busy", "circle", "broken", "gone"],
)  # fmt: skip
def test_the_rank_is_blamed_that_others_wait_for(
    watching: Callable[..., FailureWatch],
    monkeypatch: pytest.MonkeyPatch,
    doings: dict[int, tuple[str, str]],
    error: Exception,
    words: str,
) -> None:
    """A rank that only waits for it in its turn is not, though it is the one that is missed."""
    for name in ("_ASK_S", "_ANSWER_S", "_STAY_S"):
        monkeypatch.setattr(failure, name, 0.1)
    store = HashStore()
    for rank, (at, peer) in doings.items():
        DOINGS.answer(store, rank, Doing(f"worker:{rank}/cpu", at, peer, 7.2))
    watch = watching(store, "worker:1/cpu")
    watch.doing = lambda: ("a step", "worker:0/cpu")
    found = watch.lost("worker:0/cpu", "a step", error)
    assert str(found).startswith(f"{words}worker:1/cpu noticed in a step")
    assert found.hint


def test_a_rank_that_was_stopped_says_so(
    watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are gone since they gave it up, and it knows of that alone: here each wait of the watch is a stop."""
    monkeypatch.setattr(failure, "_ASK_S", 0.0)
    assert "as if stopped" not in str(watching(Gone()).lost("worker:0", "a step", RuntimeError("closed")))
    monkeypatch.setattr(failure, "_PAUSE_S", failure._POLL_S / 2)
    watch = watching(HashStore())
    watch.stay_s = 0.0
    time.sleep(2 * failure._POLL_S)
    found = str(watch.lost("worker:0", "a step", RuntimeError("closed")))
    assert re.search("worker:0 failed: its process is gone.* after it had not run for 0 s itself, as if stopped", found)


def test_a_rank_tells_what_it_waits_for(watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watching thread does, once somebody asks."""
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    store = HashStore()
    busy, idle, silent = (watching(store, f"worker:{rank}/cpu") for rank in range(3))
    busy.doing = idle.doing = lambda: ("a step", "worker:2")
    busy.busy_since = time.monotonic() - 5
    assert dict(DOINGS.answers(store, range(3))) == {}
    DOINGS.ask(store)
    while len(found := dict(DOINGS.answers(store, range(3)))) < 2:
        time.sleep(0.01)
    assert [(each.worker, each.at, each.peer) for each in found.values()] == [
        ("worker:0/cpu", "a step", "worker:2"),
        ("worker:1/cpu", "", ""),
    ]
    assert found[0].for_s >= 5
    assert silent.doing is None


def test_a_rank_that_another_thread_finds_lost_ends_the_wait_of_the_main_one(
    exits: list[int], watching: Callable[..., FailureWatch], capfd: pytest.CaptureFixture
) -> None:
    """It is written for all ranks; a main thread that learns of it by itself raises instead."""
    store = HashStore()
    watch, other = watching(store), watching(store, "worker:0")
    watch.accuse("worker:2", "it has not answered")
    for each in (watch, other):
        each.thread.join(30)
    assert exits == [7, 7]
    assert "worker:2 failed: it has not answered; worker:1 noticed" in capfd.readouterr().err
    with pytest.raises(WorkerError, match="worker:2 failed"):
        other.check()


def test_a_host_is_silent(
    exits: list[int], watching: Callable[..., FailureWatch], capfd: pytest.CaptureFixture
) -> None:
    """The process says which one when it is ended."""
    watch = watching(HashStore(), connections=SimpleNamespace(silent={"10.0.0.2"}, guard=lambda: None))
    watch.busy_since = time.monotonic()
    watch.thread.join(30)
    assert exits == [7]
    assert "10.0.0.2 does not answer" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.distributed
def test_a_rank_that_does_not_come(forked: ForkedRanks, agent: bool) -> None:
    """Those that have come say how many they are, where rank 0 hosts the store and where a launcher does."""
    (port,) = free_ports(1)
    words = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words["TORCHELASTIC_USE_AGENT_STORE"] = str(agent)
    (end,) = forked.ended("coming.py", *["agent"] * agent, variables=[words])
    assert end.code == 1
    assert re.search(r"1 of 2 ranks have come to the run within 3 s; missing: worker:1", end.errors), end.errors


@pytest.mark.slow
@pytest.mark.parametrize("refused", [1, 0])
@pytest.mark.distributed
def test_a_rank_that_is_refused_before_it_joins(forked: ForkedRanks, refused: int) -> None:
    """The other one waits for it, and ends with its reason, where no launcher would end it."""
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ends = forked.ended("coming.py", "patient", str(refused), variables=[{**common, "RANK": rank} for rank in "01"])
    assert all(end.code in (1, 7) for end in ends)  # of Python, or of the watch
    assert re.search(rf"there is no such model here[^\0]*worker:{refused}", ends[1 - refused].errors), ends


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_with_one_rank_are_named(forked: ForkedRanks) -> None:
    """Three were started, of which two are rank 1: nobody waits for the third until a time-out."""
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ends = forked.ended("coming.py", "patient", variables=[{**common, "RANK": rank} for rank in "011"])
    assert all(end.code in (1, 7) for end in ends)  # of Python, or of the watch
    words = r"two processes are worker:1: \S+:\d+ and \S+:\d+"
    assert any(re.search(words, end.errors) for end in ends), ends  # who reads late may find the store gone with rank 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("killed", "error: worker:1 failed: its process is gone, cut off or stuck; worker:0 noticed in the exchange"),
        ("raises", "worker:0: error: the trap snapped"),
    ],
)
def test_a_rank_that_profiling_loses_is_named_by_the_others(forked: ForkedRanks, way: str, words: str) -> None:
    """They learn of it by its connection that closes, where nobody has started them who would end them."""
    (port,) = free_ports(1)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, _ = forked.ended("measuring.py", "1", way, variables=[{**common, "RANK": rank} for rank in "01"])
    assert first.code == 6, first
    assert words in first.errors
    assert way == "raises" or "worker:0: hint: its own output, and its host, may say why" in first.errors


def test_ranks_that_count_unlike_numbers_of_ranks(
    watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for others; the first that sees it tells both counts, whether all have come or not."""
    monkeypatch.setattr(failure, "_STAY_S", 0.1)
    store = HashStore()
    store.set("assigner/came 0", "3")
    place = Launched("", "RANK", 1, 2, local_ranks=2)
    words = "worker:1 was started as one of 2 ranks, and worker:0 as one of 3"
    with pytest.raises(UsageError, match=words):
        _wait_for_all(store, store, place, 60.0, watching(store))
    store = HashStore()
    store.set("assigner/came 1", "2")
    place = Launched("", "RANK", 0, 3, local_ranks=3)
    with pytest.raises(UsageError, match="worker:0 was started as one of 3 ranks, and worker:1 as one of 2"):
        _wait_for_all(store, store, place, 0.0, watching(store, "worker:0"))


SECOND = r"two processes are worker:1: there:12 and \S+:\d+"


def test_a_second_process_with_a_rank_is_refused(
    watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes late: the group is being made already, and it must not read what is said there."""
    monkeypatch.setattr(failure, "_STAY_S", 0.1)
    store, place = HashStore(), Launched("", "RANK", 1, 2, local_ranks=2)
    for rank, text in enumerate(("2 here:11", "2 there:12")):
        store.set(f"assigner/came {rank}", text)
    with pytest.raises(UsageError, match=SECOND) as caught:
        _wait_for_all(store, store, place, 60.0, watching(store))
    assert "RANK says which" in (caught.value.hint or "")
    assert store.get("assigner/came 1") == b"2 there:12"


def test_the_first_process_with_a_rank_finds_the_second(
    watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While ranks are missing the last one to come is noted, and the first one looks; so all learn of it."""
    monkeypatch.setattr(failure, "_STAY_S", 0.1)
    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    store, place = HashStore(), Launched("", "RANK", 1, 3, local_ranks=3)
    raised: list[UsageError] = []

    def come() -> None:
        with pytest.raises(UsageError, match=r"two processes are worker:1: \S+ and there:12") as caught:
            _wait_for_all(store, store, place, 60.0, watching(store))
        raised.append(caught.value)

    first = threading.Thread(target=come)
    first.start()
    while not store.check(["assigner/came 1"]):
        time.sleep(0.01)
    store.set("assigner/came 1", "3 there:12")
    first.join(60)
    assert raised
    with pytest.raises(WorkerError, match="two processes are worker:1"):
        _wait_for_all(store, store, Launched("", "RANK", 0, 3, local_ranks=3), 60.0, watching(store, "worker:0"))


def test_a_rank_that_was_started_again_takes_the_place_of_a_dead_one(watching: Callable[..., FailureWatch]) -> None:
    """The others still wait for ranks: nobody says that the first one is there."""
    store, place = HashStore(), Launched("", "RANK", 1, 2, local_ranks=2)
    store.set("assigner/came 1", "2 there:12")

    def come() -> None:
        while store.get("assigner/came 1") == b"2 there:12":
            time.sleep(0.01)
        store.set("assigner/came 0", "2 here:11")

    other = threading.Thread(target=come)
    other.start()
    _wait_for_all(store, store, place, 60.0, watching(store))
    other.join(60)


@pytest.mark.parametrize(
    "found", ["", "{}", "no JSON", '{"worker": "worker:9", "where": "", "error": "\x1b[2J"}', b"\xff"]
)
def test_a_strangers_failure_is_none(
    exits: list[int],
    watching: Callable[..., FailureWatch],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    found: str | bytes,
) -> None:
    """It is noted once, ends nothing, and the run's own failure takes its place."""
    monkeypatch.setenv(SECRET, "of the run")
    for name in ("_STAY_S", "_GRACE_S", "_LEAVE_S"):  # nobody else is there, and nobody leaves
        monkeypatch.setattr(failure, name, 0.3)
    store = HashStore()
    store.set(failure._KEY, found)
    watch = watching(store)
    while "is ignored" not in (said := capfd.readouterr().err):
        time.sleep(0.01)
    assert watch.thread.is_alive()
    assert "foreign" in said
    assert "\x1b" not in said
    first = watch.report("a step", ValueError("x"))
    assert (first.worker, first.error) == ("worker:1", "x")
    assert watching(store).report("a step", ValueError("y")) == first
    watch.thread.join(30)
    assert not watch.thread.is_alive()
    assert "is ignored" not in capfd.readouterr().err


class WordlessError(Exception):
    def __str__(self) -> str:
        raise KeyError("none")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("x" * 5_000_000), "ValueError: x{50000} ... \\(4900000 characters left out\\) ... x{50000}"),
        (WordlessError(), "WordlessError: \\(no text: its __str__ raised KeyError\\)"),
    ],
    ids=["long", "without words"],
)
def test_an_error_of_any_text_is_told(
    watching: Callable[..., FailureWatch], monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """A message of megabytes would not get to others in time, and one that cannot be read would hide what failed."""
    monkeypatch.setattr(failure, "_STAY_S", 0.0)
    first = watching(HashStore()).report("forward", error)
    assert re.fullmatch(f"worker:1 failed in forward: {words}", str(first))
    assert len(first.trace) < 200_000


def test_a_failures_text_cannot_change_a_terminal(
    exits: list[int], watching: Callable[..., FailureWatch], capfd: pytest.CaptureFixture
) -> None:
    """What a rank's error says may hold anything."""
    store = HashStore()
    watching(store).report("a step\x9b", ValueError("\x1b]0;mine\x07"))
    watch = watching(store)
    watch.thread.join(30)
    said = capfd.readouterr().err
    assert "]0;mine" in said
    assert not set("\x1b\x07\x9b") & set(said)


def test_a_watch_that_fails_ends_the_process(
    exits: list[int], watching: Callable[..., FailureWatch], capfd: pytest.CaptureFixture
) -> None:
    """Nobody would end a rank that waits for ever; the others learn of it."""

    class Strange(HashStore):
        def check(self, _: list[str]) -> bool:
            raise LookupError("what is this?")

    store = Strange()
    watch = watching(store)
    watch.thread.join(30)
    assert exits == [7]
    assert "the watch over the run failed: LookupError('what is this?')" in capfd.readouterr().err
    assert unseal(Failure, failure._KEY, store.get(failure._KEY)).where == "watching the run"


def test_an_error_that_another_host_has_seen_is_told_with_its_words(
    exits: list[int],
    watching: Callable[..., FailureWatch],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    """Of a rank that has ended before it could join, its launcher tells what it has handed over."""
    for name in ("_STAY_S", "_GRACE_S", "_LEAVE_S"):  # nobody else is there, and nobody leaves
        monkeypatch.setattr(failure, name, 0.3)
    store = HashStore()
    seal_first(store, FAILED_KEY, HostFailure("worker:2", "ended with exit code 1", "OSError: no file (a.py:3)"))
    watch = watching(store)
    watch.thread.join(30)
    assert "error: worker:2 failed: OSError: no file (a.py:3); its process ended" in capfd.readouterr().err
