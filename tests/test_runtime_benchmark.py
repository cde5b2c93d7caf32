"""The runtime's benchmark on small models: everybody computes the same, and the tables are whole."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.distributed
@pytest.mark.long
def test_all_runtimes_stand_side_by_side(root: Path, tmp_path: Path, programs: Path) -> None:
    """The run checks every gradient against the un-pipelined model, and leaves a figure for each rank and round."""
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [
            programs / "python", "benchmarks/runtime/run.py", "--quick", "--rounds", "2", "--cases",
            "tiny", "real", "shared", "--json", str(out),
        ],
        cwd=root, env={**os.environ, "PYTHON_EXEC": str(programs / "python")},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    expected = {f"{who} {schedule}" for who in ("raw", "assigner", "torch") for schedule in ("gpipe", "1f1b")}
    if importlib.util.find_spec("torchgpipe") is not None:
        expected.add("torchgpipe, one process")
    for figures in (found["tiny"]["tiny, M=8"], found["real"]["gpt"]):
        assert set(figures) == expected
        assert all(len(ranks) == 2 and len(ranks[0]) == 2 for each in figures.values() for ranks in each.values())
    assert set(found["real_peak_bytes"]["gpt"]) == expected
    (shared,) = found["shared"].values()
    assert set(shared) == {"DistributedDataParallel", "assigner, shared stage"}
    assert done.stdout.count("| assigner 1f1b") == 2
