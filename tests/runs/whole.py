"""The whole model's state, and values that ranks share, on three ranks of which one has no stage.

    torchrun --nproc-per-node 3 tests/runs/whole.py FOLDER

Writes FOLDER/RANK.json: what this rank found, as answers that are true where all is well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from assigner import Pipeline, load_weights
from assigner.errors import UsageError

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the imports above: tests/assigner is no package

from whole_models import MODELS, plain_after
from workloads import graph_of, language, make_plan


def same(one: Any, other: Any, *, exact: bool = True) -> bool:
    """Equal values under equal keys."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) if exact else torch.allclose(one, other, rtol=0.0, atol=1e-10)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[key], exact=exact) for key, each in one.items())
    return bool(one == other)


def states(folder: Path, name: str) -> dict[str, bool]:
    """One model under a plan on ranks 0 and 2, and from where another pipeline takes it over."""
    rank = dist.get_rank()
    build, (one, other) = MODELS[name]
    made = build()
    plan = make_plan(made, [(2, one), (0, other)], micro_batches=1, remat=one)
    found: dict[str, bool] = {}
    with Pipeline(made, plan, graph=graph_of(made)) as pipeline:
        for n in range(2):
            pipeline.step(made.make_batch(8, n))
        on_one = pipeline.full_state_dict(to=1)
        everywhere = dict(pipeline.full_state_dict(to=None))
        found["only there"] = (on_one is None) == (rank != 1) and (on_one is None or same(dict(on_one), everywhere))
        found["as the plain model"] = same(everywhere, dict(plain_after(made, 2).state_dict()), exact=False)
        pipeline.save(folder / name)
        found["as the checkpoint"] = name == "transposed" or same(everywhere, load_weights(folder / name))
        pipeline.move(make_plan(made, [(1, one), (2, other)], micro_batches=1))
        found["after a move"] = same(everywhere, dict(pipeline.full_state_dict(to=None)))
        losses = [pipeline.step(made.make_batch(8, n)) for n in range(2, 4)]
    with Pipeline(made, make_plan(made, [(0, one), (1, other)], micro_batches=1), graph=graph_of(made)) as pipeline:
        pipeline.load(folder / name)
        found["trains on"] = losses == [pipeline.step(made.make_batch(8, n)) for n in range(2, 4)]
        if name != "growing":  # as in plain PyTorch: a buffer that was None is no key of a new model
            pipeline.load_state_dict(everywhere if rank == 2 else None)
            found["from the idle rank"] = same(everywhere, dict(pipeline.full_state_dict(to=None)))
            pipeline.step(made.make_batch(8, 2))
            pipeline.load_state_dict(everywhere if rank < 2 else None)
            found["from two ranks"] = same(everywhere, dict(pipeline.full_state_dict(to=None)))
    return found


def told(pipeline: Pipeline, state: dict[str, Any] | None) -> str:
    """What this rank is told of a state_dict that is refused."""
    try:
        pipeline.load_state_dict(state)
    except UsageError as error:
        return error.message
    return "nothing"


def decisions() -> dict[str, Any]:
    """Values from every rank, refusals on all, and the question whether to stop."""
    rank = dist.get_rank()
    made = language()
    found: dict[str, Any] = {}
    with Pipeline(
        made,
        make_plan(made, [(0, ["tokens", "blocks.0"]), (1, ["blocks.1", "blocks.2", "head"])]),
        graph=graph_of(made),
    ) as pipeline:
        value = {"n": 2**60 + 1, "pair": (1, None), "nan": [float("inf")], "t": torch.arange(6).view(2, 3).t()}
        for source in range(3):
            got = pipeline.share(value | {"from": source} if rank == source else object(), source=source)
            found[f"value of {source}"] = torch.equal(got.pop("t"), value["t"]) and got == {
                **{key: each for key, each in value.items() if key != "t"},
                "from": source,
            }
        try:
            pipeline.share({1, 2} if rank == 2 else None, source=2)
        except UsageError as error:
            found["refused"] = error.message
        large = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # several parts
        found["a large tensor"] = torch.equal(pipeline.share(large if rank == 1 else None, source=1), large)
        state = dict(pipeline.full_state_dict(to=None))
        other = {key: each + 1 for key, each in state.items()}
        found["they differ"] = told(pipeline, state if rank == 0 else other)
        found["one misses a key"] = told(pipeline, {} if rank == 2 else None)
        found["none"] = told(pipeline, None)
        found["unchanged"] = same(state, dict(pipeline.full_state_dict(to=None)))
        found["nobody stops"] = not any(pipeline.stop_requested() for _ in range(3))
        found["stops"] = (pipeline._member._stop.__setattr__("requested", rank == 2), pipeline.stop_requested())[1]
        pipeline.step(made.make_batch(8, 0))
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {name: states(folder, name) for name in MODELS}
    found["decisions"] = decisions()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
