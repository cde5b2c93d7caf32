"""On two ranks: the links between them.

    torchrun --nproc-per-node 2 tests/runs/links.py FILE [--ordered]

With --ordered, on channels without tags, as between GPUs: gloo stands in for NCCL.
Rank r writes FILE.r: its links, what was said of all links, and how gloo's threads are scheduled.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from assigner.profiler.host import host_facts
from assigner.profiler.links import SweepOptions, measure_links
from assigner.runtime.messages import carriers, nccl

if TYPE_CHECKING:
    from assigner.formats.profile import Link

TIMEOUT_S = 60.0


def main(path: Path) -> None:
    if sys.argv[2:] == ["--ordered"]:
        nccl.GROUP_BACKEND = "gloo"
        nccl.direct_ranks = lambda *_: frozenset(range(2))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    cpu = torch.device("cpu")
    found: list[Link] = []
    wires = measure_links(
        [host_facts(cpu)] * 2, SweepOptions(largest=100_000, typical=20_000, timeout_s=TIMEOUT_S), cpu,
        wanted=lambda _source, _target: True, done=found.append, progress=lambda _done, _all: None,
    )  # fmt: skip
    policies = [os.sched_getscheduler(thread) for thread in carriers._threads("gloo_tcp_loop")]
    made = {"policies": policies, "links": [asdict(each) for each in found], "wires": [asdict(each) for each in wires]}
    path.with_suffix(f".{dist.get_rank()}").write_text(json.dumps(made))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
