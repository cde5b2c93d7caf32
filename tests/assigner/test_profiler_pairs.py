"""Which links are measured and when: disjoint pairs, samples that cover every class, and medians for the rest."""

from __future__ import annotations

import pytest

from assigner.formats.profile import Link, LinkPoint
from assigner.location import rank_of
from assigner.profiler.host import HostFacts, worker_names
from assigner.profiler.links import link_rounds, with_unmeasured
from assigner.profiler.pairs import Classes, Pair, ring, rounds_of, sampled_pairs, tournament


def make_fleet(hosts: int, *, gpus: int = 1, cpus: int = 1) -> list[HostFacts]:
    """Hosts alike, each with GPU workers and CPU workers."""
    devices = [(f"cuda:{n}", "H200") for n in range(gpus)] + [("cpu", "EPYC")] * cpus
    return [HostFacts(f"host{n}", n, device, kind, 1 << 30, 1) for n in range(hosts) for device, kind in devices]


def make_link(fleet: list[HostFacts], source: int, target: int, *seconds: float) -> Link:
    points = tuple(LinkPoint(1024 * 4**n, each, 9, 0.01) for n, each in enumerate(seconds))
    names = worker_names(fleet)
    return Link(names[source], names[target], points, "gloo", 0.1 * source, 0.2)


def ways_of(links: list[Link]) -> dict[Pair, Link]:
    return {(rank_of(each.source), rank_of(each.target)): each for each in links}


def test_everybody_meets_everybody_once() -> None:
    """A tournament of n workers has every pair once, and nobody twice in a round."""
    for workers in range(2, 9):
        rounds = tournament(workers)
        pairs = [pair for each in rounds for pair in each]
        assert sorted(pairs) == [(a, b) for a in range(workers) for b in range(a + 1, workers)]
        assert all(len({name for pair in each for name in pair}) == 2 * len(each) for each in rounds)


@pytest.mark.parametrize(("workers", "pairs"), [(1, []), (2, [(0, 1)]), (4, [(0, 1), (0, 3), (1, 2), (2, 3)])])
def test_neighbours_are_a_ring(workers: int, pairs: list[Pair]) -> None:
    """Each with the next one, the last with the first; a pair stands once."""
    assert ring(workers) == pairs


def test_a_sample_has_neighbours_and_every_class() -> None:
    """Of 24 hosts with a GPU and a CPU each, 3 pairs or more of each class are measured, and far fewer than all."""
    fleet = make_fleet(24)
    classes, chosen = Classes(fleet), sampled_pairs(fleet)
    assert set(ring(len(fleet))) <= set(chosen)
    assert len(chosen) == len(set(chosen)) < 2 * len(fleet)
    count: dict[object, int] = {}
    for low, high in chosen:
        name = frozenset((classes.of(low, high), classes.of(high, low)))
        count[name] = count.get(name, 0) + 1
    assert sorted(count.values())[0] >= 3
    assert len(count) == 4  # GPU - CPU on one host; GPU - GPU, GPU - CPU and CPU - CPU of two hosts


def test_rounds_of_a_sample_are_disjoint() -> None:
    """Every chosen pair has one round, and a worker is in one pair of a round at most."""
    chosen = sampled_pairs(make_fleet(9, cpus=2))
    rounds = rounds_of(chosen)
    assert sorted(pair for each in rounds for pair in each) == sorted(chosen)
    assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in rounds)
    assert len(rounds) < 12


@pytest.mark.parametrize(("hosts", "pairs", "amount"), [(4, "auto", 28), (4, "sampled", 14), (20, "all", 780)])
def test_small_fleets_are_measured_whole(hosts: int, pairs: str, amount: int) -> None:
    """Up to 16 workers have all their links measured, unless a sample is asked for."""
    rounds = link_rounds(make_fleet(hosts), pairs, alone=False)
    assert sum(len(each) for each in rounds) == amount


def test_a_shared_wire_has_pairs_measured_alone() -> None:
    """Where neighbours disturb each other, a round is one pair; a fleet that is too large for that keeps its rounds."""
    assert {len(each) for each in link_rounds(make_fleet(3), "all", alone=True)} == {1}
    assert max(len(each) for each in link_rounds(make_fleet(8), "all", alone=True)) == 8


def test_unmeasured_links_have_the_median_of_their_class() -> None:
    """A link that was left out has its class's median at the sizes that all of them have, and 0 samples."""
    fleet = make_fleet(4, gpus=0)
    measured = [
        make_link(fleet, 0, 1, 1.0, 5.0),
        make_link(fleet, 1, 2, 2.0, 6.0, 9.0),
        make_link(fleet, 2, 3, 4.0, 7.0),
    ]
    found = ways_of(with_unmeasured(measured, fleet))
    assert len(found) == 12
    assert [found[0, 1], found[1, 2], found[2, 3]] == measured
    filled = found[3, 0]
    assert [(point.bytes, point.seconds, point.samples) for point in filled.points] == [
        (1024, 2.0, 0),
        (4096, 6.0, 0),
    ]
    assert filled.points[0].spread == pytest.approx(0.75)
    assert (filled.sender_busy, filled.receiver_busy) == (pytest.approx(0.1), 0.2)


def test_a_class_without_measured_links_stays_without() -> None:
    """Nothing is made up for pairs of a class of which none was measured."""
    fleet = make_fleet(2)
    assert list(ways_of(with_unmeasured([make_link(fleet, 0, 2, 1.0)], fleet))) == [(0, 2), (2, 0)]
