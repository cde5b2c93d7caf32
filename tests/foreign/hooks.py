# ruff: noqa: ARG005 - the signatures are torch's
"""Hooks of every kind: on tensors, parameters, modules and the root."""

from __future__ import annotations

import torch
from foreign.case import case
from torch import nn
from torch.autograd.graph import get_gradient_edge
from workloads import WIDTH


class Net(nn.Module):
    """Three layers; subclasses hang hooks on them."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(h)))


MARKS = ("first", "second", "last")


@case("tensor hook that scales, at the root", *MARKS)
class TensorHook(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.1)
        return self.last(torch.tanh(self.second(h)))


class HookedLayer(nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return h


@case("tensor hook inside a marked module", *MARKS)
class TensorHookInside(Net):
    def __init__(self):
        super().__init__()
        self.second = HookedLayer(WIDTH, WIDTH)


@case("retain_grad on a hidden value", *MARKS, refusal="retain_grad|grad")
class RetainGrad(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        if h.requires_grad:
            h.retain_grad()
        return self.last(torch.tanh(self.second(h)))


@case("tensor hook at the root of a model that notes what it has seen", *MARKS)
class NotingHook(Net):
    """A hook of each call is another object."""

    def forward(self, x):
        h, factor = torch.tanh(self.first(x)), 0.1
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * factor)
        self.was_called = True
        return self.last(torch.tanh(self.second(h)))


@case("parameter hook registered in __init__, of a marked module", *MARKS)
class ParameterHook(Net):
    def __init__(self):
        super().__init__()
        self.second.weight.register_hook(lambda gradient: gradient * 0.5)


@case("parameter hook registered in a marked module's __init__", *MARKS)
class ParameterHookInside(Net):
    class Masked(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.weight.register_hook(lambda gradient: gradient.tril())

    def __init__(self):
        super().__init__()
        self.second = self.Masked(WIDTH, WIDTH)


@case("parameter hook on a parameter of the root", *MARKS)
class RootParameterHook(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.scale.register_hook(lambda gradient: gradient * 0.25)

    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.scale
        return self.last(torch.tanh(self.second(h)))


def halve(parameter):
    parameter.grad.mul_(0.5)


@case("post-accumulate-grad hook", *MARKS, inherent=True, refusal="hook")
class PostAccumulate(Net):
    def __init__(self):
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(halve)


@case("forward hook that changes the output of a marked module", *MARKS)
class ForwardHook(Net):
    def __init__(self):
        super().__init__()
        self.second.register_forward_hook(lambda module, args, output: output * 2)


@case("forward pre-hook that changes the input of a marked module", *MARKS)
class ForwardPreHook(Net):
    def __init__(self):
        super().__init__()
        self.second.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))


@case("forward hook with kwargs", *MARKS)
class KwargsHook(Net):
    def __init__(self):
        super().__init__()
        self.second.register_forward_hook(lambda module, args, kwargs, output: output + 1, with_kwargs=True)


@case("full backward hook on a marked module", *MARKS)
class BackwardHook(Net):
    def __init__(self):
        super().__init__()
        self.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


@case("full backward pre-hook on a marked module", *MARKS)
class BackwardPreHook(Net):
    def __init__(self):
        super().__init__()
        self.second.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))


@case("backward hook on an unmarked submodule", "first", "last")
class UnmarkedBackwardHook(Net):
    def __init__(self):
        super().__init__()
        self.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


@case("backward hook inside a marked module", "body", "last")
class NestedBackwardHook(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.body[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.body(x))


@case("forward hook on the root: the output doubled", *MARKS)
class RootForwardHook(Net):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, args, output: output * 2)


@case("forward pre-hook on the root: the input normalised", *MARKS)
class RootPreHook(Net):
    def __init__(self):
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] / args[0].norm(dim=1, keepdim=True),))


@case("full backward hook on the root", *MARKS, refusal="hook")
class RootBackwardHook(Net):
    def __init__(self):
        super().__init__()
        self.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))


@case("features collected by a forward hook, read in the root's forward", *MARKS, refusal="hook|attribute|changes")
class Collected(Net):
    def __init__(self):
        super().__init__()
        self.features = {}
        self.first.register_forward_hook(lambda module, args, output: self.features.update(first=output))

    def forward(self, x):
        h = self.second(torch.tanh(self.first(x)))
        return self.last(h + self.features["first"])


@case("activations recorded by hooks, for logging alone", *MARKS, refusal="changes")
class Logged(Net):
    def __init__(self):
        super().__init__()
        self.means = []
        for layer in (self.first, self.second):
            layer.register_forward_hook(lambda module, args, output: self.means.append(float(output.detach().mean())))


@case("a hook registered in forward on a marked module's output, gradient noted in a list", *MARKS, refusal="hook")
class GradientNoted(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        notes = []
        if h.requires_grad:
            h.register_hook(lambda gradient: notes.append(gradient.norm()))
        return self.last(torch.tanh(self.second(h)))


@case("a multi-grad hook at the root", *MARKS, refusal="hook")
class MultiGrad(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        g = torch.tanh(self.second(h))
        if h.requires_grad:
            torch.autograd.graph.register_multi_grad_hook((h, g), lambda gradients: None)
        return self.last(g)


@case("a hook on a node's grad_fn at the root", *MARKS, refusal="hook|grad_fn|traced")
class NodeHook(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(halved)
        return self.last(torch.tanh(self.second(h)))


def halved(gradients):
    return tuple(None if each is None else each * 0.5 for each in gradients)


class NodeLayer(nn.Linear):
    """A layer with a hook on a node of its own, before it runs, that takes half of its gradient."""

    def forward(self, x):
        h = torch.tanh(super().forward(x))
        if h.requires_grad:
            h.grad_fn.register_prehook(halved)
        return h * 2


@case("a hook before a node of its own, in a marked module", *MARKS)
class NodeWithin(Net):
    def __init__(self):
        super().__init__()
        self.second = NodeLayer(WIDTH, WIDTH)


class ResultNodeLayer(nn.Linear):
    """Likewise behind the node of its result, by its edge."""

    def forward(self, x):
        h = torch.tanh(super().forward(x))
        if h.requires_grad:
            get_gradient_edge(h).node.register_hook(lambda made, _: halved(made))
        return h


@case("a hook behind the node of a marked module's result", *MARKS)
class ResultNode(Net):
    def __init__(self):
        super().__init__()
        self.second = ResultNodeLayer(WIDTH, WIDTH)


class GivenNodeLayer(nn.Linear):
    """A hook on the node of what it is given, by its edge."""

    def forward(self, x):
        if x.requires_grad:
            get_gradient_edge(x).node.register_hook(lambda made, _: halved(made))
        return super().forward(x)


@case("a hook on the node of what a marked module is given", *MARKS, refusal="hooks on to its node")
class GivenNode(Net):
    def __init__(self):
        super().__init__()
        self.second = GivenNodeLayer(WIDTH, WIDTH)


@case("a hook on a node at the root, by its edge", *MARKS, refusal="a hook on a node")
class RootNode(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        if h.requires_grad:
            get_gradient_edge(h).node.register_prehook(halved)
        return self.last(torch.tanh(self.second(h)))


class WeightNodeLayer(nn.Linear):
    """A hook on the node where its weight's gradient arrives."""

    def forward(self, x):
        if torch.is_grad_enabled():
            get_gradient_edge(self.weight).node.register_prehook(halved)
        return super().forward(x)


