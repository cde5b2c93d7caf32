"""The simpler ways to place a profile, against hand-made splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_plan, make_profile, random_chain, worker_name
from sweeps import sweep

from assigner.formats.profile import Edge
from assigner.report.plan import SHARED
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import overfull, predict
from assigner.solver import SolveOptions, solve, solve_baseline
from assigner.solver.baselines import TITLES, find_baselines
from assigner.solver.problem.problem import Problem
from benchmarks.solver.clusters import cluster

CONTIGUOUS = ("single", "equal", "proportional", "balance", "pipedream")


def price(profile, **options):
    """Step times by short name."""
    found = [each.row for each in find_baselines(Problem(profile, SolveOptions(**options), CostModel(profile)))]
    assert [each.name for each in found] == list(TITLES.values())
    return {name: each.step_s for name, each in zip(TITLES, found, strict=True)}


def stages(profile, name, **options):
    """A baseline's plan as (rank, partitions) of each stage."""
    plan = solve_baseline(profile, name, SolveOptions(**options))
    return [(int(stage.worker.split(":")[1].split("/")[0]), stage.partitions) for stage in plan.stages]


def by_hand(profile, made, counts=(1, 2, 4, 8)):
    return min(predict(make_plan(profile, made, micro_batches=count), profile).step_s for count in counts)


def with_cuts(profile, sizes):
    """The chain with `sizes[i]` bytes per sample between partitions i and i + 1."""
    edges = [Edge(f"p{i}", f"p{i + 1}", size) for i, size in enumerate(sizes)]
    return replace(profile, edges=tuple(edges))


def with_label(profile, label, names):
    """These partitions with one `colocate` label."""
    partitions = [replace(each, colocate=label if each.name in names else None) for each in profile.partitions]
    return replace(profile, partitions=tuple(partitions))


def test_every_baseline_has_a_name_and_a_title():
    """No two baselines have one title."""
    assert len(set(TITLES.values())) == len(TITLES)
    assert set(SHARED) == {title for name, title in TITLES.items() if name.startswith("data-parallel")}


def test_the_splits_are_what_their_names_say():
    """Each equals its split made by hand, at its own best micro-batch count."""
    profile = make_profile(work=[1e-3, 1e-3, 1e-3, 1e-3, 8e-3, 1e-3], slowness=[1.0, 2.0])
    found = price(profile)
    p = list(profile.order)
    assert found["single"] == pytest.approx(by_hand(profile, [(0, p)]))
    assert found["equal"] == pytest.approx(by_hand(profile, [(0, p[:3]), (1, p[3:])]))
    assert found["proportional"] == pytest.approx(by_hand(profile, [(0, p[:4]), (1, p[4:])]))
    assert found["balance"] == pytest.approx(by_hand(profile, [(0, p[:4]), (1, p[4:])]))


def test_prices_are_those_of_the_plans():
    """What is priced is what the plan of the same name is predicted to take."""
    profile = random_chain(3, partitions=7, workers=3, tight=True, busy=0.2)
    for name, step_s in price(profile).items():
        if step_s is not None:
            plan = solve_baseline(profile, name)
            assert plan.predicted.step_s == predict(plan, profile).step_s == step_s
            assert not overfull(plan.predicted)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", sweep(range(5), quick=4))
def test_no_split_of_the_chain_beats_the_plan(seed):
    """A proven optimum is never above a simpler way."""
    profile = random_chain(seed, partitions=6, workers=3, tight=seed % 2 == 0)
    plan = solve(profile, SolveOptions(gap=0)).plan
    found = price(profile)
    best = plan.predicted.step_s * (1 - 1e-9)
    assert all(found[name] is None or found[name] >= best for name in CONTIGUOUS)


