"""The programs of a plan, for batches of any number of rows."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from assigner.formats.fineness import ANY
from assigner.runtime.headers import header_routes
from assigner.runtime.microbatch import micro_batch_count
from assigner.schedule.program import Program, build_forward_program, build_program

if TYPE_CHECKING:
    from assigner.formats.fineness import Fineness
    from assigner.formats.plan import Plan
    from assigner.model.marking import PartitionGraph
    from assigner.runtime.transport import Transport


_MOST_BUILT = 32


class Programs:
    """Programs that have been built, by number of rows or of micro-batches.

    Of those by rows the ones used last are kept, of those by micro-batches all: a batch has no more than planned. The
    transport goes on knowing the routes of one that was dropped, so that every rank numbers them alike for ever.

    Args:
        plan: What they execute.
        graph: The model's partitions.
        transport: Gets to know their routes; None: there are no other ranks.
        fineness: How finely the workload allows its batches to be cut.
    """

    def __init__(
        self, plan: Plan, graph: PartitionGraph, transport: Transport | None, fineness: Fineness = ANY
    ) -> None:
        self.plan, self.graph, self.transport, self.fineness = plan, graph, transport, fineness
        self._built: OrderedDict[int, Program] = OrderedDict()  # the one that was used last at the end
        self._counted: dict[tuple[int, bool], Program] = {}

    def training(self, rows: int) -> Program:
        """The program for a batch of so many rows: as many micro-batches as planned, or fewer where rows are few."""
        if rows in self._built:
            self._built.move_to_end(rows)
        else:
            count = micro_batch_count(rows, self.plan.micro_batches, self.plan.micro_batch_size, self.fineness)
            plan = self.plan.cut(count, -(-rows // count), batch_size=rows)
            self._built[rows] = self._known(build_program(plan, self.graph.edges, self.graph.ties))
            if len(self._built) > _MOST_BUILT:
                self._built.popitem(last=False)
        return self._built[rows]

    def counted(self, count: int, *, training: bool) -> Program:
        """The program for so many micro-batches of whatever size; without `training` their forwards alone."""
        if (count, training) not in self._counted:
            plan = self.plan.cut(count, 1, batch_size=count)
            edges, ties = self.graph.edges, self.graph.ties
            program = build_program(plan, edges, ties) if training else build_forward_program(plan, edges)
            self._counted[count, training] = self._known(program)
        return self._counted[count, training]

    def _known(self, program: Program) -> Program:
        if self.transport is not None:
            self.transport.know((*program.routes, *header_routes(self.graph, program)))
        return program
