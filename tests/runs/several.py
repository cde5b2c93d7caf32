"""On three ranks: several pipelines of one process, in the run's process group and then in one of the script's own.

torchrun --nproc-per-node 3 tests/runs/several.py
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from failures import FATAL, MADE, PLAN, TRAP

from assigner import InfeasibleError, Pipeline, UsageError, WorkerError
from assigner.formats.prediction import Memory, Prediction, WorkerPrediction

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from workloads import Reference, graph_of, language, make_plan, skips

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner import AssignerError

EXACT = 1e-10
ONE, OTHER = skips(), language()
PARTS = [(0, ["parts.0", "parts.1"]), (1, ["parts.2"]), (2, ["last"])]
TURNED = [(2, ["parts.0", "parts.1", "parts.2", "last"])]
BLOCKS = [(2, ["tokens", "blocks.0"]), (1, ["blocks.1", "blocks.2", "head"])]


class Trained:
    """A pipeline, and the plain model beside it."""

    def __init__(self, made: Any, stages: Any, **settings: Any) -> None:
        self.made, self.reference, self.steps = made, Reference(made), 0
        self.pipeline = Pipeline(made, make_plan(made, stages), graph=graph_of(made), **settings)

    def step(self) -> None:
        batch = self.made.make_batch(8, self.steps)
        self.steps += 1
        assert abs(self.pipeline.evaluate(batch) - self.reference.loss(batch).item()) < EXACT
        assert abs(self.pipeline.step(batch) - self.reference.step(batch)) < EXACT
        assert self.reference.distance(self.pipeline.named_parameters()) < EXACT


def too_large(made: Any, stages: Any) -> Any:
    """A plan that needs more than its first worker has."""
    plan = make_plan(made, stages)
    worker = plan.workers[0]
    needs = WorkerPrediction(worker, 1.0, 0.0, 0.0, Memory(activations=2e6), 2e6, 1e6)
    return replace(plan, predicted=Prediction(1.0, 8.0, 0.0, (needs,), ()))


def refuses(kind: type[AssignerError], call: Callable[[], Any]) -> str:
    """What an error says that a call raises."""
    try:
        call()
    except kind as error:
        return error.message
    raise AssertionError("it was taken")


def by_turns() -> None:
    """Whichever is closed first; one leaves a rank out, one moves, and what all ranks refuse ends nothing."""
    first, second = Trained(ONE, PARTS), Trained(OTHER, BLOCKS)
    for _ in range(2):
        first.step()
        second.step()
        second.step()
    first.pipeline.move(make_plan(ONE, TURNED))
    first.step()
    second.step()
    refuses(InfeasibleError, lambda: Pipeline(OTHER, too_large(OTHER, BLOCKS), graph=graph_of(OTHER)))
    second.step()
    refuses(UsageError, lambda: Pipeline(ONE, make_plan(ONE, [*PARTS[:2], (3, ["last"])]), graph=graph_of(ONE)))
    first.step()
    refuses(InfeasibleError, lambda: first.pipeline.move(too_large(ONE, PARTS)))
    first.step()
    third = Trained(ONE, PARTS)
    first.pipeline.close()
    second.step()
    third.step()
    third.pipeline.close()
    second.step()
    second.pipeline.close()
    assert "it was closed" in refuses(UsageError, second.step)


def dropped() -> None:
    """One that is never closed: its memory is free, and others are made, called and closed beside it."""
    first = Trained(ONE, PARTS)
    first.step()
    gone = weakref.ref(next(iter(first.pipeline._installed.share.modules.values()), first.pipeline))
    del first
    gc.collect()
    assert gone() is None
    with Trained(OTHER, BLOCKS).pipeline as pipeline:
        pipeline.step(OTHER.make_batch(8, 0))


def trained() -> Trained:
    """On all three ranks."""
    return Trained(ONE, PARTS)


def trapped() -> Pipeline:
    """One that fails where a rank has armed its trap."""
    return Pipeline(MADE, PLAN, graph=graph_of(MADE))


def failing() -> None:
    """A failure of the one that was made last, or first: all have left, say so, and the next ones train."""
    for makers in (trained, trapped), (trapped, trained):
        made = {make: make() for make in makers}
        pipeline, other = made[trapped], made[trained]
        TRAP.update(armed=dist.get_rank() == 1, calls=0)
        with contextlib.suppress(ArithmeticError):
            for n in range(FATAL):
                pipeline.step(MADE.make_batch(8, n))
                other.step()
            raise AssertionError("it did not fail")
        TRAP.update(armed=False)
        for each in (pipeline, other.pipeline):
            said = refuses(UsageError, functools.partial(each.step, MADE.make_batch(8, 0)))
            assert "left its run: " in said
            assert "the trap snapped" in said
        pipeline.close()
        other.pipeline.close()
        again = trained()
        again.step()
        again.pipeline.close()


CALLS: list[Callable[[], Any]] = []
"""What a loss, a metric and a hook call."""


def calling(number: torch.Tensor, *_: object) -> torch.Tensor:
    for call in CALLS:
        call()
    return number.mean()


def calling_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return calling((outputs - targets).square())


def from_within() -> None:
    """What code within a step calls is refused on all ranks, before others take it for messages of the step."""
    for made in (replace(MADE, loss=calling_loss), replace(MADE, metrics={"mean": calling})):
        for name in ("share", "evaluate"):
            other = trapped()
            with contextlib.suppress(UsageError), Pipeline(made, PLAN, graph=graph_of(MADE)) as pipeline:
                batch = made.make_batch(8, 0)
                pipeline.step(batch)
                CALLS[:] = [functools.partial(getattr(other, name), *[batch] * (name == "evaluate"))]
                said = refuses(WorkerError if dist.get_rank() < 2 else UsageError, lambda: pipeline.step(batch))  # noqa: B023
                assert "a hook calls a pipeline at " in said, said
            CALLS.clear()
            other.close()


def main() -> None:
    by_turns()
    failing()
    from_within()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    by_turns()
    assert dist.is_initialized()
    dist.destroy_process_group()
    dropped()
    threads = [each.name for each in threading.enumerate() if each.name == "assigner-failure"]
    assert len(threads) == 1, threads


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "3"
    main()
