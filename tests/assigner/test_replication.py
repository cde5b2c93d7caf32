"""Several workers a stage: who takes which micro-batch, and that no program waits for itself."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from brute_force import random_instance
from builders import make_plan, make_profile
from drawn_plans import drawn, replicated

from assigner.errors import FormatError, UsageError
from assigner.formats.plan import load_plan, refuse_replicas, save_plan
from assigner.formats.stage import Replica, Stage
from assigner.schedule.cost import CostModel
from assigner.schedule.criticalpath import path_shares
from assigner.schedule.occupancy import memory_over_time
from assigner.schedule.orders import in_flight
from assigner.schedule.program import Action, ActionKind, Program, build_forward_program, build_program
from assigner.schedule.replication import takes
from assigner.schedule.simulate import run_program, simulated, step_s, worker_memory
from assigner.schedule.timing import reduced_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@pytest.mark.parametrize("seed", range(30))
def test_a_micro_batch_goes_to_who_is_furthest_behind(seed: int) -> None:
    """Each goes to the largest n (m + 1) / M - taken, the first among equals; and all come to their number."""
    rng = random.Random(seed)
    counts = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 5)))
    total = sum(counts)
    taken = [0] * len(counts)
    for m, chosen in enumerate(takes(total, counts)):
        behind = [Fraction(n * (m + 1), total) - t for n, t in zip(counts, taken, strict=True)]
        assert chosen == behind.index(max(behind))
        taken[chosen] += 1
    assert tuple(taken) == counts


def _computes(program: Program, worker: str) -> list[Action]:
    return [action for action in program.actions[worker] if action.route is None]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(20))
def test_every_micro_batch_of_every_stage_runs_once(seed: int, schedule: str) -> None:
    """Forward before backward, on one of the stage's workers, as many as the plan says; a reduction behind them."""
    profile, plan = replicated(*drawn(seed, schedule), seed)
    program = build_program(plan, profile.edges, profile.ties)
    runs: Counter[tuple[ActionKind, int, int]] = Counter()
    for worker in plan.workers:
        mine = _computes(program, worker)
        place = {(action.kind, action.stage, action.micro_batch): n for n, action in enumerate(mine)}
        runs.update(place.keys())
        for n in plan.held[worker]:
            took = [m for kind, stage, m in place if kind is ActionKind.FORWARD and stage == n]
            held = plan.stages[n]
            assert len(took) == next((r.micro_batches for r in held.replicas if r.worker == worker), plan.micro_batches)
            assert all(place[ActionKind.FORWARD, n, m] < place[ActionKind.BACKWARD, n, m] for m in took)
            if held.replicas:
                ends = [place[ActionKind.BACKWARD, n, m] for m in took]
                assert max(ends) < place[ActionKind.REDUCE, n, -1] < place[ActionKind.UPDATE, -1, -1]
    for n in range(len(plan.stages)):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            assert [runs[kind, n, m] for m in range(plan.micro_batches)] == [1] * plan.micro_batches


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(20))
def test_no_program_waits_for_itself(seed: int, schedule: str) -> None:
    """Plans with replicas are timed to their end, forwards alone too, and every message has its two ends."""
    profile, plan = replicated(*drawn(seed, schedule), seed)
    cost = CostModel(profile)
    program = build_program(plan, profile.edges, profile.ties)
    assert step_s(plan, cost) == run_program(program, cost).step_s > 0
    for each in (program, build_forward_program(plan, profile.edges)):
        run_program(each, cost)
        ends = {
            kind: Counter(
                (action.route, action.micro_batch)
                for actions in each.actions.values() for action in actions if action.kind is kind
            )
            for kind in (ActionKind.SEND, ActionKind.RECEIVE)
        }  # fmt: skip
        assert ends[ActionKind.SEND] == ends[ActionKind.RECEIVE]
        assert {route for route, _ in ends[ActionKind.SEND]} == set(each.routes)
        assert set(ends[ActionKind.SEND].values()) <= {1}
        assert all(route is not None and route.source != route.target for route in each.routes)


