"""What ranks that got differently far agree on."""

from dataclasses import replace

import pytest

from assigner.profiler.host import HostFacts
from assigner.profiler.options import Selection
from assigner.profiler.stagegroups import in_turn
from assigner.profiler.tasks import Point, RankState, RefusedError, Start, assign_tasks, check_states, describe

KINDS = {"embed": ["embed"], "blocks.0": ["blocks.0", "blocks.1"], "head": ["head"]}
ALL = {Point(name, size) for name in KINDS for size in (2, 4)}


def facts(node=0, **changes):
    return replace(HostFacts(f"host{node}", node, "cpu", "CPU", 10**9, 1), **changes)


def offer(node=0, points=(), targets=(), **changes):
    return RankState(facts(node, **changes), "sha256:00", tuple(points), tuple(targets))


def tasks(offers, words=(), *, isolated=False):
    return [
        assign_tasks(offers, rank, kinds=KINDS, sizes=(2, 4), selection=Selection(words), isolated=isolated)
        for rank in range(len(offers))
    ]


def test_with_nothing_measured_all_is():
    """Every point on every rank, and every link."""
    for task in tasks([offer(), offer(1)]):
        assert task.keep == ALL
        assert set(task.run) == ALL
        assert task.links == {(0, 1), (1, 0)}


def test_what_a_rank_has_is_not_measured_again():
    """Each measures what it lacks."""
    one, two = tasks([offer(0, ALL), offer(1, [Point("embed", 2)])])
    assert one.keep == set()
    one, two = tasks([offer(0, ALL), offer(1, [Point("embed", 2)])], isolated=True)
    assert one.run == ()
    assert set(two.run) == two.keep == ALL - {Point("embed", 2)}


@pytest.mark.parametrize("node", [0, 1])
def test_workers_keep_each_other_company(node):
    """What one lacks both run, as in training; the other keeps the figure that it has."""
    done = ALL - {Point("head", 4)}
    one, two = tasks([offer(0, ALL), offer(node, done)])
    assert one.run == two.run == (Point("head", 4),)
    assert one.keep == set()
    assert two.keep == {Point("head", 4)}
    alone, _ = tasks([offer(0, ALL), offer(node, done)], isolated=True)
    assert alone.run == ()


def test_an_all_reduce_that_its_first_rank_lacks_is_measured():
    """A pair on the host, a pair between the hosts and all ranks, but for what is there; every rank has one list."""
    fresh = [offer(0), offer(0), offer(1)]
    for task in tasks(fresh):
        assert task.collectives == ((0, 1), (0, 2), (0, 1, 2))
    for task in tasks([replace(fresh[0], collectives=((0, 2),)), *fresh[1:]]):
        assert task.collectives == ((0, 1), (0, 1, 2))
    for task in tasks(fresh, ["worker:2-worker:1"]):
        assert task.collectives == ((1, 2),)
    for task in tasks(fresh, ["compute"]):
        assert task.collectives == ()
    for task in tasks(fresh, ["collectives"]):
        assert (task.links, task.keep) == (set(), set())
        assert task.collectives == ((0, 1), (0, 2), (0, 1, 2))


def test_a_link_that_its_source_lacks_is_measured():
    """All ranks know which, whoever lacks it."""
    for task in tasks([offer(0, targets=[1, 2]), offer(1, targets=[2]), offer(2)]):
        assert task.links == {(1, 0), (2, 0), (2, 1)}


def test_a_selection_is_measured_where_it_says():
    """--only worker:1: its points and links; the other hosts keep nothing of what they run."""
    one, two, _ = tasks([offer(0), offer(1), offer(2)], ("worker:1",))
    assert one.keep == set()
    assert two.keep == ALL
    assert two.links == {(0, 1), (1, 0), (1, 2), (2, 1)}
    (first, second) = tasks([offer(0), offer(1)], ("blocks.1",))
    assert first.keep == second.keep == {Point("blocks.0", 2), Point("blocks.0", 4)}
    assert not first.links


def test_offers_that_fit_are_accepted():
    """The same model, and the workers of the profile that is updated: any other ones are not."""
    offers = [offer(), offer(1, threads=2)]
    workers = tuple(
        describe(f"worker:{n}/{each.facts.device}", each.facts.kind, each.facts.threads)
        for n, each in enumerate(offers)
    )
    check_states(Start((2, 4)), offers)
    check_states(Start((2, 4), workers), offers)
    for other in (workers[:1], workers[::-1], (*workers, workers[0])):
        with pytest.raises(RefusedError):
            check_states(Start((2, 4), other), offers)


@pytest.mark.parametrize(
    ("start", "second", "said"),
    [
        (Start(refused="the file is for another model"), offer(), "another model"),
        (Start(), replace(offer(), refused="journal of 3 ranks"), "journal of 3 ranks"),
        (Start(), replace(offer(), fingerprint="sha256:11"), "worker:1 has another model"),
        (Start(workers=("worker:0/cpu (CPU, 1 thread)",)), offer(), "1 workers, and the run has 2"),
        (
            Start(workers=("worker:0/cpu (CPU, 1 thread)", "worker:1/cpu (CPU, 2 threads)")),
            offer(),
            r"worker:1/cpu \(CPU, 2 threads\) is worker:1/cpu \(CPU, 1 thread\)",
        ),
    ],
)
def test_what_cannot_be_one_profile_is_refused(start, second, said):
    """Every rank comes to the same error; the message names what does not fit."""
    with pytest.raises(RefusedError, match=said) as caught:
        check_states(start, [offer(), second])
    assert caught.value.exit_code == 5


def test_a_wrong_flag_keeps_its_exit_code():
    """A usage error of rank 0 is one on all, with what it says to do."""
    with pytest.raises(RefusedError) as caught:
        check_states(Start(refused="--only tail", usage=True, hint="name partitions"), [offer()])
    assert (caught.value.exit_code, caught.value.hint) == (2, "name partitions")


@pytest.mark.parametrize(
    ("partitions", "sizes", "lengths"),
    [(3, 3, [9]), (4, 3, [12]), (5, 3, [9, 6]), (9, 3, [9, 9, 9]), (30, 1, [10, 10, 10]), (1, 20, [20])],
)
def test_points_are_measured_in_even_groups(partitions, sizes, lengths):
    """Twelve at most in turn, where a partition's own sizes are no more; they stay together."""
    points = [Point(f"p{n}", size) for n in range(partitions) for size in range(1, sizes + 1)]
    groups = in_turn(points)
    assert [len(group) for group in groups] == lengths
    assert [point for group in groups for point in group] == points
