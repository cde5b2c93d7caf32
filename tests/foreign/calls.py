# ruff: noqa: ARG005, E501, PLW0108 - decorators on one line
"""Calls in other ways: functional_call, hypernetworks, overridden __call__, custom operators, subclasses, control flow."""

from __future__ import annotations

import collections
import enum

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from workloads import WIDTH, numbers

MARKS = ("first", "second", "last")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), self.make(), nn.Linear(WIDTH, 1)

    def make(self):
        return nn.Linear(WIDTH, WIDTH)

    def middle(self, h):
        return self.second(h)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def middle(name, *marks, **words):
    """A model whose middle is `f(net, h)`."""

    def add(f):
        made = type("Middle", (Net,), {"middle": lambda self, h: f(self, h), "__module__": f.__module__})
        return case(name, *(marks or MARKS), **words)(made)

    return add


@middle("functional_call of a marked module with its own weights scaled", refusal="functional_call|weight|parameter")
def _(net, h):
    weights = {name: each * 0.5 for name, each in net.second.named_parameters()}
    return functional_call(net.second, weights, (h,))


@middle("functional_call of an unmarked module with its weights scaled", "first", "last", refusal="functional_call")
def _(net, h):
    weights = {name: each * 0.5 for name, each in net.second.named_parameters()}
    return functional_call(net.second, weights, (h,))


@middle("a hypernetwork: F.linear with a weight that a marked module made", inherent=True)
def _(net, h):
    weight = torch.tanh(net.second(h).mean(0)).outer(torch.ones(WIDTH, dtype=h.dtype))
    return F.linear(h, weight.detach() * 0 + weight / WIDTH)


case_ = case(
    "a hypernetwork's weights into functional_call of a marked module",
    "hyper",
    "target",
    "last",
    inherent=True,
    refusal="functional_call|weight|parameter|traced",
)


@case_
class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.hyper, self.target, self.last = (
            nn.Linear(WIDTH, WIDTH * WIDTH),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, x):
        weight = self.hyper(x).mean(0).view(WIDTH, WIDTH)
        return self.last(torch.tanh(functional_call(self.target, {"weight": weight}, (x,))))


@middle("forward called by name: self.second.forward(h)")
def _(net, h):
    return net.second.forward(h)


@case("forward called by name, of a dropout layer under a checkpoint", *MARKS, random=True)
class CheckpointedByName(Net):
    def make(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def middle(self, h):
        return checkpoint(self.second.forward, h, use_reentrant=False)


@case("forward called by name, past a hook of the layer", *MARKS, refusal="torch runs none of the module's hooks")
class HookedByName(Net):
    def make(self):
        layer = nn.Linear(WIDTH, WIDTH)
        layer.register_forward_hook(lambda module, given, made: made * 2)
        return layer

    def middle(self, h):
        return self.second.forward(h)


@middle("a marked layer's weight read by the root", refusal="never calls")
def _(net, h):
    return net.second(h) + 0.1 * net.second.weight.sum()


@middle("a marked layer's weight used by F.linear, the layer never called", "first", "last")
def _(net, h):
    return F.linear(h, net.second.weight, net.second.bias)


@case("another method than forward of a marked module", "first", "second", "last", refusal="never calls|method|encode")
class OtherMethod(Net):
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def encode(self, x):
            return torch.tanh(self.inner(x))

        def decode(self, x):
            return x @ self.inner.weight

        def forward(self, x):
            return self.decode(self.encode(x))

    def make(self):
        return self.Coder()

    def middle(self, h):
        return self.second.encode(h) + self.second(h)


@case("overridden __call__ of a marked module", *MARKS)
class OwnCall(Net):
    class Layer(nn.Linear):
        def __call__(self, x):
            return super().__call__(x) * 2

    def make(self):
        return self.Layer(WIDTH, WIDTH)


@case("overridden __call__ of the root", *MARKS)
class RootCall(Net):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 2


@case("overridden eval that switches a flag of its own", *MARKS)
class OwnEval(Net):
    class Layer(nn.Linear):
        merged = False

        def eval(self):
            self.merged = True
            return super().eval()

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

        def forward(self, x):
            return super().forward(x) * (0.5 if self.merged else 1.0)

    def make(self):
        return self.Layer(WIDTH, WIDTH)


@case("overridden train at the root that switches a flag read at the root", *MARKS)
class RootTrain(Net):
    doubled = False

    def train(self, mode=True):
        self.doubled = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) * (2 if self.doubled else 1)


