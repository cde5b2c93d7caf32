"""The search as a whole: the same answer again, honest limits, progress, interruption."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from brute_force import random_instance
from builders import make_profile, random_chain, single
from sweeps import sweep

from assigner.errors import AssignerError, LimitError
from assigner.schedule.bottleneck import limiting
from assigner.schedule.simulate import predict
from assigner.solver import SolveOptions, baselines, solve
from assigner.solver.ilp.linear import Backend, Outcome
from assigner.solver.limits import tuning
from assigner.solver.methods.candidate import GIVEN, Proposal
from assigner.solver.orders.search import OrderSearch
from assigner.solver.pipelines.gpipe import GPipeCandidate
from assigner.solver.pipelines.ranking import PipelineCandidate
from assigner.solver.problem.hints import resolve
from assigner.solver.search import preference, relief
from assigner.solver.search.budget import Budget
from assigner.solver.search.search import Search

UNPROVEN = random_instance(30, partitions=5, workers=3, late_updates=True)
"""The relaxation leaves a gap here, so that the ILP must close it."""


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_the_same_input_gives_the_same_plan(solver):
    """Two runs with one seed differ in their seconds only."""
    for seed in (2, 30) if solver == "highs" else (30,):
        profile = random_instance(seed, partitions=5, workers=4, alike=True, busy=True, tight=True)
        first, second = (solve(profile, single(seed=seed, solver=solver)) for _ in range(2))
        timeless = [replace(each.plan, solver=replace(each.plan.solver, seconds=0.0)) for each in (first, second)]
        assert timeless[0] == timeless[1]


@pytest.fixture
def large(monkeypatch):
    """As if there were too many choices of workers for the dynamic program."""
    monkeypatch.setattr(tuning, "FRONT_SUMS", 0)


@pytest.mark.usefixtures("large")
def test_the_ilp_is_what_proves_where_the_relaxation_does_not():
    """The report says how the bound was proven."""
    report = solve(UNPROVEN, single(schedule="gpipe", gap=0)).plan.solver
    assert "integer program" in report.proven_by
    assert (report.name, report.status, report.gap) == ("HiGHS", "optimal", 0.0)
    assert report.version.count(".") == 2
    assert solve(UNPROVEN, single(schedule="gpipe", gap=0, solver="cbc")).plan.solver.name == "CBC"


@pytest.mark.usefixtures("large")
def test_a_solver_stopped_by_its_limit_proves_nothing(monkeypatch):
    """After a time limit PuLP's status says "Optimal"; the plan's status is feasible, with the relaxation's bound."""

    def stopped(self, problem, *, gap, cutoff, time_limit, nodes):
        return Outcome(False, math.inf, -math.inf, False)

    monkeypatch.setattr(Backend, "search", stopped)
    report = solve(UNPROVEN, single(schedule="gpipe", gap=0)).plan.solver
    assert report.status == "feasible"
    assert 0 < report.bound_s < report.objective_s
    assert report.gap == pytest.approx(1 - report.bound_s / report.objective_s)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_pulps_optimal_after_a_limit_is_not_believed(solver):
    """A knapsack that cannot be finished in no time comes back unfinished, and its bound does not claim a proof."""
    import random

    import pulp

    rng = random.Random(0)
    problem = pulp.LpProblem("hard", pulp.LpMinimize)
    rows = [problem.add_variable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(60)]
    slack = [problem.add_variable(f"s{k}", 0) for k in range(12)]
    problem.setObjective(pulp.LpAffineExpression(dict.fromkeys(slack, 1.0)))
    for k in range(6):
        weights = {x: float(rng.randrange(100)) for x in rows}
        middle = float(int(sum(weights.values()) / 2))
        for sense, sign, one in (
            (pulp.LpConstraintGE, 1.0, slack[2 * k]),
            (pulp.LpConstraintLE, -1.0, slack[2 * k + 1]),
        ):
            problem.addConstraint(
                pulp.LpConstraint(pulp.LpAffineExpression({**weights, one: sign}), sense, f"r{k}{sense}", middle)
            )
    outcome = Backend(solver, 0).search(problem, gap=0.0, cutoff=math.inf, time_limit=0.3)
    assert not outcome.finished
    assert not outcome.found or outcome.bound < outcome.value


def test_no_plan_before_the_limit_is_a_limit_error(monkeypatch):
    """Neither a plan nor a proof: exit code 4, and the bound that is known."""
    for step in ("start", "tighten", "prove"):
        monkeypatch.setattr(GPipeCandidate, step, lambda *_: None)
    monkeypatch.setattr("assigner.solver.baselines.find_baselines", lambda _: ())
    with pytest.raises(LimitError) as caught:
        solve(UNPROVEN, single(schedule="gpipe", gap=0))
    assert caught.value.exit_code == 4
    assert "; any plan takes " in caught.value.message


