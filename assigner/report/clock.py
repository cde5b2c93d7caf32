"""The clock table: which micro-batch is where, in the order of the plan's program.

    2 stages, M = 3         tick   0  1  2  3  4  5  6  7
                            0      F0 F1 F2 .  .  B2 B1 B0
                            1      .  F0 F1 F2 B2 B1 B0 .

Every forward and every backward takes one tick and a message none, so the table shows order and dependencies, not
seconds: an action stands at the first tick at which its worker is free and all that it needs was made before. It is the
table of clock cycles of torchgpipe (Kim et al., 2020, arXiv 2004.09910, section 3.2), for any schedule.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from assigner import formatting as fmt
from assigner.errors import FormatError
from assigner.formats.orders import WEIGHT
from assigner.formats.profile import Edge
from assigner.report.sheet import Line, Report, Strip
from assigner.schedule.orders import LETTERS
from assigner.schedule.program import ActionKind, build_program, grouped
from assigner.schedule.queues import Job, run_queues

if TYPE_CHECKING:
    from assigner.formats.plan import Plan
    from assigner.formats.profile import Profile
    from assigner.schedule.program import ActionGroup, Route
    from assigner.schedule.queues import Arrivals, Timed

STAGE_LIMIT = 16
"""Stages above which those in the middle are left out."""
CELL_LIMIT = 200_000
"""Cells, of all stages at all ticks, above which there is no table."""
LONGEST = 400_000
"""Forwards and backwards, see `is_long`: some seconds."""

_IDLE = "."


class Placed(NamedTuple):
    """One forward or backward at its tick."""

    stage: int
    worker: str
    kind: ActionKind
    micro_batch: int
    tick: int


def is_long(plan: Plan, *, times: int = 1) -> bool:
    """Whether so many times the forwards and backwards of a step are too many to be gone through for a report."""
    return 2 * plan.micro_batches * max(len(plan.stages), len(plan.workers)) * times > LONGEST


def clock(plan: Plan, profile: Profile | None = None) -> tuple[Placed, ...]:
    """All of a step's forwards and backwards, stage by stage in the order of their ticks.

    Without a profile, which knows which stage needs which, each is taken to need the one before it.

    Raises:
        FormatError: the plan's program cannot run.
    """
    if profile is None:
        program = build_program(plan, [Edge(a.partitions[-1], b.partitions[0], 0) for a, b in pairwise(plan.stages)])
    else:
        program = build_program(plan, profile.edges, profile.ties)
    number = {worker: n for n, worker in enumerate(program.actions)}
    groups = [[each for each in grouped(mine) if each.action.kind in LETTERS] for mine in program.actions.values()]
    there: dict[Route, Arrivals] = defaultdict(lambda: [-1.0] * plan.micro_batches)

    def job(group: ActionGroup) -> Job:
        """One tick long; its messages take no time, so that those of a worker have one link."""
        routes = [send.route for send in group.sends if send.route]
        made = ((there[route], number[route.source], 0.0, number[route.target]) for route in routes)
        return Job(1.0, tuple(there[route] for route in group.receives), 0.0, tuple(made))

    log: list[Timed] = []
    done, _ = run_queues([[(job(each), each.action.micro_batch) for each in mine] for mine in groups], log)
    for worker, mine, count in zip(number, groups, done, strict=True):
        if count < len(mine):
            action = mine[count].action
            raise FormatError(f"{worker} waits for ever before {action.kind} of stage {action.stage}")
    placed = ((groups[timed.worker][timed.job].action, int(timed.start_s), timed.worker) for timed in log)
    workers = list(number)
    return tuple(
        Placed(action.stage, workers[n], action.kind, action.micro_batch, tick)
        for action, tick, n in sorted(placed, key=lambda each: (each[0].stage, *each[1:]))
    )


def legend(plan: Plan) -> str:
    """What the letters of a plan's steps mean."""
    parts = any(step.letter == WEIGHT for steps in plan.listed.values() for step in steps)
    return "F forward, B backward" + (", I its input part, W its weight part" if parts else "")


def _is_large(plan: Plan) -> bool:
    """Whether the table has too many cells: a row for each replica, about two ticks for each micro-batch and stage."""
    rows = sum(len(stage.workers) for stage in plan.stages)
    return 2 * (plan.micro_batches + len(plan.stages)) * rows > CELL_LIMIT


def clock_table(plan: Plan, profile: Profile | None = None, *, everything: bool = False) -> Report:
    """The table as it is shown, of all stages or of so many; a sentence where the plan cannot run or is too large."""
    if _is_large(plan):
        size = f"{fmt.plural(plan.micro_batches, 'micro-batch')} on {fmt.plural(len(plan.workers), 'worker')}"
        return (Line(f"no clock table: {size} are too many for one"),)
    try:
        found = clock(plan, profile)
    except FormatError as error:
        why = "" if profile else " (each stage taken to need the one before it; --profile PROFILE knows better)"
        return (Line(f"no clock table: {error.message}{why}", "warning"),)
    cells = {(each.stage, each.worker, each.tick): f"{LETTERS[each.kind]}{each.micro_batch}" for each in found}
    count = len(plan.stages)
    shown = list(range(count))
    if count > STAGE_LIMIT and not everything:
        shown = [*shown[: STAGE_LIMIT // 2], *shown[-STAGE_LIMIT // 2 :]]
    ticks = range(1 + max(each.tick for each in found))
    rows = tuple(
        (f"{n} {worker}", tuple(cells.get((n, worker, tick), _IDLE) for tick in ticks))
        for n in shown
        for worker in plan.stages[n].workers
    )
    title = f"clock: which micro-batch is where ({legend(plan)}; not to scale)"
    if profile is None and count > 2:  # of two stages the second needs the first, whatever the graph
        title += "; each stage is taken to need the one before it"
    strip = Strip(title, ("tick", tuple(map(str, ticks))), rows, "".join(LETTERS.values()))
    if len(shown) == count:
        return (strip,)
    middle = fmt.plural(count - len(shown), "stage")
    return (strip, Line(f"{middle} between {shown[STAGE_LIMIT // 2 - 1]} and {shown[STAGE_LIMIT // 2]}: -v lists all"))


def clock_data(plan: Plan, profile: Profile | None = None) -> dict[str, Any] | None:
    """The same for `--json`, every stage; None: the plan cannot run, or the table is too large."""
    if _is_large(plan):
        return None
    try:
        found = clock(plan, profile)
    except FormatError:
        return None
    stages: list[list[dict[str, Any]]] = [[] for _ in plan.stages]
    for each in found:
        by = {"worker": each.worker} if plan.stages[each.stage].replicas else {}
        stages[each.stage].append({"tick": each.tick, "kind": each.kind.value, "micro_batch": each.micro_batch, **by})
    return {"ticks": 1 + max(each.tick for each in found), "exact": profile is not None, "stages": stages}
