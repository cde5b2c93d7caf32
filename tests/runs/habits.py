"""On two ranks: what user code does beside tensors trains as it does in plain torch, or is refused in words.

torchrun --nproc-per-node 2 tests/runs/habits.py CASE
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import linecache
import os
import random
import re
import sys
import tempfile
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_world_size, is_initialized
from torch.nn.functional import batch_norm, l1_loss, mse_loss
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from assigner import AssignerError, Pipeline, Workload
from assigner.runtime.update.optimizer import PipelineOptimizer

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from foreign.harness import distance, pieces, seeded
from workloads import WIDTH, graph_of, make_plan, workload

EXACT = 1e-8
STEPS = 5
TWO: list[Any] = [(0, ["first"]), (1, ["second", "last"])]
OTHER: list[Any] = [(1, ["first"]), (0, ["second", "last"])]
SHARED: list[Any] = [({0: 1, 1: 1}, ["first", "second", "last"])]
RUNNING = 1.0
SETTINGS: dict[str, Any] = {"alpha": 1.0}
SCALE = torch.ones((), dtype=torch.float64)


def pruned() -> nn.Module:
    """Its weight is made anew before each forward, of a parameter and a mask."""
    return prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.4)


class Net(nn.Module):
    """Three partitions, of which the first two can be anything."""

    def __init__(self, first: nn.Module | None = None, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = first or nn.Linear(WIDTH, WIDTH), second or nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Checked(nn.Module):
    """A BatchNorm that a checkpoint runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def work(self, x: torch.Tensor) -> Any:
        return self.inner(self.norm(x))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.work, x, use_reentrant=False)


class Renormalised(nn.BatchNorm1d):
    """One that normalises by its running statistics while it trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_var is not None
        return super().forward(x) / (self.running_var + 1)


class Pasted(nn.BatchNorm1d):
    """torch's own forward, pasted into a subclass and followed by an activation, as libraries of models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        training = self.training or self.running_mean is None
        return torch.relu(
            batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training, share, self.eps)
        )

    def fused(self) -> torch.Tensor:
        """For an export alone."""
        assert self.running_var is not None
        return self.weight / (self.running_var + self.eps).sqrt()


class Counted(nn.BatchNorm1d):
    """A BatchNorm with a count of its own."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Read(nn.Module):
    """Reads the running statistics of a BatchNorm inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x) * (1 + getattr(self.norm, "running_var"))  # noqa: B009 - a name that no code has


@dataclass(slots=True)
class Clock:
    """A count without a dictionary."""

    ticks: int = 0


class Timed(nn.Module):
    """Divides by how often it was called."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock, self.inner = clock, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        self.clock.ticks += 1
        return self.inner(x) / self.clock.ticks


class Held(nn.Module):
    """Divides by how often a function that it holds was called."""

    def __init__(self, held: Any, read: Callable[[Any], Callable[[], int]]) -> None:
        super().__init__()
        self.held, self.read, self.inner = held, read, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) / self.read(self.held)()


class Box:
    """Holds something."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class HookObject:
    """A hook that counts in an object, and divides by that."""

    def __init__(self) -> None:
        self.calls = argparse.Namespace(n=0)

    def __call__(self, _: Any, __: Any, made: torch.Tensor) -> torch.Tensor:
        self.calls.n += 1
        return made / self.calls.n


class Logged(nn.Linear):
    """A hook on its backward writes down what it saw, which no forward reads."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        seen: list[float] = []
        self.register_full_backward_hook(lambda *found: seen.append(float(found[1][0].norm())))


class Kept(nn.Module):
    """What it made last in eval mode stays on it, in an attribute and in a buffer."""

    last: Any = None
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        made = self.inner(x)
        if not self.training:
            self.last, self.mean = made, made.mean(0).to(self.mean.dtype)
        return made


def closed_count() -> Callable[[], int]:
    """A function that counts in an object in its closure."""
    box = Box({"n": 0})

    def count() -> int:
        box.inner["n"] += 1
        return int(box.inner["n"])

    return count


def hooked(hook: Callable[[], Any]) -> nn.Module:
    """A Linear with a hook on its forward."""
    made = nn.Linear(WIDTH, WIDTH)
    made.register_forward_hook(hook())
    return made


class Registered(nn.Linear):
    """Counts in an object that is there without it, and is multiplied by what the script has put there."""

    def __init__(self, registry: Any, counts: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.registry, self.counts = registry, counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.registry.n += self.counts
        return super().forward(x) * self.registry.alpha


def registered(counts: bool) -> Workload:
    """A partition that is such."""
    registry = types.SimpleNamespace(n=0, alpha=1.0)
    made = made_of(lambda: Net(second=Registered(registry, counts)))
    if not counts:
        SETTINGS["registry"] = registry
    return made


def halve_registered(_: Any) -> None:
    """By the script, on all ranks."""
    SETTINGS["registry"].alpha *= 0.5


def normed() -> nn.Module:
    """A weight that a hook makes of its length and its direction, as an attribute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def closed_hook() -> Any:
    """A hook that counts in its closure, and divides by that."""
    count = closed_count()
    return lambda _, __, made: made / count()


