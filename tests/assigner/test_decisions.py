"""Decisions on values inside of partitions: ways that rows seldom go count too, behind checks and beyond loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from cutting import of
from torch import nn
from workloads import WIDTH, Reference, make_plan, pipeline_of

from assigner.errors import MarkingError
from assigner.model.marking import decisions, partition_graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.model.workload import Workload

_SHARES = "shares memory with a value that is changed in place"


class Repaired(nn.Linear):
    """Gives back what it is given where nothing is wrong with it."""

    def __init__(self, wrong: Callable[[torch.Tensor], bool], checks: int = 0) -> None:
        super().__init__(WIDTH, WIDTH)
        self.wrong, self.checks = wrong, checks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.checks):
            assert torch.isfinite(x).all(), "not finite"
            if (x.abs() > 1e9).any():
                raise ValueError("too large")
        return super().forward(x) if self.wrong(x.abs() > 99) else x


def changed_in_place(middle: Callable[[], nn.Module]) -> Workload:
    """A model whose code changes what a module returns, and reads what that was given."""

    def forward(self, x):
        given = self.a(x)
        made = self.d(given)
        made.add_(1)
        return self.c(self.b(given) + made)

    return of(forward, "a", "b", "c", "d", d=middle)


def between(middle: Callable[[], nn.Module]) -> Workload:
    return of(lambda self, x: self.c(self.d(self.a(x))).sum(1, keepdim=True), "a", "d", "c", d=middle)


def check_a_step(made: Workload) -> None:
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        batch = made.make_batch(8, 0)
        assert pipeline.step(batch) == pytest.approx(reference.step(batch), abs=1e-10)
        assert reference.distance(pipeline.named_parameters()) < 1e-10


@pytest.mark.parametrize(
    "wrong",
    [
        lambda bad: bad.sum(),
        lambda bad: bad.float().sum(),
        lambda bad: torch.is_nonzero(bad.sum()),
        lambda bad: any(bad.sum(0)),
        lambda bad: int(bad.sum()),
        lambda bad: int(bad.sum()) != 0,
        lambda bad: len(bad.nonzero()) > 0,
        lambda bad: float(bad.float().mean()) > 0,
        lambda bad: float(bad.float().sum()) > 50,
    ],
    ids=["sum", "floats", "is_nonzero", "any", "int", "int compared", "len", "float", "a large float"],
)
def test_a_number_may_be_nothing(wrong):
    """A result that is the input itself where a number is 0, or one that is not large, is seen."""
    with pytest.raises(MarkingError, match=_SHARES):
        partition_graph(changed_in_place(lambda: Repaired(wrong)))


@pytest.mark.parametrize("wrong", [lambda bad: bad.any(), lambda bad: not bad.any()], ids=["True", "False"])
def test_ways_behind_checks(wrong):
    """Checks on either side that raise end no way: what comes behind is seen."""
    with pytest.raises(MarkingError, match=_SHARES):
        partition_graph(changed_in_place(lambda: Repaired(wrong, checks=5)))


class OtherType(nn.Linear):
    """Of another type where a number is 0, which is told with its line and not with that of a check."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return super().forward(x) if (x.abs() < 99).sum() else x.float()


def test_another_type_where_a_number_is_nothing():
    with pytest.raises(MarkingError, match=r"a tensor's value decides what 'd' returns, at .*x\.float\(\)"):
        partition_graph(between(OtherType))


class Counted(nn.Linear):
    """Goes on as often as a number says, which is never 0: without a step there would be nothing to return."""

    def __init__(self, start: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.start = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.start(x)
        for _ in range(int((x.abs() >= 0).sum(1).max())):
            x = super().forward(x).tanh()
            made = x if made is None else made + x
        return made


@pytest.mark.parametrize(
    "start",
    [lambda _: None, lambda x: x.new_zeros(1, WIDTH), lambda _: 0, torch.zeros_like],
    ids=["none", "one row", "a number", "all rows"],
)
def test_a_number_of_steps(start):
    """A number that is perhaps never 0 refuses nothing where the result would then be of another kind."""
    check_a_step(between(lambda: Counted(start)))


class Chunked(nn.Linear):
    """A loop that would not end if a number were 0."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step, start, made = int((x.abs() >= 0).sum(1).max()), 0, 0
        while start < WIDTH:
            made = made + x[:, start : start + step].sum(1, keepdim=True)
            start += step
        return super().forward(x) + made


def test_a_number_that_keeps_a_loop(monkeypatch: pytest.MonkeyPatch):
    """A capture ends also where such a number is tried."""
    monkeypatch.setattr(decisions, "_LONGEST", 100)
    check_a_step(between(Chunked))


class Halting(nn.Module):
    """Has experts, then goes on until each row has come far enough, as adaptive computation times do."""

    def __init__(self, truth: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.step, self.p, self.truth = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), truth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = range(decisions._PATIENCE + 4)
        wanted = x.abs().argmax(-1, keepdim=True)
        made = x
        for n in experts:
            if (wanted == n + WIDTH).any():
                made = made + self.step(x) * (wanted == n)
        halt = torch.zeros_like(x[:, :1])
        while not self.truth(halt >= 0.9):
            halt = halt + torch.sigmoid(self.p(x))
        return made


@pytest.mark.long
@pytest.mark.parametrize(
    "truth", [torch.all, lambda done: int((~done).sum()) == 0], ids=["waits for a truth", "waits for a number"]
)
def test_ways_beyond_a_loop_that_waits(truth, monkeypatch: pytest.MonkeyPatch):
    """What stands in front of a loop that would ask for ever is gone one way throughout, however often it asks."""
    monkeypatch.setattr(decisions, "_MOST", 60)
    with pytest.raises(MarkingError, match=_SHARES):
        partition_graph(changed_in_place(lambda: Halting(truth)))
