"""assigner: profile, place and train a PyTorch model across workers that are not alike.

The names of `__init__.pyi` are loaded when they are first used, so that reading plans needs no torch. That file is
their one list, for type checkers and for this module, as with lazy_loader (scientific-python.org/specs/spec-0001).
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from assigner.version import __version__ as __version__

_HOMES = {
    name: home
    for home, name in re.findall(
        r"^from (\S+) import (\w+)", Path(__file__).with_suffix(".pyi").read_text("utf-8"), re.M
    )
}
__all__ = [*_HOMES]  # noqa: PLE0604 - names, as __init__.pyi has them


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'assigner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if "ASSIGNER_CAUSES" in os.environ:  # a rank of `assigner run` or `assigner profile`
    try:
        from assigner.launch.failurereport import hand_over_uncaught
        from assigner.launch.launcherwatch import end_with_launcher
    except KeyboardInterrupt:  # its launcher says so, once
        raise SystemExit(130) from None

    hand_over_uncaught()
    end_with_launcher(joins=False)
