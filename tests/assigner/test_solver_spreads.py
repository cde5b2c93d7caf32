"""A profile at other points of its spreads: the slow end, and seeded draws."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from builders import make_profile, worker_name
from spreading import spread_out

from assigner.formats.profile import Collective, LinkPoint
from assigner.schedule.cost import CostModel
from assigner.solver import SolveOptions, solve
from assigner.solver.robust.spreads import Coverage, resampled, slow_end

if TYPE_CHECKING:
    from assigner.formats.profile import Profile

TIMES = ("forward_s", "backward_s", "update_s")


def factors(moved: Profile, profile: Profile) -> list[float]:
    """What each measurement's forward was multiplied by."""
    pairs = zip(moved.measurements, profile.measurements, strict=True)
    return [new.forward_s / old.forward_s for new, old in pairs]


PROFILE = make_profile(work=[1e-3, 2e-3], slowness=[1.0, 2.0])


def test_a_profile_without_spreads_stays_as_it_is():
    """Nothing varies: its slow end and its draws are the profile itself."""
    still = spread_out(PROFILE)
    assert slow_end(still) == still
    assert resampled(still, 3) == still
    assert Coverage.of(still) == Coverage(8, 0, 6, 0)
    assert not Coverage.of(still).varies


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0, 5.75])
def test_the_slow_end_is_the_upper_quartile(spread):
    """The quartiles m f and m / f are one IQR apart; no positive time can have them elsewhere than in these bounds."""
    for factor in factors(slow_end(spread_out(PROFILE, compute=spread)), PROFILE):
        assert factor - 1 / factor == pytest.approx(spread)
        assert max(1.0, spread) < factor < 1 + spread


def test_a_small_spread_is_as_good_as_symmetric():
    """The upper quartile is then half an IQR above the median."""
    assert factors(slow_end(spread_out(PROFILE, compute=0.02)), PROFILE) == pytest.approx([1.01] * 8, rel=1e-4)


def test_the_slow_end_moves_times_and_nothing_else():
    """All three times of a measurement and every point grow by their own spreads; bytes and shares stay."""
    profile = spread_out(PROFILE, compute=0.2, link=0.6)
    slow = slow_end(profile)
    for new, old in zip(slow.measurements, profile.measurements, strict=True):
        assert [getattr(new, name) / getattr(old, name) for name in TIMES] == pytest.approx(
            [math.exp(math.asinh(0.1))] * 3
        )
        assert replace(new, **{name: getattr(old, name) for name in TIMES}) == old
    for new, old in zip(slow.links, profile.links, strict=True):
        assert [point.seconds for point in new.points] == pytest.approx(
            [point.seconds * math.exp(math.asinh(0.3)) for point in old.points]
        )
        assert replace(new, points=old.points) == old
    assert replace(slow, measurements=profile.measurements, links=profile.links) == profile


def test_collectives_move_by_their_own_spreads():
    """All sizes of one together; without a spread it stays."""
    pair = (worker_name(0), worker_name(1))
    swept = Collective(pair, (LinkPoint(1e4, 1.0, 9, 0.4), LinkPoint(1e6, 3.0, 9, 0.0)))
    profile = replace(spread_out(PROFILE), collectives=(swept,))
    (slow,) = slow_end(profile).collectives
    assert [point.seconds for point in slow.points] == [pytest.approx(math.exp(math.asinh(0.2))), 3.0]
    (drawn,) = resampled(profile, 3).collectives
    assert drawn.points[0].seconds != 1.0
    assert resampled(profile, 3).collectives == (drawn,)
    assert Coverage.of(profile) == Coverage(8, 0, 8, 1)
    assert Coverage.of(profile).varies


def test_what_ran_out_of_memory_is_left_alone():
    """A measurement without times has none to move, and is not counted."""
    broken = replace(PROFILE.measurements[0], forward_s=0.0, backward_s=0.0, update_s=0.0, infeasible="no memory")
    profile = replace(PROFILE, measurements=(broken, *PROFILE.measurements[1:]))
    assert slow_end(profile).measurements[0] == broken
    assert resampled(profile, 1).measurements[0] == broken
    assert Coverage.of(profile) == Coverage(7, 7, 6, 6)


