"""Minimise the largest load: an exact search for lines of devices, and for free placements.

    problem ─ items (merged nodes) ─┬─ downsets ─ pairs ─ lattice ──────────┬─ search ─ answer
                                    └─ model (ILP: staircase, free), anneal ┘

`solve_load` returns a placement with a proven bound; `evaluate` prices and checks any placement on its own.
"""

from __future__ import annotations

from load.evaluate import Evaluation, evaluate
from load.problem import (
    DeviceClass,
    LoadAnswer,
    LoadProblem,
    Node,
    Option,
    Output,
    Stage,
    Transfer,
)
from load.search import LoadOptions, solve_load

__all__ = [
    "DeviceClass",
    "Evaluation",
    "LoadAnswer",
    "LoadOptions",
    "LoadProblem",
    "Node",
    "Option",
    "Output",
    "Stage",
    "Transfer",
    "evaluate",
    "solve_load",
]
