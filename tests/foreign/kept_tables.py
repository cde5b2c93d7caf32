"""Tables that code between partitions keeps for its next call, with sequences of one length after another.

Of most kinds a long one begins with the short one; of some plain torch's result depends on which lengths came before.
"""

from __future__ import annotations

import torch
from foreign.case import case
from torch import nn
from workloads import WIDTH

MARKS = ("first", "second", "head")
DEPENDS = "depends on which sizes came before"


def lengths(rows, generator):
    """Steps for each number of rows: 6 for the usual ones, then more, and fewer of these in the evaluation."""
    x = torch.randn(rows, {8: 6, 5: 9, 6: 7}.get(rows, rows), WIDTH, generator=generator, dtype=torch.float64)
    return x, x.mean((1, 2))[:, None]


class Positioned(nn.Module):
    """Adds a table to its input, of which the longest so far is kept."""

    table = None

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.begin()

    def begin(self):
        self.table = None

    def made(self, n, x):
        return torch.arange(n).to(x)[:, None] / 8

    def grown(self, x):
        if self.table is None or self.table.shape[0] < x.shape[1]:
            self.table = self.made(x.shape[1], x)
        return self.table[: x.shape[1]]

    def placed(self, x):
        return x + self.grown(x)

    def forward(self, x):
        x = self.placed(x)
        return self.told((x + torch.tanh(self.second(torch.tanh(self.first(x))))).mean(1))

    def told(self, x):
        return self.head(x) * (1 if self.training else 0.5)  # so that an evaluation is one of its own


def grows(name, **words):
    return case(f"kept table: {name}", *MARKS, batch=lengths, **words)


grows("positions by number")(Positioned)


def halved(gradient):
    return gradient / 2


@grows("positions by number, and a hook between partitions")
class Hooked(Positioned):
    def told(self, x):
        if x.requires_grad:
            x.register_hook(halved)
        return super().told(x)


