"""This process in a run: its process group, its device and its compute threads."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.errors import UsageError
from assigner.location import Location

if TYPE_CHECKING:
    from assigner.plan import Plan


_groups = itertools.count()  # the n-th group of every rank is the same one


def join_run(plan: Plan, timeout_s: float) -> bool:
    """Be part of the run's process group; True: this call made it.

    A plan on one worker without a launcher runs in this process alone.
    """
    made = False
    if not dist.is_initialized():
        if "RANK" not in os.environ and plan.world_size == 1:
            return False
        if "RANK" not in os.environ:
            raise UsageError(
                f"the plan needs {plan.world_size} ranks, and this process was started alone",
                hint="assigner run PLAN -- SCRIPT starts them on this host; torchrun on several",
            )
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        # The launcher's store outlives a group: a second one of this process would read the first one's addresses.
        own = dist.PrefixStore(f"assigner/group {next(_groups)}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
        made = True
    ranks = dist.get_world_size()
    if ranks < plan.world_size:
        if made:
            dist.destroy_process_group()
        raise UsageError(
            f"the plan needs {plan.world_size} ranks, and the run has {ranks}",
            hint=f"start {plan.world_size} (torchrun --nproc-per-node, times --nnodes)",
        )
    return made


def set_threads(plan: Plan, worker: str | None) -> None:
    """Compute with as many threads as the worker was measured with.

    More threads than a CPU quota allows stop each other: a plan's prediction holds for its own number alone.
    """
    for stage in plan.stages:
        if stage.worker == worker and stage.threads is not None:
            torch.set_num_threads(stage.threads)


def worker_device(worker: str | None) -> torch.device:
    """The device of a worker, chosen as this process's own; the CPU for a rank without a stage.

    Raises:
        UsageError: this process has no such device.
    """
    device = torch.device(Location.parse(worker).device if worker else "cpu")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"the plan places {worker}, and this process sees {torch.cuda.device_count()} CUDA devices",
                hint="run it on the hosts that were profiled, or profile these",
            )
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise UsageError(f"{worker}: device {device.type!r} is not supported", hint="workers are cpu or cuda:N")
    return device