@case("LoRA merged into the weight by eval and taken out by train", *MARKS)
class Merging(Net):
    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2) / 5), nn.Parameter(torch.randn(2, WIDTH) / 5)
            self.merged = False

        def train(self, mode=True):
            if mode == self.merged:
                self.weight.data += (self.a @ self.b).data * (-1 if mode else 1)
                self.merged = not mode
            return super().train(mode)

        def forward(self, x):
            y = super().forward(x)
            return y if self.merged else y + x @ (self.a @ self.b).t()

    def make(self):
        return self.Layer()


@torch.library.custom_op("foreign::scale_into", mutates_args={"x"})
def scale_into(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("foreign::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x):
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, gradient: gradient * 2 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@middle("a custom operator that writes its argument, on a value without gradient")
def _(net, h):
    factor = torch.ones(WIDTH, dtype=h.dtype)
    scale_into(factor, 3.0)
    return net.second(h * factor)


@middle("a custom operator with an autograd formula of its own")
def _(net, h):
    return net.second(cube(h))


@case("a custom operator that writes a buffer, in a marked module", *MARKS, inherent=True)
class OperatorBuffer(Net):
    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x):
            if self.training:
                scale_into(self.scale, 0.9)
            return super().forward(x * self.scale.clone())

    def make(self):
        return self.Layer()


@case("a custom operator that writes a buffer of the root", *MARKS)
class RootOperatorBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def middle(self, h):
        if self.training:
            scale_into(self.scale, 0.9)
        return self.second(h * self.scale.clone())


@case("an attribute hung on a tensor, read by the next marked module", *MARKS, refusal="attribute")
class Tagged(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x) * getattr(x, "scale", 1.0)

    def make(self):
        return self.Layer(WIDTH, WIDTH)

    def middle(self, h):
        h.scale = 2.0
        return self.second(h)


@case("an attribute that a marked module hangs on its output, read at the root", *MARKS, refusal="attribute|hook")
class TaggedOutput(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.scale = 2.0
            return y

    def make(self):
        return self.Layer(WIDTH, WIDTH)

    def middle(self, h):
        y = self.second(h)
        return y * getattr(y, "scale", 1.0)


class Meters(torch.Tensor):
    """A subclass without behaviour of its own."""


@case("a tensor subclass that a marked module returns", *MARKS, refusal="subclass|Meters")
class Subclass(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x).as_subclass(Meters)

    def make(self):
        return self.Layer(WIDTH, WIDTH)

    def middle(self, h):
        y = self.second(h)
        return y * 2 if isinstance(y, Meters) else y


@middle("a tensor subclass made at the root", refusal="subclass|Meters|traced")
def _(net, h):
    return net.second(h).as_subclass(Meters) * 1.5


@case("a weight that is a tensor subclass of Parameter", *MARKS)
class OwnParameter(Net):
    class Weight(nn.Parameter):
        """With an attribute for the optimizer."""

    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.weight = OwnParameter.Weight(self.weight.data)
            self.weight.no_decay = True

    def make(self):
        return self.Layer()


@case("modules in a plain list, not registered", "first", "last", refusal="list|register|attribute|parameter|traced")
class Unregistered(Net):
    def make(self):
        self.hidden_layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64)]
        return nn.Identity()

    def middle(self, h):
        return self.hidden_layers[0](h)


@case("a scripted submodule", *MARKS, refusal="script")
class Scripted(Net):
    def make(self):
        return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


@case("a wrapper like DataParallel: everything under .module", "module.first", "module.second", "module.last")
class Wrapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = Net()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@middle("vmap over rows at the root", refusal="torch.vmap")
def _(net, h):
    return net.second(torch.vmap(lambda row: row * row.sum())(h))


