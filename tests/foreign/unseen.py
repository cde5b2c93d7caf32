"""Writes that autograd does not see, through `.data` and detached views: into what a backward has saved, or not."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from workloads import WIDTH

REFUSED = r"in place through \.data"


class Unseen(nn.Module):
    """Layers, a parameter and a buffer between them; `glue(h, x)` is what each case has."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH))

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.glue(self.first(x), x))))


def unseen(name, *marks, refusal=""):
    return case(f"unseen: {name}", *(marks or ("first", "second", "last")), refusal=refusal)


@unseen("a sum with a table, then a mask through .data")
class Added(Unseen):
    def glue(self, h, x):
        y = h + self.table[0]
        h.data.masked_fill_(x > 0, 0.0)
        return y * 2 + h


@unseen("a ReLU that is marked, then a clamp through .data of what it read", "first", "relu", "second", "last")
class BehindReLU(Unseen):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def glue(self, h, x):
        del x
        y = self.relu(h)
        h.data.clamp_(-0.5, 0.5)
        return y + h


@unseen("a frozen layer, then a clamp through .data of what it read", "first", "frozen", "second", "last")
class BehindFrozen(Unseen):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def glue(self, h, x):
        del x
        y = self.frozen(h)
        h.data.clamp_(-0.5, 0.5)
        return y + h


@unseen("slots of a buffer, written through .data behind those that were read")
class Slots(Unseen):
    def glue(self, h, x):
        out = x.new_zeros(len(x), 4, WIDTH)
        out.data[:, 0] = 1
        for t in range(3):
            weights = (out[:, : t + 1] * h[:, None]).sum(2).softmax(1)
            h = h + (weights[..., None] * out[:, : t + 1]).sum(1)
            out.data[:, t + 1] = h
        return h


@unseen("a slot of a buffer, written through .data behind a marked module that read another one")
class SlotOfAnother(Unseen):
    def forward(self, x):
        out = x.new_zeros(len(x), 2, WIDTH)
        h = self.first(x)
        out.data[:, 0] = h.data
        out.data[:, 1] = self.second(out[:, 0]).data
        return self.last(torch.tanh(h * out[:, 1])) + self.second(x).sum(1, keepdim=True)


@unseen("slots of a buffer that is read whole each time", refusal=REFUSED)
class WholeBuffer(Unseen):
    def glue(self, h, x):
        out = x.new_zeros(len(x), 4, WIDTH)
        for t in range(4):
            h = h + (out * h[:, None]).sum(1)
            out.data[:, t] = h.data
        return h


@unseen("states of a recurrence, detached and reset in place")
class Reset(Unseen):
    def glue(self, h, x):
        state, total = torch.zeros_like(h), 0
        for t in range(3):
            state = h[:, t : t + 1] + state @ self.table
            total = total + state
            state = state.detach()
            state[x > 0.5] = 0
        return total


@unseen("distances to a codebook that moves, for an argmax alone")
class Nearest(Unseen):
    def glue(self, h, x):
        nearest = (h @ self.table).argmax(1)
        self.table.data.mul_(0.9)
        return h + F.one_hot(nearest, WIDTH).to(x.dtype)


@unseen("a sigmoid whose result is given others by .data =")
class Assigned(Unseen):
    def glue(self, h, x):
        del x
        y = torch.sigmoid(h)
        y.data = (y.data > 0.5).to(y.dtype)
        return y


