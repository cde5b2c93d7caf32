"""Wrappers around modules, and modules that others have made: they name, call or list in ways of their own."""

from __future__ import annotations

import functools
import re
from linecache import cache as lines
from sys import modules as loaded

import torch
from foreign.case import case
from foreign.written import MARKS, Net
from torch import fx, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from workloads import WIDTH, sgd, workload


@case("apply_activation_checkpointing: every marked layer in a CheckpointWrapper")
def _():
    def build():
        net = Net()
        apply_activation_checkpointing(net, check_fn=lambda each: isinstance(each, nn.Linear))
        return net

    return workload(build, *MARKS)


@case("a CheckpointWrapper inside a marked module", *MARKS)
class WrappedInside(Net):
    def __init__(self):
        super().__init__()
        self.second = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))))


class Renaming(nn.Module):
    """Lists what it wraps without its own part of the name, buffers too, as wrappers for sharding do."""

    def __init__(self, inner):
        super().__init__()
        self.wrapped = inner

    def forward(self, x):
        return self.wrapped(x)

    def named_parameters(self, *args, **words):
        for name, each in super().named_parameters(*args, **words):
            yield name.replace("wrapped.", ""), each

    def named_buffers(self, *args, **words):
        for name, each in super().named_buffers(*args, **words):
            yield name.replace("wrapped.", ""), each


class Counted(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


@case("a wrapper of one's own that renames parameters and buffers, marked", *MARKS)
class Renamed(Net):
    def __init__(self):
        super().__init__()
        self.second = Renaming(Counted(WIDTH, WIDTH))


class Adapted(nn.Linear):
    """Shows its adapter alone to who asks for parameters, as modules for fine-tuning do."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.adapter = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        return super().forward(x) + self.adapter(x)

    def named_parameters(self, *args, **words):
        return ((name, each) for name, each in super().named_parameters(*args, **words) if name.startswith("adapter"))

    def parameters(self, recurse=True):
        return self.adapter.parameters(recurse)


@case("a marked module that lists a part of its parameters", *MARKS)
class ListsAPart(Net):
    def __init__(self):
        super().__init__()
        self.second = Adapted(WIDTH, WIDTH)


@case("a model that lists a part of its parameters: the optimizer trains these", *MARKS)
class ModelListsAPart(Net):
    def named_parameters(self, *args, **words):
        return ((name, each) for name, each in super().named_parameters(*args, **words) if "second" not in name)


@case("a CheckpointWrapper around the whole model", refusal="named_parameters of its own")
def _():
    return workload(lambda: checkpoint_wrapper(Net()), *(f"_checkpoint_wrapped_module.{each}" for each in MARKS))


def checked(function):
    """Around a function, as decorators that check types are: it names what Python keeps of sources and modules."""

    @functools.wraps(function)
    def call(*args, **words):
        if "no such file" in lines or "no such module" in loaded:
            raise TypeError(function.__name__)
        return function(*args, **words)

    return call


@case("a decorator around the root's forward that names linecache.cache and sys.modules", *MARKS)
class Checked(Net):
    @checked
    def forward(self, x):
        return super().forward(x)


class CheckedLayer(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.lines, self.patterns = lines, re._cache

    @checked
    def forward(self, x):
        return super().forward(x) if re.match("x+", "xx") and len(self.patterns) else x


@case("a decorator around a marked forward that names caches, and attributes that hold them", *MARKS)
class CheckedInside(Net):
    def __init__(self):
        super().__init__()
        self.second = CheckedLayer(WIDTH, WIDTH)


@case("the root asks a library's cache by another name and leaves an entry in it", *MARKS)
class LeavesAnEntry(Net):
    def forward(self, x):
        re._cache.setdefault(("a key of the root's",), re.compile("x"))
        return super().forward(x)


@case("model.compile() of the whole model")
def _():
    def build():
        net = Net()
        net.compile(backend="eager")
        return net

    return workload(build, *MARKS)


@case("compile() of an unmarked module around marked ones", "first", "second.*", "last")
class CompiledAround(Net):
    def __init__(self):
        super().__init__()
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.second.compile(backend="eager")


class MovingLayer(nn.Linear):
    def forward(self, x):
        self.to(x.device, x.dtype)
        return super().forward(x)


@case("modules moved to where the input is: unmarked, marked, the whole, and a marked one by itself", *MARKS)
class Moving(Net):
    def __init__(self):
        super().__init__()
        self.second = MovingLayer(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x):
        self.extra.to(x.device)
        self.first.to(device=x.device, dtype=x.dtype, non_blocking=True)
        self.to(x)
        self.cpu() if x.device.type == "cpu" else self.cuda()
        return super().forward(self.extra(x) * self.table) if self.double() is self else x


@case("a marked module converted by the root's forward", *MARKS, refusal="converts the weights of a Linear")
class ConvertsType(Net):
    def forward(self, x):
        self.second.float()
        self.second.double()
        return super().forward(x)


@case("Module._apply that writes in place, by the root's forward", *MARKS, refusal="converts the weights of a Linear")
class AppliesInPlace(Net):
    def forward(self, x):
        self.second._apply(lambda each: each.mul_(0.5))
        return super().forward(x)


class OwnGraph(fx.GraphModule):
    def scaled(self, y):
        return y * len(list(self.graph.nodes))

    def recompile(self):
        code, graphs = super().recompile(), type(self).forward
        type(self).forward = lambda self, x: self.scaled(graphs(self, x))
        return code


@case("a torch.fx graph as the model, with a hook")
def _():
    def build():
        net = Net()
        net = OwnGraph(net, fx.Tracer().trace(net))
        net.register_forward_hook(lambda *given: given[-1] * 2)
        return net

    return workload(build, *MARKS, optimizer=sgd)


@case("a torch.fx graph around marked modules", "first", "second.*", "last")
class GraphAround(Net):
    def __init__(self):
        super().__init__()
        self.second = fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


@case("a torch.fx graph with hooks, marked", "first", "second", "last")
class MarkedGraph(Net):
    def __init__(self):
        super().__init__()
        self.second = fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.second.register_forward_hook(lambda *given: given[-1] * 2)
        self.second.register_full_backward_hook(lambda *given: (given[1][0] * 0.5,))
