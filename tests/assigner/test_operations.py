"""What ranks compare of their forwards: the order of their operations, and on what they run."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from workloads import WIDTH, workload

from assigner.model.marking import partition_graph

WAYS = {
    "in turn": lambda self, x: self.in_turn(x),
    "looked up": lambda self, x: self.key(x) * self.scales["key"],
    "sampled": lambda self, x: getattr(self, random.choice(self.names))(x),
    "one way of two": lambda self, x: self.in_turn(x) if x.sum() > 0 else x.sin(),
    "with values": lambda self, x: self.in_turn(x * float(x.detach().numpy().mean())),
}


class Going(nn.Module):
    """Its forward goes over names in the order that it is given."""

    def __init__(self, names: list[str], way: str) -> None:
        super().__init__()
        self.names, self.way = names, way
        self.key, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scales = {name: {"key": 0.5, "query": 2.0}[name] for name in names}

    def in_turn(self, x):
        for name in self.names:
            x = getattr(self, name)(x)
        return x

    def forward(self, x):
        if self.way in WAYS:
            return WAYS[self.way](self, x)
        if self.way in ("kept by name", "drawn by name"):
            found = {name: getattr(self, name)(x).tanh() for name in self.names}
            if self.way == "drawn by name":
                found = {name: torch.dropout(found[name], 0.5, train=True) for name in self.names}
            return found["key"] - found["query"]
        if self.way == "written":
            x = x.clone()
            for name in self.names:
                x[:, : 1 + len(name)] = self.scales[name]
            return x
        if self.way == "other operations":
            return x.tanh() if self.names[0] == "key" else x.sigmoid()
        for name in self.names:
            if self.way == "numbers":
                x = torch.tanh(x * self.scales[name])
            else:
                x = getattr(torch, {"key": "sin", "query": "tanh"}[name])(x)
        return x


@pytest.mark.parametrize(
    ("way", "kinds", "orders"),
    [
        ("in turn", 1, 2), ("numbers", 1, 2), ("functions", 1, 2), ("looked up", 1, 1), ("other operations", 2, 2),
        ("kept by name", 1, 1), ("drawn by name", 1, 2), ("written", 1, 2),
        ("one way of two", 1, 2), ("with values", 1, 2), ("sampled", 1, 2),
    ],
)  # fmt: skip
def test_an_order_is_told_from_other_operations(way, kinds, orders):
    """The same forward has the same numbers in each capture; in another order the first of them stays."""
    found = []
    for seed, names in enumerate((["key", "query"], ["query", "key"], ["key", "query"])):
        random.seed(seed)
        made = workload(lambda names=names: nn.Sequential(Going(names, way), nn.Linear(WIDTH, WIDTH)), "0", "1")
        found.append(partition_graph(made).order["'0'"])
    assert len({kind for kind, _ in found}) == kinds
    assert len({order for _, order in found}) == orders
    assert found[0] == found[2]
