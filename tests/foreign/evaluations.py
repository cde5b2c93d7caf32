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


class Biased(nn.Module):
    """Attention with learnt biases by place, which are looked up once for all evaluations (LeViT)."""

    def __init__(self):
        super().__init__()
        self.inner, self.biases = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(4))
        self.register_buffer("places", (torch.arange(4)[:, None] - torch.arange(4)).abs(), persistent=False)

    @torch.no_grad()
    def train(self, mode=True):
        super().train(mode)
        self.switch(mode)

    def switch(self, mode):
        if not mode:
            self.table = self.looked_up()
        elif hasattr(self, "table"):
            del self.table

    def looked_up(self):
        return self.biases[self.places]

    def forward(self, x):
        h = self.inner(x).unflatten(1, (4, -1))
        bias = self.looked_up() if self.training else self.kept()
        return ((h @ h.transpose(1, 2) + bias).softmax(-1) @ h).flatten(1)

    def kept(self):
        return self.table


class Turning(Biased):
    """As LeViT's own: `train()` of a new model looks them up, too."""

    def switch(self, mode):
        if mode and hasattr(self, "table"):
            del self.table
        else:
            self.table = self.looked_up()


class InDict(Biased):
    """As later versions: the first evaluation looks them up for each device."""

    def __init__(self):
        super().__init__()
        self.tables = {}

    def switch(self, mode):
        if mode:
            self.tables = {}

    def kept(self):
        key = str(self.biases.device)
        if key not in self.tables:
            self.tables[key] = self.looked_up()
        return self.tables[key]


class Asking(Biased):
    """Needs values beside them."""

    def kept(self):
        return self.table * (1 + (self.inner.weight.detach().numpy() > 9).sum())


def attending(name, kind, *marks, **words):
    own = {"make": lambda _: kind(), "behind": lambda _, y: y, "__module__": __name__}
    made = type(kind.__name__, (UsedAgain,), own)
    case(f"biases that eval() looks up: {name}", *marks, *ENDS, **words)(made)


attending("marked", Biased, "part")
attending("unmarked", Biased)
attending("whose train() turns", Turning, "part")
attending("in a dict, at the first evaluation", InDict, "part")
attending("in a forward that needs values", Asking, "part")


@case("biases that eval() looks up: read by the root", *ENDS, refusal="outside its partitions, which eval.. of")
class ReadByRoot(Biased):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(super().forward(self.first(x)))