@case("a hook on the node of a parameter, in every forward of a marked module", *MARKS, refusal="hooks on to its node")
class WeightNode(Net):
    def __init__(self):
        super().__init__()
        self.second = WeightNodeLayer(WIDTH, WIDTH)


@case("a hook on the node of a parameter, in the builder", *MARKS)
class BuiltWeightNode(Net):
    def __init__(self):
        super().__init__()
        self.node = [get_gradient_edge(self.second.weight).node]
        self.node[0].register_prehook(halved)


@case("a global forward hook, as profilers and summaries set one", *MARKS)
class GlobalHook(Net):
    def forward(self, x):
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
        try:
            return super().forward(x)
        finally:
            handle.remove()


@case("spectral-norm-like pre-hook that writes a weight", *MARKS)
class WeightFromHook(Net):
    """`weight = g * v / |v|`, made anew before each forward, as old weight_norm does."""

    def __init__(self):
        super().__init__()
        weight = self.second.weight
        del self.second._parameters["weight"]
        self.second.register_parameter("weight_v", nn.Parameter(weight.data))
        self.second.weight = weight.data
        self.second.register_forward_pre_hook(self.make)

    @staticmethod
    def make(module, _):
        module.weight = module.weight_v / module.weight_v.norm()


@case("saved_tensors_hooks around a marked module", *MARKS, refusal="autograd saves")
class SavedHooks(Net):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
            h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(h)))


def hooked_loss(made, wanted):
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient * 0.5)
    return nn.functional.mse_loss(made, wanted)


@case("a loss that registers a hook on the output", *MARKS, loss=hooked_loss)
class HookedOutput(Net):
    pass


@case("a hook that is removed again", *MARKS)
class Removed(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 100).remove()
        return self.last(torch.tanh(self.second(h)))


