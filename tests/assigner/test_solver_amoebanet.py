"""AmoebaNet-D and torchgpipe's published balances of it, on the profile that the benchmark ships."""

from __future__ import annotations

import pytest
import torch

from assigner.formats.profile import load_profile
from benchmarks.solver.amoebanet import amoebanet_d
from benchmarks.solver.balances import PROFILE, PUBLISHED, like_workers, row


@pytest.mark.parametrize(("filters", "millions"), [(208, 81.5), (416, 319.0)])
def test_the_model_has_the_published_size(filters, millions):
    """Parameters as torchgpipe's memory benchmark states them for (18, 208) and (18, 416)."""
    with torch.device("meta"):
        model = amoebanet_d(cells=18, filters=filters)
    assert len(model) == 24
    assert round(sum(each.numel() for each in model.parameters()) / 1e6, 1) == millions


def test_the_model_halves_as_it_should():
    """Scores of each image; the stem, two stem cells and two reductions halve the size five times."""
    with torch.device("meta"):
        model, x = amoebanet_d(cells=3, filters=16, classes=10), torch.rand(2, 3, 64, 64)
    assert model(x).shape == (2, 10)
    assert model[:-1](x)[0].shape[2:] == (2, 2)


def test_its_profile_is_a_chain():
    """24 partitions in a line; every cell hands on two values, its output and its input."""
    profile = load_profile(PROFILE)
    assert len(profile.order) == 24
    assert profile.is_chain
    assert [edge.output for edge in profile.edges] == [0, *[0, 1] * 22]


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 1), (2, 4), (4, 4), (4, 32), (8, 4)])
def test_the_solver_is_never_worse_than_a_published_balance(workers, micro_batches):
    """On one profile and like workers, proven, nor worse than balance by time."""
    profile = like_workers(load_profile(PROFILE), workers, latency=5e-5, bandwidth=1.25e9, memory=64e9)
    found = row(profile, micro_batches=micro_batches, remat="always", time_limit=60.0)
    assert found.published[0] == PUBLISHED[workers, 1 if micro_batches == 1 else None]
    assert found.status == "optimal"
    assert found.solved[1] == pytest.approx(found.bound_s, rel=1e-6)
    assert found.solved[1] <= min(found.published[1], found.by_time[1]) * (1 + 1e-9)
