"""Ranks of a run in threads of one process, each with parameters of its own, and what a script does to these."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from assigner.runtime.update.rankfactor import RankFactor

Change = Callable[[int, Sequence[nn.Parameter]], Any]
"""What a script does to the gradients of a rank's parameters."""


class _Meeting:
    """Numbers of all ranks, each in a thread of its own."""

    def __init__(self, count: int) -> None:
        self.told: dict[int, Sequence[float]] = {}
        self._all = threading.Barrier(count, timeout=60)

    def met(self, rank: int, numbers: Sequence[float]) -> dict[int, list[float]]:
        self.told[rank] = numbers
        self._all.wait()
        found = {each: [*self.told[each]] for each in sorted(self.told)}
        self._all.wait()
        return found


class _Rank:
    """What a membership is to one of them."""

    transport = "there is one"

    def __init__(self, rank: int, meeting: _Meeting, count: int) -> None:
        self.rank, self.ranks, self._meeting = rank, range(count), meeting

    def numbers(self, number: float) -> list[float]:
        return [each for (each,) in self._meeting.met(self.rank, [number]).values()]

    def numbers_of_all(self, mine: Sequence[float]) -> list[list[float]]:
        return [*self._meeting.met(self.rank, mine).values()]


class Ranks:
    """Ranks of a run, which ask each other."""

    def __init__(
        self,
        count: int,
        change: Change,
        dtype: torch.dtype = torch.float32,
        names: str = "a b",
        size: tuple[int, ...] = (5, 3),
    ) -> None:
        self.generator = generator = torch.Generator().manual_seed(0)
        self.held = [
            {name: nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for name in names.split()}
            for _ in range(count)
        ]
        meeting = _Meeting(count)
        self.factors = [RankFactor(held, _Rank(n, meeting, count)) for n, held in enumerate(self.held)]  # type: ignore[arg-type]
        self.dtype, self.size = dtype, size
        self.step(change)

    def step(self, change: Change) -> None:
        """New gradients, and what the script does to them."""
        for rank, held in enumerate(self.held):
            for n, each in enumerate(held.values()):
                gradient = torch.randn(self.size, generator=self.generator).to(self.dtype)
                each.grad = gradient * (n + 1 + 4 * rank)
            self.factors[rank].note()
            with torch.no_grad():
                change(rank, list(held.values()))

    def check(self) -> None:
        """That of all ranks, which find the same."""
        self.together(RankFactor.check)

    def together(self, call: Callable[[RankFactor], None]) -> None:
        """What all ranks call."""
        with concurrent.futures.ThreadPoolExecutor(len(self.held)) as pool:
            errors = [each.exception() for each in [pool.submit(call, factor) for factor in self.factors]]
        assert len({str(each) for each in errors}) == 1
        if errors[0] is not None:
            raise errors[0]
