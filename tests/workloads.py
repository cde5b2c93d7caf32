"""Tiny models of every shape that a test needs, all in float64, and plans for them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from kept import kept
from torch import nn
from torch.utils import _pytree as pytree

from assigner import Pipeline
from assigner.formats.graph import topological_order
from assigner.formats.plan import Plan
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Replica, Stage
from assigner.model.marking import PartitionGraph, partition_graph
from assigner.model.marking.cut import recut
from assigner.model.marking.domain import input_key
from assigner.model.workload import Workload, call_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

WIDTH = 8
TOKENS = 11


class Block(nn.Module):
    """A residual block with dropout; returns (hidden, info) and takes a mask and plain values."""

    def __init__(self, dropout: float = 0.0, *, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.scale = scale

    def forward(self, x: torch.Tensor, *, mask: Any = None, flag: bool = True, length: int = 0) -> Any:
        hidden = F.gelu(self.inner(self.norm(x)))
        if mask is not None:
            hidden = torch.einsum("ij,bjd->bid", mask, hidden) / (length or 1)
        return x + self.drop(self.outer(hidden)) * self.scale, {"none": None, "flag": flag, "hidden": hidden}


class Language(nn.Module):
    """Embedding with positions, a mask from shapes, blocks, and a head whose weight may be the embedding's."""

    def __init__(self, blocks: int = 3, *, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.randn(6, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.tokens(ids) + self.positions[:length]
        mask = torch.ones(length, length, dtype=torch.float64, device=ids.device)
        mask.tril_()
        for block in self.blocks:
            x, _ = block(x, mask=mask, length=length)
        x += 1
        return self.head(self.norm(x))


class Skips(nn.Module):
    """A U of four parts: the first's output is read by the fourth, the second's by the third as well."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.parts[0](x))
        second = torch.tanh(self.parts[1](first))
        third = torch.tanh(self.parts[2](second) + second)
        return self.last(torch.cat([third, first], dim=1))


class Towers(nn.Module):
    """Two towers on two inputs, joined at the end; one of the inputs is read in the middle too."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.join = nn.Bilinear(WIDTH, WIDTH, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
        made = self.join(torch.relu(self.left(left)), torch.relu(self.right(right)) + left)
        return {"score": made, "nothing": None, "number": 3}


class Diamond(nn.Module):
    """A value with three readers, two of them in parallel; a detached one; a tensor handed past them all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate, self.merge = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(self.stem(x))
        up, down = torch.relu(self.up(made)), torch.relu(self.down(made))
        gate = torch.sigmoid(self.gate(down.detach()))
        return self.last(torch.cat([self.merge(up * gate + made), down + x], dim=1))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def numbers(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True)


def pairs(rows: int, generator: torch.Generator) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    x = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return (x[0], x[1]), x[0].sum(1, keepdim=True)


def tokens(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(TOKENS, (rows, 5), generator=generator)
    return ids, (ids + 1) % TOKENS


def next_token(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def workload(
    model: Callable[[], nn.Module],
    *marks: str,
    batch: Callable[[int, torch.Generator], Any] = numbers,
    loss: Callable[[Any, Any], torch.Tensor] = F.mse_loss,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    rows: int = 8,
    reduction: str = "mean",
) -> Workload:
    """A workload in float64 with seed 5."""
    return Workload(
        lambda: model().double(), batch, loss, optimizer, rows, marks=marks, seed=5, reduction=reduction, name="test"
    )


class ByTime(nn.Module):
    """A language model as torch's recurrent layers have it: (time, rows), with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.memory = nn.LSTM(WIDTH, WIDTH, 2)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.memory(self.tokens(ids))[0])


def steps_and_rows(rows: int, generator: torch.Generator, length: int = 6) -> Any:
    """Tokens and the next ones, (time, rows)."""
    ids = torch.randint(TOKENS, (length + 1, rows), generator=generator)
    return ids[:-1], ids[1:]


@kept
def recurrent() -> Workload:
    """Partitions tokens, memory and head; the rows are the second dimension."""
    return workload(ByTime, "tokens", "memory", "head", batch=steps_and_rows, loss=next_token)


@kept
def language(*, dropout: float = 0.0, tied: bool = True, rows: int = 8) -> Workload:
    """Partitions tokens, blocks.0 to blocks.2 and head."""
    return workload(
        lambda: Language(dropout=dropout, tied=tied), "tokens", "blocks.*", "head",
        batch=tokens, loss=next_token, optimizer=adam, rows=rows,
    )  # fmt: skip


@kept
def skips() -> Workload:
    """Partitions parts.0 to parts.2 and last."""
    return workload(Skips, "parts.*", "last")


@kept
def towers() -> Workload:
    """Partitions left, right and join."""
    return workload(Towers, "*", batch=pairs, loss=lambda made, wanted: F.mse_loss(made["score"], wanted))


@kept
def diamond() -> Workload:
    """Partitions stem, up, down, gate, merge and last."""
    return workload(Diamond, "*")


def graph_of(made: Workload) -> PartitionGraph:
    """Its partitions: one capture for all workloads that differ in what a forward does not see."""
    return _graph_of(
        replace(
            made, loss=None, optimizer=None, metrics=None, weight=None, reduction="mean", loss_over="micro_batch",
            compile=None,
        )
    )  # fmt: skip


@kept
def _graph_of(made: Workload) -> PartitionGraph:
    return partition_graph(made)


def captured(made: Workload) -> PartitionGraph:
    """Its partitions, captured also for micro-batches of one row and for evaluations, as tests will want them."""
    graph = graph_of(made)
    for training, rows in itertools.product((True, False), (made.batch_size, 1)):
        leaves, structure = pytree.tree_flatten(call_arguments(made.make_batch(rows, 0)[0]))
        if not training or not graph.domain.admits(input_key(structure, leaves)):
            recut(graph, structure, leaves, training=training)
    return graph


def make_plan(
    made: Workload,
    stages: Sequence[tuple[int | Mapping[int, int], Sequence[str]]] = (),
    *,
    micro_batches: int = 4,
    remat: Sequence[str] = (),
    schedule: Any = "gpipe",
    in_flight: int | None = None,
) -> Plan:
    """A plan with stages as (rank, partition names); none given: everything on rank 0.

    In the place of a rank, for a stage that several share: how many micro-batches each rank has.
    """
    graph = graph_of(made)
    return Plan(
        workload=WorkloadReference(made.name, batch_size=made.batch_size, fingerprint=graph.fingerprint),
        schedule=schedule,
        micro_batches=micro_batches,
        micro_batch_size=-(-made.batch_size // micro_batches),
        stages=tuple(
            make_stage(rank, held, remat, in_flight)
            for rank, held in stages or [(0, [piece.name for piece in graph.pieces])]
        ),
    )


def make_stage(
    rank: int | Mapping[int, int], held: Sequence[str], remat: Sequence[str] = (), in_flight: int | None = None
) -> Stage:
    """As `make_plan` takes it."""
    again = tuple(name for name in held if name in remat)
    if isinstance(rank, int):
        return Stage(f"worker:{rank}/cpu", tuple(held), again, in_flight)
    replicas = tuple(Replica(f"worker:{each}/cpu", count) for each, count in rank.items())
    return Stage(None, tuple(held), again, in_flight, replicas=replicas)


def random_plan(made: Workload, seed: int, *, workers: int) -> Plan:
    """Stages cut from a random topological order, on random workers of which most hold several; some remat."""
    rng = random.Random(seed)
    graph = graph_of(made)
    names = [piece.name for piece in graph.pieces]
    rng.shuffle(names)
    order = topological_order(names, [(edge.source, edge.target) for edge in graph.edges])
    starts = [0, *(i for i in range(1, len(order)) if rng.random() < 0.75), len(order)]
    stages = [(rng.randrange(workers), order[a:b]) for a, b in itertools.pairwise(starts)]
    return make_plan(
        made, stages, micro_batches=rng.choice([1, 2, 3, 4]), schedule=rng.choice(["gpipe", "interleaved"]),
        remat=[name for name in order if rng.random() < 0.4],
    )  # fmt: skip


def pipeline_of(made: Workload, plan: Plan, **settings: Any) -> Pipeline:
    """A pipeline on the graph that `make_plan` has captured: a capture takes longer than what most tests look at."""
    return Pipeline(made, plan, graph=graph_of(made), **settings)


def in_one_buffer(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Zeros, whose parts are the gradients of parameters from now on, as in scripts that have one flat gradient."""
    held = list(parameters)
    buffer = torch.zeros(sum(each.numel() for each in held), dtype=held[0].dtype)
    for each, part in zip(held, buffer.split([each.numel() for each in held]), strict=True):
        each.grad = part.view_as(each)
    return buffer


class Reference:
    """The same model trained without a pipeline: one forward of the whole batch."""

    def __init__(self, made: Workload) -> None:
        self.made = made
        torch.manual_seed(made.seed)
        self.model = made.model()
        self.optimizer = made.make_optimizer(self.model.named_parameters())

    def loss(self, batch: Any) -> torch.Tensor:
        args, kwargs = call_arguments(batch[0])
        return self.made.loss(self.model(*args, **kwargs), batch[1])

    def output(self, inputs: Any) -> Any:
        """What the model gives in eval mode."""
        args, kwargs = call_arguments(inputs)
        self.model.eval()
        with torch.no_grad():
            made = self.model(*args, **kwargs)
        self.model.train()
        return made

    def step(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def distance(self, named: Any) -> float:
        """The largest difference to tensors given as (name, tensor) pairs."""
        mine = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        return max((float((mine[name] - tensor).detach().abs().max()) for name, tensor in named), default=0.0)

    def gradient_distance(self, gradients: dict[str, torch.Tensor]) -> float:
        """The largest difference to gradients by name; a gradient that only one side has counts as infinite."""
        mine = {name: each.grad for name, each in self.model.named_parameters(remove_duplicate=False)}
        missing = [name for name in gradients if mine[name] is None]
        if missing:
            return float("inf")
        return max((float((mine[name] - each).abs().max()) for name, each in gradients.items()), default=0.0)
