"""State from batch to batch on two ranks, beside a plain loop.

    torchrun --nproc-per-node 2 tests/runs/recurrence.py FOLDER

Writes FOLDER/RANK.json: what this rank found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from assigner import Pipeline
from assigner.errors import UsageError
from assigner.runtime.batch.recurrence import CarriedState

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after the import above: tests/assigner is no package

from recurrent_cases import PlainLoop, batches_of, feedback, train, words
from workloads import graph_of, make_plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_SENT: list[str] = []
_EXCHANGE = CarriedState._exchange


def _counted(self: CarriedState, wants: Iterable[Any]) -> None:
    """Note to whom this rank sends a part of the state."""
    transport = self._member.transport
    assert transport is not None
    put = transport.put_tensor

    def noted(tensor: torch.Tensor, target: int) -> None:
        _SENT.append(f"worker:{target}/cpu")
        put(tensor, target)

    transport.put_tensor = noted  # type: ignore[method-assign]
    try:
        _EXCHANGE(self, wants)
    finally:
        del transport.put_tensor


def main(folder: Path) -> None:
    """Run all of it."""
    CarriedState._exchange = _counted  # type: ignore[method-assign]
    found: dict[str, Any] = {"differences": {}, "sent": {}}
    back, here = feedback(), words()
    spread = {
        "made on the last, read on the first": (back, [(0, ["inlet"]), (1, ["middle", "outlet"])], "1f1b", 2),
        "made and read on the second": (here, [(0, ["encoder"]), (1, ["rnn", "decoder"])], "gpipe", 4),
        "made in the middle, which is the first": (
            here,
            [(1, ["encoder"]), (0, ["rnn"]), (1, ["decoder"])],
            "gpipe",
            2,
        ),
    }
    for case, (made, stages, schedule, count) in spread.items():
        plan = make_plan(made, stages, micro_batches=count, schedule=schedule)
        with Pipeline(made, plan, remat="always", graph=graph_of(made)) as pipeline:
            _SENT.clear()
            found["differences"][case] = train(pipeline, PlainLoop(made))
            found["sent"][case] = list(_SENT)
    plain = PlainLoop(back)
    plans = [
        make_plan(back, [(0, ["inlet"]), (1, ["middle", "outlet"])], micro_batches=3),
        make_plan(back, [(1, ["inlet", "middle"]), (0, ["outlet"])], micro_batches=2, schedule="1f1b"),
        make_plan(back, [(0, ["inlet", "middle", "outlet"])], micro_batches=4),
    ]
    with Pipeline(back, plans[0], graph=graph_of(back)) as pipeline:
        found["differences"]["before"] = train(pipeline, plain)
        pipeline.move(plans[1])
        found["differences"]["moved"] = train(pipeline, plain, first=20)
        pipeline.save(folder / "saved")
        pipeline.step(batches_of(back, 1, 90)[0])
    with Pipeline(back, plans[2], graph=graph_of(back)) as pipeline:
        pipeline.load(folder / "saved")
        found["differences"]["loaded"] = train(pipeline, plain, first=40)
        pipeline.move(plans[0])
        found["differences"]["moved again"] = train(pipeline, plain, first=60)
    rank = int(dist.get_rank()) if dist.is_initialized() else 0
    try:
        with Pipeline(back, plans[0], graph=graph_of(back)) as pipeline:
            rank = pipeline.rank
            pipeline.step(batches_of(back, 1)[0])
            if rank:
                pipeline.reset_carried()
            pipeline.step(batches_of(back, 1, 1)[0])
    except UsageError as error:
        found["reset on one rank"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