class Counted(nn.Linear):
    """A forward hook that closes over the module counts its forwards; a table of functions that do reads that."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.inner, self.calls = nn.Linear(*sizes), 0

        def count(module, args, output):
            self.calls += 1

        self.inner.register_forward_hook(count)
        self.ways = {"damped": lambda y: self.inner(y) / self.calls}

    def forward(self, x):
        return self.ways["damped"](super().forward(x))


@case("a hook that closes over its module, in a marked module", *MARKS, inherent=True)
class HookOverSelf(Net):
    def __init__(self):
        super().__init__()
        self.second = Counted(WIDTH, WIDTH)


@case("a hook on a marked module that reads an attribute of the root", *MARKS, refusal="leads to")
class HookOverRoot(Net):
    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(lambda module, args, output: output * 2 if self.training else output)


LEFT = "changes its attribute 'out', and code outside of it reads or sets that"


@case("a hook that leaves a marked layer of torch's its output, for the root to read", *MARKS, refusal=LEFT)
class LeftOnLayer(Net):
    def __init__(self):
        super().__init__()
        self.first.out = torch.zeros(1, WIDTH)
        self.first.register_forward_hook(lambda module, args, output: setattr(module, "out", output.detach()))

    def forward(self, x):
        earlier = self.first.out.mean()
        return super().forward(x) + earlier


@case("an auxiliary loss that a marked module leaves on a layer of torch's inside of it", *MARKS, refusal=LEFT)
class LeftInside(Net):
    class Gated(nn.Sequential):
        def forward(self, x):
            made = super().forward(x)
            self[0].out = made.pow(2).mean()
            return made

    def __init__(self):
        super().__init__()
        self.second = self.Gated(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        made = super().forward(x)
        return made + sum(each.out for each in self.modules() if hasattr(each, "out"))


@case("a hook that the first forward registers (transformers' collected outputs)", "first", "second", "last")
class FirstTime(Net):
    class Hooking(nn.Linear):
        ready = False

        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.inner = nn.Tanh()

        def forward(self, x):
            if not self.ready:
                self.inner.register_forward_hook(lambda module, args, output: output * 2)
                self.ready = True
            return self.inner(super().forward(x))

    def __init__(self):
        super().__init__()
        self.second = self.Hooking()


class Late(nn.Linear):
    """Begins to leave something only after the capture."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls, self.aux = 0, 0.0

    def forward(self, x):
        self.calls += 1
        made = super().forward(x)
        if self.calls > 2:
            self.aux = float(made.detach().pow(2).mean())
        return made


@case("the root reads an attribute that a marked layer's forward changes from the third call on", *MARKS,
      inherent=True, refusal="changes its attribute 'aux', and code outside of it reads or sets that")  # fmt: skip
class LateLeft(Net):
    def __init__(self):
        super().__init__()
        self.first = Late(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x) + self.first.aux


@case("the root reads vars(layer) in which a marked layer's forward counts", *MARKS,
      refusal="changes its attribute 'calls', and code outside of it reads or sets that")  # fmt: skip
class VarsRead(LateLeft):
    def forward(self, x):
        return Net.forward(self, x) + vars(self.first)["calls"]


class Flipping(nn.Linear):
    def forward(self, x):
        self.training = not self.training
        return super().forward(x)


@case("the root reads the mode of a marked layer whose forward changes it", *MARKS,
      refusal="changes its attribute 'training', and code outside of it reads or sets that")  # fmt: skip
class FlippingMode(Net):
    def __init__(self):
        super().__init__()
        self.first = Flipping(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x) * (2.0 if self.first.training else 1.0)


SCALE = {"factor": 1.0}


@case("a hook between partitions reads a dict of its file that the root sets behind it", *MARKS,
      refusal="outside its partitions")  # fmt: skip
class HookOnName(Net):
    def __init__(self):
        super().__init__()
        SCALE["factor"] = 1.0

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * SCALE["factor"])
        SCALE["factor"] = 0.5
        return self.last(torch.tanh(self.second(h)))


@case("features by hooks that each forward puts on a frozen network and takes off again, unmarked", *MARKS)
class Perceived(Net):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)

    def features(self, x):
        kept = []
        handles = [each.register_forward_hook(lambda module, args, out: kept.append(out)) for each in self.frozen]
        self.frozen(x)
        for handle in handles:
            handle.remove()
        return sum(each.sum(1, keepdim=True) for each in kept)

    def forward(self, x):
        return super().forward(x) + self.features(torch.tanh(self.first(x)))


case(
    "features by hooks that each forward puts on a frozen network and takes off again, marked", *MARKS, "frozen",
    refusal="a hook on 'frozen.0' is set from outside",
)(type("PerceivedMarked", (Perceived,), {"__module__": __name__}))  # fmt: skip


@case("a hook that the root's first forward registers on a marked layer", *MARKS,
      refusal="a hook on 'second' is set from outside")  # fmt: skip
class HooksFirst(Net):
    def forward(self, x):
        if not self.second._forward_hooks:
            self.second.register_forward_hook(lambda module, args, out: out * 2)
        return super().forward(x)
