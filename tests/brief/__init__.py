"""Profiles of real processes that measure briefly, as forked ones do: tests look at what a profile has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

START = Path(__file__).resolve().parent / "start"


def measuring_briefly(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables under which Python runs `start/sitecustomize.py` when it begins."""
    paths = [str(START), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
