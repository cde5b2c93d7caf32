"""Aliases between partitions: returned inputs, views, one tensor twice, memory layout, shared modules."""

from __future__ import annotations

import tempfile
import weakref

import torch
from foreign.case import case
from safetensors.torch import load_model, save_model
from torch import nn
from workloads import WIDTH, workload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), self.make(), nn.Linear(WIDTH, 1)

    def make(self):
        return nn.Identity()

    def forward(self, x):
        h = self.first(x)
        y = self.middle(h)
        y += 1
        return self.last(torch.tanh(h) * torch.tanh(y))


MARKS = ("first", "middle", "last")
WRITE = "alias|in place|write|view|same"

case("a marked Identity's output written, its input read after", *MARKS, refusal=WRITE)(Net)


@case("a marked Dropout(0)'s output written, its input read after", *MARKS, refusal=WRITE)
class Dropped(Net):
    def make(self):
        return nn.Dropout(0.0)


@case("a marked Flatten's output written, its input read after", *MARKS, refusal=WRITE)
class Flattened(Net):
    def make(self):
        return nn.Flatten()


@case("a marked module returns a view of its input, the root writes into it", *MARKS, refusal=WRITE)
class View(Net):
    class Half(nn.Module):
        def forward(self, x):
            return x[:, :4]

    def make(self):
        return self.Half()

    def forward(self, x):
        h = self.first(x) * 1.0
        self.middle(h).mul_(3)
        return self.last(torch.tanh(h))


@case("a marked module returns one tensor twice, the root writes into one", *MARKS, refusal=WRITE)
class Twice(Net):
    class Pair(nn.Module):
        def forward(self, x):
            y = x + 0.5
            return y, y

    def make(self):
        return self.Pair()

    def forward(self, x):
        one, other = self.middle(self.first(x))
        one += 1
        return self.last(one + 2 * other)


@case("a marked module returns a tensor and a view of it, the root writes into the view", *MARKS, refusal=WRITE)
class Base(Net):
    class Pair(nn.Module):
        def forward(self, x):
            y = x * 2
            return y, y[:, :2]

    def make(self):
        return self.Pair()

    def forward(self, x):
        whole, part = self.middle(self.first(x))
        part.zero_()
        return self.last(whole)


@case("a marked module changes its argument in place, the root reads it after", *MARKS, refusal=WRITE)
class Changed(Net):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x += 1
            return self.inner(x)

    def make(self):
        return self.InPlace()

    def forward(self, x):
        h = self.first(x)
        return self.last(self.middle(h) + h)


@case("a marked ReLU(inplace=True) before a residual sum", *MARKS, refusal=WRITE)
class InPlaceReLU(Net):
    def make(self):
        return nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.first(x) * 1.0
        return self.last(self.middle(h) + h)


@case("a marked module changes the model's own input in place", *MARKS, refusal=WRITE)
class InputChanged(Net):
    def make(self):
        return Changed.InPlace()

    def forward(self, x):
        x = x * 1.0
        h = self.middle(x)
        return self.last(self.first(h) + x)


@case("a marked module fills a buffer that it is handed (out argument)", *MARKS, refusal=WRITE)
class OutArgument(Net):
    class Fill(nn.Module):
        def forward(self, x, out):
            out.copy_(torch.tanh(x))

    def make(self):
        return self.Fill()

    def forward(self, x):
        h = self.first(x)
        out = torch.zeros(x.size(0), WIDTH, dtype=x.dtype)
        self.middle(h, out)
        return self.last(out)


@case("as_strided behind a marked transpose", *MARKS, refusal="strid|layout|memory")
class Strided(Net):
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(x).t()

    def make(self):
        return self.Transposed()

    def forward(self, x):
        h = self.middle(self.first(x))
        return self.last(h.as_strided((x.size(0), WIDTH), (WIDTH, 1)))


@case("view behind a marked transpose that is contiguous only there", *MARKS)
class ViewBehind(Strided):
    def forward(self, x):
        h = self.middle(self.first(x))
        return self.last(h.t().view(-1, WIDTH))


