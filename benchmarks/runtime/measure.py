"""The runs of one case: ranks are started, and leave their figures in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import RANKS, Case
from chain import Chain

from assigner.formats.plan import save_plan
from assigner.formats.profile import load_profile
from assigner.schedule.simulate import priced
from assigner.solver import solve

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PEAK_STEPS = 2  # from the second one on the optimizer has its state


def _on_ranks(script: str, *words: object) -> None:
    """A script of this folder on every rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    _run(*launcher, HERE / script, *words)


def _run(*words: object) -> None:
    """A Python command in the repository's folder."""
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _kind(case: Case) -> list[str]:
    """Who is compared, for a script."""
    return ["--data-parallel"] if case.data_parallel else []


def measure_turns(case: Case) -> dict[str, Any]:
    """Step and processor times of all contenders, by contender; a list for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        _on_ranks(
            "turns.py", "--entry", case.entry, "--title", case.name, "--micro-batches", case.micro_batches,
            "--rounds", case.rounds, "--steps", case.steps, "--out", out, *_kind(case),
        )  # fmt: skip
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def measure_peaks(case: Case, *, remat: bool = False) -> dict[str, list[int | None]]:
    """Peak bytes by contender, one for each rank; None: it leaves the rank out."""
    with tempfile.TemporaryDirectory() as folder:
        _on_ranks(
            "peak.py", "--entry", case.entry, "--micro-batches", case.micro_batches, "--steps", PEAK_STEPS,
            "--out", folder, *(["--remat"] if remat else []), *_kind(case),
        )  # fmt: skip
        parts = [json.loads((Path(folder) / f"peak-{rank}.json").read_text()) for rank in range(RANKS)]
        return {name: [part[name] for part in parts] for name in parts[0]}


def measure_predicted(case: Case) -> dict[str, Any]:
    """Predicted and measured step of the equal plans and of a solved one, by plan.

    The predictions are made from a profile that is measured right before.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        profile_path, out = folder / "profile.json", folder / "figures.json"
        _run("-m", "assigner_cli", "profile", case.entry, "-o", profile_path, "--workers", RANKS, "--threads", 1)
        profile = load_profile(profile_path)
        chain = Chain(case.entry, case.micro_batches, RANKS)
        plans = {
            "equal, gpipe": priced(chain.plan("gpipe"), profile),
            "equal, 1f1b": priced(chain.plan("1f1b"), profile),
            "solved": solve(profile).plan,
        }
        paths = {name: folder / f"{number}.json" for number, name in enumerate(plans)}
        for name, path in paths.items():
            save_plan(plans[name], path)
        _on_ranks("planned.py", "--rounds", case.rounds, "--steps", case.steps, "--out", out, *paths.values())
        figures = json.loads(out.read_text())
        return {
            name: {
                "predicted_s": plan.predicted.step_s, "schedule": plan.schedule, "micro_batches": plan.micro_batches,
                **figures[str(paths[name])],
            }
            for name, plan in plans.items()
            if plan.predicted is not None
        }  # fmt: skip
