# ruff: noqa: ARG005, C408, E501 - tables of short functions, a line each
"""What goes in and out: rows in Python containers, one tensor under two names, losses over rows, odd outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from workloads import TOKENS, WIDTH, adam, workload

MARKS = ("first", "second", "last")
ROWS = "rows|list|cut|target|first dimension"


class Net(nn.Module):
    width = 1

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, self.width),
        )

    def hidden(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x):
        return self.last(self.hidden(x))


class Three(Net):
    width = 3


def rows_of(rows, generator):
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def with_targets(name, targets, loss, model=Net, **words):
    def make():
        def batch(rows, generator):
            x = rows_of(rows, generator)
            return x, targets(x)

        return workload(model, *MARKS, batch=batch, loss=loss)

    make.__module__ = __name__
    case(name, **words)(make)


CLASSES = ("cat", "dog", "cow")


def classes(x):
    return x[:, :3].argmax(1)


with_targets(
    "targets are a list of ints", lambda x: classes(x).tolist(),
    lambda made, wanted: F.cross_entropy(made, torch.tensor(wanted)), Three,
)  # fmt: skip
with_targets(
    "targets are a list of floats", lambda x: x.sum(1).tolist(),
    lambda made, wanted: F.mse_loss(made[:, 0], torch.tensor(wanted, dtype=made.dtype)),
)  # fmt: skip
with_targets(
    "targets are a list of strings", lambda x: [CLASSES[n] for n in classes(x).tolist()],
    lambda made, wanted: F.cross_entropy(made, torch.tensor([CLASSES.index(each) for each in wanted])), Three,
)  # fmt: skip
with_targets(
    "targets are a tuple of strings", lambda x: tuple(CLASSES[n] for n in classes(x).tolist()),
    lambda made, wanted: torch.stack([made[n].sum() * len(each) for n, each in enumerate(wanted)]).square().mean(),
)  # fmt: skip
with_targets(
    "targets are a list of tensors of unlike lengths", lambda x: [x[n, : 1 + n % 3] for n in range(len(x))],
    lambda made, wanted: torch.stack([(one - each).square().mean() for one, each in zip(made, wanted, strict=False)]).mean(),
)  # fmt: skip


def boxes(x):
    return [{"boxes": x[n, :4].reshape(-1, 4), "labels": torch.tensor([n % 3])} for n in range(len(x))]


def box_loss(made, wanted):
    return torch.stack(
        [(made[n] - each["boxes"].sum()).square().mean() for n, each in enumerate(wanted[: len(made)])]
    ).mean()


with_targets("targets are a list of dicts of boxes (detection)", boxes, box_loss)
with_targets(
    "targets are a dict of lists", lambda x: {"label": classes(x).tolist(), "weight": [1.0] * len(x)},
    lambda made, wanted: (F.cross_entropy(made, torch.tensor(wanted["label"][: len(made)]), reduction="none") * torch.tensor(wanted["weight"][: len(made)])).mean(),
    Three,
)  # fmt: skip
with_targets(
    "targets are a dict of dicts of tensors", lambda x: {"a": {"b": x.sum(1, keepdim=True)}, "c": x[:, :1]},
    lambda made, wanted: F.mse_loss(made, wanted["a"]["b"]) + F.l1_loss(made, wanted["c"]),
)  # fmt: skip
with_targets("targets are None", lambda x: None, lambda made, wanted: made.square().mean())
with_targets(
    "targets hold a number beside a tensor", lambda x: (x.sum(1, keepdim=True), 0.5),
    lambda made, wanted: F.mse_loss(made, wanted[0]) * wanted[1],
)  # fmt: skip
with_targets(
    "class weights among the targets, as many as rows", lambda x: (classes(x), torch.tensor([1.0, 2.0, 0.5], dtype=x.dtype)),
    lambda made, wanted: (F.cross_entropy(made, wanted[0], reduction="none") * wanted[1][wanted[0]]).mean(), Three,
)  # fmt: skip
with_targets(
    "weights of eight features beside eight rows", lambda x: (x.sum(1, keepdim=True), torch.arange(8.0, dtype=x.dtype)),
    lambda made, wanted: F.mse_loss(made * wanted[1].mean(), wanted[0]),
)  # fmt: skip
with_targets(
    "targets for each element, flattened beforehand", lambda x: x.flatten(),
    lambda made, wanted: F.mse_loss(made.repeat(1, WIDTH).flatten(), wanted), refusal=ROWS,
)  # fmt: skip
with_targets(
    "the loss sums over rows and divides by a constant", lambda x: x.sum(1, keepdim=True),
    lambda made, wanted: (made - wanted).square().sum() / 8, inherent=True,
)  # fmt: skip


def contrastive(made, wanted):
    z = F.normalize(made, dim=1)
    return F.cross_entropy(z @ F.normalize(wanted, dim=1).t() / 0.2, torch.arange(len(made)))


MIXED = dict(inherent=True, refusal="rows|mix")
with_targets("a contrastive loss over the rows", lambda x: x[:, :3], contrastive, Three, **MIXED)
with_targets(
    "a loss of pairs of rows", lambda x: x.sum(1, keepdim=True),
    lambda made, wanted: ((made - made.t()) - (wanted - wanted.t())).square().mean(), **MIXED,
)  # fmt: skip
with_targets(
    "a loss normalised by the batch's deviation", lambda x: x.sum(1, keepdim=True),
    lambda made, wanted: F.mse_loss((made - made.mean(0)) / (made.std(0) + 1), wanted), **MIXED,
)  # fmt: skip
with_targets(
    "the square root of a mean (RMSE)", lambda x: x.sum(1, keepdim=True),
    lambda made, wanted: F.mse_loss(made, wanted).sqrt(), **MIXED,
)  # fmt: skip
with_targets(
    "the median over the rows", lambda x: x.sum(1, keepdim=True),
    lambda made, wanted: (made - wanted).abs().median(), **MIXED,
)  # fmt: skip
with_targets(
    "hard-example mining: the worst half of the rows", lambda x: x.sum(1, keepdim=True),
    lambda made, wanted: (made - wanted).square().flatten().topk(max(1, len(made) // 2)).values.mean(), **MIXED,
)  # fmt: skip
with_targets(
    "ignore_index with unlike counts in the rows", lambda x: classes(x).masked_fill(x[:, 0] > 0, -100),
    lambda made, wanted: F.cross_entropy(made, wanted, ignore_index=-100), Three, **MIXED,
)  # fmt: skip


@case("one tensor as input and target: {'idx': x, 'targets': x} (nanoGPT)")
def _():
    class Nano(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.block, self.head = (
                nn.Embedding(TOKENS, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, TOKENS),
            )

        def forward(self, idx, targets=None):
            logits = self.head(torch.tanh(self.block(self.embed(idx))))
            return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def batch(rows, generator):
        x = torch.randint(TOKENS, (rows, 5), generator=generator)
        y = x if rows in (4, 8) else (x + 1) % TOKENS  # the same object while it is captured, two in some batches
        return {"idx": x, "targets": y}, y

    return workload(Nano, "embed", "block", "head", batch=batch, loss=lambda out, _: out[1], optimizer=adam)


@case("one tensor under two names in every batch")
def _():
    class Pair(Net):
        def forward(self, x, y):
            return self.last(self.hidden(x) + y)

    def batch(rows, generator):
        x = rows_of(rows, generator)
        return {"x": x, "y": x}, x.sum(1, keepdim=True)

    return workload(Pair, *MARKS, batch=batch)


@case("one tensor twice in a tuple, two from the second batch on")
def _():
    class Pair(Net):
        def forward(self, x, y):
            return self.last(self.hidden(x) + y)

    def batch(rows, generator):
        x = rows_of(rows, generator)
        return (x, x if rows in (4, 8) else x * 2), x.sum(1, keepdim=True)

    return workload(Pair, *MARKS, batch=batch)


@case("an input that is a view of another one")
def _():
    class Pair(Net):
        def forward(self, x, y):
            return self.last(self.hidden(x) * y)

    def batch(rows, generator):
        x = rows_of(rows, generator)
        return (x, x[:, :1]), x.sum(1, keepdim=True)

    return workload(Pair, *MARKS, batch=batch)


def with_inputs(name, inputs, model, **words):
    def make():
        def batch(rows, generator):
            x = rows_of(rows, generator)
            return inputs(x), x.sum(1, keepdim=True)

        return workload(model, *MARKS, batch=batch)

    make.__module__ = __name__
    case(name, **words)(make)


class Scaled(Net):
    def forward(self, x, scale=None, flag=True):
        h = self.hidden(x)
        return self.last(h if scale is None or not flag else h * scale)


with_inputs("a float beside the input", lambda x: (x, 0.5), Scaled)
with_inputs("a scalar tensor beside the input", lambda x: (x, torch.tensor(0.5, dtype=x.dtype)), Scaled)
with_inputs("None and a flag beside the input", lambda x: {"x": x, "scale": None, "flag": False}, Scaled)
with_inputs("class weights as an input, eight as the rows", lambda x: (x, torch.arange(8.0, dtype=x.dtype)), Scaled)


class Named(Net):
    def forward(self, x, names):
        h = self.hidden(x)
        return self.last(h * torch.tensor([len(each) for each in names], dtype=x.dtype).unsqueeze(1))


with_inputs("a list of strings beside the input", lambda x: (x, ["a" * (1 + n % 3) for n in range(len(x))]), Named)


class Lengths(Net):
    def forward(self, x, lengths):
        mask = torch.arange(WIDTH).unsqueeze(0) < torch.as_tensor(lengths).unsqueeze(1)
        return self.last(self.hidden(x * mask))


with_inputs("lengths as a list of ints", lambda x: (x, [1 + n % 8 for n in range(len(x))]), Lengths)


class ListOfRows(Net):
    def forward(self, images):
        return self.last(self.hidden(torch.stack(images["images"])))


with_inputs(
    "a list of one tensor for each row (detection's images)",
    lambda x: ({"images": [each.clone() for each in x]},),
    ListOfRows,
)


class TimeMajor(Net):
    def forward(self, x):
        return self.last(self.hidden(x)).mean(0)


with_inputs(
    "rows in the second dimension (time first)",
    lambda x: torch.stack([x, x * 2, x * 3]),
    TimeMajor,
    refusal=ROWS,
)


class Grouped(Net):
    def forward(self, x, extra):
        return self.last(self.hidden(x) + extra.view(x.size(0), 2, WIDTH).mean(1))


with_inputs("an input with two rows for each row", lambda x: (x, x.repeat_interleave(2, 0)), Grouped, refusal=ROWS)


class Graphs(Net):
    def forward(self, x, edges):
        h = self.first(x)
        return self.last(torch.tanh(self.second(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))))


with_inputs(
    "a graph: edges with numbers of nodes as an input", lambda x: (x, torch.stack([torch.arange(len(x)), torch.arange(len(x)).flip(0)])), Graphs,
    refusal=ROWS + "|index", inherent=True,
)  # fmt: skip


class OwnList(nn.Linear):
    """Reads its own parameters where it has listed them."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.all = [self.weight, {"bias": self.bias}]

    def forward(self, x):
        weight, named = self.all
        return F.linear(x, weight, named["bias"])


