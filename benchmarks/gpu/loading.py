"""Does what this host does for the first time wait for a stream that it does not use?

    CUDA_MODULE_LOADING=LAZY python benchmarks/gpu/loading.py kernel|matmul|allocation|pinned|"given back"

A kernel sleeps on a stream of its own, as one of NCCL's spins there for its peer. Prints the seconds that the host
took for what it did meanwhile, as JSON: about those of the sleep mean that it waited for it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SLEEP_S = 2.0
_TRIED_CYCLES = 10**8
_LARGE = 8 << 30


def cycles_of(seconds: float) -> int:
    """So many cycles the sleeping kernel takes for a time; it is loaded then."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(_TRIED_CYCLES)
    end.record()
    end.synchronize()
    return int(seconds * 1e3 / begin.elapsed_time(end) * _TRIED_CYCLES)


def main() -> None:
    """Sleep on one stream, act on the other."""
    what, device = sys.argv[1], torch.device("cuda", 0)
    made = torch.empty(256, 256, device=device)
    freed: list[torch.Tensor] = [torch.empty(_LARGE, dtype=torch.uint8, device=device)] if what == "given back" else []
    acts: dict[str, Callable[[], object]] = {
        "kernel": made.erfinv_,
        "matmul": lambda: torch.mm(made, made),
        "allocation": lambda: torch.empty(_LARGE, dtype=torch.uint8, device=device),
        "pinned": lambda: torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True),
        "given back": torch.cuda.empty_cache,
    }
    act, cycles = acts[what], cycles_of(SLEEP_S)
    freed.clear()
    other = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(cycles)
    begin = time.perf_counter()
    act()
    seconds = time.perf_counter() - begin
    torch.cuda.synchronize()
    print(json.dumps({"host_s": seconds, "sleep_s": SLEEP_S}))


if __name__ == "__main__":
    main()