@case("asks is_contiguous of a marked module's output", *MARKS, refusal="strid|layout|contiguous")
class AsksContiguous(Strided):
    def forward(self, x):
        h = self.middle(self.first(x)).t()
        y = self.middle.inner(h.t().t())
        return self.last(h * 2 if h.t().is_contiguous() else h + 0 * y)


@case("channels_last between marked convolutions", "first", "middle", "last")
class ChannelsLast(Net):
    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4 * WIDTH, 1)

    def forward(self, x):
        x = x.view(-1, 1, 2, 4).to(memory_format=torch.channels_last)
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))).reshape(x.size(0), -1))


@case("an expanded output of a marked module, written after a clone", *MARKS)
class Expanded(Net):
    class Expand(nn.Module):
        def forward(self, x):
            return x.mean(1, keepdim=True).expand(-1, WIDTH)

    def make(self):
        return self.Expand()

    def forward(self, x):
        y = self.middle(self.first(x)).clone()
        y[:, 0] = 0
        return self.last(y)


@case("one module called twice", "block", "last")
class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.block(torch.tanh(self.block(x)))))


@case("one module under two names", "first", "second", "last")
class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@case("the second name of a shared module as the mark", "second", "last")
class SecondName(TwoNames):
    pass


class Holds(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.mix = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.mix(self.shared(x))


@case("a marked module that is called by another name of the module around it (CoaT)", "shared.0", "block.mix", "last")
class HeldElsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.block, self.last = Holds(self.shared), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.block(self.first(x)))


@case("blocks repeated in a list: [block] * 3", "blocks.*", "last")
class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.ModuleList([nn.Linear(WIDTH, WIDTH)] * 3), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


@case("a weight-shared Siamese encoder on two halves", "encoder", "last")
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        left, right = x.chunk(2, dim=1)
        return self.last((self.encoder(left) - self.encoder(right)).abs())


@case("a marked module called in training only", "first", "middle", "last")
class TrainingOnly(Net):
    def make(self):
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.first(x)
        if self.training:
            h = h + 0.1 * self.middle(h)
        return self.last(h)


@case(
    "the model gives back its input beside the output",
    "first",
    "last",
    loss=lambda made, wanted: nn.functional.mse_loss(made[0], wanted) + 0 * made[1].sum(),
)
class GivesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))), x


@case(
    "an output twice in a dict, the loss writes into one",
    "first",
    "last",
    refusal=WRITE,
    loss=lambda made, wanted: nn.functional.mse_loss(made["a"].mul_(2) * 0 + made["b"], wanted),
)
class OutputTwice(GivesInput):
    def forward(self, x):
        made = self.last(torch.tanh(self.first(x))) * 1.0
        return {"a": made, "b": made}


@case("the model writes into its own input", "first", "last", refusal=WRITE + "|input")
class WritesInput(GivesInput):
    def forward(self, x):
        x.clamp_(-1, 1)
        return self.last(torch.tanh(self.first(x)))


