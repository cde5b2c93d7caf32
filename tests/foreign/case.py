"""A foreign model or training habit, and the list of all of them.

A module of this folder adds its cases with `@case(...)` over a model class or over a function that makes a workload;
`all_cases` imports them all. Everything is in float64 and tiny.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foreign.refusals import REFUSALS, SHOWS_THROUGH
from torch.nn import Parameter
from torch.optim import Optimizer
from workloads import workload

if TYPE_CHECKING:
    from assigner.model.workload import Workload  # noqa: TC004

MODULES = (
    "inplace", "unseen", "backward", "hooks", "checkpoints", "buffers", "written", "python_state", "kept_tables",
    "randomness", "aliases", "evaluations", "containers", "outputs", "calls", "control_flow", "optimizers", "loops",
    "torchs_own", "sequences", "vision", "patches", "wrappers", "training_habits", "sciences", "decoders", "encoders",
    "towers", "blind_tensors", "blind_models", "blind_python", "blind_habits",
)  # fmt: skip
"""Of this folder, in the order of the table."""

Loop = Callable[[int, dict[str, Parameter], Optimizer], None]
"""Given the number of the step, the parameters (those of this rank, in a pipeline) and the optimizer."""


@dataclass(frozen=True)
class Case:
    """One model or habit.

    Args:
        name: What it is, in a few words.
        group: The module that it stands in.
        make: The workload; called anew for each training, so that none sees another's Python objects.
        refusal: What a refusal says, a regular expression; empty: it must be equal.
        inherent: Several micro-batches give another result than the whole batch, as in any micro-batched training
            (batch statistics, state that moves with every forward): plain torch over the same micro-batches counts.
        random: Values cannot be compared, for it draws masks: losses must be finite.
        tolerance: Relative; larger than 1e-9 only where the model itself computes in float32.
        usual: False: left to `run.py`, for it takes seconds and is near to another case.
        loop: What the training loop does before each step, to plain torch's model as to the pipeline.
    """

    name: str
    group: str
    make: Callable[[], Workload]
    refusal: str = ""
    inherent: bool = False
    random: bool = False
    tolerance: float = 1e-9
    usual: bool = True
    loop: Loop | None = None

    def allows(self, kind: str, words: str, *, places: str = "") -> bool:
        """Whether a verdict is what should be; `places`: what else may be refused, for the plan's places."""
        if kind == "different" and self.name in SHOWS_THROUGH:
            return True
        found = "|".join(filter(None, (self.refusal, places)))
        if kind == "refused" and found:
            return re.search(found, words, re.IGNORECASE | re.DOTALL) is not None
        return kind == "equal"


def case(
    name: str,
    *marks: str,
    refusal: str = "",
    inherent: bool = False,
    random: bool = False,
    tolerance: float = 1e-9,
    usual: bool = True,
    loop: Loop | None = None,
    **words: Any,
) -> Callable[[Any], Any]:
    """Add a model class, or a function that gives a Workload, to the list.

    Args:
        name: What it is.
        marks: Name patterns of the partitions, for a class.
        refusal: See `Case`.
        inherent: See `Case`.
        random: See `Case`.
        tolerance: See `Case`.
        usual: See `Case`.
        loop: See `Case`.
        words: For a class: what `workloads.workload` takes.
    """

    def add(made: Any) -> Any:
        def build() -> Workload:
            return workload(made, *marks, **words) if inspect.isclass(made) else made()

        assert name not in all_cases.known, name
        group = made.__module__.rpartition(".")[2]
        words_of_refusal = refusal or REFUSALS.get(name, "")
        all_cases.known[name] = Case(name, group, build, words_of_refusal, inherent, random, tolerance, usual, loop)
        return made

    return add


def all_cases() -> list[Case]:
    """Every case, by module."""
    for module in MODULES:
        importlib.import_module(f"foreign.{module}")
    return list(all_cases.known.values())


all_cases.known = {}
"""By name. At a function, where nothing looks: what makes a model looks through all that its file can name."""
