"""Infeasible problems are said to be so: what is in the way, and a way out that really is one."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

import pytest
from brute_force import best_plan, random_instance
from builders import make_profile, worker_name
from sweeps import sweep

from assigner.errors import InfeasibleError, LimitError
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import overfull, predict
from assigner.solver import SolveOptions, solve
from assigner.solver.limits import tuning
from assigner.solver.problem.hints import resolve
from assigner.solver.search.search import Search
from assigner.solver.why import explain, ways_out
from assigner.solver.why.case import Case, Enquiry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.profile import Profile

GPIPE = SolveOptions(schedule="gpipe")


def refused(profile, options=None):
    with pytest.raises(InfeasibleError) as caught:
        solve(profile, options)
    assert caught.value.exit_code == 3
    assert all(way.value > 0 for way in caught.value.ways_out)
    return caught.value


def hows(error):
    return [way.how for way in error.ways_out]


def heavy(**changes):
    """Three partitions whose activations need 8 MB each unless they are rematerialised."""
    given = {"work": [1e-3] * 3, "slowness": [1.0, 1.0], "capacity": 1.5e7, "activation": 1e6}
    return make_profile(**(given | changes))


def marked(profile, **marks):
    """The profile with `p1={"pin": "kind0"}` marked at p1."""
    return replace(profile, partitions=tuple(replace(each, **marks.get(each.name, {})) for each in profile.partitions))


def test_remat_is_the_way_out_where_it_was_forbidden():
    """The message gives need and capacity of the worst partition; the hint is the first way out."""
    profile = heavy(capacity=1.1e7)
    error = refused(profile, replace(GPIPE, remat="never"))
    assert error.message == "p1 needs 12.2 MiB at 1 micro-batch; the largest worker has 10.5 MiB"
    assert error.hint.startswith(f"{hows(error)[0]}: a step then takes ")
    assert error.hint.endswith(" or less")
    (way,) = [each for each in error.ways_out if each.how == "--remat auto"]
    assert way.value >= solve(profile, GPIPE).plan.predicted.step_s


def test_a_way_out_is_told_by_the_objective():
    """Under latency by one forward, which solving with it does not exceed, in the hint, too."""
    profile, asked = heavy(capacity=1.1e7), SolveOptions(objective="latency", schedule="gpipe")
    error = refused(profile, replace(asked, remat="never"))
    (way,) = [each for each in error.ways_out if each.how == "--remat auto"]
    solved = solve(profile, asked).plan
    assert way.objective == "latency"
    assert solved.solver.objective_s <= way.value < solved.predicted.step_s
    assert ": one forward then takes " in error.hint


def test_another_micro_batch_count_is_the_way_out():
    """One large micro-batch needs too much memory for its messages; the count that the hint names fits."""
    profile = heavy(edge_bytes=5e5, activation=1e5, capacity=1.25e7, slowness=[1.0] * 3, parameters=1e6)
    error = refused(profile, SolveOptions(micro_batches=1))
    assert error.message.startswith(
        "with one stage a worker, at 1 micro-batch no cut of the 3 partitions into stages fits the 3 workers' memory"
    )
    assert error.hint.startswith("--micro-batches ")
    count = int(hows(error)[0].split()[1])
    assert solve(profile, SolveOptions(micro_batches=count)).plan.micro_batches == count


def test_a_steady_state_has_no_more_workers_than_micro_batches():
    """The message says so, and no way out leaves it out of account, as a worker more would."""
    profile = make_profile(work=[1e-3] * 4, slowness=[1.0, 1.0], capacity=8e6, parameters=5e5, activation=1e3)
    options = SolveOptions(objective="throughput", micro_batches=1)
    rule = "at 1 micro-batch, which keeps no more than 1 worker at work (--objective throughput),"
    error = refused(profile, options)
    assert error.message.startswith(f"{rule} no cut of the 4 partitions into stages fits")
    assert hows(error)[0] == "--micro-batches 8"
    assert all(how.startswith(("--micro-batches", "give ")) for how in hows(error))
    assert solve(profile, replace(options, micro_batches=8)).plan.micro_batches == 8
    error = refused(profile, replace(options, pins={"p0": "worker:0", "p3": "worker:1"}))
    assert error.message == (
        f"--pin p0=worker:0 and --pin p3=worker:1 leave no plan {rule} whatever the memory and the links"
    )


@pytest.mark.long
def test_fewer_micro_batches_in_flight_are_the_way_out():
    """What GPipe has no room for, 1F1B has: its last stage keeps one micro-batch and not all."""
    profile = heavy(capacity=1.1e7)
    options = SolveOptions(schedule="gpipe", remat="never")
    assert "--schedule 1f1b" in hows(refused(profile, options))
    assert solve(profile, replace(options, schedule="1f1b")).plan.schedule == "1f1b"


@pytest.mark.long
def test_a_pin_is_named_and_dropping_it_helps():
    """Two partitions pinned to a worker that holds one: either pin may go."""
    profile = heavy(capacity=[1e9, 9e6], parameters=1e6)
    options = SolveOptions(pins={"p0": "worker:1", "p2": "worker:1"})
    error = refused(profile, options)
    assert "the hints and the memory at once; giving up one of them is enough" in error.message
    assert set(hows(error)[:2]) == {"drop --pin p0=worker:1", "drop --pin p2=worker:1"}
    for kept in ("p0", "p2"):
        assert solve(profile, SolveOptions(pins={kept: "worker:1"})).plan.stages


def test_pins_that_contradict_each_other_are_named():
    """A partition pinned to two workers is on neither: by a flag and by its mark."""
    error = refused(marked(heavy(), p1={"pin": "kind0"}), SolveOptions(pins={"p1": "worker:1"}))
    assert error.message == "p1 is pinned to kind0, worker:1, which leaves no worker"
    assert set(hows(error)) == {"drop --pin p1=worker:1", 'drop pin="kind0" where p1 is marked'}


def test_hints_that_contradict_each_other_are_told_from_the_others():
    """The message names a least set of them: p1 lies between two on another worker."""
    options = SolveOptions(
        schedule="gpipe", pins={"p0": "worker:0", "p1": "worker:1", "p2": "worker:0", "p3": "worker:0"}
    )
    error = refused(heavy(work=[1e-3] * 4, capacity=1e9), options)
    named = [f"--pin p{n}=worker:{int(n == 1)}" for n in range(4) if f"--pin p{n}=" in error.message]
    assert error.message == f"{named[0]}, {named[1]} and {named[2]} leave no plan, whatever the memory and the links"
    assert "--pin p1=worker:1" in named
    assert set(hows(error)) == {"drop --pin p0=worker:0", "drop --pin p1=worker:1"}


def test_memory_that_was_asked_for_is_no_memory_that_may_be_any():
    """The workers have enough; what the flags leave of it is in the way, and what was chosen is named with it."""
    pins = dict.fromkeys(("p0", "p1", "p2"), "worker:0")
    options = SolveOptions(memory={"worker:0": 1.4e7}, pins=pins, remat="never")
    error = refused(heavy(capacity=1e9), options)
    assert "--memory worker:0=" in error.message
    assert " leave no plan under --remat never, whatever the links;" in error.message


def test_a_missing_measurement_is_named():
    """A partition that was measured nowhere cannot be placed, and no change of constraints helps."""
    profile = heavy()
    some = tuple(each for each in profile.measurements if each.partition != "p1")
    error = refused(replace(profile, measurements=some))
    assert "p1 was not measured" in error.message
    assert error.ways_out == ()


def test_a_size_that_was_not_measured_is_to_be_measured():
    """No smaller model helps: the profile has one size, which the batch has no micro-batches of."""
    profile = heavy()
    size = max(each.micro_batch for each in profile.measurements)
    some = tuple(each for each in profile.measurements if each.micro_batch == size)
    error = refused(replace(profile, measurements=some), SolveOptions(batch_size=size // 2))
    assert f"was measured at only micro-batch {size}, not at {size // 2}" in error.message
    assert error.ways_out == ()
    assert error.hint == f"assigner profile --micro-batches {size // 2},{size} measures that size, too"


@pytest.mark.long
def test_workers_that_cannot_talk_need_links():
    """Both workers are needed, and there is no link: the way out names the pair."""
    error = refused(heavy(work=[1e-3] * 6, capacity=2.2e7, links=False, parameters=1e6))
    assert "keeps to the memory and the links at once" in error.message
    assert hows(error)[0] == "profile the links worker:0 - worker:1"


@pytest.mark.long
def test_a_model_that_is_too_large_is_added_up():
    """Parameters, gradients and optimizer state beyond the memory of all workers together."""
    error = refused(heavy(work=[1e-3] * 6, capacity=1e7))
    assert error.message == (
        "the model's parameters, gradients and optimizer state need 22.9 MiB; the 2 workers have 19.1 MiB together"
    )
    assert any(how.startswith("give worker:") for how in hows(error))


@pytest.mark.long
def test_a_reserve_that_takes_all_the_memory_is_named():
    """The largest reserve of one worker that leaves enough; a percent more of the old one does not."""
    profile = heavy(capacity=2e7)
    profile = replace(profile, workers=tuple(replace(each, reserve_bytes=1.9e7) for each in profile.workers))
    flag, name, size = hows(refused(profile))[0].replace("=", " ").split()
    assert (flag, name, size[-3:]) == ("--reserve", "worker:0", "MiB")
    left_free = float(size[:-3]) * 2**20
    assert solve(profile, SolveOptions(reserve={"worker:0": left_free})).plan.stages
    refused(profile, SolveOptions(reserve={"worker:0": left_free + 0.015 * 1.9e7}))


def test_the_users_own_words_are_told():
    """Explained from what the user gave, a way out drops the flag or the mark that there is, pattern and all."""
    profile = marked(heavy(work=[1e-3] * 4, capacity=1.2e7), p0={"colocate": "ends"}, p3={"colocate": "ends"})
    options = SolveOptions(together=(("p1", "p2"),), rematerialise={"p*": "never"}, schedule="gpipe", micro_batches=8)
    error = explain(profile, options, left_s=60.0)
    assert 'drop colocate="ends" where p0, p3 are marked' in error.hint
    assert "drop --never-remat 'p*'" in error.hint


def test_a_step_time_that_no_plan_meets_is_an_obstacle():
    """The limit to the step is in the way, whatever the memory; the way out is the fastest plan's."""
    profile = heavy(capacity=1e9)
    profile = replace(profile, workers=tuple(replace(each, cost_per_hour=1.0) for each in profile.workers))
    options = SolveOptions(objective="cost", max_step_s=1e-3)
    error = explain(profile, options, left_s=60.0)
    assert error.message.startswith("no plan has a step of 1.00 ms or less")
    (way,) = [each for each in error.ways_out if each.how.startswith("--max-step ")]
    longer = replace(options, max_step_s=float(way.how.split()[1]))
    assert solve(profile, longer).plan.predicted.step_s <= longer.max_step_s


