# ruff: noqa: ARG005, ARG002, E501, PLC3002, PLW0108 - what a case is given and does not read; tables of cases, a line each
"""What forward asks of its surroundings, optimizers built oddly, losses and schedules."""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
import transformers
from foreign.blind_models import classes
from foreign.blind_python import THREE, Net
from foreign.case import case
from torch import nn
from workloads import WIDTH, numbers, workload


def asks(name, question, **words):
    """The root doubles hidden values where the answer is yes; plain torch says yes."""

    class Asks(Net):
        def forward(self, x):
            h = self.stem(x)
            if question(self, h):
                h = h * 2
            return self.head(torch.tanh(self.body(h)))

    Asks.__module__ = __name__
    case(f"blind: the root asks {name}", *THREE, **words)(Asks)


asks("whether a parameter's type is nn.Parameter", lambda net, h: type(net.head.weight) is nn.Parameter)
asks("isinstance(h.size(0), int)", lambda net, h: isinstance(h.size(0), int))
asks("hasattr(h, ...) for what a subclass has", lambda net, h: not hasattr(h, "fake_mode"))
asks("torch._dynamo.is_compiling()", lambda net, h: not torch._dynamo.is_compiling())
asks("transformers' is_torchdynamo_compiling()", lambda net, h: not transformers.utils.is_torchdynamo_compiling())
asks("has_torch_function", lambda net, h: not torch.overrides.has_torch_function((h,)))
asks("torch.jit.is_tracing()", lambda net, h: not torch.jit.is_tracing())
asks("whether a parameter has a gradient yet", lambda net, h: net.stem.weight.grad is None)
asks("torch.distributed.is_initialized()", lambda net, h: not torch.distributed.is_initialized())


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.tensor(0.5))
        self.register_buffer("strides", torch.tensor([1.0, 2.0]))


@case("blind: float() of a constant buffer at the root", *THREE)
class Floats(Buffered):
    def forward(self, x):
        return super().forward(x) * float(self.gain)


@case("blind: tolist() of a constant buffer at the root", *THREE)
class Lists(Buffered):
    def forward(self, x):
        return sum(super(Lists, self).forward(x * each) for each in self.strides.tolist()[:1])


@case("blind: tolist() of a buffer that forward moves", *THREE)
class ListsMoving(Buffered):
    def forward(self, x):
        h = self.stem(x) * self.strides.tolist()[0]
        if self.training:
            self.strides.mul_(0.9)
        return self.head(self.body(h))


