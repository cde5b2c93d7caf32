# ruff: noqa: E501, B905, RUF007, PERF401 - the habits of the models that they stand for
"""Models in the way of public repositories: detection, speech, graphs, flows, experts, memories, adapters."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn
from workloads import WIDTH, numbers, workload


def classes(rows, generator):
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (rows,), generator=generator)


def labelled(rows, generator):
    x, y = classes(rows, generator)
    return (x, y), y


def images(rows, generator):
    x = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (rows,), generator=generator)


def series(rows, generator):
    x = torch.randn(rows, 6, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.mean((1, 2))[:, None]


def given(made, wanted):
    """The model gives its loss."""
    return made["loss"] if isinstance(made, dict) else made


def lin(*sizes):
    return nn.Sequential(*[m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.Tanh())][:-1])


@case("blind: MAE: random masking by argsort of noise, mask token, decoder", "encoder", "decoder", batch=series, random=True)  # fmt: skip
class MAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, x):
        n, length, d = x.shape
        keep = int(length * 0.5)
        restore = torch.argsort(shuffle := torch.argsort(torch.rand(n, length, device=x.device), dim=1), dim=1)
        kept = torch.gather(x, 1, shuffle[:, :keep, None].expand(-1, -1, d))
        h = self.encoder(kept)
        h = torch.cat([h, self.mask_token.repeat(n, length - keep, 1)], 1)
        h = torch.gather(h, 1, restore[:, :, None].expand(-1, -1, d))
        mask = torch.ones(n, length, device=x.device, dtype=x.dtype)
        mask[:, :keep] = 0
        mask = torch.gather(mask, 1, restore)
        return (self.decoder(h)[..., 0] * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


class ActNorm(nn.Module):
    """Glow's: scale and bias from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.logs = nn.Parameter(torch.zeros(1, WIDTH)), nn.Parameter(torch.zeros(1, WIDTH))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if self.training and self.initialized.item() == 0:
            with torch.no_grad():
                self.bias.data.copy_(-x.mean(0, keepdim=True))
                self.logs.data.copy_(-(x.std(0, keepdim=True) + 1e-6).log())
            self.initialized.fill_(1)
        return (x + self.bias) * self.logs.exp(), self.logs.sum().expand(x.shape[0])


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = lin(4, 6, 8)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        shift, scale = self.net(a).chunk(2, 1)
        return torch.cat([b * scale.tanh().exp() + shift, a], 1), scale.tanh().sum(1)


class Glow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(m for _ in range(2) for m in (ActNorm(), Coupling()))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])

    def forward(self, x):
        logdet = x.new_zeros(x.shape[0])
        for step in self.steps:
            x, found = step(x)
            logdet = logdet + found
        x = F.linear(x, self.mix)
        return x, logdet + torch.linalg.slogdet(self.mix)[1]


@case("blind: Glow: ActNorm from the first batch, couplings, log-determinants", inherent=True)
def _():
    return workload(Glow, "steps.*", loss=lambda made, _: (made[0].square().sum(1) / 2 - made[1]).mean())


class FlagActNorm(ActNorm):
    """nflib's: a Python flag."""

    done = False

    def forward(self, x):
        if not self.done:
            self.logs.data = (-torch.log(x.std(dim=0, keepdim=True))).detach()
            self.bias.data = -x.mean(dim=0, keepdim=True).detach()
            self.done = True
        return (x + self.bias) * self.logs.exp(), self.logs.sum().expand(x.shape[0])


class FlagGlow(Glow):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(m for _ in range(2) for m in (FlagActNorm(), Coupling()))


@case("blind: ActNorm with a Python flag, weights put in through .data", inherent=True)
def _():
    return workload(FlagGlow, "steps.*", loss=lambda made, _: (made[0].square().sum(1) / 2 - made[1]).mean())


@case("blind: class-free guidance: labels dropped by torch.rand in training", random=True)
def _():
    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body, self.head = nn.Embedding(5, WIDTH), lin(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x, labels, force_drop=None):
            if self.training or force_drop is not None:
                drop = torch.rand(labels.shape[0], device=x.device) < 0.3 if force_drop is None else force_drop == 1
                labels = torch.where(drop, 4, labels)
            return self.head(self.body(x + self.table(labels)))

    return workload(Guided, "table", "body", "head", batch=labelled, loss=F.cross_entropy)


