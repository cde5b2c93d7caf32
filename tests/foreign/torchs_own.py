"""Models in the manner of torch's pipelining registry and of torchgpipe's tests, and nn.Transformer's own modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from workloads import TOKENS, WIDTH, adam, next_token, numbers, tokens, workload


def pairs(rows, generator):
    x, y = numbers(rows, generator)
    return (x, torch.randn(rows, WIDTH, generator=generator, dtype=x.dtype)), y


@case("registry: matrices of the root, a constant buffer read late", "lin0", "lin1")
class Example(nn.Module):
    def __init__(self):
        super().__init__()
        self.mm0, self.mm1 = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.register_buffer("constant", torch.randn(WIDTH))
        self.lin0, self.lin1 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x, y=None):
        x = torch.relu(x @ self.mm0 + (0 if y is None else y))
        late = self.constant.clone()
        x = torch.relu(self.lin0(x)) + late
        return self.lin1(x @ self.mm1)


case("registry: two inputs", "lin0", "lin1", batch=pairs)(Example)


@case(
    "registry: keyword-only input",
    "lin0",
    "lin1",
    batch=lambda rows, generator: (
        {"x": numbers(rows, generator)[0], "scale": torch.ones(rows, 1, dtype=torch.float64) * 2},
        numbers(rows, generator)[1],
    ),
)
class Keywords(Example):
    def forward(self, x, *, scale):
        return super().forward(x) * scale


@case("registry: aliased parameter and aliased layer", "lin0", "last")
class Aliased(nn.Module):
    def __init__(self):
        super().__init__()
        self.mm1 = self.mm0 = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.lin1 = self.lin0 = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = torch.relu(self.lin0(x @ self.mm0))
        return self.last(torch.relu(self.lin1(x @ self.mm1)))


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.relu, self.outer = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.outer(self.relu(self.inner(x)))


@case("registry: a chain of perceptrons", "layers.*", "last")
class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.Sequential(*(Feed() for _ in range(4))), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@case("registry: unused layers in between", "layers.*", "last")
class SomeUnused(Chain):
    def __init__(self):
        super().__init__()
        self.unused = Feed()


@case("registry: a layer without a gradient (requires_grad False inputs only)", "layers.*", "frozen", "last")
class FrozenFirst(Chain):
    def __init__(self):
        super().__init__()
        self.frozen = Feed().requires_grad_(False)

    def forward(self, x):
        return super().forward(self.frozen(x))


@case("torchgpipe: an nn.Sequential with in-place ReLU")
def _():
    return workload(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, 1),
        )
    )


@case("torchgpipe: nested Sequentials", "0", "1.*", "2")
def _():
    return workload(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 1)
        )
    )


class Fork(nn.Module):
    def forward(self, x):
        return x, x.detach()


class Join(nn.Module):
    def forward(self, both):
        return both[0] * 0.5 + both[1]


@case("torchgpipe: tuples between, one detached")
def _():
    return workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Fork(), Join(), nn.Linear(WIDTH, 1)))


class Stash(nn.Module):
    """A skip that goes past others in a tuple."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, state):
        x, *skips = state if isinstance(state, tuple) else (state,)
        return (torch.tanh(self.inner(x)), *skips, x)


class Pop(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state):
        x, *skips = state
        x = torch.tanh(self.inner(torch.cat([x, skips.pop()], dim=1)))
        return (x, *skips) if skips else x


@case("torchgpipe: stash and pop in tuples")
def _():
    return workload(lambda: nn.Sequential(Stash(), Stash(), Pop(), Pop(), nn.Linear(WIDTH, 1)))


@case("torchgpipe: a layer that outputs something with no gradient", "first", "count", "last")
class WithCount(nn.Module):
    class Count(nn.Module):
        def forward(self, x):
            return x * 2, (x > 0).sum(1)

    def __init__(self):
        super().__init__()
        self.first, self.count, self.last = nn.Linear(WIDTH, WIDTH), self.Count(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        y, n = self.count(self.first(x))
        return self.last(y) * n.unsqueeze(1)


@case("torchgpipe: an exception never raised, dropout in eval", "first", "last")
class EvalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5).eval(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.drop(self.first(x)))


