"""Which forwards run again before their backward: as the plan says, all, none, or all but the last micro-batch's.

    except_last, M = 3    F0 and F1 keep nothing, F2 keeps its graph; before B0 and B1 the forward runs again

The last micro-batch's backward comes right behind its forward on the last stage, and first of all under GPipe: to run
its forward again would save memory for no time at all. Source: Kim et al., torchgpipe, 2020 (arXiv 2004.09910),
section 2.2, `checkpoint="except_last"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from assigner.errors import UsageError
from assigner.formats.terms import RunRemat

if TYPE_CHECKING:
    from assigner.formats.plan import Plan


class Rematerialisation:
    """What a run rematerialises: as its plan says, or by a choice of its own.

    It takes the memory that the plan's prediction says, or more, so that what is too large will not fit, but where
    everything is rematerialised; or all but the last micro-batch, mostly: nobody has predicted that run.

    Raises:
        UsageError: `choice` is none of these.
    """

    def __init__(self, choice: RunRemat, plan: Plan) -> None:
        if choice not in get_args(RunRemat):
            raise UsageError(f"remat={choice!r} is not allowed", hint=f"one of {', '.join(get_args(RunRemat))}")
        planned = frozenset(name for stage in plan.stages for name in stage.rematerialise)
        everything = frozenset(plan.partitions)
        self.partitions = {"plan": planned, "never": frozenset[str]()}.get(choice, everything)
        self.keeps_last = choice == "except_last"  # the step's last micro-batch keeps its graph everywhere
        self.takes_planned_memory = choice in ("plan", "never") or (self.keeps_last and planned == everything)
