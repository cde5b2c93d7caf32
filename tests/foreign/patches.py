"""Vision transformers and their kin, by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.vision import CLASSES, images, vision
from torch import nn


class Vit(nn.Module):
    """A vision transformer with a class token and positions of the root."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8) / 10)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.size(0), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


vision("ViT with a class token", "patch", "blocks.*", "head")(Vit)


@vision("ViT with the class token written into an empty tensor", "patch", "blocks.*", "head")
class VitInPlace(Vit):
    def forward(self, x):
        patches = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.empty(patches.size(0), 5, 8, dtype=patches.dtype)
        x[:, 0] = self.token[:, 0]
        x[:, 1:] = patches
        x += self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@vision("Swin: shifted windows with a mask filled region by region", "patch", "blocks.*", "head")
class Swin(nn.Module):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, windows, mask):
            y = self.norm(windows)
            return windows + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]

    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x):
        x = self.patch(x).permute(0, 2, 3, 1)
        regions = torch.zeros(4, 4, dtype=x.dtype)
        count = 0
        for rows in (slice(0, -2), slice(-2, -1), slice(-1, None)):
            for columns in (slice(0, -2), slice(-2, -1), slice(-1, None)):
                regions[rows, columns] = count
                count += 1
        windows = regions.view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        for n, block in enumerate(self.blocks):
            shifted = torch.roll(x, (-1, -1), (1, 2)) if n % 2 else x
            cut = shifted.view(-1, 2, 2, 2, 2, 8).transpose(2, 3).reshape(-1, 4, 8)
            cut = block(cut, mask.repeat(x.size(0), 1, 1).repeat_interleave(2, 0) if n % 2 else None)
            x = cut.view(-1, 2, 2, 2, 2, 8).transpose(2, 3).reshape(-1, 4, 4, 8)
            x = torch.roll(x, (1, 1), (1, 2)) if n % 2 else x
        return self.head(x.mean((1, 2)))


@vision("MLP-Mixer", "patch", "mixers.*", "head")
class Mixer(nn.Module):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.channels = nn.Linear(4, 4), nn.Linear(8, 8)

        def forward(self, x):
            x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
            return x + F.gelu(self.channels(x))

    def __init__(self):
        super().__init__()
        self.patch, self.mixers, self.head = (
            nn.Conv2d(3, 8, 4, 4),
            nn.ModuleList(self.Block() for _ in range(2)),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(x.mean(1))


@vision("ConvNeXt: layer scale as a parameter, permuted norms", "stem", "blocks.*", "head")
class ConvNeXt(nn.Module):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.depth, self.norm, self.inner = (
                nn.Conv2d(4, 4, 3, padding=1, groups=4),
                nn.LayerNorm(4),
                nn.Linear(4, 4),
            )
            self.scale = nn.Parameter(1e-1 * torch.ones(4))

        def forward(self, x):
            y = self.norm(self.depth(x).permute(0, 2, 3, 1))
            return x + (self.scale * F.gelu(self.inner(y))).permute(0, 3, 1, 2)

    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Conv2d(3, 4, 2, 2),
            nn.ModuleList(self.Block() for _ in range(2)),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean([-2, -1]))


@vision("ShuffleNet: channels chunked and shuffled by view and transpose", "stem", "branches.*", "head")
class ShuffleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4, CLASSES)
        self.branches = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for branch in self.branches:
            left, right = x.chunk(2, dim=1)
            x = torch.cat((left, F.relu(branch(right))), dim=1)
            x = x.view(x.size(0), 2, 2, *x.shape[2:]).transpose(1, 2).contiguous().view(x.shape)
        return self.head(x.mean([2, 3]))


@vision("an FPN: coarse features added to fine ones in place", "bodies.*", "laterals.*", "head")
class Fpn(nn.Module):
    def __init__(self):
        super().__init__()
        self.bodies = nn.ModuleList([nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.laterals = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        features = []
        for body in self.bodies:
            x = F.relu(body(x))
            features.append(x)
        top = self.laterals[1](features[1])
        fine = self.laterals[0](features[0])
        fine += F.interpolate(top, scale_factor=2.0)
        return self.head(fine.mean((2, 3)) + top.mean((2, 3)))


@vision(
    "an MAE: patches masked by an index made in forward from a seeded shuffle",
    "patch",
    "encoder",
    "decoder",
    "head",
    batch=images,
    loss=lambda made, _: made,
)
class Mae(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.encoder, self.decoder, self.head = (
            nn.Conv2d(3, 8, 4, 4),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 48),
        )
        self.token = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, x):
        patches = self.patch(x).flatten(2).transpose(1, 2)
        order = torch.tensor([2, 0, 3, 1])
        kept = self.encoder(patches[:, order[:2]])
        full = torch.cat([kept, self.token.expand(x.size(0), 2, -1)], dim=1)
        full = torch.gather(full, 1, order.argsort().view(1, 4, 1).expand(x.size(0), -1, 8))
        made = self.head(torch.tanh(self.decoder(full)))
        wanted = F.unfold(x, 4, stride=4).transpose(1, 2)
        mask = torch.ones(x.size(0), 4, dtype=x.dtype)
        mask[:, :2] = 0
        mask = torch.gather(mask, 1, order.argsort().expand(x.size(0), -1))
        return ((made - wanted).square().mean(-1) * mask).sum() / mask.sum()