@case("blind: DDPM with schedule buffers, the noise drawn by a generator among the inputs", "embed", "body", "head", batch=series)  # fmt: skip
class DDPM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, 10, dtype=torch.float64)
        alphas = torch.cumprod(1 - betas, 0)
        for name, made in {
            "root": alphas.sqrt(),
            "rest": (1 - alphas).sqrt(),
            "posterior": F.pad(alphas, (1, 0), value=1.0),
        }.items():
            self.register_buffer(name, made)
        self.embed, self.body, self.head = nn.Embedding(10, WIDTH), lin(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    @staticmethod
    def extract(a, t, shape):
        return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))

    def forward(self, x):
        t = (x[:, 0, 0].abs() * 5).long().clamp(0, 9)
        start, noise = x.chunk(2, 1)
        noisy = self.extract(self.root, t, start.shape) * start + self.extract(self.rest, t, start.shape) * noise
        made = self.body(noisy + self.embed(t)[:, None])
        return self.head(made * self.extract(self.posterior, t, start.shape)).mean(1)


class Router(nn.Module):
    """Experts with a capacity: what is over it is dropped."""

    def __init__(self, capacity=0.75) -> None:
        super().__init__()
        self.gate, self.experts, self.capacity = (
            nn.Linear(WIDTH, 3),
            nn.ModuleList(lin(WIDTH, 6, WIDTH) for _ in range(3)),
            capacity,
        )

    def forward(self, x):
        rows, length, width = x.shape
        flat = x.reshape(-1, width)
        scores = self.gate(flat).softmax(-1)
        weight, choice = scores.max(-1)
        hot = F.one_hot(choice, 3)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1)
        room = int(self.capacity * flat.shape[0])
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            chosen = ((choice == n) & (place < room)).nonzero(as_tuple=True)[0]
            if chosen.numel() == 0:
                continue
            out.index_add_(0, chosen, expert(flat[chosen]) * weight[chosen, None])
        auxiliary = (hot.to(x.dtype).mean(0) * scores.mean(0)).sum() * 3
        return x + out.view(rows, length, width), auxiliary


class Switch(nn.Module):
    def __init__(self, capacity=0.75) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Router(capacity) for _ in range(2)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        total = 0.0
        for block in self.blocks:
            x, auxiliary = block(x)
            total = total + auxiliary
        return {"y": self.head(x).mean(1), "aux": total}


@case("blind: Switch: experts with a capacity and an auxiliary loss", inherent=True)
def _():
    return workload(
        Switch, "blocks.*", "head", batch=series, loss=lambda made, y: F.mse_loss(made["y"], y) + 0.01 * made["aux"]
    )


@case("blind: experts with nonzero and index_add_, not marked", inherent=True)
def _():
    return workload(
        Switch, "blocks.0", "blocks.1.experts.*", "head", batch=series,
        loss=lambda made, y: F.mse_loss(made["y"], y) + 0.01 * made["aux"],
    )  # fmt: skip


class TimeMix(nn.Module):
    """RWKV: a token shift and the wkv recurrence in a loop with running maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.first = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.mix = nn.Parameter(torch.rand(3, 1, 1, WIDTH))
        self.key, self.value, self.gate, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x):
        old = self.shift(x)
        k, v, r = (f(x * m + old * (1 - m)) for f, m in zip((self.key, self.value, self.gate), self.mix))
        num = den = torch.zeros_like(x[:, 0])
        top = torch.full_like(num, -1e38)
        made = torch.empty_like(x)
        for t in range(x.shape[1]):
            q = torch.maximum(top, self.first + k[:, t])
            a, b = torch.exp(top - q), torch.exp(self.first + k[:, t] - q)
            made[:, t] = (a * num + b * v[:, t]) / (a * den + b)
            q = torch.maximum(top - self.decay.exp(), k[:, t])
            a, b = torch.exp(top - self.decay.exp() - q), torch.exp(k[:, t] - q)
            num, den, top = a * num + b * v[:, t], a * den + b, q
        return x + self.out(made * r.sigmoid())


class Blocks(nn.Module):
    block = TimeMix

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(self.block() for _ in range(2)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


case("blind: RWKV: token shift by negative padding, a loop with running maxima", "blocks.*", "head", batch=series)(
    Blocks
)


@case("blind: RWKV, linear layers marked, the recurrence at the root", "blocks.*.key", "blocks.*.out", "head", batch=series)  # fmt: skip
class LooseRwkv(Blocks):
    pass


class Retain(nn.Module):
    """Retention: a decay mask by powers, and chunks with a carried state."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("gamma", torch.tensor(0.9), persistent=False)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        n = torch.arange(3, device=x.device, dtype=x.dtype)
        decay = torch.nan_to_num((self.gamma ** (n[:, None] - n)) * (n[:, None] >= n))
        state, made = x.new_zeros(x.shape[0], WIDTH, WIDTH), []
        for a, b, c in zip(q.split(3, 1), k.split(3, 1), v.split(3, 1)):
            made.append((a @ b.mT * decay) @ c + (a @ state) * self.gamma ** (n[:, None] + 1))
            state = state * self.gamma**3 + (b * self.gamma ** (2 - n)[:, None]).mT @ c
        return x + torch.cat(made, 1).tanh() / 4


