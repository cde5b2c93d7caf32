"""Workers of a stage that update its partitions for each other: what the plan says, and what that should cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from brute_force import random_instance
from builders import make_plan, make_profile, worker_name

from assigner.errors import FormatError
from assigner.export.traceevents import trace_events
from assigner.formats.plan import Plan, load_plan, save_plan
from assigner.formats.profile import Tie
from assigner.formats.stage import Replica
from assigner.report.page.figures import timeline_figures
from assigner.report.page.shown import shown
from assigner.report.placementchanges import placement_changes_data
from assigner.report.plan import stages
from assigner.report.sharing import sharing
from assigner.report.timeline import timeline
from assigner.schedule.cost import CostModel
from assigner.schedule.criticalpath import critical_path
from assigner.schedule.occupancy import memory_over_time
from assigner.schedule.program import ActionKind
from assigner.schedule.replication import gathered_bytes, held_state, update_s
from assigner.schedule.simulate import priced, simulated, step_s, worker_memory
from assigner.schedule.timing import compute_s
from assigner.solver import SolveOptions, solve
from assigner.validation.calibration import calibrated
from assigner.validation.comparison import agree
from assigner.validation.observed import rehearsed
from assigner.validation.spans import predicted_spans

ONE, TWO, OTHER = worker_name(0), worker_name(2), worker_name(1)
PROFILE = random_instance(1, partitions=6, workers=3, busy=True, batch=16)


def shared(*updates: tuple[str, ...] | None) -> Plan:
    """The first half of the partitions on two workers, with what each of them updates; the other half on a third."""
    names = PROFILE.order
    plan = replace(make_plan(PROFILE, [(0, names[:3]), (1, names[3:])], micro_batches=8), schedule="1f1b")
    replicas = tuple(
        Replica(worker, count, updates=mine)
        for worker, count, mine in zip((ONE, TWO), (3, 5), updates or (None, None), strict=True)
    )
    return replace(plan, stages=(replace(plan.stages[0], sole_worker=None, replicas=replicas), plan.stages[1]))


DIVIDED = shared(PROFILE.order[:1], PROFILE.order[1:3])


def test_each_worker_has_the_state_of_what_it_updates() -> None:
    """And the seconds of that update alone; everything else of the stage is on both."""
    cost, whole = CostModel(PROFILE), shared()
    sizes = {each.name: each.optimizer_bytes for each in PROFILE.partitions}
    for worker, mine in ((ONE, PROFILE.order[:1]), (TWO, PROFILE.order[1:3])):
        before, after = held_state(cost, whole, worker), held_state(cost, DIVIDED, worker)
        assert after.optimizer == pytest.approx(sum(sizes[name] for name in mine))
        assert replace(after, optimizer=before.optimizer) == before
        assert worker_memory(cost, DIVIDED, worker).total < worker_memory(cost, whole, worker).total
        size = whole.micro_batch_size
        assert update_s(cost, DIVIDED, worker) == pytest.approx(
            sum(cost.partition(name, worker, size).update_s for name in mine)
        )
    assert update_s(cost, DIVIDED, OTHER) == update_s(cost, whole, OTHER)
    for held in memory_over_time(simulated(DIVIDED, cost), cost):
        assert held.peak.total <= worker_memory(cost, DIVIDED, held.worker).total * (1 + 1e-9)
        assert held.state.optimizer == held_state(cost, DIVIDED, held.worker).optimizer


def test_a_shared_parameter_is_the_first_partition_s_or_everybody_s() -> None:
    """Within a stage the first partition's updater has its state; between stages, all that hold it."""
    first, second, third = PROFILE.order[:3]
    size = min(PROFILE.partition[name].parameter_bytes for name in PROFILE.order) / 4

    def optimizer(tie: tuple[str, ...], worker: str) -> float:
        tied = replace(PROFILE, ties=(Tie("shared", tie, size),))
        return held_state(CostModel(tied), DIVIDED, worker).optimizer

    alone = {worker: held_state(CostModel(PROFILE), DIVIDED, worker).optimizer for worker in (ONE, TWO)}
    share = {name: size / PROFILE.partition[name].parameter_bytes for name in PROFILE.order}
    states = {name: PROFILE.partition[name].optimizer_bytes for name in PROFILE.order}
    assert optimizer((first, third), ONE) == pytest.approx(alone[ONE])
    assert optimizer((first, third), TWO) == pytest.approx(alone[TWO] - share[third] * states[third])
    last = PROFILE.order[-1]
    assert optimizer((second, last), ONE) == pytest.approx(alone[ONE] + share[second] * states[second])
    assert optimizer((second, last), TWO) == pytest.approx(alone[TWO])


