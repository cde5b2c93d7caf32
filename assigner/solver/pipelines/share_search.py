"""Every plan of one pipeline: how its workers share stages, in which order a plan names them, and warm-up depths.

Shares are bounded by the price of the pipeline with them, depths by the simulated step in which each worker recomputes
what it must by itself. Every set that they may rematerialise together, and that is better for one of them, makes a
plan; where there are too many, the one that promises most does, and the bound stays below it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from assigner.errors import FormatError
from assigner.schedule.program import ActionKind
from assigner.schedule.replication import takes
from assigner.schedule.timing import Instead, step_s
from assigner.solver.limits import tuning
from assigner.solver.limits.tuning import TIE
from assigner.solver.methods.candidate import ENUMERATION
from assigner.solver.pipelines.simulated import falling
from assigner.solver.problem.stage_options import exactness
from assigner.solver.problem.stage_remat import with_remat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from assigner.formats.plan import Plan
    from assigner.solver.pipelines.shared import SharedCandidate
    from assigner.solver.pipelines.simulated import Depths, Pipeline
    from assigner.solver.problem.stage_options import StageOption
    from assigner.solver.problem.stage_remat import RematChoices


class ShareSearch:
    """The search over the plans of one pipeline after the other.

    Args:
        candidate: Whose pipelines these are: it prices, simulates and takes plans.
        actions: Simulated actions of workers that it may take.

    Attributes:
        actions: How many of these are left; none: it was stopped.
    """

    def __init__(self, candidate: SharedCandidate, actions: int) -> None:
        self._candidate, self.actions = candidate, actions
        self._target, self._times_steps = candidate.state.target, candidate.objective == "step"

    def least(self, pipeline: Pipeline) -> float:
        """No plan of the pipeline has a lower value; the best of them is offered. -inf: nothing is known."""
        if any(option.has_deeper for option in pipeline):
            return -math.inf
        found = self._target = self._candidate.state.target
        for shared in self.sharings(pipeline):
            if self._candidate.program.price(shared) < self._target:
                found = min(found, self._least(shared))
            if self.actions <= 0 or self._candidate.state.clock.left_s <= 0:
                self.actions = min(self.actions, 0)
                break
        return found if self.actions > 0 else -math.inf

    def sharings(self, pipeline: Pipeline) -> Iterator[Pipeline]:
        """The pipeline with every sharing for which no worker computes until the target, while actions are left."""
        for shared in itertools.product(*(list(self._ways(option)) for option in pipeline)):
            self.actions -= 1
            if self.actions <= 0:
                return
            yield shared

    def _ways(self, option: StageOption) -> Iterator[StageOption]:
        """A stage with every sharing for which no worker computes until the target."""
        if not option.shares:
            yield option
            return
        options = self._candidate.options
        members = options.sets[option.group]
        seconds = {group: options.seconds_of(option, group) for group in members}
        within = self._target - (option.behind_s if self._times_steps else 0.0)
        most = {group: int((each < within).nonzero()[0].max(initial=0)) for group, each in seconds.items()}
        for named, shares in sharings(members, most, self._candidate.micro_batches):
            self.actions -= 1
            if self.actions <= 0:
                return
            busiest = max(float(seconds[group][share]) for group, share in zip(named, shares, strict=True))
            yield replace(option, named=named, shares=shares, busiest_s=busiest)

    def _actions_of(self, shared: Pipeline) -> int:
        """What it takes to simulate a plan."""
        return 2 * self._candidate.micro_batches * sum(max(1, len(option.shares)) for option in shared)

    def _least(self, shared: Pipeline) -> float:
        """No plan with these shares has a lower value than this, or than the target."""
        found = self._target
        for depths in self._depths(shared):
            self.actions -= self._actions_of(shared)
            if self.actions <= 0 or self._candidate.state.clock.left_s <= 0:
                break
            found = min(found, self.value(shared, depths))
        return found

    def _depths(self, shared: Pipeline) -> Iterable[Depths]:
        """Every choice of warm-up depths; of the steady state, which is the same at any, the usual ones."""
        ranges = self._candidate.plans.ranges(shared)
        if not all(ranges):
            return ()
        if not self._times_steps:
            return (tuple(each.start for each in ranges),)
        exact = self._candidate.problem.exact
        return falling(ranges, self._candidate.micro_batches) if exact else itertools.product(*ranges)

    def value(self, shared: Pipeline, depths: Depths) -> float:
        """A lower bound of the value with these depths, whatever is recomputed; plans are offered."""
        groups = self._candidate.table.groups
        choices = self._choices(shared) if self._candidate.problem.rings_differ else [groups]
        if not choices:
            return min(self._value(shared, depths, groups), self._candidate.program.price(shared))
        self.actions -= self._actions_of(shared) * (len(choices) - 1)
        return min(self._value(shared, depths, each) for each in choices)

    def _choices(self, shared: Pipeline) -> list[tuple[tuple[str, ...], ...]]:
        """The workers of each group in the order in which stages take them: every choice; none: there are too many.

        It matters which are in a ring of three or more with others.
        """
        groups, sets = self._candidate.table.groups, self._candidate.options.sets
        stages = [Counter(option.named or sets[option.group]) for option in shared]
        taken = [
            [(each[group], len(each) > 1 and each.total() > 2) for each in stages if each[group]]
            for group in range(len(groups))
        ]
        most = tuning.MOST_CHOSEN
        ways = [list(itertools.islice(_orders(*group), most + 1)) for group in zip(groups, taken, strict=True)]
        return list(itertools.product(*ways)) if math.prod(map(len, ways)) <= most else []

    def _value(self, shared: Pipeline, depths: Depths, groups: Sequence[Sequence[str]]) -> float:
        """The same with these workers."""
        candidate, cost = self._candidate, self._candidate.problem.cost.apart
        bare, choices = candidate.plans.remat_choices(shared, depths, groups)
        if not all(each.sets for each in choices.values()):
            return math.inf
        least = -math.inf
        if self._times_steps:
            try:
                least = step_s(bare, cost, instead=self._alone(shared, bare, choices))
            except FormatError:  # two workers that must talk have no link, or a stage would wait for ever
                return math.inf
            if least >= self._target:
                return least
        every = all(each.every for each in choices.values())
        every &= math.prod(len(each.sets) for each in choices.values()) <= tuning.REMAT_PRICED
        tried = [each.sets if every else each.sets[:1] for each in choices.values()]
        value = math.inf
        for again in itertools.product(*tried):
            plan = with_remat(bare, dict(zip(choices, again, strict=True)))
            value = min(value, candidate.plans.offer_priced(plan, ENUMERATION))
            self.actions -= self._actions_of(shared)
        self.actions += self._actions_of(shared)
        if every and value < math.inf:
            return max(least, value * exactness(shared))
        return value if value <= least * (1 + TIE) else least

    def _alone(self, shared: Pipeline, bare: Plan, choices: Mapping[int, RematChoices]) -> Instead:
        """Backwards in which each worker recomputes what it must, and not what others must."""
        cost, size, seconds = self._candidate.problem.cost, bare.micro_batch_size, {}
        for n, each in choices.items():
            for worker, again_s in each.alone_s.items():
                once = sum(cost.partition(name, worker, size).backward_s for name in bare.stages[n].partitions)
                seconds[ActionKind.BACKWARD, n, worker] = once + again_s
        for n, option in enumerate(shared):
            if option.exactness < 1:
                seconds[ActionKind.BACKWARD, n, bare.stages[n].worker] = option.backward_s
        return Instead(seconds)


def _orders(members: Sequence[str], taken: Sequence[tuple[int, bool]]) -> Iterator[tuple[str, ...]]:
    """The ways to give stages some workers, as orders of these: how many each takes, and whether it matters which."""
    for dealt in _dealt(members, [count for count, matters in taken if matters]):
        rest = iter([each for each in members if not any(each in some for some in dealt)])
        chosen = iter(dealt)
        order = (next(chosen) if matters else tuple(itertools.islice(rest, count)) for count, matters in taken)
        yield tuple(itertools.chain.from_iterable(order))


def _dealt(members: Sequence[str], counts: Sequence[int]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to give stages so many of some workers each."""
    if not counts:
        yield ()
        return
    for chosen in itertools.combinations(members, counts[0]):
        for others in _dealt([each for each in members if each not in chosen], counts[1:]):
            yield (chosen, *others)


