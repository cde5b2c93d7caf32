"""The flags of `assigner solve` that ask again for what a plan was asked for."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PLAIN = {
    "objective": "--objective", "schedule": "--schedule", "micro_batches": "--micro-batches",
    "batch_size": "--batch-size", "remat": "--remat", "max_workers": "--max-workers", "max_step_s": "--max-step",
    "solver": "--solver", "gap": "--gap", "time_limit": "--time-limit", "seed": "--seed",
}  # fmt: skip
_AMOUNTS = {"pins": "--pin", "memory": "--memory", "reserve": "--reserve", "prices": "--price"}
_GROUPS = {"together": "--together", "apart": "--apart"}


def solve_flags(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags with their values, ready for a shell; nothing for what is at its default.

    Args:
        options: As a plan's solver report has them; what `solve` does not know is left out.
    """
    from assigner.solver import SolveOptions

    usual = SolveOptions().record()
    changed = {name: value for name, value in options.items() if name in usual and value != usual[name]}
    return tuple(f"{flag} {shlex.quote(value)}" for flag, value in _flags(changed))


def _flags(changed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in changed.items():
        if name in _PLAIN and isinstance(value, str | int | float):
            yield _PLAIN[name], str(value)
        elif name in _AMOUNTS and isinstance(value, dict):
            yield from ((_AMOUNTS[name], f"{key}={each}") for key, each in value.items())
        elif name in _GROUPS and isinstance(value, list):
            yield from ((_GROUPS[name], ",".join(map(str, group))) for group in value if isinstance(group, list))
        elif name == "forbid" and isinstance(value, list):
            yield from (("--forbid", "=".join(map(str, pair))) for pair in value if isinstance(pair, list))
        elif name == "only" and isinstance(value, list):
            yield from (("--only", str(each)) for each in value)
        elif name == "order" and isinstance(value, list):
            yield "--order", ",".join(map(str, value))
        elif name == "rematerialise" and isinstance(value, dict):
            yield from ((f"--{rule}-remat", str(each)) for each, rule in value.items())
