"""Which workers share prices, and which values a partition makes."""

from __future__ import annotations

from dataclasses import replace

from builders import make_profile, worker_name

from assigner.schedule.cost import CostModel, PartitionOutput


def test_workers_of_a_kind_share_prices_unless_they_were_measured():
    """Of four like workers the first and the third were measured; the others are priced as the first."""
    profile = make_profile(work=[1e-3], slowness=[1.0, 1.0, 2.0, 1.0])
    profile = replace(
        profile,
        workers=tuple(replace(worker, kind="one") for worker in profile.workers),
        measurements=tuple(each for each in profile.measurements if each.worker in (worker_name(0), worker_name(2))),
    )
    cost = CostModel(profile)
    names = [worker_name(rank) for rank in range(4)]
    assert [cost.first_alike[name] for name in names] == [names[0], names[0], names[2], names[0]]
    assert cost.partition("p0", names[1], 1) == cost.partition("p0", names[3], 1)
    assert cost.partition("p0", names[2], 1) != cost.partition("p0", names[3], 1)


def test_what_a_partition_makes_is_what_others_read():
    """Two outputs of p0, one of them read twice; p2 makes nothing."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0])
    edge = profile.edges[0]
    edges = (
        edge,
        replace(edge, target="p2"),
        replace(edge, target="p2", output=1),
        replace(edge, source="p1", target="p2"),
    )
    cost = CostModel(replace(profile, edges=edges))
    assert {name: set(made) for name, made in cost.makes.items()} == {
        "p0": {PartitionOutput("p0", 0), PartitionOutput("p0", 1)},
        "p1": {PartitionOutput("p1", 0)},
        "p2": set(),
    }