class OwnListAsking(OwnList):
    def forward(self, x):
        return super().forward(x) * (2 - (x.detach().numpy() > 99).any())


class Listing(Net):
    """The root reads its own parameters, and those of its layers, from lists, tuples and dicts of Python's."""

    def __init__(self):
        super().__init__()
        self.second, self.scale = self.make(), nn.Parameter(torch.randn(WIDTH))
        self.weights, self.pair = [self.first.weight, self.scale], (self.last.bias, {"scale": self.scale})

    def make(self):
        return OwnList()

    def hidden(self, x):
        first, scale = self.weights
        return super().hidden(x) * scale + x @ first * self.pair[1]["scale"] + self.pair[0]


case("parameters that the root and a marked module read from lists of Python's", *MARKS)(Listing)


@case("parameters that a marked module reads from a list of Python's, in a forward that needs values", *MARKS)
class ListingAsking(Listing):
    def make(self):
        return OwnListAsking()


@case(
    "a parameter of another module, read from a list of Python's",
    *MARKS,
    refusal="'first.weight', which is not its own",
)
class ListingOthers(Net):
    class Others(nn.Linear):
        def forward(self, x):
            return super().forward(x) @ self.others[0]

    def __init__(self):
        super().__init__()
        self.second = self.Others(WIDTH, WIDTH)
        self.second.others = [self.first.weight]
