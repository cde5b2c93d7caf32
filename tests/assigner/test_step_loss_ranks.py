"""Losses over the batch, and rows in lists, on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


def test_two_ranks_are_the_plain_loop(tmp_path):
    """Losses, gradients and weights to 1e-10, with and without rematerialisation, full and ragged batches."""
    run = Path(__file__).resolve().parent.parent / "runs" / "rows.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(run), str(tmp_path)],
        capture_output=True, text=True, timeout=400, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 7
        assert {case: each for case, each in found.items() if not max(each.values()) < 1e-10} == {}
