"""Is there memory for what a plan puts on the workers? Asked before any of it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner import formatting as fmt
from assigner.errors import InfeasibleError
from assigner.runtime.memory import free_bytes
from assigner.runtime.sending import LostConnectionError

if TYPE_CHECKING:
    from assigner.formats.plan import Plan

_OFF = "check_memory=False tries it all the same"


def check_memory(plan: Plan, worker: str | None, device: torch.device, *, given_back: int = 0) -> None:
    """Refuse a plan whose predicted peak is more than a worker has. Every rank of the run calls this, and all raise.

    Args:
        plan: What is to run; one without a prediction passes.
        worker: This rank's; None: it holds no stage.
        device: Its device.
        given_back: Bytes that this process holds now and will not hold then.

    Raises:
        InfeasibleError: the prediction is above the capacity that the plan was made for, or above what is free now.
    """
    predicted = {each.worker: each for each in plan.predicted.workers} if plan.predicted else {}
    for each in predicted.values():
        if each.peak_bytes > each.capacity_bytes:
            raise InfeasibleError(
                f"{each.worker}: the plan needs {fmt.size(each.peak_bytes)} at its peak, and the worker has"
                f" {fmt.size(each.capacity_bytes)} for it",
                hint=f"assigner solve finds a plan that fits; {_OFF}",
            )
    mine = predicted.get(worker or "")
    here = torch.tensor(
        [mine.peak_bytes if mine else 0.0, free_bytes(device) + given_back], dtype=torch.float64, device="cpu"
    )
    for rank, (peak, free) in enumerate(pair.tolist() for pair in _of_all_ranks(here)):
        if peak > free:
            raise InfeasibleError(
                f"worker:{rank}: the plan needs {fmt.size(peak)} at its peak, and {fmt.size(free)} are free there now",
                hint=f"free memory there, or profile and solve again; {_OFF}",
            )


def _of_all_ranks(mine: torch.Tensor) -> list[torch.Tensor]:
    """What every rank has to say, on every rank.

    Raises:
        LostConnectionError: one of them has left.
    """
    if not dist.is_initialized():
        return [mine]
    theirs = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(theirs, mine)
    except RuntimeError as error:  # torch has no type of its own for a connection that broke
        raise LostConnectionError("another worker", error) from error
    return theirs
