"""The ILP of 1F1B at one micro-batch count: a lower bound of the step that is linear in the stages chosen.

A column is a stage with what it recomputes, and the most micro-batches d that it may have in flight so. With
S the sum of all forwards, backwards and messages of one micro-batch, and u the update of the first stage, or
one that waits for a gradient which it shares,

    minimise  T
    work      for each position i, of the stage j over it:
              T >= u + all in front of j + sum over j of (M (f + b) + (M-1) busy) x[j]
    window    for each position i:
              T >= u + S + sum over j of max((M-1) b + (M-d) f, (M-1) f + (M-d) b) x[j]
    links     for each boundary:  T >= u + S + (M-1) max(c, c')

Exactly one column covers a position, so the maximum over the stages is a row for each position, and no row has to be
switched off. `OneFOneBStep` has the reasons for the bounds; left out is that every d-th forward waits for a backward.
Of a graph, only what lies on the spine is added up, and a row for each position has one worker's own work.

What a pipeline takes, at the best of its warm-up depths, the simulator says: a cut tells it to the model.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from assigner.solver.ilp.linear import add
from assigner.solver.ilp.pipelines import BACKWARD, FORWARD, PipelineModel

if TYPE_CHECKING:
    from assigner.solver.ilp.linear import Terms
    from assigner.solver.problem.stage_options import StageOption


class OneFOneBModel(PipelineModel):
    """A lower bound of 1F1B's step time; arguments as of `PipelineModel`."""

    def _objective(self) -> Terms:
        step: Terms = {self.problem.add_variable("T", 0): 1.0}
        covering, seconds = self.covering(), [self._seconds(column) for column in self.columns]
        ways: list[Terms] = [
            {},
            *(self.boundary(i, lambda hop: hop.forward_s + hop.backward_s) for i in range(1, self.n)),
        ]
        update = {self.x[j]: self._update(self.columns[j]) for j in self.first_columns(0)}
        whole = add(
            (1.0, dict(zip(self.x, map(sum, seconds), strict=True))), (1.0, update), *((1.0, way) for way in ways)
        )
        ending: dict[int, Terms] = defaultdict(dict)
        for x, column, each in zip(self.x, self.columns, seconds, strict=True):
            ending[column.last + 1][x] = sum(each)
        front = update
        for i in range(self.n):
            front = add((1.0, front), (1.0, ending[i]), (1.0, ways[i]))
            self.above(step, add((1.0, front), (1.0, {self.x[j]: self._work(self.columns[j]) for j in covering[i]})))
            self.above(step, add((1.0, whole), (1.0, {self.x[j]: self._window(self.columns[j]) for j in covering[i]})))
            if not self.table.problem.exact:
                self.above(step, {self.x[j]: self._alone(self.columns[j]) for j in covering[i]})
            longer = self.boundary(i, lambda hop: max(hop.forward_s, hop.backward_s)) if i else {}
            if longer:
                self.above(step, add((1.0, whole), (float(self.more), longer)))
        return step

    def _seconds(self, column: StageOption) -> tuple[float, float]:
        """A stage's forward and backward, in the model's unit; 0 off the spine."""
        forward, backward = self.table.spine_s(column)
        return forward / self.unit, backward / self.unit

    def _update(self, column: StageOption) -> float:
        exact = self.table.problem.exact or self._seconds(column)[1] > 0
        return column.behind_s / self.unit if exact else 0.0

    def _work(self, column: StageOption) -> float:
        """All micro-batches of a stage, and the least that its messages keep it busy meanwhile."""
        own = (self.more + 1) * sum(self._seconds(column))
        if not self.table.problem.exact:  # stages may run side by side
            return own
        busy = sum(self.least.left(column, way) + self.least.right(column, way) for way in (FORWARD, BACKWARD))
        return own + self.more * busy / self.unit

    def _alone(self, column: StageOption) -> float:
        return ((self.more + 1) * (column.forward_s + column.backward_s) + column.behind_s) / self.unit

    def _window(self, column: StageOption) -> float:
        """What a warm-up depth costs beyond one micro-batch's trip: forwards that wait for the first, or last, trip."""
        forward, backward = self._seconds(column)
        binds = self.table.problem.exact or (forward > 0 and backward > 0)
        later = max(0, self.more + 1 - column.bound_depth) if binds else 0
        return max(self.more * backward + later * forward, self.more * forward + later * backward)
