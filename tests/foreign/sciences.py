"""Diffusion, reinforcement, physics, meta-learning, flows, recommenders and prompts."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from foreign.training_habits import mlp, own
from torch import nn
from workloads import TOKENS, WIDTH, adam, numbers, tokens


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
