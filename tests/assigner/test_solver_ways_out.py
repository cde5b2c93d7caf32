"""Each kind of constraints gives way by as little as is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_profile

from assigner.errors import InfeasibleError
from assigner.solver import SolveOptions, solve
from assigner.solver.why.case import Case, Enquiry
from assigner.solver.why.choices import Batch, FewerInFlight, Hints, MostWorkers, Remat, StepLimit
from assigner.solver.why.family import ceiled, combined, figure, floored, grain, least, least_figure, least_set
from assigner.solver.why.fleet import MoreLinks, MoreMemory, OneMore, Reserve

FAMILIES = (
    FewerInFlight(),
    Remat(),
    Hints(),
    MostWorkers(),
    StepLimit(),
    Reserve(),
    Batch(),
    MoreLinks(),
    OneMore(),
    MoreMemory(),
)


@pytest.fixture
def enquiry():
    return Enquiry(30.0)


def chain(count=4, workers=2, **changes):
    """Partitions of 4 MB state and 8 MB activations at a batch of 8."""
    given = {"work": [1e-3] * count, "slowness": [1.0] * workers, "capacity": 1e9, "activation": 1e6}
    return make_profile(**(given | changes))


def solved(case):
    return solve(case.profile, case.options).plan


def infeasible(case):
    with pytest.raises(InfeasibleError):
        solve(case.profile, case.options)


@pytest.mark.long
def test_memory_grows_by_the_least_figure(enquiry):
    """One worker gets what it needs and no figure more."""
    case = Case(chain(capacity=[1.2e7, 8e6]), SolveOptions())
    infeasible(case)
    (way,) = MoreMemory().ways_out(case, enquiry)
    enough = way.change.apply(case)
    (grown,) = [w for w, old in zip(enough.workers, case.workers, strict=True) if w.memory_bytes > old.memory_bytes]
    assert solved(enough).stages
    less = grown.memory_bytes - grain(grown.memory_bytes)
    infeasible(case.with_memory({grown.name: less}))


def test_memory_of_several_workers_grows_by_one_factor(enquiry):
    """Where pins leave no worker out, each of them gets more."""
    case = Case(chain(count=2, capacity=3e6), SolveOptions(pins={"p0": "worker:0", "p1": "worker:1"}, batch_size=1))
    (way,) = MoreMemory().ways_out(case, enquiry)
    assert way.change.how.count("give ") == 2
    assert solved(way.change.apply(case)).stages


def test_several_reserves_shrink_by_one_factor(enquiry):
    """Two workers are needed, and both keep too much free: the flag for each; those of others stay as they were."""
    reserve = {"worker:0": 1.8e7, "worker:1": 1.8e7, "worker:2": 2e7}
    case = Case(
        chain(count=2, workers=3, capacity=2e7),
        SolveOptions(pins={"p0": "worker:0", "p1": "worker:1"}, reserve=reserve),
    )
    (way,) = Reserve().ways_out(case, enquiry)
    changed = way.change.apply(case)
    assert way.change.how.count("--reserve ") == 3
    assert changed.options.reserve["worker:2"] == 2e7
    assert solved(changed).stages


def test_max_workers_grows_to_the_least_number(enquiry):
    """Three of four workers hold the model; two do not."""
    case = Case(chain(count=3, workers=4, capacity=9e6), SolveOptions(max_workers=1, batch_size=1))
    (way,) = MostWorkers().ways_out(case, enquiry)
    number = way.change.apply(case).options.max_workers
    assert way.change.how == f"--max-workers {number}"
    assert solved(way.change.apply(case)).stages
    infeasible(case.with_options(max_workers=number - 1))


def test_the_largest_smaller_batch_is_found(enquiry):
    """A batch of 8 does not fit, and of its divisors the largest that does is told."""
    case = Case(chain(count=1, workers=1, capacity=9.5e6), SolveOptions(remat="never", schedule="gpipe"))
    (way,) = Batch().ways_out(case, enquiry)
    assert way.change.how == "--batch-size 4"
    assert solved(way.change.apply(case)).workload.batch_size == 4
    infeasible(case)


def test_one_more_worker_has_the_links_of_the_one_that_it_is_like(enquiry):
    """Two workers are one too few; a third of the kind is there in the way out's plan."""
    case = Case(chain(count=3, capacity=9e6), SolveOptions(batch_size=1))
    infeasible(case)
    (way,) = OneMore().ways_out(case, enquiry)
    changed = way.change.apply(case)
    assert way.change.how in ("add a worker like worker:0", "add a worker like worker:1")
    assert "worker:2/cpu" in solved(changed).workers
    assert {(link.source, link.target) for link in changed.profile.links} == {
        (u, v) for u in changed.profile.worker for v in changed.profile.worker if u != v
    }


