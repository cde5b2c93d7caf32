"""`make gpu`: without a GPU it says what it would do; its parts are tried out here with the CPU in the GPU's place."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from types import ModuleType

RUN = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu" / "run.py"


@pytest.fixture
def run(programs: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with a small model, one thread, and `cpu` wherever it says `cuda:0`."""
    specification = importlib.util.spec_from_file_location("gpu_run", RUN)
    assert specification is not None
    assert specification.loader is not None
    made = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "gpu_run", made)
    specification.loader.exec_module(made)
    monkeypatch.setattr(made, "MODEL", "examples/gpt.py:workload(width=32,context=16,blocks=2,batch_size=8)")
    monkeypatch.setattr(made, "LOOPS", {"large": {"width": 16, "context": 8, "blocks": 1, "batch_size": 8}})
    monkeypatch.setattr(made, "FOREIGN", (("cuda:0", "patches"),))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ran = made.Bench.ran

    def on_cpu(bench: Any, *command: str, **given: Any) -> str:
        others = {sys.executable: str(programs / "python"), **dict.fromkeys(("4", "8"), "1")}  # so many threads
        words = [others.get(word, word) for word in command]
        given["most_s"] *= 20  # the limits are a GPU machine's
        return str(ran(bench, *(word.replace("cuda:0", "cpu") for word in words), **given))

    monkeypatch.setattr(made.Bench, "ran", on_cpu)
    return made


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_run() -> None:
    """It names its parts, leaves no result, and ends well."""
    result = RUN.parent / "RESULT.md"
    before = result.read_text()
    done = subprocess.run([sys.executable, str(RUN)], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: torch sees no CUDA device here. Nothing was run")
    assert [line[2] for line in done.stdout.splitlines()[1:-1]] == list("ABCDEFGHI")
    assert result.read_text() == before


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("part", ["C", "D", "E", "F", "G", "H"])
def test_the_parts_end(run: ModuleType, part: str, tmp_path: Path) -> None:
    """Each gives its rows, whatever these say of a CPU."""
    rows = list(run.PARTS[part](run.Bench(tmp_path, time.monotonic() + 6000)))
    assert {row.part for row in rows} == {part}
    assert all(row.ok for row in rows if row.wanted in ("falls", "equal"))


def test_a_part_that_fails_is_said(run: ModuleType, tmp_path: Path) -> None:
    """With the last words of what failed; and one for which no time is left."""
    bench = run.Bench(tmp_path, time.monotonic() + 600)
    with pytest.raises(run.FailedError, match="ended with 3: last words"):
        bench.ran(sys.executable, "-c", "print('last words'); raise SystemExit(3)", most_s=60.0)
    with pytest.raises(run.FailedError, match="the time was spent"):
        run.Bench(tmp_path, time.monotonic()).ran("true", most_s=60.0)
