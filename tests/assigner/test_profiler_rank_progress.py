"""Ranks that wait for each other, in one process and one store."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from stopped_store import stopped_store

from assigner.launch import limitedstore
from assigner.launch.limitedstore import StoreSilentError
from assigner.profiler import rankprogress
from assigner.profiler.rankprogress import Exchange, Forecast, Heartbeat, RankProgress, RanksProgress, workers_text
from assigner.runtime.messages.sending import LostConnectionError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(rankprogress, "_LOOK_S", 0.01)


def make_forecast(each_s):
    forecast = Forecast(lambda: 100.0)
    forecast.plan("point", 5, each_s)
    return forecast


def two(shown):
    """Both ranks of a run."""
    store = dist.HashStore()
    tables = [Exchange(store, rank, 2, timeout_s=1.0) for rank in range(2)]
    second = RanksProgress(tables[1], "worker:1/cpu", lambda _: pytest.fail("rank 1 shows nothing"))
    return tables[1], RanksProgress(tables[0], "worker:0/cpu", shown.append), second


def test_the_slowest_is_shown_until_all_do_the_same():
    """Standings travel through the store; where ranks work together rank 0 shows its own."""
    shown = []
    table, first, second = two(shown)
    second.tell("compute of embed", make_forecast(60.0))
    assert [each.left_s for each in table.told(["progress/1"], RankProgress)] == [300.0]
    assert table.told(["progress/0", "progress/1"], RankProgress) == []
    first.tell("compute of embed", make_forecast(0.1))
    assert shown[-1].worker == "worker:1/cpu"
    first.together = True
    first.tell("links", make_forecast(0.1))
    assert shown[-1].worker == "worker:0/cpu"


@pytest.mark.parametrize("slow", [0, 1])
def test_a_phase_ends_when_every_rank_is_behind_it(slow):
    """Whoever is through first waits, as long as the other is at work."""
    shown, ended = [], []
    _, *ranks = two(shown)
    for rank in ranks:
        rank.tell("compute of embed", make_forecast(60.0))

    def wait():
        ranks[1 - slow].finish_phase()
        ended.append("quick")

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.2)
    assert not ended
    ranks[slow].finish_phase()
    waiting.join(30)
    assert ended
    assert [rank.mine.phase for rank in ranks] == [1, 1]
    assert not slow or shown[-1].worker == "worker:1/cpu"


def test_whoever_is_through_first_has_something_to_do_meanwhile():
    """It is called again and again until every rank is behind the phase."""
    _, *ranks = two([])
    for rank in ranks:
        rank.tell("compute of embed", make_forecast(60.0))
    runs = []

    def run():
        runs.append(len(runs))
        if len(runs) == 3:
            ranks[1].finish_phase()
        return True

    ranks[0].finish_phase(run)
    assert len(runs) >= 3


def waits(first, error=LostConnectionError):
    """A thread in which a rank waits for the others, and the error with which that ends."""
    ended = []

    def wait():
        with pytest.raises(error) as caught:
            first.finish_phase()
        ended.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    return waiting, ended


def test_nobody_waits_for_a_rank_whose_heart_has_stopped(monkeypatch):
    """It is named where others wait, and told once to whoever sees to the run."""
    for name in ("_BEAT_S", "_CHECK_S"):
        monkeypatch.setattr(rankprogress, name, 0.01)
    table, first, second = two([])
    second.tell("compute of embed", make_forecast(60.0))
    told, other = [], Heartbeat(table)
    heart = Heartbeat(Exchange(first.table.store._store, 0, 2, timeout_s=1.0), lambda *lost: told.append(lost))
    first.table.why_lost = heart.why_stopped
    waiting, ended = waits(first)
    waiting.join(1.0)
    assert not ended
    assert not told
    monkeypatch.setattr(rankprogress, "_LOST_S", 0.2)
    other.close()
    waiting.join(30)
    assert ended[0].peer == "worker:1"
    assert first.table.awaited == "worker:1"
    while not told:
        time.sleep(0.01)
    heart.close()
    ((rank, why),) = told
    assert rank == 1
    assert "its process is stopped, or its host cut off" in why


def test_a_process_that_was_stopped_itself_blames_nobody(monkeypatch):
    """It has not looked at the others' hearts meanwhile."""
    table, first, _ = two([])
    heart = Heartbeat(first.table)
    heart.close()
    looking = Exchange(table.store._store, 0, 2, timeout_s=1.0)
    heart.table = looking
    now = [1000.0]
    monkeypatch.setattr(rankprogress.time, "monotonic", lambda: now[0])
    table.tell("beat/1", 1)
    heart._look()
    now[0] += 500.0
    heart._look()
    assert not heart.why_stopped(1)
    for _ in range(8):
        now[0] += 5.0
        heart._look()
    assert heart.why_stopped(1)
    table.tell("beat/1", 2)
    heart._look()
    assert not heart.why_stopped(1)