def test_nobody_else_is_charged_for_the_update_of_a_shared_parameter() -> None:
    """However many of the partitions that hold it another worker of the stage updates."""
    first, second, third = PROFILE.order[:3]
    size = min(PROFILE.partition[name].parameter_bytes for name in PROFILE.order) / 4
    tied = CostModel(replace(PROFILE, ties=(Tie("shared", (first, second, third), size),)))
    rest = DIVIDED.micro_batch_size
    alone = [
        tied.partition(name, TWO, rest).update_s * (1 - size / PROFILE.partition[name].parameter_bytes)
        for name in (second, third)
    ]
    assert update_s(tied, DIVIDED, TWO) == pytest.approx(sum(alone))
    assert update_s(tied, DIVIDED, ONE) == tied.partition(first, ONE, rest).update_s
    states = [held_state(tied, DIVIDED, worker).optimizer for worker in (ONE, TWO)]
    assert sum(states) == pytest.approx(tied.state((first, second, third)).optimizer)


def test_parameters_are_handed_out_behind_the_last_update() -> None:
    """Once both have updated, for half an all-reduce of as many times the larger part as there are workers."""
    cost = CostModel(PROFILE)
    line = simulated(DIVIDED, cost)
    gathers = [event for event in line.events if event.action.kind is ActionKind.GATHER]
    updates = {event.worker: event for event in line.events if event.action.kind is ActionKind.UPDATE}
    seconds = compute_s(cost, DIVIDED, (ActionKind.GATHER, 0, ONE))
    assert [event.worker for event in gathers] == [ONE, TWO]
    assert seconds == cost.reduce_s((ONE, TWO), gathered_bytes(cost, DIVIDED, 0)) / 2 > 0
    begun = max(updates[worker].end_s + updates[worker].busy_s for worker in (ONE, TWO))
    for event in gathers:
        assert event.end_s == pytest.approx(begun + seconds)
    assert line.step_s == step_s(DIVIDED, cost) == max(event.end_s for event in line.events)
    if line.step_s == gathers[0].end_s:
        last = line.events[critical_path(line)[-1]]
        assert (last.action.kind, last.start_s) == (ActionKind.GATHER, begun)


def test_a_run_that_goes_as_predicted_agrees() -> None:
    """Its trace, its timeline, its slices and its page have what is handed out."""
    cost, plan = CostModel(PROFILE), priced(DIVIDED, PROFILE)
    line = simulated(plan, cost)
    found = agree(plan, PROFILE, rehearsed(line, cost, steps=2))
    gathered = [each for each in found.computes if each.kind == "gather"]
    assert [each.worker for each in gathered] == [ONE, TWO]
    for each in found.computes:
        assert each.once.measured_s == pytest.approx(each.once.predicted_s)
    assert found.step.measured_s == pytest.approx(found.step.predicted_s)
    spans = predicted_spans(line, cost)
    timeline([spans], width=400)
    assert {event["name"] for event in trace_events([spans])["traceEvents"]} >= {"gather of stage 0"}
    rows = timeline_figures(shown("it", plan, PROFILE))["reductions"]
    assert sorted(row[5] for row in rows) == ["gathering", "gathering", "reduction", "reduction"]