def test_an_interrupt_leaves_what_is_known(monkeypatch):
    """Ctrl-C while ways out are looked for: the problem has no plan all the same."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", interrupt)
    error = explain(heavy(capacity=1e3), SolveOptions(), left_s=60.0)
    assert error.message.startswith("p1 needs ")
    assert error.ways_out == ()
    assert "more memory" in error.untried


@pytest.mark.slow
@pytest.mark.parametrize("seed", sweep(range(5), quick=3))
def test_random_infeasible_problems_have_a_feasible_way_out(seed):
    """Where exhaustive search finds nothing, the solver says so, and there is a plan with each way out named."""
    profile = random_instance(seed, partitions=4, workers=2, missing=0.3, pins=True)
    small = tuple(replace(each, memory_bytes=6e6 + seed * 1e5) for each in profile.workers)
    profile = replace(profile, workers=small)
    if best_plan(profile) is not None:
        assert solve(profile, GPIPE).plan.stages
        return
    assert refused(profile, GPIPE).ways_out
    case = Case(*resolve(profile, GPIPE))
    found, untried = ways_out(case, Enquiry(600.0))
    assert untried == []
    for way in found:
        changed = way.change.apply(case)
        assert solve(changed.profile, changed.options).plan.predicted.step_s <= way.step_s * 1.01


def scattered(homes: Sequence[int], capacity: float, schedule: str = "auto") -> tuple[Profile, SolveOptions]:
    """A chain with each partition pinned to one of two workers, and nothing rematerialised."""
    profile = make_profile(work=[1e-3] * len(homes), slowness=[1.0, 1.0], capacity=capacity, batch=4)
    pins = {f"p{n}": f"worker:{home}" for n, home in enumerate(homes)}
    return profile, SolveOptions(pins=pins, remat="never", schedule=schedule)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["auto", "listed"])
def test_what_fits_with_one_micro_batch_at_a_time_alone(schedule):
    """No named schedule has room for several stages a worker there; some order of theirs has."""
    profile, options = scattered([0, 0, 1, 1, 0, 0], 2.3e7, schedule)
    with pytest.raises(InfeasibleError):
        solve(profile, replace(options, schedule="interleaved"))
    plan = solve(profile, options).plan
    assert plan.schedule == "listed"
    assert [stage.workers for stage in plan.stages] == [(worker_name(home),) for home in (0, 1, 0)]
    assert not overfull(predict(plan, profile))


@pytest.mark.parametrize("seed", sweep(range(12), quick=4))
def test_scattered_pins_have_a_plan_if_one_micro_batch_has_room(seed):
    """Where each worker has room for one micro-batch of each of its stages, there is a plan, and nowhere else."""
    rng = random.Random(seed)
    homes = [rng.randrange(2) for _ in range(rng.randint(5, 7))]
    profile, options = scattered(homes, rng.uniform(1.4e7, 3e7))
    cost = CostModel(profile)
    runs = [[f"p{n}" for n, _ in some] for _, some in itertools.groupby(enumerate(homes), key=itemgetter(1))]
    room = [
        all(
            cost.memory(worker.name, [(names, (), 1) for names in runs[first::2]], size).total <= worker.capacity_bytes
            for first, worker in zip((homes[0], 1 - homes[0]), profile.workers, strict=True)
        )
        for size in (4, 2, 1)
    ]
    if any(room):
        assert not overfull(predict(solve(profile, options).plan, profile))
    else:
        message = refused(profile, options).message
        assert message.endswith("there is no plan either") or " need" in message


@pytest.mark.long
def test_what_is_not_proven_of_several_stages_is_said(monkeypatch):
    """Where the search of all placements comes to no end, that there is none is not known: no exit code 3."""
    assert refused(*scattered([0, 0, 0, 1, 0, 1], 1.9e7)).message.endswith("in any order, there is no plan either")
    monkeypatch.setattr(tuning, "LOOPED_NODES", 0)
    profile, options = scattered([0, 0, 0, 1, 0, 1], 1.9e7)
    with pytest.raises(LimitError, match=r"with one stage a worker, .*with several no plan was found") as caught:
        solve(profile, options)
    assert caught.value.exit_code == 4
    assert caught.value.hint


@pytest.mark.long
def test_a_piece_whose_updates_can_be_divided_is_not_too_large():
    """Workers that share it each hold the optimizer state of a part of it: that one cannot hold all proves nothing."""
    together = SolveOptions(together=(("p0", "p1"),), pins={"p2": "worker:2"}, forbid=(("p0", "worker:2"),))
    profile = make_profile(
        work=[1e-2] * 3, slowness=[1.0] * 3, capacity=[7.4e8, 7.4e8, 4e9], activation=1e4, edge_bytes=1e3, batch=4,
        parameters=1e8,
    )  # fmt: skip
    assert "needs 763 MiB" in refused(profile, replace(together, max_replicas=1)).message
    assert "needs 763 MiB" not in refused(profile, together).message
