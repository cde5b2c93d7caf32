"""One rank on one device: what its host waits for, what it keeps, and what it trains in other precisions.

    python benchmarks/gpu/onegpu.py waits|remat|bfloat16|float16|checkpoint|loops cuda:0 [SETTINGS]

Prints what was found as JSON. On `cpu` it runs too, so that it can be tried out; the figures then say nothing.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from assigner import Pipeline

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # after the import: tests/assigner is no package
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import gpt
from mixed_precision import make_workload
from workloads import language, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner import Workload
    from assigner.formats.plan import Plan

STEPS = 8
MICRO_BATCHES, ROUNDS = 4, 9


def placed(made: Workload, device: str) -> Plan:
    """All partitions on one device, in 4 micro-batches."""
    plan = make_plan(made, micro_batches=MICRO_BATCHES)
    return replace(plan, stages=tuple(replace(each, sole_worker=f"worker:0/{device}") for each in plan.stages))


def losses(pipeline: Pipeline, made: Workload, steps: int = STEPS) -> list[float]:
    """Those of some steps on one batch."""
    batch = made.make_batch(made.batch_size, 0)
    return [float(pipeline.step(batch)) for _ in range(steps)]


def waits(device: str) -> Any:
    """The waits of a step's host for its GPU, and where they are."""
    made = language()
    batch = made.make_batch(made.batch_size, 0)
    with Pipeline(made, placed(made, device)) as pipeline, warnings.catch_warnings(record=True) as caught:
        losses(pipeline, made, 3)
        warnings.simplefilter("always")
        caught.clear()
        watched = device.startswith("cuda")
        if watched:
            torch.cuda.set_sync_debug_mode("warn")
        pipeline.step(batch)
        if watched:
            torch.cuda.set_sync_debug_mode("default")
    found = [each for each in caught if "called a synchronizing" in str(each.message)]
    places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in found)
    return {"waits": len(found), "places": dict(places)}


def remat(device: str, given: str = "{}") -> Any:
    """The most that tensors took, by what is rematerialised, on a GPT; `given`: its settings, as JSON."""
    made, peaks = gpt.workload(**json.loads(given)), {}
    for mode in ("never", "except_last", "always"):
        gc.collect()  # the pipeline before is in circles
        with Pipeline(made, placed(made, device), remat=mode) as pipeline:  # type: ignore[arg-type]
            losses(pipeline, made, 2)
            if device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
            losses(pipeline, made, 2)
            peaks[mode] = torch.cuda.max_memory_allocated() if device.startswith("cuda") else 0
    return {"peaks": peaks}


def autocast(precision: str) -> Callable[[str], Any]:
    """Training under autocast; float16 with the scaler that the pipeline makes."""

    def run(device: str) -> Any:
        made = make_workload(autocast=precision)
        with Pipeline(made, placed(made, device)) as pipeline:
            return {"losses": losses(pipeline, made)}

    return run


def checkpoint(device: str) -> Any:
    """The loss where a checkpoint was saved, and on a CPU that has loaded it."""
    made = language()
    batch = made.make_batch(made.batch_size, 0)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        with Pipeline(made, placed(made, device)) as pipeline:
            losses(pipeline, made, 2)
            pipeline.save(saved)
            there = float(pipeline.evaluate(batch))
        with Pipeline(made, placed(made, "cpu")) as pipeline:
            pipeline.load(saved)
            here = float(pipeline.evaluate(batch))
    return {"device": there, "cpu": here}


def by_hand(made: Workload, device: str) -> Callable[[Any], float]:
    """A step of plain torch on a batch of the host's, in as many micro-batches."""
    torch.manual_seed(made.seed)
    model = made.model().to(device)
    optimizer = made.make_optimizer(model.named_parameters())

    def step(batch: Any) -> float:
        inputs, targets = (each.to(device, non_blocking=True).chunk(MICRO_BATCHES) for each in batch)
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for mine, wanted in zip(inputs, targets, strict=True):
            loss = made.compute_loss(model(mine), wanted) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return float(total)

    return step


def loops(device: str, given: str = "{}") -> Any:
    """Seconds of a step by hand and of the pipeline's, in turns, on a GPT; `given`: its settings, as JSON."""
    made = gpt.workload(**json.loads(given))
    batch = made.make_batch(made.batch_size, 0)
    with Pipeline(made, placed(made, device)) as pipeline:
        steps = {"hand": by_hand(made, device), "pipeline": pipeline.step}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for n in range(ROUNDS + 1):
            for name, step in steps.items():
                begin = time.perf_counter()
                for _ in range(STEPS):
                    float(step(batch))
                if n:  # the first round loads kernels
                    seconds[name].append((time.perf_counter() - begin) / STEPS)
    ratios = [mine / raw for mine, raw in zip(seconds["pipeline"], seconds["hand"], strict=True)]
    medians = {f"{name}_s": statistics.median(each) for name, each in seconds.items()}
    return {**medians, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


RUNS: dict[str, Callable[..., Any]] = {
    "waits": waits,
    "remat": remat,
    "bfloat16": autocast("bfloat16"),
    "float16": autocast("float16"),
    "checkpoint": checkpoint,
    "loops": loops,
}


def main(arguments: Sequence[str]) -> None:
    """Run one of them."""
    what, *given = arguments
    print(json.dumps(RUNS[what](*given)))


if __name__ == "__main__":
    main(sys.argv[1:])
