"""One rank of run.py: every second step is traced.

Neighbours in time meet the same machine, so a pair of steps is what compares.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import assigner
from assigner.formats.plan import Plan
from assigner.formats.profile import WorkloadReference
from assigner.formats.stage import Stage
from assigner.formats.trace import load_trace
from assigner.model.marking import partition_graph
from assigner.runtime.recording.memory import MemoryGauge
from assigner.runtime.recording.recorder import Recorder
from assigner.schedule.program import Action, ActionKind

NOTES = 20_000
WARM_UP = 5
"""Pairs of steps that do not count."""


def equal_plan(entry: str, ranks: int, micro_batches: int) -> Plan:
    """As many partitions on every rank as on every other, one thread each."""
    workload = assigner.load_workload(entry)
    graph = partition_graph(workload)
    names = [piece.name for piece in graph.pieces]
    cuts = [len(names) * rank // ranks for rank in range(ranks + 1)]
    return Plan(
        workload=WorkloadReference(workload.name, entry, graph.fingerprint, workload.batch_size),
        micro_batches=micro_batches,
        micro_batch_size=-(-workload.batch_size // micro_batches),
        stages=tuple(Stage(f"worker:{n}/cpu", tuple(names[cuts[n] : cuts[n + 1]]), threads=1) for n in range(ranks)),
    )


def note_s() -> float:
    """Seconds of one action's note, memory included, with nothing between its start and its end."""
    gauge = MemoryGauge(torch.device("cpu"))
    recorder = Recorder(gauge, last=1)
    action = Action(ActionKind.FORWARD, 0, 0)
    seconds = []
    for _ in range(NOTES // 100):
        recorder.begin_step()
        begin = time.perf_counter()
        for _ in range(100):
            recorder.end(recorder.begin(action))
        seconds.append((time.perf_counter() - begin) / 100)
    gauge.close()
    return median(seconds)


def main() -> None:
    """Train, and write rank 0's step times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    plan = equal_plan(args.workload, args.ranks, args.micro_batches)
    workload = assigner.load_workload(args.workload)
    batch = workload.make_batch(workload.batch_size, seed=1)
    found: dict[str, dict[str, list[float]]] = {clock: {"off": [], "on": []} for clock in ("wall", "cpu")}
    with tempfile.TemporaryDirectory() as folder, assigner.Pipeline(workload, plan) as pipeline:
        path = Path(folder) / "trace.json"
        with pipeline.trace(path):
            recorder = pipeline._installed.executor.recorder
            for pair in range(-WARM_UP, args.pairs):
                for kind in ("off", "on") if pair % 2 else ("on", "off"):
                    pipeline._installed.executor.recorder = recorder if kind == "on" else None
                    begin = time.perf_counter(), time.process_time()
                    pipeline.step(batch)
                    end = time.perf_counter(), time.process_time()
                    if pair >= 0:
                        found["wall"][kind].append(end[0] - begin[0])
                        found["cpu"][kind].append(end[1] - begin[1])
        if pipeline.rank == 0:
            trace = load_trace(path)
            actions = max(len(worker.actions) for worker in trace.workers) / trace.steps
            args.out.write_text(json.dumps({**found, "actions": actions, "note_s": note_s()}))


if __name__ == "__main__":
    main()
