"""A time limit ends every step of every search, whichever it is, with a plan and with what is proven until then."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace

import pytest
from builders import make_profile, random_chain
from sweeps import sweep

from assigner.solver import SolveOptions, solve
from assigner.solver.baselines import find_baselines
from assigner.solver.baselines.prices import BaselinePrices
from assigner.solver.ilp.linear import LinearModel
from assigner.solver.ilp.pipelines import PipelineModel
from assigner.solver.limits.clock import OutOfTime, SolveClock
from assigner.solver.pipelines.gpipe import GPipeCandidate
from assigner.solver.pipelines.shared import SharedCandidate
from assigner.solver.problem.hints import resolve
from assigner.solver.search import relief
from assigner.solver.search.search import Search

MOST_CALLS = 60_000
"""Calls of functions that the answer may still take: some hundredths of a second."""


class FakeTime:
    """Stands still for so many asks; then all time is over, and calls of the program's functions are counted."""

    def __init__(self, asks):
        self.asks, self.calls = asks, 0

    def __call__(self):
        self.asks -= 1
        if self.asks == -1:
            sys.setprofile(self.count)
        return 0.0 if self.asks >= 0 else 1e9

    def count(self, frame, event, _arg):
        self.calls += event == "call" and "assigner" in frame.f_code.co_filename


def branched(profile):
    """The chain with its fourth partition beside its third and fifth, not between them."""
    fifth, sixth = (each.name for each in profile.partitions[4:6])
    into, over = profile.edges[2:4]
    edges = (*profile.edges[:3], replace(into, target=fifth), replace(over, target=sixth), *profile.edges[4:])
    return replace(profile, edges=edges)


def profile_of(kind):
    """A chain, or a graph with branches."""
    chain = random_chain(3, partitions=8, workers=4)
    return branched(chain) if kind == "branched" else chain


