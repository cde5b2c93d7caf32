"""Evaluations that read, between partitions, what another partition holds, or what training does not use."""

from __future__ import annotations

import torch
from foreign.aliases import UsedAgain
from foreign.case import case
from torch import nn
from workloads import WIDTH

ENDS = ("first", "last")


@case("in eval mode alone, a parameter is read in front, and an unmarked layer called in the middle", *ENDS)
class EvalAlone(UsedAgain):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.first(x if self.training else x * self.scale))
        return self.last(y if self.training else self.part(y)).mean(1, keepdim=True)


@case("in eval mode alone, the last partition's statistics are read in front", *ENDS, inherent=True,
      refusal="needs the buffer 'last.running_mean'.*: 'last' does")  # fmt: skip
class ReadInFront(UsedAgain):
    def __init__(self):
        super().__init__()
        self.last = nn.BatchNorm1d(WIDTH)

    def front(self, x):
        return x if self.training else x + self.last.running_mean * self.last.weight

    def behind(self, y):
        return y


class Streaming(nn.Linear):
    """Moves a mean in evaluations, too."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("run", torch.zeros(WIDTH))

    def forward(self, x):
        self.move(x.detach().mean(0))
        return super().forward(x) - self.run

    def move(self, mean):
        self.run.mul_(0.9).add_(mean, alpha=0.1)


@case("in eval mode alone, a mean that the first partition moves is read behind the last one", *ENDS, inherent=True)
class MovedThenRead(UsedAgain):
    def __init__(self):
        super().__init__()
        self.first = self.moving()

    def moving(self):
        return Streaming()

    def front(self, x):
        return x

    def behind(self, y):
        return y + self.first.run


@case("in eval mode alone, a mean that the first partition assigns is read behind the last one", *ENDS, inherent=True)
class AssignedThenRead(MovedThenRead):
    class Assigning(Streaming):
        def move(self, mean):
            self.run = self.run * 0.9 + mean * 0.1

    def moving(self):
        return self.Assigning()


@case(
    "in eval mode alone, a mean that the first partition moves is read in front of it for what is behind the last one",
    *ENDS, inherent=True, refusal="reads 'first.run'.*before 'first' changes it",
)  # fmt: skip
class ReadThenMoved(MovedThenRead):
    def forward(self, x):
        before = self.first.run * 2
        y = self.last(torch.tanh(self.first(x)))
        return (y if self.training else y + before).mean(1, keepdim=True)