@pytest.mark.parametrize("seed", range(12))
def test_depths_are_refused_where_workers_would_wait_for_ever(seed: int) -> None:
    """1f1b with any depths of stages that workers share: refused where the simulator comes to no end, and only there.

    Alternate micro-batches let a stage in front be shallower, as each of its workers has a part of its order.
    """
    rng, drawn_shares = random.Random(seed), [(4,), (2, 2), (1, 3), (3, 1), (1, 2, 1)]
    for _ in range(6):
        shares = [(2, 2), (4,)] if seed == 0 else rng.choices(drawn_shares, k=rng.choice([2, 3]))
        profile = make_profile(work=[1e-3] * len(shares), slowness=[1.0] * sum(map(len, shares)), batch=4)
        free = iter(profile.workers)
        stages = tuple(
            Stage(None, (f"p{n}",), replicas=tuple(Replica(next(free).name, each) for each in counts))
            if len(counts) > 1 else Stage(next(free).name, (f"p{n}",))
            for n, counts in enumerate(shares)
        )  # fmt: skip
        depths = [1, 2] if seed == 0 else [rng.choice([None, 1, 2, 3, 4]) for _ in stages]
        deep = tuple(replace(stage, in_flight=depth) for stage, depth in zip(stages, depths, strict=True))
        plan = replace(make_plan(profile, [(0, profile.order)]), schedule="1f1b", stages=deep)
        try:
            assert step_s(plan, CostModel(profile)) > 0
        except FormatError:
            assert seed
            with pytest.raises(FormatError, match=r"in_flight: the program would wait for ever"):
                build_program(plan, profile.edges)
        else:
            assert build_program(plan, profile.edges).routes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_in_flight_is_what_the_program_keeps(seed: int, schedule: str) -> None:
    """A replica keeps as many micro-batches at once as its own order of forwards and backwards does."""
    profile, plan = replicated(*drawn(seed, schedule), seed)
    program = build_program(plan, profile.edges, profile.ties)
    for worker in plan.workers:
        for n in plan.held[worker]:
            kept = most = 0
            for action in _computes(program, worker):
                if action.stage == n and action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                    kept += 1 if action.kind is ActionKind.FORWARD else -1
                    most = max(most, kept)
            assert in_flight(plan, n, worker) == most


