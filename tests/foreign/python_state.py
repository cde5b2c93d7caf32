# ruff: noqa: ARG005 - decorators on one line
"""State in Python objects, randomness that is not torch's, and questions that forward asks about how it is run."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import io
import itertools
import random
import threading
import weakref
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from foreign.imported_state import TRACKER
from torch import nn
from workloads import WIDTH, workload

MARKS = ("first", "second", "last")
STEP = contextvars.ContextVar("step", default=0)
STATE = "state|counter|attribute|changes|between two|python|random"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), self.make(), nn.Linear(WIDTH, 1)

    def make(self):
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def inside(name, **words):
    """A layer whose forward has the habit, marked."""

    def add(layer):
        made = type(
            layer.__name__ + "Net", (Net,), {"make": lambda self: layer(WIDTH, WIDTH), "__module__": layer.__module__}
        )
        case(f"{name}, in a marked module", *MARKS, **words)(made)
        return layer

    return add


@case("call counter at the root", *MARKS, inherent=True, refusal=STATE)
class RootCounter(Net):
    calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x / (1 + 0.1 * self.calls))


@case("the root notes how many rows it has, and reads that behind", *MARKS)
class NotesRows(Net):
    def forward(self, x):
        self.rows = x.shape[0]
        self.kept = [x.new_ones(self.rows, 1)]
        return super().forward(x) * self.kept[0]


@case("states of a recurrence that the root makes anew", *MARKS)
class NotesStates(Net):
    rows, states = 0, None

    def begin(self, rows):
        self.rows, self.states = rows, (torch.zeros(rows, WIDTH), [rows])

    def forward(self, x):
        self.begin(len(x))
        self.states = (torch.tanh(self.first(x) + self.states[0]), self.states[1])
        return self.last(self.second(self.states[0]))


@case("rows noted in training, read in evaluations", *MARKS, refusal=STATE + "|in one mode alone")
class ReadsRowsElsewhere(Net):
    rows = 1

    def forward(self, x):
        if self.training:
            self.rows = x.shape[0]
        return super().forward(x) / self.rows


@case("a mean noted in evaluations, which training looks for", *MARKS, refusal="in one mode alone")
class NotedMean(Net):
    def forward(self, x):
        h = self.first(x)
        if not self.training:
            self.best = h.detach().mean(0)
        elif hasattr(self, "best"):
            h = h - self.best
        return self.last(self.second(h))


class Table(Net):
    """Keeps a table that its input's width decides, beside flags."""

    def table(self, x):
        if not hasattr(self, "kept") or self.kept.shape[0] < x.shape[1]:
            self.kept = torch.arange(x.shape[1], device=x.device).to(x) / 10
        return self.kept[: x.shape[1]]

    def note(self):
        if not hasattr(self, "seen"):
            self.seen = True

    def forward(self, x):
        x = x + self.table(x)
        self.note()
        return super().forward(x)


case("a table that is kept, and a flag of the first time", *MARKS)(Table)


@case("a table that is kept, and a flag of the first evaluation", *MARKS)
class EvaluatedTable(Table):
    def note(self):
        if not self.training:
            super().note()


@case("a table that is kept is another one where a flag is set", *MARKS, refusal="FlaggedTable.seen outside its part")
class FlaggedTable(Table):
    def table(self, x):
        return super().table(x) * (1 if hasattr(self, "seen") else 2)


@case("a table is made where a flag is not set yet", *MARKS, refusal="FirstTable.seen outside its partitions")
class FirstTable(Table):
    def table(self, x):
        if not hasattr(self, "seen"):
            self.kept = torch.arange(x.shape[1], device=x.device).to(x) / 10
        return self.kept


@case("a table that is kept, and a counter that scales", *MARKS, refusal="CountedTable.calls outside its partitions")
class CountedTable(Table):
    calls = 0

    def note(self):
        self.calls += 1

    def table(self, x):
        return super().table(x) * (1 + 0.1 * self.calls)


@case("a flag that few rows set", *MARKS, inherent=True, refusal="another value for these inputs")
class FewRows(Net):
    def __init__(self):
        super().__init__()
        self.few = False

    def forward(self, x):
        if x.shape[0] < 5:
            self.few = True
        return super().forward(x * 0.5 if self.few else x)


