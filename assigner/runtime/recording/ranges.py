"""Ranges for `torch.profiler`: each action of a worker's program under a name of its own, while a profiler is active.

`assigner: receive activation blocks.0[0] micro-batch 1`, `assigner: forward 1 micro-batch 1 (blocks.1, head)`, ...
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assigner.formats.stage import Stage
    from assigner.schedule.program import Action

_NOTHING = contextlib.nullcontext()


class Ranges:
    """The ranges of one step of one worker; asks once whether somebody profiles.

    Args:
        stages: Of the plan.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.active: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]

    def of(self, action: Action) -> contextlib.AbstractContextManager[object]:
        """A range around an action; without a profiler nothing."""
        if not self.active:
            return _NOTHING
        return torch.profiler.record_function(range_name(action, self.stages))


def range_name(action: Action, stages: Sequence[Stage]) -> str:
    """`assigner: ` and what an action does."""
    words = ["assigner:", action.kind.value]
    if action.route is not None:
        words += [action.route.payload.value, f"{action.route.partition}[{action.route.output}]"]
    elif action.stage >= 0:
        words.append(str(action.stage))
    if action.micro_batch >= 0:
        words.append(f"micro-batch {action.micro_batch}")
    if action.route is None and action.stage >= 0:
        words.append(f"({', '.join(stages[action.stage].partitions)})")
    return " ".join(words)