@case("torch.func.grad inside a marked module", *MARKS, refusal="cannot be traced")
class FuncGrad(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            return torch.func.vmap(torch.func.grad(lambda row: torch.tanh(F.linear(row, self.weight)).sum()))(x)

    def make(self):
        return self.Layer(WIDTH, WIDTH)


@case("ParameterList and ParameterDict at the root", *MARKS)
class Lists(Net):
    def __init__(self):
        super().__init__()
        self.shifts = nn.ParameterList(torch.zeros(WIDTH) for _ in range(2))
        self.scales = nn.ParameterDict({"a": torch.ones(WIDTH), "b": torch.ones(WIDTH)})

    def middle(self, h):
        return self.second(h * self.scales["a"] + self.shifts[0]) * self.scales["b"] + self.shifts[1]


def named_inputs(rows, generator):
    x, y = numbers(rows, generator)
    return {"x": x, "context": x.sin()}, y


@case("an input that lands in **kwargs of the root's forward, and is read there", *MARKS, batch=named_inputs)
class LandsInKwargs(Net):
    def forward(self, x, **kwargs):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)) + kwargs["context"])))


class Branches(nn.Module):
    """A stage of HRNet: it sets the entries of the list that it is given."""

    def __init__(self):
        super().__init__()
        self.branches, self.fuse = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for n, branch in enumerate(self.branches):
            x[n] = torch.tanh(branch(x[n]))
        return self.fuse(x[0] + x[1])


class Stage(Net):
    def make(self):
        return Branches()


@case("a marked module that sets entries of the list that it is given, which the root reads (HRNet)", *MARKS)
class ReadsBranches(Stage):
    def middle(self, h):
        branches = [h, h.sin()]
        made = self.second(branches)
        return made * branches[0] + branches[1]


@case("an unmarked module that sets entries of the list that it is given", "first", "last")
class UnmarkedBranches(ReadsBranches):
    pass


@case("a list with entries that a marked module sets is given to it again", *MARKS)
class BranchesAgain(Stage):
    def middle(self, h):
        branches = [h, h.sin()]
        made = self.second(branches)
        return made + self.second(branches) * branches[1]


@case("a marked module that sets entries of its list, in a forward that needs values", *MARKS, inherent=True)
class BranchesByValue(Net):
    class Layer(Branches):
        def forward(self, x):
            made = super().forward(x)
            return made * float(x[0].detach().numpy().max())

    def make(self):
        return self.Layer()

    middle = ReadsBranches.middle


class Adder(nn.Linear):
    def forward(self, batch, seen, *, deep):
        h = torch.tanh(super().forward(batch.pop("h")))
        batch["h"], batch["before"] = h, batch.get("h")
        seen.append(h.mean(1, keepdim=True))
        deep["in"][0].append((h, {"x": h * 2}))
        deep["count"] = len(seen)


@case("marked modules that return nothing: what they make is in the dicts and lists that they are given", *MARKS)
class Adds(Net):
    def __init__(self):
        super().__init__()
        self.first, self.second = Adder(WIDTH, WIDTH), Adder(WIDTH, WIDTH)

    def forward(self, x):
        batch, seen, deep = {"h": x, "x": x}, [], {"in": ([], 3)}
        for each in (self.first, self.second):
            each(batch, seen, deep=deep)
        (a, _), (_, b) = deep["in"][0]
        return self.last(batch["h"] + a * b["x"] + batch["x"]) + sum(seen) * deep["count"]


@case("a value decides in which order a marked module leaves its list", *MARKS, refusal="value decides")
class Reverses(Net):
    class Layer(nn.Linear):
        def forward(self, parts):
            if parts[0].sum() > 0:
                parts.reverse()
            parts[0] = super().forward(parts[0])
            return parts[1]

    def make(self):
        return self.Layer(WIDTH, WIDTH)

    def middle(self, h):
        parts = [h, h.sin()]
        return self.second(parts) * parts[0]