@case("dropout with one mask for two calls, reset by the root, unmarked", "first", "last", random=True)
class LockedTwice(Net):
    def make(self):
        class Locked(nn.Module):
            mask = None

            def forward(self, x):
                if self.training:
                    self.mask = torch.bernoulli(torch.full_like(x, 0.5)) if self.mask is None else self.mask
                    return x * self.mask
                return x

        return Locked()

    def forward(self, x):
        self.second.mask = None
        return self.last(self.second(torch.tanh(self.second(self.first(x)))))


@case("the rows of the forward before", *MARKS, refusal=STATE)
class ReadsRowsBefore(Net):
    rows = 1

    def forward(self, x):
        before, self.rows = self.rows, len(x)
        return super().forward(x) / before


@case("the rows of the forward before, by vars", *MARKS, refusal=STATE)
class ReadsRowsByVars(Net):
    def forward(self, x):
        before = vars(self).get("rows", 1)
        self.rows = len(x)
        return super().forward(x) / before


@case("rows that a marked module reads of the root", *MARKS, refusal=STATE)
class RowsReadInside(Net):
    def __init__(self):
        super().__init__()
        self.second.register_forward_hook(lambda module, args, output: output / self.rows)

    def forward(self, x):
        self.rows = x.shape[0]
        return super().forward(x)


class RevIN(nn.Module):
    """Instance normalisation that is taken back at the end, as PatchTST has it: called twice."""

    def forward(self, x, mode):
        if mode == "norm":
            self.mean, self.deviation = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True).detach()
            return (x - self.mean) / self.deviation
        return x * self.deviation + self.mean


class NormedBuffers(RevIN):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, WIDTH))
        self.register_buffer("deviation", torch.ones(1, WIDTH))

    def forward(self, x, mode):
        if mode == "norm":
            self.mean, self.deviation = x.detach()[:1] * 0.5, x.detach()[:1] ** 2 + 1
            return (x - self.mean) / self.deviation
        return x * self.deviation.mean() + self.mean.mean()


class NormedNumbers(RevIN):
    def __init__(self):
        super().__init__()
        self.mean, self.deviation = 0.0, 1.0


class Renormed(Net):
    kind = RevIN

    def __init__(self):
        super().__init__()
        self.around = self.kind()

    def forward(self, x):
        return self.around(super().forward(self.around(x, "norm")), "denorm")


for each in (RevIN, NormedBuffers, NormedNumbers):
    made = type(f"Renormed{each.__name__}", (Renormed,), {"kind": each, "__module__": __name__})
    case(f"{each.__name__}, unmarked, called at both ends", *MARKS, inherent=each is NormedBuffers)(made)
    case(f"{each.__name__}, marked, called at both ends", *MARKS, "around", refusal="called again")(made)


class Centred(nn.Module):
    """A container of marked modules that follows their outputs in a buffer of its own, which it replaces."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.inner(x) - self.centre
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * x.detach().mean(0)
        return x


@case("a buffer that a container of marked modules replaces", "first", "second.inner", "last", inherent=True)
class CentredNet(Net):
    def make(self):
        return Centred()


@case("a buffer that a container of marked modules replaces by one of another shape", "first", "second.inner", "last",
      refusal="in the place of 'second.centre'", inherent=True)  # fmt: skip
class WidenedNet(Net):
    def make(self):
        class Widened(Centred):
            def forward(self, x):
                y = super().forward(x)
                self.centre = torch.stack([self.centre.mean()] * WIDTH)[None]
                return y

        return Widened()


class Integrating(nn.Module):
    """A neuron that leaks, reset by whoever has it."""

    potential = None

    def reset(self):
        self.potential = None

    def forward(self, x):
        self.potential = x if self.potential is None else 0.5 * self.potential + x
        return torch.sigmoid(self.potential)


class Spiking(Net):
    def make(self):
        return Integrating()

    def forward(self, x):
        self.second.reset()
        return sum(self.last(self.second(self.first(x) * n)) for n in range(1, 4))


case("a neuron with a potential that the root resets, unmarked", "first", "last")(Spiking)
case("a neuron with a potential that the root resets, marked", *MARKS, refusal="from outside|code outside")(Spiking)


class Patient(nn.Module):
    """It does something else from its tenth call since the last reset on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x if self.calls > 10 else torch.tanh(x)


