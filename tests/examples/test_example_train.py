"""The training script: progress, summary, checkpoints across plans, and errors without a traceback."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from example_plans import ROOT, entry, make_plan, tiny

from assigner.formats.plan import load_plan, save_plan
from assigner.formats.trace import check_same_plan, load_trace

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from forked_ranks import ForkedRanks

SCRIPT = ROOT / "examples" / "train.py"
SIZES = "width=16,heads=2,blocks=1,context=12,batch_size=8"
GPT = entry("gpt", SIZES)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plan_file(folder: Path, workload: str, *stages: tuple[int, int]) -> Path:
    path = folder / f"plan{len(stages)}.json"
    save_plan(make_plan(workload, stages), path)
    return path


def numbers(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_training_says_how_it_goes(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Progress goes to stderr, the summary to stdout, the numbers to the file."""
    plan = plan_file(tmp_path, GPT, (0, 3))
    assert script.main(["--plan", str(plan), "--steps", "3", "--json", str(tmp_path / "run.json")]) == 0
    shown = capsys.readouterr()
    assert re.fullmatch(r"loss 5\.\d+ -> 5\.\d+ in 3 steps; \d+ ms a step \(median\)\n", shown.out)
    assert re.search(r"^step 3/3  loss [\d.]+  \d+ ms a step  [\d.]+ samples/s  0 s left$", shown.err, re.MULTILINE)
    found = numbers(tmp_path / "run.json")
    assert len(found["losses"]) == len(found["step_s"]) == 3
    assert found["predicted_step_s"] is None
    slower = ["--plan", str(plan), "--steps", "3", "--json", str(tmp_path / "slow.json"), "--set"]
    assert script.main([*slower, "learning_rate=1e-9"]) == 0
    assert numbers(tmp_path / "slow.json")["losses"][0] == found["losses"][0]
    assert numbers(tmp_path / "slow.json")["losses"][2] > found["losses"][2]


@pytest.mark.long
@pytest.mark.distributed
def test_a_run_goes_on_under_another_plan(script: ModuleType, tmp_path: Path, forked: ForkedRanks) -> None:
    """Two steps on two ranks, then two on one from the checkpoint, are the four steps of one run on one rank."""
    workload = entry("gpt", f"{SIZES},double=True,tied=True")
    one, two = plan_file(tmp_path, workload, (0, 3)), plan_file(tmp_path, workload, (1, 1), (0, 2))
    first, second, whole = (tmp_path / f"{name}.json" for name in ("first", "second", "whole"))
    saved = tmp_path / "saved"
    words = ("--plan", two, "--steps", "2", "--save", saved, "--json", first, "--trace", tmp_path / "trace.json")
    said = "".join(end.output for end in forked.run(str(SCRIPT), *words, ranks=2))
    assert said.endswith(f"checkpoint: {saved}\ntrace: {tmp_path / 'trace.json'}\n")
    assert said.count("in 2 steps") == 1
    trace = load_trace(tmp_path / "trace.json")
    check_same_plan(trace, load_plan(two))
    assert trace.steps == 2
    assert script.main(["--plan", str(one), "--steps", "2", "--resume", str(saved), "--json", str(second)]) == 0
    assert script.main(["--plan", str(one), "--steps", "4", "--remat", "never", "--json", str(whole)]) == 0
    parts = numbers(first)["losses"] + numbers(second)["losses"]
    assert parts == pytest.approx(numbers(whole)["losses"], rel=0, abs=1e-10)


@pytest.mark.long
def test_a_plan_for_another_model_is_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error with a hint and exit code 5, before any training."""
    plan = plan_file(tmp_path, GPT, (0, 3))
    assert script.main(["--plan", str(plan), "--workload", tiny("unet")]) == 5
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in shown] == ["error", "hint"]


def test_a_trace_is_of_the_plans_batch(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With another batch size a trace is refused before any training, with exit code 2."""
    plan = plan_file(tmp_path, GPT, (0, 3))
    assert script.main(["--plan", str(plan), "--batch-size", "3", "--trace", str(tmp_path / "trace.json")]) == 2
    assert "--trace" in capsys.readouterr().err


def test_a_missing_plan_is_a_usage_error(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan file that is not there ends with exit code 2 and its name."""
    assert script.main(["--plan", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_bad_options_are_refused_before_anything_is_loaded(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting without a name, no steps, or a checkpoint folder or a trace that exists: exit code 2."""
    for arguments in (
        ["--plan", "p", "--set", "3"], ["--plan", "p", "--steps", "0"], ["--plan", "p", "--save", str(tmp_path)],
        ["--plan", "p", "--trace", str(tmp_path)],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            script.main(arguments)
        assert stopped.value.code == 2
