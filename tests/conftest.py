"""What several tests need: the lab, where this machine has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def lab() -> Path:
    """The lab's program; skips where it is missing or cannot work."""
    program = Path(os.environ.get("ASSIGNER_LAB", ROOT.parent / "shared" / "lab" / "lab.py"))
    if not program.is_file():
        pytest.skip(f"the lab is not here ({program}); ASSIGNER_LAB names another place")
    checked = subprocess.run([sys.executable, program, "check"], capture_output=True, text=True, check=False)
    if checked.returncode:
        pytest.skip(checked.stdout.strip() or "the lab cannot work here")
    return program


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT
