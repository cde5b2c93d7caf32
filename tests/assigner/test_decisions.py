"""Decisions on values inside of partitions: what a module gives back on ways that rows seldom go counts, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from cutting import of
from torch import nn
from workloads import WIDTH

from assigner.errors import MarkingError
from assigner.model.marking import fakeforward, partition_graph

if TYPE_CHECKING:
    from collections.abc import Callable


class Repaired(nn.Linear):
    """Gives back what it is given where nothing is wrong with it."""

    def __init__(self, wrong: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.wrong(x.abs() > 99) else x


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        lambda bad: bad.any(),
        lambda bad: bad.sum(),
        lambda bad: bad.float().sum(),
        lambda bad: torch.is_nonzero(bad.sum()),
        lambda bad: any(bad.sum(0)),
    ],
    ids=["any", "sum", "floats", "is_nonzero", "any of numbers"],
)
def test_the_truth_of_a_number_may_be_false(wrong):
    """A result that is the input itself where a sum is 0 is seen, as one where nothing is true."""

    def forward(self, x):
        given = self.a(x)
        made = self.d(given)
        made.add_(1)
        return self.c(self.b(given) + made)

    with pytest.raises(MarkingError, match="shares memory with a value that is changed in place"):
        partition_graph(of(forward, "a", "b", "c", "d", d=lambda: Repaired(wrong)))


class Halting(nn.Linear):
    """Goes on until all rows have halted; says how often where it is asked to."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.counts = counts

    def forward(self, x):
        halting, turns = x.new_zeros(len(x)), 0
        while (halting < 1).any():
            x, turns = torch.tanh(super().forward(x)), turns + 1
            halting = halting + torch.sigmoid(x.mean(1))
        return (x, turns) if self.counts else x


class HaltingLate(Halting):
    """Asks the other way round: without an answer that is true it never ends."""

    def forward(self, x):
        halting = x.new_zeros(len(x))
        while not self.has_halted(halting):
            x = torch.tanh(nn.Linear.forward(self, x))
            halting = halting + torch.sigmoid(x.mean(1))
        return x

    def has_halted(self, halting):
        return (halting >= 1).all()


class Experts(nn.Linear):
    """More decisions than a `while` has turns, of a loop that ends."""

    def forward(self, x):
        turns = 0
        while turns < 2:
            x, turns = self.routed(x), turns + 1
        return x

    def routed(self, x):
        for n in range(fakeforward._LONGEST + 10):
            if (x > n).any():
                x = super().forward(x)
        return x


@pytest.fixture
def asked(monkeypatch):
    """Gives the number of decisions that were answered so far."""
    ways, made = [], fakeforward._Decider.__init__

    def noted(way, **words):
        ways.append(way)
        made(way, **words)

    monkeypatch.setattr(fakeforward._Decider, "__init__", noted)
    return lambda: sum(each.asked for each in ways)


@pytest.fixture
def given_up_early(monkeypatch):
    """A loop is given up after some turns: how many it may have changes nothing but the time that these take."""
    monkeypatch.setattr(fakeforward, "_LONGEST", 16)


def chain(b: Callable[[], nn.Module]) -> Any:
    return of(lambda self, x: self.c(self.b(self.a(x))), "a", "b", "c", b=b)


def test_a_number_of_turns_is_refused_before_many_are_tried(asked):
    """Two ways that differ are enough: none is followed that would never end."""
    with pytest.raises(MarkingError, match=r"a tensor's value decides what 'b' returns, at .*while"):
        partition_graph(chain(lambda: Halting(counts=True)))
    assert asked() < 20


@pytest.mark.usefixtures("given_up_early")
@pytest.mark.parametrize("kind", [Halting, HaltingLate])
def test_a_loop_that_waits_for_a_value_is_given_up(asked, kind):
    """The way on which it never ends is left early, and others tell what it returns."""
    graph = partition_graph(chain(lambda: kind(counts=False)))
    assert not graph.first.learnt
    assert asked() < 2 * fakeforward._LONGEST


@pytest.mark.long
@pytest.mark.usefixtures("given_up_early")
def test_many_decisions_of_a_loop_that_ends_are_followed(asked):
    """A `for` within a `while` asks for one turn of that."""
    graph = partition_graph(chain(lambda: Experts(WIDTH, WIDTH)))
    assert not graph.first.learnt
    assert asked() > 4 * fakeforward._LONGEST
