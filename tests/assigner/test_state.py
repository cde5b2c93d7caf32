"""Forwards that change more than their outputs: every micro-batch and recompute sees what it has in plain torch."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from workloads import TOKENS, WIDTH, Reference, graph_of, make_plan, next_token, tokens, workload

from assigner import Pipeline
from assigner.errors import UsageError
from assigner.runtime.share import Share
from assigner.runtime.state import WrittenTensors

if TYPE_CHECKING:
    from collections.abc import Callable

EXACT = 1e-10


class Body(nn.Module):
    """Any module between two layers."""

    def __init__(self, middle: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), middle(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


class Part(nn.Module):
    """A layer, for those that change something."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)


class InPlace(Part):
    """Normalises by a running scale that it moves in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        with torch.no_grad():
            self.scale.mul_(0.7).add_(h.square().mean(0), alpha=0.3)
        return h * self.scale


class ByData(InPlace):
    """Likewise, where torch does not count it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        self.scale.data.mul_(0.7).add_(h.detach().square().mean(0), alpha=0.3)
        return h / self.scale


class Assigned(InPlace):
    """Likewise, by a new tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        self.scale = 0.7 * self.scale + 0.3 * h.detach().square().mean(0)
        return h * self.scale


class AssignedAndInPlace(Assigned):
    """Both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.add_(0.1)
        made = super().forward(x)
        self.scale.mul_(0.9)
        return made.detach() + self.inner(x) * self.scale


class Lazy(Part):
    """Its buffer is there from the first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        now = h.detach().mean(0)
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        return h * self.mean


class Late(InPlace):
    """Writes from the fourth forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 3 else self.inner(x) * self.scale


class Clamped(Part):
    """Clamps its own scale, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((WIDTH,), 0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.log_scale.clamp_(max=0.15).mul_(0.9)
        return self.inner(x) * self.log_scale * self.log_scale.exp()


class Momentum(Part):
    """A second encoder that follows the first one, as MoCo's."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.key.load_state_dict(self.inner.state_dict())

    @torch.no_grad()
    def follow(self) -> None:
        for one, other in zip(self.key.parameters(), self.inner.parameters(), strict=True):
            one.data = one.data * 0.8 + other.data * 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        return self.inner(x) * self.key(x).detach()


class Renormed(Part):
    """Looks words up in a table whose rows are kept short."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picked = self.table((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
        return self.inner(x) + picked * self.table.weight[0]


class Counting(Part):
    """A counter, a list, a dict, an object and a generator of its own decide what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history, self.seen = 0, [], {"sums": [0.0]}
        self.config = Config()
        self.random = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.seen["sums"][0] += 0.5
        self.config.temperature *= 0.9
        factor = self.calls + len(self.history) + self.seen["sums"][0] + self.random.random()
        return self.inner(x) * (factor * self.config.temperature / 20)


class Config:
    """Holds a number."""

    def __init__(self) -> None:
        self.temperature = 1.0


class Queue(Part):
    """A plain tensor that it makes in its first forward, and writes then."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        if self.queue is None:
            self.queue = torch.zeros_like(h[0].detach())
        self.queue += h.detach().mean(0)
        return h + self.inner(self.queue.clone())


class Asking(Part):
    """Does something else where there are no gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        return torch.tanh(h) if torch.is_grad_enabled() and h.requires_grad else torch.sin(h)


class Keeping(Part):
    """Keeps a value on itself, as attention maps are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.softmax(self.inner(x), 1)
        self.all = [self.kept]
        return self.kept * x


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


CHANGING: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        InPlace, ByData, Assigned, AssignedAndInPlace, Lazy, Late, Clamped, Momentum, Renormed, Counting, Queue,
        Asking, Keeping, spectral,
    )
}  # fmt: skip


def made_of(middle: Callable[[], nn.Module]) -> Any:
    return workload(lambda: Body(middle), "first", "middle", "last")


def micro_batched(reference: Reference, batch: Any, pieces: int) -> float:
    """A plain step that adds up the gradients of parts of the batch, one after the other."""
    reference.optimizer.zero_grad()
    total = 0.0
    for x, y in zip(batch[0].chunk(pieces), batch[1].chunk(pieces), strict=True):
        loss = reference.loss((x, y)) * (len(x) / len(batch[0]))
        loss.backward()
        total += loss.item()
    reference.optimizer.step()
    return total


@pytest.mark.parametrize("remat", ["never", "always", "except_last"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", CHANGING)
def test_a_forward_may_change_more_than_its_outputs(name, micro_batches, remat):
    """Losses, gradients, weights and buffers are those of plain forwards one after the other, however they are kept."""
    made = made_of(CHANGING[name])
    reference = Reference(made)
    with Pipeline(made, make_plan(made, micro_batches=micro_batches), remat=remat) as pipeline:
        for n in range(4):
            batch = made.make_batch(micro_batches * 2, n)
            assert pipeline.step(batch) == pytest.approx(micro_batched(reference, batch, micro_batches), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
        assert reference.distance(pipeline.named_parameters()) < EXACT
        assert set(pipeline.state_dict()) == set(reference.model.state_dict())
        assert reference.distance(pipeline.state_dict().items()) < EXACT


class Tossing(Part):
    """Drops itself by Python's generator, and adds noise from NumPy's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = 0.0 if random.random() < 0.5 else 1.0
        return self.inner(x) * kept + float(np.random.rand())


