"""Is there memory for what a plan puts on the workers? Asked before any of it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assigner import formatting as fmt
from assigner.errors import InfeasibleError
from assigner.runtime.recording.memory import free_bytes

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.runtime.ranks.membership import Membership

_OFF = "check_memory=False tries it all the same"


def check_memory(plan: Plan, member: Membership, *, given_back: int = 0) -> None:
    """Refuse a plan whose predicted peak is more than a worker has. Every rank of the run calls this, and all raise.

    Args:
        plan: What is to run; one without a prediction passes.
        member: This process in the run.
        given_back: Bytes that this process holds now and will not hold then.

    Raises:
        InfeasibleError: the prediction is above the capacity that the plan was made for, or above what is free now.
        LostConnectionError: another rank has left.
    """
    predicted = {each.worker: each for each in plan.predicted.workers} if plan.predicted else {}
    for each in predicted.values():
        if each.peak_bytes > each.capacity_bytes:
            raise InfeasibleError(
                f"{each.worker}: the plan needs {fmt.size(each.peak_bytes)} at its peak, and the worker has"
                f" {fmt.size(each.capacity_bytes)} for it",
                hint=f"assigner solve finds a plan that fits; {_OFF}",
            )
    mine = predicted.get(member.worker or "")
    here = (mine.peak_bytes if mine else 0.0, free_bytes(member.device) + given_back)
    for rank, (peak, free) in member.numbers_of(dict.fromkeys(member.ranks, here)).items():
        if peak > free:
            raise InfeasibleError(
                f"worker:{rank}: the plan needs {fmt.size(peak)} at its peak, and {fmt.size(free)} are free there now",
                hint=f"free memory there, or profile and solve again; {_OFF}",
            )