@unseen("a later partition writes through .data to what a linear one has made", "first", "clamps", "second", "last")
class LaterPartition(Unseen):
    class Clamps(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            x.data.clamp_(-0.5, 0.5)
            return y

    def __init__(self):
        super().__init__()
        self.clamps = self.Clamps(WIDTH, WIDTH)

    def glue(self, h, x):
        del x
        return self.clamps(h) + h


@unseen("a later partition writes through .data to what glue has saved", "first", "clamps", "second", "last",
        refusal=REFUSED)  # fmt: skip
class LaterPartitionSaved(LaterPartition):
    def glue(self, h, x):
        return super().glue(torch.sigmoid(h), x)


@unseen("a product, then its factor doubled through .data", refusal=REFUSED)
class Product(Unseen):
    def glue(self, h, x):
        del x
        y = h * self.scale
        h.data.mul_(2)
        return y


@unseen("a sigmoid in a marked module, rounded through .data", refusal=REFUSED)
class RoundedResult(Unseen):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def glue(self, h, x):
        del x
        h.data.round_()
        return h


@unseen("a scale clamped through .data behind its use", refusal=REFUSED)
class ClampedBehind(Unseen):
    def glue(self, h, x):
        del x
        y = h * self.scale
        self.scale.data.clamp_(0.8, 1.2)
        return y


@unseen("a marked module's weight clamped through .data behind its use", refusal=REFUSED)
class WeightClamped(Unseen):
    def forward(self, x):
        h = self.second(self.first(x))
        self.second.weight.data.clamp_(-0.1, 0.1)
        return self.last(torch.tanh(h))


class InValues(nn.Linear):
    """Looks at its rows as values, and writes to what it is given or not."""

    def __init__(self, writes):
        super().__init__(WIDTH, WIDTH)
        self.writes = writes

    def forward(self, h):
        lengths = [int(each) % WIDTH for each in (h[:, 0] > 0).long().tolist()]
        for n, length in enumerate(lengths if self.writes else ()):
            h[n, WIDTH - length :] = 0
        return super().forward(h)


@unseen("two modules that need values, of which the second writes in place", "first", "enc", "dec", "second", "last")
class WrittenByValues(Unseen):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = InValues(False), InValues(True)

    def glue(self, h, x):
        del x
        return self.dec(self.enc(h))


@unseen("later steps of a sequence behind an LSTM", "first", "rnn", "second", "last", refusal=REFUSED)
class BehindLSTM(Unseen):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH)

    def glue(self, h, x):
        del x
        sequence = torch.stack([h, h * 2, h * 3])
        y, _ = self.rnn(sequence)
        sequence.data[1:].mul_(3)
        return y.sum(0) + sequence.sum(0)


@unseen("a marked module that writes to a .data it is given", "first", "relu", "second", "last", refusal=REFUSED)
class GivenCutOff(Unseen):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def glue(self, h, x):
        del x
        y = torch.tanh(h)
        self.relu(y.data)
        return y


BEHIND = r"changed in place .* that through \.data"


@unseen("a gate that reads a .data, then its tensor raised in place", refusal=BEHIND)
class GateOfData(Unseen):
    def glue(self, h, x):
        del x
        h = h * 1
        g = h.data * self.scale
        h += g
        return h


@unseen("a marked gate that is given a .data, then its tensor raised in place", "first", "gate", "second", "last",
        refusal=BEHIND)  # fmt: skip
class MarkedGateOfData(Unseen):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def glue(self, h, x):
        del x
        g = self.gate(h.data)
        h += g
        return h


@unseen("a marked gate that reads its own .data, then its tensor raised in place", "first", "gate", "second", "last",
        refusal=BEHIND)  # fmt: skip
class GateOfItsData(MarkedGateOfData):
    class Gate(nn.Linear):
        def forward(self, h):
            return super().forward(h.data)

    def __init__(self):
        super().__init__()
        self.gate = self.Gate(WIDTH, WIDTH)

    def glue(self, h, x):
        del x
        g = self.gate(h)
        h += g
        return h


@unseen("a table read through .data, then multiplied", refusal=BEHIND)
class TableBehind(Unseen):
    def glue(self, h, x):
        del x
        y = h @ self.table.data
        self.table.mul_(0.9)
        return y


@unseen("a table read through .data for an argmax, then multiplied")
class TableForArgmax(Unseen):
    def glue(self, h, x):
        nearest = (h @ self.table.data).argmax(1)
        self.table.mul_(0.9)
        return h + F.one_hot(nearest, WIDTH).to(x.dtype)


@unseen("sums with a .data, then its tensor raised in place")
class SumWithData(Unseen):
    def glue(self, h, x):
        h = h * 1
        g = h.data + self.scale
        h += g
        return h + x