def _document(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A plan of two stages, the first on two workers, as a file and as JSON."""
    profile = random_instance(3, partitions=4, workers=3)
    plan = make_plan(profile, [(0, profile.order[:2]), (1, profile.order[2:])], micro_batches=4)
    shares = (Replica("worker:0/cpu", 3), Replica("worker:2/cpu", 1, threads=2))
    plan = replace(plan, stages=(replace(plan.stages[0], sole_worker=None, replicas=shares), plan.stages[1]))
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    return tmp_path / "plan.json", json.loads((tmp_path / "plan.json").read_text())


def test_a_plan_with_replicas_is_of_format_2_and_others_are_of_1(tmp_path: Path) -> None:
    """Only its stages with several workers have replicas, and no worker; without them it is a plan as ever."""
    path, document = _document(tmp_path)
    assert document["format_version"] == "2.0"
    assert ["worker" in stage for stage in document["stages"]] == [False, True]
    assert ["replicas" in stage for stage in document["stages"]] == [True, False]
    plan = load_plan(path)
    alone = replace(plan, stages=(replace(plan.stages[0], sole_worker="worker:0/cpu", replicas=()), plan.stages[1]))
    save_plan(alone, tmp_path / "alone.json")
    written = json.loads((tmp_path / "alone.json").read_text())
    assert written["format_version"] == "1.0"
    assert [list(stage) for stage in written["stages"]] == [
        ["worker", "partitions", "rematerialise", "in_flight", "threads"]
    ] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan.update(format_version="1.0"), "1.0 is not allowed; the file holds what came with 2.0"),
        (lambda plan: plan.update(format_version="3.0"), "this program reads 1.x and 2.x"),
        (lambda plan: plan["stages"][0].update(worker="worker:0/cpu"), r"stages\[0\]: it has a worker and replicas"),
        (lambda plan: plan["stages"][0].pop("replicas"), r"stages\[0\].worker: missing"),
        (lambda plan: plan["stages"][0].update(replicas=[]), r"stages\[0\].worker: missing"),
        (lambda plan: plan["stages"][0]["replicas"].pop(), r"stages\[0\].replicas: 'worker:0/cpu' is alone"),
        (lambda plan: plan["stages"][0]["replicas"][1].update(micro_batches=2), "they take 5 micro-batches in all"),
        (lambda plan: plan["stages"][0]["replicas"][1].update(micro_batches=0), r"replicas\[1\].micro_batches: 0"),
        (
            lambda plan: plan["stages"][0]["replicas"][1].update(worker="worker:0/cpu"),
            r"replicas\[1\].worker: .* there",
        ),
        (lambda plan: plan["stages"][0]["replicas"][1].update(worker="worker:0/cuda:0"), "have the same rank"),
        (
            lambda plan: plan["stages"][0]["replicas"][1].update(worker="two"),
            r"stages\[0\].replicas\[1\].worker: 'two'",
        ),
        (lambda plan: plan["stages"][0].update(threads=2), r"stages\[0\].threads: of several workers each has its own"),
    ],
)
def test_replicas_that_cannot_be_are_refused_in_words(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    """A file changed by hand says what is wrong and where."""
    path, document = _document(tmp_path)
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=words):
        load_plan(path)


def test_what_asks_for_the_one_worker_of_several_is_refused(tmp_path: Path) -> None:
    """Nothing looks at the first replica alone: what does not carry several says so."""
    plan = load_plan(_document(tmp_path)[0])
    assert plan.holders[plan.partitions[0]] == ("worker:0/cpu", "worker:2/cpu")
    assert plan.workers == ("worker:0/cpu", "worker:2/cpu", "worker:1/cpu")
    assert plan.held == {"worker:0/cpu": (0,), "worker:2/cpu": (0,), "worker:1/cpu": (1,)}
    for ask in (lambda: plan.stages[0].worker, lambda: plan.placement, lambda: refuse_replicas(plan, "this")):
        with pytest.raises(UsageError, match="several workers"):
            ask()


def test_replicas_share_fewer_micro_batches_in_the_same_proportion(tmp_path: Path) -> None:
    """Cut into another number of them, whole ones, by the largest remainder; one may have none."""
    plan = load_plan(_document(tmp_path)[0])
    counts = {
        count: [each.micro_batches for each in plan.cut(count, 1, batch_size=count).stages[0].replicas]
        for count in (1, 2, 3, 4, 8)
    }
    assert counts == {1: [1, 0], 2: [2, 0], 3: [2, 1], 4: [3, 1], 8: [6, 2]}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(20))
def test_the_critical_path_goes_through_reductions(seed: int, schedule: str) -> None:
    """Its parts add up to the step, whichever worker was the last to begin a reduction."""
    profile, plan = replicated(*drawn(seed, schedule), seed)
    shares = path_shares(simulated(plan, CostModel(profile)))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(share >= 0 for share in shares.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(20))
def test_memory_over_time_is_within_what_is_allowed_for(seed: int, schedule: str) -> None:
    """Each replica holds its own micro-batches and a bucket of gradients, and never more than the sum says."""
    profile, plan = replicated(*drawn(seed, schedule), seed)
    cost = CostModel(profile)
    for held in memory_over_time(simulated(plan, cost), cost):
        allowed = worker_memory(cost, plan, held.worker)
        assert held.peak.total <= allowed.total * (1 + 1e-9)
        assert held.state.parameters == allowed.parameters


def test_a_worker_whose_own_replica_reads_only_some_of_its_values_sends_the_others() -> None:
    """A value leaves a worker if one micro-batch of it goes elsewhere, and counts among its messages then."""
    profile = random_instance(3, partitions=4, workers=2)
    plan = make_plan(profile, [(0, profile.order[:2]), (1, profile.order[2:])], micro_batches=4)
    shares = (Replica("worker:0/cpu", 1), Replica("worker:1/cpu", 3))
    stages = (plan.stages[0], replace(plan.stages[1], sole_worker=None, replicas=shares))
    both, alone = replace(plan, stages=stages), plan
    cost = CostModel(profile)
    bucket = min(reduced_bytes(cost, both, 1), 25 << 20)
    messages = [worker_memory(cost, each, "worker:0/cpu").messages for each in (both, alone)]
    assert messages[0] == pytest.approx(messages[1] + bucket)
