"""Variables of the environment whose names begin with ASSIGNER_: which are read, and a word on those that are not."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Any

from assigner.machine.launchedrank import launched_rank

from . import console

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = "ASSIGNER_"
OF_RUNS = ("BACKEND", "CAUSES", "HOST", "PLAN", "SECRET", "SHARED_MEMORY", "VERIFICATION")
"""What stands for no flag: launchers, ranks and scripts read it (docs/settings.md says what it means)."""
_OF_TESTS = ("SCREENS", "TEST_RAY_PYTHON", "TEST_STEP")
"""What this project's own tests read."""


def of_flags(group: Any) -> Iterator[tuple[str, Any, str | None]]:
    """Every flag of every command: the command's name, the flag, and its variable; None: it has none.

    Args:
        group: The group of all commands.
    """
    for name, command in group.commands.items():
        prefix = command.context_settings.get("auto_envvar_prefix")
        for param in command.params:
            if param.param_type_name != "argument":
                yield name, param, param.envvar or (f"{prefix}_{param.name.upper()}" if prefix else None)


def speaks_for_all() -> bool:
    """Whether this process is the one of a run's that says what concerns all of them."""
    return f"{_PREFIX}CAUSES" not in os.environ and launched_rank() in (None, 0)


def warn_of_unknown(group: Any) -> None:
    """Say which variables with our prefix nobody reads, and what may have been meant."""
    there = sorted(name.removeprefix(_PREFIX) for name in os.environ if name.startswith(_PREFIX))
    if not there:
        return
    flags = list(of_flags(group))
    read = {variable.removeprefix(_PREFIX) for _, _, variable in flags if variable} | {*OF_RUNS}
    found = [f"{_PREFIX}{name}{_meant(name, flags, read)}" for name in there if name not in read | {*_OF_TESTS}]
    if found and speaks_for_all():
        console.notice(f"warning: assigner reads no variable of this name: {', '.join(found)}")


def _meant(name: str, flags: list[tuple[str, Any, str | None]], read: set[str]) -> str:
    """What a variable that is not read was meant to be, in brackets; empty: it is like none. Names without prefix."""
    for command, param, variable in flags:
        if variable is None and name in (param.name.upper(), f"{command}_{param.name}".upper()):
            return f" ({max(param.opts, key=len)} of {command} has none)"
    short = name.removeprefix("SOLVE_")  # whose variables have no command in their names
    close = [short] if short in read else difflib.get_close_matches(name, sorted(read), n=1)
    return f" (did you mean {_PREFIX}{close[0]}?)" if close else ""