def tossing() -> nn.Module:
    return nn.Sequential(Tossing(), Tossing(), nn.Linear(WIDTH, 1))


def test_draws_of_python_and_numpy_depend_on_the_batch_alone():
    """Stages, rematerialisation and what was drawn before change no draw; the script's own generators stay."""
    made = workload(tossing)
    found = []
    for stages, remat in (([(0, ["0", "1", "2"])], "never"), ([(0, ["0"]), (0, ["1", "2"])], "always")):
        random.seed(len(found))
        np.random.seed(len(found))
        with Pipeline(made, make_plan(made, stages), remat=remat) as pipeline:
            before = random.getstate(), np.random.get_state()[2]
            found.append([pipeline.step(made.make_batch(8, n)) for n in range(4)])
            found.append([float(each.detach().sum()) for _, each in pipeline.named_parameters()])
            assert (random.getstate(), np.random.get_state()[2]) == before
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert len(set(found[0])) == 4


@pytest.mark.parametrize("name", ["Assigned", "Lazy", "InPlace"])
def test_a_checkpoint_has_the_buffers_as_they_are(name, tmp_path):
    """Assigned buffers, and such as were None at first, are saved, loaded and evaluated with as any other."""
    made = made_of(CHANGING[name])
    batches = [made.make_batch(8, n) for n in range(4)]
    with Pipeline(made, make_plan(made, micro_batches=1), remat="always") as pipeline:
        for batch in batches[:2]:
            pipeline.step(batch)
        pipeline.save(tmp_path / "kept")
        state = {key: tensor.detach().clone() for key, tensor in pipeline.state_dict().items()}
        expected = [pipeline.step(batch) for batch in batches[2:]]
    with Pipeline(made, make_plan(made, micro_batches=1)) as pipeline:
        pipeline.load(tmp_path / "kept")
        found = pipeline.state_dict()
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], state[key]) for key in state)
        assert [pipeline.step(batch) for batch in batches[2:]] == expected


class TiedAndRenormed(nn.Module):
    """A table whose rows are kept short, as a lookup and, by its weight, as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(TOKENS, WIDTH, max_norm=0.7), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.table(ids))))


def tied_and_renormed() -> Any:
    return workload(TiedAndRenormed, "*", batch=tokens, loss=next_token)


@pytest.mark.parametrize("remat", ["never", "always", "plan"])
def test_a_shared_weight_that_one_partition_writes(remat):
    """On one worker all partitions see it written, and each backward reads it as its forward did."""
    made = tied_and_renormed()
    reference = Reference(made)
    with Pipeline(made, make_plan(made, micro_batches=2, remat=["table"]), remat=remat) as pipeline:
        for n in range(4):
            batch = made.make_batch(4, n)
            assert pipeline.step(batch) == pytest.approx(micro_batched(reference, batch, 2), abs=EXACT)
            assert reference.gradient_distance(pipeline.gradients()) < EXACT
        assert reference.distance(pipeline.named_parameters()) < EXACT


def test_a_shared_weight_that_another_worker_reads():
    """Another worker would not see what is written: refused, with the weight's name."""
    made = tied_and_renormed()
    graph = graph_of(made)
    plan = make_plan(made, [(0, ["table", "body"]), (1, ["head"])])
    share = Share(graph, plan, "worker:0/cpu", torch.device("cpu"))
    written = WrittenTensors(share.modules.values(), share.held_elsewhere(plan))
    written.add(share.parameters["body.weight"])
    with pytest.raises(UsageError, match=r"writes table\.weight, which another worker holds too"):
        written.add(share.parameters["table.weight"])
