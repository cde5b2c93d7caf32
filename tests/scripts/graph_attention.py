"""gat of pytorch/examples: attention over a graph, all of it in one batch; a part of the nodes trains, early stopping.

The nodes are no rows: they attend to each other, so that nothing of the batch can be cut.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn

from assigner import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, EPOCHS, NODES, FEATURES, CLASSES, PATIENCE = 13, 14, 24, 6, 3, 2
MICRO_BATCHES, STOP_AT = 1, 4


class GraphAttentionLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, heads: int, *, concat: bool) -> None:
        super().__init__()
        self.heads, self.outputs, self.concat = heads, outputs, concat
        self.W = nn.Parameter(torch.empty(inputs, heads * outputs))
        self.a = nn.Parameter(torch.empty(heads, 2 * outputs, 1))
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        nodes = h.shape[0]
        h = torch.mm(h, self.W).view(nodes, self.heads, self.outputs).permute(1, 0, 2)
        source, target = torch.matmul(h, self.a[:, : self.outputs]), torch.matmul(h, self.a[:, self.outputs :])
        scores = F.leaky_relu(source + target.mT, 0.2).masked_fill(adjacency == 0, -9e16)
        mixed = torch.matmul(F.softmax(scores, dim=-1), h)
        if self.concat:
            return mixed.permute(1, 0, 2).reshape(nodes, -1)
        return mixed.mean(dim=0)


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gat1 = GraphAttentionLayer(FEATURES, 4, 2, concat=True)
        self.gat2 = GraphAttentionLayer(8, CLASSES, 1, concat=False)

    def forward(self, features: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.gat2(F.elu(self.gat1(features, adjacency)), adjacency), dim=1)


def graph(nodes: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, adjacency and the class of each node; nodes of a class are often neighbours."""
    labels = torch.randint(CLASSES, (nodes,), generator=generator)
    features = torch.randn(nodes, FEATURES, generator=generator, dtype=torch.float64)
    features[torch.arange(nodes), labels] += 1
    chance = torch.where(labels[:, None] == labels, 0.3, 0.05)
    adjacency = (torch.rand(nodes, nodes, generator=generator) < chance).double()
    return features, ((adjacency + adjacency.mT + torch.eye(nodes)) > 0).double(), labels


X, ADJACENCY, LABELS = graph(NODES, torch.Generator().manual_seed(0))
INDICES = {
    split: torch.randperm(NODES, generator=torch.Generator().manual_seed(1))[8 * n : 8 * n + 8]
    for n, split in enumerate(("train", "val", "test"))
}


def hits(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.argmax(dim=1).eq(labels).double().mean()


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = GAT().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=5e-4)

    def evaluate(split: str) -> tuple[float, float]:
        model.eval()
        with torch.no_grad():
            output, index = model(X, ADJACENCY), INDICES[split]
            return F.nll_loss(output[index], LABELS[index]).item(), hits(output[index], LABELS[index]).item()

    best, waited = math.inf, 0
    for _ in range(EPOCHS):
        model.train()
        optimizer.zero_grad()
        output, index = model(X, ADJACENCY), INDICES["train"]
        loss = F.nll_loss(output[index], LABELS[index])
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), accuracy=hits(output[index], LABELS[index]))
        val_loss, val_accuracy = evaluate("val")
        log(val_loss=val_loss, val_accuracy=val_accuracy)
        if val_loss < best:
            best, waited = val_loss, 0
        else:
            waited += 1
            if waited >= PATIENCE:
                break
    test_loss, test_accuracy = evaluate("test")
    log(test_loss=test_loss, test_accuracy=test_accuracy)
    return model


def over_nodes(function: Any) -> Any:
    """Of the nodes that the targets name."""
    return lambda output, targets: function(output[targets["nodes"]], targets["labels"][targets["nodes"]])


def workload() -> Workload:
    def batch(rows: int, generator: torch.Generator) -> Any:
        features, adjacency, labels = graph(rows, generator)
        return (features, adjacency), {"labels": labels, "nodes": torch.arange(rows // 3)}

    return Workload(
        model=lambda: GAT().double(),
        batch=batch,
        loss=over_nodes(F.nll_loss),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05, weight_decay=5e-4),
        metrics={"accuracy": over_nodes(hits)},
        batch_size=NODES,
        max_micro_batches=1,
        seed=SEED,
        marks=("*",),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    def batch(split: str) -> Any:
        return (X, ADJACENCY), {"labels": LABELS, "nodes": INDICES[split]}

    best, waited = pipeline.load(folder / "last") if (folder / "last").exists() else (math.inf, 0)
    for _ in range(pipeline.steps, EPOCHS):
        result = pipeline.step(batch("train"))
        log(loss=result, accuracy=result.metrics["accuracy"])
        result = pipeline.evaluate(batch("val"))
        log(val_loss=result, val_accuracy=result.metrics["accuracy"])
        if result < best:
            best, waited = float(result), 0
        else:
            waited += 1
            if waited >= PATIENCE:
                break
        if pipeline.stop_requested():
            pipeline.save(folder / "last", (best, waited))
            return
    result = pipeline.evaluate(batch("test"))
    log(test_loss=result, test_accuracy=result.metrics["accuracy"])


def used(model: nn.Module) -> list[float]:
    """The classes of all nodes."""
    model.eval()
    with torch.no_grad():
        return model(X, ADJACENCY).argmax(1).tolist()
