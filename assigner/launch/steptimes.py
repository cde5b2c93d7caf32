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
        others: How many steps were none: they left the update to the script, or had other micro-batches.
    """

    plan: Plan
    remat: RunRemat
    seconds: tuple[float, ...]
    others: int = 0


class StepClock:
    """Takes the times of one rank's steps under one plan.

    Args:
        plan: What runs.
        remat: What the run does with its rematerialisation.
    """

    def __init__(self, plan: Plan, remat: RunRemat) -> None:
        self._plan, self._remat = plan, remat
        self._began, self._is_first = 0.0, True
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._others = 0

    def begin_step(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def end_step(self, *, whole: bool) -> None:
        """It has ended; `whole`: it was one whole program of the plan, with its update."""
        if whole and not self._is_first:
            self._seconds.append(time.perf_counter() - self._began)
        self._others += not whole
        self._is_first = False

    def hand_over(self) -> None:
        """Give the times to the launcher that started this process, if there are any and it is one that listens."""
        if self._seconds or self._others:
            hand_record(_FILE, StepTimes(self._plan, self._remat, tuple(self._seconds), self._others))


def handed_over(folder: Path) -> StepTimes | None:
    """What rank 0 has handed over, its last pipeline counts; None: no step was made under a plan.

    Raises:
        FormatError: it is not what `StepClock` writes.
    """
    path = folder / _FILE
    return handed_record(StepTimes, path) if path.is_file() else None
