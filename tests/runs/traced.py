"""On three ranks, in one process group: traces of plans of every shape.

    torchrun --nproc-per-node 3 tests/runs/traced.py FOLDER

Writes FOLDER/CASE.json: the trace of the last steps of a plan of `CASES`; and FOLDER/RANK.json: what this rank saw.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from assigner import Pipeline, UsageError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from workloads import graph_of, language, make_plan, skips, towers

CASES = {
    "gpipe": (skips, [(0, ["parts.0"]), (1, ["parts.1"]), (2, ["parts.2", "last"])], {}),
    "1f1b": (skips, [(2, ["parts.0"]), (1, ["parts.1", "parts.2"]), (0, ["last"])], {"schedule": "1f1b"}),
    "interleaved": (
        skips, [(0, ["parts.0"]), (1, ["parts.1"]), (0, ["parts.2"]), (2, ["last"])], {"schedule": "interleaved"},
    ),
    "tied": (
        language, [(2, ["tokens", "blocks.0"]), (0, ["blocks.1"]), (1, ["blocks.2", "head"])], {"remat": ["blocks.1"]},
    ),
    "branched": (towers, [(2, ["left"]), (0, ["right"]), (1, ["join"])], {}),
    "stages on several workers": (
        skips, [({0: 2, 1: 2}, ["parts.0"]), (2, ["parts.1"]), ({1: 1, 0: 3}, ["parts.2", "last"])], {},
    ),
    "a rank without a stage": (language, [(1, ["tokens"]), (2, ["blocks.0", "blocks.1", "blocks.2", "head"])], {}),
}  # fmt: skip
KEPT = 3
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def traced(name: str, path: Path) -> None:
    """Five steps of a case, of which the last three are kept; one more, of fewer rows, is not."""
    make, stages, options = CASES[name]
    made = make()
    with (
        Pipeline(made, make_plan(made, stages, **options), graph=graph_of(made)) as pipeline,
        pipeline.trace(path, last=KEPT),
    ):
        for n, rows in enumerate((8, 8, 8, 5, 8, 8)):
            pipeline.step(made.make_batch(rows, n))


def troubled(folder: Path) -> dict[str, Any]:
    """A refused trace and one that an exception ends; the pipeline goes on after both."""
    made = skips()
    found: dict[str, Any] = {}
    with Pipeline(made, make_plan(made, CASES["gpipe"][1]), graph=graph_of(made)) as pipeline:
        try:
            with pipeline.trace(folder / "gpipe.json"):
                found["entered"] = True
        except UsageError as error:
            found["refused"] = str(error)
        try:
            with pipeline.trace(folder / "broken.json"):
                pipeline.step(made.make_batch(8, 0))
                raise KeyError("the user's own")
        except KeyError:
            found["broken"] = (folder / "broken.json").exists()
        try:
            with pipeline.trace(folder / "empty.json"):
                pipeline.step(made.make_batch(7, 0))
                pipeline.step(made.make_batch(8, 0), update=False)
        except UsageError as error:
            found["empty"] = str(error)
        try:
            with patch.object(os, "fsync", side_effect=FULL), pipeline.trace(folder / "full.json"):
                pipeline.step(made.make_batch(8, 0))
                pipeline.step(made.make_batch(8, 1))
        except UsageError as error:
            found["full"] = str(error)
        with pipeline.trace(folder / "late.json"):
            pipeline.step(made.make_batch(8, 1))
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in CASES:
        traced(name, folder / f"{name}.json")
    dist.barrier()
    found = troubled(folder)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
