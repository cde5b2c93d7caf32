"""How a plan holds up where its measurements were off, on one screen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from assigner import formatting as fmt
from assigner.formats.document import encode
from assigner.report.plan import searched
from assigner.report.sheet import Column, Line, Report, Sheet

if TYPE_CHECKING:
    from assigner.solver.robust.robustness import Robustness

_STEADY, _MOSTLY = 0.9, 0.5
"""From these shares of draws near the best on, a plan is called steady, and mostly steady."""
_BEST = {"step": "step time", "throughput": "throughput", "latency": "latency", "cost": "cost"}


def robustness_report(found: Robustness) -> Report:
    """What `assigner solve --robust` prints beside the plan: steps, regrets, and a sentence of each."""
    if not found.coverage.varies:
        return (Line(f"robustness: {_covered(found)}, so nothing is known of how the step varies", "warning"),)
    return (_steps(found), _regrets(found), _conclusion(found), *_footing(found))


def _steps(found: Robustness) -> Sheet:
    """The plan's step, at the medians and where the measurements are off."""
    draws = fmt.plural(found.priced, "draw")
    steps = (
        ("at the medians", found.step_s),
        ("at the slow end: all at their upper quartile", found.slow_end_s),
        (f"5 % of {draws} are below", found.step_quantile_s(0.05)),
        (f"half of {draws} are below", found.step_quantile_s(0.5)),
        (f"95 % of {draws} are below", found.step_quantile_s(0.95)),
    )
    time = fmt.time_unit(*(step for _, step in steps))
    rows = tuple((name, time.show(step), fmt.change(step, found.step_s)) for name, step in steps)
    return Sheet("robustness", (Column("measurements", "name"), Column(f"step {time.name}"), Column("+/- %")), rows)


def _regrets(found: Robustness) -> Sheet:
    """How far behind the best plan of each draw it falls."""
    row = (
        (Column("draws solved again"), fmt.count(found.compared)),
        (Column(f"within {fmt.percent(found.within)}"), fmt.count(found.near_best)),
        (Column("share %"), fmt.points(found.share)),
        (Column("median regret %"), fmt.points(found.regret_quantile(0.5))),
        (Column("worst regret %"), fmt.points(found.worst_regret)),
    )
    return Sheet.of(f"{_BEST[found.objective]} against the best plan found {_searched(found)} for each draw", [row])


def _searched(found: Robustness) -> str:
    return searched(found.schedule, found.max_replicas or "all")


def _conclusion(found: Robustness) -> Line:
    draws, near = fmt.plural(found.compared, "draw"), f"within {fmt.percent(found.within)} of the best plan found"
    near = f"{near} {_searched(found)}"
    if found.near_best == found.compared:
        return Line(f"steady: {near} in every one of {draws}", "strong")
    often = f"in {found.near_best} of {draws}"
    is_allowed = math.isfinite(found.worst_regret)
    worst = f"{fmt.percent(found.worst_regret)} behind it" if is_allowed else "beyond the longest step allowed"
    rest = f"{near} {often}, {worst} at worst"
    if found.share >= _STEADY:
        return Line(f"steady: {rest}", "strong")
    if found.share >= _MOSTLY:
        return Line(f"mostly steady: {rest}")
    return Line(f"hangs on its measurements: {rest}", "warning")


def _footing(found: Robustness) -> Report:
    """What the figures rest on."""
    lines = [Line(f"{_covered(found)}; the best plan of a draw is the best one found, without a proof")]
    if found.priced < found.asked:
        lines.append(Line(f"time for {found.priced} of {fmt.plural(found.asked, 'draw')}", "warning"))
    if found.compared < found.priced:
        lines.append(Line(f"time to solve {found.compared} of {fmt.plural(found.priced, 'draw')} again", "warning"))
    return tuple(lines)


def _covered(found: Robustness) -> str:
    told = found.coverage
    measurements = f"{told.measurements_spread:,} of {fmt.plural(told.measurements, 'measurement')}"
    if not told.points:
        return f"{measurements} carry a spread"
    points = f"{told.points_spread:,} of {fmt.plural(told.points, 'point')} of links and collectives"
    return f"{measurements} and {points} carry a spread"


def draws_text(done: int, asked: int, *, elapsed_s: float, time_limit: float) -> str:
    """One line on an assessment under way."""
    return f"{done} of {fmt.plural(asked, 'draw')} solved again · {elapsed_s:.0f} s of {time_limit:.0f} s"


def robustness_data(found: Robustness) -> dict[str, Any]:
    """The same for `--json`, with every draw; a regret of None breaks the limit of the step time."""
    return {
        "kind": "robustness",
        "objective": found.objective,
        "schedule": found.schedule,
        "step_s": found.step_s,
        "slow_end_s": found.slow_end_s,
        "step_quantiles_s": {str(share): found.step_quantile_s(share) for share in (0.05, 0.5, 0.95)},
        "within": found.within,
        "near_best": found.near_best,
        "asked": found.asked,
        "priced": found.priced,
        "compared": found.compared,
        "share": found.share,
        "seed": found.seed,
        "seconds": found.seconds,
        "coverage": encode(found.coverage),
        "steps_s": list(found.steps_s),
        "regrets": [regret if math.isfinite(regret) else None for regret in found.regrets],
    }
