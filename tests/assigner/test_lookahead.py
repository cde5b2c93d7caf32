"""Receives of small messages are posted earlier than those of large ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree
from workloads import graph_of, language, make_plan

from assigner.runtime.batch.microbatch import MicroBatch
from assigner.runtime.step.stepmessages import posted_ahead
from assigner.schedule.program import build_program


def micro_batch(rows: int) -> MicroBatch:
    return MicroBatch([torch.zeros(rows)], pytree.tree_structure(0), None, 1.0, rows, rows)


@pytest.mark.parametrize(
    ("bytes_per_sample", "rows", "ahead"), [(64.0, (2, 2), 4), (1e6, (2, 2), 2), (1e5, (2, 1), 4), (1e5, (3, 1), 2)]
)
def test_it_depends_on_the_largest_message(bytes_per_sample, rows, ahead):
    """One large value that a worker receives is enough; the micro-batches say how large, not the program's plan."""
    graph = graph_of(language())
    values = dict(graph.values)
    last = max(values, key=lambda value: graph.pieces.index(graph.piece[value.partition]) if value.partition else -1)
    values[last] = replace(values[last], bytes_per_sample=bytes_per_sample)
    graph = replace(graph, values=values)
    names = [piece.name for piece in graph.pieces]
    program = build_program(make_plan(language(), [(0, names[:-1]), (1, names[-1:])]), graph.edges, graph.ties)
    cut = [micro_batch(each) for each in rows]
    assert posted_ahead(graph, program, "worker:1/cpu", cut) == ahead
    assert posted_ahead(graph, program, "worker:2/cpu", cut) == 4
