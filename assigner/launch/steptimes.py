"""How long the steps of a run took: rank 0 hands it to the launcher, which says it beside the prediction.

No trace is needed for that, and nothing of the script: the pipeline reads the clock around each of its steps.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assigner.formats.plan import Plan
from assigner.formats.terms import RunRemat
from assigner.launch.failurereport import hand_record, handed_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FILE = "step-times"
_KEPT = 1000
"""Steps whose times are kept, the last ones."""


@dataclass(frozen=True)
class StepTimes:
    """The steps of a run under one plan, as rank 0 saw them.

    Args:
        plan: What ran.
        remat: What the run did with the plan's rematerialisation.
        seconds: Of each step that was one whole program of the plan, without the first one, which sets up connections
            and memory.
        others: How many steps were none, as they had other micro-batches, but for those of `gathered`.
        gathered: How many steps left the update to the script.
        updated: An update by the pipeline's optimizer followed on one of these.
        changed: The weights of rank 0 are others than they were before the first of these; None: it has none.
    """

    plan: Plan
    remat: RunRemat
    seconds: tuple[float, ...]
    others: int = 0
    gathered: int = 0
    updated: bool = False
    changed: bool | None = None


class StepClock:
    """Takes the times of one rank's steps under one plan."""

    def __init__(self, plan: Plan, remat: RunRemat) -> None:
        self._plan, self._remat = plan, remat
        self._began, self._is_first = 0.0, True
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._others = self._gathered = 0
        self._updated = False
        self._weights: float | None = None

    def begin_step(self, weights: Callable[[], float | None] | None = None) -> None:
        """A step begins.

        Args:
            weights: A figure of this rank's weights, where the step leaves their update to the script.
        """
        if weights is not None and not self._gathered:
            self._weights = weights()
        self._began = time.perf_counter()

    def end_step(self, *, whole: bool, gathers: bool = False) -> None:
        """It has ended; `whole`: it was one whole program of the plan, with its update; `gathers`: it left that."""
        if whole and not self._is_first:
            self._seconds.append(time.perf_counter() - self._began)
        self._others += not whole and not gathers
        self._gathered += gathers
        self._is_first = False

    def note_update(self) -> None:
        """The pipeline's optimizer has applied gradients."""
        self._updated = True

    def hand_over(self, weights: Callable[[], float | None] = lambda: None) -> None:
        """Give the times to the launcher that started this process, if there are any and it is one that listens."""
        if not (self._seconds or self._others or self._gathered):
            return
        asks = bool(self._gathered) and not self._updated and self._weights is not None
        record = StepTimes(
            self._plan, self._remat, tuple(self._seconds), self._others, self._gathered, self._updated,
            changed=weights() != self._weights if asks else None,
        )  # fmt: skip
        hand_record(_FILE, record)


def handed_over(folder: Path) -> StepTimes | None:
    """What rank 0 has handed over, its last pipeline counts; None: no step was made under a plan.

    Raises:
        FormatError: it is not what `StepClock` writes.
    """
    path = folder / _FILE
    return handed_record(StepTimes, path) if path.is_file() else None
