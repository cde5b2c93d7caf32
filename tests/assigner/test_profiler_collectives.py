"""All-reduces between ranks of this host, measured in the groups in which training adds up gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from assigner.profiler.collectives import collective_rounds
from assigner.profiler.host import HostFacts
from assigner.profiler.pairs import ALL_UP_TO, reduced_sets

if TYPE_CHECKING:
    from pathlib import Path

    from forked_ranks import ForkedRanks


def make_fleet(*hosts: str, alike: bool = True) -> list[HostFacts]:
    """Workers by the host of each, on CPUs of one kind or of one for each."""
    kinds = ["CPU" if alike else f"CPU {n}" for n in range(len(hosts))]
    numbers = {host: n for n, host in enumerate(dict.fromkeys(hosts))}
    return [HostFacts(host, numbers[host], "cpu", kind, 1 << 30, 1) for host, kind in zip(hosts, kinds, strict=True)]


def test_one_pair_inside_a_host_one_between_two_and_all_workers() -> None:
    """Of like workers; each two kinds have a pair of their own, and two workers are all workers."""
    assert reduced_sets(make_fleet("a"), "auto") == []
    assert reduced_sets(make_fleet("a", "a"), "auto") == [(0, 1)]
    assert reduced_sets(make_fleet("a", "a", "b", "b"), "auto") == [(0, 1), (0, 2), (2, 3), (0, 1, 2, 3)]
    assert reduced_sets(make_fleet("a", "a", "a"), "auto") == [(0, 1), (0, 1, 2)]
    assert reduced_sets(make_fleet("a", "a", "a", alike=False), "auto") == [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
    assert reduced_sets(make_fleet("a", "b", "c"), "all") == [(0, 1), (0, 2), (1, 2), (0, 1, 2)]


def test_where_links_are_sampled_like_pairs_of_hosts_share_one() -> None:
    """As links do; all links of a large fleet mean all pairs of its hosts; a pair that is named is measured."""
    hosts = [f"h{n // 2}" for n in range(ALL_UP_TO + 4)]
    fleet = make_fleet(*hosts)
    everybody = tuple(range(len(fleet)))
    sampled = reduced_sets(fleet, "auto")
    assert [len(each) for each in sampled] == [2, 2, len(fleet)]
    assert {hosts[one] == hosts[other] for one, other in (each for each in sampled if len(each) == 2)} == {True, False}
    assert reduced_sets(fleet, "auto", [(3, 8)]) == [*sorted([*sampled[:2], (3, 8)]), everybody]
    pairs = len(fleet) // 2
    assert len(reduced_sets(fleet, "all")) == pairs + pairs * (pairs - 1) // 2 + 1


def test_a_large_fleet_measures_pairs_together_that_share_no_worker() -> None:
    """A small one each set by itself; a set of more than two always is."""
    sets = [(0, 1), (1, 2), (2, 3), (0, 1, 2, 3)]
    assert collective_rounds(sets, 4) == [[each] for each in sets]
    assert collective_rounds(sets, 40) == [[(0, 1), (2, 3)], [(1, 2)], [(0, 1, 2, 3)]]


@pytest.mark.distributed
def test_three_ranks_give_collectives(forked: ForkedRanks, tmp_path: Path) -> None:
    """The first rank of each set has it: sizes up to the smallest limit, positive times, a share from 0 to 1."""
    reports = forked.found("collectives.py", tmp_path, ranks=3)
    assert [each["error"] for each in reports] == [""] * 3
    assert [len(each["found"]) for each in reports] == [2, 0, 0]
    assert all(each["told"] == [[0, 2], [1, 2]] for each in reports)
    pair, everybody = reports[0]["found"]
    names = [f"worker:{n}/cpu" for n in range(3)]
    assert (pair["workers"], everybody["workers"]) == (names[:2], names)
    for each in (pair, everybody):
        assert [point["bytes"] for point in each["points"]] == [1 << 14, 100_000]
        assert all(point["seconds"] > 0 for point in each["points"])
        assert all(point["samples"] >= 3 for point in each["points"])
        assert 0 <= each["busy"] <= 1
        assert each["backend"] == "gloo"


@pytest.mark.long
@pytest.mark.distributed
def test_a_rank_that_goes_is_an_error_for_the_others(forked: ForkedRanks, tmp_path: Path) -> None:
    """They do not wait for it: what they do together next fails, and says what broke."""
    first, second, _ = forked.found("collectives.py", tmp_path, "--leave", ranks=3)
    assert [len(each["found"]) for each in (first, second)] == [1, 0]
    assert "gloo" in first["error"]
    assert "gloo" in second["error"]
