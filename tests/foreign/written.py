"""Parameters that forward writes or freezes: clamped scales, momentum encoders, max_norm, gradual unfreezing."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from workloads import TOKENS, WIDTH, adam, next_token, tokens, workload

MARKS = ("first", "second", "last")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@case("a scale clamped in forward under no_grad (CLIP)", *MARKS)
class ClampedScale(Net):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x):
        with torch.no_grad():
            self.logit_scale.clamp_(0, 1.5)
        h = torch.tanh(self.first(x)) * self.logit_scale.exp()
        return self.last(torch.tanh(self.second(h)))


@case("a scale clamped through .data", *MARKS)
class ClampedData(ClampedScale):
    def forward(self, x):
        self.logit_scale.data = torch.clamp(self.logit_scale.data, 0, 1.5)
        h = torch.tanh(self.first(x)) * self.logit_scale.exp()
        return self.last(torch.tanh(self.second(h)))


@case("a scale clamped by .data.clamp_", *MARKS)
class ClampedDataInPlace(ClampedScale):
    def forward(self, x):
        self.logit_scale.data.clamp_(0, 1.5)
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)) * self.logit_scale)))


@case("a scale clamped inside a marked module", *MARKS)
class ClampedInside(Net):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.tensor(4.0))

        def forward(self, x):
            with torch.no_grad():
                self.scale.clamp_(0, 2)
            return super().forward(x) * self.scale

    def __init__(self):
        super().__init__()
        self.second = self.Scaled()


@case("weights clipped in forward (WGAN critic)", *MARKS)
class ClippedWeights(Net):
    class Clipped(nn.Linear):
        def forward(self, x):
            for parameter in self.parameters():
                parameter.data.clamp_(-0.2, 0.2)
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Clipped(WIDTH, WIDTH), self.Clipped(WIDTH, WIDTH)


@case("weights normalised in forward under no_grad (norm-constrained layer)", *MARKS)
class NormedWeights(Net):
    class Normed(nn.Linear):
        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.weight.div_(self.weight.norm(dim=1, keepdim=True))
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.second = self.Normed(WIDTH, WIDTH)


@case("weights of a marked layer written by the root under no_grad", *MARKS, refusal="param|write|weight")
class RootWrites(Net):
    def forward(self, x):
        with torch.no_grad():
            self.second.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


def moments(student, teacher, m=0.9):
    with torch.no_grad():
        for mine, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
            theirs.mul_(m).add_(mine, alpha=1 - m)


@case(
    "momentum encoder updated in forward (MoCo), encoders marked",
    "student",
    "teacher",
    "last",
)
class Momentum(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        query = self.student(x)
        moments(self.student, self.teacher)
        with torch.no_grad():
            key = self.teacher(x)
        return self.last(query * key)


@case(
    "momentum encoder with param.data = ... (MoCo's own words)",
    "student",
    "teacher",
    "last",
)
class MomentumData(Momentum):
    @torch.no_grad()
    def momentum_update(self):
        for mine, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            theirs.data = theirs.data * 0.9 + mine.data * 0.1

    def forward(self, x):
        with torch.no_grad():
            self.momentum_update()
            key = self.teacher(x)
        return self.last(self.student(x) * key)


@case("momentum encoder inside one marked module (BYOL)", "byol", "last", inherent=True)
class Inside(nn.Module):
    class Byol(Momentum):
        def forward(self, x):
            moments(self.student, self.teacher)
            with torch.no_grad():
                key = self.teacher(x)
            return self.student(x) * key

    def __init__(self):
        super().__init__()
        self.byol, self.last = self.Byol(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.byol(x))


@case("max_norm embedding", "embed", "second", "head", batch=tokens, loss=next_token, optimizer=adam)
class MaxNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, max_norm=1.0)
        self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, ids):
        return self.head(torch.tanh(self.second(self.embed(ids))))


@case(
    "max_norm embedding tied to the head",
    "embed",
    "second",
    "head",
    batch=tokens,
    loss=next_token,
    inherent=True,
    refusal="max_norm|write|tie|param|shares",
)
class MaxNormTied(MaxNorm):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


@case("max_norm embedding, unmarked", "second", "head", batch=tokens, loss=next_token, optimizer=adam)
class MaxNormUnmarked(MaxNorm):
    pass


@case("requires_grad switched in forward (discriminator frozen)", *MARKS, refusal="requires_grad|freez|frozen")
class Switched(Net):
    def forward(self, x):
        self.second.requires_grad_(False)
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        self.second.requires_grad_(True)
        return self.last(h)


@case("frozen first half", *MARKS)
class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


@case("frozen middle: gradients go through it", *MARKS)
class FrozenMiddle(Net):
    def __init__(self):
        super().__init__()
        self.second.requires_grad_(False)


@case("frozen weights with a bias that trains (BitFit)", *MARKS)
class BitFit(Net):
    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad = "bias" in name


@case("gradual unfreezing from forward's call count", *MARKS, inherent=True, refusal="requires_grad|state|freez|frozen")
class Unfreezing(Net):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.first.requires_grad_(False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        if self.calls > 1:
            self.first.requires_grad_(True)
        return super().forward(x)


@case("LoRA adapters over frozen layers", "layers.*", "last")
class Lora(nn.Module):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x)) * 2

    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList(self.Adapted() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


@case("adapters switched from outside through one object", "layers.*", "last")
class SwitchedAdapters(nn.Module):
    class Layer(nn.Linear):
        def __init__(self, switch):
            super().__init__(WIDTH, WIDTH)
            self.adapter, self.switch = nn.Linear(WIDTH, WIDTH), switch

        def forward(self, x):
            return super().forward(x) + (self.adapter(x) if self.switch["on"] else 0.0)

    def __init__(self):
        super().__init__()
        switch = {"on": True}
        self.layers, self.last = nn.ModuleList(self.Layer(switch) for _ in range(2)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


@case("two parameters on one storage", *MARKS, refusal="storage|share|memory|alias")
class OneStorage(Net):
    def __init__(self):
        super().__init__()
        flat = torch.randn(2 * WIDTH * WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 3
        self.flat = nn.Parameter(flat)
        self.first.weight = nn.Parameter(self.flat.data[: WIDTH * WIDTH].view(WIDTH, WIDTH))

    def forward(self, x):
        return super().forward(x) + self.flat[0]


@case("tied embedding and head", "embed", "second", "head", batch=tokens, loss=next_token, optimizer=adam)
class Tied(MaxNorm):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.head.weight = self.embed.weight


@case("tied by a transpose in forward", "embed", "second", batch=tokens, loss=next_token, optimizer=adam)
class TiedFunctional(Tied):
    def forward(self, ids):
        return torch.tanh(self.second(self.embed(ids))) @ self.embed.weight.t()


@case("a weight that is re-initialised under no_grad in eval only", *MARKS)
class EvalOnly(Net):
    def forward(self, x):
        if not self.training:
            x = x * 0.5
        return super().forward(x)


@case("noise on weights put in and taken out in forward", *MARKS)
class Perturbed(Net):
    def forward(self, x):
        kept = self.second.weight.detach().clone()
        y = super().forward(x)
        assert torch.is_tensor(kept)
        return y


@case("weight standardisation: F.linear of a weight made in forward", *MARKS)
class Standardised(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            weight = self.weight - self.weight.mean(1, keepdim=True)
            return F.linear(x, weight / (weight.std(1, keepdim=True) + 1e-5), self.bias)

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Layer(WIDTH, WIDTH), self.Layer(WIDTH, WIDTH)


@case("EMA teacher kept outside, updated by the loss")
def _():
    """Mean teacher: the loss closes over nothing, the teacher is a frozen part of the model."""

    class MeanTeacher(Momentum):
        def forward(self, x):
            with torch.no_grad():
                wanted = self.teacher(x)
            made = self.student(x)
            return self.last(made), F.mse_loss(made, wanted, reduction="none").mean(1, keepdim=True)

    return workload(
        MeanTeacher,
        "student",
        "teacher",
        "last",
        loss=lambda made, wanted: F.mse_loss(made[0], wanted) + made[1].mean(),
    )


class Byol(nn.Module):
    """A student with a predictor, and a teacher that follows it in forward."""

    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.target = copy.deepcopy(self.online).requires_grad_(requires_grad=False)
        self.predictor = nn.Linear(WIDTH, 1)

    @torch.no_grad()
    def follow(self):
        if self.training:
            for mine, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.data.mul_(0.9).add_(other.data, alpha=0.1)


@case("BYOL: the teacher moves before it is asked", "target", "online", "predictor")
class MovedBefore(Byol):
    def forward(self, x):
        self.follow()
        with torch.no_grad():
            wanted = self.target(x).sum(1, keepdim=True)
        return self.predictor(self.online(x)) - wanted


@case("BYOL: the teacher moves after it was asked", "target", "online", "predictor")
class MovedAfter(Byol):
    def forward(self, x):
        with torch.no_grad():
            wanted = self.target(x).sum(1, keepdim=True)
        out = self.predictor(self.online(x)) - wanted
        self.follow()
        return out


@case("BYOL: the teacher moves between student and teacher", "target", "online.*", "predictor")
class MovedBetween(Byol):
    def forward(self, x):
        out = self.predictor(self.online(x))
        with torch.no_grad():
            self.follow()
            wanted = self.target(x).sum(1, keepdim=True)
        return out - wanted
