"""This process in a run: its process group, its device and its compute threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.errors import UsageError
from assigner.launch.launcherwatch import end_with_launcher
from assigner.location import Location
from assigner.machine.launchedrank import launched
from assigner.runtime.nccl import check_workers, use_many_queues
from assigner.runtime.rendezvous import check_backend, join_group, leave_group

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.runtime.rendezvous import Backend


def join_run(plan: Plan, timeout_s: float, backend: Backend | None = None) -> bool:
    """Be part of the run's process group; True: this call made it.

    A plan on one worker without a launcher runs in this process alone.

    Args:
        plan: What is to run.
        timeout_s: A wait for another rank that takes longer fails.
        backend: See `Pipeline`.

    Raises:
        UsageError: fewer ranks than the plan needs, a launcher that says too little, or a backend that is not there.
        WorkerError: some ranks did not come.
    """
    check_backend(backend)
    check_workers(plan, backend)
    end_with_launcher(joins=True)  # also where the user's code has made the process group
    made = False
    if not dist.is_initialized():
        place = launched()
        if place is None and plan.world_size == 1:
            return False
        if place is None:
            raise UsageError(
                f"the plan needs {plan.world_size} ranks, and this process was started alone",
                hint="assigner run PLAN -- SCRIPT starts them on this host; torchrun, mpirun or srun on several",
            )
        join_group(place, timeout_s, backend)
        made = True
    try:
        check_world(plan)
    except UsageError:
        if made:
            leave_group()
        raise
    return made


def check_world(plan: Plan) -> None:
    """Refuse a plan that needs more ranks than the run has.

    Raises:
        UsageError: it does.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks < plan.world_size:
        raise UsageError(
            f"the plan needs {plan.world_size} ranks, and the run has {ranks}",
            hint=f"start {plan.world_size} (torchrun --nproc-per-node, times --nnodes; mpirun -n; srun -n)",
        )


def set_threads(plan: Plan, worker: str | None) -> None:
    """Compute with as many threads as the worker was measured with.

    More threads than a CPU quota allows stop each other: a plan's prediction holds for its own number alone.
    """
    for stage in plan.stages:
        threads = stage.threads_of(worker) if worker is not None and worker in stage.workers else None
        if threads is not None:
            torch.set_num_threads(threads)


def worker_device(worker: str | None) -> torch.device:
    """The device of a worker, chosen as this process's own; the CPU for a rank without a stage.

    Raises:
        UsageError: this process has no such device.
    """
    device = torch.device(Location.parse(worker).device if worker else "cpu")
    if device.type == "cuda":
        use_many_queues()
        if (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"the plan places {worker}, and this process sees {torch.cuda.device_count()} CUDA devices",
                hint="run it on the hosts that were profiled, or profile these",
            )
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise UsageError(f"{worker}: device {device.type!r} is not supported", hint="workers are cpu or cuda:N")
    return device


def start_computing(device: torch.device) -> None:
    """A forward and a backward of one number, so that what any training loads is not counted as a model's.

    Kernels, autograd's threads, and on a GPU cuBLAS's workspaces, which the allocator counts.
    """
    with torch.enable_grad():
        number = torch.ones(1, 1, device=device, requires_grad=True)
        torch.mm(number, number).sum().backward()  # type: ignore[no-untyped-call]
