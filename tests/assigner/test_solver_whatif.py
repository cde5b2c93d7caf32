"""What-ifs: each is what solving the changed problem gives, and none claims what the change does not bring."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_profile, random_chain, worker_name

from assigner.formats.profile import Link, load_profile, save_profile
from assigner.location import MOST_RANKS
from assigner.schedule.cost import CostModel
from assigner.schedule.timing import step_s
from assigner.solver import SolveOptions, solve
from assigner.solver.whatif import answered, price_what_ifs, questions, what_ifs_are_cheap
from assigner.solver.why.case import Case

EXACT = SolveOptions(schedule="one-stage", gap=0)


def priced(profile, options=EXACT, **more):
    """The solved plan with its what-ifs."""
    return price_what_ifs(solve(profile, options), profile, options, **more).plan


def what_if(plan, change):
    return [each for each in plan.what_if if each.change == change]


def with_worker(profile, *, like):
    """The profile with one more worker, written in as the module says: like `like`, in kind, memory and links."""
    workers, new = profile.workers, worker_name(len(profile.workers))
    links = list(profile.links)
    links += [replace(link, source=new) for link in profile.links if link.source == workers[like].name]
    links += [replace(link, target=new) for link in profile.links if link.target == workers[like].name]
    some = profile.links[0]  # all links of these profiles are alike
    links += [Link(*ends, some.points, some.backend, some.sender_busy, some.receiver_busy)
              for ends in ((workers[like].name, new), (new, workers[like].name))]  # fmt: skip
    return replace(profile, workers=(*workers, replace(workers[like], name=new)), links=tuple(links))


def with_wire(profile, ends):
    """The profile with the bandwidth between two workers doubled in both directions, its latency as it was."""

    def wider(link):
        latency = link.points[0].seconds
        points = tuple(replace(p, seconds=latency + (p.seconds - latency) / 2) for p in link.points)
        return replace(link, points=points)

    return replace(
        profile, links=tuple(wider(link) if {link.source, link.target} == ends else link for link in profile.links)
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_each_is_what_solving_the_changed_problem_gives(seed):
    """One more count, worker or twice a wire, solved by hand without a gap, takes the step that the what-if tells.

    Of a step that the plan's own proof leaves open without the change, it tells no gain.
    """
    profile = random_chain(seed, partitions=4, workers=2, tight=seed % 2 == 1, busy=0.1)
    plan = priced(profile)
    own, bound = plan.predicted.step_s, plan.solver.bound_s

    def by_hand(changed):
        step = solve(changed, EXACT).plan.predicted.step_s
        return pytest.approx(own if bound * (1 - 1e-6) <= step < own else step)

    (count,) = what_if(plan, "micro_batches") or (None,)
    if count is not None:
        more = int(count.what.split()[0])
        assert count.step_s == pytest.approx(solve(profile, replace(EXACT, micro_batches=more)).plan.predicted.step_s)
    workers = what_if(plan, "worker")
    assert [each.what for each in workers] == ["one more worker: kind0", "one more worker: kind1"]
    for like, each in enumerate(workers):
        assert each.step_s == by_hand(with_worker(profile, like=like))
    (wire,) = what_if(plan, "link")
    assert wire.step_s == by_hand(with_wire(profile, {worker.name for worker in profile.workers}))
    assert all(each.bound_s <= each.step_s <= own * (1 + 1e-12) for each in (*workers, wire))


@pytest.mark.parametrize(("seed", "gap"), [(0, 0.3), (1, 0.01), (2, 0.3), (3, 0.1)])
def test_no_gain_is_the_gap_of_the_search(seed, gap):
    """With a gap left open, a step after a change is the plan's own, or below what the plan's own search proved."""
    plan = priced(random_chain(seed, partitions=5, workers=2), SolveOptions(schedule="one-stage", gap=gap))
    own, bound = plan.predicted.step_s, plan.solver.bound_s
    assert plan.what_if
    for each in plan.what_if:
        assert each.step_s >= own or each.step_s < bound * (1 + 1e-9)
        assert each.step_s <= own or each.change == "micro_batches"
        assert each.bound_s <= each.step_s


def test_the_same_input_gives_the_same_what_ifs():
    """Two runs agree to the last digit, and the plan is the one of a run without them."""
    profile, options = random_chain(5, partitions=4, workers=2), SolveOptions(micro_batches=4)
    first, second = (priced(profile, options) for _ in range(2))
    assert first.what_if == second.what_if
    assert first.stages == solve(profile, options).plan.stages
    assert first.solver.options["what_if"] is True


def test_the_thinnest_wire_that_the_plan_uses_is_widened():
    """Not the thinnest of all, where the plan leaves that one alone."""
    profile = make_profile(work=[4e-3] * 4, slowness=[1, 1, 1], bandwidth=1e8)
    unused = {worker_name(0), worker_name(2)}
    slow = tuple(
        replace(link, points=tuple(replace(p, seconds=10 * p.seconds) for p in link.points))
        if {link.source, link.target} == unused else link for link in profile.links
    )  # fmt: skip
    pins = {"p0": "worker:0", "p1": "worker:0", "p2": "worker:1", "p3": "worker:2"}
    plan = priced(replace(profile, links=slow), SolveOptions(schedule="one-stage", pins=pins))
    assert [each.what for each in what_if(plan, "link")] == ["twice the bandwidth between worker:0 and worker:1"]


def test_a_plan_without_messages_has_the_thinnest_wire_of_all_widened():
    """A plan on one worker tells of the wire that could have been used, and a profile without wires of none."""
    profile = make_profile(work=[1e-4] * 3, slowness=[1, 4])
    assert len(what_if(priced(profile), "link")) == 1
    assert what_if(priced(make_profile(work=[1e-4] * 3, slowness=[1, 4], links=False)), "link") == []


def test_hints_hold_after_the_change():
    """A kind that may be used may have one more; one that may not has none; a given order leaves no place for any."""
    profile = make_profile(work=[4e-3] * 4, slowness=[1, 1, 2])
    (only,) = what_if(priced(profile, replace(EXACT, only=("worker:0",))), "worker")
    assert only.what == "one more worker: kind0"
    assert only.step_s < solve(profile, replace(EXACT, only=("worker:0",))).plan.predicted.step_s
    assert what_if(priced(profile, replace(EXACT, order=("worker:0", "worker:1"))), "worker") == []
    (fixed, *_) = priced(profile, replace(EXACT, micro_batches=2)).what_if
    assert fixed.what == "4 micro-batches of 2 instead of 2 of 4"


def test_a_batch_that_is_cut_into_samples_has_no_larger_count():
    """There is nothing to ask for beyond one sample a micro-batch."""
    plan = priced(make_profile(work=[4e-3] * 4, slowness=[1, 1]), replace(EXACT, micro_batches=8))
    assert what_if(plan, "micro_batches") == []


def test_a_count_that_nothing_fits_has_no_step():
    """Where the smaller micro-batch cannot be priced on any worker, neither a step nor a bound is told."""
    profile = make_profile(work=[4e-3] * 2, slowness=[1.0], batch=4)
    only = tuple(each for each in profile.measurements if each.micro_batch == 4)
    (count,) = what_if(priced(replace(profile, measurements=only), replace(EXACT, micro_batches=1)), "micro_batches")
    assert count.what == "2 micro-batches of 2 instead of 1 of 4"
    assert (count.step_s, count.bound_s) == (None, None)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_other_objectives_have_none(objective):
    """What-ifs tell step times, which a plan for another objective was not solved for."""
    profile = random_chain(1, partitions=4, workers=2)
    assert priced(profile, SolveOptions(objective=objective)).what_if == ()
    assert not what_ifs_are_cheap(profile, SolveOptions(objective=objective))


def test_interrupted_keeps_the_plan_and_what_is_complete():
    """Ctrl-C while the third is priced leaves two, and the plan as it was."""

    def stop(progress):
        if progress.pricing.startswith("pricing what-ifs, 3 of"):
            raise KeyboardInterrupt

    profile = random_chain(2, partitions=4, workers=2)
    whole, stopped = priced(profile), priced(profile, progress=stop)
    assert stopped.what_if == whole.what_if[:2]
    assert stopped.solver.options["what_if_left_out"] == len(whole.what_if) - 2
    assert stopped.stages == whole.stages


def test_without_time_there_are_none():
    """A search that used up the time limit leaves nothing for what-ifs."""
    profile = random_chain(2, partitions=4, workers=2)
    solution = solve(profile, EXACT)
    assert price_what_ifs(solution, profile, replace(EXACT, time_limit=1e-9)).plan.what_if == ()


def test_no_answer_is_worse_than_the_change_alone():
    """A search that has no time to find a plan leaves the same placement with more micro-batches, or a wider wire."""
    profile, options = (
        random_chain(2, partitions=4, workers=2, busy=0.1),
        replace(EXACT, micro_batches=2, max_replicas=1),
    )
    plan, case = solve(profile, options).plan, Case(profile, options)
    found = {each.change: answered(each, plan, 1e-9, None) for each in questions(plan, case)}
    cut = replace(plan, micro_batches=4, micro_batch_size=2)
    assert found["micro_batches"].step_s == pytest.approx(step_s(cut, CostModel(profile)))
    wider = with_wire(profile, {worker.name for worker in profile.workers})
    assert found["link"].step_s == pytest.approx(step_s(plan, CostModel(wider)))


def test_more_micro_batches_that_do_not_fit_are_no_answer():
    """The same placement counts only where its memory is enough and its sizes were measured."""
    profile = make_profile(work=[4e-3] * 4, slowness=[1, 1])
    plan = solve(profile, replace(EXACT, micro_batches=2, schedule="gpipe")).plan
    small = replace(profile, workers=tuple(replace(each, memory_bytes=1e6) for each in profile.workers))
    (count, *_) = questions(plan, Case(small, EXACT))
    assert answered(count, plan, 1e-9, None) is None


def test_a_worker_without_links_has_no_other_like_it():
    """Nobody knows the links of a second one, so it is not asked what that would bring."""
    plan = priced(make_profile(work=[4e-3] * 4, slowness=[1]))
    assert [each.change for each in plan.what_if] == ["micro_batches"]
    unlinked = make_profile(work=[4e-3] * 4, slowness=[1, 1], links=False)
    assert what_if(priced(unlinked), "worker") == []


def test_a_plan_with_backwards_in_two_parts_has_them():
    """Its own order is where the search for other orders begins; with a worker or a wire more it is no worse."""
    profile = make_profile(work=[4e-3] * 3, slowness=[1] * 3, batch=6, latency=1e-5)
    parts = tuple(
        replace(each, backward_input_s=each.backward_s / 2, backward_weight_s=each.backward_s / 2, waiting_bytes=1e6)
        for each in profile.measurements
    )
    asked = SolveOptions(schedule="listed", max_replicas=1, micro_batches=3, apart=(("p0", "p1", "p2"),))
    plan = priced(replace(profile, measurements=parts), asked)
    assert "W" in "".join(plan.orders.values())
    assert {each.change for each in plan.what_if} == {"micro_batches", "worker", "link"}
    assert all(each.step_s <= plan.predicted.step_s for each in plan.what_if if each.change != "micro_batches")


def test_small_problems_have_them_by_default():
    """By the numbers of partitions, workers and kinds; skips count, and a graph with branches is no small problem."""
    skips = [(i, i + 1) for i in range(15)] + [(i, 15 - i) for i in range(7)]
    assert what_ifs_are_cheap(make_profile(work=[1e-3] * 16, slowness=[1, 2, 3]))
    assert not what_ifs_are_cheap(make_profile(work=[1e-3] * 16, slowness=[1, 2, 3], edges=skips))
    assert what_ifs_are_cheap(make_profile(work=[1e-3] * 12, slowness=[1, 2, 3]))
    assert not what_ifs_are_cheap(make_profile(work=[1e-3] * 48, slowness=[1, 2, 3, 4]))
    assert not what_ifs_are_cheap(make_profile(work=[1e-3] * 5, slowness=[1, 2], edges=[(n, 4) for n in range(4)]))


def test_an_interrupted_search_is_followed_by_no_others():
    """Whoever stopped the search for the plan does not wait for five more."""

    def stop(progress):
        if progress.incumbent_s is not None:
            raise KeyboardInterrupt

    profile, options = random_chain(0, partitions=6, workers=3), replace(EXACT, schedule="gpipe")
    solution = solve(profile, options, progress=stop)
    assert solution.plan.solver.interrupted
    assert price_what_ifs(solution, profile, options).plan.what_if == ()


def test_one_more_worker_has_a_rank_that_is_free(tmp_path):
    """Behind the last rank that there may be there is none: one in front of it, then."""
    path = tmp_path / "profile.json"
    save_profile(random_chain(3, partitions=4, workers=2), path)
    path.write_text(path.read_text().replace(worker_name(1), worker_name(MOST_RANKS - 1)))
    assert what_if(priced(load_profile(path)), "worker")