@case("a count that the root sets to what it is, marked", *MARKS, refusal="code outside of it reads or sets")
class ResetCount(Net):
    def make(self):
        return Patient()

    def forward(self, x):
        self.second.calls = 0
        return super().forward(x)


@case("a count that the root sets to what it is, unmarked", "first", "last")
class ResetCountUnmarked(ResetCount):
    pass


class Twice(Net):
    def forward(self, x):
        return self.last(self.second(torch.tanh(self.second(self.first(x)))))


@case("doubled by the first call alone, unmarked, called twice", "first", "last", refusal=STATE)
class FirstDoubled(Twice):
    def make(self):
        class First(nn.Linear):
            first = True

            def forward(self, x):
                y = super().forward(x) * (2 if self.first else 1)
                self.first = False
                return y

        return First(WIDTH, WIDTH)


@case("a table for the width, kept by the first call for the second, unmarked", "first", "last")
class KeptTable(Twice):
    def make(self):
        class Turned(nn.Module):
            width, table = 0, None

            def forward(self, x):
                if self.width != x.shape[1]:
                    self.width, self.table = x.shape[1], torch.cos(torch.arange(x.shape[1], dtype=x.dtype))
                return x * self.table

        return Turned()


@case("the last output, which nobody reads, kept by a module called twice, unmarked", "first", "last")
class KeptOutput(Twice):
    def make(self):
        class Keeping(nn.Linear):
            def forward(self, x):
                self.seen = super().forward(x)
                return self.seen

        return Keeping(WIDTH, WIDTH)


@case("what the first call pushes and the second pops, unmarked", "first", "last")
class PushedAndPopped(Net):
    def make(self):
        class Stack(nn.Module):
            def __init__(self):
                super().__init__()
                self.held = []

            def forward(self, x):
                if not self.held:
                    self.held.append(x)
                    return x
                return x + self.held.pop()

        return Stack()

    def forward(self, x):
        return self.last(self.second(torch.tanh(self.second(self.first(x)))))


@inside("call counter", inherent=True, refusal=STATE)
class Counter(nn.Linear):
    calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x) / (1 + 0.1 * self.calls)


@case("counter in a global of the model's module", *MARKS, inherent=True, refusal=STATE)
def _():
    calls = itertools.count(1)

    class GlobalCounter(Net):
        def forward(self, x):
            return super().forward(x / next(calls) if self.training else x)

    return workload(GlobalCounter, *MARKS)


@case("LayerDrop by random.random() at the root", "first", "layers.*", "last", inherent=True, refusal=STATE)
class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            if self.training and random.random() < 0.4:
                continue
            x = x + torch.tanh(layer(x))
        return self.last(x)


@case("LayerDrop by np.random at the root", "first", "layers.*", "last", inherent=True, refusal=STATE)
class NumpyLayerDrop(LayerDrop):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            if np.random.uniform() > 0.4 or not self.training:
                x = x + torch.tanh(layer(x))
        return self.last(x)


@case(
    "LayerDrop by torch.rand([]) at the root (transformers)",
    "first",
    "layers.*",
    "last",
    random=True,
    refusal="value|traced|random",
)
class TorchLayerDrop(LayerDrop):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.4:
                continue
            x = x + torch.tanh(layer(x))
        return self.last(x)


@inside("layer skipped by random.random()", random=True)
class Skipped(nn.Linear):
    def forward(self, x):
        return x if self.training and random.random() < 0.5 else super().forward(x)


@inside("noise of np.random", random=True)
class NumpyNoise(nn.Linear):
    def forward(self, x):
        scale = np.random.normal() if self.training else 1.0
        return super().forward(x) * scale


@case("mixup by np.random.beta at the root", *MARKS, inherent=True, refusal=STATE)
class Mixup(Net):
    def forward(self, x):
        share = np.random.beta(1.0, 1.0) if self.training else 1.0
        return super().forward(x * share + x.flip(1) * (1 - share))