@pytest.mark.slow
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_without_a_first_plan_the_ilp_finds_the_optimum_alone(monkeypatch, solver):
    """The proof and the plan do not hang on the heuristic."""
    want = solve(UNPROVEN, single(schedule="gpipe", gap=0)).plan.solver.objective_s
    monkeypatch.setattr(GPipeCandidate, "start", lambda *_: None)
    plan = solve(UNPROVEN, single(schedule="gpipe", gap=0, solver=solver)).plan
    assert plan.solver.objective_s == pytest.approx(want, rel=1e-6)
    assert plan.solver.status == "optimal"


@pytest.mark.usefixtures("large")
def test_interrupted_with_a_plan_at_hand_returns_it():
    """Ctrl-C after the first plan: status feasible unless the gap was proven already."""

    def stop(progress):
        if progress.incumbent_s is not None:
            raise KeyboardInterrupt

    solution = solve(UNPROVEN, single(schedule="gpipe", gap=0), progress=stop)
    assert solution.plan.solver.status == "feasible"
    assert solution.plan.solver.interrupted
    assert predict(solution.plan, UNPROVEN).step_s == solution.plan.predicted.step_s


def interrupt(*_, **__):
    raise KeyboardInterrupt


INTERRUPTED = {
    "pricing": (Search, "price"),
    "baselines": (baselines, "find_baselines"),
    "search": (GPipeCandidate, "start"),
    "choice": (preference, "preferred"),
    "relief": (relief, "relieved"),
    "orders": (OrderSearch, "_look"),
}  # fmt: skip


@pytest.mark.parametrize("where", INTERRUPTED)
def test_interrupted_anywhere_there_is_a_plan_as_at_the_time_limit(monkeypatch, where):
    """Ctrl-C ends what is under way, and all else as the time limit does."""
    owner, name = INTERRUPTED[where]
    whole, calls = getattr(owner, name), []

    def once(*args, **more):
        calls.append(1)
        return whole(*args, **more) if len(calls) > 1 else interrupt()

    monkeypatch.setattr(owner, name, once)
    plan = solve(random_chain(3, partitions=6, workers=3)).plan
    assert calls
    assert plan.solver.interrupted
    assert plan.solver.bound_s <= plan.solver.objective_s == plan.predicted.step_s


@pytest.mark.parametrize("objective", ["step", "throughput", "latency", "cost"])
def test_interrupted_before_the_first_plan_it_is_a_baseline(monkeypatch, objective):
    """A second Ctrl-C ends at once."""
    profile = random_chain(3, partitions=6, workers=3)
    options = SolveOptions(
        objective=objective, prices={w.name: 1.0 for w in profile.workers} if objective == "cost" else {}
    )
    solver = solve(profile, options, progress=interrupt).plan.solver
    assert solver.interrupted
    assert "a baseline" in solver.found_by
    monkeypatch.setattr(baselines, "find_baselines", interrupt)
    with pytest.raises(KeyboardInterrupt):
        solve(profile, options)


def test_interrupted_while_choices_of_workers_are_listed_nothing_is_proven_of_those_left_out(monkeypatch):
    """They may cost less than all in the list."""
    profile = random_chain(3, partitions=6, workers=3)
    prices = {each.name: 1.0 for each in profile.workers}
    monkeypatch.setattr(Budget, "_least_s", interrupt)
    solver = solve(profile, SolveOptions(objective="cost", prices=prices)).plan.solver
    assert (solver.interrupted, solver.bound_s) == (True, 0.0)


def test_interrupted_where_not_even_a_baseline_is_there_it_remains_an_interrupt(monkeypatch):
    """No words of a time limit are for it."""
    monkeypatch.setattr(baselines, "find_baselines", lambda _: ())
    with pytest.raises(KeyboardInterrupt):
        solve(UNPROVEN, single(), progress=interrupt)


def test_progress_never_goes_back():
    """Time and bound rise, the incumbent falls, and the bound never passes it."""
    seen = []
    solve(random_chain(3, partitions=8, workers=3), single(schedule="gpipe", gap=0), progress=seen.append)
    assert seen
    for before, after in itertools.pairwise(seen):
        assert after.elapsed_s >= before.elapsed_s
        assert (after.incumbent_s or 0) <= (before.incumbent_s or math.inf)
        assert after.done >= before.done
        assert after.bound_s <= (after.incumbent_s or math.inf)
    assert {each.total for each in seen} == {4}


def test_a_disagreement_with_the_simulator_is_a_bug_and_said(monkeypatch):
    """A formula that is wrong by a thousandth is not hidden."""
    from assigner.solver import report

    real = report.prediction_of

    def other(plan, cost):
        found = real(plan, cost)
        return replace(found, step_s=found.step_s * 1.001)

    monkeypatch.setattr(report, "prediction_of", other)
    with pytest.raises(AssignerError) as caught:
        solve(UNPROVEN, single(schedule="gpipe"))
    assert caught.value.exit_code == 1
    assert "simulator" in caught.value.message


