"""What an all-reduce is priced at, against the formula written out by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from builders import make_profile, worker_name

from assigner.errors import FormatError
from assigner.formats.profile import Collective, Link, LinkPoint, Profile
from assigner.schedule.cost import CostModel, collectives_over
from assigner.schedule.rings import BUCKET_BYTES, ways

MB = 1e6


def w(*ranks: int) -> tuple[str, ...]:
    return tuple(worker_name(rank) for rank in ranks)


def linked(seconds: dict[tuple[int, int], float], workers: int, *, device: str = "cpu", hosts: int = 0) -> Profile:
    """Workers whose links take so many seconds for a message of a megabyte, and in proportion for others.

    Args:
        seconds: By (source, target).
        workers: How many.
        device: Of each on a host of its own.
        hosts: Of so many workers each; 0: each has its own.
    """
    made = make_profile(work=[1e-3], slowness=[1.0] * workers, links=False)
    named = {each.name: f"worker:{n}/{device}{':0' if device == 'cuda' else ''}" for n, each in enumerate(made.workers)}
    return replace(
        made,
        workers=tuple(
            replace(each, name=named[each.name], device=named[each.name].partition("/")[2], kind="k",
                    host=f"h{n // hosts}" if hosts else f"h{n}")
            for n, each in enumerate(made.workers)
        ),
        links=tuple(
            Link(*(named[worker_name(end)] for end in way), (LinkPoint(MB, each), LinkPoint(2 * MB, 2 * each)))
            for way, each in seconds.items()
        ),
        measurements=tuple(replace(each, worker=named[each.worker]) for each in made.measurements),
    )  # fmt: skip


def everywhere(workers: int, seconds: float = 1.0) -> dict[tuple[int, int], float]:
    return dict.fromkeys(itertools.permutations(range(workers), 2), seconds)


def collective(ranks: tuple[int, ...], seconds: float, size: float = MB, **more: object) -> Collective:
    return Collective(w(*ranks), (LinkPoint(size, seconds),), **more)  # type: ignore[arg-type]


def test_the_formula_takes_the_slowest_link_of_the_ring() -> None:
    """Three workers by gloo: 0 sends to 2, 2 to 1, 1 to 0; links against the ring make no difference."""
    seconds = {(0, 2): 0.5, (2, 1): 0.7, (1, 0): 0.6, (2, 0): 9.0, (1, 2): 9.0, (0, 1): 9.0}
    cost = CostModel(linked(seconds, 3))
    assert cost.rings.ring(frozenset(w(0, 1, 2))) == w(2, 1, 0)
    assert cost.reduce_s(w(0, 1, 2), 6 * MB) == pytest.approx(2 * (3 - 1) * 2 * 0.7)
    assert cost.reduce_s(w(2, 0, 1), 6 * MB) == cost.reduce_s(w(0, 1, 2), 6 * MB)


def test_two_workers_exchange_halves_over_the_slower_direction() -> None:
    """2 t(n / 2), with t of the slower of both links; below the sweep t is its smallest point's time."""
    cost = CostModel(linked({(0, 1): 0.25, (1, 0): 0.75}, 2))
    assert cost.reduce_s(w(0, 1), 4 * MB) == pytest.approx(2 * 2 * 0.75)
    assert cost.reduce_s(w(0, 1), 8.0) == pytest.approx(2 * 0.75)


def test_one_worker_and_nothing_to_add_cost_nothing() -> None:
    """Not even a link."""
    cost = CostModel(linked({}, 2))
    assert cost.reduce_s(w(1), MB) == cost.reduce_busy_s(w(1), MB) == cost.reduce_s(w(0, 1), 0.0) == 0.0


def test_large_tensors_are_added_up_bucket_by_bucket() -> None:
    """Each bucket pays for its own steps, so that latencies add up."""
    points = (LinkPoint(1.0, 0.1), LinkPoint(1e9, 0.1 + 1e9 / 1e8))
    made = linked(everywhere(2), 2)
    cost = CostModel(replace(made, links=tuple(replace(each, points=points) for each in made.links)))
    one = cost.reduce_s(w(0, 1), BUCKET_BYTES)
    assert cost.reduce_s(w(0, 1), 3 * BUCKET_BYTES) == pytest.approx(3 * one)
    rest = cost.reduce_s(w(0, 1), 4096.0)
    assert cost.reduce_s(w(0, 1), 3 * BUCKET_BYTES + 4096.0) == pytest.approx(3 * one + rest)