@unseen("half of a .data read, the other half raised in place")
class OtherHalf(Unseen):
    def glue(self, h, x):
        del x
        h = h * 1
        g = h.data[:, :8] * self.scale[:8]
        h[:, 8:] += g[:, : WIDTH - 8]
        return h


class GatedUnseen(Unseen):
    """`gate` is marked, too: what `make_gate` gives, between the layers."""

    def __init__(self):
        super().__init__()
        self.gate, self.emb = self.make_gate(), nn.Embedding(WIDTH, WIDTH)

    def make_gate(self):
        return nn.Linear(WIDTH, WIDTH)


def gated(name, refusal=""):
    return unseen(name, "first", "gate", "second", "last", refusal=refusal)


@gated("a marked module that reads the .data of its own result, which is raised in place", refusal=BEHIND)
class OwnResult(GatedUnseen):
    class Gate(nn.Linear):
        def forward(self, h):
            h = h * 2
            return h, super().forward(h.data)

    def make_gate(self):
        return self.Gate(WIDTH, WIDTH)

    def glue(self, h, x):
        del x
        h, g = self.gate(h)
        h += g
        return h


@gated("a marked module that reads the .data of its own table, which is multiplied behind", refusal=BEHIND)
class OwnTable(GatedUnseen):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH))

        def forward(self, h):
            return F.linear(h, self.table.data)

    def make_gate(self):
        return self.Gate()

    def glue(self, h, x):
        del x
        y = self.gate(h)
        self.gate.table.mul_(0.9)
        return y


class Halves(GatedUnseen):
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH // 2, dtype=torch.float64))

        def forward(self, left, right):
            return torch.cat([self.scale * left, right], 1)

    def make_gate(self):
        return self.Gate()

    def glue(self, h, x):
        del x
        h = h * 1
        y = self.gate(h.data[:, : WIDTH // 2], h.data[:, WIDTH // 2 :])
        h[:, self.raised] += 1
        return h + y


@gated("a marked module that saves one half of a .data, which is raised in place", refusal=BEHIND)
class SavedHalf(Halves):
    raised = slice(None, WIDTH // 2)


@gated("a marked module that saves one half of a .data, the other is raised in place")
class UnsavedHalf(Halves):
    raised = slice(WIDTH // 2, None)


@gated("a marked router of a detached tensor, for an argmax alone, then that tensor raised in place")
class Router(GatedUnseen):
    def glue(self, h, x):
        del x
        chosen = self.gate(h.detach()).argmax(1)
        h += self.emb(chosen)
        return h


@gated("a marked module's detached result of a .data, by which its tensor is raised in place")
class DetachedResult(GatedUnseen):
    def glue(self, h, x):
        del x
        a = self.gate(h.data).detach()
        h += a
        return h


@gated("a marked gate of a .data, then its tensor unsqueezed in place")
class Unsqueezed(GatedUnseen):
    def glue(self, h, x):
        del x
        h = h * 1
        g = self.gate(h.data)
        h.unsqueeze_(1)
        return (h + g[:, None]).squeeze(1)


@unseen("a product with its own .data, in one operation")
class WithItself(Unseen):
    def glue(self, h, x):
        del x
        h = h * 1.0
        h *= h.data
        return h


class HandsOn(nn.Module):
    def forward(self, h):
        return h.data


@unseen("a .data that a marked module hands on, read before a write", "first", "cut", "second", "last")
class HandedOn(Unseen):
    def __init__(self):
        super().__init__()
        self.cut = HandsOn()

    def glue(self, h, x):
        del x
        y = self.scale * self.cut(h)
        h += y
        return h


class NeedsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        if not len(h.detach().numpy()):
            raise ValueError("no rows")
        return torch.sigmoid(self.gate(h.data))


@unseen("a .data that a module saves whose forward needs values", "first", "gate", "second", "last")
class SavedWithValues(Unseen):
    def __init__(self):
        super().__init__()
        self.gate = NeedsValues()

    def glue(self, h, x):
        del x
        g = self.gate(h)
        h += g
        return h