class Encoder(nn.Module):
    """The language model of PyTorch's tutorial."""

    mask = True

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), dtype=torch.float64)
        return self.head(self.encoder(self.embed(ids), mask=mask))


WORDS = dict(batch=tokens, loss=next_token, optimizer=adam)  # noqa: C408
case("nn.TransformerEncoder(mask=...), the encoder one partition", "embed", "encoder", "head", **WORDS)(Encoder)
case("nn.TransformerEncoder(mask=...), its layers partitions", "embed", "encoder.layers.*", "head", **WORDS)(Encoder)
case("nn.TransformerEncoder(mask=...), unmarked", "embed", "head", **WORDS)(Encoder)


class Causal(Encoder):
    def forward(self, ids):
        mask = torch.triu(torch.ones(ids.size(1), ids.size(1), dtype=torch.bool), diagonal=1)
        return self.head(self.encoder(self.embed(ids), mask=mask, is_causal=True))


case("nn.TransformerEncoder(mask, is_causal=True), the encoder one partition", "embed", "encoder", "head", **WORDS)(
    Causal
)
case(
    "nn.TransformerEncoder(mask, is_causal=True), its layers partitions", "embed", "encoder.layers.*", "head", **WORDS
)(Causal)


class Padded(Encoder):
    def forward(self, ids):
        padding = ids == 0
        padding[:, 0] = False
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))


case("nn.TransformerEncoder with a key padding mask, one partition", "embed", "encoder", "head", **WORDS)(Padded)
case(
    "nn.TransformerEncoder with a key padding mask, its layers partitions", "embed", "encoder.layers.*", "head", **WORDS
)(Padded)


class TimeFirst(Encoder):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0), 2, enable_nested_tensor=False
        )

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1), dtype=torch.float64)
        return self.head(self.encoder(self.embed(ids).transpose(0, 1), mask).transpose(0, 1))


case("nn.TransformerEncoder with time first, its layers partitions", "embed", "encoder.layers.*", "head", **WORDS)(
    TimeFirst
)


class Whole(nn.Module):
    """nn.Transformer, the targets shifted as its decoder's input."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, ids):
        start = torch.zeros_like(ids[:, :1])
        decoded = torch.cat([start, ids[:, :-1]], dim=1)
        mask = self.transformer.generate_square_subsequent_mask(ids.size(1), dtype=torch.float64)
        return self.head(self.transformer(self.embed(ids), self.embed(decoded), tgt_mask=mask))


case("nn.Transformer(tgt_mask=...), one partition", "embed", "transformer", "head", **WORDS)(Whole)
case(
    "nn.Transformer(tgt_mask=...), encoder and decoder partitions",
    "embed",
    "transformer.encoder",
    "transformer.decoder",
    "head",
    **WORDS,
)(Whole)
case("nn.Transformer(tgt_mask=...), its layers partitions", "embed", "transformer.*.layers.*", "head", **WORDS)(Whole)


@case("nn.MultiheadAttention with attn_mask and averaged weights", "embed", "attention", "head", **WORDS)
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, ids):
        x = self.embed(ids)
        mask = torch.ones(ids.size(1), ids.size(1)).triu_(1).bool()
        y, weights = self.attention(x, x, x, attn_mask=mask)
        return self.head(y + weights.sum(-1, keepdim=True))


@case("scaled_dot_product_attention at the root with is_causal", "embed", "project", "head", **WORDS)
class Sdpa(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.project, self.head = (
            nn.Embedding(TOKENS, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, TOKENS),
        )

    def forward(self, ids):
        q, k, v = self.project(self.embed(ids)).chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True))
