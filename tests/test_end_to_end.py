"""The whole road: profile, solve, compare, run; on this host, and in real processes on the lab's unlike hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from brief import measuring_briefly

from assigner.formats.plan import load_plan
from assigner.formats.profile import load_profile
from assigner.schedule.cost import CostModel
from assigner.schedule.simulate import predict

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.distributed

WORKLOAD = "examples/gpt.py:workload(width=32,blocks=3,context=16)"
ASSIGNER = [sys.executable, "-m", "assigner_cli"]
UNLIKE = """
[[host]]
name = "big"
cpu = 1.2

[[host]]
name = "small"
cpu = 0.4
"""
"""Two hosts, 3 : 1 in speed; of less processor than this, starting Python and torch alone takes one long."""


def call(root: Path, *command: str, code: int = 0, brief: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's folder; its exit code must be `code`."""
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=1200, check=False,
        env=measuring_briefly() if brief else None,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def assigner(programs: Path) -> str:
    """The command, without an import of torch for each."""
    return str(programs / "assigner")


@pytest.fixture(scope="module")
def profiled(root: Path, assigner: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile of a tiny GPT on two local ranks, and a plan solved from it."""
    folder = tmp_path_factory.mktemp("road")
    said = call(
        root, assigner, "profile", WORKLOAD, "-o", str(folder / "profile.json"), "--workers", "2",
        "--micro-batches", "2,4", "--max-message", "65536",
    )  # fmt: skip
    assert said.stdout == ""  # the result is the file; everything said goes to stderr
    assert "5 partitions of 3 kinds" in said.stderr
    assert said.stderr.count("profile written to ") == 1
    for name, pin in (("plan", "head=worker:1"), ("other", "head=worker:0")):
        flags = [
            "--pin",
            "embed=worker:0" if name == "plan" else "embed=worker:1",
            "--pin",
            pin,
            "--micro-batches",
            "4",
        ]
        call(root, assigner, "solve", str(folder / "profile.json"), "-o", str(folder / f"{name}.json"), *flags)
    return folder


def test_a_profile_has_everything_that_a_plan_needs(profiled: Path) -> None:
    """Every partition has a price on every worker at the sizes measured, every pair of workers a link each way.

    And what the two take to add up gradients was measured.
    """
    profile = load_profile(profiled / "profile.json")
    cost = CostModel(profile)
    sizes = sorted({point.micro_batch for point in profile.measurements})
    assert len(sizes) >= 2
    for partition in profile.order:
        for worker in profile.worker:
            for size in sizes:
                price = cost.partition(partition, worker, size)
                assert price.forward_s > 0
                assert price.backward_s > 0
                assert price.update_s > 0
    assert cost.link("worker:0/cpu", "worker:1/cpu")
    assert cost.link("worker:1/cpu", "worker:0/cpu")
    (reduced,) = profile.collectives
    assert reduced.workers == ("worker:0/cpu", "worker:1/cpu")
    assert cost.reduce_s(reduced.workers, reduced.points[-1].bytes) == pytest.approx(reduced.points[-1].seconds)
    assert all(worker.memory_bytes > 1e8 for worker in profile.workers)
    blocks = [each for each in profile.partitions if each.name.startswith("blocks.")]
    assert len({each.kind for each in blocks}) == 1
    assert blocks[0].optimizer_bytes >= 2 * blocks[0].parameter_bytes  # AdamW's two moments
    assert profile.workload.optimizer == "AdamW"


def test_a_solved_plan_trains_and_its_loss_falls(root: Path, assigner: str, profiled: Path) -> None:
    """`assigner run` trains on two ranks under the plan; the loss falls and every rank's part is saved."""
    result, folder = profiled / "result.json", profiled / "checkpoint"
    call(
        root, assigner, "run", str(profiled / "plan.json"), "--", "examples/train.py", "--steps", "25",
        "--json", str(result), "--save", str(folder),
    )  # fmt: skip
    losses = json.loads(result.read_text())["losses"]
    assert losses[-1] < losses[0] - 0.5
    assert len(list(folder.glob("model-*.safetensors"))) == 2
    again = profiled / "again.json"
    call(
        root, assigner, "run", str(profiled / "other.json"), "--", "examples/train.py", "--steps", "1",
        "--json", str(again), "--resume", str(folder),
    )  # fmt: skip
    assert json.loads(again.read_text())["losses"][0] < losses[0] - 0.5  # under another plan it goes on from there


def test_plans_compare(root: Path, assigner: str, profiled: Path) -> None:
    """Two plans stand side by side; what moved is named, and --exit-code tells that they differ."""
    plans = [str(profiled / "plan.json"), str(profiled / "other.json")]
    done = call(root, assigner, "compare", *plans, "--json", "--exit-code", code=1)
    assert json.loads(done.stdout)
    assert "embed" in call(root, assigner, "compare", *plans).stdout


def test_too_few_ranks_are_refused(root: Path, assigner: str, profiled: Path) -> None:
    """A plan for two ranks on one: a usage error before anything is started, and what to do."""
    done = call(
        root, assigner, "run", str(profiled / "plan.json"), "--ranks", "1", "--", "examples/train.py", "--steps", "1",
        code=2,
    )  # fmt: skip
    assert "--ranks 1: the plan needs 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_plan_for_another_model_is_refused(root: Path, assigner: str, profiled: Path) -> None:
    """The fingerprint is compared before any training."""
    done = call(
        root, assigner, "run", str(profiled / "plan.json"), "--", "examples/train.py", "--steps", "1",
        "--workload", "examples/gpt.py:workload(width=48,blocks=3,context=16)", code=5,
    )  # fmt: skip
    assert "the plan is for workload" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("examples/none.py:workload", "no such file"),
        pytest.param("examples/gpt.py:nothing", "has no function", marks=pytest.mark.sweep),
        pytest.param("examples/gpt.py:workload(1)", "is no function", marks=pytest.mark.sweep),
        pytest.param("examples/gpt.py", "names no workload", marks=pytest.mark.sweep),
    ],
)
def test_a_wrong_workload_is_refused_before_any_rank_starts(
    root: Path, assigner: str, tmp_path: Path, workload: str, message: str
) -> None:
    """Exit code 2, one error, nothing written."""
    done = call(root, assigner, "profile", workload, "-o", str(tmp_path / "p.json"), code=2)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())


