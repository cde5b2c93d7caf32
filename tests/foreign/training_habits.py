# ruff: noqa: E501 - decorators on one line
"""Whole ways of training in one module: GANs, self-supervision, distillation, diffusion, reinforcement, physics."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.backward import Reverse
from foreign.case import case
from torch import nn
from workloads import TOKENS, WIDTH, adam, numbers, tokens, workload


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
    inherent=True,
    refusal="param|write|weight",
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


@case(
    "diffusion: a table of noise levels indexed by steps among the inputs",
    "time",
    "net",
    loss=own,
    batch=lambda rows, generator: (
        (
            numbers(rows, generator)[0],
            torch.randint(10, (rows,), generator=generator),
            torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        ),
        None,
    ),
)
class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-2, 0.3, 10), dim=0))
        self.time, self.net = nn.Embedding(10, WIDTH), mlp(WIDTH, WIDTH)

    def forward(self, x, t, noise):
        share = self.kept[t].unsqueeze(1)
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        return F.mse_loss(self.net(noisy + self.time(t)), noise)


@case("diffusion that draws its noise and steps in forward", "time", "net", loss=own, random=True)
class DiffusionDrawn(Diffusion):
    def forward(self, x):
        return super().forward(x, torch.randint(0, 10, (x.size(0),)), torch.randn_like(x))


def ppo(made, wanted):
    every = torch.distributions.Categorical(logits=made["logits"])
    ratio = (every.log_prob(wanted["action"]) - wanted["old"]).exp()
    gain = wanted["gain"]
    bound = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -bound.mean() + 0.5 * F.mse_loss(made["value"], gain) - 0.01 * every.entropy().mean()


@case(
    "PPO: clipped ratio of log-probabilities, a value head, an entropy bonus",
    "body",
    "policy",
    "value",
    batch=lambda rows, generator: (
        numbers(rows, generator)[0],
        {
            "action": torch.randint(3, (rows,), generator=generator),
            "old": torch.rand(rows, generator=generator, dtype=torch.float64) - 1,
            "gain": torch.randn(rows, generator=generator, dtype=torch.float64),
        },
    ),
    loss=ppo,
)
class Ppo(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = mlp(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return {"logits": self.policy(h), "value": self.value(h).squeeze(-1)}


@case(
    "DQN with a target network in the model, gather of actions",
    "online",
    "target",
    batch=lambda rows, generator: (
        (numbers(rows, generator)[0], torch.randint(3, (rows,), generator=generator)),
        numbers(rows, generator)[0][:, 0],
    ),
    loss=lambda made, wanted: F.smooth_l1_loss(made[0], wanted + 0.9 * made[1]),
)
class Dqn(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = mlp(WIDTH, 3), mlp(WIDTH, 3).requires_grad_(False)

    def forward(self, x, action):
        with torch.no_grad():
            after = self.target(x).max(1).values
        return self.online(x).gather(1, action.unsqueeze(1)).squeeze(1), after


@case(
    "physics-informed: derivatives of the output by inputs, inside a marked module",
    "physics",
    "last",
    loss=lambda made, _: made.square().mean(),
)
class Physics(nn.Module):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(WIDTH, 1)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                u = self.net(x)
                slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
                curve = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
            return curve + u

    def __init__(self):
        super().__init__()
        self.physics, self.last = self.Net(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.physics(x))


@case(
    "MAML: an inner step by autograd.grad and functional_call, inside a marked module", "inner", "last", inherent=True
)
class Maml(nn.Module):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            with torch.enable_grad():
                named = dict(self.net.named_parameters())
                inner = torch.func.functional_call(self.net, named, (x,)).square().mean()
                slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
            moved = {name: each - 0.1 * slope for (name, each), slope in zip(named.items(), slopes, strict=True)}
            return torch.func.functional_call(self.net, moved, (x,))

    def __init__(self):
        super().__init__()
        self.inner, self.last = self.Inner(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.inner(x))


@case("deep equilibrium: a fixed point without gradient, one step with", "cell", "last")
class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                z = torch.tanh(0.3 * self.cell(z) + x)
        return self.last(torch.tanh(0.3 * self.cell(z) + x))


@case(
    "a normalising flow with a log-determinant summed in place",
    "couplings.*",
    loss=lambda made, _: 0.5 * made[0].square().sum(1).mean() - made[1].mean(),
)
class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.couplings = nn.ModuleList(mlp(4, 8) for _ in range(3))

    def forward(self, x):
        determinant = torch.zeros(x.size(0), dtype=x.dtype)
        for coupling in self.couplings:
            kept, moved = x.chunk(2, dim=1)
            scale, shift = coupling(kept).chunk(2, dim=1)
            scale = torch.tanh(scale)
            x = torch.cat([moved * scale.exp() + shift, kept], dim=1)
            determinant += scale.sum(1)
        return x, determinant


@case("a neural ODE by Runge-Kutta steps at the root", "field", "last")
class Ode(nn.Module):
    def __init__(self):
        super().__init__()
        self.field, self.last = mlp(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for _ in range(2):
            k1 = self.field(x)
            k2 = self.field(x + 0.05 * k1)
            x = x + 0.1 * k2
        return self.last(x)


@case(
    "multi-task losses weighted by learned uncertainties of the root",
    "body",
    "heads.*",
    loss=own,
    batch=lambda rows, generator: (dict(zip(("x", "y"), numbers(rows, generator), strict=True)), None),
)
class Uncertain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = mlp(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x, y):
        h = self.body(x)
        total = 0
        for n, head in enumerate(self.heads):
            total = total + torch.exp(-self.log_variances[n]) * F.mse_loss(head(h), y + n) + self.log_variances[n]
        return total


@case(
    "a recommender: sparse embeddings, dot products, an optimizer for sparse gradients",
    "users",
    "items",
    "deep",
    batch=lambda rows, generator: (
        (torch.randint(TOKENS, (rows,), generator=generator), torch.randint(TOKENS, (rows,), generator=generator)),
        torch.rand(rows, generator=generator, dtype=torch.float64),
    ),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
)
class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(TOKENS, WIDTH, sparse=True), nn.Embedding(TOKENS, WIDTH, sparse=True)
        self.deep = mlp(2 * WIDTH, 1)

    def forward(self, user, item):
        u, i = self.users(user), self.items(item)
        return (u * i).sum(1) + self.deep(torch.cat([u, i], 1)).squeeze(1)


@case(
    "a masked language model that masks its inputs in place at the root",
    "embed",
    "body",
    "head",
    batch=tokens,
    optimizer=adam,
    loss=lambda made, wanted: F.cross_entropy(made.flatten(0, 1), wanted.flatten()),
)
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(TOKENS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, TOKENS),
        )

    def forward(self, ids):
        shown = ids.clone()
        shown[:, ::2] = 0
        return self.head(torch.tanh(self.body(self.embed(shown))))


@case(
    "prompt tuning: trained prompts before a frozen model",
    "embed",
    "body",
    "head",
    batch=tokens,
    optimizer=adam,
    loss=lambda made, wanted: F.cross_entropy(made.flatten(0, 1), wanted.flatten()),
)
class Prompted(Masked):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, ids):
        x = torch.cat([self.prompt.expand(ids.size(0), -1, -1), self.embed(ids)], dim=1)
        x = torch.tanh(self.body(x)).cumsum(1)
        return self.head(x)[:, 2:]


@case("an adversarial perturbation from a gradient, inside a marked module", "robust", "last")
class Fgsm(nn.Module):
    class Robust(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(WIDTH, WIDTH)

        def forward(self, x):
            with torch.enable_grad():
                probe = x.detach().clone().requires_grad_(True)
                (slope,) = torch.autograd.grad(self.net(probe).square().sum(), probe)
            return self.net(x + 0.1 * slope.sign())

    def __init__(self):
        super().__init__()
        self.robust, self.last = self.Robust(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.robust(x))
