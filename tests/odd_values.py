"""Models whose partitions hand each other every kind of value, each as three partitions a, b and c."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from kept import kept
from torch import nn
from workloads import WIDTH, captured, numbers, workload

if TYPE_CHECKING:
    from assigner.model.workload import Workload


class Part(nn.Module):
    """A linear layer with a forward of its own, given as a function of (layer, ...)."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.layer, *args, **kwargs)


def three(a: Any, b: Any, c: Any, forward: Any, *, batch: Any = numbers, loss: Any = None) -> Workload:
    """A workload of three parts; `forward(s, ...)` is the model's own."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Part(a), Part(b), Part(c)

    Model.forward = forward  # type: ignore[assignment]
    return workload(Model, "*", batch=batch, loss=loss or mean_square, optimizer=slowly)


def slowly(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.sum(1, keepdim=True), target)


def layer(part: Any, x: torch.Tensor) -> torch.Tensor:
    return part(x)


def structures() -> Workload:
    """Tuples, dicts, lists, None, bool, int, float and text, nested."""

    def a(part: Any, x: torch.Tensor) -> Any:
        y = part(x)
        return {"pair": (y, None), "flag": True, "n": 3, "nested": [{"z": y * 2}, ()], "f": 0.5, "word": "tanh"}

    def b(part: Any, given: Any, *, scale: float, nested: Any = None) -> Any:
        y, nothing = given["pair"]
        assert nothing is None
        y = getattr(torch, given["word"])(part(y)) * scale * given["n"]
        return (y, [nested[0]["z"], {"flag": not given["flag"]}], None)

    def c(part: Any, y: torch.Tensor, rest: Any, nothing: Any) -> torch.Tensor:
        assert nothing is None
        return part(y) if rest[1]["flag"] else part(y) + rest[0]

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        made = s.a(x)
        return s.c(*s.b(made, scale=made["f"], nested=made["nested"]))

    return three(a, b, c, forward)


def types() -> Workload:
    """bool, int, float16, bfloat16 and complex; the last three bear gradients."""

    def a(part: Any, x: torch.Tensor) -> Any:
        y = part(x)
        whole = y.argsort(1)
        return y, y > 0, whole, whole.to(torch.uint8), y.half(), y.bfloat16(), torch.complex(y, y * 2), y.float()

    def b(part: Any, y: Any, mask: Any, order: Any, small: Any, half: Any, brain: Any, wave: Any, single: Any) -> Any:
        low = half.double() + brain.double() + single.double()
        return part(y) * mask + low.gather(1, order) + small / 8, wave * (1 + 2j), mask

    def c(part: Any, y: torch.Tensor, wave: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return part(torch.where(mask, y, -y)) / 8 + torch.fft.ifft(wave).real + (wave * wave.conj()).real / 64

    return three(a, b, c, lambda s, x: s.c(*s.b(*s.a(x))))


def layouts() -> Workload:
    """Transposed, strided, expanded and channels-last tensors, and views of one memory."""

    def a(part: Any, x: torch.Tensor) -> Any:
        y = part(x)
        image = y.reshape(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        return y.t(), y[:, ::2], y[:, :1].expand(-1, WIDTH), image, y.view(-1, 2, 4), torch.ones(1).double().expand(3)

    def b(part: Any, turned: Any, strided: Any, wide: Any, image: Any, view: Any, ones: Any) -> Any:
        made = part(turned.t()) + torch.cat([strided, strided], 1) + wide * ones.sum()
        return made.t().contiguous().t(), F.avg_pool2d(image, 2), view.transpose(1, 2)

    def c(part: Any, y: torch.Tensor, pooled: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        return part(y) + pooled.flatten(1).repeat(1, 4) + view.reshape(-1, WIDTH)

    return three(a, b, c, lambda s, x: s.c(*s.b(*s.a(x))))


def empty() -> Workload:
    """Tensors without elements, and without dimensions."""

    def a(part: Any, x: torch.Tensor) -> Any:
        y = part(x)
        return y, y[:, :0], y[:0], part.weight.sum()

    def b(part: Any, y: Any, narrow: Any, short: Any, scalar: Any) -> Any:
        return part(torch.cat([y, narrow], 1)) + short.sum() + scalar, narrow.flatten()

    def c(part: Any, y: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
        return part(y) + nothing.sum()

    return three(a, b, c, lambda s, x: s.c(*s.b(*s.a(x))))


def readers() -> Workload:
    """An output that nobody reads, one with three readers, one that is read without a gradient."""

    def a(part: Any, x: torch.Tensor) -> Any:
        y = part(x)
        return torch.tanh(y), y * 3

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        y, _ = s.a(x)
        z = s.b(y)
        return s.c(z + y) * y.detach() + y

    return three(a, layer, layer, forward)


def labelled(rows: int, generator: torch.Generator) -> Any:
    x, y = numbers(rows, generator)
    ids = torch.randint(WIDTH, (rows,), generator=generator)
    return {"x": x, "labels": ids, "more": x.flip(1), "rest": None, "scale": 2.0, "flag": True}, (y, ids)


def middle() -> Workload:
    """Inputs and labels that a middle partition reads, plain values among the inputs, targets in a tuple."""

    def b(part: Any, y: torch.Tensor, labels: torch.Tensor, more: torch.Tensor) -> Any:
        made = part(y + more)
        return made, F.cross_entropy(made, labels, reduction="none")

    def forward(s: Any, x: Any, more: Any, labels: Any, rest: Any = None, scale: float = 1.0, flag: Any = False) -> Any:
        made, penalty = s.b(s.a(x), labels, more)
        return {"out": s.c(made) * scale if flag else s.c(made), "penalty": penalty, "rest": rest}

    def loss(output: Any, target: Any) -> torch.Tensor:
        numbers_off = mean_square(output["out"], target[0])
        return numbers_off + output["penalty"].mean() + F.cross_entropy(output["out"], target[1])

    return three(layer, b, layer, forward, batch=labelled, loss=loss)


def chosen() -> Workload:
    """Rows that a partition chooses by their values: the next ones get as many as there are."""

    def a(part: Any, x: torch.Tensor) -> Any:
        y = part(x)
        mask = x[:, 0] > 0
        return y[mask], mask, y

    def b(part: Any, rows: torch.Tensor) -> torch.Tensor:
        return part(rows)[:, :, None].flatten(1)

    def c(part: Any, rows: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return part(y) + torch.zeros_like(y).masked_scatter(mask[:, None].expand(-1, WIDTH), rows)

    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        rows, mask, y = s.a(x)
        return s.c(s.b(rows) * 2, mask, y)

    return three(a, b, c, forward)


CASES = {make.__name__: kept(make) for make in (structures, types, layouts, empty, readers, middle, chosen)}


def capture_all(*names: str) -> None:
    """The graphs of these cases, or of all."""
    for name, make in CASES.items():
        if not names or name in names:
            captured(make())
