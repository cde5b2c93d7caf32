"""The programs of a plan, for batches of any number of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.schedule import Program, build_program

if TYPE_CHECKING:
    from assigner.marking import PartitionGraph
    from assigner.plan import Plan
    from assigner.runtime.transport import Transport


class Programs:
    """Programs that have been built, by number of rows.

    Args:
        plan: What they execute.
        graph: The model's partitions.
        transport: Gets to know their routes; None: there are no other ranks.
    """

    def __init__(self, plan: Plan, graph: PartitionGraph, transport: Transport | None) -> None:
        self.plan, self.graph, self.transport = plan, graph, transport
        self._built: dict[int, Program] = {}

    def training(self, rows: int) -> Program:
        """The program for a batch of so many rows: as many micro-batches as planned, or fewer where rows are few."""
        if rows not in self._built:
            size = -(-rows // self.plan.micro_batches)
            plan = replace(
                self.plan,
                workload=replace(self.plan.workload, batch_size=rows),
                micro_batch_size=size,
                micro_batches=-(-rows // size),
            )
            program = build_program(plan, self.graph.edges, self.graph.ties)
            if self.transport is not None:
                self.transport.know(program.routes)
            self._built[rows] = program
        return self._built[rows]
