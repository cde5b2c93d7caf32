"""What comes out of a search, as small frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.formats.screen import OnScreen

if TYPE_CHECKING:
    from assigner.formats.plan import Plan  # noqa: TC004 - never decoded; a flag's start-up needs no formats


@dataclass(frozen=True)
class Progress:
    """Where a search stands.

    Args:
        elapsed_s: Seconds since its start.
        schedule: The schedule at work.
        micro_batches: The micro-batch count at work.
        incumbent_s: Value of the best plan so far; None: there is none.
        bound_s: No plan can be better than this, as far as is proven.
        done: Candidates (schedule, micro-batch count) that are decided.
        total: Candidates in all.
        pricing: Where the plan is there already, what else is being solved for.
    """

    elapsed_s: float
    schedule: str
    micro_batches: int
    incumbent_s: float | None
    bound_s: float
    done: int
    total: int
    pricing: str = ""


@dataclass(frozen=True)
class FrontierPoint:
    """A plan that no other beats in both money and step time.

    Args:
        money: Per sample, in the unit of the workers' `cost_per_hour`.
        step_s: Seconds of a step.
        workers: Those that it uses.
        chosen: It is the plan.
    """

    money: float
    step_s: float
    workers: tuple[str, ...]
    chosen: bool


@dataclass(frozen=True)
class Solution(OnScreen):
    """A plan, with what else was looked at.

    Args:
        plan: The best plan, priced, with its solver report, its baselines, and what else was looked at.
        frontier: With objective "cost": money against step time, the cheapest first.
    """

    plan: Plan
    frontier: tuple[FrontierPoint, ...] = ()
