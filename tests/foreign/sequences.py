"""RNNs, packed sequences, encoders with decoders, experts, state spaces."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from workloads import TOKENS, WIDTH, adam, next_token, tokens, workload

WORDS = dict(batch=tokens, loss=next_token, optimizer=adam)  # noqa: C408
MARKS = ("embed", "middle", "head")


class Net(nn.Module):
    """An embedding, something over time, a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(TOKENS, WIDTH), self.make(), nn.Linear(WIDTH, TOKENS)

    def make(self):
        return nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids):
        return self.head(self.middle(self.embed(ids))[0])


case("LSTM", *MARKS, **WORDS)(Net)
case("LSTM, unmarked", "embed", "head", **WORDS)(Net)


@case("GRU of two layers, bidirectional", *MARKS, **WORDS)
class Gru(Net):
    def make(self):
        return nn.GRU(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True)


@case("LSTM with its hidden state handed in and read", *MARKS, **WORDS)
class Stateful(Net):
    def forward(self, ids):
        start = torch.zeros(1, ids.size(0), WIDTH, dtype=torch.float64)
        y, (hidden, cell) = self.middle(self.embed(ids), (start, start))
        return self.head(y + hidden.transpose(0, 1) * torch.tanh(cell.transpose(0, 1)))


@case("LSTM with time first", *MARKS, **WORDS)
class TimeFirst(Net):
    def make(self):
        return nn.LSTM(WIDTH, WIDTH)

    def forward(self, ids):
        return self.head(self.middle(self.embed(ids.t()))[0].transpose(0, 1))


@case(
    "LSTM that carries its state from batch to batch (truncated backward)",
    *MARKS,
    inherent=True,
    refusal="attribute|state|traced|rows",
    **WORDS,
)
class Carried(Net):
    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, ids):
        start = None
        if self.state is not None and self.state[0].size(1) == ids.size(0):
            start = tuple(each.detach() for each in self.state)
        y, self.state = self.middle(self.embed(ids), start)
        return self.head(y)


@case("an RNN cell in a loop at the root that fills a preallocated output", "embed", "cell", "head", **WORDS)
class CellLoop(Net):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def make(self):
        return nn.Identity()

    def forward(self, ids):
        x = self.embed(ids)
        h = x.new_zeros(ids.size(0), WIDTH)
        y = x.new_zeros(x.shape)
        for t in range(ids.size(1)):
            h = self.cell(x[:, t], h)
            y[:, t] = h
        return self.head(y)


@case("an RNN cell in a loop, unmarked, outputs stacked", "embed", "head", **WORDS)
class CellStack(CellLoop):
    def forward(self, ids):
        x = self.embed(ids)
        h, made = x.new_zeros(ids.size(0), WIDTH), []
        for t in range(ids.size(1)):
            h = self.cell(x[:, t], h)
            made.append(h)
        return self.head(torch.stack(made, dim=1))


@case("a preallocated output filled inside a marked module", *MARKS, **WORDS)
class CellInside(Net):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(WIDTH, WIDTH)

        def forward(self, x):
            h = c = x.new_zeros(x.size(0), WIDTH)
            y = torch.empty_like(x)
            for t in range(x.size(1)):
                h, c = self.cell(x[:, t], (h, c))
                y[:, t] = h
            return y, None

    def make(self):
        return self.Loop()


def padded(rows, generator):
    ids, targets = tokens(rows, generator)
    return (ids, torch.randint(1, 6, (rows,), generator=generator).index_fill(0, torch.tensor([0]), 5)), targets


@case(
    "a packed sequence inside a marked module", *MARKS, refusal="cannot be traced",
    batch=padded, loss=next_token, optimizer=adam,
)  # fmt: skip
class PackedInside(Net):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.size(1))[0]

    def make(self):
        return self.Packed()

    def forward(self, ids, lengths):
        return self.head(self.middle(self.embed(ids), lengths))


@case(
    "a PackedSequence handed to a marked RNN",
    *MARKS,
    batch=padded,
    loss=next_token,
    optimizer=adam,
    refusal="PackedSequence|pack",
)
class PackedOutside(PackedInside):
    def make(self):
        return nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.middle(packed)[0], batch_first=True, total_length=ids.size(1))
        return self.head(y)