@case("a layer chosen by random.choice at the root", "first", "layers.*", "last", inherent=True, refusal=STATE)
class Choice(LayerDrop):
    def forward(self, x):
        layer = random.choice(list(self.layers)) if self.training else self.layers[0]
        return self.last(torch.tanh(layer(self.first(x))))


@case("heads in turn by itertools.cycle", "first", "layers.*", "last", inherent=True, refusal=STATE + "|never calls")
class Cycle(LayerDrop):
    def __init__(self):
        super().__init__()
        self.turns = itertools.cycle(range(4))

    def forward(self, x):
        layer = self.layers[next(self.turns)] if self.training else self.layers[0]
        return self.last(torch.tanh(layer(self.first(x))))


@case("stochastic depth by torch.rand for each row", "first", "layers.*", "last", random=True)
class StochasticDepth(LayerDrop):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            keep = (torch.rand(x.size(0), 1) < 0.8).to(x.dtype) if self.training else 1.0
            x = x + torch.tanh(layer(x)) * keep
        return self.last(x)


@case("dropout", "first", "layers.*", "last", random=True)
class Dropout(LayerDrop):
    def forward(self, x):
        for layer in (self.first, *self.layers):
            x = F.dropout(torch.tanh(layer(x)), 0.2, self.training)
        return self.last(x)


@case("a factor annealed in forward at the root", *MARKS, inherent=True, refusal=STATE)
class AnnealedFactor(Net):
    factor = 1.0

    def forward(self, x):
        if self.training:
            self.factor *= 0.7
        return super().forward(x * self.factor)


@case("dropout's rate set in forward to nothing", *MARKS, refusal="set from outside")
class RateSet(Net):
    def make(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x):
        self.second[1].p = 0.0
        return super().forward(x)


@case("dropout's rate annealed in forward", *MARKS, random=True, refusal=STATE + "|dropout")
class RateAnnealed(RateSet):
    def forward(self, x):
        if self.training:
            self.second[1].p *= 0.5
        return Net.forward(self, x)


@case("a config object that forward anneals and a block reads", *MARKS, inherent=True, refusal=STATE + "|share|object")
class SharedConfig(Net):
    class Layer(nn.Linear):
        def __init__(self, config):
            super().__init__(WIDTH, WIDTH)
            self.config = config

        def forward(self, x):
            return super().forward(x) * self.config["scale"]

    def __init__(self):
        self.config = {"scale": 1.0}
        super().__init__()

    def make(self):
        return self.Layer(self.config)

    def forward(self, x):
        if self.training:
            self.config["scale"] *= 0.8
        return super().forward(x)


class Context(Net):
    """Blocks that share a Python object."""

    class Writer(nn.Linear):
        def __init__(self, context):
            super().__init__(WIDTH, WIDTH)
            self.context = context

        def forward(self, x):
            y = super().forward(x)
            self.context["seen"] = y
            return y

    class Reader(Writer):
        def forward(self, x):
            return nn.Linear.forward(self, x) + self.context["seen"]

    def __init__(self):
        super().__init__()
        context = {}
        self.first, self.second = self.Writer(context), self.Reader(context)


SHARED = "share|object|attribute|partition|hook|read"
case("a context dict that one block fills and another reads", *MARKS, refusal=SHARED)(Context)


@case("a list that one block fills and another reads", *MARKS, refusal=SHARED)
class Skips(Net):
    class Down(nn.Linear):
        def __init__(self, kept):
            super().__init__(WIDTH, WIDTH)
            self.kept = kept

        def forward(self, x):
            y = torch.relu(super().forward(x))
            self.kept.append(y)
            return y

    class Up(Down):
        def forward(self, x):
            return nn.Linear.forward(self, x) + self.kept.pop()

    def __init__(self):
        super().__init__()
        kept = []
        self.first, self.second = self.Down(kept), self.Up(kept)