def test_only_the_links_that_are_needed_are_to_be_measured(enquiry):
    """Of three workers without links, the two on which p0 and p1 are pinned have to talk."""
    case = Case(chain(count=2, workers=3, links=False), SolveOptions(pins={"p0": "worker:0", "p1": "worker:2"}))
    (way,) = MoreLinks().ways_out(case, enquiry)
    assert way.change.how == "profile the links worker:0 - worker:2"
    infeasible(case)


def test_where_no_single_hint_is_enough_a_least_set_is_dropped(enquiry):
    """p1 and p2 are each away from where p0 and p3 hold the chain together; the third pin stays."""
    pins = {"p0": "worker:0", "p1": "worker:1", "p2": "worker:1", "p3": "worker:0"}
    case = Case(chain(capacity=1e9), SolveOptions(schedule="gpipe", pins=pins, together=(("p0", "p3"), ("p1", "p2"))))
    (way,) = Hints().ways_out(case, enquiry)
    assert way.change.how.count("drop ") == 2
    assert solved(way.change.apply(case)).stages


@pytest.mark.long
def test_many_hints_are_counted_and_not_all_listed(enquiry):
    """Pins that take turns between two workers: of those that must go, six are named."""
    pins = {f"p{n}": f"worker:{n % 2}" for n in range(16)}
    case = Case(chain(count=16), SolveOptions(schedule="gpipe", micro_batches=8, pins=pins))
    (way,) = Hints().ways_out(case, enquiry)
    assert way.change.what.endswith(" of 16 hints dropped")
    assert way.change.how.count("--pin ") == 6
    assert way.change.how.endswith(" more")
    assert solved(way.change.apply(case)).stages


def test_two_kinds_of_constraints_give_way_together(enquiry):
    """No rematerialisation and no links: neither change alone is enough, both are."""
    case = Case(
        chain(capacity=2.1e7, links=False, parameters=1e6),
        SolveOptions(remat="never", schedule="gpipe", pins={"p0": "worker:0", "p3": "worker:1"}),
    )
    for family in (Remat(), MoreLinks()):
        assert not list(family.ways_out(case, enquiry))
    (way,) = combined(case, (Remat(), MoreLinks()), enquiry)
    assert way.change.how == "--remat auto and profile the links worker:0 - worker:1"
    assert solved(way.change.apply(case)).stages


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_no_time_means_no_way_out_and_says_so(family):
    """An enquiry without time finds nothing, and is undecided."""
    profile = chain(capacity=1e6, links=False)
    profile = replace(profile, workers=tuple(replace(each, cost_per_hour=1.0) for each in profile.workers))
    options = SolveOptions(
        objective="cost", schedule="gpipe", micro_batches=1, remat="never", max_step_s=1e-6, max_workers=1,
        pins={"p0": "worker:0"}, reserve={"worker:0": 1e5},
    )  # fmt: skip
    enquiry = Enquiry(0.0)
    assert list(family.ways_out(Case(profile, options), enquiry)) == []
    assert enquiry.undecided


@pytest.mark.parametrize("family", FAMILIES[:-2], ids=lambda family: family.title)
def test_what_is_not_constrained_has_no_way_out(family, enquiry):
    """Nothing is asked where there is nothing to relax."""
    case = Case(chain(batch=1), SolveOptions())
    assert family.opened(case) is None
    hows = [way.change.how for way in family.ways_out(case, enquiry)]
    assert set(hows) <= {"--schedule interleaved"}  # which the default leaves out
    assert not enquiry.undecided


def test_least_number_by_bisection():
    """The least that is enough, with its plan; none where only the given upper end is."""
    assert least(0, 100, lambda number: "plan" if number >= 37 else None) == (37, "plan")
    assert least(0, 100, lambda _: None) == (100, None)


@pytest.mark.parametrize("needed", [{3}, {0, 7}, {1, 4, 6}])
def test_least_set_keeps_what_is_needed(needed):
    """What can go is left out, whatever the order."""
    assert set(least_set(range(8), lambda some: needed <= set(some))) == needed


def test_figures_have_three_digits_and_are_exact():
    """What a flag says is what was tried."""
    assert figure(1.25 * 2**30) == "1.25GiB"
    assert figure(19_000_000) == "19000000B"
    assert figure(0) == "0B"
    assert grain(1.25 * 2**30) == 0.01 * 2**30
    assert grain(512 * 2**20) == 2**20
    assert (floored(1.2345e9), ceiled(1.2345e9)) == (1.14 * 2**30, 1.15 * 2**30)


@pytest.mark.parametrize("needed", [1234.5, 3e6, 7.7e9])
def test_least_figure_is_as_fine_as_it_is_written(needed):
    """Three digits of the figure itself, however large what was tried first."""
    found, plan = least_figure(1.0, 1e11, lambda size: "plan" if size >= needed else None)
    assert plan == "plan"
    assert needed <= found <= needed * 1.01
    assert found == ceiled(needed)
