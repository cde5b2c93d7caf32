"""Processes that are killed while they save over a checkpoint, at every point and at random moments.

    python tests/runs/killed_saves.py FOLDER exchanged|renamed

Every element of the n-th checkpoint is n, and so is its count of steps: after each kill the name must hold one of
these, whole. `renamed` is a file system that cannot exchange two names: there the name may be gone, and then `load`
must name a folder that is whole. Writes how often the old one, the new one and none was found under the name.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from assigner import Pipeline, load_weights
from assigner.errors import UsageError
from assigner.runtime.checkpoints import swapping

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from workloads import graph_of, make_plan, skips

if TYPE_CHECKING:
    from collections.abc import Callable

EVENTS = ("open", "os.", "shutil.", "ctypes.")  # what Python announces before it touches files


def fill(pipeline: Pipeline, n: int) -> None:
    """Make the pipeline's state the n-th."""
    with torch.no_grad():
        for tensor in pipeline.state_dict().values():
            tensor.fill_(n)
    pipeline.steps = n


def number_of(folder: Path) -> int:
    """Which checkpoint stands there."""
    (n,) = {float(each) for tensor in load_weights(folder).values() for each in tensor.flatten().tolist()}
    assert json.loads((folder / "training.json").read_text())["steps"] == n
    return int(n)


def killed(work: Callable[[], None], wait_s: float | None = None) -> bool:
    """Do some work in a process of its own; whether it was killed, after `wait_s` or by itself."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    if wait_s is not None:
        time.sleep(wait_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def die_at(point: int) -> None:
    """Have this process be killed before it touches files for the point-th time from now."""
    left = point

    def hook(event: str, _: object) -> None:
        nonlocal left
        if event.startswith(EVENTS):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def find(pipeline: Pipeline, folder: Path) -> tuple[int, bool]:
    """The checkpoint that a user finds, if need be as the error tells; and whether it was under its name."""
    stood = folder.exists()
    try:
        pipeline.load(folder)
    except UsageError as error:
        assert not stood
        whole = [Path(each.removesuffix(" (whole)")) for each in words(error.hint) if each.endswith(" (whole)")]
        whole[0].rename(folder)
        pipeline.load(folder)
    assert pipeline.steps == number_of(folder)
    return pipeline.steps, stood


def words(hint: str | None) -> list[str]:
    assert hint is not None
    return hint.removeprefix("a save that was broken off left ").partition(": one that")[0].split(" and ")


def main(folder: Path, way: str) -> None:
    torch.set_num_threads(1)
    if way == "renamed":
        swapping._exchange = lambda *_: False
    made = skips()
    found = {"old": 0, "new": 0, "gone": 0}
    with Pipeline(made, make_plan(made), graph=graph_of(made)) as pipeline:
        fill(pipeline, 0)
        pipeline.save(folder)

        def save(n: int, point: int | None = None) -> None:
            fill(pipeline, n)
            if point is not None:
                die_at(point)
            pipeline.save(folder, force=True)

        def save_often(n: int) -> None:
            for each in range(1, 1000):
                save(n + each)

        def note(now: int, before: int, stood: bool) -> None:
            found["new" if now > before else "old"] += 1
            found["gone"] += not stood

        n, point = 0, 1
        while killed(functools.partial(save, n + 1, point)):
            now, stood = find(pipeline, folder)
            assert now in (n, n + 1)
            note(now, n, stood)
            n, point = now, point + 1
        n = number_of(folder)
        begun = time.monotonic()
        assert not killed(functools.partial(save, n + 1))
        took = time.monotonic() - begun
        draw = random.Random(3)
        for _ in range(8):
            n = number_of(folder)
            assert killed(functools.partial(save_often, n), took * draw.uniform(0.2, 3))
            now, stood = find(pipeline, folder)
            assert now >= n
            note(now, n, stood)
        pipeline.save(folder, force=True)
    assert [each.name for each in folder.parent.iterdir()] == [folder.name], "leftovers"
    sys.stdout.write(json.dumps({"points": point - 1, **found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
