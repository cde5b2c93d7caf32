"""What messages cost the computing of their ends: processor time that was not its own, by clocks that a test moves."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from assigner.formats.profile import LinkPoint
from assigner.machine import cgroup, starvation
from assigner.profiler import busy
from assigner.profiler.busy import ComputeLoad
from assigner.profiler.links import _handled, is_known, parts

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
PIECE_S = 1e-3


class Clocks:
    """The three clocks of a process; each piece of computing moves them, as fast as the machine is just now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.process = self.thread = 0.0
        self.slower, self.background = 1.0, 0.0
        read = SimpleNamespace(
            perf_counter=lambda: self.wall, process_time=lambda: self.process, thread_time=lambda: self.thread
        )
        monkeypatch.setattr(busy, "time", read)
        monkeypatch.setattr(busy, "allowed_share", lambda _: 1.0)
        monkeypatch.setattr(ComputeLoad, "_piece", lambda _: self.computed(PIECE_S))

    def computed(self, seconds: float) -> None:
        """By the thread that asks; others of the process have some of the processor beside."""
        self.thread += self.slower * seconds
        self.process += (1 + self.background) * self.slower * seconds
        self.wall += self.slower * seconds

    def handled(self, own: float, others: float) -> None:
        """A message: seconds of the calling thread, and of others."""
        self.thread += own
        self.process += own + others
        self.wall += own


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Clocks that stand still until somebody computes."""
    return Clocks(monkeypatch)


@pytest.mark.parametrize(
    ("spare", "cost"),
    [(0.0, 5e-4), (-0.5, 5e-4), (0.5, 3.5e-4), (1.0, 2e-4), (6.0, 2e-4)],
    ids=["all cores compute", "less than a core for each", "half a core is left", "a core is left", "many are"],
)
def test_what_a_message_takes_of_the_cores_that_compute(clocks: Clocks, spare: float, cost: float) -> None:
    """The calling thread's own part always; that of other threads as far as no core is left for them."""
    with ComputeLoad(CPU, spare=spare) as work:
        work.alone()
        assert work.lost_s(5, 0.01, lambda: clocks.handled(2e-4, 3e-4)) == pytest.approx(cost)