def sharings(
    members: Sequence[int], most: Mapping[int, int], micro_batches: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way in which workers can share the micro-batches of a stage, each once.

    Which of them a worker takes follows from the shares and from the order in which a plan names the workers
    (`schedule/replication.py`): ways that give each kind of worker the same ones are one.

    Args:
        members: The groups of the workers that share the stage.
        most: Of each group, how many micro-batches one of its workers carries.
        micro_batches: M; each worker takes one or more.

    Returns:
        The groups of the workers in the order in which a plan names them, and how many micro-batches each takes.
    """
    seen = set()
    for named in sorted(set(itertools.permutations(members))):
        for shares in _shares([most[group] for group in named], micro_batches):
            taken = _told_apart(named, takes(micro_batches, shares))
            if taken not in seen:
                seen.add(taken)
                yield named, shares


def _shares(most: Sequence[int], left: int) -> Iterator[tuple[int, ...]]:
    """Every way to share `left` among workers that each take one or more, and no more than they carry."""
    if len(most) == 1:
        if 1 <= left <= most[0]:
            yield (left,)
        return
    rest = most[1:]
    for share in range(max(1, left - sum(rest)), min(most[0], left - len(rest)) + 1):
        yield from ((share, *others) for others in _shares(rest, left - share))


def _told_apart(named: Sequence[int], taken: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Who takes each micro-batch, where like workers are numbered as they come."""
    numbers: dict[int, tuple[int, int]] = {}
    seen: Counter[int] = Counter()
    for worker in taken:
        if worker not in numbers:
            group = named[worker]
            numbers[worker] = group, seen[group]
            seen[group] += 1
    return tuple(numbers[worker] for worker in taken)