def test_a_baseline_that_does_not_fit_has_no_step_time():
    """The whole model on one worker does not fit; with everything rematerialised an equal split does."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], capacity=1.9e7, activation=1e6)
    found = price(profile)
    assert found["single"] is not None, "with one micro-batch at a time"
    assert price(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], capacity=1.3e7, activation=1e6))["single"] is None
    assert found["equal"] is not None
    assert all(stage.rematerialise == stage.partitions for stage in solve_baseline(profile, "equal").stages)
    assert price(profile, remat="never")["equal"] is None
    assert price(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], links=False))["equal"] is None


def test_one_worker_with_everything_is_no_data_parallelism():
    """With fewer micro-batches than workers, in equal shares; and where a slow worker would get none."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1, 1, 100])
    found = price(profile, micro_batches=2)
    assert found["data-parallel"] is None
    assert found["single"] is not None
    alone = price(profile, micro_batches=1)
    assert {alone[name] for name in TITLES if name.startswith("data-parallel")} == {None}


def test_splits_that_break_a_hint_are_left_out():
    """A split that breaks a pin, a label or the order of workers is not offered for comparison."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0])
    assert price(profile)["equal"] is not None
    assert price(profile, pins={"p0": "worker:1"})["equal"] is None
    assert price(profile, apart=(("p0", "p1"),))["equal"] is None
    labelled = with_label(profile, "one", ("p0", "p3"))
    assert price(labelled)["equal"] is None
    assert price(labelled)["single"] is not None
    turned = stages(profile, "equal", order=(worker_name(1), worker_name(0)))
    assert turned == [(1, ("p0", "p1")), (0, ("p2", "p3"))]
    assert stages(profile, "equal", max_workers=1) == [(0, profile.order)]
    unlike = make_profile(work=[1e-3] * 4, slowness=[2.0, 1.0, 1.0])
    for name in ("greedy", "weighted"):
        assert {rank for rank, _ in stages(unlike, name, max_workers=2)} <= {1, 2}


def test_greedy_and_weighted_heed_pins_and_labels():
    """They place around the hints."""
    profile = make_profile(work=[1e-3] * 6, slowness=[1.0, 1.0, 3.0])
    profile = with_label(profile, "ends", ("p0", "p5"))
    for name in ("greedy", "weighted"):
        plan = solve_baseline(profile, name, SolveOptions(pins={"p2": "worker:2"}))
        assert plan.placement["p2"] == worker_name(2)
        assert plan.placement["p0"] == plan.placement["p5"]


def test_rematerialisation_rules_hold():
    """A partition that must never run twice does not, where all others do; nor the other way round."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0])
    plan = solve_baseline(profile, "equal", SolveOptions(remat="always", rematerialise={"p1": "never"}))
    assert [stage.rematerialise for stage in plan.stages] == [("p0",), ("p2", "p3")]
    plan = solve_baseline(profile, "equal", SolveOptions(rematerialise={"p1": "always"}))
    assert [stage.rematerialise for stage in plan.stages] == [("p1",), ()]


def test_pipedream_cuts_where_little_is_sent():
    """2 : 3 and 3 : 2 are as good by time; of the two messages the second is the faster."""
    profile = with_cuts(make_profile(work=[1e-3, 1e-3, 1e-3, 2e-3], slowness=[1.0, 1.0]), [1e3, 1e8, 1e3])
    assert stages(profile, "balance") == [(0, ("p0", "p1")), (1, ("p2", "p3"))]
    assert stages(profile, "pipedream") == [(0, ("p0", "p1", "p2")), (1, ("p3",))]


def test_pipedream_takes_one_stage_where_every_message_is_slower_than_the_model():
    """With every cut at 0.2 s a micro-batch and the model at 0.015 s, the slowest part is least without a cut."""
    profile = with_cuts(make_profile(work=[1e-3] * 5, slowness=[1.0, 1.0, 1.0], capacity=1e12), [1e8] * 4)
    assert stages(profile, "pipedream") == [(0, profile.order)]


def test_pipedream_believes_all_workers_to_be_the_first():
    """An even split, though the second worker is ten times as slow; proportional sees it."""
    profile = with_cuts(make_profile(work=[1e-3] * 11, slowness=[1.0, 10.0]), [1e3] * 10)
    assert [len(held) for _, held in stages(profile, "pipedream")] in ([5, 6], [6, 5])
    assert [len(held) for _, held in stages(profile, "proportional")] == [10, 1]