def test_a_seed_is_a_draw():
    """The same seed gives the same draw, another one another."""
    assert resampled(PROFILE, 5) == resampled(PROFILE, 5)
    assert resampled(PROFILE, 5) != resampled(PROFILE, 6)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_draws_have_the_median_and_the_spread_that_were_measured(spread):
    """Over many draws the median is the profile's, IQR / median is the spread, and no time is ever zero or less."""
    profile = spread_out(PROFILE, compute=spread, link=spread)
    drawn = [resampled(profile, seed) for seed in range(2000)]
    for values in (
        [factors(each, profile)[0] for each in drawn],
        [each.links[0].points[0].seconds / profile.links[0].points[0].seconds for each in drawn],
    ):
        low, middle, high = statistics.quantiles(values, n=4)
        assert middle == pytest.approx(1, rel=0.05 * max(1.0, spread))
        assert high - low == pytest.approx(spread, rel=0.1)
        assert min(values) > 0


def test_one_draw_for_a_pair_and_one_for_a_link():
    """Forward, backward and update at all sizes move together, as do a link's points; other pairs on their own."""
    drawn = resampled(spread_out(PROFILE, compute=0.3, link=0.3), 1)
    by_pair: dict[tuple[str, str], set[float]] = {}
    for new, old in zip(drawn.measurements, PROFILE.measurements, strict=True):
        for name in TIMES:
            factor = round(getattr(new, name) / getattr(old, name), 9)
            by_pair.setdefault((new.partition, new.worker), set()).add(factor)
    for new, old in zip(drawn.links, PROFILE.links, strict=True):
        by_pair[new.source, new.target] = {
            round(point.seconds / median.seconds, 9) for point, median in zip(new.points, old.points, strict=True)
        }
    assert all(len(found) == 1 for found in by_pair.values())
    assert len(set.union(*by_pair.values())) == 4 + 2


def test_sizes_of_one_pair_keep_their_own_spreads():
    """A size that was measured steadily stays where it is while the other moves."""
    steady = tuple(replace(each, spread=0.0 if each.micro_batch == 4 else 0.4) for each in PROFILE.measurements)
    drawn = resampled(replace(PROFILE, measurements=steady), 2)
    for factor, each in zip(factors(drawn, PROFILE), PROFILE.measurements, strict=True):
        assert (factor == 1.0) == (each.micro_batch == 4)


@pytest.mark.parametrize("moved", [slow_end, lambda profile: resampled(profile, 4)])
def test_kinds_share_the_draw_as_they_share_the_measurement(moved):
    """Partitions of one kind on workers of one kind, measured once, cost the same in every draw."""
    profile = spread_out(PROFILE, compute=0.5)
    alike = replace(
        profile,
        workers=tuple(replace(worker, kind="one") for worker in profile.workers),
        partitions=tuple(replace(partition, kind="one") for partition in profile.partitions),
        measurements=profile.measurements[:2],
    )
    cost = CostModel(moved(alike))
    prices = {
        cost.partition(name, worker.name, size).forward_s / size
        for name in alike.partition for worker in alike.workers for size in (1, 4)
    }  # fmt: skip
    assert len({round(price, 12) for price in prices}) == 1
    assert prices != {1e-3}


def test_a_plan_for_the_slow_end_takes_the_steady_worker():
    """A worker that is a little faster at the median and far slower at its upper quartile is left out."""
    profile = make_profile(work=[1e-3], slowness=[1.0, 0.95])
    shaky = tuple(replace(each, spread=0.5 if each.worker == worker_name(1) else 0.01) for each in profile.measurements)
    profile = replace(profile, measurements=shaky)
    options = SolveOptions(micro_batches=1)
    assert solve(profile, options).plan.workers == (worker_name(1),)
    assert solve(slow_end(profile), options).plan.workers == (worker_name(0),)
