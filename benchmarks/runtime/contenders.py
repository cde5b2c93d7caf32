"""Who is compared: the same stages and batch, each under its own runtime, behind one call."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from raw import RawLoop
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import assigner

if TYPE_CHECKING:
    from collections.abc import Callable

    from chain import Chain

    from assigner.formats.plan import Plan
    from assigner.formats.terms import RunRemat, Schedule

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Contender(Protocol):
    """A training step under some runtime. Its first step may set things up."""

    def step(self, *, update: bool = True) -> float | None:
        """Forwards and backwards of the batch and, unless told otherwise, the optimizer's update; the loss if known."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients, by the parameters' names in the model."""


class Assigner:
    """This project's runtime.

    Args:
        chain: The model.
        plan: Its plan.
        remat: What to rematerialise.
    """

    def __init__(self, chain: Chain, plan: Plan, *, remat: RunRemat = "never") -> None:
        self.batch = chain.batch
        self.pipeline = assigner.Pipeline(
            chain.workload, plan, graph=chain.graph, remat=remat, check_memory=False, timeout_s=120
        )

    def step(self, *, update: bool = True) -> float:
        """One step."""
        if not update:
            self.pipeline.optimizer.zero_grad()
        return self.pipeline.step(self.batch, update=update)

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients."""
        return self.pipeline.gradients()


class TorchPipelining:
    """`torch.distributed.pipelining`: a stage built by hand, a schedule."""

    def __init__(self, chain: Chain, schedule: str) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.inputs, self.targets = chain.batch
        self.stages = chain.modules([rank])
        self.optimizer = chain.workload.optimizer(list(self.stages.parameters()))
        stage = PipelineStage(self.stages, rank, ranks, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](stage, chain.micro_batches, loss_fn=chain.workload.loss)
        self.first, self.last = rank == 0, rank == ranks - 1

    def step(self, *, update: bool = True) -> float | None:
        """One step; the loss, on the last rank."""
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *([self.inputs] if self.first else []),
            target=self.targets if self.last else None, losses=losses if self.last else None, return_outputs=False,
        )  # fmt: skip
        if update:
            self.optimizer.step()
        return float(torch.stack(losses).detach().mean()) if self.last else None

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients."""
        return self.stages.gradients()


class TorchGPipe:
    """torchgpipe: all stages in this one process, a thread each; other ranks do nothing.

    Args:
        chain: The model.
        checkpoint: Its word for rematerialisation: "always", "except_last" or "never".
    """

    def __init__(self, chain: Chain, *, checkpoint: str = "never") -> None:
        from torchgpipe import GPipe

        self.inputs, self.targets = chain.batch
        self.loss = chain.workload.loss
        self.stages = chain.modules(range(chain.ranks))
        self.optimizer = chain.workload.optimizer(list(self.stages.parameters()))
        balance = [len(names) for names in chain.names]
        self.model = GPipe(
            self.stages, balance, devices=["cpu"] * chain.ranks, chunks=chain.micro_batches, checkpoint=checkpoint
        )

    def step(self, *, update: bool = True) -> float:
        """One step."""
        self.optimizer.zero_grad()
        loss = self.loss(self.model(self.inputs), self.targets)
        loss.backward()
        if update:
            self.optimizer.step()
        return float(loss.detach())

    def gradients(self) -> dict[str, torch.Tensor]:
        """All gradients."""
        return self.stages.gradients()


class DataParallel:
    """`DistributedDataParallel` on all ranks, each with its rows of the batch."""

    def __init__(self, chain: Chain) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.inputs, self.targets = (each.chunk(ranks)[rank] for each in chain.batch)
        self.loss = chain.workload.loss
        torch.manual_seed(chain.workload.seed)
        self.model = DistributedDataParallel(chain.workload.model())
        self.optimizer = chain.workload.optimizer(list(self.model.parameters()))

    def step(self, *, update: bool = True) -> None:
        """One step; no rank has the batch's loss."""
        self.optimizer.zero_grad()
        self.loss(self.model(self.inputs), self.targets).backward()
        if update:
            self.optimizer.step()

    def gradients(self) -> dict[str, torch.Tensor]:
        """All gradients."""
        held = self.model.module.named_parameters()
        return {name: each.grad for name, each in held if each.grad is not None}


class Absent:
    """A rank that a contender leaves out."""

    def step(self, *, update: bool = True) -> None:
        """Nothing."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """None."""
        return {}


def _assigner(schedule: Schedule) -> Callable[[Chain], Contender]:
    return lambda chain: Assigner(chain, chain.plan(schedule))


def _in_one_process(chain: Chain) -> Contender:
    return Absent() if dist.get_rank() else TorchGPipe(chain)


PIPELINES: dict[str, Callable[[Chain], Contender]] = {
    "raw gpipe": lambda chain: RawLoop(chain, "gpipe"),
    "assigner gpipe": _assigner("gpipe"),
    "torch gpipe": lambda chain: TorchPipelining(chain, "gpipe"),
    "torchgpipe, one process": _in_one_process,
    "raw 1f1b": lambda chain: RawLoop(chain, "1f1b"),
    "assigner 1f1b": _assigner("1f1b"),
    "torch 1f1b": lambda chain: TorchPipelining(chain, "1f1b"),
}
DATA_PARALLEL: dict[str, Callable[[Chain], Contender]] = {
    "DistributedDataParallel": DataParallel,
    "assigner, shared stage": lambda chain: Assigner(chain, chain.shared_plan()),
}


def available(*, data_parallel: bool) -> dict[str, Callable[[Chain], Contender]]:
    """The contenders that are installed: those whose ranks have a stage each, or all of the model."""
    if data_parallel:
        return DATA_PARALLEL
    has_torchgpipe = importlib.util.find_spec("torchgpipe") is not None
    return {name: make for name, make in PIPELINES.items() if has_torchgpipe or "torchgpipe" not in name}


def reference(name: str) -> str:
    """What a contender is compared with: the hand-written loop of its schedule, or `DistributedDataParallel`."""
    if name in DATA_PARALLEL:
        return "DistributedDataParallel"
    return "raw 1f1b" if "1f1b" in name else "raw gpipe"