@case("blind: retention in chunks, gamma in a non-persistent buffer", "blocks.*", "head", batch=series)
class RetNet(Blocks):
    block = Retain


@case("blind: retention, projections marked alone", "blocks.*.q", "blocks.*.v", "head", batch=series)
class LooseRetNet(Blocks):
    block = Retain


@case("blind: Perceiver: latents repeated over the batch, cross-attention with einsum", "cross.*", "latent.*", "head", batch=series)  # fmt: skip
class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH))
        self.cross = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.latent = nn.ModuleList([lin(WIDTH, WIDTH)] * 2)  # shared, as in the paper
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, mask=None):
        z = self.latents.unsqueeze(0).expand(x.size(0), -1, -1)
        for cross, latent in zip(self.cross, self.latent):
            z = z + cross(z, x, x, key_padding_mask=mask, need_weights=False)[0]
            z = latent(z) + z
        return self.head(z.mean(dim=-2))


@case("blind: NeRF: positions encoded by powers, densities and alpha compositing by cumprod", "net", "density", "colour", batch=series)  # fmt: skip
class Nerf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(2), persistent=False)
        self.net, self.density, self.colour = lin(WIDTH * 5, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def encode(self, x):
        made = [x]
        for f in self.freqs:
            for function in (torch.sin, torch.cos):
                made.append(function(x * f))
        return torch.cat(made, -1)

    def forward(self, rays):
        h = self.net(self.encode(rays))
        alpha = 1 - torch.exp(-F.softplus(self.density(h)[..., 0]) * 0.3)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return (alpha * through).unsqueeze(-1).mul(self.colour(h)).sum(1)


def crosses(rows, generator):
    ids = torch.randint(7, (rows, 3), generator=generator, dtype=torch.int32)
    dense = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    clicked = torch.rand(rows, generator=generator) > 0.5
    return {"ids": ids, "dense": dense, "seen": clicked}, clicked.to(torch.float64)


@case("blind: DeepFM: int32 fields with offsets, a bool input, crosses by the square of the sum")
def _():
    class DeepFM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offsets", torch.tensor([0, 7, 14]), persistent=False)
            self.embed, self.linear, self.deep = nn.Embedding(21, 4), nn.Embedding(21, 1), lin(16, 8, 1)
            self.cross = nn.ParameterList(nn.Parameter(torch.randn(16) / 4) for _ in range(2))

        def forward(self, ids, dense, *, seen):
            ids = ids + self.offsets.unsqueeze(0)
            e = self.embed(ids)
            pairs = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1)
            x0 = x = torch.cat([e.flatten(1), dense], 1)
            for w in self.cross:
                x = x0 * (x @ w)[:, None] + x
            return self.linear(ids).sum((1, 2)) + pairs + self.deep(x).squeeze(-1) + seen * 0.1

    return workload(DeepFM, "embed", "linear", "deep", batch=crosses, loss=F.binary_cross_entropy_with_logits)


