"""The knapsack of rematerialisation equals trying every subset."""

from __future__ import annotations

import itertools
import random

import pytest
from builders import make_profile, single

from assigner.schedule.cost import CostModel
from assigner.solver.problem.memory import IntervalBytes, least_remat
from assigner.solver.problem.problem import Problem


def every_subset(activations, forwards, in_flight, room):
    count = range(len(activations))
    fitting = [
        sum(forwards[i] for i in chosen)
        for k in range(len(activations) + 1)
        for chosen in itertools.combinations(count, k)
        if in_flight * sum(activations[i] for i in count if i not in chosen)
        + max((activations[i] for i in chosen), default=0) <= room
    ]  # fmt: skip
    return min(fitting, default=None)


@pytest.mark.parametrize("seed", range(150))
def test_the_cheapest_subset_that_fits(seed):
    """Least added forward time over all subsets, ties and zeros included; None where nothing fits."""
    rng = random.Random(seed)
    n = rng.randrange(1, 9)
    sizes = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(n)] if seed % 2 else [rng.uniform(0, 9) for _ in range(n)]
    forwards = [rng.choice([0, 1, 2, 4]) if seed % 3 else rng.uniform(0, 5) for _ in range(n)]
    in_flight = rng.choice([1, 2, 4, 8])
    room = rng.uniform(-0.1, 1.1) * in_flight * sum(sizes)
    best = every_subset(sizes, forwards, in_flight, room)
    found = least_remat(sizes, forwards, in_flight=in_flight, room=room)
    assert (found is None) == (best is None)
    if found is not None:
        assert sum(forwards[i] for i in found) == pytest.approx(best)
        stored = sum(size for i, size in enumerate(sizes) if i not in found)
        assert in_flight * stored + max((sizes[i] for i in found), default=0) <= room * (1 + 1e-12)


def test_nothing_is_rematerialised_where_everything_fits():
    """Room for all: the empty choice, not a free one of zero cost."""
    assert least_remat([1.0, 1.0], [0.0, 0.0], in_flight=2, room=4.0) == ()


def test_many_equal_blocks_are_chosen_at_once():
    """Sixty alike partitions are decided by count, not by trying their subsets."""
    found = least_remat([2.0] * 60, [1.0 + i * 1e-6 for i in range(60)], in_flight=4, room=300.0)
    assert found == tuple(range(23))


def test_messages_between_partitions_that_others_stand_between():
    """Of partitions that nothing connects, another order has some between a value and its reader: it still leaves."""
    profile = make_profile(work=[1e-3] * 3, slowness=[1.0, 1.0], edges=[(0, 1)])
    cost = CostModel(profile)
    problem = Problem(profile, single(), cost, sequence=("p0", "p2", "p1"))
    _, _, messages = IntervalBytes(problem, 2).of(0, 1)
    (output,) = cost.outputs
    assert messages == 2 * cost.output_bytes(output, 2)  # and its gradient comes back
