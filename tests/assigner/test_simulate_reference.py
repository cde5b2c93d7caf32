"""The simulator times every action as a second, plain simulator does that was written from the cost model's page."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from brute_force import with_shared_values
from builders import make_plan, make_profile
from drawn_orders import with_drawn_order
from drawn_plans import drawn, replicated, with_wires
from reference_simulator import reference

from assigner.schedule.cost import CostModel
from assigner.schedule.orders import LETTERS
from assigner.schedule.program import ActionKind, build_program
from assigner.schedule.simulate import run_program, step_s

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

LETTER = {**LETTERS, ActionKind.REDUCE: "R", ActionKind.UPDATE: "U"}


def assert_equal(profile: Profile, plan: Plan) -> None:
    cost = CostModel(profile)
    expected = reference(plan, profile, lambda on, size: (cost.reduce_s(on, size), cost.reduce_busy_s(on, size)))
    timeline = run_program(build_program(plan, profile.edges, profile.ties), cost)
    found = {
        (event.worker, LETTER[event.action.kind], event.action.stage, event.action.micro_batch): event
        for event in timeline.events
        if event.action.route is None
    }
    assert found.keys() == expected.keys()
    for key, (start, end) in expected.items():
        assert (found[key].start_s, found[key].end_s) == pytest.approx((start, end), abs=1e-9)
    assert step_s(plan, cost) == pytest.approx(max(end for _, end in expected.values()), abs=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(40))
def test_every_action_starts_and_ends_when_the_page_says(seed: int, schedule: str) -> None:
    """To 1e-9 s: chains and graphs, ties, uneven links, busy shares, deep warm-ups, actions that end together."""
    assert_equal(*drawn(seed, schedule))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(40))
def test_replicas_and_their_reductions_too(seed: int, schedule: str) -> None:
    """The same of stages on several workers: who takes what, which messages go, when gradients are added up."""
    assert_equal(*replicated(*drawn(seed, schedule), seed))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(40))
def test_links_that_share_wires_too(seed: int, schedule: str) -> None:
    """The same where messages wait for a wire, of stages on one worker and on several."""
    profile, plan = drawn(seed, schedule)
    profile, plan = replicated(profile, plan, seed) if seed % 3 == 0 else (profile, plan)
    assert_equal(with_wires(profile, seed), plan)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("seed", range(1, 40, 2))
def test_values_that_several_partitions_read_too(seed: int, schedule: str) -> None:
    """The same of graphs where the readers of a value share its message, and some of them send no gradient."""
    profile, plan = drawn(seed, schedule)
    profile, plan = replicated(profile, plan, seed) if seed % 3 == 0 else (profile, plan)
    assert_equal(with_shared_values(profile, seed), plan)


@pytest.mark.parametrize("halves", [False, True], ids=["whole backwards", "backwards in two parts"])
@pytest.mark.parametrize("seed", range(40))
def test_listed_orders_too(seed: int, *, halves: bool) -> None:
    """The same of any order that can run, on shared stages and with values that several stages read."""
    rng = random.Random(seed)
    profile, plan = drawn(seed, "interleaved")
    profile, plan = replicated(profile, plan, seed) if seed % 3 == 0 else (profile, plan)
    profile = with_shared_values(profile, seed) if seed % 4 == 1 else profile
    if halves:
        measured = tuple(
            replace(
                each, backward_input_s=rng.uniform(0, 1e-2), backward_weight_s=rng.uniform(0, 1e-2), waiting_bytes=1e5
            )
            for each in profile.measurements
        )
        profile = replace(profile, measurements=measured)
    assert_equal(profile, with_drawn_order(plan, profile.edges, rng, halves=halves))


def test_two_stages_of_a_worker_that_read_one_value_share_its_message() -> None:
    """The first of them waits for it, and its gradient leaves after that one's backward, the last of the two."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0, 1.0], edges=[(0, 1), (0, 3), (2, 3)], bandwidth=1e7)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (2, ["p2"]), (1, ["p3"])], micro_batches=8)
    assert_equal(profile, replace(plan, schedule="interleaved"))


def test_a_gradient_leaves_behind_its_last_reader_that_has_one() -> None:
    """A reader that sends no gradient back, and whose backward comes after that of one that does, is not waited for."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0, 1.0], edges=[(0, 1), (0, 3), (2, 3)], bandwidth=1e7)
    mixed = tuple(replace(edge, gradient=edge.target != "p1") for edge in profile.edges)
    plan = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (2, ["p2"]), (1, ["p3"])], micro_batches=8)
    plan, profile = replace(plan, schedule="interleaved"), replace(profile, edges=mixed)
    program = build_program(plan, profile.edges)
    (sends,) = {
        (action.stage, action.route.partition)
        for action in program.actions["worker:1/cpu"]
        if action.route is not None and action.kind == ActionKind.SEND and action.route.partition == "p0"
    }
    assert sends == (3, "p0")
    assert_equal(profile, plan)