@case("seq2seq with teacher forcing in a loop (encoder and cell marked)", "embed", "encoder", "cell", "head", **WORDS)
class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.encoder = nn.Embedding(TOKENS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids):
        x = self.embed(ids)
        h = self.encoder(x)[1][0]
        scores = torch.zeros(*ids.shape, TOKENS, dtype=x.dtype)
        for t in range(ids.size(1)):
            h = self.cell(x[:, t], h)
            scores[:, t] = self.head(h)
        return scores


@case("decoder input shifted right in place, as T5 and BART do it", "embed", "encoder", "decoder", "head", **WORDS)
class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    @staticmethod
    def shift(ids):
        shifted = ids.new_zeros(ids.shape)
        shifted[:, 1:] = ids[:, :-1].clone()
        shifted[:, 0] = 1
        shifted.masked_fill_(shifted == -100, 0)
        return shifted

    def forward(self, ids):
        encoded = torch.tanh(self.encoder(self.embed(ids))).mean(1, keepdim=True)
        x = self.embed(self.shift((ids + 1) % TOKENS))
        return self.head(torch.tanh(self.decoder(torch.cat([x, encoded.expand_as(x)], dim=-1))))


class Experts(nn.Module):
    """Each token to its best expert, by masks."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            mask = chosen == n
            if mask.any():
                rows, places = mask.nonzero(as_tuple=True)
                y.index_add_(0, rows, expert(flat[rows]) * weights[rows, places].unsqueeze(1))
        return y.view_as(x)


class Moe(Net):
    def make(self):
        return Experts()

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.middle(x))


case("mixture of experts with `if mask.any()`, marked", *MARKS, **WORDS)(Moe)
case("mixture of experts with `if mask.any()`, unmarked", "embed", "head", **WORDS)(Moe)


@case(
    "mixture of experts with a loss of its own beside the output",
    *MARKS,
    batch=tokens,
    optimizer=adam,
    loss=lambda made, wanted: next_token(made[0], wanted) + 0.01 * made[1].mean(),
)
class Balanced(Moe):
    class WithLoss(Experts):
        def forward(self, x):
            share = self.gate(x).softmax(-1)
            return super().forward(x), share.square().sum(-1).mean(1, keepdim=True)

    def make(self):
        return self.WithLoss()

    def forward(self, ids):
        x = self.embed(ids)
        y, balance = self.middle(x)
        return self.head(x + y), balance


@case("early exit on a value inside a marked module", *MARKS, inherent=True, **WORDS)
class EarlyExit(Moe):
    class Halting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            for _ in range(4):
                x = torch.tanh(self.inner(x))
                if x.abs().mean() < 0.4:
                    break
            return x

    def make(self):
        return self.Halting()


@case("a selective state space with a scan in place", *MARKS, **WORDS)
class StateSpace(Moe):
    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay, self.inner = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            a, u = torch.sigmoid(self.decay), self.inner(x)
            h, made = torch.zeros_like(u[:, 0]), []
            for t in range(u.size(1)):
                h = a * h + u[:, t]
                made += [h]
            return torch.stack(made, 1)

    def make(self):
        return self.Scan()


@case("rotary positions and a key-value cache filled in place at the root", "embed", "middle", "head", **WORDS)
class Cached(Net):
    def make(self):
        return nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids):
        q, k, v = self.middle(self.embed(ids)).chunk(3, dim=-1)
        keys = torch.zeros(ids.size(0), 8, WIDTH, dtype=q.dtype)
        keys[:, : ids.size(1)] = k
        mask = torch.full((ids.size(1), 8), float("-inf"), dtype=q.dtype)
        mask = mask.triu(1)
        mask[:, ids.size(1) :] = float("-inf")
        weights = torch.softmax(q @ keys.transpose(1, 2) + mask, dim=-1)
        return self.head(weights[..., : ids.size(1)] @ v)


@case("ALiBi biases written head by head", "embed", "middle", "head", **WORDS)
class Alibi(Cached):
    def forward(self, ids):
        q, k, v = self.middle(self.embed(ids)).chunk(3, dim=-1)
        size = ids.size(1)
        bias = torch.empty(size, size, dtype=q.dtype)
        for n in range(size):
            bias[n] = -torch.arange(size, dtype=q.dtype).sub(n).abs()
        return self.head(torch.softmax(q @ k.transpose(1, 2) + bias, dim=-1) @ v)


@case("a CTC loss with lengths")
def _():
    class Ctc(Net):
        def forward(self, ids):
            return super().forward(ids).log_softmax(-1)

    def batch(rows, generator):
        ids, _ = tokens(rows, generator)
        return ids, (ids[:, :2] % (TOKENS - 1) + 1, torch.full((rows,), 5), torch.full((rows,), 2))

    def loss(made, wanted):
        return F.ctc_loss(
            made.transpose(0, 1), wanted[0], wanted[1], wanted[2], reduction="none", zero_infinity=True
        ).mean()

    return workload(Ctc, *MARKS, batch=batch, loss=loss, optimizer=adam)


def labelled(rows, generator):
    """Texts with labels of one to three characters, padded with -100."""
    ids, _ = tokens(rows, generator)
    labels = ids[:, :3] % (TOKENS - 1) + 1
    labels[ids[:, 3:4] % 3 < torch.arange(3)] = -100
    return (ids, labels), None


class Spoken(Net):
    """Works out its CTC loss itself; the labels are one after the other."""

    def forward(self, ids, labels):
        made = super().forward(ids).log_softmax(-1).transpose(0, 1)
        heard = labels >= 0
        steps = torch.full((ids.size(0),), ids.size(1))
        return self.loss(made, labels.masked_select(heard), steps, heard.sum(-1))

    def loss(self, *given):
        return F.ctc_loss(*given, zero_infinity=True)


SPOKEN = dict(batch=labelled, loss=lambda made, _: made, optimizer=adam)  # noqa: C408
case("a CTC loss in the forward, labels picked by a mask", *MARKS, **SPOKEN)(Spoken)


@case("nn.CTCLoss in the forward", *MARKS, **SPOKEN)
class Criterion(Spoken):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CTCLoss(zero_infinity=True)

    def loss(self, *given):
        return self.criterion(*given)


@case("a CTC loss in a marked module", *MARKS, **SPOKEN)
class MarkedSpoken(Net):
    def __init__(self):
        super().__init__()
        self.head = SpokenHead(WIDTH, TOKENS)

    def forward(self, ids, labels):
        return self.head(self.middle(self.embed(ids))[0], labels)


class SpokenHead(nn.Linear):
    def forward(self, x, labels):
        made = super().forward(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(made, labels.clamp(min=1), [x.size(1)] * x.size(0), (labels >= 0).sum(-1).tolist())


@case(
    "an EmbeddingBag with values and offsets",
    "embed",
    "second",
    "head",
    refusal="rows|first dimension|offset",
    batch=lambda rows, generator: (
        (torch.randint(TOKENS, (rows * 3,), generator=generator), torch.arange(0, rows * 3, 3)),
        torch.randint(TOKENS, (rows,), generator=generator),
    ),
    loss=F.cross_entropy,
)
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.second, self.head = (
            nn.EmbeddingBag(TOKENS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, TOKENS),
        )

    def forward(self, values, offsets):
        return self.head(torch.tanh(self.second(self.embed(values, offsets))))


@case("an LSTM whose weights the root's forward flattens", *MARKS, **WORDS)
class Flattened(Net):
    def forward(self, ids):
        self.middle.flatten_parameters()
        return super().forward(ids)


class WeightDrop(nn.Module):
    """Sets the weights that it has dropped on the layer, as Salesforce's AWD-LSTM does."""

    def __init__(self, layer, name):
        super().__init__()
        self.layer, self.name = layer, name
        weight = layer._parameters.pop(name)
        layer.register_parameter(f"{name}_raw", nn.Parameter(weight.data))
        setattr(layer, name, weight.data)

    def forward(self, x):
        raw = getattr(self.layer, f"{self.name}_raw")
        setattr(self.layer, self.name, F.dropout(raw, 0.0, self.training))
        return self.layer(x)[0]


@case("an LSTM on which each forward sets weights that are dropped (AWD-LSTM)", "embed", "dropped", "head", **WORDS)
class Awd(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.dropped = WeightDrop(nn.LSTM(WIDTH, WIDTH, batch_first=True), "weight_hh_l0")

    def forward(self, ids):
        return self.head(self.dropped(self.embed(ids)))
