"""The cases of tests/training_cases.py on three ranks, all of which train or one of which idles.

    torchrun --nproc-per-node 3 tests/runs/training.py FOLDER [every]

Writes FOLDER/RANK.json: case -> placement -> what this rank found; and what else only several ranks can show.
`every`: all cases where a rank idles, with every optimizer and scheduler, and nothing else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from assigner import Pipeline
from assigner.errors import UsageError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from training_cases import CASES, PARTED, SCALED, make_scaler, optimizers, overflowing, schedulers
from workloads import graph_of, language, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from assigner.formats.plan import Plan
    from assigner.model.workload import Workload


THINNED = {
    "optimizers": lambda place: optimizers(place, PARTED),
    "schedulers": lambda place: schedulers(place, in_turn=True),
}
"""Cases that run where a rank idles, without what a plan cannot change."""
TWICE = ("clipping", "scaling")
"""Cases that run there too: what is not there has a norm, and nothing that overflows."""


def spread(made: Workload, **given: Any) -> Plan:
    """On all three ranks, in another order than theirs."""
    names = [piece.name for piece in graph_of(made).pieces]
    stages = [(2, names[:1]), (0, names[1:2]), (1, names[2:])]
    return make_plan(made, stages, remat=names[1:2], **given)


def in_turn(made: Workload) -> Plan:
    """The same under 1F1B."""
    return spread(made, schedule="1f1b", micro_batches=3)


def one_idle(made: Workload) -> Plan:
    """On two ranks; the first has nothing."""
    names = [piece.name for piece in graph_of(made).pieces]
    return make_plan(made, [(1, names[:2]), (2, names[2:])], schedule="1f1b", micro_batches=3)


def alike() -> dict[str, Any]:
    """Numbers that every rank must have alike, though only one of them overflows."""
    made = overflowing()
    with Pipeline(made, spread(made), scaler=make_scaler(), graph=graph_of(made)) as pipeline:
        norms, scales = [], []
        for n in range(6):
            pipeline.step(made.make_batch(8, n), update=False)
            finite = all(bool(each.isfinite().all()) for each in pipeline.gradients().values())
            norms.append(str(pipeline.clip_grad_norm_(1e300)))
            pipeline.optimizer.step()
            pipeline.optimizer.zero_grad()
            scales.append([pipeline.scaler.get_scale(), pipeline.steps])
            if n == 0:
                first_finite = finite
        return {"norms": norms, "scales": scales, "first finite": first_finite}


def not_finite() -> str:
    """`error_if_nonfinite` raises on every rank, and the run goes on."""
    made = overflowing()
    with Pipeline(made, spread(made), scaler=make_scaler(), graph=graph_of(made)) as pipeline:
        pipeline.step(made.make_batch(8, 0), update=False)
        try:
            pipeline.clip_grad_norm_(1.0, error_if_nonfinite=True)
        except UsageError as error:
            pipeline.optimizer.step()
            assert pipeline.steps == 0
            return str(error)
    return "none"


def by_hand() -> dict[str, str]:
    """What a script does to its rank's parameters or their gradients before the update: what is said to it."""
    made = language()

    def by_one_norm(parameters: list[torch.nn.Parameter]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1e-3)

    def each_by_its_norm(parameters: list[torch.nn.Parameter]) -> None:
        for each in parameters:
            torch.nn.utils.clip_grad_norm_([each], 1e-3)

    def all_alike(parameters: list[torch.nn.Parameter]) -> None:
        for each in parameters:
            assert each.grad is not None
            each.grad.mul_(1 / 3)

    def each_rank_by_a_number(parameters: list[torch.nn.Parameter]) -> None:
        for each in parameters:
            assert each.grad is not None
            each.grad.mul_((0.3, 0.7, 1.0)[dist.get_rank()])

    def told(way: Callable[[list[torch.nn.Parameter]], None], again: Callable[[Pipeline], Any]) -> str:
        with Pipeline(made, spread(made), graph=graph_of(made)) as pipeline:
            pipeline.step(made.make_batch(8, 0), update=False)
            way([each for _, each in pipeline.named_parameters()])
            try:
                again(pipeline)
                pipeline.optimizer.step()
            except UsageError as error:
                return error.message
            return f"{pipeline.steps} update"

    def climb(parameters: list[torch.nn.Parameter]) -> None:
        norm = torch.stack([each.grad.norm() for each in parameters if each.grad is not None]).norm()
        with torch.no_grad():
            for each in parameters:
                assert each.grad is not None
                each.add_(each.grad * (0.05 / norm))

    def climb_each(parameters: list[torch.nn.Parameter]) -> None:
        for each in parameters:
            climb([each])

    def another_step(pipeline: Pipeline) -> None:
        pipeline.optimizer.zero_grad()
        pipeline.step(made.make_batch(8, 0), update=False)

    ways = (by_one_norm, each_by_its_norm, all_alike, each_rank_by_a_number)
    found = {way.__name__: told(way, lambda _: None) for way in ways}
    for way in (climb, climb_each):
        found[way.__name__] = told(way, another_step)
    found["between"] = told(by_one_norm, lambda pipeline: pipeline.step(made.make_batch(8, 1), update=False))

    def applied_twice(pipeline: Pipeline) -> None:
        pipeline.optimizer.step()
        by_one_norm([each for _, each in pipeline.named_parameters()])

    found["twice"] = told(lambda _: None, applied_twice)
    return found