@case(
    "one step counter that two blocks read and the first one moves", *MARKS, inherent=True, refusal=SHARED + "|" + STATE
)
class SharedCounter(Net):
    class Layer(nn.Linear):
        def __init__(self, steps, move):
            super().__init__(WIDTH, WIDTH)
            self.steps, self.move = steps, move

        def forward(self, x):
            if self.move and self.training:
                self.steps[0] += 1
            return super().forward(x) / (1 + 0.1 * self.steps[0])

    def __init__(self):
        super().__init__()
        steps = [0]
        self.first, self.second = self.Layer(steps, True), self.Layer(steps, False)


@case(
    "one norm layer used by two marked blocks, hidden from the module tree", *MARKS, inherent=True,
    refusal=SHARED + "|meta",
)  # fmt: skip
class HiddenNorm(Net):
    class Layer(nn.Linear):
        def __init__(self, norm):
            super().__init__(WIDTH, WIDTH)
            self.norms = [norm]

        def forward(self, x):
            return self.norms[0](super().forward(x))

    def __init__(self):
        super().__init__()
        norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.first, self.second = self.Layer(norm), self.Layer(norm)


@case("one BatchNorm used by two marked blocks", *MARKS, inherent=True, refusal=SHARED + "|BatchNorm|buffer")
class SharedNorm(Net):
    class Layer(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), norm

        def forward(self, x):
            return self.norm(self.linear(x))

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH)
        self.first, self.second = self.Layer(norm), self.Layer(norm)


@inside("a count of an imported object", inherent=True, refusal="TRACKER")
class Tracked(nn.Linear):
    def forward(self, x):
        return super().forward(x / (1 + 0.1 * TRACKER.tick()))