def test_a_missing_link_is_told_by_name() -> None:
    """Only those of the ring are needed; what to do about it is said."""
    seconds = everywhere(3)
    del seconds[2, 1]
    cost = CostModel(linked(seconds, 3))
    with pytest.raises(FormatError, match=r"among worker:0/cpu, worker:1/cpu, worker:2/cpu needs a link from"
                       r" worker:2/cpu to worker:1/cpu, and there is none") as caught:  # fmt: skip
        cost.reduce_s(w(0, 1, 2), MB)
    assert "--only links" in (caught.value.hint or "")
    assert cost.reduce_s(w(0, 1), MB) > 0
    with pytest.raises(FormatError, match="worker:7/cpu is not a worker of this profile"):
        cost.reduce_s(w(0, 7), MB)


@pytest.mark.parametrize("seed", range(8))
def test_nccl_goes_round_the_best_ring(seed: int) -> None:
    """The one whose slowest link is fastest of all rings, by another enumeration; for gloo it may be a slower one."""
    rng, count = random.Random(seed), 3 + seed % 4
    seconds = {way: rng.uniform(0.1, 2.0) for way in itertools.permutations(range(count), 2)}
    best = min(
        max(seconds[way] for way in zip(ring, [*ring[1:], ring[0]], strict=True))
        for ring in itertools.permutations(range(count))
    )
    cost = CostModel(linked(seconds, count, device="cuda"))
    names = tuple(each.name for each in cost.profile.workers)
    assert cost.reduce_s(names, count * MB) == pytest.approx(2 * (count - 1) * best)
    by_rank = max(seconds[n, (n - 1) % count] for n in range(count))
    assert CostModel(linked(seconds, count)).reduce_s(w(*range(count)), count * MB) == pytest.approx(
        2 * (count - 1) * by_rank
    )


def test_a_large_ring_keeps_to_fast_links_and_is_the_same_each_time() -> None:
    """Nine GPUs on a circle of fast links, all others slow: nearest neighbours find it from any start."""
    order = [4, 0, 7, 2, 8, 1, 5, 3, 6]
    seconds = everywhere(9, 5.0)
    seconds.update({(order[n], order[(n + 1) % 9]): 1.0 + n / 100 for n in range(9)})
    names = [f"worker:{n}/cuda:0" for n in range(9)]
    found = [CostModel(linked(seconds, 9, device="cuda")).rings.ring(frozenset(each)) for each in (names, names[::-1])]
    assert found[0] == found[1]
    assert set(ways(found[0])) == {(names[order[n]], names[order[(n + 1) % 9]]) for n in range(9)}


def test_gpus_that_ranks_share_are_added_up_by_gloo() -> None:
    """In the order of the ranks; what was measured of the set says which it was."""
    made = linked({**everywhere(3, 3.0), (0, 1): 1.0, (1, 2): 1.0, (2, 0): 1.0}, 3, device="cuda")
    names = tuple(each.name for each in made.workers)
    shared = replace(made, workers=tuple(replace(each, host="h") for each in made.workers))
    assert CostModel(made).reduce_s(names, 3 * MB) == pytest.approx(4 * 1.0)
    assert CostModel(shared).reduce_s(names, 3 * MB) == pytest.approx(4 * 3.0)
    known = Collective(names, (LinkPoint(3 * MB, 24.0),), "gloo")
    assert CostModel(replace(made, collectives=(known,))).rings.ring(frozenset(names)) == names[::-1]


def test_a_measured_set_takes_what_it_took() -> None:
    """At the sizes that were measured exactly; between them the ratio to the formula lies on a line in log(bytes)."""
    points = (LinkPoint(2 * MB, 3.0), LinkPoint(8 * MB, 24.0))
    cost = CostModel(replace(linked(everywhere(2), 2), collectives=(Collective(w(1, 0), points, "gloo", 0.25),)))
    assert cost.reduce_s(w(0, 1), 2 * MB) == pytest.approx(3.0)
    assert cost.reduce_s(w(0, 1), 8 * MB) == pytest.approx(24.0)
    assert cost.reduce_s(w(0, 1), 4 * MB) == pytest.approx((1.5 + 3.0) / 2 * 4.0)
    assert cost.reduce_s(w(0, 1), 20 * MB) == pytest.approx(3.0 * 20.0)
    assert cost.reduce_busy_s(w(0, 1), 8 * MB) == pytest.approx(6.0)


