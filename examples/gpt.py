"""A small GPT that predicts the next byte of English text; its partitions are marked in code."""

from __future__ import annotations

import functools
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

import assigner

BYTES = 256


class Embedding(nn.Module):
    """Tokens and their positions as vectors: (rows, length) -> (rows, length, width)."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Add the two and drop some."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class Attention(nn.Module):
    """Causal self-attention: (rows, length, width) -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Each position looks at itself and at what came before."""
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    """A pre-norm transformer block: (rows, length, width) -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the MLP, each added to the residual stream."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Head(nn.Module):
    """The final norm and the scores of the next token: (rows, length, width) -> (rows, length, vocabulary)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Score every token."""
        return self.out(self.norm(x))


class GPT(nn.Module):
    """Tokens (rows, length) -> scores of the next token (rows, length, vocabulary).

    `assigner.partition` marks a submodule as one partition; the model stays an ordinary one.
    """

    def __init__(
        self, *, vocabulary: int, context: int, width: int, heads: int, blocks: int, tied: bool, dropout: float
    ) -> None:
        super().__init__()
        self.embed = assigner.partition(Embedding(vocabulary, context, width, dropout))
        self.blocks = nn.ModuleList(assigner.partition(Block(width, heads, dropout)) for _ in range(blocks))
        self.head = assigner.partition(Head(vocabulary, width))
        self.apply(_initialise)
        for block in self.blocks:  # GPT-2: the residual stream keeps its size however many blocks add to it
            for last in (block.attention.out, block.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / (2 * blocks) ** 0.5)
        if tied:
            self.head.out.weight = self.embed.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Embedding, blocks, head."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@functools.cache
def read_text(path: str) -> Tensor:
    """A file's bytes; without a path 0.5 MB of English that comes with every Python: its language reference."""
    data = Path(path).read_bytes() if path else "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def workload(
    *,
    blocks: int = 12,
    width: int = 128,
    heads: int = 4,
    context: int = 64,
    vocabulary: int = BYTES,
    tied: bool = False,
    dropout: float = 0.0,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    text: str = "",
    double: bool = False,
) -> assigner.Workload:
    """The model with its data, loss and optimizer.

    Args:
        blocks: Transformer blocks; with embedding and head the model has `blocks + 2` partitions.
        width: Of the residual stream.
        heads: Of the attention; they share the width.
        context: Bytes that the model sees.
        vocabulary: 256 for bytes; more makes a larger embedding and head.
        tied: Embedding and head share one matrix.
        dropout: Share of values that are dropped.
        batch_size: Windows in a step.
        learning_rate: Of AdamW.
        text: A file to learn from; empty: Python's own language reference.
        double: In float64.
    """

    def model() -> nn.Module:
        made = GPT(
            vocabulary=vocabulary, context=context, width=width, heads=heads, blocks=blocks, tied=tied, dropout=dropout
        )
        return made.double() if double else made

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        data = read_text(text)
        starts = torch.randint(len(data) - context, (rows, 1), generator=generator)
        windows = data[starts + torch.arange(context + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    return assigner.Workload(
        model=model,
        batch=batch,
        loss=lambda scores, targets: nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01),
        batch_size=batch_size,
        name="gpt",
    )