def test_such_a_plan_is_of_format_2_1(tmp_path) -> None:
    """Which it says, also when it is read again; one that divides nothing is of 2.0."""
    save_plan(DIVIDED, tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["format_version"] == "2.1"
    assert load_plan(tmp_path / "plan.json") == DIVIDED
    save_plan(shared(), tmp_path / "other.json")
    other = json.loads((tmp_path / "other.json").read_text())
    assert other["format_version"] == "2.0"
    assert "updates" not in other["stages"][0]["replicas"][0]


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ((PROFILE.order[:3], None), r"stages\[0\].replicas\[1\].updates: missing"),
        ((PROFILE.order[:1], PROFILE.order[1:2]), f"none of them updates '{PROFILE.order[2]}'"),
        ((PROFILE.order[:3], PROFILE.order[2:3]), f"'{PROFILE.order[2]}' is in the updates of 2 of them"),
        ((PROFILE.order[:3], PROFILE.order[4:5]), f"'{PROFILE.order[4]}' is not a partition of this stage"),
    ],
)
def test_each_partition_is_updated_by_one(updates, words) -> None:
    """Else the plan is refused."""
    with pytest.raises(FormatError, match=words):
        shared(*updates)


@pytest.mark.long
def test_the_solver_divides_where_memory_binds_alone() -> None:
    """Where two whole copies of the state do not fit, and halves of it do; never where everything fits."""
    sizes = {"work": [4e-3] * 6, "slowness": [1, 1], "parameters": 2e6, "bandwidth": 4e9, "activation": 1.5e6}
    found = {}
    for capacity in (2e8, 6e7, 4.5e7):
        profile = make_profile(**sizes, capacity=capacity)
        plan = solve(profile, SolveOptions(max_replicas=2)).plan
        found[capacity] = (plan.is_replicated, plan.is_divided)
        assert plan.predicted is not None
        assert plan.solver is not None
        assert all(each.peak_bytes <= each.capacity_bytes for each in plan.predicted.workers)
        if plan.is_divided:
            assert plan.predicted.step_s < solve(profile, SolveOptions(max_replicas=1)).plan.predicted.step_s
            assert plan.solver.scope.startswith("plans, also those that divide optimizer state, with ")
            assert 0 < plan.solver.bound_s <= plan.predicted.step_s
    assert found == {2e8: (True, False), 6e7: (True, True), 4.5e7: (False, False)}


def test_what_is_divided_is_told() -> None:
    """In the table of stages, in the sentence on sharing, and beside a plan that divides otherwise."""
    profile = make_profile(work=[4e-3] * 4, slowness=[1, 1], parameters=2e6)
    plan = make_plan(profile, [(0, profile.order)])
    replicas = tuple(
        Replica(worker_name(n), 2, updates=mine) for n, mine in enumerate((profile.order[:1], profile.order[1:]))
    )
    plan = priced(replace(plan, stages=(replace(plan.stages[0], sole_worker=None, replicas=replicas),)), profile)
    sheet = stages(plan)
    at = [column.header for column in sheet.columns].index("updates %")
    assert [row[at] for row in sheet.rows] == ["25.0", "75.0"]
    (line,) = sharing(plan, profile)
    assert "each updates a part for all: 11.4 MiB of optimizer state at most instead of 15.3 MiB" in line.text
    whole = replace(plan, stages=(replace(plan.stages[0], replicas=(Replica(ONE, 2), Replica(OTHER, 2))),))
    changed = placement_changes_data(whole, plan)["settings_changed"]
    assert changed == {"updates of replicas": ["everything", "1+3"]}


def test_a_profile_is_corrected_by_a_run_that_hands_parameters_on() -> None:
    """A gathering lies beside what its workers compute, and takes nothing from it."""
    cost = CostModel(PROFILE)
    found = [
        calibrated(PROFILE, agree(plan, PROFILE, rehearsed(simulated(plan, cost), cost)), trace="run.json").measurements
        for plan in (DIVIDED, shared())
    ]
    for mine, theirs in zip(*found, strict=True):
        assert (mine.forward_s, mine.backward_s) == pytest.approx((theirs.forward_s, theirs.backward_s))
