"""How a plan holds up where the measurements were off: its step time, and how far behind the best it falls.

    profile ── slow_end ──────────────── step time of the plan
            └─ resampled, n times ─┬──── step times of the plan: 5 %, 50 %, 95 %
                                   └──── regret: the plan against the best plan that was found for the draw

Pricing a draw is quick, solving for it is not: of all draws that are priced, the first ones are solved again, as many
as there is time for. None is solved to a proof. Its best plan is the best of: the chosen plan, those baselines that the
search could have found (one stage a worker, unless several are asked for), what the rival finds for this draw, and what
it found for all others. So the true regret is at least what is told, and the true share of draws in which the plan is
near the best at most. Rivals are good plans, found quickly and without proof, each in every draw, whichever it was
found for.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from assigner.errors import UsageError
from assigner.formats.terms import Objective
from assigner.schedule.cost import CostModel
from assigner.schedule.objective import compared_value
from assigner.schedule.simulate import check_fit, priced
from assigner.schedule.timing import step_s
from assigner.solver import solve
from assigner.solver.baselines import find_baselines
from assigner.solver.limits import tuning
from assigner.solver.limits.clock import SolveClock
from assigner.solver.problem.hints import resolve
from assigner.solver.problem.options import ScheduleChoice, SolveOptions
from assigner.solver.problem.problem import Problem
from assigner.solver.robust.spreads import Coverage, resampled, slow_end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.solver.problem.answer import Progress, Solution

    Rival = Callable[[Profile], Plan | None]
    """From a drawn profile to a plan that may be better there than the chosen one; None: none was found."""

DRAWS = 100
WITHIN = 0.02
TIME_LIMIT_S = 60.0


@dataclass(frozen=True)
class Robustness:
    """How a plan holds up.

    Args:
        objective: What the regrets compare.
        schedule: The choice of schedules: the plan is held against plans of the same scope as its proof.
        max_replicas: How many workers may share a stage, as in the options; None: any number.
        step_s: The plan's step at the medians.
        slow_end_s: Its step with every measurement at its upper quartile.
        steps_s: Its step in each draw, in the order of the draws.
        regrets: How much worse it is than the best plan that was found, as a share of that one's value, in each of the
            draws that were solved again: the first ones.
        asked: Draws asked for; there are fewer where the time limit or an interruption came first.
        within: The regret up to which the plan counts as near the best.
        seed: Of the draws.
        coverage: How many of the measurements have a spread.
        seconds: Wall time of all this.
    """

    objective: Objective
    schedule: ScheduleChoice
    max_replicas: int | None
    step_s: float
    slow_end_s: float
    steps_s: tuple[float, ...]
    regrets: tuple[float, ...]
    asked: int
    within: float
    seed: int
    coverage: Coverage
    seconds: float

    @property
    def priced(self) -> int:
        """Draws in which the plan was priced, one or more."""
        return len(self.steps_s)

    @property
    def compared(self) -> int:
        """Draws that were solved again, one or more."""
        return len(self.regrets)

    @property
    def near_best(self) -> int:
        """Draws, of those compared, in which the plan is within `within` of the best plan found."""
        return sum(regret <= self.within for regret in self.regrets)

    @property
    def share(self) -> float:
        """`near_best` as a share of the draws compared."""
        return self.near_best / self.compared

    @property
    def worst_regret(self) -> float:
        """The largest regret; inf: there the plan breaks a limit of the step time that another one keeps."""
        return max(self.regrets)

    def step_quantile_s(self, share: float) -> float:
        """The step time that `share` of the draws priced stay below, linear between two of them."""
        return _quantile(self.steps_s, share)

    def regret_quantile(self, share: float) -> float:
        """The regret that `share` of the draws compared stay below."""
        return _quantile(self.regrets, share)


def solve_robust(
    profile: Profile,
    options: SolveOptions,
    *,
    progress: Callable[[Progress], None] | None = None,
    draws_progress: Callable[[int, int], None] | None = None,
) -> tuple[Solution, Robustness]:
    """The best plan for the slow end of the measurements, and how it holds up; arguments and errors as of `solve`.

    The time limit holds for the search and for the draws, each; `draws_progress` is as of `assess`.

    Returns:
        The solution: its plan and baselines are priced at the medians, its solver report at the slow end, at which it
        was solved (the report's options say so: `robust`). And the assessment.

    Raises:
        As `solve`.
    """
    if options.objective == "cost":
        raise UsageError("robust goes with objectives step, throughput and latency", hint="leave out one of the two")

    solution = solve(slow_end(profile), options, progress=progress)
    assert solution.plan.solver is not None
    resolved, plain = resolve(profile, options)
    plan = replace(
        priced(solution.plan, profile),
        solver=replace(solution.plan.solver, options={**solution.plan.solver.options, "robust": True}),
        baselines=tuple(each.row for each in find_baselines(Problem(resolved, plain, CostModel(resolved)))),
    )
    found = assess(plan, profile, options=options, time_limit=options.time_limit, progress=draws_progress)
    return replace(solution, plan=plan), found


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low if low == high else low + (at % 1) * (high - low)  # both may be inf


def assess(
    plan: Plan,
    profile: Profile,
    *,
    options: SolveOptions | None = None,
    rival: Rival | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    time_limit: float = TIME_LIMIT_S,
    progress: Callable[[int, int], None] | None = None,
) -> Robustness:
    """Price a plan at the slow end of its measurements and in random draws of them, against the best plan of each draw.

    The same plan, profile, options and seed give the same answer, unless the time runs short. KeyboardInterrupt returns
    what is known so far, if one draw was solved again. Memory does not vary: what fits at the medians, as the plan
    does, fits in every draw.

    `options` are what the plan was solved with: objective and hints hold for baselines and rivals too. Of `draws`, 1 or
    more, one is made where nothing varies. A `rival` (None: `resolver`) makes a plan for a draw that may be better
    there, or None. Behind `time_limit` seconds no further draw is solved again, but the first always is; pricing the
    draws takes at most a quarter of them. `progress` is called with (draws solved again, draws in all) after each.

    Raises:
        UsageError: options that do not fit the profile.
        FormatError: plan and profile do not fit together.
    """
    clock, pricing = SolveClock(time_limit), SolveClock(time_limit / 4)
    profile, options = resolve(profile, options or SolveOptions())
    check_fit(plan, profile)
    coverage = Coverage.of(profile)
    numbers = random.Random(seed)  # noqa: S311 - a simulation, not a secret
    seeds = [numbers.getrandbits(32) for _ in range(draws if coverage.varies else 1)]
    steps = _steps_s(plan, profile, seeds, pricing)
    plans, compared = [plan], list[Draw]()
    try:
        simple = find_baselines(Problem(profile, options, CostModel(profile)))
        plans += (each.plan for each in simple if each.plan is not None and options.searches(each.plan))
        rival = rival or resolver(plan, options)
        for number in seeds[: len(steps)]:
            if compared and clock.over:
                break
            drawn = resampled(profile, number)
            cost, found = CostModel(drawn), rival(drawn)
            if found is not None and not any(_same(found, other) for other in plans):
                plans.append(found)
            draw = Draw(cost, frozenset(options.counts(cost)))
            for each in (*compared, draw):
                each.price(plans, options)
            compared.append(draw)
            if progress is not None:
                progress(len(compared), len(steps))
    except KeyboardInterrupt:
        if not compared:
            raise
    return Robustness(
        objective=options.objective,
        schedule=options.schedule,
        max_replicas=options.max_replicas,
        step_s=step_s(plan, CostModel(profile)),
        slow_end_s=step_s(plan, CostModel(slow_end(profile))),
        steps_s=steps,
        regrets=tuple(draw.regret for draw in compared),
        asked=len(seeds),
        within=WITHIN,
        seed=seed,
        coverage=coverage,
        seconds=clock.elapsed_s,
    )


def _steps_s(plan: Plan, profile: Profile, seeds: Sequence[int], clock: SolveClock) -> tuple[float, ...]:
    """The plan's step in each draw, in seconds; once time is over no further one begins, but the first always does."""
    steps: list[float] = []
    for seed in seeds:
        if steps and clock.over:
            break
        steps.append(step_s(plan, CostModel(resampled(profile, seed))))
    return tuple(steps)


def resolver(plan: Plan, options: SolveOptions) -> Rival:
    """Solve again for a draw, as far as the solver's first plans: what its dynamic programs and local search find.

    The chosen plan is the first one to beat, which leaves out what is proven not to beat it. Looked at are all
    schedules that the options allow, at the plan's number of micro-batches and the next smaller and larger one.

    The options are resolved (hints.py).
    """
    from assigner.solver.methods.candidate import GIVEN, Proposal
    from assigner.solver.search.search import Search

    hasty = replace(options, gap=0.0, time_limit=min(tuning.RESOLVE_S, options.time_limit))

    def rival(drawn: Profile) -> Plan | None:
        search = Search(drawn, hasty)
        value = value_of(plan, options, search.problem.cost)
        search.state.best = Proposal(plan, value, GIVEN) if math.isfinite(value) else None
        search.run_hastily(neighbours(plan.micro_batches, sorted({each.micro_batches for each in search.candidates})))
        return None if search.state.best is None else search.state.best.plan

    return rival


def neighbours(number: int, offered: Sequence[int]) -> Sequence[int]:
    """Of growing numbers, the one asked for with the next smaller and larger one, as far as they are offered."""
    at = bisect_left(offered, number)
    return offered[max(0, at - 1) : at + 2]


def value_of(plan: Plan, options: SolveOptions, cost: CostModel) -> float:
    """What a search with these options compares, the less the better; inf where the step is longer than asked for."""
    step, most = step_s(plan, cost), options.max_step_s
    if most is not None and step > most:
        return math.inf
    return compared_value(plan, options.objective, cost, step_s=step)


@dataclass
class Draw:
    """One draw of the measurements, and what plans are worth in it: one found for a draw is a rival in every other.

    Args:
        cost: Its prices.
        counts: The numbers of micro-batches that a search would look at there (`SolveOptions.counts`): with others the
            line through the draw's measurements promises what no machine does.
        values: Of the plans so far, the chosen one first.
    """

    cost: CostModel
    counts: frozenset[int]
    values: list[float] = field(default_factory=list)

    def price(self, plans: Sequence[Plan], options: SolveOptions) -> None:
        """Price the plans that are new; inf: a rival with a number of micro-batches that a search would not look at."""
        self.values += [
            value_of(plan, options, self.cost) if plan is plans[0] or plan.micro_batches in self.counts else math.inf
            for plan in plans[len(self.values) :]
        ]

    @property
    def regret(self) -> float:
        """How much worse the chosen plan is than the best one, as a share of the best one's value."""
        value, best = self.values[0], min(self.values)
        if value == best:
            return 0.0
        return value / best - 1 if best > 0 else math.inf


def _same(one: Plan, other: Plan) -> bool:
    """True if two plans run the same: their predictions and reports play no part."""
    return (one.schedule, one.micro_batches, one.micro_batch_size, one.stages, one.orders) == (
        other.schedule, other.micro_batches, other.micro_batch_size, other.stages, other.orders,
    )  # fmt: skip
