"""Prices: interpolation of times and messages, and what a worker must hold."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from builders import make_profile

from assigner.errors import FormatError
from assigner.formats.profile import LinkPoint, Measurement, Tie
from assigner.schedule.cost import CostModel, message_s

PROFILE = make_profile(work=[1e-3, 2e-3, 3e-3], slowness=[1.0, 2.0])
POINTS = (LinkPoint(1e3, 1e-4), LinkPoint(1e5, 4e-4), LinkPoint(1e6, 2e-3))


def measured(*rows: tuple[int, float], **others: object) -> CostModel:
    """A cost model in which p0 on worker 0 has these (micro-batch, forward seconds)."""
    kept = [m for m in PROFILE.measurements if (m.partition, m.worker) != ("p0", "worker:0/cpu")]
    points = [Measurement("p0", "worker:0/cpu", size, forward_s=seconds, **others) for size, seconds in rows]
    return CostModel(replace(PROFILE, measurements=(*points, *kept)))


def test_a_measured_size_is_its_value() -> None:
    """No interpolation touches a size that was measured."""
    assert measured((2, 0.3), (4, 0.5), (8, 2.0)).partition("p0", "worker:0/cpu", 4).forward_s == 0.5


@pytest.mark.parametrize(("size", "expected"), [(3, 0.4), (6, 1.25), (16, 5.0), (1, 0.2)])
def test_other_sizes_lie_on_the_line_through_the_nearest(size: int, expected: float) -> None:
    """Between two sizes the line between them; outside the line through the two nearest."""
    cost = measured((2, 0.3), (4, 0.5), (8, 2.0))
    assert cost.partition("p0", "worker:0/cpu", size).forward_s == pytest.approx(expected)


def test_a_line_never_falls_below_zero() -> None:
    """Extrapolation stops at nought."""
    assert measured((4, 0.1), (8, 1.0)).partition("p0", "worker:0/cpu", 1).forward_s == 0.0


def test_one_size_prices_no_other() -> None:
    """With one size measured, another one is an error that says what to do."""
    cost = measured((4, 0.1))
    assert cost.partition("p0", "worker:0/cpu", 4).forward_s == 0.1
    with pytest.raises(FormatError, match="only micro-batch 4") as error:
        cost.partition("p0", "worker:0/cpu", 8)
    assert "--micro-batches" in str(error.value.hint)


def test_out_of_memory_at_one_size_forbids_larger_ones() -> None:
    """What ran out of memory at 8 samples cannot be placed at 8 or more, and can below."""
    kept = [m for m in PROFILE.measurements if (m.partition, m.worker) != ("p0", "worker:0/cpu")]
    full = Measurement("p0", "worker:0/cpu", 8, infeasible="out of memory")
    fine = [Measurement("p0", "worker:0/cpu", size, forward_s=0.1) for size in (2, 4)]
    cost = CostModel(replace(PROFILE, measurements=(*fine, full, *kept)))
    assert cost.obstacle("p0", "worker:0/cpu", 4) is None
    assert "out of memory" in str(cost.obstacle("p0", "worker:0/cpu", 8))
    assert "out of memory" in str(cost.obstacle("p0", "worker:0/cpu", 16))


def test_equal_kinds_share_measurements() -> None:
    """A pair without measurements of its own is priced by a pair of the same kinds and thread count."""
    same = tuple(replace(each, kind="block") for each in PROFILE.partitions)
    workers = tuple(replace(each, kind="cpu") for each in PROFILE.workers)
    only = tuple(m for m in PROFILE.measurements if (m.partition, m.worker) == ("p1", "worker:0/cpu"))
    cost = CostModel(replace(PROFILE, partitions=same, workers=workers, measurements=only))
    assert cost.partition("p2", "worker:1/cpu", 4).forward_s == pytest.approx(8e-3)
    other = CostModel(
        replace(PROFILE, partitions=same, workers=(workers[0], replace(workers[1], threads=2)), measurements=only)
    )
    assert "not measured" in str(other.obstacle("p2", "worker:1/cpu", 4))


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 1e-4), (500, 1e-4), (1e3, 1e-4), (1e4, 2e-4), (1e5, 4e-4), (1e6, 2e-3), (1.9e6, 2e-3 + 1.6e-3)],
)
def test_messages_follow_the_sweep(size: float, expected: float) -> None:
    """Below the smallest its time; between two a line in the logarithms; above alpha + n / beta of the largest two."""
    assert message_s(POINTS, size) == pytest.approx(expected)


def test_no_link_is_infinitely_slow_and_the_same_worker_free() -> None:
    """Workers without a link cannot talk; a worker's own partitions exchange nothing."""
    cost = CostModel(make_profile(work=[1e-3], slowness=[1.0, 1.0], links=False))
    assert cost.transfer_s("worker:0/cpu", "worker:1/cpu", 10) == math.inf
    assert cost.transfer_s("worker:0/cpu", "worker:0/cpu", 10) == 0.0


def test_memory_adds_up_as_the_cost_model_says() -> None:
    """State once, activations and read values per micro-batch in flight, the largest remat and workspace once."""
    profile = make_profile(
        work=[1e-3] * 3,
        slowness=[1.0, 1.0],
        activation=1e6,
        edge_bytes=1e4,
        parameters=1e5,
        edges=[(0, 1), (1, 2), (0, 2)],
    )
    profile = replace(
        profile, measurements=tuple(replace(m, workspace_bytes=7.0 * m.micro_batch) for m in profile.measurements)
    )
    cost = CostModel(profile)
    held = cost.memory("worker:0/cpu", [(("p1", "p2"), ("p1",), 3)], 4)
    assert held.parameters == held.gradients == 2e5
    assert held.optimizer == 4e5
    read = 2 * 4e4  # p0's value (read by both) and p1's value
    assert held.activations == 3 * (4e6 + read) + 4e6
    assert held.workspace == 28
    assert held.messages == 0
    first = cost.memory("worker:0/cpu", [(("p0",), (), 3)], 4)
    assert first.messages == 2 * 4e4  # its value going out, one gradient coming back


def test_a_tied_parameter_counts_once_a_worker() -> None:
    """Two partitions that share a parameter hold it, its gradient and its optimizer state once."""
    profile = replace(
        make_profile(work=[1e-3] * 2, slowness=[1.0], parameters=1e6), ties=(Tie("w", ("p0", "p1"), int(4e5)),)
    )
    state = CostModel(profile).state(["p0", "p1"])
    assert state.parameters == state.gradients == 1.6e6
    assert state.optimizer == pytest.approx(3.2e6)
    assert CostModel(profile).state(["p0"]).parameters == 1e6


def test_a_workers_own_measurement_of_a_like_partition_comes_before_another_workers() -> None:
    """With one partition of a kind measured on each of two like workers, each is priced by its own figure."""
    same = tuple(replace(each, kind="block") for each in PROFILE.partitions)
    workers = tuple(replace(each, kind="cpu") for each in PROFILE.workers)
    only = tuple(m for m in PROFILE.measurements if m.partition == "p1")
    cost = CostModel(replace(PROFILE, partitions=same, workers=workers, measurements=only))
    assert cost.partition("p2", "worker:0/cpu", 4).forward_s == pytest.approx(8e-3)
    assert cost.partition("p2", "worker:1/cpu", 4).forward_s == pytest.approx(16e-3)
