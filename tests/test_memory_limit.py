"""The memory limit is real: what is predicted to fit runs, what is not is refused, and else killed by the kernel."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from brief import measuring_briefly

from assigner.formats.plan import Plan, save_plan
from assigner.formats.profile import Profile, load_profile
from assigner.formats.stage import Stage
from assigner.schedule.simulate import priced

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.lab, pytest.mark.long]

ASSIGNER = [sys.executable, "-m", "assigner_cli"]
WORKLOAD = "examples/gpt.py:workload(width=128,blocks=4,context=64)"
HOST = """
[[host]]
name = "small"
memory_mib = 800
"""
ROWS = 4


@pytest.fixture(scope="module")
def cluster(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One host with 800 MiB."""
    assert lab
    path = tmp_path_factory.mktemp("memory") / "small.toml"
    path.write_text(HOST)
    return path


@pytest.fixture(scope="module")
def profile(root: Path, cluster: Path) -> Profile:
    """A small GPT, measured there."""
    path = cluster.with_name("profile.json")
    flags = ["--micro-batches", "2,4", "--no-check"]
    done = on_lab(root, cluster, "assigner", "profile", WORKLOAD, "-o", str(path), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return load_profile(path)


def on_lab(root: Path, cluster: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ASSIGNER, "lab", str(cluster), "--", *command], cwd=root, capture_output=True, text=True, timeout=1200,
        check=False, env=measuring_briefly(),
    )  # fmt: skip


def plan_of(profile: Profile, share: float) -> Plan:
    """Everything on the worker under GPipe, the batch such that it is predicted to take this share of the capacity."""
    (worker,) = profile.workers

    def plan(count: int) -> Plan:
        workload = replace(profile.workload, batch_size=count * ROWS)
        stage = Stage(worker.name, profile.order, threads=worker.threads)
        made = Plan(workload=workload, micro_batches=count, micro_batch_size=ROWS, stages=(stage,))
        return priced(made, replace(profile, workload=workload))

    one, two = (plan(count).predicted.workers[0].peak_bytes for count in (1, 2))  # type: ignore[union-attr]
    return plan(1 + round((share * worker.capacity_bytes - one) / (two - one)))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.97, 0.8])
def test_a_plan_that_is_predicted_to_fit_runs(root: Path, cluster: Path, profile: Profile, share: float) -> None:
    """Three steps are made, and nobody is killed: where nothing freed is kept, and where it is as room allows."""
    path = cluster.with_name(f"fits-{share}.json")
    save_plan(plan_of(profile, share), path)
    done = on_lab(root, cluster, "assigner", "run", str(path), "--", "examples/train.py", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in 3 steps" in done.stdout


def test_a_plan_that_is_predicted_not_to_fit_is_refused_and_else_killed(
    root: Path, cluster: Path, profile: Profile
) -> None:
    """40 % above the capacity: refused at load, and with the check off the kernel kills it, and the lab says so."""
    path = cluster.with_name("large.json")
    save_plan(plan_of(profile, 1.4), path)
    run = ["assigner", "run", str(path), "--", "examples/train.py", "--steps", "3"]
    refused = on_lab(root, cluster, *run)
    assert refused.returncode == 7
    assert "the plan needs" in refused.stdout + refused.stderr
    killed = on_lab(root, cluster, *run, "--no-memory-check")
    assert killed.returncode == 7
    assert "small was out of memory: limit 800 MiB" in killed.stdout + killed.stderr
