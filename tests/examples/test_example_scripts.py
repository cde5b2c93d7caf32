"""The two whole scripts: stopped on two ranks, they go on elsewhere as if nothing had been, and use the weights."""

from __future__ import annotations

import re
import runpy
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from example_plans import ROOT, make_plan

from assigner.formats.plan import save_plan

if TYPE_CHECKING:
    from pathlib import Path

    from forked_ranks import ForkedRanks

    from assigner.formats.plan import Plan


def here(monkeypatch: pytest.MonkeyPatch, plan: Path, script: Path, *arguments: object) -> None:
    """Run a script in this process, under a plan for one worker."""
    monkeypatch.setenv("ASSIGNER_PLAN", str(plan))
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    monkeypatch.syspath_prepend(str(script.parent))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)


def losses(said: str) -> list[tuple[str, float]]:
    """Of the steps, in order: where it was, and the loss."""
    return [(place, float(loss)) for place, loss in re.findall(r"^(.*): loss ([\d.]+)", said, re.MULTILINE)]


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "entry", "stages", "arguments", "line", "steps"),
    [
        (
            "language_model", "blocks=1,width=16,heads=2,context=12,batch_size=8", ((0, 2), (1, 1)),
            ("--steps", 7, "--every", 3), "step 4: loss", 7,
        ),
        pytest.param(
            "image_classifier", "width=4,size=8,batch_size=256", ((1, 2), (0, 3)),
            ("--epochs", 2), "epoch 1, 512 images", 8, marks=pytest.mark.sweep,
        ),
    ],
    ids=["language_model", "image_classifier"],
)  # fmt: skip
def test_a_script_goes_on_where_it_was_stopped(
    name: str,
    entry: str,
    stages: tuple[tuple[int, int], ...],
    arguments: tuple[object, ...],
    line: str,
    steps: int,
    tmp_path: Path,
    forked: ForkedRanks,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two ranks are stopped in the middle, and test and save; one goes on from there. The losses are those of one run,
    and the best weights are used in plain PyTorch in the end.
    """
    script = ROOT / "examples" / f"{name}.py"
    workload = f"{script}:workload({entry})"

    def plan(file: str, stages: tuple[tuple[int, int], ...]) -> Path:
        made: Plan = make_plan(workload, stages, micro_batches=2)
        save_plan(made, tmp_path / file)
        return tmp_path / file

    one = plan("one.json", ((0, sum(count for _, count in stages)),))
    variables = {"ASSIGNER_PLAN": str(plan("two.json", stages))}
    parts = [str(each) for each in (*arguments, "--folder", tmp_path / "parts")]
    ends = forked.ended("stopped.py", line, script, *parts, variables=[variables] * 2, torchrun=True)
    assert [end.code for end in ends] == [0, 0], "".join(end.errors for end in ends)
    stopped = "".join(end.output for end in ends)
    assert "\ntest loss" in stopped
    here(monkeypatch, one, script, *parts)
    resumed = capsys.readouterr().out
    here(monkeypatch, one, script, *arguments, "--folder", tmp_path / "whole")
    whole = capsys.readouterr().out
    assert 0 < len(losses(stopped)) < steps
    found, wanted = losses(stopped) + losses(resumed), losses(whole)
    assert [place for place, _ in found] == [place for place, _ in wanted]
    assert len(wanted) == steps
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], abs=1e-3)
    assert resumed.splitlines()[-4:] == whole.splitlines()[-4:]
