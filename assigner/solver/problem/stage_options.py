"""The stages that can be placed: intervals of the order on like workers, with what each must rematerialise to fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from assigner.solver.limits import tuning
from assigner.solver.problem.memory import HeldPartitions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from assigner.schedule.cost import PartitionCost
    from assigner.solver.problem.interval_prices import Hop, IntervalPrices


@dataclass(frozen=True, slots=True)
class StageOption:
    """A stage that can be placed; times in seconds per micro-batch, the update's per step.

    Under 1F1B what a stage keeps in flight decides its memory and what it rematerialises: an option is an interval with
    what it rematerialises and the warm-up depths for which that is the least that fits. Under GPipe all micro-batches
    are in flight.

    Args:
        first: Position of its first partition.
        last: Position of its last.
        group: Number of the worker's group; where workers share the stage, of their replica set.
        forward_s: One forward.
        backward_s: One backward, with what is rematerialised; a lower bound where that may not be the best (memory.py).
        update_s: The optimizer's update, behind all that keeps the worker busy; where workers share the stage, with
            the reduction in front of it.
        rematerialise: Positions of the partitions that run forward again.
        least_depth: Micro-batches in flight, at least; fewer would fit with less recomputing.
        most_depth: The most micro-batches in flight that fit.
        bound_depth: The most that a bound must reckon with; `most_depth`, or M where deeper levels were left out.
        shares: Micro-batches of each worker that shares the stage, in the order of the set; empty: one has them all.
        busiest_s: What the busiest of them computes in a step, at least; 0: one has them all.
        named: The groups of these workers in the order in which a plan names them; empty: that of the set.
        tied_s: Least seconds from its last backward to the end of an update that waits for a gradient which it shares
            with another stage: that is sent at once, whatever else keeps the worker busy.
        exactness: `backward_s` by what it takes with what is rematerialised; 1: nothing that fits takes less. Always 1
            where workers share the stage: what they rematerialise is no part of the option (replica_options.py).
    """

    first: int
    last: int
    group: int
    forward_s: float
    backward_s: float
    update_s: float
    rematerialise: tuple[int, ...]
    least_depth: int
    most_depth: int
    bound_depth: int
    shares: tuple[int, ...] = ()
    busiest_s: float = 0.0
    named: tuple[int, ...] = ()
    tied_s: float = 0.0
    exactness: float = 1.0

    @property
    def behind_s(self) -> float:
        """Least seconds from its last backward to the end of an update."""
        return max(self.update_s, self.tied_s)

    @property
    def has_deeper(self) -> bool:
        """Whether deeper warm-ups may fit, for which no option stands."""
        return self.bound_depth > self.most_depth

    def pace_s(self, micro_batches: int) -> float:
        """Seconds between the ends of two micro-batches when the stage is busy."""
        return self.busiest_s / micro_batches if self.shares else self.forward_s + self.backward_s


def exactness(pipeline: Sequence[StageOption]) -> float:
    """So many times what a pipeline takes is no more than with anything else rematerialised that fits.

    By its stages of one worker: of those that workers share it holds with each set that they may rematerialise.
    """
    return min(option.exactness for option in pipeline)


class StageOptions:
    """The stage options of one schedule.

    Args:
        table: Prices.
        deep: True: from 1 to M micro-batches are in flight, as under 1F1B; False: all M, as under GPipe.
        relaxed: One option for an interval, of least recomputing and any warm-up: for bounds.
    """

    only_shared = False
    """Whether every pipeline of these options has a stage that several workers share."""

    def __init__(self, table: IntervalPrices, *, deep: bool, relaxed: bool = False) -> None:
        self.table, self._deep, self._relaxed = table, deep, relaxed
        self._least = 1 if deep else table.micro_batches
        self._ties = bool(table.problem.profile.ties)
        self._of_interval = cache(lambda *interval: tuple(self._levels(*interval)))

    @cached_property
    def sets(self) -> Sequence[tuple[int, ...]]:
        """Who may have a stage, by the number that options give: the groups of the workers; here one worker each."""
        return [(group,) for group in range(len(self.table.groups))]

    def hop(self, i: int, left: int, right: int) -> Hop | None:
        """Boundary i between stages of two sets; None: they cannot be neighbours."""
        return self.table.hop(i, left, right)

    def alone(self, option: StageOption) -> Sequence[StageOption]:
        """What each of a stage's workers computes by itself, recomputing least."""
        return [option]

    def usual(self, stages: int) -> int:
        """The schedule's own warm-up depth of a stage, itself the first of `stages` to the pipeline's end."""
        most = self.table.micro_batches
        return min(most, stages) if self._deep else most

    def count(self) -> int:
        """About how many options there are in all, those of deeper warm-ups left out."""
        rows = {id(row) for row in self.table.rows}
        return len(self.table.problem.order) ** 2 // 2 * len(rows)

    def _like(self, group: int) -> int:
        """The group whose options are this one's: links play a part only where gradients are shared."""
        return group if self._ties else self.table.like[group]

    def find(self, first: int, last: int, group: int, stages: int = 1) -> StageOption | None:
        """The option of an interval whose warm-up is the usual one, or as deep as fits; None: it does not fit."""
        levels, usual = self.levels(first, last, group), self.usual(stages)
        found = next((each for each in levels if each.most_depth >= usual), levels[-1] if levels else None)
        return found if found is None or found.group == group else replace(found, group=group)

    def levels_of(self, option: StageOption) -> Sequence[StageOption]:
        """The options of the same stage, the fewest in flight first; of one that workers share itself alone."""
        if option.shares:
            return [option]
        levels = self.levels(option.first, option.last, option.group)
        return [each if each.group == option.group else replace(each, group=option.group) for each in levels]

    def levels(self, first: int, last: int, group: int) -> tuple[StageOption, ...]:
        """The options of an interval on a worker of a group, or of a like one, the fewest in flight first."""
        problem = self.table.problem
        costs = self.table.rows[group][first : last + 1]
        torn = max(problem.apart[first : last + 1]) >= first
        if torn or None in costs or not (problem.may_cut[first] and problem.may_cut[last + 1]):
            return ()
        levels: tuple[StageOption, ...] = self._of_interval(first, last, self._like(group))
        return levels

    @cached_property
    def all(self) -> tuple[StageOption, ...]:
        """Every option.

        Raises:
            OutOfTime: the time is over.
        """
        starts = [first for first, may in enumerate(self.table.problem.may_cut[:-1]) if may]
        made: dict[int, tuple[StageOption, ...]] = {}
        found: list[StageOption] = []
        for group in range(len(self.table.groups)):
            self.table.problem.clock.check()
            like = self._like(group)
            if like not in made:
                made[like] = tuple(option for first in starts for option in self._from(first, like))
            found += made[like] if like == group else (replace(option, group=group) for option in made[like])
        return tuple(found)

    def _from(self, first: int, group: int) -> Iterator[StageOption]:
        """All intervals that start at `first`."""
        table, problem = self.table, self.table.problem
        capacity, row, workspace = table.capacity(group), table.rows[group], 0.0
        for last, (state, read, _) in enumerate(table.interval_bytes.grown(first), start=first):
            price = row[last]
            if price is None or problem.apart[last] >= first:
                return
            workspace = max(workspace, price.workspace_bytes)
            if state + workspace + self._least * read > capacity:
                return
            if problem.may_cut[last + 1]:
                problem.clock.check()  # the levels of one interval may take a second
                yield from self._of_interval(first, last, group)

    def _levels(self, first: int, last: int, group: int) -> Iterator[StageOption]:
        """The same interval with ever deeper warm-ups, as long as that costs recomputing."""
        table, problem, most = self.table, self.table.problem, self.table.micro_batches
        costs: Sequence[PartitionCost] = table.rows[group][first : last + 1]  # type: ignore[assignment]
        state, read, messages = table.interval_bytes.of(first, last)
        held = HeldPartitions.on(
            table.capacity(group), costs, problem.remat_rules[first : last + 1], state=state, read=read,
            messages=messages,
        )  # fmt: skip
        forward, backward = sum(each.forward_s for each in costs), sum(each.backward_s for each in costs)
        update, tied = sum(each.update_s for each in costs), table.tied_s(first, last, group)
        if math.isinf(tied):
            return
        in_flight = self._least
        for level in range(tuning.OPTION_LEVELS):
            again = problem.remat.least(held, in_flight, problem.clock)
            if again is None:
                return
            positions, deepest = again.positions, held.deepest(again.positions, in_flight, most)
            final = level == tuning.OPTION_LEVELS - 1 or self._relaxed
            yield StageOption(
                first, last, group, forward, backward + again.floor_s, update, tuple(first + i for i in positions),
                in_flight, deepest, most if final else deepest, tied_s=tied, exactness=again.exactness(backward),
            )  # fmt: skip
            in_flight = deepest + 1
            if in_flight > most or final:
                return