@inside("factors in turn by itertools.cycle", inherent=True, refusal="changes second.factors")
class Turns(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.factors = itertools.cycle((1.0, 2.0, 4.0))

    def forward(self, x):
        return super().forward(x) * next(self.factors)


@inside("factors from an iterator over a list", inherent=True, refusal="changes second.factors")
class ListTurns(Turns):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.factors = iter([1.0 + 0.1 * n for n in range(999)])


@inside("a count in a Counter", inherent=True)
class Counted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.counts = self.made()

    def made(self):
        return collections.Counter(calls=0)

    def forward(self, x):
        self.counts["calls"] += 1
        return super().forward(x / (1 + 0.1 * self.counts["calls"]))


@inside("a count in a ChainMap", inherent=True)
class Chained(Counted):
    def made(self):
        return collections.ChainMap({}, {"calls": 0})


@inside("a count hung on a layer of torch's", inherent=True)
class Hung(Counted):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.norm = nn.LayerNorm(sizes[0])
        self.norm.counts = self.counts
        del self.counts

    def forward(self, x):
        self.norm.counts["calls"] += 1
        return nn.Linear.forward(self, self.norm(x) / (1 + 0.1 * self.norm.counts["calls"]))


class CountedActivation:
    """A function with a memory."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return torch.relu(x) / (1 + 0.1 * self.calls)


@inside("a layer of torch's with an activation that counts", inherent=True)
class Activated(nn.Module):
    def __init__(self, width, _):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, 0.0, CountedActivation(), batch_first=True)

    def forward(self, x):
        return self.layer(x[:, None])[:, 0]


@inside("the first buffer of a module, registered by its forward")
class Late(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(float(WIDTH), dtype=x.dtype).cos(), persistent=False)
        return super().forward(x) * self.table


@inside("an attribute of a weight (muP)")
class Scaled(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.width_mult = 2.0

    def forward(self, x):
        return super().forward(x / self.weight.width_mult)


@inside("a list's bound append", inherent=True)
class Noted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.seen = []
        self.note = self.seen.append

    def forward(self, x):
        self.note(x.shape[0])
        return super().forward(x) / len(self.seen)


@inside("a weak reference to the module that holds it", inherent=True)
class Child(nn.Linear):
    class Inner(nn.Linear):
        def forward(self, x):
            return super().forward(x) / self.parent().steps

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.inner, self.steps = self.Inner(*sizes), 0
        self.inner.parent = weakref.ref(self)

    def forward(self, x):
        self.steps += 1
        return self.inner(super().forward(x))


@inside("a function that closes over an attribute that forward moves", inherent=True)
class Damped(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.steps = 0
        self.damp = functools.partial(lambda factor, y: y / (1 + factor * self.steps), 0.5)

    def forward(self, x):
        self.steps += 1
        return self.damp(super().forward(x))


@case("an activation that counts its calls, in a marked encoder layer of torch's", *MARKS, inherent=True)
class CountingActivation(Net):
    class Activation:
        calls = 0

        def __call__(self, x):
            self.calls += 1
            return x.relu() / self.calls

    def make(self):
        return nn.TransformerEncoderLayer(WIDTH, 1, WIDTH, 0.0, self.Activation(), batch_first=True)

    def forward(self, x):
        return self.last(self.second(self.first(x)[:, None])[:, 0])


@case("a context variable that the last marked module counts in", *MARKS, inherent=True, refusal="sets the context")
class ContextCounter(Net):
    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, 1)

        def forward(self, x):
            STEP.set(STEP.get() + 1)
            return super().forward(x) / STEP.get()

    def __init__(self):
        super().__init__()
        STEP.set(0)
        self.last = self.Layer()


@inside("a text of itself that reads a value")
class Shown(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(1))

    def extra_repr(self):
        return f"scale={self.scale.item():.2f}"

    def forward(self, x):
        return super().forward(x) * self.scale


@inside("a counter in an array.array", inherent=True)
class InArray(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = array.array("d", [0.0])

    def forward(self, x):
        self.calls[0] += 1
        return super().forward(x) / self.calls[0]


@inside("a log in memory, read by its length", inherent=True)
class InStream(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.log = io.StringIO()

    def forward(self, x):
        self.log.write("a line\n")
        return super().forward(x) / self.log.tell()


@inside("an integer of C's", inherent=True)
class InC(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = ctypes.c_int(0)

    def forward(self, x):
        self.calls.value += 1
        return super().forward(x) / self.calls.value


class Settings:
    factor = 1.0


@inside("an object that a cached function has made, set up by the builder", inherent=True)
class InCache(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.settings = functools.cache(Settings)
        self.settings().factor = 0.5

    def forward(self, x):
        return super().forward(x) * self.settings().factor


class Count:
    n = 0


@inside("calls counted in an object that a cached function makes in the first one", inherent=True)
class MadeInFirst(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.count = functools.lru_cache(4)(Count)

    def forward(self, x):
        self.count().n += 1
        return super().forward(x) / self.count().n


@inside("a flag of an object that a cached function makes in every third call", inherent=True)
class MadeAnew(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls, self.flag = 0, functools.cache(lambda _: Count())

    def forward(self, x):
        flag = self.flag(self.calls // 3)
        self.calls += 1
        factor, flag.n = 1.0 + flag.n, 1
        return super().forward(x) * factor


class Log:
    def __init__(self):
        self.calls = []


@functools.lru_cache
def log():
    return Log()


@inside("calls listed in an object of a cached function of the file", inherent=True)
class InCacheOfFile(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        log.cache_clear()

    def forward(self, x):
        log().calls.append(1)
        return super().forward(x) / len(log().calls)


class OneForAll:
    def __init__(self):
        self.n = 0

    def __deepcopy__(self, memo):
        return self


@inside("calls counted in an object that is its own copy", inherent=True)
class InOneForAll(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.shared = OneForAll()

    def forward(self, x):
        self.shared.n += 1
        return super().forward(x) / self.shared.n


def gram(weight):
    """Of a weight as it is now."""
    return (weight.detach() @ weight.detach().t()).clone() / WIDTH


class Remembering(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x @ self.gram() * (1 if self.training else 0.5)  # so that an evaluation is its own


@inside("a cached method that keeps what it has made of the first weights")
class CachedOfWeight(Remembering):
    @functools.cache  # noqa: B019 - as people write it
    def gram(self):
        return gram(self.weight)


@inside("a cached method that keeps four and has made one of the first weights", refusal="makes something else")
class CachedFourOfWeight(Remembering):
    @functools.lru_cache(4)  # noqa: B019 - as people write it
    def gram(self):
        return gram(self.weight)


@functools.lru_cache(4, typed=True)
def band(size, *, width=1.0):
    return torch.ones(size, size, dtype=torch.float64).tril(int(width)) / size


@inside("a mask of a cached function that keeps four, by a number and a keyword")
class CachedMask(Remembering):
    def gram(self):
        return band(WIDTH, width=2)


@functools.cache
def kept_gram(model):
    return gram(model.second.weight)


@case("a cached function of a marked module's weight, asked by the root", *MARKS, refusal="keeps in kept_gram")
class CachedAtRoot(Net):
    def forward(self, x):
        return super().forward(x @ kept_gram(self))


class Kept:
    last: ClassVar[dict] = {}


@case("the root leaves in a helper class what it makes of its weight first", *MARKS, refusal="changes Kept.last")
class KeptInHelper(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        Kept.last.clear()

    def forward(self, x):
        if "scale" not in Kept.last:
            Kept.last["scale"] = self.scale.detach() * 2
        return super().forward(x * Kept.last["scale"] * self.scale)


NOTES = weakref.WeakKeyDictionary()


@case(
    "the root leaves in a WeakKeyDictionary what it makes of its weight first",
    *MARKS,
    refusal="changes python_state.NOTES",
)
class KeptByWeak(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        if self not in NOTES:
            NOTES[self] = self.scale.detach() * 2
        return super().forward(x * NOTES[self] * self.scale)


@functools.cache
def counts():
    return [0]


@case(
    "calls counted in a list of a cached function of the file, in a marked module",
    *MARKS,
    refusal="changes counts.cache",
)
class InListOfCache(Net):
    def make(self):
        return InListOfCache.Layer(WIDTH, WIDTH)

    class Layer(nn.Linear):
        def forward(self, x):
            counts()[0] += 1
            return super().forward(x) / counts()[0]


@functools.lru_cache(4)
def scales(width):
    return {"scale": 1 / width, "list": [width, width]}


@case("a dict of a cached function that a marked module reads", *MARKS)
class DictOfCache(Net):
    def make(self):
        return DictOfCache.Layer(WIDTH, WIDTH)

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x) * scales(x.shape[-1])["scale"]


@inside("an array that is a view of another one, and is counted in", inherent=True)
class View(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.whole = np.ones((4, 3))
        self.part = self.whole[1:3].T

    def forward(self, x):
        self.part += 1
        return super().forward(x) / float(self.whole.sum())


@case("an array of a marked module that is a view of the root's", *MARKS, refusal="shared with other parts")
class Views(Net):
    def __init__(self):
        self.__dict__["table"] = np.zeros(4)
        super().__init__()

    def make(self):
        return Views.Layer(self.table[:2])

    class Layer(nn.Linear):
        def __init__(self, part):
            super().__init__(WIDTH, WIDTH)
            self.part = part

        def forward(self, x):
            self.part[:] = self.part + 1
            return super().forward(x) / float(self.part[0])


@case("calls counted at the root in an object that a cached function makes in the first one", *MARKS, inherent=True,
      refusal="outside its partitions")  # fmt: skip
class RootMadeInFirst(Net):
    def __init__(self):
        super().__init__()
        self.count = functools.cache(Count)

    def forward(self, x):
        self.count().n += 1
        return super().forward(x) / self.count().n


def ticks(calls=[0]):  # noqa: B006 - as people write it
    calls[0] += 1
    return calls[0]


@case("a default of a function that forwards count in, in two marked modules", *MARKS, refusal=r"ticks\(\)\[0\]")
class InDefault(Net):
    def make(self):
        return InDefault.Layer(WIDTH, WIDTH)

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x) / ticks()


HERE = threading.local()


@case("a thread's own number that a marked module moves", *MARKS, refusal="HERE.calls")
class InThread(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            HERE.calls = getattr(HERE, "calls", 0) + 1
            return super().forward(x) / HERE.calls

    def make(self):
        return InThread.Layer(WIDTH, WIDTH)


class Annealed(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.scale = 1.0

    def forward(self, x):
        self.scale *= 0.5
        return super().forward(x) * self.scale


class Reading(Net):
    """One module changes its number in forward, and other code reads that."""

    def __init__(self):
        super().__init__()
        self.first = Annealed(WIDTH, WIDTH)


class Peeking(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.others[0].scale


elsewhere = functools.partial(case, refusal="changes its attribute 'scale', and code outside", inherent=True)


@elsewhere("a number that a marked module changes, read by a later one that holds it in a list", *MARKS)
class ReadLater(Reading):
    def __init__(self):
        super().__init__()
        self.second = Peeking(WIDTH, WIDTH)
        self.second.others = [self.first]


@elsewhere("a number that a marked module changes, read by an earlier one that holds it in a list", *MARKS)
class ReadEarlier(ReadLater):
    def forward(self, x):
        return self.last(self.first(self.second(x)))


@elsewhere("a number that a marked module changes, read by the root before it calls that", *MARKS)
class ReadByRoot(Reading):
    def forward(self, x):
        return self.last(self.second(self.first(x * self.first.scale)))


@case("a marked module that holds another in a list and reads what nobody changes", *MARKS)
class ReadUnchanged(Net):
    def __init__(self):
        super().__init__()
        self.second = Peeking(WIDTH, WIDTH)
        self.second.others, self.first.scale = [self.first], 0.5


class Sized(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.size = np.broadcast_to(np.asarray(4), [2])

    def forward(self, x):
        return super().forward(x) * (float(self.size[0]) + (x.mean().item() > 1e9))


@case("a read-only array of NumPy's on a marked module that looks at a value", *MARKS)
class ReadOnly(Net):
    def __init__(self):
        super().__init__()
        self.second = Sized()


_RAMP = torch.linspace(-1, 1, WIDTH, dtype=torch.float64).expand(16, -1)


class Ramped(nn.Linear):
    def forward(self, x):
        return super().forward(x + _RAMP[: len(x)])


@case("an expanded table at the top of the file", *MARKS)
class RampedNet(Net):
    def __init__(self):
        super().__init__()
        self.second = Ramped(WIDTH, WIDTH)


@inside("a layer that is appended in the second forward", inherent=True)
class Growing(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.layers, self.calls = nn.ModuleList([nn.Linear(*sizes)]), 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == 2:
            self.layers.append(nn.Softplus())
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@inside("two layers that change places in each forward", inherent=True, refusal="another parameter in the place")
class Swapping(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.a, self.b = nn.Linear(*sizes), nn.Linear(*sizes)

    def forward(self, x):
        if self.training:
            self.a, self.b = self.b, self.a
        return torch.tanh(self.a(x)) + 2 * self.b(x)


@case("marked layers that the root has change places in each forward", "first", "second", "other", "last",
      inherent=True, refusal="changes SwappingRoot.second outside its partitions")  # fmt: skip
class SwappingRoot(Net):
    def __init__(self):
        super().__init__()
        self.other = self.make()

    def forward(self, x):
        if self.training:
            self.second, self.other = self.other, self.second
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(h)) + 2 * self.other(h))


@case("a wrapper in the name of torch's own forward that counts, on a marked layer", *MARKS, inherent=True)
class WrappedForward(Net):
    def make(self):
        layer, calls = super().make(), 0
        inner = layer.forward

        @functools.wraps(inner)
        def forward(x):
            nonlocal calls
            calls += 1
            return inner(x) * (1 + 0.1 * (calls > 2))

        layer.forward = forward
        return layer


@case("a marked module turns gradients off and on", *MARKS)
class OffAndOn(Net):
    class Frozen(nn.Linear):
        def forward(self, x):
            torch.set_grad_enabled(False)
            made = super().forward(x)
            torch.set_grad_enabled(True)
            return made

    def __init__(self):
        super().__init__()
        self.first, self.last = self.Frozen(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


@case("a marked module leaves gradients off, a later one turns them on", *MARKS, refusal="whether gradients are on")
class LeavesOff(Net):
    class Off(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            torch.set_grad_enabled(False)
            return made

    class On(nn.Linear):
        def forward(self, x):
            torch.set_grad_enabled(self.training)
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.first, self.last = self.Off(WIDTH, WIDTH), self.On(WIDTH, 1)
