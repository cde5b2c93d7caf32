"""How well does an item answer a query? Two unequal towers, one for words and one for numbers, meet in a score."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import assigner

TOPICS = 8
PADDING = 0  # of the words; real ones start at 1


class WordEmbedding(nn.Module):
    """Words (rows, length) -> (rows, length, width)."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, words: Tensor) -> Tensor:
        """Add the position to each word."""
        return self.word(words) + self.position[: words.size(1)]


class QueryTower(nn.Module):
    """The dear tower, a transformer: words (rows, length) -> (rows, width)."""

    def __init__(self, *, vocabulary: int, length: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = assigner.partition(WordEmbedding(vocabulary, length, width))
        self.blocks = nn.ModuleList(
            assigner.partition(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            )
            for _ in range(blocks)
        )

    def forward(self, words: Tensor) -> Tensor:
        """Mean over the words that are there. The mask is worked out anew by each partition that needs it, not sent."""
        missing = words == PADDING
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=missing)
        weight = (~missing).to(x.dtype).unsqueeze(-1)
        return (x * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1)


class Layer(nn.Sequential):
    """A dense layer: (rows, source) -> (rows, target)."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__(nn.Linear(source, target), nn.LayerNorm(target), nn.GELU())


class Score(nn.Module):
    """Where the towers meet: query (rows, width) and item (rows, width) -> (rows,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(3 * width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, query: Tensor, item: Tensor) -> Tensor:
        """A small MLP over both and their product."""
        both = torch.cat((query, item, query * item), dim=1)
        return self.out(nn.functional.gelu(self.hidden(both))).squeeze(1)


class TwoTower(nn.Module):
    """Called with keywords, since a batch's inputs are a dict: words (rows, length), features (rows, features).

    Gives the rating of each pair, (rows,). Neither tower needs the other, so their partitions can
    work side by side on two workers.
    """

    def __init__(
        self, *, vocabulary: int, length: int, features: int, width: int, query_blocks: int, item_layers: int
    ) -> None:
        super().__init__()
        self.query = QueryTower(vocabulary=vocabulary, length=length, width=width, blocks=query_blocks)
        self.item = nn.Sequential(
            *(assigner.partition(Layer(width if n else features, width)) for n in range(item_layers))
        )
        self.score = assigner.partition(Score(width))

    def forward(self, words: Tensor, features: Tensor) -> Tensor:
        """Both towers, then the score."""
        return self.score(self.query(words), self.item(features))


@functools.cache
def hidden_truth(features: int) -> tuple[Tensor, Tensor]:
    """Where the items of each topic lie, (topics, features), and the direction of good ones, (features,)."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(TOPICS, features, generator=generator)
    return centres, nn.functional.normalize(torch.randn(features, generator=generator), dim=0)


def workload(
    *,
    vocabulary: int = 512,
    length: int = 32,
    features: int = 64,
    width: int = 128,
    query_blocks: int = 4,
    item_layers: int = 3,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    double: bool = False,
) -> assigner.Workload:
    """The model with its data, loss and optimizer.

    A query is words of one topic among others, an item is features near the centre of one topic. The rating to learn
    adds the item's quality, the query's mood, which goes with its topic, and 1 where both are of one topic.

    Args:
        vocabulary: Words; word w above 0 belongs to topic w % 8.
        length: The longest query.
        features: Numbers that describe an item.
        width: Of both towers, a multiple of 4.
        query_blocks: Transformer blocks of the query's tower.
        item_layers: Layers of the item's tower; the model has `query_blocks + item_layers + 2` partitions.
        batch_size: Pairs in a step.
        learning_rate: Of AdamW.
        double: In float64.
    """
    dtype = torch.float64 if double else torch.float32
    centres, direction = hidden_truth(features)

    def batch(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, (rows, *shape), generator=generator)

        topic, same = integers(0, TOPICS), integers(0, 2)
        of_item = (topic + (1 - same) * integers(1, TOPICS)) % TOPICS
        anything = integers(1, vocabulary, length)
        fitting = integers(0, (vocabulary - 1) // TOPICS, length) * TOPICS + topic[:, None]
        words = torch.where(integers(0, 3, length) > 0, fitting.where(fitting > 0, fitting + TOPICS), anything)
        words[torch.arange(length) >= integers(length // 2, length + 1, 1)] = PADDING
        noise = torch.randn(rows, features, generator=generator)
        items = centres[of_item] + 0.5 * noise
        mood = 2 * topic / (TOPICS - 1) - 1
        ratings = items @ direction + mood + same
        return {"words": words, "features": items.to(dtype)}, ratings.to(dtype)

    return assigner.Workload(
        model=lambda: TwoTower(
            vocabulary=vocabulary,
            length=length,
            features=features,
            width=width,
            query_blocks=query_blocks,
            item_layers=item_layers,
        ).to(dtype),
        batch=batch,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        batch_size=batch_size,
        name="two-tower",
    )