@grows("sinusoids, filled in by columns")
class Sinusoids(Positioned):
    def made(self, n, x):
        table, steps = torch.zeros(n, WIDTH, dtype=x.dtype), torch.arange(n, dtype=x.dtype)[:, None]
        table[:, 0::2] = torch.sin(steps * torch.arange(WIDTH // 2))
        table[:, 1::2] = torch.cos(steps * torch.arange(WIDTH // 2))
        return table


@grows("a causal mask by the longest length")
class CausalMask(Positioned):
    def made(self, n, x):
        return torch.full((n, n), float("-inf"), dtype=x.dtype).triu(1)

    def placed(self, x):
        n = x.shape[1]
        self.grown(x)
        return (x @ x.transpose(1, 2) + self.table[:n, :n]).softmax(-1) @ x


@grows("distances on both sides of the middle, read around it")
class Distances(Positioned):
    def placed(self, x):
        n = x.shape[1]
        if self.table is None or self.table.shape[0] < 2 * n - 1:
            self.table = torch.arange(1 - n, n).to(x)
        middle, steps = self.table.shape[0] // 2, torch.arange(n)
        near = self.table[middle - n + 1 : middle + n][steps[:, None] - steps + n - 1]
        return (x @ x.transpose(1, 2) - near.abs()).softmax(-1) @ x


@grows("made anew for each other length")
class Exact(Positioned):
    def grown(self, x):
        if self.table is None or self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1]).to(x)[:, None] / x.shape[1]
        return self.table


@grows("one for each length, in a dict")
class Keyed(Positioned):
    def begin(self):
        self.tables = {}

    def grown(self, x):
        n = x.shape[1]
        if n not in self.tables:
            self.tables[n] = torch.arange(n).to(x)[:, None] / n
        return self.tables[n]


@grows("one for each shape, in a dict by its text")
class ByText(Keyed):
    def grown(self, x):
        key = str(x.shape)
        if key not in self.tables:
            self.tables[key] = torch.arange(x.shape[1]).to(x)[:, None] / x.shape[1]
        return self.tables[key]


class Warping(nn.Linear):
    """Keeps grids by shapes in a dict of its own."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.grids = self.kept()

    def kept(self):
        return {}

    def forward(self, x):
        if str(x.shape) not in self.grids:
            self.grids[str(x.shape)] = torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[:, None]
        return super().forward(x + self.grids[str(x.shape)])


@grows("one for each shape, in a dict of each marked module (PWC-Net)")
class Warped(Positioned):
    def __init__(self):
        super().__init__()
        self.first, self.second = self.warping(), self.warping()

    def warping(self):
        return Warping()

    def placed(self, x):
        return x


GRIDS = {}


class WarpingTogether(Warping):
    def kept(self):
        return GRIDS


@grows("one for each shape, in a dict of all marked modules", refusal="may be an attribute of each module that fills")
class WarpedTogether(Warped):
    def warping(self):
        return WarpingTogether()


@grows("the longest in a dict")
class InDict(Positioned):
    def begin(self):
        self.tables = {}

    def grown(self, x):
        if "all" not in self.tables or self.tables["all"].shape[0] < x.shape[1]:
            self.tables["all"] = self.made(x.shape[1], x)
        return self.tables["all"][: x.shape[1]]


@grows("one for rows and steps, which grows with the rows")
class ByRows(Positioned):
    def placed(self, x):
        rows, n = x.shape[:2]
        if self.table is None or self.table.shape[0] < rows or self.table.shape[1] != n:
            self.table = torch.ones(rows, n, dtype=x.dtype).cumsum(1) / n
        return x * self.table[:rows, :, None]


class Positions(nn.Module):
    """A module of its own, called before each layer, which keeps the table in a buffer."""

    def __init__(self, scale, length):
        super().__init__()
        self.scale = scale
        self.register_buffer("table", torch.arange(length)[:, None] / (scale or max(length, 1)), persistent=False)

    def forward(self, x):
        n = x.shape[1]
        if self.table.shape[0] < n:
            self.table = torch.arange(n).to(x)[:, None] / (self.scale or n)
        return self.table[:n]


@grows("in a buffer of an unmarked module, before each layer")
class InBuffer(Positioned):
    scale, length = 8, 0

    def begin(self):
        self.positions = Positions(self.scale, self.length)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = x + torch.tanh(layer(x + self.positions(x)))
        return self.told(x.mean(1))


@grows("in a buffer that is long enough at first")
class InLongBuffer(InBuffer):
    length = 8


@grows("in a buffer, by the longest length", refusal=DEPENDS)
class InBufferByLongest(InBuffer):
    scale = 0


@grows("in a buffer that is long enough at first, by the longest length", refusal=DEPENDS)
class InLongBufferByLongest(InLongBuffer):
    scale = 0


@grows("counted from the middle of the longest length", refusal=DEPENDS)
class Centred(Positioned):
    def made(self, n, x):
        return (torch.arange(n) - n // 2).to(x)[:, None] / 4


@grows("in a dict, by the longest length", refusal=DEPENDS)
class InDictByLongest(InDict):
    def made(self, n, x):
        return torch.arange(n).to(x)[:, None] / n


@grows("another formula in eval mode", refusal=DEPENDS)
class ByMode(Positioned):
    def made(self, n, x):
        return torch.arange(n).to(x)[:, None] / (8 if self.training else 9)


@grows("another formula for long sequences (dynamic NTK)", refusal=DEPENDS)
class Scaled(Positioned):
    def made(self, n, x):
        return torch.arange(n).to(x)[:, None] / (8 if n <= 8 else n)


@grows("by the longest length, of a short part first and of all of it then", refusal=DEPENDS)
class TwiceByLongest(Positioned):
    def made(self, n, x):
        return torch.arange(n).to(x)[:, None] / n

    def placed(self, x):
        return torch.cat([x[:, :2] + self.grown(x[:, :2]), x + self.grown(x)], 1)


@grows("by the most rows so far", refusal=DEPENDS)
class ByMostRows(Positioned):
    def placed(self, x):
        rows, n = x.shape[:2]
        if self.table is None or self.table.shape[0] < rows or self.table.shape[1] != n:
            self.table = torch.ones(rows, n, dtype=x.dtype) / rows
        return x * self.table[:rows, :, None]


@grows("in a buffer that is long enough at first, then by another formula", refusal=DEPENDS)
class InOtherBuffer(InLongBuffer):
    def begin(self):
        super().begin()
        self.positions.scale = 9


@grows("no gradient passes where it is made", refusal=DEPENDS, inherent=True)
class Stopped(Positioned):
    def forward(self, x):
        h = self.first(x)
        with torch.set_grad_enabled(self.table is not None and torch.is_grad_enabled()):
            h = torch.tanh(h)
        return self.told((self.placed(x) + torch.tanh(self.second(h))).mean(1))