ASKED = [
    *(SolveOptions(schedule=schedule, gap=0.05) for schedule in ("auto", "gpipe", "1f1b", "interleaved", "listed")),
    *(SolveOptions(objective=objective, gap=0.05) for objective in ("throughput", "latency")),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("options", sweep(ASKED, quick=3), ids=lambda each: f"{each.schedule}-{each.objective}")
@pytest.mark.parametrize("kind", sweep(["chain", "branched"], quick=["chain"]))
def test_whenever_the_time_is_over_the_answer_comes_at_once(monkeypatch, kind, options):
    """At whichever ask of the clock it is, few calls later there is a plan, and no plan is below what is proven."""
    profile = profile_of(kind)
    best = solve(profile, options).plan.solver.objective_s
    for asks in (1, 40, 4000):
        fake = FakeTime(asks)
        monkeypatch.setattr(SolveClock, "now", staticmethod(fake))
        try:
            plan = solve(profile, options).plan
        finally:
            sys.setprofile(None)
        assert fake.calls <= MOST_CALLS, asks
        assert plan.solver.objective_s * (1 - plan.solver.gap) <= best * (1 + 1e-9), asks
        assert plan.solver.status == "feasible" or plan.solver.objective_s <= best * (1 + options.stop_gap), asks
        if fake.asks > 0:
            break


def swept(hierarchy):
    """All intervals priced, and a path made of them."""
    hierarchy._within(math.inf)
    return hierarchy._path(math.inf, math.inf)


WHOLE = {
    "the options of one worker each": lambda candidate: candidate.table.gpipe.all,
    "the sets of workers that may share a stage": lambda candidate: candidate.options.sets,
    "the dynamic program": lambda candidate: candidate.program.run(),
    "a sweep over kinds of workers": lambda candidate: swept(GPipeCandidate(candidate.state, 4).hierarchy),
    "an integer program": lambda each: PipelineModel(each.table, (), deep=True, unit=1.0, clock=each.state.clock),
}


@pytest.mark.parametrize("step", WHOLE)
def test_what_is_of_no_use_unless_whole_ends_in_its_midst(monkeypatch, step):
    """Once the time is over, such a step raises OutOfTime wherever it is."""
    search = Search(*resolve(profile_of("chain"), SolveOptions()))
    search.price()
    shared = [each for each in search.candidates if isinstance(each, SharedCandidate)]
    candidate = next(each for each in shared if each.micro_batches == 4)
    monkeypatch.setattr(SolveClock, "now", staticmethod(lambda: 1e9))
    with pytest.raises(OutOfTime):
        WHOLE[step](candidate)


def test_a_clock_within_another_ends_with_it():
    """No clock goes on longer than the one that it is within, and a limit is only ever brought forward."""
    outer = SolveClock(100.0)
    inner = SolveClock(within=outer)
    assert 0 < inner.left_s <= 100
    assert SolveClock(1.0, within=outer).left_s <= 1
    outer.stop_within(0.0)
    outer.stop_within(50.0)
    assert inner.over
    with pytest.raises(OutOfTime):
        inner.check()


def test_a_model_is_not_handed_over_where_less_time_is_left_than_it_took(monkeypatch):
    """PuLP takes about as long for that, and asks no clock."""
    monkeypatch.setattr(SolveClock, "now", staticmethod(itertools.count().__next__))  # each ask takes a second
    model = LinearModel("m", unit=1.0, clock=SolveClock(12.0))
    row = {model.problem.add_variable("x"): 1.0}
    model.add_row(row, 1, 0.0)
    model.check()
    model.add_row(row, 1, 0.0)
    with pytest.raises(OutOfTime):
        model.check()


def test_many_micro_batch_counts_leave_time_for_the_search(monkeypatch):
    """Baselines, each of which looks at every count, have half of the time: an ask of the clock takes a second."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0], batch=5040)
    problem = Search(*resolve(profile, SolveOptions())).problem
    monkeypatch.setattr(SolveClock, "now", staticmethod(itertools.count().__next__))
    clock = SolveClock(100.0)
    problem = replace(problem, clock=clock)
    assert len(BaselinePrices(problem).counts) == 60
    assert any(each.plan for each in find_baselines(problem))
    assert clock.left_s >= 40


def test_divided_state_is_not_looked_at_once_the_time_is_over(monkeypatch):
    """Where there is a plan: of many micro-batch counts it would take minutes."""
    search = Search(*resolve(make_profile(work=[1e-3] * 4, slowness=[1.0, 2.0], batch=16), SolveOptions()))
    search.run()
    best, looked_at = search.state.best, []
    assert best is not None
    monkeypatch.setattr(relief, "divided", lambda _, plan: looked_at.append(plan))
    slow = replace(best, value=math.inf)
    assert relief.relieved(search, slow) is None
    assert looked_at
    looked_at.clear()
    monkeypatch.setattr(SolveClock, "now", staticmethod(lambda: 1e9))
    assert relief.relieved(search, slow) is None
    assert not looked_at


def test_a_pipeline_is_simulated_at_no_more_depths_once_the_time_is_over(monkeypatch):
    """Of many micro-batches each takes a second: the best until then is offered, and nothing is said of the others."""
    search = Search(
        *resolve(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], batch=8), SolveOptions(schedule="1f1b"))
    )
    search.price()
    candidate = next(each for each in search.candidates if each.micro_batches == 8 and not each.shares)
    pipeline = next(found for _, found in candidate._ranked(16) if len(found) == 2)
    timed = []
    monkeypatch.setattr(candidate.plans, "worth", lambda plan: (timed.append(plan), (1.0, 1.0))[1])
    monkeypatch.setattr(SolveClock, "now", staticmethod(lambda: 1e9))
    with pytest.raises(OutOfTime):
        candidate.plans.simulate(pipeline)
    assert [candidate.best.plan] == timed


def test_time_is_kept_for_what_follows(monkeypatch):
    """Within, the time ends earlier by the share that is kept; an end that was brought forward stays."""
    now = [0.0]
    monkeypatch.setattr(SolveClock, "now", staticmethod(lambda: now[0]))
    clock = SolveClock(100.0)
    with clock.keeping(0.25):
        assert clock.left_s == 75.0
        now[0] = 80.0
        assert clock.over
    assert clock.left_s == 20.0
    with clock.keeping(0.25):
        clock.stop_within(0.0)
    assert clock.over


def test_orders_of_a_branched_graph_have_time_of_their_own():
    """While the named schedules are searched a quarter of the limit is kept; of a chain a tenth is."""
    towers = [(0, 1), (1, 2), (2, 6), (3, 4), (4, 5), (5, 6)]
    for edges, kept in ((towers, 0.25), (None, 0.1)):
        profile = make_profile(work=[1e-3] * 7, slowness=[1.0, 1.5], edges=edges)
        search = Search(*resolve(profile, SolveOptions(time_limit=1000.0)), None)
        left = search.problem.clock.left_s
        with search.keeping_time_for_orders():
            assert search.problem.clock.left_s == pytest.approx((1 - kept) * left, rel=0.01)
        assert search.problem.clock.left_s == pytest.approx(left, rel=0.01)
