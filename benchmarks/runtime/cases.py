"""What is run: models, their micro-batches, and how long."""

from __future__ import annotations

from dataclasses import dataclass, replace

RANKS = 2


@dataclass(frozen=True)
class Case:
    """One model in so many micro-batches on two ranks, every partition a link of a chain.

    Two stages, or where the ranks have all of the model each (`data_parallel`) one, a micro-batch a rank.

    Args:
        name: For the tables.
        entry: The workload.
        micro_batches: Equal parts of its batch.
        rounds: How often every contender has its turn.
        steps: Steps of a turn.
        data_parallel: Whether each rank has all of the model.
    """

    name: str
    entry: str
    micro_batches: int
    rounds: int
    steps: int
    data_parallel: bool = False


_GPT = "examples/gpt.py:workload(width=192,context=64,blocks=10)"
_RESNET = "examples/resnet.py:workload(width=24)"
_TINY = "benchmarks/runtime/tiny.py:workload"

TINY = (Case("tiny, M=8", _TINY, 8, 40, 20), Case("tiny, M=32", _TINY, 32, 40, 5))
REAL = (Case("gpt", _GPT, 8, 16, 2), Case("resnet", _RESNET, 4, 16, 2))
SHARED = tuple(
    replace(case, name=f"{case.name}, data parallel", micro_batches=RANKS, data_parallel=True) for case in REAL
)
REMAT = Case("gpt, wide", "examples/gpt.py:workload(width=256,context=128,blocks=8,batch_size=16)", 8, 1, 2)
PREDICTED = replace(REAL[0], rounds=10)

QUICK = {
    _GPT: "examples/gpt.py:workload(width=32,heads=2,blocks=2,context=16)",
    _RESNET: "examples/resnet.py:workload(width=4,blocks_per_group=1,batch_size=8)",
    REMAT.entry: "examples/gpt.py:workload(width=64,heads=2,blocks=2,context=32)",
}
"""Models in place of the real ones that show that everything works, and nothing else."""
