# ruff: noqa: ARG002, ARG005, E501 - what a case is given and does not read; tables of cases, a line each
"""Python at work: wrappers, globals, properties, builders, optimizers, losses and batches in unusual clothes."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import enum
import functools
import types
import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from torch.nn.utils import parametrize
from workloads import WIDTH, numbers, workload

THREE = "stem", "body", "head"


class Net(nn.Module):
    """Three layers; what comes between and around them is a case's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.tanh(self.stem(x)))))


class Scaled(nn.Linear):
    """A layer with a factor that others set."""

    factor = 1.0
    cond = None

    def forward(self, x, **_):
        made = super().forward(x) * self.factor
        return made if self.cond is None else made * self.cond


SETTING = contextvars.ContextVar("setting", default=1.0)
GLOBALS = types.SimpleNamespace(factor=1.0)


class Reads(nn.Linear):
    def forward(self, x):
        return super().forward(x) * SETTING.get() * GLOBALS.factor


@case("blind: a contextvar set by the root's forward, read by a marked module", *THREE)
class Context(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = Reads(WIDTH, WIDTH)

    def forward(self, x):
        token = SETTING.set(0.5)
        try:
            return super().forward(x)
        finally:
            SETTING.reset(token)


@contextlib.contextmanager
def scaled(value):
    old, GLOBALS.factor = GLOBALS.factor, value
    try:
        yield
    finally:
        GLOBALS.factor = old


@case("blind: a context manager around a marked call sets a global that it reads", *THREE)
class Managed(Context):
    def forward(self, x):
        h = torch.tanh(self.stem(x))
        with scaled(3.0):
            h = self.body(h)
        return self.head(h)


@case("blind: the root sets a plain attribute of a marked module before it calls it", *THREE)
class Sets(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = Scaled(WIDTH, WIDTH)

    def forward(self, x):
        self.body.factor = 0.5
        return super().forward(x)


@case("blind: AdaIN in MUNIT's way: the root assigns a hidden value to a marked module", *THREE)
class Assigns(Sets):
    def forward(self, x):
        h = torch.tanh(self.stem(x))
        for each in self.modules():
            if isinstance(each, Scaled):
                each.cond = h.sigmoid()
        return self.head(self.body(h))


@case("blind: the root assigns an input to a marked module (conditioning)", *THREE)
class Conditions(Sets):
    def forward(self, x):
        self.body.cond = x.sigmoid()
        return self.head(self.body(torch.tanh(self.stem(x))))


@case("blind: type(h) is torch.Tensor decides at the root", *THREE)
class Exact(Net):
    def forward(self, x):
        h = self.stem(x)
        if type(h) is torch.Tensor and h.__class__.__name__ == "Tensor":
            h = h * 2
        return self.head(torch.tanh(self.body(h)))


@case("blind: isinstance, is_tensor and is_floating_point at the root", *THREE)
class Kinds(Net):
    def forward(self, x):
        x = x[0] if isinstance(x, (tuple, list)) else x
        h = self.stem(x)
        if isinstance(h, torch.Tensor) and torch.is_tensor(h) and not isinstance(h, nn.Parameter):
            h = h * 2 if torch.is_floating_point(h) and h.is_floating_point() else h
        return self.head(torch.tanh(self.body(h)))


@case("blind: h.is_leaf and h.grad_fn asked at the root", *THREE)
class Leaf(Net):
    def forward(self, x):
        h = self.stem(x)
        if self.training and h.grad_fn is not None:
            h = h * 2
        return self.head(torch.tanh(self.body(h if x.is_leaf else -h)))


@case("blind: a child that reads its parent's parameter by a weakref", *THREE)
class Parent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.body = Child(self)


class Child(nn.Linear):
    def __init__(self, parent) -> None:
        super().__init__(WIDTH, WIDTH)
        object.__setattr__(self, "parent", weakref.ref(parent))

    def forward(self, x):
        return super().forward(x) * self.parent().scale


@case("blind: a wrapper with __getattr__ to its inner module, marked inside", "stem.module", "body.module", "head")
class Wrapped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = Wrapper(self.stem), Wrapper(self.body)

    def forward(self, x):
        return super().forward(x) * self.stem.in_features / self.body.weight.shape[0]


class Wrapper(nn.Module):
    def __init__(self, module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@case("blind: self.forward = functools.partial(...) in __init__, of root and marked module", *THREE)
class Partial(Net):
    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(self.work, alpha=0.5)
        self.body.forward = types.MethodType(lambda layer, x, y=2.0: F.linear(x * y, layer.weight), self.body)

    def work(self, x, *, alpha=1.0):
        return super().forward(x) * alpha


def cast(function):
    @functools.wraps(function)
    def inner(self, *args, **kwargs):
        made = function(self, *[2 * each if torch.is_tensor(each) else each for each in args], **kwargs)
        return {**made, "by": function.__name__}

    return inner


@case("blind: a decorated forward that changes arguments and output", *THREE, loss=lambda made, y: F.mse_loss(made["y"], y))  # fmt: skip
class Decorated(Net):
    @cast
    def forward(self, x, *_, flag=True, **__):
        return {"y": super().forward(x), "flag": flag}


@case("blind: blocks run by a generator, features in a defaultdict", *THREE)
class Lazily(Net):
    def walk(self, x):
        for name, layer in self._modules.items():
            x = torch.tanh(layer(x)) if name != "head" else x
            yield name, x

    def forward(self, x):
        found = collections.defaultdict(list)
        for name, h in self.walk(x):
            found[name[0]].append(h)
        return self.head(sum(sum(each) for each in found.values()))


class Mode(str, enum.Enum):  # noqa: UP042 - as older code has it
    FAST = "fast"
    SLOW = "slow"


class Takes(nn.Linear):
    def forward(self, x, *rest, mode=None, act=None, window=None, **_):
        x = super().forward(x)
        if act is not None:
            x = act(x)
        if window is not None:
            x = torch.cat([x[:, window] * 2, x], 1)[:, :WIDTH]
        return x * (2 if mode == Mode.SLOW else 1)


def taking(name, **words):
    class Given(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = Takes(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x):
            given = {key: self.norm if each == "norm" else each for key, each in words.items()}
            return self.head(torch.tanh(self.body(self.stem(x), **given)))

    Given.__module__ = __name__
    case(f"blind: a marked module is given {name}", *THREE)(Given)


taking("an Enum", mode=Mode.SLOW)
taking("a slice, a dtype and a device", window=slice(2, 5), dtype=torch.float64, device=torch.device("cpu"))
taking("a function of torch", act=torch.relu)
taking("a lambda", act=lambda h: h * 3)
taking("a module of the root", act="norm")


@case("blind: a dict handed from marked module to marked module, each adds to it (PyG, OpenPCDet)", *THREE)
class Handed(nn.Module):
    class Add(nn.Linear):
        def forward(self, data):
            data["h"] = torch.tanh(super().forward(data["h"]))
            data.setdefault("seen", []).append(data["h"].mean(1, keepdim=True))
            return data

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = self.Add(WIDTH, WIDTH), self.Add(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        data = {"x": x, "h": x}
        for each in (self.stem, self.body):
            data = each(data)
        return self.head(data["h"] + data["x"]) + sum(data["seen"])


class AttrDict(dict):
    __getattr__ = dict.__getitem__


@case("blind: a dict with attributes as output", *THREE, loss=lambda made, y: F.mse_loss(made.y, y))
class Attributes(Net):
    def forward(self, x):
        return AttrDict(y=super().forward(x))


@case("blind: a defaultdict and a deque from a marked module", *THREE)
class Collected(Net):
    class Gives(nn.Linear):
        def forward(self, x):
            found = collections.defaultdict(list)
            found["h"].append(super().forward(x))
            return found, collections.deque([x], maxlen=2)

    def __init__(self) -> None:
        super().__init__()
        self.body = self.Gives(WIDTH, WIDTH)

    def forward(self, x):
        found, last = self.body(self.stem(x))
        return self.head(found["h"][0] + last[-1])


@case("blind: teacher.eval() in every forward, a marked dropout in it", "stem", "body", "teacher", "head")
class Evals(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def forward(self, x):
        self.teacher.eval()
        with torch.no_grad():
            wanted = self.teacher(x)
        return super().forward(x) + wanted.mean(1, keepdim=True)


@case("blind: BatchNorm put in eval by the root's forward", "stem", "body", "norm", "head", inherent=True)
class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        for each in self.modules():
            if isinstance(each, nn.BatchNorm1d):
                each.eval()
        return self.head(self.norm(self.body(self.stem(x))))


class Table(nn.Module):
    """Positions that grow when a longer sequence comes."""

    def __init__(self, length=3) -> None:
        super().__init__()
        self.register_buffer("pe", self.made(length), persistent=False)
        self.mix = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def made(length):
        return torch.sin(torch.arange(length, dtype=torch.float64)[:, None] * torch.arange(WIDTH))

    def forward(self, x):
        if self.pe.size(0) < x.size(1):
            self.pe = self.made(x.size(1) + 1)
        return self.mix(x) + self.pe[: x.size(1)]


def lengths(rows, generator):
    x = torch.randn(rows, rows if rows != 8 else 3, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.mean((1, 2))[:, None]


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = Table(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.body(self.stem(x).mean(1)))


case("blind: a table of positions that grows with the sequence, marked", *THREE, batch=lengths)(Sequence)


@case("blind: a table of positions that grows with the sequence, unmarked", "stem.mix", "body", "head", batch=lengths)
class Loose(Sequence):
    pass


@case("blind: a cached property of a constant, and next(self.parameters()).dtype", *THREE)
class Cached(Net):
    @functools.cached_property
    def window(self):
        return torch.hann_window(WIDTH, dtype=torch.float64)

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def forward(self, x):
        return super().forward(x.to(self.dtype) * self.window)


@case("blind: the root sums squares of all parameters (regularisation in forward)", *THREE, loss=lambda made, y: F.mse_loss(made[0], y) + made[1])  # fmt: skip
class Regular(Net):
    def forward(self, x):
        return super().forward(x), 1e-2 * sum(each.square().sum() for each in self.parameters())


@case("blind: the loss closes over the model: an L2 term over its parameters", usual=False)
def _():
    built = []

    def make():
        built[:] = [Net()]
        return built[0]

    def loss(made, y):
        return F.mse_loss(made, y) + 1e-2 * sum(each.square().sum() for each in built[0].parameters())

    return workload(make, *THREE, loss=loss)


@case("blind: the loss closes over a layer of the model and applies it", usual=False)
def _():
    built = []

    def make():
        built[:] = [Net()]
        return built[0]

    return workload(make, *THREE, loss=lambda made, y: F.mse_loss(made, y) + built[0].body.weight.abs().mean())


@case("blind: the optimizer closes over the model and ignores what it is given")
def _():
    built = []

    def make():
        built[:] = [Net()]
        return built[0]

    return workload(make, *THREE, optimizer=lambda _: torch.optim.SGD(built[0].parameters(), lr=0.05))


@case("blind: the builder gives one and the same model each time")
def _():
    torch.manual_seed(1)
    net = Net()
    return workload(lambda: net, *THREE)


@case("blind: a class counter gives each block its depth when it is built")
def _():
    class Deep(nn.Linear):
        count = 0

        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            type(self).count += 1
            self.depth = type(self).count

        def forward(self, x):
            return x + super().forward(x) / self.depth

    def make():
        return nn.Sequential(Deep(), Deep(), nn.Linear(WIDTH, 1))

    return workload(make)


@case("blind: the builder takes its first weights from an iterator that is used up")
def _():
    values = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8] * 8)

    def make():
        net = Net()
        nn.init.constant_(net.stem.weight, next(values))
        return net

    return workload(make, *THREE)


@case("blind: deep copies of one block, and an EMA copy that forward does not read", "blocks.*", "head")
class Clones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([copy.deepcopy(block) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.ema = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, x):
        return self.head(functools.reduce(lambda h, f: torch.tanh(f(h)), self.blocks, x))


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


@case("blind: a parametrisation of the user's, cached() at the root", *THREE)
class Parametrised(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.body, "weight", Symmetric())

    def forward(self, x):
        with parametrize.cached():
            return super().forward(x)


@case("blind: a LazyLinear, made real by a dry run in the builder")
def _():
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LazyLinear(WIDTH)

    def make():
        net = Lazy()
        net(torch.zeros(1, WIDTH))
        return net

    return workload(make, *THREE)


@case("blind: torch.compile(backend='eager') of marked blocks", *THREE)
class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(self.body, backend="eager")


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 0.5


@case("blind: a dataclass as input")
def _():
    class Opens(Net):
        def forward(self, batch):
            return super().forward(batch.x) * batch.scale

    def batch(rows, generator):
        x, y = numbers(rows, generator)
        return (Batch(x),), y

    return workload(Opens, *THREE, batch=batch)


@case("blind: a mask that is None in some batches and a tensor in others")
def _():
    class Masked(Net):
        def forward(self, x, mask=None):
            return super().forward(x if mask is None else x.masked_fill(mask, 0))

    def batch(rows, generator):
        x, y = numbers(rows, generator)
        return {"x": x, "mask": None if rows == 8 else x > 1}, y

    return workload(Masked, *THREE, batch=batch)


def as_input(name, change, use, **words):
    def made():
        class Uses(Net):
            def forward(self, *given, **named):
                return super().forward(use(*given, **named))

        def batch(rows, generator):
            x, y = numbers(rows, generator)
            return change(x), y

        return workload(Uses, *THREE, batch=batch)

    made.__module__ = __name__
    case(f"blind: inputs: {name}", **words)(made)


as_input("complex128", lambda x: torch.complex(x, -x), lambda z: z.real + z.imag.abs() + z.conj().angle())
as_input(
    "uint8, scaled in forward", lambda x: (x.abs() * 60).clamp(0, 255).to(torch.uint8), lambda x: x.double().div_(255)
)
as_input("bool", lambda x: x > 0, lambda x: x.double() + (~x).double() * 0.5)
as_input("no columns beside eight", lambda x: (x, x[:, :0]), lambda x, none: torch.cat([none, x], 1))
as_input(
    "a temperature of no dimensions that differs by batch",
    lambda x: (x, x.sum().abs() + 1),
    lambda x, t: x / t,
    inherent=True,
)
as_input("float32 beside float64", lambda x: (x, x.float()), lambda x, y: x + y)
as_input("a key that forward does not read", lambda x: {"x": x, "path": x[:, 0]}, lambda x, **_: x)
as_input("expanded, with a stride of zero", lambda x: x[:, :1].expand(-1, WIDTH), lambda x: x * 1)


@case("blind: one row in every batch", *THREE, batch=lambda rows, generator: numbers(1, generator), rows=1)
class OneRow(Net):
    pass
