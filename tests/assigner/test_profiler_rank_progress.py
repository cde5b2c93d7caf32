"""Ranks that wait for each other, in one process and one store."""

import threading

import pytest
import torch.distributed as dist
from stopped_store import stopped_store

from assigner.launch import limitedstore
from assigner.launch.limitedstore import StoreSilentError
from assigner.profiler import rankprogress
from assigner.profiler.exchange import Exchange
from assigner.profiler.rankprogress import Forecast, Heartbeat, RankProgress, RanksProgress


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


def test_nobody_waits_for_a_rank_that_is_lost(monkeypatch):
    """A heart that has stopped for a while ends the wait of all others; what they do next together says why."""
    monkeypatch.setattr(rankprogress, "_BEAT_S", 0.01)
    table, first, second = two([])
    second.tell("compute of embed", make_forecast(60.0))
    heart, ended = Heartbeat(table), []

    def wait():
        first.finish_phase()
        ended.append("first")

    waiting = threading.Thread(target=wait)
    monkeypatch.setattr(rankprogress, "_LOST_S", 5.0)
    waiting.start()
    waiting.join(1.0)
    assert not ended
    heart.close()
    waiting.join(30)
    assert ended


@pytest.mark.parametrize("ask", [
    lambda table: table.to_all("size", 1, int),
    lambda table: table.told(["size/1"], int),
    lambda table: table.tell("size/1", 1),
], ids=["to_all", "told", "tell"])  # fmt: skip
def test_nobody_waits_for_a_store_that_is_stopped(monkeypatch, ask):
    """Nor does a heart, which ends with its table."""
    monkeypatch.setattr(limitedstore, "LIMIT_S", 0.5)
    with stopped_store() as store:
        store.set = store.wait = lambda *_: store.goes_on.wait()
        with pytest.raises(StoreSilentError, match="has not answered"):
            ask(Exchange(store, 0, 2, timeout_s=0.5))
        heart = Heartbeat(Exchange(store, 0, 2, timeout_s=0.5))
        heart.close()
        assert not heart.thread.is_alive()
