"""Models whose forwards change more than their outputs: buffers, weights, Python values, generators."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from workloads import TOKENS, WIDTH, Reference, next_token, tokens, workload

if TYPE_CHECKING:
    from collections.abc import Callable


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


class InNorm(nn.BatchNorm1d):
    """A BatchNorm without running statistics and with such a scale."""

    def __init__(self) -> None:
        super().__init__(WIDTH, track_running_stats=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.7).add_(x.square().mean(0), alpha=0.3)
        return super().forward(x) * self.scale


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


class Scored(Part):
    """Moves the mean of a distribution of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = torch.distributions.Normal(torch.zeros(WIDTH), torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(x)
        score = self.prior.log_prob(made)
        self.prior.loc = self.prior.loc * 0.5 + made.detach().mean(0)
        return x * torch.sigmoid(score)


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class ReadAround(Body):
    """What stands between its partitions reads a buffer before a module changes it, and behind that.

    Args:
        late: Another partition needs what was read before.
        early: One that has run by then needs what is read behind.
        middle: The module.
    """

    def __init__(self, *, late: bool = False, early: bool = False, middle: Callable[[], nn.Module] = InPlace) -> None:
        super().__init__(middle)
        self.late, self.early = late, early

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.middle.scale[None]
        before, first = view.clone(), torch.tanh(self.first(x))
        h = self.middle(first) * (2 * self.middle.scale - before)
        more = before.sum() if self.late else (first * self.middle.scale).sum() if self.early else 0.0
        return self.last(h) + more


class AliasRead(Body):
    """What stands between its partitions reads the first tensor by a name that a module's assignment leaves alone."""

    def __init__(self) -> None:
        super().__init__(Assigned)
        self.middle.double()  # a conversion of all would make two tensors of it
        self.register_buffer("scale", self.middle.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))) * self.scale)


class Moving(InPlace):
    """Moves its buffer, and computes nothing with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale += 1
        return self.inner(x)


class WrittenAround(Body):
    """What stands between its partitions writes to a buffer that a module changes too, in front of it or behind it.

    Args:
        early: In front of it.
        batch: What it writes depends on the batch.
        middle: The module.
    """

    def __init__(self, *, early: bool = False, batch: bool = False, middle: Callable[[], nn.Module] = Moving) -> None:
        super().__init__(middle)
        self.early, self.batch = early, batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        if self.early:
            self.middle.scale.mul_(1.1)
            return self.last(self.middle(h) * self.middle.scale)
        h = self.middle(h)
        with torch.no_grad():
            self.middle.scale.mul_(1.1 + h.square().mean() if self.batch else 1.1)
        return self.last(h * self.middle.scale)


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


class Tossing(Part):
    """Drops itself by Python's generator, and adds noise from NumPy's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = 0.0 if random.random() < 0.5 else 1.0
        return self.inner(x) * kept + float(np.random.rand())


def tossing() -> nn.Module:
    return nn.Sequential(Tossing(), Tossing(), nn.Linear(WIDTH, 1))


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


class Whole(Part):
    """Moves a running vector of which another partition reads a part."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("whole", whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        with torch.no_grad():
            self.whole.mul_(0.5).add_(h.mean(0), alpha=0.5)
        return h


class Half(Part):
    """Reads the first half of it, on the same storage."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("part", whole[: WIDTH // 2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.part.sum()


class Sharing(nn.Module):
    """Two partitions on one storage."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.ones(WIDTH, dtype=torch.float64)
        self.one, self.two, self.last = Whole(whole), Half(whole), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.two(self.one(x)))


def sharing() -> Any:
    return workload(Sharing, "*")