class Memory(nn.Module):
    """Memory bank of every sample's feature, written by indexes (instance discrimination)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = lin(WIDTH, WIDTH), nn.Linear(20, 4)
        self.register_buffer("bank", F.normalize(torch.randn(20, WIDTH), dim=1))

    def forward(self, x, index):
        f = F.normalize(self.encoder(x), dim=1)
        scores = f @ self.bank.t().clone().detach()
        if self.training:
            with torch.no_grad():
                old = self.bank.index_select(0, index.view(-1))
                self.bank.index_copy_(0, index.view(-1), F.normalize(old * 0.5 + f * 0.5, dim=1))
        return self.head(scores)


def indexed(rows, generator):
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return (x, torch.randperm(20, generator=generator)[:rows]), torch.randint(4, (rows,), generator=generator)


@case("blind: a memory bank by sample index, index_copy_ at the root", inherent=True)
def _():
    return workload(Memory, "encoder", "head", batch=indexed, loss=F.cross_entropy)


@case("blind: centre loss: centres as buffers moved by scatter, the distance in the output", inherent=True)
def _():
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = lin(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
            self.register_buffer("centres", torch.zeros(4, WIDTH))

        def forward(self, x, y):
            f = self.encoder(x)
            near = (f - self.centres[y]).square().sum(1).clone()
            if self.training:
                delta = torch.zeros_like(self.centres).index_add_(0, y, (f - self.centres[y]).detach())
                count = torch.bincount(y, minlength=4).to(f.dtype)[:, None] + 1
                self.centres += 0.5 * delta / count
            return self.head(f), near

    return workload(
        Centres,
        "encoder",
        "head",
        batch=labelled,
        loss=lambda made, y: F.cross_entropy(made[0], y) + 0.01 * made[1].mean(),
    )


@case("blind: ArcFace: the class weight normalised, a margin where the label is, easy by torch.where")
def _():
    class ArcFace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.mid = lin(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.weight = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, x, labels=None):
            cosine = F.linear(F.normalize(self.mid(self.encoder(x))), F.normalize(self.weight))
            if labels is None:
                return cosine
            phi = cosine * 0.88 - torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1)) * 0.48
            phi = torch.where(cosine > -0.88, phi, cosine - 0.24)
            hot = torch.zeros(cosine.size(), device=x.device, dtype=x.dtype)
            hot.scatter_(1, labels.view(-1, 1).long(), 1)
            return 8 * ((hot * phi) + ((1.0 - hot) * cosine))

    return workload(ArcFace, "encoder", "mid", batch=labelled, loss=F.cross_entropy)


@case("blind: prefix tuning: trained keys and values by an MLP over arange, before frozen attention", "blocks.*", "head", batch=series)  # fmt: skip
class Prefix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Sequential(nn.Embedding(2, WIDTH), nn.Linear(WIDTH, 2 * 2 * WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("places", torch.arange(2).long(), persistent=False)

    def forward(self, x):
        past = self.prefix(self.places.unsqueeze(0).expand(x.shape[0], -1)).view(x.shape[0], 2, 2, 2, WIDTH)
        for n, block in enumerate(self.blocks):
            q, k, v = block(x).chunk(3, -1)
            k, v = torch.cat([past[:, :, n, 0], k], 1), torch.cat([past[:, :, n, 1], v], 1)
            x = x + F.scaled_dot_product_attention(q, k, v)
        return self.head(x.mean(1))


@case("blind: deep supervision: a head after every block, losses weighted by depth")
def _():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(lin(WIDTH, WIDTH) for _ in range(3))
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(3))

        def forward(self, x):
            made = {}
            for n, (block, head) in enumerate(zip(self.blocks, self.heads), 1):
                x = block(x)
                made[f"depth{n}"] = head(x)
            return made if self.training else made["depth3"]

    def loss(made, y):
        if isinstance(made, dict):
            return sum(F.mse_loss(each, y) * 0.5**n for n, each in enumerate(reversed(made.values())))
        return F.mse_loss(made, y)

    return workload(Deep, "blocks.*", "heads.*", loss=loss)


@case("blind: a siamese triplet: one encoder three times, distances in the output")
def _():
    def triplets(rows, generator):
        x = torch.randn(3, rows, WIDTH, generator=generator, dtype=torch.float64)
        return {"anchor": x[0], "positive": x[1], "negative": x[2]}, None

    class Triplet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = lin(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

        def embed(self, x):
            return F.normalize(self.b(self.a(x)), dim=-1)

        def forward(self, anchor, positive, negative):
            return tuple(map(self.embed, (anchor, positive, negative)))

    return workload(Triplet, "a", "b", batch=triplets, loss=lambda made, _: F.triplet_margin_loss(*made, margin=0.3))


@case("blind: DETR: queries over the batch, auxiliary outputs as a list of dicts")
def _():
    class Detr(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Embedding(3, WIDTH)
            self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2) for _ in range(2))
            self.classes, self.boxes = nn.Linear(WIDTH, 3), lin(WIDTH, WIDTH, 4)

        def forward(self, x):
            memory = x.transpose(0, 1)
            query = self.queries.weight.unsqueeze(1).repeat(1, x.shape[0], 1)
            target, between = torch.zeros_like(query), []
            for layer in self.layers:
                target = target + layer(target + query, memory, value=memory)[0]
                between.append(target)
            hidden = torch.stack(between).transpose(1, 2)
            classes, boxes = self.classes(hidden), self.boxes(hidden).sigmoid()
            out = {"logits": classes[-1], "boxes": boxes[-1]}
            out["aux"] = [{"logits": a, "boxes": b} for a, b in zip(classes[:-1], boxes[:-1])]
            return out

    def loss(made, y):
        return sum(each["logits"].logsumexp(-1).mean() + (each["boxes"] - y[:, :, None].sigmoid()).abs().mean()
                   for each in [made, *made["aux"]])  # fmt: skip

    return workload(Detr, "layers.*", "classes", "boxes", batch=series, loss=loss)


@case("blind: an anchor head: levels permuted and reshaped, grids by meshgrid, decoded in place")
def _():
    class Anchors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
            self.heads = nn.ModuleList(nn.Conv2d(4, 2 * 5, 1) for _ in range(2))
            self.register_buffer("sizes", torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
            self.grids = [torch.empty(0)] * 2

        def forward(self, x):
            levels = [torch.relu(self.stem(x))]
            levels.append(torch.relu(self.down(levels[0])))
            made = []
            for n, (head, h) in enumerate(zip(self.heads, levels)):
                y = head(h)
                b, _, height, width = y.shape
                y = y.view(b, 2, 5, height, width).permute(0, 1, 3, 4, 2).contiguous()
                grid = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), 2)
                y = y.sigmoid().clone()
                y[..., 0:2] = (y[..., 0:2] * 2 - 0.5 + grid.to(y)) * 2**n
                y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * self.sizes.view(1, 2, 1, 1, 2)
                made.append(y.view(b, -1, 5))
            return torch.cat(made, 1)

    return workload(Anchors, "stem", "down", "heads.*", batch=images, loss=lambda made, _: made.square().mean() / 100)


@case("blind: GAT: attention over a dense adjacency with eye and masked_fill, pooled by degrees", "layers.*", "head")
class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.a, self.head = nn.Parameter(torch.randn(2, 2)), nn.Linear(2, 1)

    def forward(self, x):
        x = x.view(-1, 4, 2)
        near = (x[..., :1] - x[..., :1].mT).abs() < 1
        near = near | torch.eye(4, dtype=torch.bool, device=x.device)
        for layer in self.layers:
            h = layer(x)
            e = F.leaky_relu((h @ self.a[0])[:, :, None] + (h @ self.a[1])[:, None])
            x = F.elu(e.masked_fill(~near, float("-inf")).softmax(-1) @ h)
        degrees = near.sum(-1, keepdim=True)
        return self.head((x / degrees).sum(1))


def spoken(rows, generator):
    x = torch.randn(rows, 6, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "lengths": torch.randint(2, 7, (rows,), generator=generator)}, x.mean((1, 2))[:, None]


@case("blind: Conformer-like: masks from lengths, GLU, depthwise convolution, SpecAugment by fixed spans", "blocks.*", "head", batch=spoken)  # fmt: skip
class Conformer(nn.Module):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, 2 * WIDTH, 1)
            self.deep, self.attend = (
                nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
                nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            )

        def forward(self, x, pad=None):
            h = self.norm(x)
            x = x + self.attend(h, h, h, key_padding_mask=pad, need_weights=False)[0]
            h = F.glu(self.up(x.masked_fill(pad[..., None], 0.0).mT), 1)
            return x + F.silu(self.deep(h)).mT, pad

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(self.Block() for _ in range(2)), nn.Linear(WIDTH, 1)

    def forward(self, x, lengths):
        pad = torch.arange(x.size(1), device=x.device)[None, :] >= lengths[:, None]
        x = x.clone()
        x[:, 1:2, 3:5] = 0.0
        for block in self.blocks:
            x, pad = block(x, pad=pad)
        x = x.masked_fill(pad.unsqueeze(-1), 0).sum(1) / lengths.unsqueeze(1)
        return self.head(x)


@case("blind: residual VQ: codes by cdist and argmin, losses summed, a list of indices out")
def _():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = lin(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
            self.books = nn.ParameterList(nn.Parameter(torch.randn(5, WIDTH)) for _ in range(2))

        def forward(self, x):
            left = h = self.encoder(x)
            total, commit, indices = 0.0, [], []
            for book in self.books:
                index = torch.cdist(left, book).argmin(-1)
                code = F.embedding(index, book)
                commit.append(F.mse_loss(code, left.detach()) + 0.25 * F.mse_loss(code.detach(), left))
                total, left = total + code, left - code.detach()
                indices.append(index)
            h = h + (total - h).detach()
            return self.decoder(h), torch.stack(commit).sum(), torch.stack(indices, -1)

    return workload(Residual, "encoder", "decoder", loss=lambda made, y: F.mse_loss(made[0], y) + made[1])


@case("blind: a mixture density network with torch.distributions in the loss", batch=numbers)
def _():
    class Density(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pi, self.mu, self.sigma = lin(WIDTH, WIDTH), *(nn.Linear(WIDTH, 3) for _ in range(3))

        def forward(self, x):
            h = self.body(x)
            return self.pi(h), self.mu(h), F.softplus(self.sigma(h)) + 1e-3

    def loss(made, y):
        pi, mu, sigma = made
        mixture = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=pi), torch.distributions.Normal(mu, sigma)
        )
        return -mixture.log_prob(y[:, 0]).mean()

    return workload(Density, "body", "pi", "mu", "sigma", loss=loss)


@case("blind: an observer: per-channel ranges by in-place minimum and maximum, fake quantisation", "stem", "observer", "head", inherent=True)  # fmt: skip
class Observed(nn.Module):
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.full((WIDTH,), float("inf")))
            self.register_buffer("high", torch.full((WIDTH,), float("-inf")))

        def forward(self, h):
            if self.training:
                low, high = h.detach().aminmax(dim=0)
                self.low.copy_(torch.min(self.low, low))
                torch.maximum(self.high, high, out=self.high)
            step = ((self.high - self.low) / 255).clamp_min(1e-8)
            q = ((h - self.low) / step).round().clamp(0, 255) * step + self.low
            return h + (q - h).detach()

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.observer, self.head = nn.Linear(WIDTH, WIDTH), self.Observer(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.observer(self.stem(x)))


@case("blind: mixup inside the model with roll, the share from the inputs", inherent=True)
def _():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = lin(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x, y):
            lam = torch.sigmoid(x[:, :1])
            x = lam * x + (1 - lam) * x.roll(1, 0)
            scores = self.head(self.stem(x))
            return {"loss": (lam[:, 0] * F.cross_entropy(scores, y, reduction="none")
                             + (1 - lam[:, 0]) * F.cross_entropy(scores, y.roll(1, 0), reduction="none")).mean()}  # fmt: skip

    return workload(Mixed, "stem", "head", batch=labelled, loss=given)


@case("blind: token merging: the most alike pairs by scatter_reduce, lengths halved", "blocks.*", "head", batch=series)
class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 1)

    @staticmethod
    def merge(x, r):
        with torch.no_grad():
            m = x / x.norm(dim=-1, keepdim=True)
            near, index = (m[:, ::2] @ m[:, 1::2].mT).max(-1)
            order = near.argsort(-1, descending=True)[..., None]
            source, rest = order[:, :r], order[:, r:]
            target = index[..., None].gather(-2, source)
        a, b = x[:, ::2], x[:, 1::2]
        d = x.shape[-1]
        kept = a.gather(-2, rest.expand(-1, -1, d))
        b = b.scatter_reduce(-2, target.expand(-1, -1, d), a.gather(-2, source.expand(-1, -1, d)), reduce="mean")
        return torch.cat([kept, b], 1)

    def forward(self, x):
        for block in self.blocks:
            x = self.merge(torch.tanh(block(x)), 1)
        return self.head(x.mean(1))
