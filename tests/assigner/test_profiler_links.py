"""Links between two ranks of this host, measured over the runtime's own transport."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from assigner.profiler.links import message_sizes

RUN = Path(__file__).resolve().parent.parent / "runs" / "links.py"


def test_sweeps_reach_the_largest_message() -> None:
    """Sizes grow by four from 1 KiB until they cover what a plan could send, 256 MiB at most."""
    assert message_sizes(1) == [1024]
    assert message_sizes(5000) == [1024, 4096, 16384]
    assert message_sizes(10**12)[-1] == 256 << 20


@pytest.mark.distributed
def test_both_directions_are_measured(tmp_path: Path) -> None:
    """Each rank has the link that starts at it: growing sizes, positive times, shares from 0 to 1; notes are shared."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(RUN), str(tmp_path / "links")]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    both = [json.loads((tmp_path / f"links.{rank}").read_text()) for rank in range(2)]
    assert both[0]["notes"] == both[1]["notes"]
    for rank, made in enumerate(both):
        (link,) = made["links"]
        assert (link["source"], link["target"]) == (rank, 1 - rank)
        assert [point["size"] for point in link["points"]] == message_sizes(100_000)
        assert all(point["sample"]["median"] > 0 for point in link["points"])
        assert all(point["sample"]["count"] >= 3 for point in link["points"])
        assert 0 <= link["sender_busy"] <= 1
        assert 0 <= link["receiver_busy"] <= 1
