"""This process in a run: its process group, its device, its compute threads, and what it computes once beforehand."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from assigner.errors import UsageError
from assigner.formats.document import encode
from assigner.launch.launcherwatch import end_with_launcher
from assigner.location import Location
from assigner.machine.launchedrank import launched
from assigner.runtime.messages.nccl import check_workers, use_many_queues
from assigner.runtime.messages.rendezvous import all_gather, check_backend, join_group
from assigner.runtime.messages.sending import checked

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.terms import Backend

_VECTOR_MATHS = (
    torch.acos, torch.asin, torch.atan, torch.ceil, torch.cos, torch.cosh, torch.erf, torch.erfc, torch.erfinv,
    torch.exp, torch.expm1, torch.floor, torch.lgamma, torch.log, torch.log10, torch.log1p, torch.log2, torch.round,
    torch.rsqrt, torch.sin, torch.sinh, torch.sqrt, torch.tan, torch.tanh, torch.trunc,
)  # fmt: skip


_LONGEST_S = 1e9
"""Libraries count nanoseconds from a machine's start in 63 bits, and a wait that goes beyond would end at once."""


def join_run(plan: Plan, timeout_s: float, backend: Backend | None = None) -> bool:
    """Be part of the run's process group; True: this call made it.

    A plan on one worker without a launcher runs in this process alone.

    Raises:
        UsageError: a time-out that is none, no launcher for a plan that needs one, one that says too little, or a
            backend that is not there.
        WorkerError: some ranks did not come.
    """
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s <= _LONGEST_S):
        raise UsageError(
            f"timeout_s={timeout_s!r}: expected seconds, more than 0 and at most {_LONGEST_S:g}",
            hint="600 by default; a rank that may be late longer than that, as with its data, asks for more",
        )
    check_backend(backend)
    check_workers(plan, backend)
    end_with_launcher(joins=True)  # also where the user's code has made the process group
    if dist.is_initialized():
        return False
    place = launched()
    if place is None and plan.world_size == 1:
        return False
    if place is None:
        raise UsageError(
            f"the plan needs {plan.world_size} ranks, and this process was started alone",
            hint="assigner run PLAN -- SCRIPT starts them on this host; torchrun, mpirun or srun on several",
        )
    join_group(place, timeout_s)
    return True


def executed(plan: Plan) -> dict[str, str]:
    """What a run goes by, of a plan: all of it in which ranks must not differ, by its name for people.

    What is long is a hash; predictions, and how the plan was found, are left out.
    """
    rows = f"{plan.workload.batch_size} rows as {plan.micro_batches} of {plan.micro_batch_size} at most"
    found = {"schedule": plan.schedule, "micro-batches": rows}
    named = {"model": plan.workload.fingerprint, "stages": encode(plan.stages), "orders": encode(plan.orders)}
    for name, part in named.items():
        found[name] = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=6).hexdigest()
    return found


def compare_plans(plan: Plan) -> None:
    """Every rank calls this: those with unlike plans would wait for messages that the others never send.

    Raises:
        UsageError: the plans are unlike, or need more ranks than the run has; on every rank.
        LostConnectionError: a rank is gone.
    """
    told = checked("another worker", lambda: all_gather(dict[str, str], executed(plan)))
    for rank, other in enumerate(told):
        unlike = [name for name, each in told[0].items() if other.get(name) != each]
        if unlike:
            what = ", ".join(f"{name} ({told[0][name]} and {other.get(name)})" for name in unlike)
            raise UsageError(
                f"worker:0 and worker:{rank} were given unlike plans: they differ in {what}",
                hint="give every rank the same plan; where each reads a file of its own host, copy it there; where each"
                " makes it of its own graph, that may go by the order of a set: PYTHONHASHSEED=0 on all of them",
            )
    check_world(plan)


def check_world(plan: Plan) -> None:
    """Refuse a plan that needs more ranks than the run has."""
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


def float32_precision() -> str:
    """What float32 is computed in, as this process is set: in TF32 a GPU is several times as fast; `ieee` is float32.

    By torch.set_float32_matmul_precision and torch.backends.
    """
    backends: Any = torch.backends  # torch's stubs lack some of these
    parts = {
        "cuda matmul": backends.cuda.matmul, "cudnn conv": backends.cudnn.conv, "cudnn rnn": backends.cudnn.rnn,
        "cpu matmul": backends.mkldnn.matmul,
    }  # fmt: skip
    found = {name: str(part.fp32_precision).replace("none", "ieee") for name, part in parts.items()}
    return ", ".join(f"{name} {precision}" for name, precision in found.items())


def start_computing(device: torch.device) -> None:
    """A forward and a backward of one number, so that what any training loads is not counted as a model's.

    Kernels, autograd's threads, and on a GPU cuBLAS's workspaces, which the allocator counts. A kernel comes before the
    product in the backward: cuBLAS warns where a thread has not done anything on its GPU before.
    """
    with torch.enable_grad():
        number = torch.ones(1, 1, device=device, requires_grad=True)
        torch.mm(number, number).sin().sum().backward()  # type: ignore[no-untyped-call]


@functools.cache
def settle_vector_maths() -> None:
    """Call each function of vector maths once with one element, in single and in double precision.

    Intel's MKL settles which code a function like the square root runs by when the function is first called. Where two
    threads of one operation make that call at once, one of them may compute its part with a relative error near 3e-4
    (https://github.com/pytorch/pytorch/issues/188792, with oneMKL 2024.2, which torch's own packages have). An
    optimizer's first step is such a call. One element is never cut into parts, so that one thread makes its call.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in _VECTOR_MATHS:
            function(one)
