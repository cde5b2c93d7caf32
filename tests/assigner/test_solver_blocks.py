"""Lines of times in blocks, against every cut; and the bound that spares the simulator, against the simulator."""

from __future__ import annotations

import itertools
import random

import pytest

from assigner.solver.baselines.splits import least_largest_blocks


def every_cut(n, blocks):
    """The ends of each way to cut n positions into so many blocks."""
    return ((*cuts, n) for cuts in itertools.combinations(range(1, n), blocks - 1))


def largest(seconds, ends, cut_s):
    found = [sum(seconds[a:b]) for a, b in itertools.pairwise((0, *ends))]
    return max(*found, 0, *(cut_s[end] for end in ends[:-1]))


@pytest.mark.parametrize("seed", range(30))
def test_block_partition_equals_every_cut(seed):
    """The largest block is the least possible, no block is empty, and there are as many as may be."""
    rng = random.Random(seed)
    seconds = [rng.randrange(0, 20) for _ in range(rng.randrange(1, 8))]
    n, most = len(seconds), rng.randrange(1, 9)
    sizes = least_largest_blocks(seconds, most)
    ends = tuple(itertools.accumulate(sizes))
    assert min(sizes) >= 1
    assert (len(sizes), ends[-1]) == (min(most, n), n)
    best = min(largest(seconds, each, [0] * n) for each in every_cut(n, len(sizes)))
    assert largest(seconds, ends, [0] * n) == best


@pytest.mark.parametrize("seed", range(60))
def test_blocks_with_cuts_that_cost_equal_every_cut(seed):
    """The slowest of blocks and cuts is least, with as few blocks as reach it."""
    rng = random.Random(seed)
    seconds = [rng.randrange(0, 20) for _ in range(rng.randrange(1, 8))]
    n, most = len(seconds), rng.randrange(1, 9)
    cut_s = [rng.randrange(0, 60) for _ in seconds]
    sizes = least_largest_blocks(seconds, most, cut_s=cut_s)
    ends = tuple(itertools.accumulate(sizes))
    ways = [(largest(seconds, each, cut_s), k) for k in range(1, min(most, n) + 1) for each in every_cut(n, k)]
    assert min(sizes) >= 1
    assert (largest(seconds, ends, cut_s), len(sizes)) == min(ways)


def test_an_even_cut_is_taken_among_equals():
    """One long time decides the largest block; what is beside it is still shared evenly."""
    assert least_largest_blocks([9, 1, 1, 1, 1, 1, 1], 3) == [1, 3, 3]
    assert least_largest_blocks([1, 1, 1, 1], 4) == [1, 1, 1, 1]


def test_a_long_line_is_cut_exactly():
    """1,000 times in 64 blocks: below the result not even the greedy filling manages with 64."""
    rng = random.Random(0)
    seconds = [rng.randrange(1, 1000) for _ in range(1000)]
    sizes = least_largest_blocks(seconds, 64)
    ends = list(itertools.accumulate(sizes))
    limit = max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *ends))) - 1
    blocks, held = 1, 0
    for each in seconds:
        blocks, held = (blocks, held + each) if held + each <= limit else (blocks + 1, each)
    assert blocks > 64
