"""What the drawn models are made of: small modules, each of which gives, takes or keeps something special."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn


class Plain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.inner(x))


class Affine(Plain):
    """Its result may be changed in place: nobody needs it for a backward."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Normed(Plain):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> Any:
        return x + F.gelu(self.inner(self.norm(x)))


class InPlace(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        x.mul_(0.7)
        x += 0.1
        return self.inner(x)


class Two(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        made = self.inner(x)
        return torch.tanh(made), torch.sigmoid(made)


class Record(Plain):
    def forward(self, x: torch.Tensor, *, other: Any = None, scale: float = 1.0, flag: bool = True) -> Any:
        made = self.inner(x) * scale
        if other is not None:
            made = made + other
        return {"hidden": made, "none": None, "flag": flag, "number": 2, "more": [x * 0.5]}


class Gate(Plain):
    def forward(self, x: torch.Tensor, gate: Any) -> Any:
        return torch.sigmoid(self.inner(gate)) * x


class Columns(Plain):
    """Its result has gaps in memory."""

    def forward(self, x: torch.Tensor) -> Any:
        made = self.inner(x)
        return torch.stack((made, x), dim=-1)[..., 0]


class Halves(Plain):
    """Its result is turned: the last two dimensions are not in the order of memory."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x).unflatten(-1, (2, -1)).transpose(-1, -2)


class Spread(Plain):
    """Its result is one number a row, seen many times."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x).mean(-1, keepdim=True).expand_as(x)


class Detached(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x.detach())


class Blocked(Plain):
    """Its parameters never get a gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.inner(x)).detach()


class Spare(Plain):
    """One of its parameters is not used."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.spare = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.inner(x))


class Sign(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        made = self.inner(x)
        return made, made > 0


class Choice(Plain):
    """Integers: nothing behind them gets a gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x).argmax(-1)


class Shifted(Plain):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("shift", torch.arange(width, dtype=torch.float64) / width)
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(self.inner(x)) + self.shift * self.hidden


class Through(Plain):
    """Gives back what it was given."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, self.inner(x)


class Scaled(Plain):
    """One of its results is a number without rows."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), self.scale.exp()


class Body(nn.Module):
    """Holds modules that are partitions, and runs them itself."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.part_a, self.part_b = first, second

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.part_a(x)
        return self.part_b(hidden + 0.1) + hidden


class Nothing(nn.Module):
    """Has no parameters."""

    def forward(self, x: torch.Tensor, _: Any = None) -> Any:
        return None, torch.cos(x)
