"""The list of foreign cases in parts, each for a test file of its own: files are what runs beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from foreign.case import Case, all_cases
from foreign.daily import DAILY
from foreign.harness import Judge, Setting

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

PARTS = {
    "tensors": ("inplace", "unseen", "written", "aliases", "containers", "outputs", "blind_tensors"),
    "python": (
        "buffers", "python_state", "kept_tables", "evaluations", "randomness", "calls", "control_flow", "patches",
        "wrappers", "blind_python", "blind_habits",
    ),
    "training": ("backward", "hooks", "checkpoints", "optimizers", "loops", "training_habits"),
    "models": ("torchs_own", "sequences", "vision", "sciences", "decoders", "encoders", "towers", "blind_models"),
}  # fmt: skip


def usual_cases(part: str) -> list[ParameterSet]:
    """Those of a part, marked `sweep` where `make test` leaves them out."""
    return [
        pytest.param(
            each, id=f"{each.group}: {each.name}", marks=() if each.name in DAILY else pytest.mark.sweep
        )
        for each in all_cases()
        if each.usual and each.group in PARTS[part]
    ]  # fmt: skip


def check_on_one_worker(each: Case) -> None:
    """In training and in evaluation, with rows cut and all recomputed; habits of every day also without either.

    Evaluation takes a capture of its own. Where the model computes the same in it, it is that of habits of every day,
    which have each way once or twice, and of what backwards meet; whole models have nothing of their own there.
    """
    trains = each.group in PARTS["training"]
    daily = each.name in DAILY
    judge = Judge(each, spares=not trains and (not daily or each.group in PARTS["models"]))
    for setting in (Setting(1, 2, "all"), Setting(1, 1, "none"))[: 2 if daily and trains else 1]:
        verdict = judge.verdict(setting).settled()
        assert each.allows(verdict.kind, verdict.words), f"{setting}: {verdict.kind}: {verdict.words}"
