# ruff: noqa: ARG005, PLW0108 - decorators on one line
"""What models give back, and losses inside of them."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from foreign.containers import MARKS, Net, rows_of
from torch import nn
from workloads import TOKENS, WIDTH, adam, next_token, numbers, tokens, workload


@dataclasses.dataclass
class Made:
    """What a model gives."""

    score: torch.Tensor
    hidden: torch.Tensor | None = None
    kind: str = "score"


class Tupled(NamedTuple):
    """What a model gives."""

    score: torch.Tensor
    hidden: torch.Tensor


class Holder:
    """An output of no known type."""

    def __init__(self, score):
        self.score = score


def with_output(name, output, score, **words):
    made = type(
        "Output", (Net,), {"forward": lambda self, x: output(self.last(self.hidden(x)), x), "__module__": __name__}
    )
    case(name, *MARKS, loss=lambda out, wanted: F.mse_loss(score(out), wanted), **words)(made)


with_output("a plain dataclass as output", lambda y, x: Made(y), lambda out: out.score)
with_output("a dataclass with two tensors as output", lambda y, x: Made(y, y * 2), lambda out: out.score + out.hidden)
with_output("a NamedTuple as output", lambda y, x: Tupled(y, x), lambda out: out.score)
with_output(
    "an OrderedDict as output",
    lambda y, x: collections.OrderedDict(out=y, aux=y * 2),
    lambda out: out["out"] + out["aux"],
)
with_output(
    "nested dicts, lists and None as output",
    lambda y, x: {"a": [y, None, {"b": (y * 2, 3)}]},
    lambda out: out["a"][0] + out["a"][2]["b"][0] / out["a"][2]["b"][1],
)
with_output(
    "an object of a class of the user's as output",
    lambda y, x: Holder(y),
    lambda out: out.score,
    refusal="returns|output",
)
with_output(
    "a torch.distributions object as output",
    lambda y, x: torch.distributions.Normal(y, 1.0, validate_args=False),
    lambda out: out.loc,
    refusal="returns|output",
)
with_output("a list of outputs of several stages", lambda y, x: [y, y + 1, y + 2], lambda out: sum(out) / 3)
with_output("a string beside the output", lambda y, x: (y, "score"), lambda out: out[0])
with_output("a number of Python worked out from shapes", lambda y, x: (y, x.size(1) * 2), lambda out: out[0] * out[1])


class Centred(nn.Module):
    """RevIN: gives what it normalises, and a function that undoes that."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        return (x - mean) * self.gain, lambda y: y / self.gain.mean() + mean


class Undone(nn.Module):
    """Calls what it is given."""

    def forward(self, y, back):
        return back(y)


@case("an unmarked module returns a function, and another is given it", *MARKS)
class Reversed(Net):
    def __init__(self):
        super().__init__()
        self.centred, self.undone = Centred(), Undone()

    def forward(self, x):
        x, back = self.centred(x)
        return self.undone(super().forward(x), back)


class Dual(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, text, image):
        t, i = F.normalize(self.text(text), dim=1), F.normalize(self.image(image), dim=1)
        logits = self.scale * t @ i.t()
        return F.cross_entropy(logits, torch.arange(len(text)) * len(image) // len(text))


def dual(name, times, **words):
    def make():
        def batch(rows, generator):
            x = rows_of(rows, generator)
            return {"text": torch.cat([x] * times), "image": x}, x

        return workload(Dual, "text", "image", batch=batch, loss=lambda out, _: out)

    make.__module__ = __name__
    case(name, inherent=True, refusal="rows|mix|first dimension", **words)(make)


dual("CLIP's loss inside the model", 1)
dual("two inputs with rows of their own (two texts for an image)", 2)


@case(
    "the loss inside the model, targets among the inputs",
    *MARKS,
    loss=lambda out, _: out["loss"],
    batch=lambda rows, generator: (dict(zip(("x", "labels"), numbers(rows, generator), strict=True)), None),
)
class LossInside(Net):
    def forward(self, x, labels=None):
        score = super().forward(x)
        return {"loss": F.mse_loss(score, labels) if labels is not None else None, "score": score}


@case("reduction sum", *MARKS, reduction="sum", loss=lambda made, wanted: F.mse_loss(made, wanted, reduction="sum"))
class Summed(Net):
    pass


@case(
    "one row as a batch of one in the model: squeeze()", "embed", "head", batch=tokens, loss=next_token, optimizer=adam
)
class Squeezed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids):
        return self.head(self.embed(ids.unsqueeze(1)).squeeze(1))


def between(name, output, score, **words):
    """A marked module that gives something back that is no plain tensor."""

    class Layer(nn.Linear):
        def forward(self, x):
            return output(super().forward(x))

    class Passing(Net):
        def __init__(self):
            super().__init__()
            self.second = Layer(WIDTH, WIDTH)

        def hidden(self, x):
            return torch.tanh(score(self.second(torch.tanh(self.first(x)))))

    case(f"a marked module gives back {name}", *MARKS, **words)(Passing)


between("a dataclass", lambda y: Made(y, y * 2), lambda out: out.score + out.hidden)
between("a NamedTuple", lambda y: Tupled(y, y * 2), lambda out: out.score + out.hidden)
between(
    "nested dicts with None", lambda y: {"a": (y, None), "b": {"c": y * 2}}, lambda out: out["a"][0] + out["b"]["c"]
)
between("a tensor and a number", lambda y: (y, 3), lambda out: out[0] * out[1])
between("a tensor and a size", lambda y: (y, y.size(1)), lambda out: out[0] / out[1])
between("an object of the user's", Holder, lambda out: out.score, refusal="returns|gives|Holder")
between("a list that grows", lambda y: [y, y * 2, y * 3], lambda out: sum(out) / 3)
between("a complex tensor", lambda y: torch.complex(y, y * 2), lambda out: out.real + out.imag)
between("a sparse tensor", lambda y: y.to_sparse(), lambda out: out.to_dense(), refusal="sparse")
between("a bool tensor beside a float one", lambda y: (y, y > 0), lambda out: out[0] * out[1])
between("rows that are not the batch's", lambda y: (y, y.mean(0)), lambda out: out[0] - out[1], inherent=True)
between("an empty tensor", lambda y: (y, y[:, :0]), lambda out: out[0] + out[1].sum())


class Level(enum.IntFlag):
    """Of which two are one member without a name of its own."""

    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Normalised:
    """Changes what it is given when it is made, and keeps what is no field."""

    score: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        self.score = self.score / 2
        self.total, self.more = self.score * 2, self.score * 3


between("numbers of NumPy's", lambda y: (y, np.float64(0.5), np.int64(2)), lambda out: out[0] * out[1] + out[2])
between("members of a flag together", lambda y: (y, Level.LOW | Level.HIGH), lambda out: out[0] * int(out[1]))
between("a set of members", lambda y: (y, {Level.LOW, Level.HIGH}), lambda out: out[0] * sum(map(int, out[1])))
between("a dataclass that computes when it is made", Normalised, lambda out: out.score + out.total + out.more)


@dataclasses.dataclass
class Filed(collections.OrderedDict):
    """A dict, too, as outputs of libraries are, of which this is none."""

    score: torch.Tensor = None
    hidden: torch.Tensor = None

    def __post_init__(self):
        self.update(score=self.score, hidden=self.hidden)


between("a dataclass that is a dict, too", lambda y: Filed(y, y * 2), lambda out: out["score"] + out.hidden)