@case("blind: tolist() of a buffer that a marked module moves", *THREE, inherent=True)
class ListsOther(Net):
    class Moves(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("seen", torch.ones(1))

        def forward(self, x):
            if self.training:
                self.seen.add_(1)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.stem = self.Moves()

    def forward(self, x):
        return super().forward(x) / self.stem.seen.tolist()[0]


@case("blind: constant buffers read by other glue in eval than in training", "stem", "head")
class OtherGlue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(20, 1)
        self.register_buffer("bank", torch.randn(20, WIDTH))

    def forward(self, x):
        h = self.stem(x)
        if self.training:
            return self.head((h * self.bank[0]).repeat(1, 3)[:, :20])
        return self.head(h @ self.bank.t())


@case("blind: **kwargs in the root's forward, a dict as batch", *THREE, batch=lambda rows, g: (lambda x, y: ({"x": x, "path": x}, y))(*numbers(rows, g)))  # fmt: skip
class Rest(Net):
    def forward(self, x, **kwargs):
        return super().forward(x)


class ByClass(nn.Linear):
    factor = 1.0

    def forward(self, x):
        return super().forward(x) * ByClass.factor + torch.linspace(0, 1, WIDTH)


def around(name, begin, **words):
    class Around(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = ByClass(WIDTH, WIDTH)

        def forward(self, x):
            h = self.stem(x)
            with begin():
                h = self.body(h)
            return self.head(torch.tanh(h))

    Around.__module__ = __name__
    case(f"blind: around a marked call: {name}", *THREE, **words)(Around)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def class_attribute():
    ByClass.factor = 2.0
    try:
        yield
    finally:
        ByClass.factor = 1.0


around("the default dtype", default_dtype)
around("a class attribute", class_attribute)
around("sdpa_kernel(MATH)", lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
around("save_on_cpu", lambda: torch.autograd.graph.save_on_cpu())
around("detect_anomaly", lambda: torch.autograd.set_detect_anomaly(True))
around("inference_mode, of hidden values", lambda: torch.inference_mode())


def with_optimizer(name, optimizer, **words):
    case(f"blind: optimizer: {name}", **words)(lambda: workload(Net, *THREE, optimizer=optimizer))


def scheduled(parameters):
    made = torch.optim.SGD(parameters, lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=10)
    made.register_step_post_hook(lambda *_: schedule.step())
    return made


class Inherits(torch.optim.SGD):
    """Warm-up in step() and weights kept back every second step."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.05 / math.sqrt(self.count)
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.sub_(each.grad.mean()) if each.dim() > 1 else each.grad.clamp_(-0.1, 0.1)
        return super().step(closure)


def agc(parameters):
    made = torch.optim.Adam(parameters, lr=torch.tensor(0.01), maximize=False, weight_decay=0.1)

    def clip(optimizer, *_):
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    limit = each.detach().norm().clamp_min(1e-3) * 0.1
                    each.grad.mul_((limit / each.grad.norm().clamp_min(1e-6)).clamp(max=1))

    made.register_step_pre_hook(clip)
    return made


with_optimizer("a OneCycleLR stepped by a hook of the optimizer", scheduled)
with_optimizer("a subclass with warm-up and centred gradients in step", lambda p: Inherits(p, lr=0.05))
with_optimizer("adaptive clipping for each tensor in a pre-hook, a tensor as lr", agc)
with_optimizer("ASGD", lambda p: torch.optim.ASGD(p, lr=0.05, t0=1, lambd=0.1))
with_optimizer("sorted by size into two groups", lambda p: torch.optim.SGD([{"params": g, "lr": 0.1 / n} for n, g in enumerate((lambda q: (q[:3], q[3:]))(sorted(p, key=torch.numel)), 1)], lr=0.1))  # fmt: skip
with_optimizer("the last two parameters alone", lambda p: torch.optim.SGD(list(p)[-2:], lr=0.1))
with_optimizer("a group whose rate is from the number of its elements", lambda p: torch.optim.SGD([{"params": [each], "lr": 1 / each.numel()} for each in p]))  # fmt: skip
with_optimizer("the rate from the norm of all first weights", lambda p: (lambda q: torch.optim.SGD(q, lr=0.05 / float(sum(each.detach().norm() for each in q))))(list(p)))  # fmt: skip
with_optimizer("weights drawn anew by the builder", lambda p: (lambda q: [nn.init.constant_(each, 0.1) for each in q] and torch.optim.SGD(q, lr=0.05))(list(p)))  # fmt: skip


def with_loss(name, loss, *, batch=numbers, model=Net, **words):
    case(f"blind: loss: {name}", **words)(lambda: workload(model, *THREE, loss=loss, batch=batch))


def logged():
    seen = []

    def loss(made, y):
        value = F.mse_loss(made, y)
        seen.append(value.item())
        return value * (1 + 0 * len(seen))

    return loss


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)


with_loss("of shape [1]", lambda made, y: F.mse_loss(made, y).reshape(1))
with_loss("writes into the output", lambda made, y: made.sub_(y).square().mean())
with_loss("writes into the targets", lambda made, y: (made - y.mul_(2)).square().mean())
with_loss("keeps item() in a list", logged())
with_loss(
    "CrossEntropyLoss(weight=...), a weighted mean",
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4]).double()),
    batch=classes,
    model=Wide,
    inherent=True,
)
with_loss("label smoothing", nn.CrossEntropyLoss(label_smoothing=0.1), batch=classes, model=Wide)
with_loss(
    "one-hot targets, soft Dice over the batch",
    lambda made, y: 1 - 2 * (made.softmax(1) * F.one_hot(y, 4)).sum() / (made.softmax(1).sum() + len(y)),
    batch=classes,
    model=Wide,
    inherent=True,
)
with_loss(
    "a mean over a mask, m.sum() at least one",
    lambda made, y: ((made - y).square() * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    inherent=True,
)
with_loss(
    "log-cosh and Huber, by torch.where",
    lambda made, y: torch.where(
        (made - y).abs() < 1, F.huber_loss(made, y, reduction="none"), (made - y).cosh().log()
    ).mean(),
)
with_loss("a loss of another dtype", lambda made, y: F.mse_loss(made.float(), y.float()), tolerance=1e-5)
with_loss(
    "with a penalty on the first row", lambda made, y: F.mse_loss(made, y) + made[0].square().sum(), inherent=True
)
with_loss(
    "an NLL of the whole batch's rank (listwise softmax over rows)",
    lambda made, y: -(y.softmax(0) * made.log_softmax(0)).sum(),
    inherent=True,
)
with_loss("of the largest row alone (max)", lambda made, y: (made - y).square().max(), inherent=True)


def world_size():
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


with_loss("divided by the world size (DETR)", lambda made, y: F.mse_loss(made, y) / world_size())


@case("blind: a marked module divides by the world size", *THREE)
class ByWorld(Net):
    class Divides(nn.Linear):
        def forward(self, x):
            return super().forward(x) / world_size()

    def __init__(self) -> None:
        super().__init__()
        self.body = self.Divides(WIDTH, WIDTH)


@case("blind: a step counter that the root reads, data-independent", *THREE)
class Counted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0.0))

    def forward(self, x):
        self.steps += 1
        return super().forward(x) / self.steps
