"""How a plan was found: what is proven of it, and what else the search looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from assigner.errors import FormatError
from assigner.formats.document import Count, Name, Share
from assigner.formats.prediction import StepTime
from assigner.formats.stage import MicroBatches
from assigner.formats.terms import Schedule

UNDIVIDED = "updates undivided"
"""In `scope`: of plans in which workers share a stage it has those alone in which each of them updates all of it."""


@dataclass(frozen=True)
class SolverReport:
    """How a plan was found and how good it is proven to be.

    Args:
        name: `HiGHS` or `CBC` where one of them had a part in it; `assigner`, or the baseline's name, where none had.
        version: Of that program.
        status: `optimal` (to the gap asked for, of the plans searched), `feasible` (a limit came first, or nothing was
            left to look at).
        objective_s: The plan's value of the objective: seconds of a step, of a batch in the steady state
            (`throughput`), of one forward of one micro-batch (`latency`); money per sample (`cost`).
        bound_s: No plan of those searched can be better; `scope` says which.
        single_bound_s: No plan of those searched can be better whose stages have one worker each, where that is told
            apart from plans in which workers share stages; None: it is not.
        gap: (objective - bound) / objective.
        seconds: Wall time of the search.
        options: The settings in effect.
        found_by: What has found the plan: `dynamic program`, `local search`, `integer program`; empty: it is not told.
        proven_by: What has proven the bound, of all settings (schedule, micro-batches) that were decided.
        scope: Which plans the bound is about; empty: it is not told.
        interrupted: The user ended the search.
        any_order_s: No plan with one of the numbers of micro-batches that were looked at takes less, whatever its
            stages, workers and orders; None: it is not told.
        any_order_found_s: The shortest step that was found with several stages a worker, where that is less than the
            plan's by too little to take one for it; None: there is none.
    """

    name: Name
    version: Name
    status: Literal["optimal", "feasible"]
    objective_s: float
    bound_s: float
    gap: Share
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)
    found_by: str = ""
    proven_by: tuple[str, ...] = ()
    scope: str = ""
    interrupted: bool = False
    single_bound_s: float | None = None
    any_order_s: float | None = None
    any_order_found_s: float | None = None


@dataclass(frozen=True)
class Baseline:
    """A simpler way to place the same profile, priced by the same simulator.

    Args:
        name: Of the way.
        step_s: Its step, in seconds; None: it does not fit.
    """

    name: Name
    step_s: StepTime | None


@dataclass(frozen=True)
class Candidate:
    """A schedule and micro-batch count that the search looked at.

    Values are seconds that compare between counts: of a step, of a batch in the steady state (objective "throughput"),
    of one forward ("latency").

    Args:
        schedule: The order of the actions.
        micro_batches: In a step.
        micro_batch_size: In samples.
        objective_s: Of the best plan found under it; None: none was found.
        bound_s: No plan under it is better than this, updates undivided; None: nothing fits.
        status: `chosen`, or why it was not: `proven worse`, `proven no better`, `gains ... at most`, `needs more
            memory` (and is faster by less than the gap asked for), `infeasible: ...`, `not decided`.
    """

    schedule: Schedule
    micro_batches: MicroBatches
    micro_batch_size: Count
    objective_s: float | None
    bound_s: float | None
    status: str


@dataclass(frozen=True)
class WhatIf:
    """What one change of the cluster or of the split would bring, priced by the solver.

    Args:
        change: What is changed: the micro-batch count, one more worker of a kind, or a link twice as wide.
        what: The change in words, with the worker's kind, the link's ends or the count.
        step_s: The best step found after it; the plan's own where it is faster by no more than what the plan's search
            left open. None: no plan was found.
        bound_s: No plan is faster after it, updates undivided; None: nothing fits.
    """

    change: Literal["micro_batches", "worker", "link"]
    what: Name
    step_s: StepTime | None
    bound_s: float | None


def check_bound(value: float | None, bound: float | None, where: str) -> None:
    """Raise FormatError if a value is below what is proven of all, by more than rounding."""
    if value is not None and bound is not None and bound > value * (1 + 1e-6):
        raise FormatError(f"{where}: {bound:g} is not allowed; no plan is better than its bound, and this is {value:g}")
