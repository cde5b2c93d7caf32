"""Packed sequences within partitions, batches each with a longest sentence of its own; between partitions, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from workloads import TOKENS, WIDTH, Reference, make_plan, next_token, pipeline_of, workload

from assigner import MarkingError
from assigner.model.marking import partition_graph


class Packing(nn.Module):
    """Packs by the lengths that it is given, and pads to the width that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.memory(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class Tagger(nn.Module):
    """Embedding, two layers that pack, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(Packing() for _ in range(2))

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, lengths)
        return self.head(x)


def sentences(rows: int, generator: torch.Generator, longest: int = 9) -> Any:
    ids = torch.randint(TOKENS, (rows, longest), generator=generator)
    return (ids, torch.randint(1, longest + 1, (rows,), generator=generator)), (ids + 1) % TOKENS


@pytest.mark.long
def test_packed_sequences_of_other_lengths():
    """Each batch is padded to its own longest sentence: its forward is captured by examples of that length."""
    made = workload(Tagger, "embed", "layers.*", "head", batch=sentences, loss=next_token)
    reference = Reference(made)
    with pipeline_of(made, make_plan(made, micro_batches=2)) as pipeline:
        for longest in (9, 7, 12, 7):
            batch = sentences(8, torch.Generator().manual_seed(longest), longest)
            pipeline.step(batch)
            reference.step(batch)
            assert reference.distance(pipeline.state_dict().items()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("does", ["is given", "returns"])
def test_a_packed_sequence_between_partitions(does: str):
    """Nobody can send one: in words, with what to mark."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle, self.last = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = rnn.pack_sequence([x, x])
            return self.last(rnn.pad_packed_sequence(self.middle(packed)[0])[0][:, 0])

    class Packs(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return rnn.pack_sequence([x, x])

    class Apart(Whole):
        def __init__(self) -> None:
            super().__init__()
            self.middle = Packs()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(rnn.pad_packed_sequence(self.middle(x))[0][:, 0])

    made = workload(Whole if does == "is given" else Apart, "middle", "last")
    with pytest.raises(MarkingError, match=f"'middle' {does} a PackedSequence") as caught:
        partition_graph(made)
    assert "pad_packed_sequence with total_length" in (caught.value.hint or "")