@pytest.mark.parametrize("seed", sweep(range(8), quick=4))
def test_merging_like_workers_keeps_the_bound_below_the_optimum(seed):
    """With a gap that allows it, kinds are merged: the bound still holds for the best plan."""
    base = random_instance(seed, partitions=5, workers=4, alike=True, busy=seed % 2 == 0)
    links = tuple(
        replace(link, points=tuple(replace(p, seconds=p.seconds * (1 + 0.3 * ((n + seed) % 5))) for p in link.points))
        for n, link in enumerate(base.links)
    )
    profile = replace(base, links=links)
    exact = solve(profile, single(schedule="gpipe", gap=0)).plan.solver
    loose = solve(profile, single(schedule="gpipe", gap=0.02)).plan.solver
    assert exact.status == loose.status == "optimal"
    assert loose.bound_s <= exact.objective_s * (1 + 1e-6)
    assert loose.objective_s <= exact.objective_s / 0.98 * (1 + 1e-6)


def test_the_candidates_tell_every_count():
    """One candidate per divisor, one of them chosen, each bound below its step time."""
    solution = solve(make_profile(work=[2e-3] * 4, slowness=[1.0, 2.0]), single(schedule="gpipe", gap=0))
    assert [each.micro_batches for each in solution.plan.candidates] == [1, 2, 4, 8]
    assert [each.status for each in solution.plan.candidates].count("chosen") == 1
    for each in solution.plan.candidates:
        assert each.micro_batches * each.micro_batch_size == 8
        assert each.objective_s is None or each.bound_s <= each.objective_s * (1 + 1e-9)


def test_a_slow_link_is_named_as_what_limits():
    """Where messages take longer than work, the sentence names the link."""
    profile = make_profile(work=[1e-3] * 2, slowness=[1.0, 1.0], bandwidth=2e7, edge_bytes=1e5)
    pinned = tuple(replace(each, pin=f"worker:{n}") for n, each in enumerate(profile.partitions))
    plan = solve(replace(profile, partitions=pinned)).plan
    assert limiting(plan, plan.predicted).startswith("the link from worker:")


LOOSE = (  # they may give a worker several stages, or a stage several workers
    "greedy, earliest finish", "weighted heuristic", "data parallel", "data parallel by speed",
)  # fmt: skip


def test_a_baseline_that_is_faster_is_the_plan():
    """With too little time to search, a simple placement is the answer, and its bound is honest."""
    profile = random_chain(1, partitions=12, workers=4)
    plan = solve(profile, single(time_limit=1e-9)).plan
    contiguous = [each.step_s for each in plan.baselines if each.step_s and each.name not in LOOSE]
    assert plan.predicted.step_s <= min(contiguous) * (1 + 1e-9)  # or shorter: with fewer micro-batches in flight
    assert plan.solver.bound_s <= plan.predicted.step_s
    assert plan.solver.status == "feasible"


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "partitions"), sweep([(0, 8), (1, 8), (2, 14)], quick=[(0, 8), (1, 8)]))
def test_no_baseline_beats_the_plan(seed, partitions):
    """Where several stages a worker were asked for, one that a baseline has is taken if it is the best."""
    solution = solve(random_chain(seed, partitions=partitions, workers=4, tight=True), single(schedule="interleaved"))
    plan = solution.plan
    assert plan.predicted.step_s <= min(each.step_s for each in plan.baselines if each.step_s) * (1 + 1e-9)
    assert [each.status for each in solution.plan.candidates].count("chosen") == 1


def test_local_search_begins_with_the_most_promising_setting(monkeypatch):
    """All candidates have their first plans by then, and the best of them is improved first."""
    seen = []
    real = PipelineCandidate.improve

    def improve(self):
        seen.append([each.best_value for each in self.state.candidates] + [self.best_value])
        real(self)

    monkeypatch.setattr(PipelineCandidate, "improve", improve)
    solve(random_chain(3, partitions=6, workers=3), single(schedule="1f1b", gap=0))
    *all_of_them, first = seen[0]
    assert first == min(all_of_them)
    assert sum(math.isfinite(each) for each in all_of_them) > 1


def test_a_plan_from_outside_is_looked_at_first(monkeypatch):
    """Where there is a plan already, the candidate that it belongs to comes first."""
    profile = random_chain(3, partitions=6, workers=3)
    best = solve(profile, single()).plan
    search = Search(*resolve(profile, single()))
    search.state.best = Proposal(best, best.predicted.step_s, GIVEN)
    order = []

    def start(self):
        order.append(self)

    for kind in (PipelineCandidate, GPipeCandidate):
        monkeypatch.setattr(kind, "start", start)
    search.run()
    assert (order[0].schedule, order[0].micro_batches) == (best.schedule, best.micro_batches)