def test_a_share_of_a_core_loses_as_much_more(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fifth of a core, a millisecond of processor time holds up computing for five."""
    monkeypatch.setattr(busy, "allowed_share", lambda _: 0.2)
    with ComputeLoad(CPU, spare=-0.8) as work:
        work.alone()
        assert work.lost_s(5, 0.01, lambda: clocks.handled(2e-4, 3e-4)) == pytest.approx(2.5e-3)


def test_a_machine_that_slows_down_and_what_the_process_does_beside_are_no_messages(clocks: Clocks) -> None:
    """Of computing at half the speed as much is messages' as before; threads that always run are not theirs."""
    clocks.background = 0.1
    with ComputeLoad(CPU, spare=0.0) as work:
        work.alone()
        clocks.slower = 2.0
        assert work.lost_s(5, 0.01, lambda: clocks.handled(0.0, 3e-4)) == pytest.approx(3e-4)
        assert work.lost_s(5, 0.01, lambda: None) == pytest.approx(0.0)


def test_a_message_that_took_long_once_does_not_count(clocks: Clocks) -> None:
    """The median of some: one that other programs held up is no message's usual cost."""
    costs = iter([3e-4, 5e-3, 3e-4, 2e-4, 4e-4])
    with ComputeLoad(CPU, spare=0.0) as work:
        work.alone()
        assert work.lost_s(5, 0.01, lambda: clocks.handled(0.0, next(costs))) == pytest.approx(3e-4)


def test_computing_in_an_act_is_computing(clocks: Clocks) -> None:
    """As beside an all-reduce, until it is done."""
    with ComputeLoad(CPU, spare=0.0) as work:
        work.alone()

        def act() -> None:
            clocks.handled(0.0, 3e-4)
            work.run()

        assert work.lost_s(3, 0.01, act) == pytest.approx(3e-4)


def test_computing_has_one_thread_while_it_is_counted() -> None:
    """A pool's processor time would be taken for the messages'; afterwards there are as many threads as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ComputeLoad(CPU):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Wire:
    """Both ends of a lane by turns: numbers that are told come back in their order; notes what else is done."""

    device = CPU

    def __init__(self, clocks: Clocks, *numbers: float) -> None:
        self.clocks, self.numbers, self.told, self.done = clocks, list(numbers), list[float](), list[str]()

    def tell(self, _peer: int, number: float) -> None:
        """To the other end."""
        self.told.append(number)

    def ask(self, _peer: int) -> float:
        """From it."""
        return self.numbers.pop(0)

    def buffer(self, size: int) -> torch.Tensor:
        """What is sent."""
        return torch.zeros(size)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self.done.append(name)
            self.clocks.handled(1e-4 if name in ("send", "receive") else 0.0, 0.0)

        return note


def test_each_end_counts_its_own_part(clocks: Clocks) -> None:
    """The source tells size, distance and number, and hears what its messages cost the target, which posts ahead."""
    source: Any = Wire(clocks, 0.0, 7e-4, 0.0, 9e-4)
    assert busy.send_busy(source, 1, [(1024, 0.03), (4096, 0.04)]) == [
        (pytest.approx(1e-4), 7e-4),
        (pytest.approx(1e-4), 9e-4),
    ]
    assert source.told == [2, 1024, 0.06, 5, 4096, 0.08, 5]
    assert source.done == (["send"] * 5 + ["flush"]) * 2
    target: Any = Wire(clocks, *source.told)
    busy.answer_busy(target, 0)
    assert target.told == [0.0, pytest.approx(1e-4)] * 2
    assert target.done == [*["post"] * 3, *["receive", "post"] * 2, *["receive"] * 3] * 2


def test_what_a_typical_message_costs_is_met_exactly() -> None:
    """A part for any message, and a share of the time of larger ones that is 1 at most."""
    assert parts(2e-4, 5e-4, 1e-3) == pytest.approx((2e-4, 0.3))
    assert parts(3e-4, 2e-4, 1e-3) == pytest.approx((2e-4, 0.0))
    assert parts(2e-4, 5e-4, 1e-4) == pytest.approx((4e-4, 1.0))
    assert parts(2e-4, 3e-4, 0.0) == (2e-4, 0.0)
    drawn = random.Random(0)
    for _ in range(200):  # a profile with a cost below 0, by the last digit of a sum, would be refused
        assert parts(0.0, drawn.random(), drawn.random())[0] >= 0


def test_a_median_that_is_known_needs_no_more_samples() -> None:
    """Seven alike are enough; those that spread go on until the median is known to 5 %, or there are thirty."""
    assert not is_known([1.0] * 6)
    assert is_known([1.0] * 7)
    assert not is_known([0.9, 1.1] * 4)
    assert is_known([0.95, 1.05] * 4)
    assert not is_known([0.5, 1.5] * 14)
    assert is_known([0.5, 1.5] * 15)


def test_on_a_slow_wire_a_smaller_message_is_looked_at() -> None:
    """One that takes a second would take as long as all else, and costs its ends next to nothing of it."""
    points = [LinkPoint(size, size / 1e6, 3, 0.0) for size in (1024, 65536, 1048576)]
    assert _handled(points, 100_000) == 65536
    assert _handled(points, 2048) == 2048
    assert _handled([LinkPoint(1024, 3.0, 3, 0.0)], 2048) == 1024


def test_cores_beside_those_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this host: what affinity and quota leave, less each rank's threads."""
    monkeypatch.setattr(starvation, "_sharing", [])
    monkeypatch.setattr(cgroup, "usable_cores", lambda: 8)
    monkeypatch.setattr(starvation, "launched", lambda: SimpleNamespace(local_ranks=2))
    monkeypatch.setattr(cgroup, "core_limit", lambda: None)
    assert starvation.spare_cores(3) == 2
    monkeypatch.setattr(cgroup, "core_limit", lambda: 1.5)
    assert starvation.spare_cores(1) == -0.5
