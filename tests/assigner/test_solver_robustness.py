"""How a plan holds up: known answers for links that change places, honest counts, one answer for one seed."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import pytest
from builders import make_plan, make_profile, random_chain, worker_name
from spreading import spread_out

from assigner.errors import FormatError
from assigner.schedule.simulate import predict
from assigner.solver import SolveOptions, baselines, solve
from assigner.solver.robust import robustness
from assigner.solver.robust.robustness import Robustness, assess, neighbours, resolver
from assigner.solver.robust.spreads import QUARTILE, Coverage, slow_end

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile

FIRST_S, SECOND_S, SPREAD = 0.1, 0.101, 0.2


def no_rival(_: Profile) -> None:
    """Only the chosen plan and the baselines run."""


def two_links() -> tuple[Profile, Plan, Plan]:
    """p0 on worker 0, p1 on worker 1 or 2, and the plans for either: they differ in the link there alone."""
    profile = make_profile(work=[1e-3, 1e-3], slowness=[1.0, 1.0, 1.0], batch=1, edge_bytes=1e5)
    seconds = {worker_name(1): (FIRST_S, SPREAD), worker_name(2): (SECOND_S, 0.0)}

    def link(each):
        median, spread = seconds.get(each.target, (1e-3, 0.0))
        return replace(each, points=(replace(each.points[1], seconds=median, spread=spread),))

    profile = replace(
        spread_out(profile),
        links=tuple(link(each) for each in profile.links),
        measurements=tuple(
            replace(each, spread=0.0)
            for each in profile.measurements
            if (each.partition == "p0") == (each.worker == worker_name(0))
        ),
    )
    first, second = (make_plan(profile, [(0, ["p0"]), (w, ["p1"])], micro_batches=1) for w in (1, 2))
    return profile, first, second


@pytest.mark.long
def test_where_nothing_varies_the_best_plan_is_always_the_best():
    """Without spreads every step is the one at the medians, and one draw says so."""
    profile = spread_out(make_profile(work=[4e-3, 5e-3], slowness=[1.0, 1.1]))
    plan = solve(profile, SolveOptions(gap=0)).plan
    found = assess(plan, profile, draws=30)
    assert (found.compared, found.asked, found.share) == (1, 1, 1.0)
    assert found.worst_regret == pytest.approx(0.0, abs=1e-12)
    assert {found.step_s, found.slow_end_s, *found.steps_s} == {plan.predicted.step_s}
    assert not found.coverage.varies


def test_two_links_that_change_places():
    """The share is the probability that the shaky link stays within 2 % of the steady one, and each regret is known."""
    profile, first, second = two_links()
    seen = []

    def rival(drawn):
        seen.append(drawn)
        return second

    found = assess(first, profile, rival=rival, draws=400)
    rest = predict(first, profile).step_s - FIRST_S
    sigma = math.asinh(SPREAD / 2) / QUARTILE
    expected = NormalDist().cdf(math.log((1.02 * (rest + SECOND_S) - rest) / FIRST_S) / sigma)
    assert found.share == pytest.approx(expected, abs=0.05)
    shaky = [next(each for each in drawn.links if each.target == worker_name(1)).points[0].seconds for drawn in seen]
    assert found.steps_s == pytest.approx([rest + seconds for seconds in shaky])
    assert found.regrets == pytest.approx(
        [max(0.0, (rest + seconds) / (rest + SECOND_S) - 1) for seconds in shaky], abs=1e-12
    )
    assert found.near_best == sum(regret <= 0.02 for regret in found.regrets)
    assert found.worst_regret == max(found.regrets)
    assert found.coverage == Coverage(6, 0, 6, 2)


def test_the_steady_plan_is_never_far_from_its_median():
    """The plan over the steady link takes as long in every draw; what varies is how fast the other one is."""
    profile, first, second = two_links()
    found = assess(second, profile, rival=lambda _: first, draws=50)
    assert set(found.steps_s) == {found.step_s} == {found.slow_end_s}
    assert 0 < found.share < 1


def test_quantiles_of_the_steps():
    """5 %, half and 95 % of the draws are below, linear between two; the slow end is the step priced there."""
    profile, first, _ = two_links()
    found = assess(first, profile, rival=no_rival, draws=41)
    ordered = sorted(found.steps_s)
    assert [found.step_quantile_s(share) for share in (0.05, 0.5, 0.95)] == [ordered[2], ordered[20], ordered[38]]
    assert found.step_quantile_s(0.0125) == pytest.approx((ordered[0] + ordered[1]) / 2)
    assert found.slow_end_s == predict(first, slow_end(profile)).step_s > found.step_s


def test_a_plan_found_for_one_draw_runs_in_all():
    """Whichever draw a rival is found for, earlier and later ones know it."""
    profile, first, second = two_links()
    always = assess(first, profile, rival=lambda _: second, draws=20)
    answers = iter([None] * 7 + [second] + [None] * 12)
    once = assess(first, profile, rival=lambda _: next(answers), draws=20)
    assert once.regrets == always.regrets
    assert assess(first, profile, rival=no_rival, draws=20).regrets == (0.0,) * 20


def test_the_baselines_are_rivals():
    """Everything on the worker that is half as fast is 100 % behind the best single worker."""
    profile = spread_out(make_profile(work=[1e-3] * 3, slowness=[1.0, 2.0], latency=10.0))
    plan = make_plan(profile, [(1, ["p0", "p1", "p2"])], micro_batches=1)
    found = assess(plan, profile, rival=no_rival)
    assert found.regrets == pytest.approx([1.0])
    assert found.share == 0.0


@pytest.mark.parametrize(("schedule", "several"), [("auto", False), ("interleaved", True)])
def test_the_plan_is_held_against_plans_of_the_scope_of_its_proof(schedule, several, monkeypatch):
    """A baseline that gives a worker several stages is faster here, and only interleaved could have found it."""
    profile = spread_out(make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], latency=1e-6, edge_bytes=1e2, batch=2))
    plan = make_plan(profile, [(0, ["p0", "p1"]), (1, ["p2", "p3"])], micro_batches=2)
    loop = make_plan(profile, [(0, ["p0"]), (1, ["p1"]), (0, ["p2"]), (1, ["p3"])], micro_batches=2)
    loop = replace(loop, schedule="interleaved")
    options = SolveOptions(schedule=schedule, micro_batches=2)
    assert options.searches(loop) is several
    monkeypatch.setattr(robustness, "find_baselines", lambda _: (baselines.FoundBaseline("a loop", loop, 1.0),))
    found = assess(plan, profile, options=options, rival=no_rival)
    assert (found.worst_regret > 0) is several
    assert found.schedule == schedule


def test_hints_hold_for_all_rivals():
    """A pin to the slow worker binds the others, too: nothing that is allowed is better."""
    profile = spread_out(make_profile(work=[1e-3] * 3, slowness=[1.0, 2.0], latency=10.0), compute=0.1)
    options = SolveOptions(pins={"p*": "worker:1"})
    found = assess(solve(profile, options).plan, profile, options=options, draws=4)
    assert found.regrets == pytest.approx([0.0] * 4, abs=1e-12)


@pytest.mark.long
def test_one_seed_is_one_answer():
    """Two runs with one seed differ in their seconds only; another seed draws anew."""
    profile = spread_out(random_chain(11, partitions=6, workers=3), compute=0.3, link=0.3)
    options = SolveOptions(schedule="gpipe")
    plan = solve(profile, options).plan
    first, second, other = (assess(plan, profile, options=options, draws=4, seed=seed) for seed in (1, 1, 2))
    assert replace(first, seconds=0.0) == replace(second, seconds=0.0)
    assert not set(first.steps_s) & set(other.steps_s)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3])
def test_the_default_rival_finds_the_best_of_small_chains(seed):
    """Each regret is against a proven optimum of the draw, although no proof was asked for."""
    profile = spread_out(random_chain(seed, partitions=6, workers=3, tight=seed == 2), compute=0.3, link=0.3)
    options = SolveOptions(gap=0, schedule="gpipe")
    plan = solve(profile, options).plan
    default, seen = resolver(plan, options), []

    def rival(drawn):
        seen.append(drawn)
        return default(drawn)

    found = assess(plan, profile, options=options, rival=rival, draws=6)
    best = [solve(drawn, options).plan.predicted.step_s for drawn in seen]
    assert found.regrets == pytest.approx(
        [max(0.0, step / least - 1) for step, least in zip(found.steps_s, best, strict=True)], abs=1e-9
    )
    assert found.compared == 6


def test_the_default_rival_looks_at_the_neighbouring_numbers_of_micro_batches():
    """Of 1, 2, 4 and 8 a plan with 4 is held against 2, 4 and 8; a number that is not offered lies between two."""
    assert neighbours(4, (1, 2, 4, 8)) == (2, 4, 8)
    assert neighbours(8, (1, 2, 4, 8)) == (4, 8)
    assert neighbours(1, (1, 2, 4, 8)) == (1, 2)
    assert neighbours(3, (1, 2, 4, 8)) == (2, 4, 8)
    assert neighbours(4, (4,)) == (4,)


def test_the_default_rival_knows_the_chosen_plan():
    """Without time for another one the answer is the plan itself; with it, never a worse one."""
    profile = random_chain(5, partitions=6, workers=3)
    options = SolveOptions(schedule="gpipe")
    plan = solve(profile, options).plan
    assert resolver(plan, replace(options, time_limit=1e-9))(profile) is plan
    poor = make_plan(profile, [(0, profile.order)])
    assert predict(resolver(poor, options)(profile), profile).step_s <= plan.predicted.step_s * 1.01


def test_a_number_of_micro_batches_that_a_draw_cannot_price_is_no_rival_there():
    """A size below the smallest measured one, promised cheaper a sample than that, is left out of the draw."""
    profile = spread_out(make_profile(work=[1e-3, 1e-3], slowness=[1.0], batch=8), compute=0.1)
    small = {1: 2, 4: 4}
    profile = replace(
        profile, measurements=tuple(replace(m, micro_batch=small[m.micro_batch]) for m in profile.measurements)
    )  # forward of 2 samples takes 1 ms and of 4 takes 4 ms: the line says that one sample takes nothing
    chosen, wonder = (make_plan(profile, [(0, ["p0", "p1"])], micro_batches=count) for count in (4, 8))
    assert predict(wonder, profile).step_s < predict(chosen, profile).step_s
    found = assess(chosen, profile, rival=lambda _: wonder, draws=5)
    assert found.regrets == pytest.approx([0.0] * 5, abs=1e-12)


def test_the_time_limit_ends_the_draws_and_is_told():
    """The first draw is always priced and solved again; how many of those asked for were is in the answer."""
    profile, first, second = two_links()
    found = assess(first, profile, rival=lambda _: second, draws=50, time_limit=1e-9)
    assert (found.priced, found.compared, found.asked) == (1, 1, 50)


def test_progress_counts_the_draws():
    """Called after each draw with those done and those asked for."""
    profile, first, _ = two_links()
    told = []
    assess(first, profile, rival=no_rival, draws=3, progress=lambda done, asked: told.append((done, asked)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_an_interruption_keeps_the_draws_that_are_done():
    """Ctrl-C after two draws is an answer: all are priced, two compared; before the first it is an interruption."""
    profile, first, second = two_links()

    def interrupted(after):
        plans = iter([second] * after)

        def rival(_):
            for plan in plans:
                return plan
            raise KeyboardInterrupt

        return rival

    found = assess(first, profile, rival=interrupted(2), draws=9)
    assert (found.priced, found.compared, found.asked) == (9, 2, 9)
    with pytest.raises(KeyboardInterrupt):
        assess(first, profile, rival=interrupted(0), draws=9)


def test_regrets_are_of_the_objective():
    """For cost, the dearer workers of the chosen plan count, too; its steps are told all the same."""
    profile, first, second = two_links()
    profile = replace(
        profile,
        workers=tuple(replace(each, cost_per_hour=1.0 + each.rank) for each in profile.workers),
    )
    cost = assess(second, profile, options=SolveOptions(objective="cost"), rival=lambda _: first, draws=30)
    step = assess(second, profile, rival=lambda _: first, draws=30)
    assert cost.steps_s == step.steps_s
    assert (cost.objective, step.objective) == ("cost", "step")
    # workers 0 and 2 cost 4 an hour, workers 0 and 1 cost 3
    fastest = [slow / (1 + regret) for slow, regret in zip(step.steps_s, step.regrets, strict=True)]
    compared = [
        4 * mine / (3 * best) - 1
        for mine, best, regret in zip(step.steps_s, fastest, step.regrets, strict=True)
        if regret > 0
    ]
    assert [told for told, regret in zip(cost.regrets, step.regrets, strict=True) if regret > 0] == pytest.approx(
        compared
    )


def test_a_step_longer_than_allowed_is_behind_every_plan_that_keeps_to_it():
    """Where the limit of the step time is broken and another plan keeps to it, the regret has no end."""
    profile, first, second = two_links()
    profile = replace(profile, workers=tuple(replace(each, cost_per_hour=1.0) for each in profile.workers))
    most = predict(second, profile).step_s + 1e-6
    options = SolveOptions(objective="cost", max_step_s=most)
    found = assess(first, profile, options=options, rival=lambda _: second, draws=30)
    assert [math.isinf(regret) for regret in found.regrets] == [step > most for step in found.steps_s]
    assert math.isinf(found.worst_regret)


def test_a_plan_of_another_workload_is_refused():
    """It has no place among the profile's plans."""
    profile, first, _ = two_links()
    with pytest.raises(FormatError, match="workload"):
        assess(replace(first, workload=replace(first.workload, fingerprint="sha256:11")), profile, rival=no_rival)


def test_one_draw_has_quantiles():
    """All of them are its one step."""
    found = Robustness("step", "auto", None, 1.0, 1.2, (1.1,), (math.inf,), 5, 0.02, 0, Coverage(1, 1, 0, 0), 0.1)
    assert [found.step_quantile_s(share) for share in (0.0, 0.05, 0.5, 1.0)] == [1.1] * 4
    assert math.isinf(found.regret_quantile(0.5))
    assert (found.share, found.near_best, found.compared, found.priced) == (0.0, 0, 1, 1)
