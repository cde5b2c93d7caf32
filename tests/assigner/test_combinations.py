"""Random models under random plans: what a plan changes is speed and memory, never the result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from drawn_combinations import MODELS_EVERY, differences, drawn_combination
from drawn_models import drawn_model
from workloads import Reference

from assigner.marking import partition_graph

SCRIPT = Path(__file__).resolve().parent.parent / "runs" / "combinations.py"


def run(*words: str | Path) -> tuple[int, int]:
    """How many combinations were equal, and how many refused."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:8000]
    counted = re.search(r"(\d+) equal, 0 not \[\], (\d+) refused", done.stdout)
    assert counted is not None, done.stdout
    return int(counted[1]), int(counted[2])


@pytest.mark.distributed
def test_two_hundred_combinations_on_three_ranks():
    """Loss, gradients and weights are the plain model's to 1e-9; no model is one that cannot be cut."""
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", "3"
    assert run(*torchrun, SCRIPT, "--seeds", "0", "200") == (200, 0)


def test_combinations_in_one_process():
    """The same with all partitions on one worker, without a launcher."""
    assert run(SCRIPT, "--seeds", "200", "224") == (24, 0)


def test_a_wrong_result_is_found(monkeypatch):
    """A loss that is off by a millionth shows, and so does its gradient."""
    made = drawn_model(200 // MODELS_EVERY).workload
    graph = partition_graph(made)
    plain_loss = Reference.loss
    monkeypatch.setattr(Reference, "loss", lambda self, batch: plain_loss(self, batch) * (1 + 1e-6))
    found = list(differences(made, graph, drawn_combination(made, graph, 200, workers=1)))
    assert any(line.startswith("step 0: loss") for line in found)
    assert any(re.fullmatch(r"step 0: gradient of .* is .* off", line) for line in found)