KILLED = """
import os, runpy, signal
import assigner
step = assigner.Pipeline.step
def killed(pipeline, *given, **named):
    if pipeline.rank == 1 and pipeline.steps == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(pipeline, *given, **named)
assigner.Pipeline.step = killed
runpy.run_path("examples/train.py", run_name="__main__")
"""
"""examples/train.py, of which rank 1 is killed before its fourth step."""


@pytest.mark.long
def test_a_killed_rank_ends_the_run(root: Path, assigner: str, profiled: Path) -> None:
    """kill -9 of one rank while all train: the run ends with exit code 7 and names the rank."""
    script = profiled / "killed.py"
    script.write_text(KILLED)
    done = call(root, assigner, "run", str(profiled / "plan.json"), "--", str(script), "--steps", "100000", code=7)
    assert "worker:1 was killed by SIGKILL" in done.stderr


@pytest.mark.lab
@pytest.mark.long
@pytest.mark.usefixtures("lab")
def test_unlike_hosts_get_unlike_stages(root: Path, assigner: str, tmp_path: Path) -> None:
    """On hosts of 3 : 1 in speed the profile tells them apart, and the plan gives the fast one more."""
    (tmp_path / "unlike.toml").write_text(UNLIKE)
    start = [*ASSIGNER, "lab", str(tmp_path / "unlike.toml"), "--timeout", "1180", "--"]
    workload = "examples/gpt.py:workload(width=64,blocks=4,context=32)"
    profile, plan, result = (tmp_path / name for name in ("profile.json", "plan.json", "result.json"))
    call(
        root, *start, "assigner", "profile", workload, "-o", str(profile), "--micro-batches", "4",
        "--max-message", "65536", "--no-check",
        brief=True,
    )  # fmt: skip
    found = load_profile(profile)
    assert [worker.host for worker in found.workers] == ["big", "small"]
    cost = CostModel(found)
    slow = [cost.partition("blocks.1", worker.name, 4).backward_s for worker in found.workers]
    assert slow[0] < slow[1]  # a third of the speed: no noise hides it
    call(root, assigner, "solve", str(profile), "-o", str(plan))
    given = {worker.name: 0 for worker in found.workers}  # partitions times micro-batches: stages may be shared
    solved = load_plan(plan)
    for stage in solved.stages:
        shares = [(each.worker, each.micro_batches) for each in stage.replicas]
        for worker, batches in shares or [(stage.worker, solved.micro_batches)]:
            given[worker] += batches * len(stage.partitions)
    assert given["worker:0/cpu"] > given["worker:1/cpu"]
    assert predict(solved, found).step_s == pytest.approx(solved.predicted.step_s)
    call(root, *start, "assigner", "run", str(plan), "--", "examples/train.py", "--steps", "3", "--json", str(result))
    assert len(json.loads(result.read_text())["losses"]) == 3
