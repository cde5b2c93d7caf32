"""What several workers cannot share, each refused where `replicas.py CASE` runs it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from placements import by_one, divided, everywhere, names_of
from recurrent_cases import words
from torch import nn
from training_models import lookups
from workloads import WIDTH, graph_of, language, make_plan, normalised, skips, workload

from assigner import Pipeline
from assigner.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from assigner.formats.plan import Plan
    from assigner.model.workload import Workload


class Counting(nn.Module):
    """It counts its calls, in a buffer or in a plain number."""

    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if in_buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        else:
            self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) + self.calls


class Running(nn.Module):
    """A normaliser of one's own, in the graph of the partition that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x - self.mean)


class Outer(nn.Module):
    """Code between two partitions moves a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        self.mean.mul_(0.9).add_(made.detach().mean(0), alpha=0.1)
        return self.last(made - self.mean)


class CountingLate(nn.Module):
    """It counts the micro-batches of large values, or its evaluations."""

    def __init__(self, *, evaluations: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.evaluations, self.found = evaluations, 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.evaluations and not self.training:
            self.seen += 1
        elif not self.evaluations and x.abs().max() > 10:
            self.found += 1
        return self.linear(x) + self.seen + self.found


def hooked() -> nn.Module:
    """A hook that counts its calls."""
    made, calls = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), [0]

    def hook(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output * calls[0]

    made[0].register_forward_hook(hook)
    return made


class Scaled(nn.Module):
    """It has a factor of its own in each process, and no tensor shows that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.factors = {"out": [1.0 / os.getpid()]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factors["out"][0]


def unseeded() -> nn.Module:
    """Weights that are other ones in each process."""
    made = nn.Linear(WIDTH, 1)
    made.weight.data.fill_(os.getpid() % 1000)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), made)


class Remembering:
    """A loss that counts its calls."""

    calls = 0

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.mse_loss(output, targets)


def counting() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """A metric that counts its calls."""
    calls = list[int]()

    def metric(_: torch.Tensor, __: torch.Tensor) -> float:
        calls.append(0)
        return float(len(calls))

    return metric


def refused(made: Workload, plan: Plan, *, begin: Callable[[Pipeline], object] | None = None, **settings: Any) -> str:
    """What is said where a plan is refused; of one that is refused in its first step, with the step.

    `begin` comes before that step.
    """
    try:
        pipeline = Pipeline(made, plan, graph=graph_of(made), **settings)
    except UsageError as error:
        return error.message
    try:
        with pipeline:
            if begin is not None:
                begin(pipeline)
            pipeline.step(made.make_batch(8, 0))
    except UsageError as error:
        return f"in the first step: {error.message}"
    return "not at all"


def large(pipeline: Pipeline) -> None:
    """A step that changes nothing, and then the first one that does."""
    inputs, targets = pipeline.workload.make_batch(8, 0)
    pipeline.step((inputs, targets))
    pipeline.step((100 * inputs, targets))


def drawn(pipeline: Pipeline) -> None:
    """Weights from a generator that goes its own way on each rank."""
    torch.manual_seed(pipeline.rank)
    for _, each in pipeline.named_parameters():
        nn.init.normal_(each)


def frozen(pipeline: Pipeline) -> None:
    pipeline.step(pipeline.workload.make_batch(8, 0))
    if pipeline.rank == 1:
        dict(pipeline.named_parameters())["parts.1.bias"].requires_grad_(False)


def spoiled(pipeline: Pipeline) -> None:
    pipeline.step(pipeline.workload.make_batch(8, 0))
    if pipeline.rank == 1:
        dict(pipeline.named_parameters())["parts.1.bias"].detach()[0] = torch.nan


def noisy(pipeline: Pipeline) -> None:
    """A step, and then noise on the weights, which each rank draws for itself."""
    pipeline.step(pipeline.workload.make_batch(8, 0))
    torch.manual_seed(pipeline.rank)
    with torch.no_grad():
        for _, each in pipeline.named_parameters():
            each.add_(torch.randn_like(each), alpha=1e-3)


def clipped(pipeline: Pipeline) -> None:
    """An update by gradients that one rank has clipped."""
    pipeline.step(pipeline.workload.make_batch(8, 0), update=False)
    if pipeline.rank == 0:
        nn.utils.clip_grad_value_([each for _, each in pipeline.named_parameters()], 1e-6)
    pipeline.optimizer.step()
    pipeline.optimizer.zero_grad()