def hooked_weight() -> nn.Module:
    """A weight whose gradient a hook of the builder's divides by its count."""
    layer, hook = nn.Linear(WIDTH, WIDTH), closed_hook()
    layer.weight.register_hook(lambda gradient: hook(None, None, gradient))
    return layer


def in_inference_mode(pipeline: Any, batch: Any) -> None:
    """An evaluation, as scripts have it."""
    with torch.inference_mode():
        pipeline.evaluate(batch)


class Warm(torch.optim.SGD):
    """A rate that rises with a count of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1.0, self.count / 6)
        return super().step(closure)


class Averaged(torch.optim.SGD):
    """In its eval mode parameters are what they were on average, as in schedule-free optimizers."""

    def eval(self) -> None:
        """Half of the way back to the start."""
        self._swap("eval")

    def train(self) -> None:
        """Where training goes on."""
        self._swap("train")

    @torch.no_grad()
    def _swap(self, mode: str) -> None:
        for group in self.param_groups:
            if group.get("mode", "train") != mode:
                for each in group["params"]:
                    each.mul_(0.5 if mode == "eval" else 2.0)
            group["mode"] = mode


def averaged(parameters: Any) -> torch.optim.Optimizer:
    """Such a one."""
    return Averaged(parameters, lr=0.1)


def in_its_modes(pipeline: Any, batch: Any) -> None:
    """An evaluation, as scripts have it with such an optimizer."""
    pipeline.optimizer.eval()
    pipeline.evaluate(batch)
    pipeline.optimizer.train()
    assert not hasattr(pipeline.optimizer, "other")


class Slow(torch.optim.Optimizer):
    """An optimizer around another one, whose state stays inside: Lookahead (Zhang et al., 2019)."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.Adam(parameters, lr=0.05)
        super().__init__(self.inner.param_groups, {"counter": 0})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        made = self.inner.step(closure)
        for group in self.param_groups:
            group["counter"] = group.get("counter", 0) + 1
            for each in group["params"] if group["counter"] % 2 == 0 else ():
                state = self.state[each]
                state.setdefault("slow", each.detach().clone())
                state["slow"].add_(each.detach() - state["slow"], alpha=0.5)
                each.data.copy_(state["slow"])
        return made


