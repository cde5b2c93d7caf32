"""A partition's backward as a whole beside its two parts: processor seconds in turn, and bytes.

    python benchmarks/runtime/parts.py [--rounds 40] [--quick]

One thread. Four micro-batches run forward, then backward: all whole, or each as its input part, and its weight part
one micro-batch later. Each round has both, and gives a ratio; the table has the medians, with quartiles.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch

import assigner
from assigner.model.marking import partition_graph
from assigner.profiler.partitionbench import Workbench
from assigner.profiler.tasks import Point
from assigner.profiler.walk import collect_inputs

if TYPE_CHECKING:
    from assigner.profiler.partitionbench import PartitionBench

_CPU = torch.device("cpu")
_GPT = "examples/gpt.py:workload(width=192,blocks=3,batch_size=128)"
_RESNET = "examples/resnet.py:workload(batch_size=256)"
CASES = {
    "gpt, width 192, a block": (_GPT, "blocks.1", (1, 4, 16)),
    "gpt, width 192, head": (_GPT, "head", (16,)),
    "resnet, a block of the first group": (_RESNET, "blocks.1", (4, 16, 64)),
    "resnet, a block with a stride": (_RESNET, "blocks.2", (16, 64)),
}


def made(entry: str, name: str, rows: int) -> tuple[PartitionBench, float]:
    """A partition that is ready to run, and the bytes that it keeps from forward to backward."""
    workload = assigner.load_workload(entry)
    graph = partition_graph(workload)
    inputs = collect_inputs(workload, graph, [rows], _CPU, budget_bytes=1e9, wanted=[name])
    modules = graph.build([name], _CPU)
    workbench = Workbench(workload, graph, _CPU, modules, inputs, state_share=2.0, room=lambda: math.inf)
    point = Point(name, rows)
    bench = workbench.measured(point)
    return bench, workbench.held[point].activation_bytes


def whole_s(bench: PartitionBench) -> float:
    """Processor seconds of a backward."""
    for m in range(bench.depth):
        bench.forward(m)
    begin = time.process_time()
    for m in reversed(range(bench.depth)):
        bench.backward(m)
    return (time.process_time() - begin) / bench.depth


def parts_s(bench: PartitionBench) -> tuple[float, float]:
    """Of its input part, and of its weight part."""
    for m in range(bench.depth):
        bench.forward(m)
    spent = [0.0, 0.0]
    for m in reversed(range(-1, bench.depth)):
        begin = time.process_time()
        if m >= 0:
            bench.backward(m, split=True)
        between = time.process_time()
        if m + 1 < bench.depth:
            bench.backward_weight(m + 1)
        spent[0] += between - begin
        spent[1] += time.process_time() - between
    return spent[0] / bench.depth, spent[1] / bench.depth


def row(title: str, rows: int, bench: PartitionBench, kept: float, rounds: int) -> str:
    """One line of the table."""
    found = []
    for n in range(rounds + 3):
        turns = [lambda: (whole_s(bench),), lambda: parts_s(bench)]
        first, second = (turn() for turn in (turns if n % 2 else turns[::-1]))
        whole, parts = (first, second) if n % 2 else (second, first)
        found.append((*whole, *parts))
    del found[:3]  # the caches and the heap settle
    whole_ms, input_ms, weight_ms = (1e3 * statistics.median(each) for each in zip(*found, strict=True))
    low, middle, high = statistics.quantiles([(i + w) / b for b, i, w in found], n=4)
    cells = [title, str(rows), *(f"{each:.2f}" for each in (whole_ms, input_ms, weight_ms))]
    cells += [f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{kept / 1e6:.1f}", f"{bench.waiting_bytes(kept) / 1e6:.1f}"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="three rounds of the smallest sizes: does it work?")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write("| partition | rows | B ms | I ms | W ms | (I + W) / B (quartiles) | graph MB | waiting MB |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- | --- | --- |\n")
    for title, (entry, name, sizes) in CASES.items():
        for rows in sizes[:1] if given.quick else sizes:
            bench, kept = made(entry, name, rows)
            sys.stdout.write(row(title, rows, bench, kept, 3 if given.quick else given.rounds) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