def forgetful(pipeline: Pipeline) -> None:
    """The first worker's momentum begins anew."""
    for n in range(2):
        pipeline.step(pipeline.workload.make_batch(8, n))
    if pipeline.rank == 0:
        pipeline.optimizer.state.clear()
    pipeline.step(pipeline.workload.make_batch(8, 2))


def handed_out(pipeline: Pipeline) -> None:
    """Weights that one rank has drawn go to all of them, as a script may do it at any time."""
    noisy(pipeline)
    pipeline.load_state_dict(pipeline.workload.model().state_dict() if pipeline.rank == 1 else None)


class Together(torch.optim.SGD):
    """It clips by the norm of all its parameters' gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.1)
        return super().step(closure)


def refusals(cases: Collection[str]) -> dict[str, str]:
    """What several workers cannot share, by its name, and what is said of it."""
    made = skips()
    buffered = workload(lambda: nn.Sequential(Counting(in_buffer=True), nn.Linear(WIDTH, 1)))
    counted = workload(lambda: nn.Sequential(Counting(in_buffer=False), nn.Linear(WIDTH, 1)))
    running = workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Running()))
    outer = workload(Outer, "first", "last")
    apart = workload(unseeded)
    remembering = replace(made, loss=Remembering())
    metrics = replace(made, metrics={"calls": counting(), "nothing": lambda *_: 0.0})
    over = replace(made, loss_over="batch")
    searching = replace(made, optimizer=torch.optim.LBFGS)
    norms = workload(normalised)
    late, evaluated = (
        workload(lambda each=each: nn.Sequential(nn.Linear(WIDTH, WIDTH), CountingLate(evaluations=each)))
        for each in (False, True)
    )
    hooks, scaled = workload(hooked), workload(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled()))
    together = replace(made, optimizer=Together)
    tied = language()
    names = names_of(tied)
    looked_up = replace(lookups(), optimizer=torch.optim.SparseAdam)
    every = {
        "a counter in a buffer": lambda: refused(buffered, everywhere(buffered)),
        "a counter in Python": lambda: refused(counted, everywhere(counted)),
        "a normaliser": lambda: refused(running, everywhere(running)),
        "a mean between partitions": lambda: refused(outer, everywhere(outer)),
        "a loss that counts": lambda: refused(remembering, everywhere(made)),
        "a metric that counts": lambda: refused(metrics, everywhere(made)),
        "weights of their own": lambda: refused(apart, everywhere(apart)),
        "a loss over the batch": lambda: refused(over, everywhere(made)),
        "carried state": lambda: refused(words(), everywhere(words())),
        "LBFGS": lambda: refused(searching, everywhere(made)),
        "LBFGS, one updates for all": lambda: refused(searching, by_one(everywhere(made))),
        "frozen on one": lambda: refused(made, everywhere(made), begin=frozen),
        "no number on one": lambda: refused(made, everywhere(made), begin=spoiled),
        "a counter of large values": lambda: refused(late, everywhere(late), begin=large),
        "a counter of evaluations": lambda: refused(
            evaluated, everywhere(evaluated), begin=lambda pipeline: pipeline.evaluate(evaluated.make_batch(8, 0))
        ),
        "a hook that counts": lambda: refused(hooks, everywhere(hooks)),
        "attributes of their own": lambda: refused(scaled, everywhere(scaled)),
        "weights of the script": lambda: refused(made, everywhere(made), begin=drawn),
        "noise of the script": lambda: refused(made, everywhere(made), begin=noisy),
        "noise of the script, tied": lambda: refused(
            tied, make_plan(tied, [(0, names[:2]), ({1: 2, 2: 2}, names[2:])]), begin=noisy
        ),
        "clipped on one": lambda: refused(made, everywhere(made), begin=clipped),
        "clipped on one, divided": lambda: refused(made, divided(everywhere(made)), begin=clipped),
        "momentum that one worker forgets": lambda: refused(made, everywhere(made), begin=forgetful),
        "noise, and weights handed out": lambda: refused(made, everywhere(made), begin=handed_out),
        "SparseAdam": lambda: refused(looked_up, everywhere(looked_up)),
        "SparseAdam, divided": lambda: refused(looked_up, divided(everywhere(looked_up))),
        "a norm of all in the optimizer": lambda: refused(together, divided(everywhere(made))),
        "statistics of micro-batches": lambda: refused(norms, everywhere(norms), batch_norm="micro_batch"),
    }
    return {name: found() for name, found in every.items() if name in cases}
