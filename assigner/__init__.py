"""assigner: profile, place and train a PyTorch model across workers that are not alike.

The names below are loaded when they are first used, so that reading plans needs no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assigner.cause import tell
    from assigner.errors import (
        AssignerError,
        FormatError,
        InfeasibleError,
        LimitError,
        MarkingError,
        MeasurementError,
        UsageError,
        WorkerError,
    )
    from assigner.launched import launched_rank
    from assigner.marking import partition
    from assigner.plan import Plan, load_plan, save_plan
    from assigner.profile import Profile, load_profile, save_profile
    from assigner.runtime.checkpoint import load_weights
    from assigner.runtime.pipeline import Pipeline
    from assigner.simulate import predict
    from assigner.solver import SolveOptions, solve, solve_baseline
    from assigner.trace import Trace, load_trace
    from assigner.workload import Workload, load_workload

__version__ = "0.1.0"

_HOMES = {
    "assigner.cause": ("tell",),
    "assigner.errors": (
        "AssignerError", "FormatError", "InfeasibleError", "LimitError", "MarkingError", "MeasurementError",
        "UsageError", "WorkerError",
    ),
    "assigner.launched": ("launched_rank",),
    "assigner.marking": ("partition",),
    "assigner.plan": ("Plan", "load_plan", "save_plan"),
    "assigner.profile": ("Profile", "load_profile", "save_profile"),
    "assigner.runtime.checkpoint": ("load_weights",),
    "assigner.runtime.pipeline": ("Pipeline",),
    "assigner.simulate": ("predict",),
    "assigner.solver": ("SolveOptions", "solve", "solve_baseline"),
    "assigner.trace": ("Trace", "load_trace"),
    "assigner.workload": ("Workload", "load_workload"),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - as grouped above
    "AssignerError", "FormatError", "InfeasibleError", "LimitError", "MarkingError", "MeasurementError", "UsageError",
    "WorkerError", "partition", "Plan", "load_plan", "save_plan", "Profile", "load_profile", "save_profile", "Pipeline",
    "predict", "SolveOptions", "solve", "solve_baseline", "Trace", "load_trace", "Workload", "load_workload",
    "load_weights", "launched_rank", "tell",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'assigner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if "ASSIGNER_CAUSES" in os.environ:  # a rank of `assigner run` or `assigner profile`
    from assigner.cause import hand_over_uncaught
    from assigner.orphaned import end_with_launcher

    hand_over_uncaught()
    end_with_launcher(joins=False)
