"""Chains past which values are handed on, into which partitions feed from beside, whose ends share a parameter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from brute_force import best_plan, random_instance
from builders import make_profile, single
from sweeps import sweep

from assigner.formats.graph import topological_orders
from assigner.formats.profile import Edge, Profile, Tie
from assigner.schedule.simulate import predict
from assigner.solver import solve
from assigner.solver.limits import tuning


def near_chain(seed: int) -> Profile:
    """p0 and p1 feed p2; p0 hands a mask to all behind; p0 and the last share a parameter, over slow wires."""
    profile = random_instance(
        seed, partitions=5, workers=2 + seed % 2, tight=seed % 4 == 0, busy=seed % 2 == 0, batch=2
    )
    pairs = [("p0", "p2"), ("p1", "p2"), ("p2", "p3"), ("p3", "p4")]
    edges = [Edge(source, target, 2e5) for source, target in pairs]
    edges += [Edge("p0", name, 5e4, output=1, gradient=False) for name in ("p2", "p3", "p4")]
    profile = replace(profile, edges=tuple(edges))
    return tied(profile, Tie("p0.weight", ("p0", "p4"), 3e6)) if seed % 3 else profile


def tied(profile: Profile, tie: Tie) -> Profile:
    """The profile with a shared parameter, for which its partitions grow, and the workers' memory by as much."""
    partitions = tuple(
        replace(each, parameter_bytes=each.parameter_bytes + tie.bytes) if each.name in tie.partitions else each
        for each in profile.partitions
    )
    more = len(tie.partitions) * tie.bytes
    workers = tuple(replace(each, memory_bytes=each.memory_bytes + more) for each in profile.workers)
    return replace(profile, partitions=partitions, workers=workers, ties=(tie,))


def orders(profile: Profile) -> tuple[tuple[str, ...], ...]:
    return topological_orders(profile.order, [(edge.source, edge.target) for edge in profile.edges], most=9)


def language_model(*, blocks: int = 4, workers: int = 2) -> Profile:
    """The graph of a GPT2LMHeadModel as `assigner init` cuts it: wte and wpe feed a block, the head is heavy."""
    count = blocks + 3
    profile = make_profile(
        work=[1e-4, 1e-5, *[2e-3] * blocks, 1.2e-2], slowness=[1.0 + 0.5 * n for n in range(workers)],
        edges=[(0, 2), (1, 2), *((n, n + 1) for n in range(2, count - 1))], batch=16,
    )  # fmt: skip
    return tied(profile, Tie("wte.weight", ("p0", f"p{count - 1}"), 5e7))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", sweep(range(7), quick=4))
def test_the_bound_is_below_every_plan_and_the_plan_within_its_gap(seed, schedule):
    profile = near_chain(seed)
    least = math.inf
    for order in orders(profile):
        along = replace(profile, partitions=tuple(profile.partition[name] for name in order))
        best = best_plan(along, schedules=(schedule,))
        least = min(least, math.inf if best is None else best[0])
    plan = solve(profile, single(schedule=schedule, gap=0)).plan
    assert plan.solver.bound_s <= least * (1 + 1e-6)
    assert plan.solver.gap <= 1e-6
    assert plan.predicted.step_s == pytest.approx(least, rel=1e-6)
    assert predict(plan, profile).step_s == plan.predicted.step_s


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "workers"), [(4, 2), (8, 3)])
def test_a_language_model_with_tied_embeddings_is_proven_like_a_chain(blocks, workers):
    plan = solve(language_model(blocks=blocks, workers=workers)).plan
    assert plan.solver.status == "optimal"
    assert plan.solver.gap <= 0.0101
    assert not any(each.status == "not decided" for each in plan.candidates)


@pytest.mark.long
def test_each_candidate_is_told_once_whatever_the_orders_of_the_graph():
    plan = solve(language_model()).plan
    told = [(each.schedule, each.micro_batches) for each in plan.candidates]
    assert len(told) == len(set(told)) == 10


def test_a_stage_names_its_partitions_in_the_order_of_the_profile():
    profile = language_model()
    plan = solve(profile, single(max_workers=1)).plan
    assert plan.stages[0].partitions == profile.order


def test_all_topological_orders_are_found_or_none():
    edges = [("a", "c"), ("b", "c"), ("c", "d")]
    assert topological_orders("abcd", edges, most=2) == (("a", "b", "c", "d"), ("b", "a", "c", "d"))
    assert topological_orders("abcd", edges, most=1) == ()
    assert topological_orders("ab", [("a", "b")], most=1) == (("a", "b"),)
    assert len(topological_orders("abc", [], most=6)) == 6
    assert topological_orders("abcdefgh", [], most=6) == ()


@pytest.mark.parametrize("limit", ["nodes", "simulated"])
def test_a_search_whose_counts_are_used_up_goes_on_while_time_is_left(limit, monkeypatch):
    """With counts so small that they prove nothing at first, the gap is proven all the same."""
    profile = near_chain(1)
    if limit == "nodes":
        monkeypatch.setattr(tuning, "NODES", 8)
        options = single(schedule="gpipe", gap=0)
    else:
        monkeypatch.setattr(tuning, "MOST_SIMULATED", 1)
        monkeypatch.setattr(tuning, "MOST_DEPTHS", 1)
        options = single(schedule="1f1b", gap=0)
    assert solve(profile, options).plan.solver.gap <= 1e-6
    monkeypatch.setattr(tuning, "MOST_EFFORT", 1)
    assert solve(profile, options).plan.solver.gap > 1e-6
