"""One rank of a run: the peak memory of every contender, each in a process of its own.

    torchrun ... peak.py --entry ENTRY --micro-batches 8 --steps 3 --out FILE [--remat]

Every contender is forked from a process that has loaded torch and cut the model, and counts what it holds beyond that.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from chain import Chain
from contenders import Absent, Assigner, Contender, TorchGPipe, available

from assigner.runtime.recording.memory import MemoryGauge

if TYPE_CHECKING:
    from collections.abc import Callable

MODES = ("never", "except_last", "always")


def one_process(make: Callable[[], Contender]) -> Contender:
    """A contender that has no other rank: the launcher's variables are not for it."""
    rank = int(os.environ.pop("RANK"))
    return Absent() if rank else make()


def remat_contenders(chain: Chain) -> dict[str, Callable[[Chain], Contender]]:
    """The runtime on two ranks and in one process, torchgpipe in one process, in each mode of rematerialisation."""
    found: dict[str, Callable[[Chain], Contender]] = {}
    alone, shared = chain.plan("gpipe", workers=1), chain.plan("gpipe")
    for mode in MODES:
        found[f"assigner, a rank a stage, {mode}"] = functools.partial(Assigner, plan=shared, remat=mode)
        found[f"assigner, one process, {mode}"] = lambda chain, mode=mode: one_process(
            lambda: Assigner(chain, alone, remat=mode)
        )
        if importlib.util.find_spec("torchgpipe") is not None:
            found[f"torchgpipe, one process, {mode}"] = lambda chain, mode=mode: one_process(
                lambda: TorchGPipe(chain, checkpoint=mode)
            )
    return found


def measured(make: Callable[[Chain], Contender], chain: Chain, steps: int) -> int | None:
    """The peak of some steps beyond what this process holds now; None: the contender has no part here."""
    gauge = MemoryGauge(torch.device("cpu"))
    gauge.reset_peak()
    before, peak = gauge.held(), gauge.peak()
    assert before is not None, "this system does not tell what a process holds"
    contender = make(chain)
    for _ in range(steps):
        contender.step()
    peak = gauge.peak()
    assert peak is not None, "this system does not tell a process's peak"
    if isinstance(contender, Assigner):
        contender.pipeline.close()
    return None if isinstance(contender, Absent) else peak - before


def join(name: str) -> None:
    """Be a rank of a process group under this name, once all are: one that ended before would cut off the others."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(*address, is_master=False)  # type: ignore[attr-defined]
    store = dist.PrefixStore(name, server)  # type: ignore[attr-defined]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    store.set(f"joined {rank}", "")
    store.wait([f"joined {each}" for each in range(ranks)])


def forked(make: Callable[[Chain], Contender], chain: Chain, steps: int, name: str, *, alone: bool) -> int | None:
    """`measured` in a fork of this process; unless `alone`, in a process group of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            if not alone:
                join(name)
            os.write(write, json.dumps(measured(make, chain, steps)).encode())
            os._exit(0)
        except BaseException:  # noqa: BLE001 (the fork must not go on as if it were its parent)
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{name}: ended with {os.waitstatus_to_exitcode(status)}")
    found: int | None = json.loads(said)
    return found


def main() -> None:
    """Measure all; every rank writes its own file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--entry", required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--remat", action="store_true", help="the modes of rematerialisation instead of the schedules")
    parser.add_argument("--data-parallel", action="store_true", help="each rank has all of the model")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads does not outlive a fork
    rank = int(os.environ["RANK"])
    chain = Chain(args.entry, args.micro_batches, int(os.environ["WORLD_SIZE"]))
    contenders = remat_contenders(chain) if args.remat else available(data_parallel=args.data_parallel)
    _ = chain.graph, chain.batch
    gc.collect()
    found = {}
    for name, make in contenders.items():
        if not rank:
            print(f"memory: {name}", file=sys.stderr, flush=True)
        alone = args.remat and "one process" in name  # else its other rank takes part, and does nothing
        found[name] = forked(make, chain, args.steps, name, alone=alone)
    (args.out / f"peak-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
