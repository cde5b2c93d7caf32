"""The launchers of others, as they are: profile, solve and training under Slurm, Open MPI and Ray Train.

Each skips with a reason where it is not installed. The losses are those of plain PyTorch.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from slurm_cluster import SECOND, lacks, slurm_cluster

from assigner.formats.profile import load_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.distributed, pytest.mark.long]

PROFILE = ["--no-check", "--micro-batches", "4", "--max-message", "4096", "--force-busy"]
SPREAD = ["--pin", "0=worker:0", "--pin", "3=worker:1"]


def call(
    root: Path, *command: object, environment: Mapping[str, str] = os.environ, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's folder, to a good end."""
    done = subprocess.run(
        list(map(str, command)), cwd=root, env={**environment, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def solved(root: Path, folder: Path, programs: Path) -> str:
    """A plan on both workers from the folder's profile."""
    call(root, programs / "assigner", "solve", folder / "profile.json", "-o", folder / "plan.json", *SPREAD)
    return str(folder / "plan.json")


def check_losses(file: Path) -> None:
    found = json.loads(file.read_text())
    assert found["losses"] == pytest.approx(found["plain"], rel=1e-12)
    assert len(set(found["plain"])) == 5


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a cluster of two hosts."""
    if reason := lacks():
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def test_slurm(root: Path, tmp_path: Path, programs: Path, slurm: dict[str, str]) -> None:
    """The same two steps of srun in a job, and a heterogeneous job, with no variable set by hand."""
    workload = "tests/launched/small.py:workload"
    srun = ["srun", "-N2", "-n2"]
    words = [programs / "assigner", "profile", workload, "-o", tmp_path / "profile.json", *PROFILE]
    call(root, *srun, *words, environment=slurm)
    plan = solved(root, tmp_path, programs)
    train = [programs / "python", "tests/launched/train.py"]
    parts = ["salloc", "-n1", "-w", socket.gethostname(), ":", "-n1", "-w", SECOND, "srun", "--het-group=0,1"]
    for name, launcher in (("one", srun), ("heterogeneous", parts)):
        call(root, *launcher, *train, tmp_path / f"{name}.json", environment=slurm, ASSIGNER_PLAN=plan)
        check_losses(tmp_path / f"{name}.json")


def test_open_mpi(
    root: Path, tmp_path: Path, programs: Path, mpirun: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Messages through MPI where mpi4py is there, and the environment asks for it; else through gloo."""
    backend = "mpi" if find_spec("mpi4py") else "gloo"
    asked = {"ASSIGNER_PROFILE_BACKEND": backend, "ASSIGNER_BACKEND": backend}
    workload = root / "tests/launched/small.py"
    words = ["profile", f"{workload}:workload", "-o", tmp_path / "profile.json", *PROFILE]
    done = mpirun(2, programs / "assigner", *words, **asked)
    assert done.returncode == 0, done.stderr[-4000:]
    assert {each.backend for each in load_profile(tmp_path / "profile.json").links} == {backend}
    plan = solved(root, tmp_path, programs)
    train = root / "tests/launched/train.py"
    done = mpirun(2, programs / "python", train, tmp_path / "losses.json", ASSIGNER_PLAN=plan, **asked)
    assert done.returncode == 0, done.stderr[-4000:]
    check_losses(tmp_path / "losses.json")


def test_ray_train(root: Path, tmp_path: Path, programs: Path) -> None:
    """TorchTrainer's loop makes the pipeline: Ray sets the variables of torchrun."""
    ray = os.environ.get("ASSIGNER_TEST_RAY_PYTHON") or (sys.executable if find_spec("ray") else "")
    if not ray or shutil.which(ray) is None:
        pytest.skip("Ray is not here: pip install 'ray[train]', or ASSIGNER_TEST_RAY_PYTHON names a python that has it")
    workload = "tests/launched/small.py:workload"
    call(root, programs / "assigner", "profile", workload, "-o", tmp_path / "profile.json", "--workers", "2", *PROFILE)
    plan = solved(root, tmp_path, programs)
    call(root, ray, "tests/launched/by_ray.py", tmp_path / "losses.json", ASSIGNER_PLAN=plan)
    check_losses(tmp_path / "losses.json")