def test_a_rank_whose_process_runs_has_until_the_time_out(monkeypatch):
    """Its launcher tells so, while C code in it keeps Python's lock; where that stops telling, it counts from there."""
    table, first, _ = two([])
    told, now = [1], [1000.0]
    heart = Heartbeat(first.table, vouched=lambda _: told[0])
    heart.close()
    heart.table = Exchange(table.store._store, 0, 2, timeout_s=100.0)
    monkeypatch.setattr(rankprogress.time, "monotonic", lambda: now[0])

    def looked(times, *, runs):
        for _ in range(times):
            now[0] += 5.0
            told[0] += runs
            heart._look()
        return heart.why_stopped(1)

    table.tell("beat/1", 1)
    assert not looked(20, runs=True)
    assert "100 s: it is stopped, or code in it keeps Python's lock" in looked(2, runs=True)
    table.tell("beat/1", 2)
    assert not looked(10, runs=True)
    assert not looked(6, runs=False)
    assert "30 s: its process is stopped" in looked(1, runs=False)


def test_a_stopped_store_that_goes_on_finds_hearts_that_beat(monkeypatch):
    """Else the others would take this rank for lost."""
    monkeypatch.setattr(rankprogress, "_BEAT_S", 0.01)
    monkeypatch.setattr(limitedstore, "LIMIT_S", 0.5)
    with stopped_store() as store:
        heart = Heartbeat(Exchange(store, 0, 2, timeout_s=0.5))
        while not heart.table.store.is_silent:
            time.sleep(0.01)
        store.goes_on.set()
        while heart.why_stopped(1) or 1 not in heart._seen:
            time.sleep(0.01)
        heart.close()


def test_whoever_is_missing_is_named(monkeypatch):
    """All of them, after the time-out, and at once where one is gone; what this rank is at, and whom it waits for."""
    monkeypatch.setattr(rankprogress, "_CHECK_S", 0.01)
    store = dist.HashStore()
    table = Exchange(store, 1, 4, timeout_s=0.2)
    table.watch = SimpleNamespace(busy_since=None)
    Exchange(store, 0, 4, timeout_s=1.0).tell("reports/0", 1)
    with pytest.raises(LostConnectionError, match=r"timed out: nothing of it for 0\.2 s") as caught:
        table.to_all("reports", 1, int)
    assert caught.value.peer == table.awaited == "worker:2 and worker:3"
    assert table.at == "the exchange of reports"
    assert table.watch.busy_since is not None
    table.timeout_s, table.why_lost = 600.0, lambda rank: "Connection closed by peer" if rank == 3 else ""
    with pytest.raises(LostConnectionError, match="Connection closed by peer") as caught:
        table.to_all("reports", 1, int)
    assert caught.value.peer == "worker:3"


def test_many_ranks_are_named_in_part():
    """The first ones, and how many more there are."""
    assert [workers_text([*range(count)]) for count in (0, 1, 3)] == ["", "worker:0", "worker:0, worker:1 and worker:2"]
    assert workers_text([*range(20)]).endswith("worker:6 and worker:7 (12 more)")


@pytest.mark.parametrize("ask", [
    lambda table: table.to_all("size", 1, int),
    lambda table: table.told(["size/1"], int),
    lambda table: table.tell("size/1", 1),
], ids=["to_all", "told", "tell"])  # fmt: skip
def test_nobody_waits_for_a_store_that_is_stopped(monkeypatch, ask):
    """Nor does a heart, which ends with its table."""
    monkeypatch.setattr(limitedstore, "LIMIT_S", 0.5)
    with stopped_store() as store:
        store.set = lambda *_: store.goes_on.wait()
        with pytest.raises(StoreSilentError, match="has not answered"):
            ask(Exchange(store, 0, 2, timeout_s=0.5))
        heart = Heartbeat(Exchange(store, 0, 2, timeout_s=0.5))
        heart.close()
        assert not heart.thread.is_alive()
