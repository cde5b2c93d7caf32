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


def is_profiled() -> bool:
    """Whether somebody profiles now."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def range_of(action: Action, stages: Sequence[Stage]) -> contextlib.AbstractContextManager[object]:
    """A range around an action of a plan with these stages; without a profiler nothing."""
    return torch.profiler.record_function(range_name(action, stages)) if is_profiled() else _NOTHING


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
