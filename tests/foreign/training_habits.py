# ruff: noqa: E501 - decorators on one line
"""Whole ways of training in one module: GANs, self-supervision, distillation, diffusion, reinforcement, physics."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.backward import Reverse
from foreign.case import case
from torch import nn
from workloads import WIDTH, numbers, workload


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))


def own(made, _):
    return made


@case(
    "a GAN in one module, two losses summed, the discriminator's by a detached sample",
    "generator",
    "discriminator",
    loss=own,
)
class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = mlp(WIDTH, WIDTH), mlp(WIDTH, 1)

    def forward(self, x):
        fake = self.generator(x.flip(1))
        real, false = self.discriminator(x), self.discriminator(fake.detach())
        judge = F.softplus(-real).mean() + F.softplus(false).mean()
        return judge + F.softplus(-self.discriminator(fake)).mean()


@case("a GAN whose generator is judged by a frozen copy", "generator", "discriminator", "judge", loss=own)
class GanFrozen(Gan):
    def __init__(self):
        super().__init__()
        self.judge = copy.deepcopy(self.discriminator).requires_grad_(False)

    def forward(self, x):
        fake = self.generator(x.flip(1))
        return F.softplus(-self.judge(fake)).mean() + F.softplus(self.discriminator(fake.detach())).mean()


@case("a GAN whose optimizer has a group for each player")
def _():
    def groups(named_parameters):
        named = list(named_parameters)
        return torch.optim.Adam([
            {"params": [each for name, each in named if name.startswith("generator")], "lr": 0.01},
            {"params": [each for name, each in named if name.startswith("discriminator")], "lr": 0.02, "betas": (0.5, 0.9)},
        ])  # fmt: skip

    return workload(Gan, "generator", "discriminator", loss=own, optimizer=groups)


def in_phases(rows, generator):
    """The last of the training batches is for the judges."""
    x, wanted = numbers(rows, generator)
    return {"x": x, "phase": "judge" if rows == 5 else "make"}, wanted


@case("two judges, called in another order in each phase (CycleGAN)", "maker", "judge_*", loss=own, batch=in_phases)
class TwoJudges(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker, self.judge_a, self.judge_b = mlp(WIDTH, WIDTH), mlp(WIDTH, 1), mlp(WIDTH, 1)

    def forward(self, x, phase):
        fake = self.maker(x)
        if phase == "make":
            judged = self.judge_b(fake)
            return F.softplus(-judged).mean() + F.softplus(-self.judge_a(fake.flip(1))).mean()
        judged = F.softplus(self.judge_a(fake.detach())) + F.softplus(-self.judge_a(x))
        return judged.mean() + F.softplus(-self.judge_b(x.flip(1))).mean()


@case("a VAE with a sample by reparameterisation", "encoder", "decoder", loss=own, random=True)
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 8), mlp(4, WIDTH)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        made = self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        return F.mse_loss(made, x) - 0.05 * (1 + log_variance - mean.square() - log_variance.exp()).mean()


@case(
    "a VAE with the noise among the inputs",
    "encoder",
    "decoder",
    loss=own,
    batch=lambda rows, generator: (
        (numbers(rows, generator)[0], torch.randn(rows, 4, generator=generator, dtype=torch.float64)),
        None,
    ),
)
class VaeNoise(Vae):
    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        made = self.decoder(mean + noise * (0.5 * log_variance).exp())
        return F.mse_loss(made, x) - 0.05 * (1 + log_variance - mean.square() - log_variance.exp()).mean()


@case(
    "knowledge distillation with a frozen teacher in the model",
    "teacher",
    "student",
    loss=lambda made, wanted: F.mse_loss(made[0], wanted) + F.mse_loss(made[0], made[1]),
)
class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = mlp(WIDTH, 1).requires_grad_(False), mlp(WIDTH, 1)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


@case(
    "distillation with the teacher kept in eval",
    "teacher",
    "student",
    loss=lambda made, wanted: F.mse_loss(made[0], wanted) + F.mse_loss(made[0], made[1]),
)
class DistilledEval(Distilled):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, 1), nn.BatchNorm1d(1)).requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self


@case(
    "BYOL: online, target and predictor marked, target moved in forward",
    "online",
    "target",
    "predictor",
    loss=own,
)
class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.predictor = mlp(WIDTH, 4), mlp(4, 4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def move(self):
        for mine, theirs in zip(self.online.parameters(), self.target.parameters(), strict=True):
            theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)

    def forward(self, x):
        if self.training:
            self.move()
        made = self.predictor(self.online(x))
        with torch.no_grad():
            wanted = self.target(x.flip(1))
        return (2 - 2 * F.cosine_similarity(made, wanted, dim=1)).mean()


@case("BYOL, the whole in one marked module", "byol", "last", inherent=True)
class ByolInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.byol, self.last = Byol(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(x) * 0.1 + self.byol(x)


@case(
    "SimCLR: two views in one batch, a contrastive loss over its rows",
    "encoder",
    "head",
    loss=own,
    inherent=True,
    refusal="rows|mix",
)
class SimClr(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = mlp(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, x):
        z = F.normalize(self.head(self.encoder(torch.cat([x, x.flip(1)]))), dim=1)
        scores = z @ z.t() / 0.2
        scores = scores.masked_fill(torch.eye(z.size(0), dtype=torch.bool), -1e9)
        wanted = torch.arange(z.size(0)).roll(z.size(0) // 2)
        return F.cross_entropy(scores, wanted)


@case("SimCLR with the diagonal filled in place", "encoder", "head", loss=own, inherent=True, refusal="rows|mix")
class SimClrInPlace(SimClr):
    def forward(self, x):
        z = F.normalize(self.head(self.encoder(torch.cat([x, x.flip(1)]))), dim=1)
        scores = z @ z.t() / 0.2
        scores.fill_diagonal_(-1e9)
        return F.cross_entropy(scores, torch.arange(z.size(0)).roll(z.size(0) // 2))


@case("Barlow twins: a correlation over the rows", "encoder", "head", loss=own, inherent=True, refusal="rows|mix")
class Barlow(SimClr):
    def forward(self, x):
        a, b = self.head(self.encoder(x)), self.head(self.encoder(x.flip(1)))
        c = (a - a.mean(0)).t() @ (b - b.mean(0)) / len(x)
        return (torch.diagonal(c) - 1).square().sum() + 0.01 * c.flatten()[1:].square().sum()


@case("DINO: a centre that moves with the teacher's outputs", "student", "teacher", loss=own, inherent=True)
class Dino(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = mlp(WIDTH, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(1, 4))

    def forward(self, x):
        made = self.student(x)
        with torch.no_grad():
            seen = self.teacher(x.flip(1))
            wanted = F.softmax((seen - self.centre) / 0.1, dim=1)
            if self.training:
                self.centre = self.centre * 0.9 + seen.mean(0, keepdim=True) * 0.1
        return -(wanted * F.log_softmax(made, dim=1)).sum(1).mean()


@case(
    "domain-adversarial training with gradient reversal",
    "features",
    "labels",
    "domain",
    loss=lambda made, wanted: F.mse_loss(made[0], wanted) + made[1].square().mean(),
)
class Dann(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.labels, self.domain = mlp(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.features(x)
        return self.labels(h), self.domain(Reverse.apply(h, 0.7))


@case("a VQ-VAE with straight-through codes", "encoder", "quantiser", "decoder", loss=own)
class VqVae(nn.Module):
    class Quantiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Embedding(6, 4)

        def forward(self, z):
            chosen = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            extra = F.mse_loss(chosen, z.detach(), reduction="none").mean(1) + 0.25 * F.mse_loss(
                z, chosen.detach(), reduction="none"
            ).mean(1)
            return z + (chosen - z).detach(), extra

    def __init__(self):
        super().__init__()
        self.encoder, self.quantiser, self.decoder = mlp(WIDTH, 4), self.Quantiser(), mlp(4, WIDTH)

    def forward(self, x):
        z, extra = self.quantiser(self.encoder(x))
        return F.mse_loss(self.decoder(z), x) + extra.mean()


class Towers(nn.Module):
    """Two views through one encoder, and what is made of both."""

    def __init__(self, joined):
        super().__init__()
        self.encoder, self.head = mlp(WIDTH, 8), Heads(joined)

    def forward(self, x):
        return self.head(self.encoder(x), self.encoder(x.flip(1)))


class Heads(nn.Module):
    """Projects two views, and gives what becomes of them."""

    def __init__(self, joined):
        super().__init__()
        self.last, self.joined = nn.Linear(8, 4), joined

    def forward(self, a, b):
        return self.joined(self.last(a), self.last(b))


def over_the_batch(joined, scored):
    made = workload(lambda: Towers(joined), "encoder", "head", loss=lambda made, _: scored(made))
    return replace(made, loss_over="batch")


def matched(a, b, wanted):
    return F.cross_entropy(F.normalize(a, dim=1) @ F.normalize(b, dim=1).t(), wanted)


def halved(z):
    return matched(*z.chunk(2), torch.arange(len(z) // 2))


@case("a loss over the batch: of two outputs, pairs by their rows")
def pairs_by_rows():
    return over_the_batch(lambda a, b: (a, b), lambda made: matched(*made, torch.arange(len(made[0]))))


@case("a loss over the batch: views beside each other in one module")
def views_beside():
    return over_the_batch(
        lambda a, b: torch.stack((a, b), 1), lambda z: matched(z[:, 0], z[:, 1], torch.arange(len(z)))
    )


@case("a loss over the batch: views on each other in one module (SimCLR)", refusal="several blocks")
def views_on_each_other():
    return over_the_batch(lambda a, b: torch.cat((a, b)), halved)


@case("a loss over the batch: labels by row in the output (CLIP)", refusal="numbers of rows")
def labels_in_output():
    return over_the_batch(lambda a, b: (a, b, torch.arange(len(a))), lambda made: matched(*made))