def test_a_set_that_was_not_measured_takes_its_ratio_from_the_pairs_on_its_ring() -> None:
    """Each link by the pair that is most like it: the slowest of them so corrected counts."""
    made = linked({**everywhere(4), (3, 2): 1.5}, 4, hosts=2)
    pairs = (collective((0, 1), 6.0, 2 * MB, busy=0.5), collective((1, 2), 4.0, 2 * MB, busy=0.1))
    cost = CostModel(replace(made, collectives=pairs))
    assert cost.rings.ring(frozenset(w(1, 2, 3))) == w(3, 2, 1)
    inside, across = 6.0 / 2, 4.0 / 2
    # 3 -> 2 is inside a host, as 0 -> 1 is, of which the ratio is known; 2 -> 1 and 1 -> 3 are across
    assert cost.reduce_s(w(1, 2, 3), 3 * MB) == pytest.approx(4 * max(1.5 * inside, 1.0 * across))
    assert cost.rings.busy_share(frozenset(w(1, 2, 3))) == 0.5
    assert cost.reduce_s(w(2, 3), 2 * MB) == pytest.approx(2 * 1.5 * inside)


def test_the_nearest_pair_counts() -> None:
    """Its own before one of its kinds on its hosts, that before one of its kinds elsewhere, that before any."""
    made = linked(everywhere(6), 6, hosts=2)
    odd = replace(made, workers=(*made.workers[:5], replace(made.workers[5], kind="odd")))

    def price(pair: tuple[int, int], *known: Collective) -> float:
        return CostModel(replace(odd, collectives=known)).reduce_s(w(*pair), 2 * MB) / 2

    own, hosts, elsewhere = (
        collective((0, 2), 4.0, 2 * MB),
        collective((1, 3), 8.0, 2 * MB),
        collective((1, 4), 16.0, 2 * MB),
    )
    inside = collective((0, 1), 64.0, 2 * MB)
    assert price((0, 2), own, hosts, elsewhere, inside) == 2.0
    assert price((0, 2), hosts, elsewhere, inside) == 4.0
    assert price((0, 2), elsewhere, inside) == 8.0
    assert price((0, 5), elsewhere, inside) == 8.0
    assert price((0, 2), inside) == 1.0


def test_like_workers_of_the_same_hosts_take_a_pairs_time() -> None:
    """Their way is the same: a link of theirs that was measured too slow by chance does not slow them."""
    made = linked({**everywhere(4), (3, 2): 7.0, (2, 1): 3.0}, 4, hosts=4)
    cost = CostModel(replace(made, collectives=(collective((0, 1), 6.0, 2 * MB),)))
    assert cost.reduce_s(w(1, 2, 3), 3 * MB) == pytest.approx(4 * 6.0 / 2)
    assert cost.reduce_s(w(3, 2), 2 * MB) == pytest.approx(6.0)


def test_without_like_pairs_the_fewest_workers_around_count_and_else_the_links_alone() -> None:
    """The ratio of all workers together stands in for a set of them; busy shares go the same way."""
    made = replace(
        linked(everywhere(4), 4), links=tuple(replace(each, sender_busy=0.2, receiver_busy=0.3)
                                              for each in linked(everywhere(4), 4).links))  # fmt: skip
    whole = collective((0, 1, 2, 3), 30.0, 4 * MB, busy=0.4)
    some = collective((0, 1, 2), 8.0, 3 * MB, busy=0.7)
    for known, factor, busy in (((whole, some), 2.0, 0.7), ((whole,), 5.0, 0.4), ((), 1.0, 0.5)):
        cost = CostModel(replace(made, collectives=known))
        assert cost.reduce_s(w(0, 2), 2 * MB) == pytest.approx(2 * factor)
        assert cost.rings.busy_share(frozenset(w(0, 2))) == pytest.approx(busy)


def test_a_collective_whose_links_are_missing_says_nothing() -> None:
    """Its ratio to the formula is not known: the next one counts."""
    seconds = {way: 1.0 for way in itertools.permutations(range(3), 2) if 2 not in way}
    known = (collective((0, 1, 2), 1e3, 3 * MB), collective((0, 1), 4.0, 2 * MB))
    cost = CostModel(replace(linked(seconds, 3), collectives=known))
    assert cost.reduce_s(w(0, 1), 2 * MB) == pytest.approx(4.0)


def test_other_links_leave_the_ratio_as_it_was() -> None:
    """Links that a run found half as fast make measured all-reduces take twice as long."""
    made = replace(linked(everywhere(2), 2), collectives=(collective((0, 1), 3.0, 2 * MB),))
    slow = linked(everywhere(2, 2.0), 2).links
    moved = collectives_over(made, slow)
    assert [point.seconds for point in moved[0].points] == [6.0]
    assert CostModel(replace(made, links=slow, collectives=moved)).reduce_s(w(0, 1), 4 * MB) == pytest.approx(
        2 * CostModel(made).reduce_s(w(0, 1), 4 * MB)
    )
    assert collectives_over(replace(made, collectives=()), slow) == ()