@case("a residual stream that marked blocks write into", "blocks.*", "last", refusal=WRITE)
class Stream(nn.Module):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = x.clone()
            x += torch.tanh(self.inner(x.clone()))
            return x

    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(self.Block() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class HandsOn(nn.Linear):
    """Returns its running mean, and how often it was called, beside its result."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.calls += 1
        return super().forward(x), self.mean.unsqueeze(0), self.calls


@case("a running mean that a marked module moves and returns, saved by two later ones", "a", "b", "c", inherent=True)
class ReadsMoved(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = HandsOn(), nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        y, mean, calls = self.a(x)
        return self.c(torch.tanh(self.b(y, mean.expand_as(y))) * mean) / calls


class TakesData(nn.Linear):
    """Gives what it reads other memory."""

    def forward(self, x):
        x.data = x.data * 2
        return super().forward(x)


@case(
    "x.data = in a marked module, of a value that another one reads", "a", "b", "c", refusal="changes a value that it"
)
class ReadsData(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), TakesData(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(y) + y)


class UsedAgain(nn.Module):
    """An unmarked part in front of the marked ones, and behind them in eval mode alone."""

    def __init__(self):
        super().__init__()
        self.part, self.first, self.last = self.make(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def make(self):
        return nn.LayerNorm(WIDTH)

    def front(self, x):
        return self.part(x)

    def behind(self, y):
        return self.part(y)

    def forward(self, x):
        y = self.last(torch.tanh(self.first(self.front(x))))
        return (y if self.training else self.behind(y)).mean(1, keepdim=True)


ENDS = ("first", "last")

case("in eval mode alone, an unmarked layer in front is called again behind the last partition", *ENDS)(UsedAgain)


@case("in eval mode alone, a product with an unmarked layer's weight behind the last partition", *ENDS)
class DecodesTied(UsedAgain):
    def make(self):
        return nn.Linear(WIDTH, WIDTH, bias=False)

    def behind(self, y):
        return y @ self.part.weight


@case("in eval mode alone, a marked module is given an unmarked layer's weight", *ENDS)
class GivenWeight(UsedAgain):
    class Scaled(nn.Linear):
        def forward(self, y, scale=None):
            return super().forward(y) if scale is None else super().forward(y) * scale

    def __init__(self):
        super().__init__()
        self.last = self.Scaled(WIDTH, WIDTH)

    def forward(self, x):
        given = () if self.training else (self.part.weight,)
        return self.last(torch.tanh(self.first(self.front(x))), *given).mean(1, keepdim=True)


@case("in eval mode alone, BatchNorm in front is called again", *ENDS, inherent=True)
class NormalisesAgain(UsedAgain):
    def make(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


class Normaliser(nn.Module):
    """Has the statistics of the data in buffers, and takes what it has noted of a batch back out (RevIN)."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.randn(WIDTH))

    def forward(self, x, back=False):
        if back:
            return (x / self.weight * self.deviation + self.mean) * self.scale
        self.deviation = x.std(1, keepdim=True).detach()
        return (x - self.mean) / self.deviation * self.weight


@case("in eval mode alone, a reversible normaliser takes back what it did in front", *ENDS)
class Reversed(UsedAgain):
    def make(self):
        return Normaliser()

    def behind(self, y):
        return self.part(y, back=True)


@case("in eval mode alone, buffers of an unmarked layer are read", *ENDS)
class ReadsBuffers(Reversed):
    def behind(self, y):
        return y + self.part.mean.abs().sqrt()


@case(
    "in eval mode alone, an unmarked layer is called again whose forwards in training move a number",
    *ENDS, refusal="changes its attribute 'scale', and code outside of it",
)  # fmt: skip
class Anneals(Reversed):
    class Annealed(Normaliser):
        def forward(self, x, back=False):
            if self.training:
                self.scale = self.scale * 0.9
            return super().forward(x, back)

    def make(self):
        return self.Annealed()


@case("in eval mode alone, a softmax layer", *ENDS)
class Softened(UsedAgain):
    def make(self):
        return nn.Softmax(1)

    def front(self, x):
        return x


@case("in eval mode alone, an unmarked layer behind is called in front", *ENDS, refusal="which comes later")
class CalledBefore(UsedAgain):
    def forward(self, x):
        x = x if self.training else self.part(x)
        return self.part(self.last(torch.tanh(self.first(x)))).mean(1, keepdim=True)


@case(
    "in eval mode alone, a table of the middle is taken from the batch in front and behind",
    "first", "second", "last", refusal="'first' needs the buffer 'table'",
)  # fmt: skip
class TakenBefore(UsedAgain):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(WIDTH))

    def forward(self, x):
        if self.training:
            return self.last(self.second(torch.tanh(self.first(x))) * self.table).mean(1, keepdim=True)
        taken = x - self.table
        return self.last(self.second(self.first(taken)) * taken).mean(1, keepdim=True)


@case("in eval mode alone, a marked layer is called again", *ENDS, refusal="'first' is called again")
class MarkedAgain(UsedAgain):
    def behind(self, y):
        return self.first(y)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@case("one weight for two marked layers, loaded by safetensors in the builder (load_model)")
def _():
    folder = tempfile.TemporaryDirectory()
    file = f"{folder.name}/saved"
    with torch.random.fork_rng():
        torch.manual_seed(11)
        save_model(Tied(), file)

    def loaded():
        model = Tied()
        load_model(model, file)
        return model

    weakref.finalize(loaded, folder.cleanup)  # it goes with the last workload that has this builder
    return workload(loaded, "first", "second", "last")