def test_greedy_stays_on_the_fastest_worker_with_one_micro_batch():
    """Nothing overlaps, so each next partition is through soonest where the one before it is."""
    profile = make_profile(work=[1e-3] * 4, slowness=[3.0, 1.0, 2.0])
    assert stages(profile, "greedy", micro_batches=1) == [(1, profile.order)]


def test_greedy_takes_turns_with_two_micro_batches():
    """On two like workers with instant messages: p0 on 0 is through at 2, p1 beside it at 4, on 1 at 3, and so on."""
    profile = with_cuts(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], latency=1e-7), [1.0] * 3)
    found = stages(profile, "greedy", micro_batches=2)
    assert found == [(0, ("p0",)), (1, ("p1",)), (0, ("p2",)), (1, ("p3",))]


def test_greedy_does_not_split_over_a_slow_link():
    """A message takes a hundred times as long as a partition: all stay together."""
    profile = with_cuts(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], capacity=1e12), [1e8] * 3)
    assert stages(profile, "greedy", micro_batches=8) == [(0, profile.order)]


def test_greedy_goes_on_to_the_next_worker_when_memory_is_full():
    """State 4 MB, activations 8 MB and the value read 0.8 MB each, messages 1.6 MB: 30 MB hold two partitions."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0], capacity=3e7)
    found = stages(profile, "greedy", micro_batches=1, remat="never")
    assert found == [(0, ("p0", "p1")), (1, ("p2", "p3"))]
    small = make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0], capacity=[3e7, 1e7])
    assert price(small, micro_batches=1, remat="never")["greedy"] is None
    assert price(small, micro_batches=1)["greedy"] is not None


def test_weighted_matches_work_with_speed():
    """Eight like partitions without traffic, speeds 3 : 1: six and two."""
    profile = replace(make_profile(work=[1e-3] * 8, slowness=[1.0, 3.0]), edges=())
    placed = solve_baseline(profile, "weighted").placement
    assert sorted(list(placed.values()).count(worker_name(rank)) for rank in (0, 1)) == [2, 6]
    assert list(placed.values()).count(worker_name(0)) == 6


def test_weighted_keeps_together_what_talks():
    """Two pairs with heavy traffic inside and little between: one pair to each of two like workers."""
    profile = with_cuts(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0]), [1e6, 1e2, 1e6])
    for seed in range(5):
        placed = solve_baseline(profile, "weighted", SolveOptions(seed=seed)).placement
        assert placed["p0"] == placed["p1"] != placed["p2"] == placed["p3"]


def test_weighted_keeps_out_of_a_worker_without_memory():
    """The faster worker holds two of six partitions with all that they store, the slower one all."""
    profile = replace(make_profile(work=[1e-3] * 6, slowness=[1.0, 2.0], capacity=[2.5e7, 1e9]), edges=())
    placed = list(solve_baseline(profile, "weighted", SolveOptions(remat="never")).placement.values())
    assert placed.count(worker_name(0)) == 2


@pytest.mark.parametrize("name", list(TITLES))
def test_the_same_input_gives_the_same_plan(name):
    """No baseline depends on anything but profile, options and seed."""
    profile = cluster(24, 8, links="distinct")
    if price(profile)[name] is not None:
        first, second = (replace(solve_baseline(profile, name), solver=None) for _ in range(2))  # but for its seconds
        assert first == second


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (3, 1)])
def test_tiny_profiles_are_priced(size):
    """Fewer partitions than workers, and one worker alone."""
    partitions, workers = size
    found = price(make_profile(work=[1e-3] * partitions, slowness=[1.0] * workers))
    assert None not in found.values()


def test_graphs_are_priced():
    """Branches and a skip: every baseline has a plan that the simulator takes."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 4)]
    found = price(make_profile(work=[1e-3, 4e-3, 4e-3, 1e-3, 2e-3], slowness=[1.0, 1.0], edges=edges))
    assert None not in found.values()
    assert found["greedy"] < found["single"]


@pytest.mark.long
def test_a_large_fleet_is_priced():
    """1,000 partitions on 64 workers, in 32 micro-batches."""
    found = price(cluster(1000, 64, links="distinct"), micro_batches=32)
    assert found["single"] is None  # one worker cannot even hold the parameters
    assert min(step for step in found.values() if step is not None) == found["greedy"]
