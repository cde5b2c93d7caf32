"""A busy machine: what it disturbs is measured once more, kept with how much it was disturbed, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from assigner.errors import MeasurementError
from assigner.formats.profile import Link
from assigner.profiler import computetimes, links
from assigner.profiler.computetimes import ComputeMeasurement
from assigner.profiler.links import SweepOptions
from assigner.profiler.rankprogress import Forecast
from assigner.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.profiler.lane import Lane


class Machine:
    """Others have these shares of the processor time, measurement after measurement; the n-th sample takes n s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
        self.shares, self.measured = list(shares), 0
        monkeypatch.setattr(
            computetimes, "StarvationWatch", lambda _: SimpleNamespace(share=lambda: self.shares.pop(0))
        )

    def sample(self) -> list[tuple[Samples, ...]]:
        """One measurement."""
        self.measured += 1
        return [(Samples((float(self.measured),) * 7),)]

    def measure(self, *, force_busy: bool = False) -> tuple[float, float]:
        """Seconds that were kept, and how much they were disturbed."""
        share = ComputeMeasurement(
            cast("computetimes.Workload", None), cast("computetimes.PartitionGraph", None), torch.device("cpu"),
            "worker:1/cpu", 1e9, 0.0, Forecast(), lambda _: None, force_busy=force_busy,
        )  # fmt: skip
        ((samples,),), starved = share._undisturbed(self.sample, ["blocks.0", "blocks.1", "blocks.2", "head"])
        return samples.median_s, starved


@pytest.mark.parametrize(
    ("shares", "kept"),
    [
        pytest.param((0.1,), (1.0, 0.1), id="quiet: once"),
        pytest.param((0.5, 0.2), (2.0, 0.2), id="disturbed: again, and the second one is better"),
        pytest.param((0.4, 0.6), (1.0, 0.4), id="disturbed: again, and the first one is better"),
        pytest.param((0.9, 0.5), (2.0, 0.5), id="no measurement, then one"),
    ],
)
def test_what_others_disturb_is_measured_again(
    shares: Sequence[float], kept: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice at most, and what was disturbed less is kept with its share."""
    machine = Machine(monkeypatch, *shares)
    assert machine.measure() == kept
    assert not machine.shares


def test_a_measurement_in_which_others_have_most_of_the_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says whose time, how much, of what, and both ways on; --force-busy takes the first one as it is."""
    with pytest.raises(MeasurementError, match=r"80 % of .* worker:1/cpu's share, .* blocks\.0-2 \(3\), head") as told:
        Machine(monkeypatch, 0.8, 0.85).measure()
    assert told.value.hint is not None
    assert "--resume" in told.value.hint
    assert "--force-busy" in told.value.hint
    assert Machine(monkeypatch, 0.8).measure(force_busy=True) == (1.0, 0.8)


class Wire:
    """A lane to a target that measures with this end; notes what it is told."""

    rank = 0

    def __init__(self) -> None:
        self.told: list[float] = []

    def tell(self, _target: int, number: float) -> None:
        """A number for the target."""
        self.told.append(number)


@pytest.mark.parametrize(
    ("shares", "force_busy", "kept", "told"),
    [((0.1,), False, 0.1, [1.0, 0.0]), ((0.6, 0.2), False, 0.2, [1.0, 1.0, 0.0]),
     ((0.9, 0.95), False, 0.9, [1.0, 1.0, 0.0]), ((0.6,), True, 0.6, [1.0, 0.0])],
)  # fmt: skip
def test_a_link_with_a_disturbed_end_is_measured_again(
    shares: Sequence[float], force_busy: bool, kept: float, told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its target hears of each measurement, and of the end; the sweep that was disturbed less is kept."""
    waiting, wire = list(shares), Wire()
    monkeypatch.setattr(links, "compare_clock", lambda _: SimpleNamespace(ahead_s=0.0))
    monkeypatch.setattr(
        links, "_measure_once", lambda *_: Link("worker:0/cpu", "worker:1/cpu", (), starved=waiting.pop(0))
    )
    options = SweepOptions(largest=1024, typical=1024, force_busy=force_busy)
    sweep = links._measure_pair(cast("Lane", wire), 1, options, one_clock=True)
    assert sweep.starved == kept
    assert wire.told == told
    assert not waiting