class Annealed(torch.optim.SGD):
    """An optimizer with a number of its own that the script sets."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.strength = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.mul_(self.strength)
        return super().step(closure)


class Noting(Annealed):
    """Notes a number that is another one on each rank."""

    seen = 0.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                self.seen += float(each.grad.sum())
        return super().step(closure)


def set_anew(optimizer: Any) -> None:
    """Its number, its groups, and its state, which it loses."""
    optimizer.strength *= 0.5
    optimizer.param_groups = [{**group, "lr": group["lr"] * 0.9} for group in optimizer.param_groups]
    optimizer.state = defaultdict(dict)


def set_on_one(optimizer: Any) -> None:
    """On one rank alone; there is none in plain training."""
    if os.environ["RANK"] == "0" or not isinstance(optimizer, PipelineOptimizer):
        optimizer.strength *= 0.5


def reads_own(optimizer: Any) -> None:
    """What it notes by itself."""
    assert isinstance(optimizer.seen, float)


def takes_out(optimizer: Any) -> None:
    """A group, at some time."""
    if len(optimizer.param_groups) > 1:
        del optimizer.param_groups[1]


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return mse_loss(made, wanted) * torch.exp(-self.log) + self.log


class Slotted:
    """A loss that remembers, without a dictionary."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        self.running = 1.0

    def __call__(self, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        value = mse_loss(made, wanted)
        self.running = 0.7 * self.running + 0.3 * float(value.detach())
        return value / self.running


def world() -> int:
    """How many processes a script for data parallelism divides by."""
    return dist.get_world_size() if dist.is_initialized() else 1


class Divided(torch.autograd.Function):
    """Divides its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradients[0] / world()


class Parallel(nn.Linear):
    """Divides by the number of processes wherever it can."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.register_hook(lambda gradient: gradient / world())

    def work(self, x: torch.Tensor) -> Any:
        return torch.sin(super().forward(x) / world())

    def forward(self, x: torch.Tensor) -> Any:
        found = Divided.apply(checkpoint(self.work, x, use_reentrant=False))
        return found / (get_world_size() if is_initialized() else 1)


class ParallelSGD(torch.optim.SGD):
    """As optimizers that divide their work over processes."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / world()
        return super().step(closure)


def drawn_loss() -> Any:
    """A loss with a weight that each rank draws for itself."""
    weight = torch.full((), 1.0 + int(os.environ["RANK"]))
    return lambda made, wanted: mse_loss(made, wanted) * weight


def parallel_loss(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Divided by the number of processes, by a function that was imported by its name."""
    return mse_loss(made, wanted) / (get_world_size() if is_initialized() else 1)


class Adaptive(nn.Linear):
    """A gain that follows the norm of its gradients."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.gain = 1.0
        self.register_full_backward_hook(followed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def followed(module: Any, _: Any, gradients: Any) -> None:
    """What a backward tells of its gradients."""
    module.gain = 0.8 * module.gain + 0.2 * (1 + float(gradients[0].norm()))


class Drawn(nn.Linear):
    """First weights by each rank's number, as scripts for data parallelism seed their workers."""

    def __init__(self) -> None:
        torch.manual_seed(int(os.environ["RANK"]))
        super().__init__(WIDTH, WIDTH)


class Ordered(nn.Module):
    """Columns in an order that is drawn; it keeps settings in which a rank's number is one."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order, self.rank = order, int(os.environ["RANK"])
        self.args = types.SimpleNamespace(rank=self.rank, width=WIDTH)
        self.settings = vars(self.args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.order]


class Masked(nn.Linear):
    """A mask in a buffer, of numbers that are drawn."""

    def __init__(self, drawn: random.Random) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tensor([float(drawn.random() < 0.5) for _ in range(WIDTH)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.mask


class Tabled(nn.Linear):
    """What a rank has of its own and no forward reads, and tables in no order or by what has an address."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.pids, self.laps, self.no_decay = [os.getpid()], [time.time()], {id(self.bias)}
        self.edges = {("query", 1), ("key", 2), ("value", 3), (os.path.sep, 4)}
        self.kernels = {torch.relu: [1, 2]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous() if os.environ["RANK"] == "1" else x  # as where a machine has another kernel
        return super().forward(x) / (len(self.edges) + self.kernels[torch.relu][0])


class Scaled(nn.Linear):
    """A factor, or factors as NumPy has them."""

    def __init__(self, factor: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.factor if isinstance(self.factor, float) else torch.tensor([float(each) for each in self.factor])
        return super().forward(x) * factor


def in_turn(names: list[str]) -> list[str]:
    """An order that each process has for itself, as that of a set of texts."""
    first = int(os.environ["RANK"])
    return names[first:] + names[:first]


class Looked(nn.Linear):
    """It looks up a text's number."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.numbers = {name: n for n, name in enumerate(in_turn(["key", "query", "value", "gate"]))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.numbers["value"])


class Gone(nn.Linear):
    """It goes over functions in an order of each process."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        functions = {"sin": torch.sin, "tanh": torch.tanh}
        self.functions = [functions[name] for name in in_turn(["sin", "tanh"])]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for function in self.functions:
            x = function(super().forward(x))
        return x


def made_in_turn() -> nn.Module:
    """Its first two layers are made in such an order."""
    return Net(**{name: nn.Linear(WIDTH, WIDTH) for name in in_turn(["first", "second"])})


def made_before() -> Workload:
    """Each rank has made a model of its own by then, as scripts do that seed by nothing."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = Net().double()
    return made_of(lambda: model)


def own_random() -> random.Random:
    """A generator of each rank's own, as an unseeded one is."""
    return random.Random(os.environ["RANK"])


def ordered_alike() -> nn.Module:
    """Where all ranks have seeded alike, by a draw; elsewhere a refusal."""
    return Ordered(random.sample(range(WIDTH), WIDTH))


def of_a_host(text: str) -> Any:
    """What a file has as `made`, of which each host has its own copy; HOST in it differs."""
    name = f"file_{abs(hash(text))}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "of_a_host.py")
        path.write_text(f"import torch\nfrom torch import nn\n{text}".replace("HOST", os.environ["RANK"]))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        linecache.getlines(str(path), vars(found))  # as a traceback has them, when the file is gone
    return found.made


CALLS_INNER = "def made(o, t):\n    return inner(nn.functional.mse_loss(o, t))"
FOR_A_RANK = """
import os
if os.environ["RANK"] == "0":
    def inner(x):
        print(float(x))
        return x
else:
    def inner(x):
        return x
"""
FORWARD_OF_A_HOST = """
class Made(nn.Module):
    def forward(self, x):
        return x.tanh() * {}
made = Made()
"""


def weighed_on_one() -> Workload:
    """Only one host's file has a weight."""
    return replace(made_of(), weight=len_of_targets if os.environ["RANK"] == "1" else None)


def len_of_targets(_: Any, targets: torch.Tensor) -> float:
    return float(len(targets))


def made_after(seed: int | str) -> Workload:
    """Python's generator is seeded so by the script, which makes the model then."""
    random.seed(seed)
    return made_of(lambda: Net(second=ordered_alike()))


class Doubled(torch.autograd.Function):
    """Its backward makes zeros of nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        del ctx
        return gradients[0] * 2


class TwoHeads(nn.Module):
    """A second output, that the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.extra = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), Doubled.apply(x * self.extra)


class WithHeads(Net):
    """Its last partition has two."""

    def __init__(self) -> None:
        super().__init__()
        self.last: nn.Module = TwoHeads()


class Counting:
    """A loss of the first head, with a memory: where the graph is not kept it is computed ahead."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, made: Any, wanted: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return mse_loss(made[0], wanted) / (1 + 0.1 * self.calls)


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """What has a gradient of zeros is made smaller."""
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.5)


def first_head(made: Any, wanted: torch.Tensor) -> torch.Tensor:
    """The loss of the first head alone."""
    return mse_loss(made[0], wanted)


TRAINED = Weighted()


def trained(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A loss by a module with a parameter at the top of its file."""
    return TRAINED(made, wanted)


def train_loss(_: Any) -> None:
    """The script's own update of that parameter."""
    if TRAINED.log.grad is not None:
        with torch.no_grad():
            TRAINED.log.sub_(0.1 * TRAINED.log.grad)
        TRAINED.log.grad = None


def set_to(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A loss that reads a number at the top of its file, by a function there."""
    return mse_loss(made, wanted) * setting()


def scaled(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A loss that reads a tensor at the top of its file."""
    return mse_loss(made, wanted) * SCALE


def counted_in_scale(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """One that moves it."""
    with torch.no_grad():
        SCALE.mul_(0.9)
    return scaled(made, wanted)


def halve_scale(_: Any) -> None:
    """As scripts let a weight of their loss decay that is a tensor."""
    SCALE.mul_(0.5)


def setting() -> float:
    """Of the script."""
    return float(SETTINGS["alpha"])


def halve_setting(_: Any) -> None:
    """As scripts let a weight of their loss decay."""
    SETTINGS["alpha"] *= 0.5


def halve_on_one(_: Any) -> None:
    """On one rank alone."""
    if os.environ["RANK"] == "0":
        halve_setting(None)


class Timekeeper:
    """A script's own object, of which the loss is a method: its laps are another number on each rank."""

    def __init__(self) -> None:
        self.factor, self.laps, self.began = 0.5, [time.time()], time.time()

    def train(self, _: Any) -> None:
        self.laps.append(time.time() - self.began)
        self.began = time.time()

    def loss(self, made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (made - wanted).square().mean() * self.factor


KEEPER = Timekeeper()


def remembered(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """A loss that remembers at the top of its file."""
    global RUNNING  # noqa: PLW0603 - what is tested
    value = mse_loss(made, wanted)
    RUNNING = 0.7 * RUNNING + 0.3 * float(value.detach())
    return value / RUNNING


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Weights, and all else."""
    every = list(parameters)
    return torch.optim.SGD(
        [{"params": [each for each in every if (each.dim() > 1) is wide]} for wide in (True, False)], lr=0.5
    )


def clip(optimizer: torch.optim.Optimizer) -> None:
    """Each group by itself, on each rank."""
    for group in optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 0.01)


def clip_weights(optimizer: torch.optim.Optimizer) -> None:
    """All weights on each rank, and no biases."""
    every = [each for group in optimizer.param_groups for each in group["params"]]
    nn.utils.clip_grad_norm_([each for each in every if each.dim() > 1], 0.01)


def made_of(model: Callable[[], nn.Module] = Net, **changes: Any) -> Workload:
    """A workload of three partitions."""
    return workload(model, "first", "second", "last", **changes)


def nothing(_: Any) -> None:
    """Between steps."""


def halve(group: dict[str, Any]) -> None:
    """The rate of a group, that the script has taken from the optimizer once."""
    group["lr"] *= 0.5


@dataclass
class Case:
    """What is trained, under which plan, and what is said instead; empty: it trains as plain torch does."""

    make: Callable[[], Workload]
    said: str = ""
    stages: list[Any] = field(default_factory=lambda: TWO)
    remat: Any = "never"
    move: bool = False
    by_hand: Callable[[Any], None] | None = None
    each_step: Callable[[Any], None] = nothing
    after: Callable[[Any], None] = nothing
    context: Callable[[], Any] = contextlib.nullcontext
    micro_batches: int = 2
    before: Callable[[Any, Any], None] | None = None


def half() -> Any:
    """What scripts for one device put around their forward."""
    return torch.autocast("cpu", dtype=torch.bfloat16)


def timed(clock: Callable[[], Any]) -> Workload:
    """A partition that counts in such an object."""
    return made_of(lambda: Net(second=Timed(clock())))


def counted() -> Any:
    return types.SimpleNamespace(ticks=0)


def in_dict() -> nn.Module:
    """A function in a dict of a module."""
    return Held({"count": closed_count()}, lambda held: held["count"])


def in_object() -> nn.Module:
    """A module with such a function in a list in an object."""
    inner = nn.Module()
    inner.count = closed_count()
    return Held(Box([inner]), lambda held: held.inner[0].count)


def with_hook(hook: Callable[[], Any], stages: Any = None, **changes: Any) -> Case:
    """A hook on the forward of the second partition."""
    return Case(lambda: made_of(lambda: Net(second=hooked(hook))), stages=stages or TWO, **changes)


CASES = {
    "autocast": Case(made_of, "torch.autocast is on where the pipeline is called", context=half),
    "checkpoint, one": Case(lambda: made_of(lambda: Net(Checked())), micro_batches=1),
    "renormalised": Case(
        lambda: made_of(lambda: Net(Renormalised(WIDTH))), "whose output depends on its running statistics"
    ),
    "pasted": Case(lambda: made_of(lambda: Net(Pasted(WIDTH))), micro_batches=1),
    "pasted, remat": Case(lambda: made_of(lambda: Net(Pasted(WIDTH))), micro_batches=1, remat="always"),
    "counted": Case(lambda: made_of(lambda: Net(Counted(WIDTH))), "Counted.forward sets its 'calls'"),
    "read": Case(lambda: made_of(lambda: Net(Read())), "uses the running statistics of first.norm", micro_batches=1),
    "in eval mode": Case(lambda: made_of(lambda: Net(nn.Dropout(0.5)).eval()), "gives the model in eval mode"),
    "slots": Case(lambda: timed(Clock), remat="always"),
    "namespace": Case(lambda: timed(counted), remat="always"),
    "namespace, shared": Case(lambda: timed(counted), "its forward changes second.clock", SHARED),
    "hook": with_hook(closed_hook),
    "hook, remat": with_hook(closed_hook, remat="always"),
    "hook, shared": with_hook(closed_hook, SHARED, said="its forward changes what its modules keep"),
    "hook object": with_hook(HookObject),
    "hook object, remat": with_hook(HookObject, remat="always"),
    "hook of a backward": Case(lambda: made_of(lambda: Net(second=Logged()))),
    "hook of a backward, remat": Case(lambda: made_of(lambda: Net(second=Logged())), remat="always"),
    "function in a dict": Case(lambda: made_of(lambda: Net(second=in_dict())), remat="always"),
    "module in an object": Case(lambda: made_of(lambda: Net(second=in_object())), remat="always"),
    "function in a dict, shared": Case(
        lambda: made_of(lambda: Net(second=in_dict())), "its forward changes what its modules keep", SHARED
    ),
    "hook of a weight": Case(lambda: made_of(lambda: Net(second=hooked_weight())), micro_batches=1),
    "hook of a weight, moved": Case(
        lambda: made_of(lambda: Net(second=hooked_weight())), "keeps outside of its modules", move=True, micro_batches=1
    ),
    "hook, moved": with_hook(closed_hook, move=True, said="keeps outside of its modules"),
    "outside, moved": Case(lambda: registered(True), "keeps outside of its modules", move=True),
    "outside by the script, moved": Case(lambda: registered(False), move=True, each_step=halve_registered),
    "slots, moved": Case(lambda: timed(Clock), "a Clock that forward has changed, cannot go", move=True),
    "inference mode": Case(lambda: made_of(lambda: Net(second=Kept())), before=in_inference_mode),
    "inference mode, remat": Case(
        lambda: made_of(lambda: Net(second=Kept())), before=in_inference_mode, remat="always"
    ),
    "global loss": Case(lambda: made_of(loss=remembered), remat="always"),
    "read by a loss": Case(lambda: made_of(loss=set_to), each_step=halve_setting, remat="always"),
    "read by a loss, shared": Case(lambda: made_of(loss=set_to), stages=SHARED, each_step=halve_setting),
    "read by a loss, moved": Case(lambda: made_of(loss=set_to), move=True, each_step=halve_setting),
    "tensor of a loss, moved": Case(lambda: made_of(loss=scaled), move=True, each_step=halve_scale),
    "moved tensor of a loss, moved": Case(
        lambda: made_of(loss=counted_in_scale), "keeps something from call to call", move=True
    ),
    "read by a loss, on one": Case(
        lambda: made_of(loss=set_to), "a loss that reads SETTINGS['alpha'] = 0.5", each_step=halve_on_one
    ),
    "loss of a trainer, shared": Case(lambda: made_of(loss=KEEPER.loss), stages=SHARED, each_step=KEEPER.train),
    "loss of a trainer, moved": Case(lambda: made_of(loss=KEEPER.loss), move=True, each_step=KEEPER.train),
    "drawn loss, shared": Case(
        lambda: made_of(loss=drawn_loss()), "reads has other values on one of them than on another", SHARED
    ),
    "trained loss": Case(lambda: made_of(loss=trained), each_step=train_loss),
    "trained loss, moved": Case(
        lambda: made_of(loss=trained),
        "keeps something from call to call, or was trained",
        move=True,
        each_step=train_loss,
    ),
    "trained loss, shared": Case(lambda: made_of(loss=trained), "Workload.loss has parameters", SHARED),
    "slotted loss": Case(lambda: made_of(loss=Slotted()), remat="always"),
    "slotted loss, moved": Case(lambda: made_of(loss=Slotted()), "Workload.loss keeps something", move=True),
    "counting optimizer": Case(lambda: made_of(optimizer=Warm), move=True),
    "modes of an optimizer": Case(lambda: made_of(optimizer=averaged), before=in_its_modes),
    "weight norm, shared": Case(lambda: made_of(lambda: Net(second=normed())), stages=SHARED),
    "pruned, shared": Case(lambda: made_of(lambda: Net(second=pruned())), stages=SHARED),
    "weight norm, remat": Case(lambda: made_of(lambda: Net(second=normed())), remat="always"),
    "slow optimizer": Case(lambda: made_of(optimizer=Slow)),
    "slow optimizer, moved": Case(lambda: made_of(optimizer=Slow), "Slow keeps self.inner", move=True),
    "set on the optimizer, moved": Case(lambda: made_of(optimizer=Annealed), move=True, after=set_anew),
    "set on the optimizer, shared": Case(lambda: made_of(optimizer=Annealed), stages=SHARED, after=set_anew),
    "set on one optimizer": Case(
        lambda: made_of(optimizer=Annealed), "optimizer.strength = 0.5", stages=TWO, after=set_on_one
    ),
    "read of the optimizer": Case(
        lambda: made_of(optimizer=Noting),
        "Noting.seen is what it has made of the parameters of this rank",
        after=reads_own,
    ),
    "noted by the optimizer, moved": Case(
        lambda: made_of(optimizer=Noting), "Noting keeps self.seen", stages=TWO, move=True
    ),
    "group taken out, moved": Case(lambda: made_of(optimizer=two_groups), move=True, after=takes_out),
    "held group, moved": Case(made_of, move=True, each_step=halve),
    "loss with parameters": Case(lambda: made_of(loss=Weighted()), "Workload.loss has parameters", SHARED),
    "world": Case(lambda: made_of(lambda: Net(second=Parallel()))),
    "world, remat": Case(lambda: made_of(lambda: Net(second=Parallel())), remat="always"),
    "world, shared": Case(lambda: made_of(lambda: Net(second=Parallel())), stages=SHARED),
    "world of a loss": Case(lambda: made_of(loss=parallel_loss)),
    "world of an optimizer": Case(lambda: made_of(optimizer=ParallelSGD)),
    "adaptive": Case(lambda: made_of(lambda: Net(second=Adaptive())), "changes what its modules keep"),
    "adaptive, one": Case(lambda: made_of(lambda: Net(second=Adaptive())), micro_batches=1),
    "adaptive, remat": Case(
        lambda: made_of(lambda: Net(second=Adaptive())),
        "changes what its modules keep",
        remat="always",
        micro_batches=1,
    ),
    "drawn by rank": Case(lambda: made_of(lambda: Net(second=Drawn())), "draws from other seeds on worker:1"),
    "order drawn by rank": Case(
        lambda: made_of(lambda: Net(second=Ordered(own_random().sample(range(WIDTH), WIDTH)))),
        "makes second.order of other numbers on worker:1",
    ),
    "mask drawn by rank": Case(
        lambda: made_of(lambda: Net(second=Masked(own_random()))), "makes second.mask of other numbers on worker:1"
    ),
    "fraction drawn by rank": Case(
        lambda: made_of(lambda: Net(second=Scaled(own_random().random()))), "makes second of other numbers on worker:1"
    ),
    "fractions drawn by rank": Case(
        lambda: made_of(lambda: Net(second=Scaled([np.float64(own_random().random())] * WIDTH))),
        "makes second.factor of other numbers on worker:1",
    ),
    "made in turn": Case(lambda: made_of(made_in_turn), "makes first.weight of other numbers on worker:1"),
    "texts in turn": Case(
        lambda: made_of(lambda: Net(second=Looked())),
        "has the texts or names of second.numbers in another order on worker:1",
    ),
    "operations in turn": Case(
        lambda: made_of(lambda: Net(second=Gone())), "of 'second' has its operations in another order on worker:1"
    ),
    "made before": Case(made_before, "makes first.bias of other numbers on worker:1"),
    "tables by address": Case(lambda: made_of(lambda: Net(second=Tabled()))),
    "seeded by rank": Case(
        lambda: made_after(os.environ["RANK"]), "draws from Python's generator, which has another state on worker:1"
    ),
    "seeded alike": Case(lambda: made_after(3)),
    "loss of a host": Case(
        lambda: made_of(loss=of_a_host("def made(o, t):\n    return nn.functional.mse_loss(o, t) * (1.0 + HOST)")),
        "made (of_a_host.py) has other code on worker:1 than on worker:0",
    ),
    "lambda of a host": Case(
        lambda: made_of(loss=of_a_host("made = lambda o, t: nn.functional.mse_loss(o, t) * (1.0 + HOST)")),
        "<lambda> (of_a_host.py) has other code on worker:1",
    ),
    "helper of a host": Case(
        lambda: made_of(loss=of_a_host(f"def inner(x):\n    return x * (1.0 + HOST)\n{CALLS_INNER}")),
        "inner (of_a_host.py) has other code on worker:1",
    ),
    "loss by name": Case(
        lambda: made_of(loss=(mse_loss, l1_loss)[int(os.environ["RANK"])]), "Workload.loss is another on worker:1"
    ),
    "module by name": Case(
        lambda: made_of(loss=nn.MSELoss(reduction=("mean", "sum")[int(os.environ["RANK"])])),
        "Workload.loss is another on worker:1",
    ),
    "partial of a host": Case(
        lambda: made_of(loss=functools.partial(mse_loss, reduction=("mean", "sum")[int(os.environ["RANK"])])),
        "Workload.loss is another on worker:1",
    ),
    "forward of a host": Case(
        lambda: made_of(lambda: Net(second=of_a_host(FORWARD_OF_A_HOST.format("0.5 + HOST")))),
        "Made (of_a_host.py) has other code on worker:1 than on worker:0",
    ),
    "comment of a host": Case(lambda: made_of(lambda: Net(second=of_a_host(FORWARD_OF_A_HOST.format("0.5  # HOST"))))),
    "default of a rank": Case(
        lambda: made_of(
            loss=of_a_host(f"import os\ndef inner(x, rank=os.environ['RANK']):\n    return x\n{CALLS_INNER}")
        )
    ),
    "function for a rank": Case(lambda: made_of(loss=of_a_host(f"{FOR_A_RANK}\n{CALLS_INNER}"))),
    "function without a file": Case(lambda: made_of(loss=eval("lambda o, t: (o - t).square().mean()", {}))),
    "weight of a host": Case(weighed_on_one, "Workload.weight is another on worker:1"),
    "unread head": Case(lambda: made_of(WithHeads, loss=first_head, optimizer=decayed), remat="always"),
    "unread head, memory": Case(lambda: made_of(WithHeads, loss=Counting(), optimizer=decayed), remat="always"),
    "clipped weights": Case(
        lambda: made_of(lambda: Net(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))),
        "has multiplied some gradients",
        by_hand=clip_weights,
    ),
    "groups": Case(lambda: made_of(optimizer=two_groups), "clip_grad_norm_ over", by_hand=clip),
}


def plain(case: Case) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Losses and states of plain torch over the same micro-batches."""
    global RUNNING  # noqa: PLW0603 - what is tested
    RUNNING = SETTINGS["alpha"] = 1.0
    made = case.make()
    torch.manual_seed(made.seed)
    model = made.model()
    optimizer, record = made.make_optimizer(model.named_parameters()), []
    group = optimizer.param_groups[0]
    for n in range(STEPS):
        batch, total = made.make_batch(8, n), 0.0
        seeded(n)
        model.zero_grad()
        for (args, kwargs), targets, weight in pieces(made, batch, case.micro_batches):
            loss = made.compute_loss(model(*args, **kwargs), targets) * weight
            loss.backward()
            total += loss.item()
        optimizer.step()
        case.each_step(group)
        case.after(optimizer)
        record.append((total, {name: each.detach().clone() for name, each in model.state_dict().items()}))
    RUNNING = SETTINGS["alpha"] = 1.0
    SCALE.fill_(1.0)
    TRAINED.log.data.zero_()
    return record


def check(case: Case) -> None:
    """The plan's training is the plain one."""
    record, made = plain(case), case.make()
    plan = make_plan(made, case.stages, micro_batches=case.micro_batches)
    with Pipeline(made, plan, remat=case.remat, graph=graph_of(made), timeout_s=60.0) as pipeline:
        group = pipeline.optimizer.param_groups[0]
        for n, (expected, states) in enumerate(record):
            if case.move and n == 3:
                pipeline.move(make_plan(made, OTHER, micro_batches=case.micro_batches))
            batch = made.make_batch(8, n)
            if case.before is not None:
                case.before(pipeline, batch)
            seeded(n)
            with case.context():
                loss = pipeline.step(batch, update=case.by_hand is None)
            if case.by_hand is not None:
                case.by_hand(pipeline.optimizer)
                pipeline.optimizer.step()
                pipeline.optimizer.zero_grad()
            case.each_step(group)
            case.after(pipeline.optimizer)
            assert distance(float(loss), expected) < EXACT, (n, float(loss), expected)
            for name, each in pipeline.state_dict().items():
                if name.endswith("mean"):  # of an evaluation, which plain training has none of
                    continue
                assert distance(each, states[name]) < EXACT, (n, name)


def main(name: str) -> None:
    """One case; where it is to be refused, every rank says why."""
    case = CASES[name]
    try:
        check(case)
    except AssignerError as error:
        if not case.said or not re.search(re.escape(case.said), str(error)):
            raise
    else:
        assert not case.said, "it was not refused"


if __name__ == "__main__":
    main(sys.argv[1])
