"""What comes out of a search, as small frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from assigner.plan import Plan

@dataclass(frozen=True)
class Progress:
    """Where a search stands.

    Args:
        elapsed_s: Seconds since its start.
        schedule: The schedule at work.
        micro_batches: The micro-batch count at work.
        incumbent_s: Value of the best plan so far; None: there is none.
        bound_s: No plan can be better than this, as far as is proven.
        done: Settings (schedule, micro-batch count) that are decided.
        total: Settings in all.
    """

    elapsed_s: float
    schedule: str
    micro_batches: int
    incumbent_s: float | None
    bound_s: float
    done: int
    total: int


@dataclass(frozen=True)
class Candidate:
    """One setting that was looked at.

    Args:
        schedule: Its schedule.
        micro_batches: Its number of micro-batches.
        micro_batch_size: Samples in each.
        step_s: The best step time found with it; None: no plan was found.
        bound_s: No plan with this count is faster; inf: there is none.
        status: "chosen", "proven worse", "infeasible: why", "not decided".
    """

    schedule: str
    micro_batches: int
    micro_batch_size: int
    step_s: float | None
    bound_s: float
    status: str


@dataclass(frozen=True)
class Solution:
    """A plan, with what else was looked at.

    Args:
        plan: The best plan, priced, with its solver report and its baselines.
        candidates: The micro-batch counts, smallest first.
        limiting: One sentence: which worker, link or memory limits the plan.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    limiting: str