@case(
    "a number of values that a marked module appends to the root's list", *MARKS, refusal="of a number that is returned"
)
class Logs(Net):
    class Layer(nn.Linear):
        def forward(self, x, log):
            made = super().forward(x)
            log.append(float(made.detach().mean()))
            return made

    def make(self):
        return self.Layer(WIDTH, WIDTH)

    def middle(self, h):
        return self.second(h, [])


class Modality(str, enum.Enum):  # noqa: UP042 - as code for Python 3.10 has it
    TEXT, IMAGE = "text", "image"


@case("a dict with members of an enumeration, tuples and None as keys, from a marked module to another", *MARKS)
class Keys(Net):
    class Maker(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            return {Modality.TEXT: made, Modality.IMAGE: -made, 3: made.exp(), ("a", 1): made.sin(), None: made.cos()}

    class Taker(nn.Linear):
        def forward(self, parts):
            made = parts[Modality.TEXT] + parts[3] * parts["a", 1] - parts[None] * parts[Modality.IMAGE]
            return super().forward(sum((n * each for n, each in enumerate(parts.values())), made))

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Maker(WIDTH, WIDTH), self.Taker(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


@case("what torch.topk returns, and a torch.Size, from a marked module to another", *MARKS)
class Top(Net):
    class Maker(nn.Linear):
        def forward(self, x):
            return torch.topk(super().forward(x), 3, dim=1)

    class Taker(nn.Linear):
        def forward(self, top, size):
            return super().forward(top.values.new_zeros(size).scatter(1, top.indices, top.values))

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Maker(WIDTH, WIDTH), self.Taker(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.second(self.first(x), x.size()))


class Notes(nn.Linear):
    def forward(self, state):
        state["h"] = super().forward(state["feats"][-1])
        return state["h"]


@case("a list in a dict to which a marked module adds a key stays the root's own list", *MARKS)
class OwnList(Net):
    def make(self):
        return Notes(WIDTH, WIDTH)

    def middle(self, h):
        feats = [h]
        state = {"feats": feats}
        feats.append(torch.sin(self.second(state)))
        return state["feats"][-1] + h


def layer(name, forward, middle, **words):
    """A case whose marked `second` runs `forward(layer, ...)`, where the root's code is `middle(net, h)`."""
    kind = type("Layer", (nn.Linear,), {"forward": forward})
    members = {"make": lambda _: kind(WIDTH, WIDTH), "middle": middle, "__module__": __name__}
    case(name, *MARKS, **words)(type("Given", (Net,), members))


def puts(linear, parts, others):
    parts.append(torch.tanh(F.linear(others[-1], linear.weight, linear.bias)))
    return others[-1] * 2


def given_twice(net, h):
    parts = [h]
    return net.second(parts, parts) + sum(parts)


layer("one list that a marked module is given twice, adds to and reads", puts, given_twice)


def puts_within(linear, parts, *, of):
    parts.append(torch.tanh(F.linear(of["parts"][-1], linear.weight, linear.bias)))
    return of["parts"][-1] * len(of["parts"])


def given_within(net, h):
    parts = [h]
    return net.second(parts, of={"parts": parts}) + net.second(parts, of={"parts": parts}) * sum(parts)


layer("one list that a marked module is given twice, once in a dict, in two calls", puts_within, given_within)


def hands_back(linear, parts):
    parts.append(torch.tanh(F.linear(parts[-1], linear.weight, linear.bias)))
    return parts


def keeps_on(net, h):
    parts = [h]
    made = net.second(parts)
    made.append(made[-1].sin())
    parts[0] = parts[0] * 2
    return sum(parts) + sum(made) * len(parts)


layer("a marked module that returns the list that it is given: the root adds to either", hands_back, keeps_on)


def only_hands_back(linear, parts):
    parts[0].mul_(2)
    return {"same": parts, "made": torch.tanh(F.linear(parts[-1], linear.weight, linear.bias))}


def reads_both(net, h):
    parts = [h * 1]
    made = net.second(parts)
    made["same"].append(made["made"])
    return sum(parts)


layer(
    "a marked module returns its list unchanged, within a dict, with a tensor in it written",
    only_hands_back,
    reads_both,
)


def stands_twice(linear, state):
    outs = [torch.tanh(F.linear(state["h"], linear.weight, linear.bias))]
    state["outs"] = outs
    return outs, [outs]


def either(net, h):
    state = {"h": h}
    outs, (again,) = net.second(state)
    outs.append(h.sin())
    again.append(h.cos())
    return sum(state["outs"]) / len(outs)


layer("a list that a marked module returns twice and puts into its dict: one list for the root", stands_twice, either)


def marks_seen(linear, x, seen):
    y = F.linear(x * 2 if "again" in seen else x, linear.weight, linear.bias)
    seen.add("again")
    seen.discard("not yet")
    return y


def by_set(net, h):
    seen = {"first", "not yet"}
    made = torch.tanh(net.second(h, seen))
    made = made * (3 if "again" in seen else 5) + (7 if "not yet" in seen else 9)
    seen = {"another"}
    made = made + torch.tanh(net.second(h.sin(), seen))
    seen.clear()
    return made


layer("a set that a marked module adds to, and the root clears behind the call", marks_seen, by_set)


def fills(linear, x, found):
    found["h"].append(torch.tanh(F.linear(x, linear.weight, linear.bias)))
    found.move_to_end("x", last=False)
    return x


def by_ordered(net, h):
    found = collections.OrderedDict(h=[], x=[h])
    net.second(h, found)
    first, second = found
    return found[first][0] - found[second][0] * 2


layer("an ordered dict whose order a marked module changes, and whose list it fills", fills, by_ordered)


def fills_default(linear, x, found):
    found["h"].append(torch.tanh(F.linear(x, linear.weight, linear.bias)))


def by_defaultdict(net, h):
    found = collections.defaultdict(list)
    net.second(h, found)
    found["more"].append(h)
    return found["h"][0] + found["more"][0]


layer("a defaultdict that a marked module fills", fills_default, by_defaultdict)


def keeps_state(linear, x):
    linear.parts = [torch.tanh(F.linear(x, linear.weight, linear.bias))]
    return linear.parts


def changes_kept(net, h):
    parts = net.second(h)
    parts.append(h)
    return sum(parts)


layer(
    "the root changes the list that a marked module returns and holds",
    keeps_state,
    changes_kept,
    refusal="goes on holding",
)
layer("the root reads the list that a marked module returns and holds", keeps_state, lambda net, h: sum(net.second(h)))


@case(
    "a marked module sets a default in a dict that the root keeps",
    *MARKS,
    refusal="gives it and keeps for its next call",
)
class SetsDefault(Net):
    class Layer(nn.Linear):
        def forward(self, x, cache):
            return super().forward(x) + cache.setdefault("mask", torch.ones(WIDTH, dtype=x.dtype).cumsum(0))

    def __init__(self):
        super().__init__()
        self.cache = {}

    def make(self):
        return self.Layer(WIDTH, WIDTH)

    def middle(self, h):
        return self.second(h, self.cache)


def counts_last(linear, parts):
    before = len(linear.last) if hasattr(linear, "last") else 1
    linear.last = parts
    return torch.tanh(F.linear(parts[0], linear.weight, linear.bias)) * before


def adds_behind(net, h):
    parts = [h]
    parts.append(net.second(parts))
    return sum(parts)


layer(
    "the root adds to a list that a marked module has kept of the call",
    counts_last,
    adds_behind,
    refusal="goes on holding",
)


def exchanges(linear, a, b):
    a[0], b[0] = b[0], a[0]
    a.append(b)
    b.append(torch.tanh(F.linear(a[0], linear.weight, linear.bias)))


def exchanged(net, h):
    a, b = [h], [h.sin()]
    net.second(a, b)
    b.append(h.cos())
    return a[0] + a[1][2] * b[1] + b[0] * len(a[1])


layer("two lists that exchange entries in a marked module, one is within the other then", exchanges, exchanged)
