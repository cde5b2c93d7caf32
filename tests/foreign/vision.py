"""Convolutional models and vision transformers, small and by hand, on images of 8 by 8."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from foreign.case import case
from torch import nn

CLASSES = 3


def images(rows, generator):
    x = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x, x.mean((2, 3)).argmax(1)


def segmented(rows, generator):
    x, _ = images(rows, generator)
    return x, x.argmax(1)


vision = functools.partial(case, batch=images, loss=F.cross_entropy)


def conv(inputs, outputs, size=3, stride=1, groups=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


@vision("VGG: features, pool, flatten, classifier", "features.*", "classifier", inherent=True)
class Vgg(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(conv(3, 4), nn.MaxPool2d(2), conv(4, 8), nn.MaxPool2d(2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(True), nn.Linear(8, CLASSES))

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Basic(nn.Module):
    """ResNet's block: in-place ReLU, `out += identity`."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = (
            None
            if stride == 1 and inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = (
            nn.Conv2d(3, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
        )
        self.layer1 = nn.Sequential(Basic(4, 4, 1), Basic(4, 4, 1))
        self.layer2 = nn.Sequential(Basic(4, 8, 2), Basic(8, 8, 1))
        self.fc = nn.Linear(8, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 1)
                nn.init.constant_(module.bias, 0)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


vision("ResNet, blocks marked", "layer1.*", "layer2.*", "fc", inherent=True)(ResNet)
vision(
    "ResNet, every layer of the stem and blocks marked", "conv1", "bn1", "layer1.*", "layer2.*", "fc", inherent=True
)(ResNet)
vision(
    "ResNet, everything inside blocks marked", "conv1", "bn1", "layer?.*.conv?", "layer?.*.bn?", "fc", inherent=True
)(ResNet)


@vision("DenseNet: lists of features concatenated", "stem", "layers.*", "head", inherent=True)
class DenseNet(nn.Module):
    class Layer(nn.Module):
        def __init__(self, inputs):
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 2, 3, padding=1, bias=False)

        def forward(self, features):
            return self.conv(F.relu(self.norm(torch.cat(features, 1))))

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(10, CLASSES)
        self.layers = nn.ModuleList(self.Layer(4 + 2 * n) for n in range(3))

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        return self.head(torch.cat(features, 1).mean((2, 3)))


@vision("MobileNet: depthwise, ReLU6 and squeeze-excitation scaled in place", "blocks.*", "head", inherent=True)
class MobileNet(nn.Module):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.expand, self.depth, self.project = conv(4, 8, 1), conv(8, 8, groups=8), nn.Conv2d(8, 4, 1)
            self.squeeze = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU6(True), nn.Conv2d(2, 8, 1), nn.Hardsigmoid()
            )

        def forward(self, x):
            y = self.depth(self.expand(x))
            return x + self.project(y * self.squeeze(y))

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4, CLASSES)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean([2, 3]))


@case("UNet with skips, each half marked", "downs.*", "middle", "ups.*", "head", batch=segmented, loss=F.cross_entropy)
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.ups = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(16, 4, 2, 2)])
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = F.relu(down(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for up, skip in zip(self.ups, reversed(skips), strict=True):
            x = torch.cat([F.interpolate(up(x), size=skip.shape[-2:]), skip], dim=1)
        return self.head(x)


@case(
    "an FCN with an auxiliary head: an OrderedDict out, interpolated to the input's size",
    "body",
    "out",
    "aux",
    batch=segmented,
    loss=lambda made, wanted: F.cross_entropy(made["out"], wanted) + 0.4 * F.cross_entropy(made["aux"], wanted),
)
class Fcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out, self.aux = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, CLASSES, 1), nn.Conv2d(4, CLASSES, 1)

    def forward(self, x):
        size, h = x.shape[-2:], F.relu(self.body(x))
        return {
            name: F.interpolate(head(h), size=size, mode="bilinear", align_corners=False)
            for name, head in (("out", self.out), ("aux", self.aux))
        }


@vision(
    "Inception: branches concatenated, auxiliary logits in training only",
    "stem",
    "branches.*",
    "aux",
    "head",
    loss=lambda made, wanted: sum(
        F.cross_entropy(each, wanted) for each in (made if isinstance(made, tuple) else (made,))
    ),
)
class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(4, 2, size, padding=size // 2) for size in (1, 3, 5))
        self.aux, self.head = nn.Linear(4, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = F.relu(self.stem(x))
        y = self.head(torch.cat([branch(x) for branch in self.branches], 1).mean((2, 3)))
        return (y, self.aux(x.mean((2, 3)))) if self.training else y


@vision("style transfer by AdaIN with statistics of each image", "stem", "middle", "head")
class AdaIn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.middle, self.head = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x):
        content, style = self.stem(x), self.middle(self.stem(x.flip(-1)))
        deviation, mean = torch.std_mean(style, dim=(2, 3), keepdim=True)
        content = (content - content.mean((2, 3), keepdim=True)) / (content.std((2, 3), keepdim=True) + 1e-5)
        return self.head(F.relu(content * deviation + mean).mean((2, 3)))
