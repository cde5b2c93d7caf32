"""In-place writes in the code between two marked layers, in every form that people write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from workloads import WIDTH, numbers, pairs, workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.model.workload import Workload


class Between(nn.Module):
    """Two layers, and `glue(h, x)` of the hidden values and the input between them."""

    def __init__(self, glue: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.glue = glue

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.glue(self.first(x), x)
        return self.last(torch.tanh(self.second(h)))


def between(name: str) -> Callable[[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], object]:
    def add(glue: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> object:
        def make() -> Workload:
            return workload(lambda: Between(glue), "first", "second", "last")

        make.__module__ = __name__
        return case(f"in place: {name}")(make)

    return add


@between("zeros_like of the input, filled from a shifted slice of it")
def _(h, x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return h + y


@between("zeros_like, filled from the hidden values")
def _(h, x):
    y = torch.zeros_like(h)
    y[:, 1:] = h[:, :-1]
    return y


@between("new_zeros of shape, shift right with a start value (T5)")
def _(h, x):
    y = x.new_zeros(x.shape)
    y[..., 1:] = x[..., :-1].clone()
    y[..., 0] = 0.5
    return h * y


@between("masked_fill_ on a value made from inputs")
def _(h, x):
    y = x.clone()
    y.masked_fill_(y > 0.5, -1.0)
    return h + y


@between("masked_fill_ on hidden values")
def _(h, x):
    h = h.clone()
    h.masked_fill_(x > 0.5, 0.0)
    return h


@between("a row of a causal mask set by index")
def _(h, x):
    m = torch.ones(WIDTH, WIDTH, dtype=h.dtype)
    m[0] = 0
    return h @ m


@between("the diagonal of a mask filled")
def _(h, x):
    m = torch.zeros(WIDTH, WIDTH, dtype=h.dtype)
    m.diagonal().fill_(1)
    return h @ m


@between("fill_diagonal_ on a mask")
def _(h, x):
    m = torch.full((WIDTH, WIDTH), 0.25, dtype=h.dtype)
    m.fill_diagonal_(2.0)
    return h @ m


@between("triu_ and masked_fill_ chained: a causal mask")
def _(h, x):
    m = torch.full((WIDTH, WIDTH), float("-inf"), dtype=h.dtype).triu_(1)
    return h @ torch.softmax(m, dim=-1)


@between("a view multiplied in place")
def _(h, x):
    y = x.clone()
    y.view(-1).mul_(2)
    return h + y


@between("a view of hidden values multiplied in place")
def _(h, x):
    y = h.clone()
    y.view(-1).mul_(2)
    return y


@between("one half of a chunk added to in place")
def _(h, x):
    y = x * 2
    left, _right = y.chunk(2, dim=1)
    left.add_(1)
    return h + y


@between("one part of a split written, the base read")
def _(h, x):
    y = x * 1
    parts = y.split([2, 3, 3], dim=1)
    parts[1].zero_()
    parts[2].mul_(parts[0].sum(1, keepdim=True))
    return h * y


@between("unbind's rows written")
def _(h, x):
    y = x + 1
    columns = y.unbind(1)
    columns[0].fill_(3.0)
    return h * y


@between("a transpose written through")
def _(h, x):
    y = torch.zeros(x.size(0), WIDTH, dtype=x.dtype)
    y.t()[2] = x[:, 0]
    return h + y


@between("narrow and copy_")
def _(h, x):
    y = torch.empty_like(x)
    y.narrow(1, 0, 4).copy_(x[:, 4:])
    y.narrow(1, 4, 4).copy_(h[:, :4])
    return y


@between("select and an in-place chain")
def _(h, x):
    y = x.clone()
    y.select(1, 3).mul_(2).add_(1)
    return h + y


@between("an expanded value cloned and written")
def _(h, x):
    y = torch.arange(WIDTH, dtype=x.dtype).expand(x.size(0), -1).clone()
    y[:, ::2] *= -1
    return h * y


@between("index_put_ with rows and columns")
def _(h, x):
    y = x.clone()
    columns = x.argmax(1)
    y[torch.arange(x.size(0)), columns] = 0.0
    return h + y


@between("index_put_ that accumulates")
def _(h, x):
    y = torch.zeros_like(x)
    columns = x.abs().argmax(1)
    y.index_put_((torch.arange(x.size(0)), columns), h[:, 0], accumulate=True)
    return h + y


@between("a boolean mask assigned to")
def _(h, x):
    y = h.clone()
    y[x < 0] = 0.1
    return y


@between("a boolean mask scaled: y[m] *= 2")
def _(h, x):
    y = h.clone()
    y[x < 0] *= 2
    return y


@between("scatter_ of ones (one-hot)")
def _(h, x):
    one_hot = torch.zeros_like(x)
    one_hot.scatter_(1, x.argmax(1, keepdim=True), 1.0)
    return h * one_hot + h


@between("scatter_add_ of hidden values")
def _(h, x):
    sums = torch.zeros_like(h)
    sums.scatter_add_(1, torch.arange(WIDTH).flip(0).expand(x.size(0), -1), h)
    return sums


@between("index_add_ and index_copy_")
def _(h, x):
    y = torch.zeros_like(h)
    y.index_add_(1, torch.tensor([1, 2, 2, 0, 5, 6, 7, 3]), h)
    y.index_copy_(1, torch.tensor([0]), x[:, :1])
    return y


@between("out= of add")
def _(h, x):
    y = torch.empty_like(x)
    torch.add(x, 1.0, out=y)
    return h + y


@between("out= of a matrix product into a slice")
def _(h, x):
    y = torch.zeros(x.size(0), 2, WIDTH, dtype=x.dtype)
    torch.mul(x, 3.0, out=y[:, 1])
    return h + y.sum(1)


@between("augmented assignment on a slice")
def _(h, x):
    y = x.clone()
    y[:, 2:5] += 1.5
    y[:, :2] -= x[:, 2:4]
    return h + y


@between("+= on the hidden values, twice")
def _(h, x):
    h += x
    h *= 2
    return h


@between("relu_ and functional inplace=True")
def _(h, x):
    y = x - 0.2
    F.relu(y, inplace=True)
    h = F.leaky_relu(h, 0.1, inplace=True)
    return h + y


@between("clamp_, exp_ and div_ of a statistic")
def _(h, x):
    s = x.std(1, keepdim=True)
    s.clamp_(min=0.1).log_().exp_()
    return h.div_(s)


@between("a write after a read: the old value is used first")
def _(h, x):
    y = x.clone()
    before = y * 2
    y.zero_()
    y[:, 0] = 1
    return h * y + before


@between("a view taken before a write and read after it")
def _(h, x):
    y = x.clone()
    tail = y[:, 4:]
    y.mul_(3)
    return h + torch.cat([tail, tail], dim=1)


@between("a loop that fills columns one by one")
def _(h, x):
    y = torch.zeros_like(h)
    y[:, 0] = h[:, 0]
    for i in range(1, WIDTH):
        y[:, i] = 0.5 * y[:, i - 1].clone() + h[:, i]
    return y


@between("rows written through a reshaped view")
def _(h, x):
    y = x.reshape(x.size(0), 2, 4).clone()
    y[:, 0, :].add_(y[:, 1, :])
    return h + y.flatten(1)


@between("set by where and item assignment of a scalar tensor")
def _(h, x):
    y = torch.zeros(3, dtype=x.dtype)
    y[1] = 3.0
    y[2] = torch.tensor(1.0)
    return h / y[1] + y[2]


@between("an empty buffer written by two views (rotary halves)")
def _(h, x):
    y = torch.empty(h.shape, dtype=h.dtype)
    y[..., ::2] = -h[..., 1::2]
    y[..., 1::2] = h[..., ::2]
    return h + y * 0.5


@between("lerp_, addcmul_ and copysign_")
def _(h, x):
    y = x.clone()
    y.lerp_(torch.ones_like(y), 0.3).addcmul_(x, x, value=0.5)
    return h.addcmul(y, x)


@between("no_grad around a write into hidden values")
def _(h, x):
    h = h * 1.0
    with torch.no_grad():
        h[:, 0] = 0.0
    return h


@between("in place on a detached alias: the base changes as well")
def _(h, x):
    h = h * 1.0
    h.detach().mul_(0.5)
    return h


@between("normalisation in place on .data")
def _(h, x):
    y = x.clone()
    y.data.div_(y.data.norm(dim=1, keepdim=True))
    return h * y


@between("squeeze_, unsqueeze_ and t_ on a fresh value")
def _(h, x):
    y = x.sum(1)
    y.unsqueeze_(1)
    return h + y


@between("copy_ of the input into part of a padded block")
def _(h, x):
    padded = torch.zeros(x.size(0), WIDTH + 2, dtype=x.dtype)
    padded[:, 1:-1].copy_(x)
    return h + padded[:, 2:] - padded[:, :-2]


@between("zeros(rows) filled in a Python loop over columns")
def _(h, x):
    total = torch.zeros(x.size(0), dtype=x.dtype)
    for column in x.unbind(1):
        total += column
    return h + total[:, None]


def same(rows: int, generator: torch.Generator) -> Any:
    """One dict as input and target, as scripts that hand a batch through have it."""
    x, y = numbers(rows, generator)
    batch = {"x": x, "y": 3 * y}
    return (batch,), batch


def one(rows: int, generator: torch.Generator) -> Any:
    """One tensor as input and target."""
    x = 10 * numbers(rows, generator)[0]
    return x, x


def two_names(rows: int, generator: torch.Generator) -> Any:
    x, y = numbers(rows, generator)
    return {"x": x, "kept": x}, y


def side_by_side(rows: int, generator: torch.Generator) -> Any:
    """Two inputs in one memory, none of whose elements is in both."""
    (x, kept), y = pairs(rows, generator)
    return {"x": x, "kept": kept}, y


def apart(rows: int, generator: torch.Generator) -> Any:
    inputs, batch = same(rows, generator)
    return inputs, batch["y"].clone()


MARKS = ("first", "second", "last")
OF_DICT = {"batch": same, "loss": lambda made, batch: F.mse_loss(made, batch["y"])}


class Plain(Between):
    def __init__(self) -> None:
        super().__init__(lambda h, _: h)


@case("one dict as input and target, in which the root puts a value", *MARKS, **OF_DICT, refusal="among the targets")
class PutsTarget(Plain):
    def forward(self, batch):
        batch["y"] = batch["y"] / 3
        return super().forward(batch["x"])


@case("one dict as input and target, in which nothing changes", *MARKS, **OF_DICT)
class ReadsTarget(Plain):
    def forward(self, batch):
        return super().forward(batch["x"])


@case("a dict among the inputs, of which entries are popped", *MARKS, batch=apart)
class PopsInput(Plain):
    def forward(self, batch):
        return super().forward(batch.pop("x") + batch.pop("y"))


@case(
    "one tensor as input and target, which the root divides in place",
    *MARKS,
    batch=one,
    loss=lambda made, x: F.mse_loss(made, x.mean(1, keepdim=True)),
    refusal="writes in place to an input",
)
class DividesTarget(Plain):
    def forward(self, x):
        x.div_(10)
        return super().forward(x)


class WritesOne(Plain):
    def forward(self, x, kept):
        x[:, ::2] = 0
        return super().forward(x) + kept.sum(1, keepdim=True)


case(
    "one tensor under two names, the root writes to the one and reads the other",
    *MARKS,
    batch=two_names,
    refusal="writes in place to an input",
)(WritesOne)
case("two inputs side by side in one memory, the root writes to the one", *MARKS, batch=side_by_side)(WritesOne)


def columns(rows: int, generator: torch.Generator) -> Any:
    """Inputs and target side by side in one table: their addresses meet, and no element is in both."""
    table = torch.randn(rows, WIDTH + 1, generator=generator, dtype=torch.float64)
    return table[:, :WIDTH], table[:, WIDTH:]


@case("columns of a table as input and target, the root writes to the one", *MARKS, batch=columns)
class WritesColumn(Plain):
    def forward(self, x):
        x[:, 0] *= 0.5
        return super().forward(x)


@case(
    "one tensor as input and target, which the root divides through a view that a module returns",
    *MARKS,
    batch=one,
    loss=lambda made, x: F.mse_loss(made, x.mean(1, keepdim=True)),
    refusal="writes in place to an input",
)
class DividesView(Plain):
    def __init__(self):
        super().__init__()
        self.flat = nn.Unflatten(1, (WIDTH, 1))

    def forward(self, x):
        h = self.flat(x)
        h.div_(10)
        return super().forward(h.squeeze(2))


def twice(rows: int, generator: torch.Generator) -> Any:
    x, y = numbers(rows, generator)
    batch = {"x": x}
    return {"a": batch, "b": batch}, y


@case("one dict as two inputs, the root changes the one", *MARKS, batch=twice, refusal="twice among the inputs")
class PutsTwice(Plain):
    def forward(self, a, b):
        a["x"] = a["x"] * 2
        return super().forward(b["x"])


def shifted(rows: int, generator: torch.Generator) -> Any:
    """The next rows are the targets."""
    table = torch.randn(2 * rows, WIDTH, generator=generator, dtype=torch.float64)
    return table[: rows // 2 * 2], table[rows // 2 : rows // 2 + rows // 2 * 2]


@case(
    "rows of a table as input and later ones as target, the root divides them in place",
    *MARKS,
    batch=shifted,
    loss=lambda made, x: F.mse_loss(made, x.mean(1, keepdim=True)),
    refusal="writes in place to an input",
)
class DividesRows(DividesTarget):
    pass