def one_scaler() -> dict[str, Any]:
    """A scaler that disabled itself on some ranks, as "cuda" does without a GPU; then one that is set otherwise."""
    made, rank = overflowing(), dist.get_rank()
    mine = make_scaler() if rank == 1 else torch.amp.GradScaler("cpu", enabled=False)
    with Pipeline(made, spread(made), scaler=mine, graph=graph_of(made)) as pipeline:
        losses = [pipeline.step(made.make_batch(8, n)) for n in range(SCALED)]
        found = {"losses": losses, "state": pipeline.scaler.state_dict(), "steps": pipeline.steps}
    try:
        Pipeline(
            made, spread(made), scaler=torch.amp.GradScaler("cpu", growth_interval=5 + rank // 2), graph=graph_of(made)
        )
    except UsageError as error:
        return {**found, "error": error.message}
    return found


def checkpoint(folder: Path) -> dict[str, Any]:
    """Scheduler, scaler and data position go on under another placement, where another rank has nothing."""
    made = language()
    losses: dict[str, list[float]] = {"expected": [], "found": []}

    def scheduled(pipeline: Pipeline) -> Any:
        return torch.optim.lr_scheduler.MultiStepLR(pipeline.optimizer, [2, 4], gamma=0.5)

    def go_on(pipeline: Pipeline, scheduler: Any, key: str) -> list[float]:
        for n in range(3, 6):
            losses[key].append(pipeline.step(made.make_batch(8, n)))
            scheduler.step()
        return [group["lr"] for group in pipeline.optimizer.param_groups]

    with Pipeline(made, spread(made), scaler=make_scaler(), graph=graph_of(made)) as pipeline:
        scheduler = scheduled(pipeline)
        for n in range(3):
            pipeline.step(made.make_batch(8, n))
            scheduler.step()
        pipeline.save(folder, state={"scheduler": scheduler.state_dict(), "position": (3, "train")})
        scale = pipeline.scaler.get_scale()
        rates = go_on(pipeline, scheduler, "expected")
    with Pipeline(made, one_idle(made), scaler=make_scaler(), graph=graph_of(made)) as pipeline:
        scheduler = scheduled(pipeline)
        state = pipeline.load(folder)
        scheduler.load_state_dict(state["scheduler"])
        assert state["position"] == (3, "train")
        assert pipeline.scaler.get_scale() == scale
        same = go_on(pipeline, scheduler, "found") == rates
    differences = [abs(a - b) for a, b in zip(losses["expected"], losses["found"], strict=True)]
    return {"loss": max(differences), "same rates": same}


def handle() -> dict[str, Any]:
    """State by name, put together from all ranks, loads under another placement."""
    made = language()
    states: list[Any] = [None] * 3
    with Pipeline(made, spread(made), graph=graph_of(made)) as pipeline:
        for n in range(2):
            pipeline.step(made.make_batch(8, n))
        weights: list[Any] = [None] * 3
        dist.all_gather_object(states, pipeline.optimizer.state_dict())
        dist.all_gather_object(weights, {name: each.detach() for name, each in pipeline.named_parameters()})
        expected = pipeline.step(made.make_batch(8, 2)), pipeline.step(made.make_batch(8, 3))
    together = {name: each for state in states for name, each in state["state"].items()}
    with Pipeline(made, one_idle(made), graph=graph_of(made)) as pipeline:
        for name, parameter in pipeline.named_parameters():
            parameter.data.copy_(next(held[name] for held in weights if name in held))
        pipeline.optimizer.load_state_dict({"state": together, "param_groups": states[0]["param_groups"]})
        found = pipeline.step(made.make_batch(8, 2)), pipeline.step(made.make_batch(8, 3))
    return {
        "loss": max(abs(a - b) for a, b in zip(expected, found, strict=True)),
        "groups alike": all(state["param_groups"] == states[0]["param_groups"] for state in states),
        "names": sorted(together),
    }


def usual(folder: Path) -> dict[str, Any]:
    """All cases, two of them thinned; where a rank idles, some."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        once = (in_turn,) if name in ("accumulation", "weights", "frozen", "sparse") else (spread,)
        places = (one_idle,) if name in THINNED else (spread, one_idle) if name in TWICE else once
        found[name] = {place.__name__: THINNED.get(name, case)(place) for place in places}
    found |= {"alike": alike(), "not finite": not_finite(), "by hand": by_hand(), "handle": handle()}
    found["one scaler"] = one_scaler()
    found["checkpoint"] = checkpoint(folder / "checkpoint")
    return found


def main(folder: Path, every: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: {"one_idle": case(one_idle)} for name, case in CASES.items()} if every else usual(folder)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), every=sys.argv[2:] == ["every"])
