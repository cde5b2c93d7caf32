"""What people do in their loops between steps: freezing, clipping of weights, schedules, annealed objects."""

from __future__ import annotations

import torch
from foreign.case import case
from foreign.hooks import Net
from torch import nn
from workloads import WIDTH

MARKS = ("first", "second", "last")


def unfreeze(n, parameters, optimizer):
    for name, each in parameters.items():
        if name.startswith("first"):
            each.requires_grad_(n > 0)


@case("loop: gradual unfreezing, the first layer from the second step on", *MARKS, loop=unfreeze)
class Unfreezing(Net):
    pass


def freeze(n, parameters, optimizer):
    for name, each in parameters.items():
        if name.startswith("second"):
            each.requires_grad_(n < 1)


@case("loop: a middle layer frozen from the second step on", *MARKS, loop=freeze)
class Freezing(Net):
    pass


@case("loop: built frozen, unfrozen later", *MARKS, loop=unfreeze, refusal="requires_grad")
class BuiltFrozen(Net):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


def clip(n, parameters, optimizer):
    with torch.no_grad():
        for each in parameters.values():
            each.clamp_(-0.3, 0.3)


@case("loop: weights clipped (WGAN)", *MARKS, loop=clip)
class Clipping(Net):
    pass


def project(n, parameters, optimizer):
    with torch.no_grad():
        norm = torch.stack([each.norm() for each in parameters.values()]).norm()
        for each in parameters.values():
            each.mul_(2 / norm)


@case("loop: all weights scaled to one norm", *MARKS, loop=project, refusal="of each rank's own")
class Projected(Net):
    pass


def project_rows(n, parameters, optimizer):
    with torch.no_grad():
        for each in (some for some in parameters.values() if some.dim() > 1):
            each.copy_(each.renorm(2, 0, 0.5))


@case("loop: each row of the weights to a norm", *MARKS, loop=project_rows)
class RowsProjected(Net):
    pass


def replace_data(n, parameters, optimizer):
    for each in parameters.values():
        each.data = each.data * 0.9


@case("loop: weights assigned through .data", *MARKS, loop=replace_data)
class Assigned(Net):
    pass


def anneal_rate(n, parameters, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 0.05 / (n + 1)


@case("loop: the learning rate set in the groups", *MARKS, loop=anneal_rate)
class Scheduled(Net):
    pass


CONFIG = {"scale": 1.0, "skip": False}


def anneal(n, parameters, optimizer):
    CONFIG.update(scale=0.8**n, skip=n == 1)


class Configured(nn.Linear):
    """Reads an object that the loop changes."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.config = CONFIG

    def forward(self, x):
        return super().forward(x) * self.config["scale"]


@case("loop: a config object annealed that a marked module reads", *MARKS, loop=anneal, refusal="share|object|state")
class ByConfig(Net):
    def __init__(self):
        super().__init__()
        self.second = Configured()


@case("loop: a global annealed that the root reads", *MARKS, loop=anneal, refusal="has changed")
class ByGlobal(Net):
    def forward(self, x):
        return super().forward(x * CONFIG["scale"])


@case("loop: a global annealed that a marked module reads", *MARKS, loop=anneal, refusal="global|object|state")
class ByGlobalInside(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x) * CONFIG["scale"]

    def __init__(self):
        super().__init__()
        self.second = self.Layer(WIDTH, WIDTH)


@case("loop: a switch that leaves a marked module out", *MARKS, loop=anneal, refusal="has changed")
class Switch(Net):
    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h if CONFIG["skip"] else torch.tanh(self.second(h)))


def average(n, parameters, optimizer):
    with torch.no_grad():
        for each in parameters.values():
            kept = optimizer.state[each].get("momentum_buffer")
            if kept is not None:
                kept.mul_(0.5)


@case("loop: the optimizer's state changed by hand", *MARKS, loop=average, refusal="state|optimizer")
class StateChanged(Net):
    pass
