# ruff: noqa: ARG005 - decorators on one line
"""Buffers that forward changes: assigned, in place, made later, and read by the same forward."""

from __future__ import annotations

import functools

import torch
from foreign.case import case
from torch import nn
from torch.distributions import AffineTransform, Independent, Normal, TransformedDistribution
from torch.nn.utils import prune
from workloads import WIDTH


class Two(nn.Module):
    """A layer, something with a buffer, a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), self.make(), nn.Linear(WIDTH, 1)

    def make(self):
        return nn.Identity()

    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.first(x))))


MARKS = ("first", "middle", "last")


def both(name, **words):
    """The module marked, and left to the glue beside marks."""

    def add(module):
        for marks, where in ((MARKS, "marked"), (("first", "last"), "unmarked")):
            made = type(module.__name__, (Two,), {"make": lambda self: module(), "__module__": __name__})
            case(f"{name}, {where}", *marks, **words)(made)
        return module

    return add


@both("moving mean by assignment", inherent=True)
class MovingMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return x


@both("moving mean by copy_", inherent=True)
class CopiedMean(MovingMean):
    def forward(self, x):
        if self.training:
            self.ema.copy_(0.9 * self.ema + 0.1 * x.detach().mean(0))
        return x - self.ema


@both("moving mean by a chain of in-place operations", inherent=True)
class ChainedMean(MovingMean):
    def forward(self, x):
        if self.training:
            self.ema.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.ema.clone()


@both("running normaliser that reads what it has just changed", inherent=True)
class RunningNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("square", torch.ones(WIDTH))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.square.lerp_(x.square().mean(0), 0.1)
        return (x - self.mean) * torch.rsqrt(self.square.clone() - self.mean.square() + 1e-3).clamp(max=5)


@both("running normaliser through .data", inherent=True)
class DataNorm(MovingMean):
    def forward(self, x):
        if self.training:
            self.ema.data.mul_(0.99).add_(0.01 * x.data.mean(0))
        return x * (1 + self.ema.clone())


@both("a counter of batches", inherent=True)
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x / (1 + 0.1 * self.calls)


@both("a counter by assignment", inherent=True)
class AssignedCounter(Counter):
    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
        return x / (1 + 0.1 * self.calls)


@both("a buffer that is None at first", inherent=True, refusal="None|buffer|attribute|state")
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("start", None)

    def forward(self, x):
        if self.start is None:
            self.start = x.detach().mean(0)
        return x - self.start


@both("a lazily made position buffer, non-persistent")
class LazyPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", None, persistent=False)

    def forward(self, x):
        if self.positions is None or self.positions.size(0) != x.size(1):
            self.positions = torch.linspace(0, 1, x.size(1), dtype=x.dtype)
        return x + self.positions


@both("codebook with moving averages (VQ-VAE)", inherent=True)
class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("codes", torch.randn(6, WIDTH, generator=generator))
        self.register_buffer("sizes", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        chosen = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                one_hot = nn.functional.one_hot(nearest, 6).to(x.dtype)
                self.sizes.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(one_hot.t() @ x, alpha=0.1)
                self.codes.copy_(self.sums / self.sizes.unsqueeze(1))
        return x + (chosen - x).detach()


@both("a queue of keys, written round (MoCo)", inherent=True)
class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(WIDTH, 16, generator=torch.Generator().manual_seed(4)))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        scores = x @ self.queue.clone().detach()
        if self.training:
            with torch.no_grad():
                where = (self.place + torch.arange(x.size(0))) % 16
                self.queue[:, where] = x.detach().t()
                self.place[0] = (self.place[0] + x.size(0)) % 16
        return x + scores.mean(1, keepdim=True)


@both("an annealed temperature in a buffer", inherent=True)
class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("temperature", torch.ones(1))

    def forward(self, x):
        y = torch.softmax(x / self.temperature.clone(), dim=1)
        if self.training:
            self.temperature.mul_(0.8).clamp_(min=0.1)
        return y


@both("power iteration as spectral_norm has it", inherent=True)
class Power(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("u", nn.functional.normalize(torch.ones(WIDTH), dim=0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                v = nn.functional.normalize(self.weight.t() @ self.u, dim=0)
                self.u.copy_(nn.functional.normalize(self.weight @ v, dim=0))
        v = nn.functional.normalize(self.weight.t() @ self.u.clone(), dim=0).detach()
        return x @ self.weight.t() / (self.u.clone() @ self.weight @ v)


class Graph(nn.Module):
    """A layer of a graph network, whose adjacency is sparse."""

    def __init__(self, *, is_dense):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        adjacency = torch.eye(WIDTH, dtype=torch.float64)
        adjacency[0, -1] = 0.5
        self.register_buffer("adjacency", adjacency if is_dense else adjacency.to_sparse())

    def forward(self, x):
        adjacency = self.adjacency if self.adjacency.is_sparse else self.adjacency.to_sparse()
        return torch.relu(self.lin(torch.sparse.mm(adjacency, x.T).T))


@case("an adjacency in a sparse buffer", "0", refusal="makes a sparse tensor.*dense buffer")
class SparseAdjacency(nn.Sequential):
    def __init__(self):
        super().__init__(Graph(is_dense=False), nn.Linear(WIDTH, 1))


@case("an adjacency in a dense buffer, sparse in the forward", "0")
class DenseAdjacency(nn.Sequential):
    def __init__(self):
        super().__init__(Graph(is_dense=True), nn.Linear(WIDTH, 1))


@case("parametrizations.spectral_norm", *MARKS, inherent=True)
class NewSpectral(Two):
    def make(self):
        return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


@case("old spectral_norm", *MARKS, inherent=True)
class OldSpectral(Two):
    def make(self):
        return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


@case("parametrizations.weight_norm", *MARKS)
class NewWeightNorm(Two):
    def make(self):
        return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


@case("old weight_norm", *MARKS)
class OldWeightNorm(Two):
    def make(self):
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


@case("old weight_norm in an unmarked layer", "first", "last")
class UnmarkedWeightNorm(Two):
    def make(self):
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


@case("parametrizations.orthogonal", *MARKS, refusal="builder")
class Orthogonal(Two):
    def make(self):
        return nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))


@case("a builder that fits drawn values by least squares (efficient-kan), unmarked and marked", "first", "last")
class Fitted(nn.Module):
    class Spline(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.base = nn.Linear(inputs, outputs)
            self.spline = nn.Parameter(torch.empty(outputs, inputs, 4))
            with torch.no_grad():
                points, noise = torch.rand(inputs, 6, 4).double(), torch.rand(inputs, 6, outputs).double()
                self.spline.data.copy_(torch.linalg.lstsq(points, noise).solution.permute(2, 0, 1))

        def forward(self, x):
            powers = torch.stack([torch.tanh(x) ** k for k in range(4)], -1)
            return self.base(x) + torch.einsum("bik,oik->bo", powers, self.spline)

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (self.Spline(WIDTH, n) for n in (WIDTH, WIDTH, 1))

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


@case("a builder that whitens drawn weights by their singular and eigenvalues", *MARKS)
class Whitened(Two):
    def make(self):
        layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            values, basis = torch.linalg.eigh(layer.weight @ layer.weight.mT + torch.eye(WIDTH))
            layer.weight.copy_(basis @ (values.rsqrt()[:, None] * basis.mT) @ layer.weight)
            layer.weight.div_(torch.linalg.matrix_norm(layer.weight, 2))
        return layer


@case("pruning masks of torch.nn.utils.prune", *MARKS)
class Pruned(Two):
    def make(self):
        layer = nn.Linear(WIDTH, WIDTH)
        prune.l1_unstructured(layer, "weight", amount=0.3)
        return layer


@case("BatchNorm, marked with its layer", *MARKS, inherent=True)
class Batch(Two):
    def make(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


@case("BatchNorm whose running mean its parent assigns", *MARKS, inherent=True, refusal="assigns the running stat")
class Halving(Two):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            made = self.norm(x)
            if self.training:
                self.norm.running_mean = self.norm.running_mean * 0.5
            return made

    def make(self):
        return self.Normed()


@case("BatchNorm, unmarked", "first", "last", inherent=True)
class UnmarkedBatch(Two):
    def make(self):
        return nn.BatchNorm1d(WIDTH)


@case("BatchNorm with momentum None", *MARKS, inherent=True)
class Cumulative(Two):
    def make(self):
        return nn.BatchNorm1d(WIDTH, momentum=None)


@case("BatchNorm kept in eval by an overridden train", *MARKS)
class FrozenBatch(Two):
    def make(self):
        return nn.BatchNorm1d(WIDTH)

    def train(self, mode=True):
        super().train(mode)
        self.middle.eval()
        return self


@case("InstanceNorm with running statistics", "first", "middle", "last", inherent=True)
class Instance(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(4 * WIDTH, 1)
        self.middle = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)

    def forward(self, x):
        return self.last(torch.relu(self.middle(self.first(x.unsqueeze(1)))).flatten(1))


@case("one buffer under two modules", "first", "second", "last", inherent=True, refusal="buffer|share")
class SharedBuffer(nn.Module):
    class Layer(nn.Linear):
        def __init__(self, seen):
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("seen", seen)

        def forward(self, x):
            if self.training:
                self.seen.add_(x.detach().mean(0))
            return super().forward(x) + 0.1 * self.seen.clone()

    def __init__(self):
        super().__init__()
        seen = torch.zeros(WIDTH, dtype=torch.float64)  # of another type, a conversion would part them
        self.first, self.second, self.last = self.Layer(seen), self.Layer(seen), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


@case("a buffer of the root read by two places and changed at the end", "first", "second", "last", inherent=True)
class RootBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x):
        h = self.first(x) + self.shift
        g = self.second(torch.tanh(h)) - self.shift
        if self.training:
            self.shift.mul_(0.5).add_(g.detach().mean(0))
        return self.last(g)


@case(
    "a plain tensor attribute (no buffer) that forward updates", *MARKS, inherent=True, refusal="attribute|state|buffer"
)
class TensorAttribute(Two):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = torch.zeros(WIDTH, dtype=torch.float64)

        def forward(self, x):
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    def make(self):
        return self.Plain()


@case(
    "a plain tensor attribute of the root that forward updates",
    "first",
    "last",
    inherent=True,
    refusal="attribute|state|buffer|constant",
)
class RootTensorAttribute(Two):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x):
        h = self.first(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.last(h - self.mean)


@case("a module that keeps its last attention on itself", *MARKS)
class KeptAttention(Two):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.attention = None

        def forward(self, x):
            self.attention = torch.softmax(self.inner(x), dim=1)
            return x * self.attention

    def make(self):
        return self.Keeping()


@case("the root keeps a hidden value on itself", "first", "last")
class RootKeeps(Two):
    def forward(self, x):
        self.hidden = self.first(x)
        return self.last(torch.tanh(self.hidden))


@case("a loss that a marked module keeps on itself, read at the root", *MARKS, refusal="attribute|hook")
class AuxiliaryKept(KeptAttention):
    def forward(self, x):
        h = self.middle(self.first(x))
        return self.last(h) + self.middle.attention.square().mean(1, keepdim=True)


@case("a loss that a marked module keeps on itself, added at the root if it is there", *MARKS, refusal="nobody sends")
class AuxiliaryAdded(KeptAttention):
    def forward(self, x):
        made = self.last(self.middle(self.first(x)))
        kept = self.middle.attention
        return made if kept is None else made + kept.square().mean(1, keepdim=True)


@case("losses that a marked module lists on itself, added up at the root", *MARKS, refusal="nobody sends")
class AuxiliaryListed(Two):
    class Listing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.losses = []

        def forward(self, x):
            self.losses = [self.inner(x).square().mean(1, keepdim=True)]
            return torch.tanh(self.inner(x))

    def make(self):
        return self.Listing()

    def forward(self, x):
        return self.last(self.middle(self.first(x))) + sum(self.middle.losses)


class Table(nn.Module):
    """Adds a table that it has made and not registered."""

    def __init__(self):
        super().__init__()
        self.table = torch.arange(float(WIDTH), dtype=torch.float64).sin()

    def read(self):
        return self.table

    def forward(self, x):
        return x + self.read()


both("a table in a plain attribute (vit-pytorch)")(Table)


@both("a table in a plain attribute, moved in each forward (SimpleViT)")
class MovedTable(Table):
    def forward(self, x):
        return x + self.table.to(x.device, dtype=x.dtype)


@both("a drawn table in a list of tuples")
class DrawnTable(Table):
    def __init__(self):
        super().__init__()
        self.table = [(torch.randn(WIDTH, dtype=torch.float64), "name")]

    def read(self):
        return self.table[0][0]


class Betas:
    """A schedule of noise, no module."""

    def __init__(self):
        self.betas = torch.linspace(0.1, 0.9, WIDTH, dtype=torch.float64)
        self.remaining = (1 - self.betas).cumprod(0)


@both("a schedule object that holds tensors (diffusion)")
class Scheduled(Table):
    def __init__(self):
        super().__init__()
        self.table = Betas()

    def read(self):
        return self.table.betas * self.table.remaining


@both("a distribution of torch's, and a call of torch's with a table (functools.partial)")
class GivenTable(Table):
    def __init__(self):
        super().__init__()
        scale = torch.linspace(1.0, 2.0, self.table.shape[-1])
        self.prior = Independent(TransformedDistribution(Normal(self.table, scale), [AffineTransform(0.0, scale)]), 1)
        self.table = functools.partial(torch.add, self.table)

    def read(self):
        return self.table(self.prior.base_dist.base_dist.variance * self.prior.base_dist.transforms[0].scale)


TABLES = {}


@both("a table in a cache at the top of the file, filled by the builder")
class CachedTable(Table):
    def __init__(self):
        super().__init__()
        TABLES["sin"] = self.table
        del self.table

    def read(self):
        return TABLES["sin"]


@both("a function that closes over a table")
class ClosedTable(Table):
    def __init__(self):
        super().__init__()
        table = self.table
        self.table = lambda: table * 2

    def read(self):
        return self.table()


@both("an attribute that is another name of a buffer", refusal="has the memory of a parameter or a buffer")
class TwiceNamed(Table):
    def __init__(self):
        super().__init__()
        self.register_buffer("registered", self.table)


@both("a tensor in an attribute that forward exchanges", inherent=True, refusal="register_buffer")
class Exchanged(Table):
    def forward(self, x):
        made = x + self.table
        self.table = x.detach().mean(0)
        return made


@both("a tensor in an attribute that forward writes", inherent=True, refusal="register_buffer")
class Written(Table):
    def forward(self, x):
        self.table += x.detach().mean(0)
        return x + self.table


class Closed(dict):
    """As diffusers' FrozenDict."""

    def update(self, *_, **__):
        raise TypeError("nothing of a Closed is updated")


@both("a dict that forbids updates (diffusers' configs)")
class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Closed(scale=2.0)

    def forward(self, x):
        return x * self.config["scale"]


class NoLoss(nn.Module):
    """Of a vector quantizer: a constant stands for "no loss" in eval mode, which glue between partitions reads."""

    persistent, writes = False, False

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("none", torch.randn(()), persistent=self.persistent)
        self.register_buffer("table", torch.randn(2, 1), persistent=self.persistent)

    def forward(self, x):
        z = self.first(x)
        loss = z.square().mean() if self.training else self.none
        y = self.last(torch.tanh(self.second(z)))
        if not self.training:
            y = y * self.table[1] + self.none
            if self.writes:
                self.none.add_(1)
        return y + loss


ENDS = ("first", "second", "last")
case("constant buffers that only eval's glue reads, in no state_dict", *ENDS, inherent=True)(NoLoss)


@case("constant buffers that only eval's glue reads, in the state_dict", *ENDS, inherent=True)
class NoLossInState(NoLoss):
    persistent = True


@case("a buffer that only eval's glue reads and writes", *ENDS, refusal="needs the buffer 'none'")
class NoLossWritten(NoLoss):
    writes = True
